"""Every option of `Engine` is a flag of every command that runs a model, and reaches the engine."""

from __future__ import annotations

import inspect
from pathlib import Path
from typing import Any

import pytest
import typer.main

from hybridkv import Engine
from hybridkv.cli.main import app, run
from tests.engine.checkpoints import save_checkpoint

COMMANDS = ("serve", "generate", "chat", "extract")
OPTIONS = {
    name: parameter.default
    for name, parameter in inspect.signature(Engine.__init__).parameters.items()
    if name not in ("self", "model", "link")  # `serve` makes the link's options of several flags
}

NO_FLAG = {
    "chat": {"max_num_seqs"},  # a conversation has one reply at a time
    "extract": {"seed", "graphs"},  # nothing is sampled, and nothing decodes
}
"""Options of the engine that a command fixes."""

NOT_THE_ENGINES = {
    "generate": {"seed"},  # the seed of each request
    "chat": {"seed"},
}
"""Flags that have the name of an engine's option and go elsewhere."""

RENAMED = {
    "extract": {"dtype": "model_dtype"}  # --dtype is that of the files
}
"""Flags of a command by the engine's options that they set, where the names differ."""

OWN = {
    "serve": ["--port", "0"],
    "generate": ["-p", "one", "-p", "two"],
    "chat": [],
    "extract": ["--input", "prompts.jsonl", "--layers", "0", "--out", "states"],
}
"""What each command needs beside a model."""

OTHER_VALUES: dict[str, tuple[list[str], object]] = {
    "memory": (["--memory", "48MiB"], "48MiB"),
    "dtype": (["--dtype", "bfloat16"], "bfloat16"),
    "device": (["--device", "cpu"], "cpu"),
    "kv_cache_dtype": (["--kv-cache-dtype", "bf16"], "bf16"),
    "state_dtype": (["--state-dtype", "fp16"], "fp16"),
    "block_size": (["--block-size", "8"], 8),
    "attn_pack_size": (["--attn-pack-size", "2"], 2),
    "row_layers": (["--row-layers", "3"], 3),
    "row_order": (["--row-order", "ltkh"], "ltkh"),
    "policy": (["--policy", "lru"], "lru"),
    "max_num_batched_tokens": (["--max-num-batched-tokens", "300"], 300),
    "max_num_seqs": (["--max-num-seqs", "1"], 1),
    "max_model_len": (["--max-model-len", "99"], 99),
    "tokenizer": (["--tokenizer", "/some/where"], "/some/where"),
    "trust_remote_code": (["--trust-remote-code"], True),
    "seed": (["--seed", "7"], 7),
    "store": (["--store", "memory://?size=1MiB", "--store", "memory://"], ["memory://?size=1MiB", "memory://"]),
    "stream": (["--stream", "async"], "async"),
    "load_timeout_s": (["--load-timeout-s", "2.5"], 2.5),
    "adapters": (["--adapter", "sql=/some/where"], {"sql": "/some/where"}),
    "compile": (["--compile"], True),
    "graphs": (["--no-graphs"], False),
}
"""Flags that set each option to something other than its default, and what the engine must get then."""


class Started(BaseException):
    """Carries what an engine was started with out of the command."""


@pytest.fixture(autouse=True)
def prompts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "prompts.jsonl").write_text('{"prompt": "one"}\n{"prompt": "two"}\n')
    monkeypatch.chdir(tmp_path)


def flags(command: str) -> dict[str, Any]:
    """Defaults by the name of the engine's option, or of the flag where the engine has no such option."""
    commands = typer.main.get_command(app).commands  # type: ignore[attr-defined]
    found = {option.name: option.default for option in commands[command].params}
    return found | {option: found[flag] for option, flag in RENAMED.get(command, {}).items()}


def words_of(command: str, option: str) -> list[str]:
    """The flag of `OTHER_VALUES` as this command spells it."""
    flag, *value = OTHER_VALUES[option][0]
    renamed = RENAMED.get(command, {}).get(option)
    return [flag if renamed is None else f"--{renamed.replace('_', '-')}", *value]


def started_with(monkeypatch: pytest.MonkeyPatch, command: str, *args: str) -> dict[str, Any]:
    """The options that the command makes an engine with."""

    def start(self: Engine, model: object, **options: Any) -> None:
        raise Started(options)

    monkeypatch.setattr(Engine, "__init__", start)
    monkeypatch.setattr("hybridkv.serve.set_up_logs", lambda log_format, level: None)
    with pytest.raises(Started) as caught:
        run([command, "a model", *OWN[command], *args])
    options: dict[str, Any] = caught.value.args[0]
    assert options.pop("link") is None
    return options


@pytest.mark.parametrize("command", COMMANDS)
def test_every_option_of_the_engine_is_a_flag(command: str) -> None:
    found = flags(command)
    assert set(OPTIONS) - set(found) == NO_FLAG.get(command, set())
    assert {name: found[name] for name in OPTIONS if name in found} == {
        name: default for name, default in OPTIONS.items() if name in found
    }


