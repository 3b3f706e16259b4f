"""Files that users name: only regular ones are read, up to a limit, and errors name the file and the way out."""

from __future__ import annotations

import gzip
import json
import os
import socket
import threading
from collections.abc import Callable
from concurrent.futures import Future
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from hybridkv import taps
from hybridkv.cli.extract_input import open_input
from hybridkv.cli.main import run
from hybridkv.engine.loading.checkpoint import load
from hybridkv.errors import InputError
from hybridkv.files import MOST_BYTES, MOST_DEPTH, FileError, parse_json, read_bytes, read_json, read_lines
from hybridkv.link.secret import read_secret
from hybridkv.models import load_model
from hybridkv.models.checkpoint_digest import checkpoint_digest, directory_digest
from hybridkv.replay import load_tokenizer, load_trace
from hybridkv.store.address import Address
from hybridkv.store.bucket.aws_files import aws_settings
from hybridkv.taps import TapFolder
from tests.taps.samples import fill

DEEP = "[" * 100_000 + "]" * 100_000
Place = Callable[[Path, pytest.MonkeyPatch], tuple[Path, Callable[[], Any]]]
"""Makes what is around a file in a directory. Returns the path of the file, and what reads it."""


def trace(directory: Path, patch: pytest.MonkeyPatch) -> tuple[Path, Callable[[], Any]]:
    return directory / "trace.jsonl", lambda: load_trace(directory / "trace.jsonl")


def compressed_trace(directory: Path, patch: pytest.MonkeyPatch) -> tuple[Path, Callable[[], Any]]:
    return directory / "trace.jsonl.gz", lambda: load_trace(directory / "trace.jsonl.gz")


def tokenizer(directory: Path, patch: pytest.MonkeyPatch) -> tuple[Path, Callable[[], Any]]:
    return directory / "tokenizer.json", lambda: load_tokenizer(directory / "tokenizer.json")


def config(directory: Path, patch: pytest.MonkeyPatch) -> tuple[Path, Callable[[], Any]]:
    return directory / "config.json", lambda: load_model(directory)


def loaded_config(directory: Path, patch: pytest.MonkeyPatch) -> tuple[Path, Callable[[], Any]]:
    return directory / "config.json", lambda: load(directory)


def digested_config(directory: Path, patch: pytest.MonkeyPatch) -> tuple[Path, Callable[[], Any]]:
    return directory / "config.json", lambda: checkpoint_digest(directory)


def digested_weights(directory: Path, patch: pytest.MonkeyPatch) -> tuple[Path, Callable[[], Any]]:
    (directory / "config.json").write_text("{}")
    return directory / "model.safetensors", lambda: checkpoint_digest(directory)


def other_weights(directory: Path, patch: pytest.MonkeyPatch) -> tuple[Path, Callable[[], Any]]:
    return directory / "model.bin", lambda: directory_digest(directory)


def prompts(directory: Path, patch: pytest.MonkeyPatch) -> tuple[Path, Callable[[], Any]]:
    return directory / "prompts.jsonl", lambda: list(open_input(directory / "prompts.jsonl"))


def secret(directory: Path, patch: pytest.MonkeyPatch) -> tuple[Path, Callable[[], Any]]:
    return directory / "secret", lambda: read_secret(directory / "secret")


def password(directory: Path, patch: pytest.MonkeyPatch) -> tuple[Path, Callable[[], Any]]:
    path = directory / "password"
    address = Address("redis://host", "redis", "host", "", "", {"password_file": str(path)}, "redis://HOST")
    return path, lambda: address.secret("NO_SUCH_VARIABLE")


def credentials(directory: Path, patch: pytest.MonkeyPatch) -> tuple[Path, Callable[[], Any]]:
    patch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(directory / "credentials"))
    return directory / "credentials", lambda: aws_settings("eu-west-1")


def manifest(directory: Path, patch: pytest.MonkeyPatch) -> tuple[Path, Callable[[], Any]]:
    return directory / "manifest.json", lambda: taps.open(directory)


def sample(directory: Path, patch: pytest.MonkeyPatch) -> tuple[Path, Callable[[], Any]]:
    fill(directory, 2)
    return directory / "hidden_states/hs_1.safetensors", lambda: list(taps.open(directory))


