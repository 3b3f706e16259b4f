"""`hybridkv generate` and `hybridkv chat` on a tiny checkpoint, as people and scripts use them."""

from __future__ import annotations

import errno
import gzip
import io
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from hybridkv import Engine, SamplingParams
from hybridkv.cli.main import run
from tests.engine.checkpoints import save_checkpoint
from tests.engine.lora import directories
from tests.tiny import tiny_config

SMALL = ["--memory", "16MiB", "--device", "cpu"]
GREEDY = [*SMALL, "--temperature", "0", "--max-tokens", "8"]
SENTENCE = "The system keeps the pages that the next request will read."


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> str:
    directory = tmp_path_factory.mktemp("checkpoint")
    save_checkpoint("qwen3_next", directory)
    return str(directory)


def output(capsys: pytest.CaptureFixture[str], *args: str) -> str:
    """What a command that works prints: nothing but that, and nothing on stderr."""
    capsys.readouterr()
    assert run(list(args)) == 0
    captured = capsys.readouterr()
    assert captured.err == ""
    return captured.out


def reports(capsys: pytest.CaptureFixture[str], *args: str) -> list[Any]:
    return [json.loads(line) for line in output(capsys, "generate", *args, "--json").splitlines()]


def pipe_in(monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    monkeypatch.setattr(sys, "stdin", io.StringIO(text))


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


# --- generate ---------------------------------------------------------------------------------------------------------


def test_one_prompt_prints_the_reply_alone(checkpoint: str, capsys: pytest.CaptureFixture[str]) -> None:
    report = reports(capsys, checkpoint, "-p", SENTENCE, *GREEDY)[0]
    assert output(capsys, "generate", checkpoint, "-p", SENTENCE, *GREEDY) == report["text"] + "\n"


def test_compile_reaches_the_engine(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    save_checkpoint("llama4", tmp_path)  # which cannot be compiled
    assert run(["generate", str(tmp_path), "-p", "user", *GREEDY]) == 0
    assert run(["generate", str(tmp_path), "-p", "user", *GREEDY, "--compile"]) == 2
    assert "compile=True: layers of type 'llama4_text' cannot be compiled" in capsys.readouterr().err


def test_an_adapter_computes_all_prompts_of_a_command(
    checkpoint: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    adapter = ["--adapter", f"sql={directories('qwen3_next')['sql']}"]
    with Engine(checkpoint, memory="16MiB", device="cpu", adapters=directories("qwen3_next")) as engine:
        params = SamplingParams(temperature=0, max_tokens=8)
        [expected] = engine.generate(SENTENCE, params, adapter="sql", progress=False)
        chat = engine.render_chat([{"role": "user", "content": "user"}])
        [said] = engine.generate(chat, params, adapter="sql", progress=False)
    plain = reports(capsys, checkpoint, "-p", SENTENCE, *GREEDY)[0]
    assert reports(capsys, checkpoint, "-p", SENTENCE, *GREEDY, *adapter)[0]["token_ids"] == expected.token_ids
    assert plain["token_ids"] != expected.token_ids
    pipe_in(monkeypatch, "user\n")
    assert output(capsys, "chat", checkpoint, *GREEDY, *adapter) == f"{said.text}\n"


def test_several_prompts_are_told_apart(checkpoint: str, capsys: pytest.CaptureFixture[str]) -> None:
    texts = [one["text"] for one in reports(capsys, checkpoint, "-p", "A state", "-p", "user", *GREEDY)]
    printed = output(capsys, "generate", checkpoint, "-p", "A state", "-p", "user", *GREEDY)
    assert printed == f"> A state\n{texts[0]}\n> user\n{texts[1]}\n"


def test_json_has_all_that_is_promised(checkpoint: str, capsys: pytest.CaptureFixture[str]) -> None:
    report = reports(capsys, checkpoint, "-p", SENTENCE, *GREEDY)[0]
    assert set(report) == {
        "text", "token_ids", "finish_reason", "prompt_tokens", "cached_tokens", "completions", "metrics"
    }  # fmt: skip
    assert set(report["metrics"]) == {"queue_s", "ttft_s", "total_s", "per_token_s", "preemptions"}
    assert (report["finish_reason"], len(report["token_ids"]), report["cached_tokens"]) == ("length", 8, 0)
    assert report["completions"] == [
        {"index": 0, "error": None, **{key: report[key] for key in ("text", "token_ids", "finish_reason")}}
    ]


def test_a_file_of_texts(checkpoint: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "prompts.txt"
    path.write_text("A state\n\nuser\n")
    expected = reports(capsys, checkpoint, "-p", "A state", "-p", "user", *GREEDY)
    found = reports(capsys, checkpoint, "--file", str(path), *GREEDY)
    assert [one["token_ids"] for one in found] == [one["token_ids"] for one in expected]


def test_a_file_of_json_lines(checkpoint: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    tokens = list(range(10, 70))
    path = tmp_path / "prompts.jsonl"
    lines = [{"token_ids": tokens}, {"prompt": "A state"}, {"token_ids": [*tokens[:50], 5]}]
    path.write_text("\n".join(map(json.dumps, lines)))
    packed = tmp_path / "prompts.jsonl.gz"
    packed.write_bytes(gzip.compress(path.read_bytes()))
    found = reports(capsys, checkpoint, "-f", str(packed), *GREEDY)
    plain = reports(capsys, checkpoint, "-p", "A state", *GREEDY)[0]
    assert [one["prompt_tokens"] for one in found] == [60, plain["prompt_tokens"], 51]
    assert found[1]["token_ids"] == plain["token_ids"]
    assert found[2]["cached_tokens"] == 48  # the third prompt waits for what it shares with the first
    assert "> 60 tokens\n" in output(capsys, "generate", checkpoint, "-f", str(path), *GREEDY)


@pytest.mark.parametrize("end", ["", "\n"])
def test_a_prompt_from_standard_input(
    end: str, checkpoint: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    expected = output(capsys, "generate", checkpoint, "-p", SENTENCE, *GREEDY)
    pipe_in(monkeypatch, SENTENCE + end)
    assert output(capsys, "generate", checkpoint, *GREEDY) == expected


def test_n_replies_and_seeds(checkpoint: str, capsys: pytest.CaptureFixture[str]) -> None:
    def tokens(seed: int) -> list[list[int]]:
        args = ["-p", SENTENCE, "-n", "2", "--seed", str(seed), "--max-tokens", "8", "--top-k", "50", "--top-p", "0.9"]
        report = reports(capsys, checkpoint, *args, *SMALL)[0]
        return [one["token_ids"] for one in report["completions"]]

    first = tokens(1)
    assert first[0] != first[1]
    assert tokens(1) == first
    assert tokens(2) != first


def test_stop_texts(checkpoint: str, capsys: pytest.CaptureFixture[str]) -> None:
    full = reports(capsys, checkpoint, "-p", SENTENCE, *GREEDY)[0]["text"]
    piece = full[2:4]
    report = reports(capsys, checkpoint, "-p", SENTENCE, "--stop", "never said", "--stop", piece, *GREEDY)[0]
    assert (report["text"], report["finish_reason"]) == (full[: full.index(piece)], "stop")


def test_a_reply_sent_to_a_file_is_all_that_is_in_it(checkpoint: str) -> None:
    """In a process of its own: nothing that torch or transformers print may reach either stream."""
    command = [str(Path(sys.executable).with_name("hybridkv")), "generate", checkpoint, "-p", SENTENCE, *GREEDY]
    done = subprocess.run(command, capture_output=True, text=True, check=True, stdin=subprocess.DEVNULL)
    assert done.stderr == ""
    assert done.stdout.endswith("\n")
    assert "Loading" not in done.stdout + done.stderr


def test_progress_on_a_terminal_does_not_mix_with_the_reply(
    checkpoint: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    expected = output(capsys, "generate", checkpoint, "-p", SENTENCE, *GREEDY)
    screen = Terminal()
    monkeypatch.setattr(sys, "stderr", screen)
    monkeypatch.setenv("TERM", "xterm")
    assert output(capsys, "generate", checkpoint, "-p", SENTENCE, *GREEDY) == expected
    assert "Generating" in screen.getvalue()


# --- errors -----------------------------------------------------------------------------------------------------------


def complaint(capsys: pytest.CaptureFixture[str], args: Sequence[str]) -> str:
    capsys.readouterr()
    assert run(list(args)) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith("hybridkv: error: ")
    assert captured.err.count("\n") == 1
    return captured.err


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (["-p", "x", "-f", "some.txt"], "both --prompt and --file"),
        (["-f", "missing.txt"], "cannot read missing.txt"),
        (["-f", sys.executable], "it is no text in UTF-8"),
        (["-p", "x", "--nonsense"], "(see 'hybridkv generate --help')"),
        (["-p", "x", "--stream", "async"], "stream 'async' without a store"),
        (["-p", "x", "--temperature", "-1"], "temperature is -1.0"),
        (["-p", "x", "--temperature", "nan"], "temperature is nan"),
        (["-p", "x", "--temperature", "warm"], "--temperature"),
        (["-p", "x", "--top-p", "0"], "top_p is 0.0"),
        (["-p", "x", "--max-tokens", "0"], "max_tokens is 0"),
        (["-p", "x", "-n", "0"], "n is 0"),
        (["-p", "x", "--stop", ""], "stop is ''"),
        (["-p", "x", "--memory", "1000"], "too little"),
        (["-p", "x", "--memory", "much"], "'much'"),
        (["-p", "x", "--device", "abacus"], "unknown device 'abacus'"),
        (["-p", "x", "--dtype", "int3"], "cannot compute in 'int3': choose auto, float32, bfloat16, float16"),
        (["-p", "x", "--dtype", "fp8"], "cannot compute in 'fp8'"),
        (["-p", ""], "prompt is empty"),
        (["-p", "x" * 2000], "must stay within 512"),
        (["-p", "\udcff"], "bytes that are no text"),
    ],
)
def test_nonsense_gets_one_line_and_exit_code_2(
    args: list[str], words: str, checkpoint: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert words in complaint(capsys, ["generate", checkpoint, *SMALL, *args])


@pytest.mark.parametrize("command", ["generate", "chat"])
def test_models_that_are_not_there_or_not_served(
    command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def say(model: Path) -> str:
        pipe_in(monkeypatch, "hello\n")
        return complaint(capsys, [command, str(model), *SMALL])

    assert "no directory" in say(tmp_path / "nothing")
    assert "has no config.json" in say(tmp_path)
    tiny_config("longcat_flash").save_pretrained(tmp_path / "longcat_flash")
    assert "'longcat_flash', which the engine does not run" in say(tmp_path / "longcat_flash")


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("not json", "expected an object"),
        ("[1, 2]", "expected an object"),
        ("7", "expected an object"),
        ('{"text": "x"}', "expected an object"),
        ("[" * 100_000 + "]" * 100_000, "expected an object"),
        ('{"prompt": 7}', "a text or a list of token ids"),
        ('{"token_ids": [1, "2"]}', "a text or a list of token ids"),
        ('{"token_ids": [true]}', "a text or a list of token ids"),
    ],
)
def test_bad_json_lines_are_named(line: str, words: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "prompts.jsonl"
    path.write_text('{"prompt": "fine"}\n' + line + "\n")
    error = complaint(capsys, ["generate", "no model is needed for this", "-f", str(path)])
    assert "line 2" in error
    assert words in error


def test_files_that_are_no_prompts(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "prompts.txt"
    for content, words in ((b"", "has no prompts"), (b"\n \n", "has no prompts"), (b"\xff\xfe", "cannot read")):
        path.write_bytes(content)
        assert words in complaint(capsys, ["generate", "x", "-f", str(path)])


def test_a_file_that_cannot_be_read_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    error = complaint(capsys, ["generate", "x", "-f", str(tmp_path)])
    assert f"cannot read {tmp_path}: it is a directory, not a regular file; name a file" in error


def test_a_dash_is_standard_input_by_line(
    checkpoint: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pipe_in(monkeypatch, "one\n\ntwo\n")
    assert len(reports(capsys, checkpoint, "-f", "-", *GREEDY)) == 2


def test_only_a_newline_ends_a_line_of_a_file(
    checkpoint: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "prompts.jsonl"
    path.write_text(json.dumps({"prompt": "one\u2028line"}, ensure_ascii=False) + "\r\n", encoding="utf-8", newline="")
    assert len(reports(capsys, checkpoint, "-f", str(path), *GREEDY)) == 1


@pytest.mark.parametrize("options", [[], ["--json"]])
def test_a_reply_that_fails_takes_no_other_along(
    options: list[str], checkpoint: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from hybridkv.engine import Completion, Engine, Metrics, Result

    def generate(engine: Engine, prompts: list[str], *args: Any, **kwargs: Any) -> list[Result]:
        failed = Completion(0, [], "", "error", None, None, "no logits")
        fine = Completion(0, [5], "fine", "stop", None, None)
        return [Result("a", [5], 0, [one], Metrics(0.0, 0.0, 0.0, 0.0, 0)) for one in (failed, fine)]

    monkeypatch.setattr(Engine, "generate", generate)
    capsys.readouterr()
    assert run(["generate", checkpoint, "-p", "one", "-p", "two", *GREEDY, *options]) == 1
    captured = capsys.readouterr()
    assert "fine" in captured.out
    assert captured.err == "hybridkv: error: 1 of 2 replies failed: no logits\n"


@pytest.mark.parametrize("stdin", [io.StringIO(""), io.StringIO("\n"), Terminal("typed")])
def test_no_prompt_at_all(
    stdin: io.StringIO, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "stdin", stdin)
    assert "no prompt" in complaint(capsys, ["generate", "no model is needed for this"])


def test_standard_input_that_is_no_text(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"\xff\xfe"), encoding="utf-8"))
    assert "standard input" in complaint(capsys, ["generate", "no model is needed for this"])


# --- chat -------------------------------------------------------------------------------------------------------------


def script(monkeypatch: pytest.MonkeyPatch, *lines: str | type[BaseException]) -> list[str | type[BaseException]]:
    """Type these lines, then Ctrl-D; returns those that were not asked for."""
    left = list(lines)

    def typed(prompt: str = "") -> str:
        line = left.pop(0) if left else EOFError
        if isinstance(line, str):
            return line
        raise line

    monkeypatch.setattr("builtins.input", typed)
    return left


def chat(capsys: pytest.CaptureFixture[str], *args: str) -> tuple[str, str]:
    capsys.readouterr()
    assert run(["chat", *args, *GREEDY]) == 0
    captured = capsys.readouterr()
    return captured.out, captured.err


def test_a_conversation_resumes(
    checkpoint: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    script(monkeypatch, SENTENCE, "And then?")
    replies, stats = chat(
        capsys, checkpoint, "--stats", "--system-prompt", "A state remembers what the window forgets."
    )
    first, second = stats.splitlines()
    assert ", 0 of them cached" in first
    cached = int(second.split(" of them cached")[0].split()[-1])
    prompt_tokens = int(first.removeprefix("[").split()[0])
    assert prompt_tokens - 16 <= cached < int(second.removeprefix("[").split()[0])
    assert replies.strip()


def test_a_conversation_through_pipes_is_the_replies_alone(
    checkpoint: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pipe_in(monkeypatch, "user\nassistant\n")
    replies, _ = chat(capsys, checkpoint)
    assert ">" not in replies
    assert replies.endswith("\n")
    assert not replies.endswith("\n\n")


def test_messages_that_are_no_text(
    checkpoint: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"\xff\xfe\n"), encoding="utf-8"))
    assert "cannot read a message" in complaint(capsys, ["chat", checkpoint, *GREEDY])


def test_a_reader_that_leaves_a_conversation_is_no_error(
    checkpoint: str, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    class Gone(io.StringIO):
        def write(self, text: str) -> int:
            raise BrokenPipeError(errno.EPIPE, "Broken pipe")

        def fileno(self) -> int:
            return os.open(os.devnull, os.O_WRONLY)

    script(monkeypatch, "user")
    monkeypatch.setattr(sys, "stdout", Gone())
    assert run(["chat", checkpoint, *GREEDY]) == 0


def test_a_model_without_a_template_says_so_before_anybody_types(
    checkpoint: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    bare = shutil.copytree(checkpoint, tmp_path / "bare", ignore=shutil.ignore_patterns("*.jinja"))
    left = script(monkeypatch, "never asked")
    error = complaint(capsys, ["chat", str(bare), *GREEDY])
    assert "bare cannot chat: this model's tokenizer has no chat template" in error
    assert "hybridkv generate" in error
    assert left == ["never asked"]


def test_without_stats_stderr_stays_quiet(
    checkpoint: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    script(monkeypatch, "user")
    assert chat(capsys, checkpoint)[1] == ""


@pytest.mark.parametrize("end", ["", "   ", EOFError, KeyboardInterrupt])
def test_how_a_conversation_ends(
    end: str | type[BaseException], checkpoint: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    left = script(monkeypatch, end, "never asked")
    assert chat(capsys, checkpoint)[0].strip() == ""
    assert left == ["never asked"]


def test_a_conversation_that_grows_too_long_ends_with_an_error(
    checkpoint: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    script(monkeypatch, "x" * 600)
    assert "must stay within 512" in complaint(capsys, ["chat", checkpoint, *GREEDY])


@pytest.mark.parametrize(("has_text", "shown"), [(True, "\n"), (False, "2\n")])
def test_a_reply_that_ends_at_once_is_empty_not_its_token_ids(
    has_text: bool, shown: str, capsys: pytest.CaptureFixture[str]
) -> None:
    from hybridkv.cli.generate import _show
    from hybridkv.engine import Completion, Metrics, Result

    ended = Completion(0, [2], "", "stop", None, None)
    _show(Result("a", [5], 0, [ended], Metrics(0.0, 0.0, 0.0, 0.0, 0)), None, has_text)
    assert capsys.readouterr().out == shown
