"""Kinds of errors: all are exported, bad input is a ValueError, failures are not, and the command's exit code tells."""

from __future__ import annotations

import errno
import inspect
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import hybridkv
import hybridkv.serve
import hybridkv.store.valkey.connections
from hybridkv import errors
from hybridkv.cli.main import run
from hybridkv.errors import (
    EngineError,
    HybridKVError,
    InputError,
    RequestError,
    StoreError,
    StoreFault,
    StoreInputError,
)
from hybridkv.serve.failures import status_of
from hybridkv.store import open_store
from hybridkv.store.shared_handle import SharedHandle

BAD_INPUT = {
    "CacheError",
    "ConfigError",
    "InputError",
    "MissingFieldError",
    "ParallelismError",
    "PlanError",
    "RequestError",
    "StoreInputError",
    "TraceError",
}
FAILURES = {
    "CorruptObject",
    "DiskError",
    "EngineError",
    "HybridKVError",
    "MissingObject",
    "ReplyError",
    "StoreError",
    "StoreFault",
    "UnknownFormat",
}
SOURCE = Path(hybridkv.__file__).parent


def no_space(*args: Any, **named: Any) -> Any:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def test_every_kind_is_exported_and_only_bad_input_is_a_value_error() -> None:
    kinds = dict(inspect.getmembers(errors, inspect.isclass))
    assert set(kinds) == BAD_INPUT | FAILURES
    assert {name for name in hybridkv.__all__ if name in kinds} == set(kinds)
    for name, kind in kinds.items():
        assert getattr(hybridkv, name) is kind
        assert issubclass(kind, HybridKVError)
        assert issubclass(kind, ValueError) == issubclass(kind, InputError) == (name in BAD_INPUT)
        assert kind.__doc__


def test_kinds_have_one_home() -> None:
    """Some packages have more, for what only they meet: clients of a server, linked engines, connections to Valkey."""
    found, todo = set(), [HybridKVError]
    while todo:
        todo += (below := todo.pop().__subclasses__())
        found.update(below)
    elsewhere = {kind for kind in found if kind.__module__ != errors.__name__ and not kind.__name__.startswith("_")}
    assert {kind.__module__.rpartition(".")[0] for kind in elsewhere} == {
        "hybridkv.serve",
        "hybridkv.link",
        "hybridkv.store.valkey",
    }


def test_every_raise_names_a_kind() -> None:
    """The base alone says neither bad input nor failure: only a call at the wrong moment raises it."""
    bare = [path for path in SOURCE.rglob("*.py") if re.search(r"raise HybridKVError\(", path.read_text("utf-8"))]
    assert [path.relative_to(SOURCE).as_posix() for path in bare] == ["engine/seams/frame.py"]


def test_every_kind_is_in_the_docs() -> None:
    page = (SOURCE.parents[1] / "docs/python.md").read_text("utf-8").partition("## Errors")[2].partition("\n## ")[0]
    bad, _, failures = page.partition("no `ValueError`")
    assert {name for name in BAD_INPUT if f"`{name}`" in bad} == BAD_INPUT
    assert {name for name in FAILURES if f"`{name}`" in failures or name == "HybridKVError"} == FAILURES


def test_errors_need_no_torch() -> None:
    code = "import sys; from hybridkv import HybridKVError, EngineError, StoreFault; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


@pytest.mark.parametrize(
    ("error", "code", "status"),
    [
        (InputError("bad"), 2, 400),
        (RequestError("bad"), 2, 400),
        (StoreInputError("bad"), 2, 400),
        (EngineError("dead"), 1, 503),
        (StoreFault("full"), 1, 500),
        (HybridKVError("not now"), 1, 500),
    ],
    ids=lambda one: type(one).__name__,
)
def test_exit_code_and_status_tell_bad_input_from_failures(
    error: HybridKVError, code: int, status: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fails(*args: Any, **named: Any) -> Any:
        raise error

    monkeypatch.setattr("hybridkv.cli.plan.load_model", fails)
    assert run(["plan", "qwen3-next-80b-a3b"]) == code
    assert capsys.readouterr().err == f"hybridkv: error: {error}\n"
    assert status_of(error) == status


def test_a_full_disk_is_no_bad_input(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("hybridkv.demo.acts.tempfile.TemporaryDirectory", no_space)
    assert run(["demo"]) == 1
    assert "No space left" in capsys.readouterr().err
    monkeypatch.setattr("hybridkv.store.file.folder.Folder._make", no_space)
    with pytest.raises(StoreFault, match="No space left") as caught:
        open_store([f"file://{tmp_path}/store?size=1MiB"])
    assert not isinstance(caught.value, ValueError)


def test_a_closed_store_is_no_bad_input() -> None:
    handle = SharedHandle("the store", lambda: None)
    handle.close()
    with pytest.raises(StoreError, match="the store is closed") as caught, handle:
        pass
    assert not isinstance(caught.value, ValueError)
