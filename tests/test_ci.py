"""`.ci/run`: its parts are targets of make, start in order, and end in a table."""

from __future__ import annotations

import re
import runpy
import subprocess
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[1]
CI: Any = runpy.run_path(str(ROOT / ".ci/parts.py"))


def test_parts_are_targets_and_in_the_table_of_the_docs() -> None:
    targets = set(re.findall(r"^([\w-]+):.*##", (ROOT / "Makefile").read_text(encoding="utf-8"), re.M))
    names = {part.name for part in CI["PARTS"]}
    assert names <= targets
    listed = CI["stated_seconds"]().keys()
    assert {name for name in names if not name.startswith("setup")} - {"test-gpu"} <= listed


@pytest.mark.parametrize("shell", [[], ["sh"], ["bash"]])
def test_any_shell_starts_the_parts(shell: list[str], tmp_path: Path) -> None:
    folder = tmp_path / ".ci"
    folder.mkdir()
    (folder / "run").write_bytes((ROOT / ".ci/run").read_bytes())
    (folder / "run").chmod(0o755)
    (folder / "parts.py").write_text("import os\nprint(os.getcwd())\nraise SystemExit(3)\n")
    ended = subprocess.run([*shell, folder / "run"], cwd="/", capture_output=True, text=True, timeout=60)
    assert (ended.returncode, ended.stdout.strip()) == (3, str(tmp_path))


Part: Any = CI["Part"]


class Step(Part):  # type: ignore[misc]
    """A part that runs nothing."""

    def run(self) -> str:
        RAN.append(self.name)
        self.seconds = 200.0
        return "it failed" if self.name == "bad" else ""


RAN: list[str] = []


@pytest.fixture(autouse=True)
def _afresh() -> None:
    RAN.clear()


def test_a_part_starts_after_those_that_it_needs() -> None:
    assert CI["run_all"]([Step("c", ["b"]), Step("a"), Step("b", ["a"])])
    assert RAN == ["a", "b", "c"]


def test_nothing_starts_after_a_failure() -> None:
    assert not CI["run_all"]([Step("bad"), Step("next", ["bad"])])
    assert RAN == ["bad"]


def test_the_table_names_parts_that_have_grown(capsys: pytest.CaptureFixture[str]) -> None:
    lint, setup = Step("lint"), Step("setup")
    lint.seconds, setup.seconds, lint.tests = CI["stated_seconds"]()["lint"] + 100, 9000.0, 3
    CI["show"]([lint, setup])
    lines = capsys.readouterr().out.splitlines()
    assert lines[1].split() == ["part", "tests", "seconds"]
    assert lines[2].split() == ["lint", "3", f"{lint.seconds:.0f}"]
    assert lines[-1] == "warning: lint took 100 s longer than the table in docs/testing.md says"
