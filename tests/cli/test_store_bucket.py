"""`hybridkv store` on a bucket."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import obstore
import pytest

from hybridkv.cli.main import run
from tests.store.buckets import new_prefix, opened
from tests.store.samples import NAMESPACE, OTHER_NAMESPACE, load, name_of, rows_of, save
from tests.store.servers.s3 import CREDENTIALS, S3Server

NAMES = [name_of(1), name_of(2), name_of(3, "state"), name_of(4, namespace=OTHER_NAMESPACE)]


@pytest.fixture(scope="module")
def s3(tmp_path_factory: pytest.TempPathFactory) -> Iterator[S3Server]:
    with S3Server(tmp_path_factory.mktemp("s3") / "data") as server:
        yield server


@pytest.fixture
def prefix(s3: S3Server, monkeypatch: pytest.MonkeyPatch) -> str:
    for variable, value in CREDENTIALS.items():
        monkeypatch.setenv(variable, value)
    prefix = new_prefix()
    with opened(s3.url(prefix)) as store:
        for number, name in enumerate(NAMES):
            save(store, name, position=256 * number, value=1.5)
        store.describe(NAMESPACE, {"model": "qwen3-next-80b-a3b", "kv": "bf16"})
        store.touch([NAMES[0]])
    return prefix


def ask(capsys: pytest.CaptureFixture[str], *args: str, code: int = 0) -> Any:
    assert run(["store", *args, "--json"]) == code
    return json.loads(capsys.readouterr().out)


def test_stat_and_ls(s3: S3Server, prefix: str, capsys: pytest.CaptureFixture[str]) -> None:
    url = s3.url(prefix)
    record = ask(capsys, "stat", url)
    assert record["objects"] == 4
    assert record["namespaces"][NAMESPACE]["about"]["model"] == "qwen3-next-80b-a3b"
    assert {group: found["objects"] for group, found in record["namespaces"][NAMESPACE]["groups"].items()} == {
        "full": 2,
        "state": 1,
    }
    found = {one["key"]: one["position"] for one in ask(capsys, "ls", url)}
    assert found == {name.key: 256 * number for number, name in enumerate(NAMES)}
    assert [one["key"] for one in ask(capsys, "ls", url, "--group", "state")] == [NAMES[2].key]
    assert run(["store", "stat", url]) == 0
    assert "4 objects" in capsys.readouterr().out


def test_verify_finds_a_fault_and_deletes_only_when_asked(
    s3: S3Server, prefix: str, capsys: pytest.CaptureFixture[str]
) -> None:
    url = s3.url(prefix)
    assert ask(capsys, "verify", url)["corrupt"] == []
    obstore.put(s3.client(), f"{prefix}/hybridkv-v1/objects/{NAMES[1].path}", b"rotten")
    for args in ((), ("--delete",)):
        assert [one["name"] for one in ask(capsys, "verify", url, *args, code=1)["corrupt"]] == [str(NAMES[1])]
    assert ask(capsys, "verify", url)["objects"] == 3


def test_gc_evicts(s3: S3Server, prefix: str, capsys: pytest.CaptureFixture[str]) -> None:
    url = s3.url(prefix)
    nbytes = ask(capsys, "stat", url)["nbytes"]
    record = ask(capsys, "gc", url, "--size", str(nbytes // 4))
    assert (record["evicted"], record["nbytes"]) == (3, nbytes // 4)
    with opened(url) as store:
        assert load(store, NAMES[0]) == rows_of(NAMES[0])
        assert store.lookup(NAMES) == [True, False, False, False]


def test_a_server_that_is_not_there_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["store", "stat", "s3://bucket/prefix?endpoint=http://127.0.0.1:1"]) == 1
    assert "s3://bucket/prefix: cannot list objects" in capsys.readouterr().err
