"""`hybridkv store` on a Valkey server."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from hybridkv.cli.main import run
from hybridkv.store.urls import parse_url
from hybridkv.store.valkey.keys import INDEX, object_key, shard_of
from hybridkv.store.valkey.opening import open_address
from tests.store.samples import NAMESPACE, OTHER_NAMESPACE, name_of, save
from tests.store.servers.valkey import ValkeyServer

PASSWORD = "correct-horse"
NAMES = [name_of(1), name_of(2), name_of(3, "state"), name_of(4, namespace=OTHER_NAMESPACE)]


@pytest.fixture(scope="module")
def server() -> Iterator[ValkeyServer]:
    with ValkeyServer(password=PASSWORD) as server:
        yield server


@pytest.fixture
def url(server: ValkeyServer, tmp_path: Path) -> str:
    server.ask("FLUSHALL")
    (tmp_path / "password").write_text(PASSWORD)
    url = f"{server.url}?password_file={tmp_path}/password"
    with open_address(parse_url(url), 1 << 20) as store:
        for number, name in enumerate(NAMES):
            save(store, name, position=256 * number, value=1.5)
        store.describe(NAMESPACE, {"model": "qwen3-next-80b-a3b", "kv": "bf16"})
    return url


def ask(capsys: pytest.CaptureFixture[str], *args: str, code: int = 0) -> Any:
    assert run(["store", *args, "--json"]) == code
    return json.loads(capsys.readouterr().out)


def test_stat_and_ls_show_what_there_is(url: str, capsys: pytest.CaptureFixture[str]) -> None:
    record = ask(capsys, "stat", url)
    assert record["objects"] == 4
    assert record["namespaces"][NAMESPACE]["about"]["model"] == "qwen3-next-80b-a3b"
    assert {one["key"] for one in ask(capsys, "ls", url)} == {name.key for name in NAMES}
    assert [one["position"] for one in ask(capsys, "ls", url, "--group", "state")] == [512]
    assert [one["key"] for one in ask(capsys, "ls", url, "--namespace", OTHER_NAMESPACE)] == [NAMES[3].key]
    assert run(["store", "stat", url]) == run(["store", "ls", url]) == 0
    assert "4 objects" in capsys.readouterr().out


def test_verify_finds_a_fault_and_deletes_only_when_asked(
    url: str, server: ValkeyServer, capsys: pytest.CaptureFixture[str]
) -> None:
    assert ask(capsys, "verify", url)["corrupt"] == []
    server.ask("SETRANGE", object_key(NAMES[1]), 9000, b"\xff\x00\xff")
    for _ in range(2):
        assert [one["name"] for one in ask(capsys, "verify", url, code=1)["corrupt"]] == [str(NAMES[1])]
    ask(capsys, "verify", url, "--delete", code=1)
    assert ask(capsys, "verify", url)["objects"] == 3


def test_gc_removes_the_old_and_shrinks(url: str, server: ValkeyServer, capsys: pytest.CaptureFixture[str]) -> None:
    record = ask(capsys, "gc", url)
    assert (record["leftovers"], record["expired"], record["evicted"]) == (0, 0, 0)
    server.ask("ZADD", INDEX[shard_of(NAMES[0])].used, 1000, str(NAMES[0]))
    assert ask(capsys, "gc", url, "--older-than", "2d")["expired"] == 1
    record = ask(capsys, "gc", url, "--size", "40000")
    assert (record["evicted"], record["nbytes"] <= 40_000) == (2, True)
    assert ask(capsys, "stat", url)["objects"] == 1


@pytest.mark.parametrize("command", ["stat", "ls", "verify", "gc"])
def test_a_wrong_password_is_one_clear_line(
    command: str, server: ValkeyServer, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HYBRIDKV_VALKEY_PASSWORD", "battery-staple")
    assert run(["store", command, server.url]) == 2
    captured = capsys.readouterr()
    assert captured.err.count("\n") == 1
    assert "refuses the default user (WRONGPASS" in captured.err
    assert "HYBRIDKV_VALKEY_PASSWORD" in captured.err
    assert "battery-staple" not in captured.err + captured.out


@pytest.mark.parametrize("scheme", ["valkey", "rediss"])
def test_a_password_in_the_url_is_refused_and_not_shown(
    scheme: str, server: ValkeyServer, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["store", "stat", f"{scheme}://me:{PASSWORD}@127.0.0.1:{server.port}"]) == 2
    captured = capsys.readouterr()
    assert "password_file=" in captured.err
    assert PASSWORD not in captured.err + captured.out


def test_a_server_that_is_not_there_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["store", "stat", "valkey+unix:///no/such/socket"]) == 1
    captured = capsys.readouterr()
    assert captured.err.count("\n") == 1
    assert "/no/such/socket: No such file or directory" in captured.err


def test_without_a_server_the_error_says_what_to_do(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["store", "stat", "valkey://127.0.0.1:1"]) == 1
    captured = capsys.readouterr()
    assert captured.err.endswith("Connection refused; start a server there, or correct the URL\n")


def test_a_missing_password_is_named(
    server: ValkeyServer, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("HYBRIDKV_VALKEY_PASSWORD", raising=False)
    assert run(["store", "stat", server.url]) == 2
    assert "(NOAUTH: a password is needed)" in capsys.readouterr().err
