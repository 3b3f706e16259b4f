"""The examples of docs/engine.md and the README run as they are printed, on a tiny checkpoint."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from tests.engine.checkpoints import save_checkpoint

ROOT = Path(__file__).parents[2]
STATED = '"/path/to/checkpoint"'


def examples(page: str) -> list[str]:
    """Blocks of Python that need a checkpoint; on the engine's own page all of them, one after another."""
    blocks = re.findall(r"^```python\n(.*?)^```", (ROOT / page).read_text(encoding="utf-8"), re.DOTALL | re.MULTILINE)
    return [block for block in blocks if page == "docs/engine.md" or STATED in block]


@pytest.mark.parametrize("page", ["docs/engine.md", "README.md"])
def test_examples_run(page: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    save_checkpoint("qwen3_next", tmp_path)
    names: dict[str, Any] = {}
    found = examples(page)
    assert any(STATED in block for block in found)
    for block in found:
        local = block.replace(STATED, repr(str(tmp_path))).replace('"2GiB"', '"32MiB"')
        exec(compile(local, page, "exec"), names)  # what it says is what a reader would run
    assert capsys.readouterr().out
