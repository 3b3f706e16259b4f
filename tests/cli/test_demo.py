"""`hybridkv demo`: a path on standard output and nothing else, for other commands to use."""

from __future__ import annotations

from pathlib import Path

import pytest

from hybridkv.cli.main import run
from hybridkv.demo import NOISE_NOTE


def test_it_prints_a_path_that_other_commands_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("HYBRIDKV_HOME", str(tmp_path))
    assert run(["demo"]) == 0
    captured = capsys.readouterr()
    assert captured.out == f"{tmp_path / 'demo-v1'}\n"
    assert captured.err == f"hybridkv: {NOISE_NOTE}\n"
    args = ["-p", "hello", "--max-tokens", "8", "--memory", "32MiB", "--device", "cpu"]
    assert run(["generate", captured.out.strip(), *args]) == 0
    assert capsys.readouterr().out.strip()


def test_a_directory_may_be_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["demo", str(tmp_path / "mine")]) == 0
    assert capsys.readouterr().out == f"{tmp_path / 'mine'}\n"
    assert (tmp_path / "mine" / "config.json").is_file()


def test_a_place_that_is_taken_is_one_line_and_code_2(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "notes.txt").write_text("mine")
    assert run(["demo", str(tmp_path)]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith(f"hybridkv: error: {tmp_path} exists and is not a whole demo model")
