"""`hybridkv extract` on a tiny checkpoint: what it writes, how it resumes, what it refuses."""

from __future__ import annotations

import errno
import json
import os
import random
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from hybridkv import taps
from hybridkv.cli.main import run
from tests import warm
from tests.cli.extract_processes import KILLS, PARTS
from tests.engine.checkpoints import save_checkpoint, tokenizer
from tests.engine.lora import directories
from tests.engine.reference import by_torch

SAMPLES = int(os.environ.get("HYBRIDKV_SAMPLES", "100"))
SMALL = ["--memory", "16MiB", "--device", "cpu"]
CHAT = [{"role": "user", "content": "The user asks"}, {"role": "assistant", "content": "and the assistant answers."}]
Line = dict[str, Any]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> str:
    directory = tmp_path_factory.mktemp("checkpoint")
    save_checkpoint("qwen3_next", directory)
    return str(directory)


def write_lines(directory: Path, lines: Sequence[Line]) -> Path:
    path = directory / "prompts.jsonl"
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def random_ids(count: int, most: int = 90, seed: int = 0) -> list[Line]:
    """Token ids; half of the prompts begin like an earlier one, so that the cache supplies a part."""
    source, prompts = random.Random(seed), list[list[int]]()
    for number in range(count):
        start = prompts[source.randrange(number)][: source.randrange(1, most)] if number % 2 else []
        more = source.randrange(1, most) if len(start) < most else 1
        prompts.append([*start, *(source.randrange(10, 290) for _ in range(more))][:most])
    return [{"input_ids": prompt} for prompt in prompts]


def extract(capsys: pytest.CaptureFixture[str], model: str, source: Path, out: Path, *args: str) -> str:
    capsys.readouterr()
    assert run(["extract", model, "-i", str(source), "-o", str(out), *SMALL, *args]) == 0, capsys.readouterr().err
    captured = capsys.readouterr()
    assert captured.err == ""
    return captured.out


def complaint(capsys: pytest.CaptureFixture[str], code: int, *args: str) -> str:
    capsys.readouterr()
    assert run(["extract", *args]) == code
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith("hybridkv: error: ")
    assert captured.err.count("\n") == 1
    return captured.err


def stamps(out: Path) -> dict[str, int]:
    return {path.name: path.stat().st_mtime_ns for path in out.glob("*/*.safetensors")}


# --- what it writes ---------------------------------------------------------------------------------------------------


