"""The example of docs/taps.md runs as printed."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.taps.samples import fill

PAGE = Path(__file__).parents[2] / "docs/taps.md"


def test_the_example_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fill(tmp_path / "taps", 3)
    monkeypatch.chdir(tmp_path)
    [example] = re.findall(r"^```python\n(.*?)^```", PAGE.read_text(encoding="utf-8"), re.DOTALL | re.MULTILINE)
    names: dict[str, object] = {}
    exec(compile(example, str(PAGE), "exec"), names)
    assert names["epoch"] == 1
