"""What people call namespaces: anyone may have written it."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from hybridkv.store import FileStore, StoreError
from hybridkv.store.descriptions import decode_description
from tests.store.samples import NAMESPACE, OTHER_NAMESPACE

BAD_TEXTS = ["", "a\nb", "\x1b[31mred", "a\x00", "\u202eabc", "\ud800", "x" * 257, 7, None, ["a"], {"a": "b"}]


@pytest.mark.parametrize("bad", BAD_TEXTS, ids=repr)
def test_what_a_terminal_would_not_just_print_is_left_out(bad: object) -> None:
    raw = json.dumps({"model": bad, "type": "llama"}).encode()
    assert decode_description(raw) == {"type": "llama"}
    if isinstance(bad, str):
        assert decode_description(json.dumps({bad: "x", "type": "llama"}).encode()) == {"type": "llama"}


@pytest.mark.parametrize("raw", [b"", b"{", b"[]", b"1", b"\xff", b"[" * 60_000, b" " * 65_535 + b"{}"])
def test_what_is_no_description_is_none(raw: bytes) -> None:
    assert decode_description(raw) is None


def test_names_in_any_script_are_kept() -> None:
    info = {"model": "Qwen/Qwen3-Next-80B \u6a21\u578b \u00fc"}
    assert decode_description(json.dumps(info).encode()) == info


def test_what_is_no_file_is_passed_over(tmp_path: Path) -> None:
    """A pipe must not be waited for, and a link leads to who knows what."""
    with FileStore(tmp_path, 1 << 20) as store:
        store.describe(NAMESPACE, {"model": "m"})
        about = tmp_path / "hybridkv-v1" / "about"
        os.mkfifo(about / f"{OTHER_NAMESPACE}.json")
        (about / f"{'1' * 32}.json").mkdir()
        (about / f"{'2' * 32}.json").symlink_to(about / f"{NAMESPACE}.json")
        assert store.descriptions() == {NAMESPACE: {"model": "m"}}


def test_long_descriptions_are_refused(tmp_path: Path) -> None:
    with FileStore(tmp_path, 1 << 20) as store, pytest.raises(StoreError, match="at most"):
        store.describe(NAMESPACE, {"model": "m" * 70_000})