def test_random_prompts_have_one_row_a_token(
    checkpoint: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    lines = random_ids(SAMPLES)
    extract(capsys, checkpoint, write_lines(tmp_path, lines), tmp_path / "out", "--layers", "0,2,-1")
    dataset = taps.open(tmp_path / "out", seed=1)
    assert len(dataset) == SAMPLES
    for sample in dataset:
        assert sample["token_ids"].tolist() == lines[sample["index"]]["input_ids"]
        assert sample["hidden_states"].shape == (len(sample["token_ids"]), 3, dataset.manifest.hidden_size)


def stock_states(checkpoint: str, token_ids: list[int]) -> tuple[Tensor, ...]:
    from transformers import AutoModelForCausalLM

    model = by_torch(AutoModelForCausalLM.from_pretrained(checkpoint, dtype="auto").eval())
    with torch.no_grad():
        states: tuple[Tensor, ...] = model(torch.tensor([token_ids]), output_hidden_states=True).hidden_states
    return states


@pytest.mark.parametrize("dtype", ["fp32", "bf16", "fp8"])
def test_rows_are_those_of_the_stock_model(
    dtype: str, checkpoint: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Transformers' last state is after the final norm."""
    lines = random_ids(3)
    source = write_lines(tmp_path, lines)
    extract(capsys, checkpoint, source, tmp_path / "out", "--layers", "0,2,final", "--dtype", dtype)
    tolerance = {"fp32": 1e-4, "bf16": 1e-2, "fp8": 7e-2}[dtype]
    for sample in taps.open(tmp_path / "out"):
        states = stock_states(checkpoint, lines[sample["index"]]["input_ids"])
        expected = torch.stack([states[0][0], states[2][0], states[-1][0]], 1).float()
        error = (sample["hidden_states"].float() - expected).abs()
        assert bool((error <= tolerance * expected.abs().amax(-1, keepdim=True)).all())


def test_texts_chats_and_token_ids(checkpoint: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    lines: list[Line] = [
        {"prompt": "A state remembers"},
        {"input_ids": [5, 6, 7], "loss_mask": [0, 1, 1]},
        {"messages": CHAT},
    ]
    said = extract(capsys, checkpoint, write_lines(tmp_path, lines), tmp_path / "out", "--layers", "1")
    found = [sample["token_ids"].tolist() for sample in taps.open(tmp_path / "out", shuffle=False)]
    chat = tokenizer().apply_chat_template(CHAT, tokenize=False)
    assert found == [tokenizer().encode("A state remembers"), [5, 6, 7], tokenizer().encode(chat)]
    assert said.startswith(f"{tmp_path / 'out'}: 3 samples, {sum(map(len, found))} tokens, ")


def test_long_prompts_are_cut_and_counted(checkpoint: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    lines = [{"input_ids": list(range(10, 10 + length))} for length in (5, 8, 9, 40)]
    out = tmp_path / "out"
    said = extract(capsys, checkpoint, write_lines(tmp_path, lines), out, "--layers", "1", "--max-tokens", "8")
    assert "(2 were cut to 8 tokens)" in said
    lengths = [len(sample["token_ids"]) for sample in taps.open(out, shuffle=False)]
    assert lengths == [5, 8, 8, 8]


def test_the_manifest_says_what_it_is(checkpoint: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source = write_lines(tmp_path, random_ids(2))
    extract(capsys, checkpoint, source, tmp_path / "out", "--layers", "1,-1,final", "--dtype", "fp8")
    about = taps.open(tmp_path / "out").manifest
    num_layers = json.loads((Path(checkpoint) / "config.json").read_text())["num_hidden_layers"]
    assert about.layers == (1, num_layers, "final")
    assert (about.model, about.dtype, about.num_samples) == (Path(checkpoint).name, "fp8", 2)
    assert len(about.model_digest) == len(about.input_digest) == 32


def test_an_adapter_has_hidden_states_of_its_own(
    checkpoint: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source, args = write_lines(tmp_path, random_ids(2)), ["--layers", "2,final", "--dtype", "fp32"]
    adapter = ["--adapter", f"sql={directories('qwen3_next')['sql']}"]
    extract(capsys, checkpoint, source, tmp_path / "plain", *args)
    extract(capsys, checkpoint, source, tmp_path / "sql", *args, *adapter)
    plain, adapted = taps.open(tmp_path / "plain"), taps.open(tmp_path / "sql")
    assert adapted.manifest.model == f"{plain.manifest.model} with adapter sql"
    assert adapted.manifest.model_digest != plain.manifest.model_digest
    states = [{one["index"]: one["hidden_states"] for one in folder} for folder in (plain, adapted)]
    assert float((states[1][0] - states[0][0]).abs().max()) > 0.1
    words = ["-i", str(source), "-o", str(tmp_path / "sql"), *SMALL, *args]
    assert "the digest of the model" in complaint(capsys, 2, checkpoint, *words)


def test_shards(checkpoint: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source, out = write_lines(tmp_path, random_ids(30)), tmp_path / "out"
    extract(capsys, checkpoint, source, out, "--layers", "0,1", "--shard", "100KiB")
    assert all(name.startswith("shard_") for name in stamps(out))
    assert len(stamps(out)) > 1
    assert len(list(taps.open(out))) == 30


def test_a_dry_run_writes_nothing(checkpoint: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source, out = write_lines(tmp_path, random_ids(20)), tmp_path / "out"
    tokens = sum(len(line["input_ids"]) for line in random_ids(20))
    said = extract(capsys, checkpoint, source, out, "--layers", "0,1", "--dry-run")
    assert [path.name for path in tmp_path.iterdir()] == ["prompts.jsonl"]
    assert said.startswith(f"20 samples, {tokens:,} tokens, layers 0,1 as bf16\nbytes: about ")
    assert " minutes, at " in said
    extract(capsys, checkpoint, source, out, "--layers", "0,1")
    before = stamps(out)
    said = extract(capsys, checkpoint, source, out, "--layers", "0,1", "--dry-run")
    assert said == f"{out} is complete: all 20 samples are there\n"
    assert stamps(out) == before


def test_a_dataset_is_written_and_read(checkpoint: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    datasets = pytest.importorskip("datasets")
    lines: list[Line] = [*random_ids(3), {"input_ids": [5, 6, 7], "loss_mask": [0, 1, 1]}]
    first, second = tmp_path / "first", tmp_path / "second"
    extract(capsys, checkpoint, write_lines(tmp_path, lines), first, "--layers", "1")
    rows = datasets.load_from_disk(str(first))
    assert [row["input_ids"].tolist() for row in rows] == [line["input_ids"] for line in lines]
    assert rows[3]["loss_mask"].tolist() == [0, 1, 1]
    extract(capsys, checkpoint, first, second, "--layers", "1")
    assert [one["token_ids"].tolist() for one in taps.open(second, shuffle=False)] == [
        line["input_ids"] for line in lines
    ]


def test_without_datasets_it_says_so(
    checkpoint: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "datasets", None)
    said = extract(capsys, checkpoint, write_lines(tmp_path, random_ids(1)), tmp_path / "out", "--layers", "1")
    assert "pip install datasets" in said
    error = complaint(capsys, 2, checkpoint, "-i", str(tmp_path), "-o", str(tmp_path / "x"), "--layers", "1")
    assert "is a folder: to read a dataset, pip install datasets" in error


# --- interrupted, killed, out of space --------------------------------------------------------------------------------


@pytest.mark.parametrize("part", PARTS)
def test_a_run_that_was_ended_goes_on(part: str, checkpoint: str, tmp_path: Path) -> None:
    """Each part says in tests/cli/extract_processes.py what it does."""
    source = write_lines(tmp_path, random_ids(10 + 20 * max(8, KILLS)))
    command = [
        sys.executable,
        "-m",
        "tests.cli.extract_processes",
        part,
        checkpoint,
        str(source),
        str(tmp_path / "out"),
    ]
    limit_s, root = 300 + 30 * KILLS, Path(__file__).parents[2]
    done = warm.run(command, timeout=limit_s, cwd=root)
    assert done.returncode == 0, done.stderr
    if part == "interrupt":
        assert "interrupted: " in done.stderr
        assert "; run the same command again to go on\n" in done.stderr


def test_a_full_disk_is_a_clear_stop(
    checkpoint: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    source, out, real, left = write_lines(tmp_path, random_ids(20)), tmp_path / "out", os.pwritev, [8]

    def filling(fd: int, *args: Any) -> int:
        left[0] -= 1
        if left[0] < 0:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return real(fd, *args)

    with monkeypatch.context() as patch:
        patch.setattr(os, "pwritev", filling)
        error = complaint(capsys, 1, checkpoint, "-i", str(source), "-o", str(out), "--layers", "1", *SMALL)
    assert "No space left on device" in error
    assert f"7 of 20 samples are in {out}: make room and run the same command again" in error
    before = stamps(out)
    assert "(7 were there before)" in extract(capsys, checkpoint, source, out, "--layers", "1")
    assert before.items() <= stamps(out).items()
    assert len(list(taps.open(out))) == 20


def test_a_sample_that_fails_takes_no_other_along(
    checkpoint: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from hybridkv.cli import extract_run

    source, out, real = write_lines(tmp_path, random_ids(5)), tmp_path / "out", extract_run.rows_of

    def broken(result: Any) -> Tensor:
        rows = real(result)
        is_third = result.prompt_token_ids == random_ids(5)[2]["input_ids"]
        return rows * float("nan") if is_third else rows

    with monkeypatch.context() as patch:
        patch.setattr(extract_run, "rows_of", broken)
        error = complaint(capsys, 1, checkpoint, "-i", str(source), "-o", str(out), "--layers", "1", *SMALL)
    assert f"1 of 5 samples failed: {source}, line 3: hidden states of" in error
    assert "values that are not finite" in error
    assert len(list(taps.open(out, partial=True))) == 4
    assert "(4 were there before)" in extract(capsys, checkpoint, source, out, "--layers", "1")


# --- what it refuses --------------------------------------------------------------------------------------------------


def test_a_folder_of_something_else_is_refused_by_name(
    checkpoint: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source, out = write_lines(tmp_path, random_ids(3)), tmp_path / "out"
    extract(capsys, checkpoint, source, out, "--layers", "1,-1")
    before = stamps(out)
    other_model, other_input = tmp_path / "model", tmp_path / "other"
    save_checkpoint("qwen3_next", other_model, seed=1)
    other_input.mkdir()
    lines = write_lines(other_input, random_ids(3, seed=1))
    asked = ["-o", str(out), *SMALL]
    for model, given, more, words in (
        (checkpoint, source, ["--layers", "1,0"], "another value of --layers: 1,"),
        (checkpoint, source, ["--layers", "1,-1", "--dtype", "fp8"], "--dtype: bf16 instead of fp8"),
        (checkpoint, source, ["--layers", "1,-1", "--max-tokens", "9"], "--max-tokens: none instead of 9"),
        (checkpoint, lines, ["--layers", "1,-1"], "the digest of the input: "),
        (str(other_model), source, ["--layers", "1,-1"], "the digest of the model: "),
    ):
        error = complaint(capsys, 2, model, "-i", str(given), *asked, *more)
        assert words in error
        assert "ask for the same again, or name another --out" in error
    assert stamps(out) == before


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (["--layers", "two"], "--layers two: write numbers with commas"),
        (["--layers", ""], "write numbers with commas"),
        (["--layers", "1", "--dtype", "int8"], "--dtype int8: choose bf16, fp32 or fp8"),
        (["--layers", "1", "--max-tokens", "0"], "--max-tokens 0: a prompt has at least 1 token"),
        (["--layers", "1", "--shard", "0"], "--shard 0: give a size"),
        (["--layers", "1", "--shard", "big"], "'big'"),
        (["--layers", "1", "--queue", "big"], "'big'"),
        (["--layers", "1", "-i", "missing.jsonl"], "cannot read missing.jsonl: No such file"),
        (["--layers", "1", "-o", __file__], "cannot make"),
        ([], "'--layers'"),
    ],
)
def test_nonsense_gets_one_line_and_exit_code_2(
    args: list[str], words: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source = write_lines(tmp_path, random_ids(1))
    given = ["no model is needed for this", "-i", str(source), "-o", str(tmp_path / "out"), *args]
    assert words in complaint(capsys, 2, *given)


def test_layers_that_the_model_lacks(checkpoint: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source = write_lines(tmp_path, random_ids(1))
    error = complaint(capsys, 2, checkpoint, "-i", str(source), "-o", str(tmp_path / "x"), "--layers", "1,99", *SMALL)
    assert "99" in error


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("not json", "Expecting value"),
        ("[1, 2]", "expected an object with one of 'prompt', 'input_ids', 'messages'"),
        ('{"text": "x"}', "found none of them"),
        ('{"prompt": "x", "input_ids": [1]}', "found prompt and input_ids"),
        ('{"prompt": 7}', "prompt is 7: write a text"),
        ('{"prompt": ""}', "prompt is '': write a text"),
        ('{"input_ids": []}', "input_ids is []: write a list of token ids"),
        ('{"input_ids": [1, "2"]}', "input_ids is [1, '2']"),
        ('{"input_ids": [true]}', "input_ids is [True]"),
        ('{"messages": ["hello"]}', "messages is ['hello']: write a list of objects"),
        ('{"input_ids": [1, 2], "loss_mask": [1]}', "loss_mask is [1]: write a 0 or a 1 for each of 2 tokens"),
        ('{"input_ids": [1], "loss_mask": [2]}', "loss_mask is [2]"),
        ('{"prompt": "x", "loss_mask": [1]}', "loss_mask with prompt: it belongs to input_ids"),
    ],
)
def test_bad_lines_are_named(line: str, words: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "prompts.jsonl"
    path.write_text('{"prompt": "fine"}\n\n' + line + "\n")
    error = complaint(capsys, 2, "no model", "-i", str(path), "-o", str(tmp_path / "out"), "--layers", "1")
    assert f"{path}, line 3: " in error
    assert words in error
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ({"input_ids": [99999]}, "line 2: token id 99999"),
        ({"input_ids": [5] * 600}, "line 2: a prompt of 600 tokens"),
        ({"messages": [{"role": "user"}]}, "line 2: the chat template refuses"),
    ],
)
def test_prompts_that_the_model_cannot_take_are_named(
    line: Line, words: str, checkpoint: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source = write_lines(tmp_path, [{"prompt": "fine"}, line])
    error = complaint(capsys, 2, checkpoint, "-i", str(source), "-o", str(tmp_path / "x"), "--layers", "1", *SMALL)
    assert words in error
    assert not (tmp_path / "x" / "manifest.json").exists()  # the corrected input is another one


def test_files_that_are_no_prompts(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "prompts.jsonl"
    for content, words in ((b"", "has no prompts"), (b"\n \n", "has no prompts"), (b"\xff\xfe", "no text in UTF-8")):
        path.write_bytes(content)
        assert words in complaint(capsys, 2, "x", "-i", str(path), "-o", str(tmp_path / "out"), "--layers", "1")


def test_the_datasets_own_folder_cannot_be_cut(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    datasets = pytest.importorskip("datasets")
    folder, row = str(tmp_path / "data"), {"input_ids": [5, 6, 7]}
    made = datasets.Dataset.from_generator(lambda: iter([row]), cache_dir=str(tmp_path / "cache"), fingerprint="test")
    made.save_to_disk(folder)
    given = ["x", "-i", folder, "-o", folder, "--layers", "1", "--max-tokens", "2"]
    assert "the dataset's own folder, would not fit it" in complaint(capsys, 2, *given)
