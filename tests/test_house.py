"""The order of the house: nothing below imports anything above, and the core runs without torch."""

from __future__ import annotations

import ast
import os
import subprocess
import sys
from pathlib import Path

import pytest

import hybridkv

SOURCE = Path(hybridkv.__file__).parent
ROOT = Path(__file__).resolve().parents[1]
# From the ground floor up; modules on one line may import each other downwards only through the lines before.
FLOORS = [
    "errors",
    "renamed",
    "texts",
    "units",
    "files",
    "workers",
    "chats",
    "sight",
    "spec",
    "models",
    "plan",
    "cache",
    "memory",
    "kernels",
    "store",
    "stream",
    "replay",
    "taps",
    "link",
    "integrations",
]
FLOORS += ["engine", "demo", "serve", "route", "cli"]


def imported_floors(path: Path) -> set[str]:
    names: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.ImportFrom) and node.module and node.module.startswith("hybridkv."):
            names.add(node.module.split(".")[1])
        elif isinstance(node, ast.Import):
            names |= {alias.name.split(".")[1] for alias in node.names if alias.name.startswith("hybridkv.")}
    return names


@pytest.mark.parametrize("path", sorted(SOURCE.rglob("*.py")), ids=lambda path: str(path.relative_to(SOURCE)))
def test_imports_go_downwards(path: Path) -> None:
    relative = path.relative_to(SOURCE)
    if relative.name == "__init__.py" and len(relative.parts) == 1:
        return
    floor = FLOORS.index(relative.parts[0].removesuffix(".py"))
    assert imported_floors(path) <= set(FLOORS[: floor + 1])


def test_the_core_and_the_command_line_start_without_torch() -> None:
    code = "import sys, hybridkv.cli; sys.exit(any(m in sys.modules for m in ('torch', 'transformers')))"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


@pytest.mark.parametrize(("target", "runs"), [
    ("serve", ".venv/bin/hybridkv serve"),
    ("test", ".venv/bin/pytest -n 3 --dist worksteal --timings --sample 0"),
    ("test-all", ".venv/bin/pytest -n 3 --dist worksteal --timings"),
    ("test-more", ".venv/bin/pytest -n 3 --dist worksteal --timings --sample 0:0.7"),
    ("test-gpu", "PYTHONPATH=.fla:$PYTHONPATH .venv-gpu/bin/python -m pytest -n auto --maxprocesses 8 --timings "
     "-m cuda tests/engine tests/kernels tests/memory tests/stream"),
    ("prove-form", "HYBRIDKV_FORMS=1000 .venv/bin/pytest -n auto tests/stream/test_form.py"),
    ("prove-link", "HYBRIDKV_LINK_ROUNDS=50 .venv/bin/pytest -n auto tests/link/test_link_kills.py"),
    ("prove-taps", "HYBRIDKV_SAMPLES=10000 HYBRIDKV_KILLS=50 .venv/bin/pytest -n auto tests/taps "
     'tests/engine/test_hidden_states.py tests/cli/test_extract.py -k "random or kill"'),
    ("prove-vllm", "HYBRIDKV_VLLM_ROUNDS=40 .venv-vllm/bin/pytest tests_vllm/test_connector_faults.py -k random"),
    ("test-browser", ".venv/bin/pytest tests_browser"),
    ("test-vllm", ".venv-vllm/bin/pytest -n auto --dist loadfile tests_vllm"),
    ("test-speculators", ".venv-speculators/bin/pytest tests_speculators"),
    ("bench-gpu", ".venv/bin/python benchmarks/gpu_decode.py"),
    ("bench-hidden", ".venv/bin/python benchmarks/hidden_states.py"),
    ("bench-link", ".venv/bin/python benchmarks/link.py"),
    ("bench-serve", ".venv/bin/python benchmarks/serve_load.py"),
    ("bench-vllm", ".venv/bin/python benchmarks/vllm_connector.py"),
])  # fmt: skip
def test_make_does_what_it_says(target: str, runs: str) -> None:
    """A target that is written twice is only warned of, and the last one counts."""
    alone = {name: value for name, value in os.environ.items() if not name.startswith("MAKE")}
    told = subprocess.run(
        ["make", "-n", target, "WORKERS=3"], cwd=ROOT, env=alone, capture_output=True, text=True, check=True
    )
    assert told.stderr == ""
    assert told.stdout.strip().splitlines()[-1].strip() == runs
