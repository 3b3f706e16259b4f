"""`hybridkv demo`: its acts in the terminal, a path for other commands, and figures for scripts."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from hybridkv.cli.main import run
from hybridkv.demo import Question, demo_model, demo_questions, files
from tests import warm
from tests.cli.test_interrupts import AT_IMPORT, INTERRUPT, MAIN
from tests.engine.checkpoints import save_checkpoint

PATIENCE_S = 120.0
DOCUMENT = "The system keeps the pages that the next request will read. A state remembers what the window forgets. " * 9


def play_tiny(
    expected: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], *args: str
) -> tuple[int, list[str]]:
    """The whole command on a tiny model: exit code and lines."""
    save_checkpoint("qwen3_next", tmp_path / "tiny")
    (tmp_path / "temporary").mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "temporary"))
    monkeypatch.setattr("hybridkv.cli.demo.demo_model", lambda: tmp_path / "tiny")
    monkeypatch.setattr("hybridkv.cli.demo.demo_document", lambda: DOCUMENT)
    questions = [Question(f"Who keeps {number} pages?", expected) for number in range(3)]
    monkeypatch.setattr("hybridkv.cli.demo.demo_questions", lambda: questions)
    capsys.readouterr()
    code = run(["demo", "--device", "cpu", *args])
    captured = capsys.readouterr()
    assert captured.err == ""
    assert list((tmp_path / "temporary").iterdir()) == []
    return code, captured.out.splitlines()


# --- acts -------------------------------------------------------------------------------------------------------------


def test_every_act_is_shown_and_right_answers_are_exit_code_0(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    code, lines = play_tiny("", tmp_path, monkeypatch, capsys, "--json")
    text = "\n".join(lines)
    assert code == 0
    for words in (
        "tiny on cpu: ",
        "1  A document is read",
        "2  More questions about it",
        "3  The engine restarts",
        "4  A stored object is damaged",
        "   > Who keeps 0 pages?",
        "   0 of ",
        "   without the cache after ",
        " times as long",
        " tokens loaded from disk, ",
        ", layer by layer; first token after ",
        "   8 bytes are flipped in full/",
        "   corrupt objects noticed: 1; ",
        "   log: ",
        "   from memory ",
        "✓ All 7 answers are right",
        'hybridkv chat "$(hybridkv demo --path)"',
    ):
        assert words in text, words
    assert "✗" not in text
    assert "\x1b" not in text
    assert not any(line.endswith(" ") for line in lines)
    figures = json.loads(lines[-1])
    assert figures["problems"] == []
    assert [one["cached"]["question"] for one in figures["comparisons"]] == ["Who keeps 1 pages?", "Who keeps 2 pages?"]
    assert figures["restart"]["loaded_tokens"] > 0


def test_a_wrong_answer_is_marked_and_exit_code_1(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    code, lines = play_tiny("Carrow", tmp_path, monkeypatch, capsys)
    text = "\n".join(lines)
    assert code == 1
    assert "(expected: Carrow)" in text
    assert "✗ 7 of 7 answers are wrong." in lines
    assert "✓" not in text
    assert "   ✗ without the cache: " in text
    assert not lines[-1].startswith("{")


def test_the_demo_model_answers_all_questions(capsys: pytest.CaptureFixture[str]) -> None:
    code = run(["demo", "--json", "--device", "cpu"])
    figures = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert figures["problems"] == []
    assert code == 0
    assert len(figures["comparisons"]) == len(demo_questions()) - 1
    assert figures["first_token_s"]["from memory"] < figures["first_token_s"]["computed"]


# --- the path ---------------------------------------------------------------------------------------------------------


def test_its_path_is_for_other_commands(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["demo", "--path"]) == 0
    captured = capsys.readouterr()
    assert (captured.out, captured.err) == (f"{demo_model()}\n", "")
    args = ["-p", "hello", "--max-tokens", "8", "--memory", "32MiB", "--device", "cpu"]
    assert run(["generate", captured.out.strip(), *args]) == 0
    assert capsys.readouterr().out.strip()


@pytest.mark.parametrize("args", [["demo"], ["demo", "--path"], ["serve", "--port", "0"]])
def test_files_that_are_missing_are_one_line_and_exit_code_2(
    args: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(files, "_HERE", tmp_path)
    monkeypatch.setattr("hybridkv.serve.set_up_logs", lambda log_format, level: None)
    assert run(args) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith(f"hybridkv: error: the demo model in {tmp_path / 'hybridkv-demo'} lacks config.json")


def test_a_device_that_is_not_there_is_exit_code_2(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["demo", "--device", "nonsense"]) == 2
    assert "nonsense" in capsys.readouterr().err


# --- interrupts -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("line", ["1  A document", "2  More questions", "3  The engine"])
def test_an_interrupt_leaves_no_files(line: str, tmp_path: Path) -> None:
    command = [str(Path(sys.executable).with_name("hybridkv")), "demo", "--device", "cpu"]
    process = warm.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "TMPDIR": str(tmp_path), "PYTHONUNBUFFERED": "1"},
    )
    try:
        assert process.stdout is not None
        assert any(shown.startswith(line) for shown in process.stdout)
        assert list(tmp_path.glob("hybridkv-demo-*"))
        process.send_signal(signal.SIGINT)
        _, errors = process.communicate(timeout=PATIENCE_S)
    finally:
        process.kill()
    assert (process.returncode, errors) == (130, "")
    assert list(tmp_path.glob("hybridkv-demo-*")) == []


def test_an_interrupt_while_torch_is_imported_leaves_no_files(tmp_path: Path) -> None:
    code = AT_IMPORT.format(module="torch", action=INTERRUPT) + MAIN
    environment = {**os.environ, "TMPDIR": str(tmp_path)}
    done = subprocess.run([sys.executable, "-c", code, "demo"], capture_output=True, text=True, env=environment)
    assert (done.returncode, done.stderr) == (130, "")
    assert list(tmp_path.iterdir()) == []