def shard(directory: Path, patch: pytest.MonkeyPatch) -> tuple[Path, Callable[[], Any]]:
    fill(directory, 2, shard_bytes=1)
    return directory / "shards/shard_00000.safetensors", lambda: taps.open(directory)


def recovered_sample(directory: Path, patch: pytest.MonkeyPatch) -> tuple[Path, Callable[[], Any]]:
    fill(directory, 2)
    return directory / "hidden_states/hs_1.safetensors", lambda: TapFolder(directory).recover()


PLACES = [trace, compressed_trace, tokenizer, config, loaded_config, digested_config, digested_weights, other_weights]
PLACES += [prompts, secret, password, credentials, manifest, sample, shard, recovered_sample]


def put_fifo(path: Path) -> str:
    os.mkfifo(path)
    return "it is a FIFO, not a regular file"


def put_device(path: Path) -> str:
    path.symlink_to("/dev/zero")
    return "it is a device, not a regular file"


def put_directory(path: Path) -> str:
    path.mkdir()
    return "it is a directory, not a regular file"


def put_loop(path: Path) -> str:
    path.symlink_to(path.name)
    return "Too many levels of symbolic links"


def within_seconds(call: Callable[[], Any]) -> Any:
    """The result of a call, or its error. A call that hangs is an error."""
    found: Future[Any] = Future()

    def work() -> None:
        try:
            found.set_result(call())
        except BaseException as error:
            found.set_exception(error)

    threading.Thread(target=work, daemon=True).start()
    return found.result(20)


