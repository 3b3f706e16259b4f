"""The order of the house: nothing below imports anything above, and the core runs without torch."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import hybridkv

SOURCE = Path(hybridkv.__file__).parent
# From the ground floor up; modules on one line may import each other downwards only through the lines before.
FLOORS = ["errors", "units", "spec", "models", "plan", "cache", "memory", "kernels", "replay", "store", "stream"]
FLOORS += ["demo", "engine", "serve", "cli"]


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
