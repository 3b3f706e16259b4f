"""`hybridkv store` as people use it."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path
from typing import Any

import pytest

from hybridkv.cli.main import run
from hybridkv.store import FileStore
from tests.store.samples import NAMESPACE, OTHER_NAMESPACE, load, name_of, rows_of, save
from tests.store.versions import later, plant

WEIGHTS = "ab" * 16
NAMES = [name_of(1), name_of(2), name_of(3, "state"), name_of(4, namespace=OTHER_NAMESPACE)]


@pytest.fixture
def url(tmp_path: Path) -> str:
    with FileStore(tmp_path, 1 << 20) as store:
        for number, name in enumerate(NAMES):
            save(store, name, position=256 * number, value=1.5)
        store.describe(NAMESPACE, {"model": "qwen3-next-80b-a3b", "weights": WEIGHTS, "kv": "bf16"})
    return f"file://{tmp_path}"


def path_of(tmp_path: Path, number: int) -> Path:
    return tmp_path / "hybridkv-v1" / "objects" / NAMES[number].path


def spoil(tmp_path: Path, number: int) -> None:
    with path_of(tmp_path, number).open("r+b") as file:
        file.seek(-1, os.SEEK_END)
        last = file.read(1)[0]
        file.seek(-1, os.SEEK_END)
        file.write(bytes([last ^ 1]))


def ask(capsys: pytest.CaptureFixture[str], *args: str, code: int = 0) -> Any:
    assert run(["store", *args, "--json"]) == code
    return json.loads(capsys.readouterr().out)


def said(capsys: pytest.CaptureFixture[str], *args: str, code: int = 0) -> str:
    assert run(["store", *args]) == code
    return capsys.readouterr().out


def test_stat_shows_sizes_by_model_and_group(url: str, capsys: pytest.CaptureFixture[str]) -> None:
    record = ask(capsys, "stat", url)
    assert record["objects"] == 4
    groups = record["namespaces"][NAMESPACE]["groups"]
    assert {group: counts["objects"] for group, counts in groups.items()} == {"full": 2, "state": 1}
    assert record["namespaces"][NAMESPACE]["about"]["model"] == "qwen3-next-80b-a3b"
    assert record["nbytes"] == 4 * groups["state"]["nbytes"]
    text = said(capsys, "stat", url)
    assert "qwen3-next-80b-a3b, bf16" in text
    assert "4 objects" in text


def test_models_are_shown_by_name_or_else_by_digest(url: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert {(one["namespace"], one["model"]) for one in ask(capsys, "ls", url)} == {
        (NAMESPACE, "qwen3-next-80b-a3b"),
        (OTHER_NAMESPACE, None),
    }
    assert f"qwen3-next-80b-a3b, bf16  {NAMESPACE}" in (listed := said(capsys, "ls", url))
    assert f"{OTHER_NAMESPACE}  {OTHER_NAMESPACE}" in listed
    text = said(capsys, "stat", url)
    assert WEIGHTS not in text
    assert text.count(OTHER_NAMESPACE) == 2
    assert ask(capsys, "stat", url)["namespaces"][NAMESPACE]["about"]["weights"] == WEIGHTS


def test_a_namespace_without_a_name_is_shown_by_its_weights(
    url: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with FileStore(tmp_path, 1 << 20) as store:
        store.describe(NAMESPACE, {"model": "\x1b[2Jgone", "weights": WEIGHTS})
    for command in ("stat", "ls"):
        text = said(capsys, command, url)
        assert WEIGHTS in text
        assert "gone" not in text


def test_ls_lists_what_is_asked_for(url: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    then = time.time() - 7200
    os.utime(path_of(tmp_path, 0), (then, then))
    assert {one["key"] for one in ask(capsys, "ls", url)} == {name.key for name in NAMES}
    assert [one["position"] for one in ask(capsys, "ls", url, "--group", "state")] == [512]
    assert [one["key"] for one in ask(capsys, "ls", url, "--namespace", OTHER_NAMESPACE)] == [NAMES[3].key]
    assert [one["key"] for one in ask(capsys, "ls", url, "--older-than", "1h")] == [NAMES[0].key]
    assert len(ask(capsys, "ls", url, "--limit", "2")) == 2
    text = said(capsys, "ls", url, "--limit", "3")
    assert NAMES[0].key not in text
    assert "1 more" in text
    assert "2 h ago" in said(capsys, "ls", url)


def test_verify_reads_everything(url: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert ask(capsys, "verify", url)["corrupt"] == []
    assert "4 objects read, 0 corrupt" in said(capsys, "verify", url)


def test_verify_finds_a_fault_and_deletes_only_when_asked(
    url: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    spoil(tmp_path, 1)
    path_of(tmp_path, 2).write_bytes(b"")
    for _ in range(2):
        found = ask(capsys, "verify", url, code=1)["corrupt"]
        assert {one["name"] for one in found} == {str(NAMES[1]), str(NAMES[2])}
    assert ask(capsys, "verify", url, "--namespace", OTHER_NAMESPACE)["corrupt"] == []
    assert "2 corrupt: --delete" in said(capsys, "verify", url, code=1)
    assert "2 corrupt, now deleted" in said(capsys, "verify", url, "--delete", code=1)
    assert ask(capsys, "verify", url) == {"url": url, "objects": 2, "corrupt": [], "unknown": [], "deleted": False}


def test_verify_leaves_objects_of_later_versions_alone(
    url: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    theirs = {name_of(8): "version", name_of(9): "fields"}
    with FileStore(tmp_path, 1 << 20) as store:
        for name, kind in theirs.items():
            plant(store, name, later(name, kind))
    for _ in range(2):
        record = ask(capsys, "verify", url, "--delete")
        assert (record["objects"], record["corrupt"]) == (6, [])
        assert {one["name"] for one in record["unknown"]} == {str(name) for name in theirs}
        assert all(one["error"].startswith(one["name"]) for one in record["unknown"])
    lines = said(capsys, "verify", url).splitlines()
    assert lines[0] == "4 objects read, 0 corrupt"
    assert lines[1].startswith("2 objects of an unknown format, left alone; one is ")
    spoil(tmp_path, 1)
    record = ask(capsys, "verify", url, "--delete", code=1)
    assert ([one["name"] for one in record["corrupt"]], len(record["unknown"])) == ([str(NAMES[1])], 2)
    assert "left alone" not in said(capsys, "verify", url, "--namespace", OTHER_NAMESPACE)


def test_other_commands_take_objects_of_later_versions_as_they_are(
    url: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    name = name_of(8)
    with FileStore(tmp_path, 1 << 20) as store:
        plant(store, name, later(name, "version"))
    assert ask(capsys, "stat", url)["objects"] == 5
    shown = {one["key"]: (one["value"], one["position"]) for one in ask(capsys, "ls", url)}
    assert shown[name.key] == (None, None)
    assert name.key in said(capsys, "ls", url)
    then = time.time() - 7200
    os.utime(tmp_path / "hybridkv-v1" / "objects" / name.path, (then, then))
    assert ask(capsys, "gc", url, "--older-than", "1h")["expired"] == 1
    assert ask(capsys, "verify", url)["unknown"] == []


def test_gc_removes_leftovers_and_nothing_else(url: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    leftover = tmp_path / "hybridkv-v1" / "drafts" / "1-2-3"
    leftover.write_bytes(bytes(10))
    ask(capsys, "stat", url)
    assert leftover.exists()
    record = ask(capsys, "gc", url)
    assert (record["leftovers"], record["expired"], record["evicted"]) == (1, 0, 0)
    assert not leftover.exists()
    assert "0 leftovers" in (text := said(capsys, "gc", url))
    assert "Objects are kept: --older-than and --size remove some" in text
    with FileStore(tmp_path, 1 << 20) as store:
        assert [load(store, name) for name in NAMES] == [rows_of(name) for name in NAMES]


def test_gc_removes_the_old_and_shrinks(url: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    then = time.time() - 3 * 86_400
    os.utime(path_of(tmp_path, 0), (then, then))
    assert ask(capsys, "gc", url, "--older-than", "2d")["expired"] == 1
    record = ask(capsys, "gc", url, "--size", "40000")
    assert record["evicted"] == 2
    assert record["nbytes"] <= 40_000
    assert record["freed"] > 0
    assert ask(capsys, "stat", url)["objects"] == 1


@pytest.mark.parametrize("command", ["stat", "ls", "verify", "gc"])
@pytest.mark.parametrize(
    ("bad", "words"),
    [("memory://?size=1GiB", "inside one process"), ("nothing", "file:///path"), ("file:///no/such/place", "no store")],
)
def test_bad_urls_exit_with_two(command: str, bad: str, words: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["store", command, bad]) == 2
    captured = capsys.readouterr()
    assert words in captured.err
    assert captured.err.count("\n") == 1
    assert captured.out == ""


def test_a_file_is_no_store(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "file").write_bytes(b"x")
    assert run(["store", "stat", f"file://{tmp_path}/file"]) == 2
    assert "is a file, and a store is a directory" in capsys.readouterr().err


@pytest.mark.parametrize(
    "args",
    [("ls", "--older-than", "soon"), ("gc", "--older-than", "1"), ("gc", "--size", "big"), ("ls", "--group", "A/")],
)
def test_bad_options_exit_with_two(url: str, args: tuple[str, ...], capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["store", args[0], url, *args[1:]]) == 2
    assert "hybridkv: error" in capsys.readouterr().err


@pytest.mark.parametrize("command", [(), ("stat",), ("ls",), ("verify",), ("gc",)])
def test_help_is_there(command: tuple[str, ...], capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["store", *command, "--help"]) == 0
    assert "Usage" in capsys.readouterr().out
