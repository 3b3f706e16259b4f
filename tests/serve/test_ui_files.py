"""Files of the page: what its content policy refuses must not be in them, and nothing comes from elsewhere."""

from __future__ import annotations

import re
from importlib import resources
from pathlib import Path

import pytest

UI = Path(str(resources.files("hybridkv.serve"))) / "ui"
FILES = sorted(UI.iterdir())
SCRIPTS = [path for path in FILES if path.suffix == ".js"]
SINKS = re.compile(
    r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|\beval\b|new Function|setHTML|createContextualFragment"
    r"|DOMParser|srcdoc|javascript:|localStorage|document\.cookie|window\.confirm"
)
NAMESPACE = "http://www.w3.org/2000/svg"


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.name)
def test_a_file_has_no_markup_sink_and_no_address_of_elsewhere(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    assert SINKS.findall(text) == []
    assert [url for url in re.findall(r"\b(?:https?|wss?):[^\s\"'`)]*", text) if url != NAMESPACE] == []
    assert len(text.splitlines()) <= 250


@pytest.mark.parametrize("path", SCRIPTS, ids=lambda path: path.name)
def test_imports_are_of_files_beside(path: Path) -> None:
    names = re.findall(r"from \"([^\"]+)\"", path.read_text(encoding="utf-8"))
    assert [name for name in names if not (name.startswith("./") and (UI / name).is_file())] == []


def test_the_shell_has_no_inline_script_and_no_inline_style() -> None:
    shell = (UI / "index.html").read_text(encoding="utf-8")
    assert re.findall(r"<script(?![^>]*\bsrc=)|<style|\sstyle=|\son\w+=", shell) == []
    named = re.findall(r"(?:src|href)=\"(/[^\"]*)\"", shell)
    assert [name for name in named if not (UI / name.removeprefix("/ui/")).is_file()] == []