@pytest.mark.parametrize("command", COMMANDS)
def test_every_flag_reaches_the_engine(command: str, monkeypatch: pytest.MonkeyPatch) -> None:
    assert set(OTHER_VALUES) == set(OPTIONS)  # a new option needs a value here
    left_out = NO_FLAG.get(command, set()) | NOT_THE_ENGINES.get(command, set())
    given = {name: value for name, (_, value) in OTHER_VALUES.items() if name not in left_out}
    options = started_with(monkeypatch, command, *(word for name in given for word in words_of(command, name)))
    assert {name: options[name] for name in given} == given
    assert all(value != OPTIONS[name] for name, value in given.items())


def test_commands_run_no_more_at_once_than_they_ask_for(monkeypatch: pytest.MonkeyPatch) -> None:
    assert started_with(monkeypatch, "generate")["max_num_seqs"] == 2
    assert started_with(monkeypatch, "generate", "-n", "3")["max_num_seqs"] == 6
    assert started_with(monkeypatch, "generate", "-n", "3", "--max-num-seqs", "4")["max_num_seqs"] == 4
    assert started_with(monkeypatch, "chat")["max_num_seqs"] == 1
    assert started_with(monkeypatch, "extract")["max_num_seqs"] == 2
    assert started_with(monkeypatch, "serve")["max_num_seqs"] == 256


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> str:
    directory = tmp_path_factory.mktemp("checkpoint")
    save_checkpoint("llama", directory)
    return str(directory)


@pytest.mark.parametrize("command", COMMANDS)
@pytest.mark.parametrize(
    ("args", "words"),
    [
        (["--kv-cache-dtype", "int3"], "unknown dtype 'int3': choose one of"),
        (["--kv-cache-dtype", "int8"], "kv_cache_dtype 'int8': what is cached would be cut to whole numbers"),
        (["--state-dtype", ""], "unknown dtype ''"),
        (["--block-size", "0"], "block of 0 tokens: a block has 1 to"),
        (["--row-layers", "0"], "rows of 0 layers: a row has at least 1 layer"),
        (["--row-order", "hlk"], "row order 'hlk' is not an order of h, l, k and t"),
        (["--policy", "fifo"], "'fifo'"),
        (["--max-num-batched-tokens", "0"], "max_num_batched_tokens 0: a step has at least 1 token"),
        (["--max-model-len", "1"], "max_model_len 1: a prompt and its reply have at least 2 tokens"),
        (["--tokenizer", "/no/such/place"], "no directory '/no/such/place': name one that a tokenizer was saved to"),
        (["--load-timeout-s", "nan"], "load_timeout_s nan"),
        (["--attn-pack-size", "two"], "--attn-pack-size"),
        (["--adapter", "sql"], "--adapter 'sql': write a name and a directory, such as sql=/path/to/adapter"),
        (["--adapter", "=/some/where"], "--adapter '=/some/where': write a name and a directory"),
        (["--adapter", "a=/some", "--adapter", "a=/where"], "--adapter a twice: give each adapter a name of its own"),
        (["--adapter", "sql=/no/such=place"], "no directory '/no/such=place': name one that a LoRA adapter"),
    ],
)
def test_bad_values_are_refused_before_a_model_is_loaded(
    command: str,
    args: list[str],
    words: str,
    checkpoint: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    def load(*args: object) -> None:
        raise AssertionError("a model was loaded")

    monkeypatch.setattr("hybridkv.engine.loading.checkpoint.read_model", load)
    assert words in complaint(monkeypatch, capsys, command, checkpoint, *args)


@pytest.mark.parametrize("command", ["generate", "chat", "extract"])
def test_commands_without_a_choice_take_one_adapter(
    command: str, checkpoint: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    error = complaint(monkeypatch, capsys, command, checkpoint, "--adapter", "a=/some", "--adapter", "b=/where")
    assert "--adapter a and --adapter b: only serve takes several; give one" in error


@pytest.mark.parametrize("command", COMMANDS)
def test_pack_sizes_beyond_the_model_are_refused(
    command: str, checkpoint: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for size in ("0", "9"):
        error = complaint(monkeypatch, capsys, command, checkpoint, "--attn-pack-size", size)
        assert f"attention pack size {size}: " in error


def complaint(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], command: str, *args: str) -> str:
    """The one line that a command says before it ends with exit code 2."""
    monkeypatch.setattr("hybridkv.serve.set_up_logs", lambda log_format, level: None)
    capsys.readouterr()
    assert run([command, *args, "--memory", "16MiB", "--device", "cpu", *OWN[command]]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith("hybridkv: error: ")
    assert captured.err.count("\n") == 1
    return captured.err


def test_a_row_order_reaches_the_plan(checkpoint: str) -> None:
    with Engine(Path(checkpoint), memory="16MiB", device="cpu", row_order="tkhl") as engine:
        assert engine.plan.options.row_order == "tkhl"