@pytest.mark.parametrize("put", [put_fifo, put_device, put_directory, put_loop])
@pytest.mark.parametrize("place", PLACES)
def test_what_is_no_regular_file_is_refused_at_once(
    place: Place, put: Callable[[Path], str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, read = place(tmp_path, monkeypatch)
    path.unlink(missing_ok=True)
    reason = put(path)
    if place in (prompts, tokenizer) and put is put_directory:
        reason = "folder" if place is prompts else "cannot read tokenizer"  # they may be directories, though not empty
    with pytest.raises(InputError) as caught:
        within_seconds(read)
    message = str(caught.value)
    assert str(path) in message
    assert reason in message
    assert message.count("\n") == 0
    assert os.path.lexists(path)  # it is not ours to remove


@pytest.mark.parametrize("place", [trace, config, loaded_config, digested_config, prompts, manifest])
def test_deeply_nested_json_is_refused(place: Place, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, read = place(tmp_path, monkeypatch)
    for depth in (100_000, 500):  # more than Python's parser takes, and less
        path.write_text('{"a":' + "[" * depth + "]" * depth + "}")
        with pytest.raises(InputError, match=f"nested more than {MOST_DEPTH} deep") as caught:
            read()
        assert str(path) in str(caught.value)


@pytest.mark.parametrize("place", [sample, shard, digested_weights])
def test_deeply_nested_json_in_a_header_is_refused(
    place: Place, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, read = place(tmp_path, monkeypatch)
    save_file({"a": torch.ones(1)}, path, {"hybridkv_checksums": DEEP})
    if place is digested_weights:
        raw = f'{{"a":{DEEP}}}'.encode()
        path.write_bytes(len(raw).to_bytes(8, "little") + raw)
    with pytest.raises(InputError, match=str(path)):
        read()


@pytest.mark.parametrize("place", [sample, shard, digested_weights])
@pytest.mark.parametrize("announced", [2**63, 2**40, 101_000_000])
def test_a_header_of_a_huge_length_is_not_read(
    place: Place, announced: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, read = place(tmp_path, monkeypatch)
    with path.open("wb") as file:
        file.write(announced.to_bytes(8, "little") + b"{")
        file.truncate(min(announced, 2**30) + 8)  # a sparse file: no bytes lie on the disk
    with pytest.raises(InputError, match=str(path)):
        read()


@pytest.mark.parametrize("place", [trace, prompts, config, secret, password, credentials, manifest])
def test_a_text_without_an_end_is_refused(place: Place, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, read = place(tmp_path, monkeypatch)
    path.touch()
    os.truncate(path, 2**40)
    with pytest.raises(InputError, match=f"{path}.* has more than [46]"):
        read()


def test_a_small_file_that_unpacks_to_a_long_line(tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl.gz"
    path.write_bytes(gzip.compress(b"\n" + b" " * (MOST_BYTES + 1), 1))
    with pytest.raises(InputError, match=f"{path}: line 2 has more than 64 MiB"):
        load_trace(path)


@pytest.mark.parametrize(
    "arguments",
    [
        ["replay", "FILE", "--model", "qwen3-next-80b-a3b"],
        ["plan", "FILE"],
        ["extract", "x", "--layers", "1", "--out", "out", "--input", "FILE"],
        ["generate", "x", "--file", "FILE"],
    ],
    ids=lambda one: one[0],
)
def test_commands_name_the_file_and_exit_with_2(
    arguments: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for put in (put_fifo, put_device):
        path = tmp_path / put.__name__
        reason = put(path)
        given = [str(path) if one == "FILE" else one for one in arguments]
        assert within_seconds(partial(run, given)) == 2
        complaint = capsys.readouterr().err
        assert f"{path}: {reason}; " in complaint
        assert complaint.count("\n") == 1


def test_standard_input_without_an_end(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    with open("/dev/zero", encoding="utf-8") as zeros:
        monkeypatch.setattr("sys.stdin", zeros)
        assert run(["generate", "x"]) == 2
    assert "standard input has more than 64 MiB" in capsys.readouterr().err


@pytest.mark.parametrize("name", ["generation_config.json", "model.safetensors", "tokenizer.json"])
def test_libraries_do_not_open_a_fifo_in_a_folder(name: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    os.mkfifo(tmp_path / name)
    (tmp_path / "dangling").symlink_to("nothing")  # does no harm
    reads: list[Callable[[], Any]] = [
        lambda: load(tmp_path),
        lambda: load("owner/name", tokenizer=tmp_path),
        lambda: open_input(tmp_path),
        lambda: load_tokenizer(tmp_path),
    ]
    for read in reads:
        with pytest.raises(InputError, match=f"{tmp_path}.* is a FIFO, not a regular file"):
            within_seconds(read)


def test_the_kind_is_that_of_the_open_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A file that was looked at may be another one when it is opened."""
    path, opened = tmp_path / "file", os.open
    path.write_text("{}")

    def replaced(target: Any, *args: Any) -> int:
        if target == path:
            path.unlink()
            os.mkfifo(path)
        return opened(target, *args)

    monkeypatch.setattr(os, "open", replaced)
    with pytest.raises(FileError, match="it is a FIFO"):
        within_seconds(lambda: read_json(path))


def test_lines_have_numbers_and_no_ends(tmp_path: Path) -> None:
    path = tmp_path / "lines"
    path.write_bytes(b"\xef\xbb\xbfone\r\n\n \t\nzw\xc3\xb6lf\xe2\x80\xa8")
    assert list(read_lines(path)) == [(1, "one"), (4, "zwölf\u2028")]
    assert list(read_lines(path, 10)) == [(1, "one"), (4, "zwölf\u2028")]
    with pytest.raises(FileError, match="line 4 has more than 8 B"):
        list(read_lines(path, 8))
    path.write_bytes(b"one\n\xff\n")
    with pytest.raises(FileError, match="it is no text in UTF-8 after line 1"):
        list(read_lines(path))


def test_limits_are_exact(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(b"12345")
    assert read_bytes(path, 5) == b"12345"
    with pytest.raises(FileError, match="it has more than 4 B"):
        read_bytes(path, 4)
    for text in ("[" * MOST_DEPTH + "]" * MOST_DEPTH, json.dumps("[" * 1000), json.dumps([[]] * 1000)):
        assert parse_json(text) == parse_json(text.encode()) == json.loads(text)
    for text in ("[" + "[" * MOST_DEPTH + "]" * MOST_DEPTH + "]", '{"a":' * 65 + "1" + "}" * 65, DEEP):
        for given in (text, text.encode()):
            with pytest.raises(FileError, match="nested more than 64 deep"):
                parse_json(given)


def test_sockets_and_bad_names(tmp_path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(str(tmp_path / "socket"))
        with pytest.raises(FileError, match="it is a socket, not a regular file"):
            read_bytes(tmp_path / "socket")
    with pytest.raises(FileError, match="null byte"):
        read_bytes(tmp_path / "a\0b")
    for missing in (tmp_path / "none", tmp_path / "socket" / "none"):
        with pytest.raises(FileError) as caught:
            read_bytes(missing)
        assert caught.value.is_missing
