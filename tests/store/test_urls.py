"""Stores by their URLs: what is written wrongly gets one line that says what there is."""

from __future__ import annotations

import traceback
from contextlib import suppress
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hybridkv.errors import HybridKVError, StoreInputError
from hybridkv.store import Guarded, TieredStore, inspect_store, open_store
from hybridkv.store.urls import parse_url
from tests.store.samples import load, name_of, rows_of, save


def test_one_url_is_one_guarded_store(tmp_path: Path) -> None:
    for url in ("memory://?size=1MiB", f"file://{tmp_path}?size=1MiB&direct=off&sync=yes"):
        with open_store(url) as store:
            assert isinstance(store, Guarded)
        with open_store([url]) as store:
            assert isinstance(store, Guarded)
            assert save(store, name_of(1))
            assert load(store, name_of(1)) == rows_of(name_of(1))


def test_several_urls_are_guarded_tiers(tmp_path: Path) -> None:
    urls = ["memory://?size=1MiB&write=back", f"file://{tmp_path}?size=1MiB"]
    with open_store(urls) as store:
        assert isinstance(store, TieredStore)
        assert all(isinstance(tier, Guarded) for tier in store.tiers)
        save(store, name_of(1))
        assert store.tiers[1].lookup([name_of(1)]) == [False]
    with open_store(urls) as store:
        assert load(store, name_of(1)) == rows_of(name_of(1))


def test_paths_may_have_odd_letters(tmp_path: Path) -> None:
    with open_store([f"file://{tmp_path}/a%20b%3Fc?size=1MiB"]) as store:
        save(store, name_of(1))
    assert (tmp_path / "a b?c" / "hybridkv-v1").is_dir()


@pytest.mark.parametrize(
    ("url", "said"),
    [
        ("", "memory://"),
        ("/tmp/cache", "file:///path"),
        ("ftp://x", "memory://"),
        ("memory:?size=1", "memory://"),
        ("memory://", "no size"),
        ("memory://?size=lots", "not a size"),
        ("memory://?size=0", "size"),
        ("memory://x?size=1MiB", "no path"),
        ("memory:///x?size=1MiB", "no path"),
        ("memory://?size=1MiB&colour=red", "'colour'; memory stores have size, write"),
        ("memory://?size=1MiB&size=2MiB", "twice"),
        ("memory://?size", "no URL"),
        ("memory://?size=1MiB&write=maybe", "through, back"),
        ("memory://?size=1MiB&write=back", "tier below"),
        ("file://cache?size=1MiB", "file:///path"),
        ("file:///?size=1MiB", "directory"),
        ("file:////?size=1MiB", "names no directory"),
        ("file:///.?size=1MiB", "names no directory"),
        ("file:///x/../..?size=1MiB", "names no directory"),
        ("file:///tmp/%00?size=1MiB", "zero byte"),
        ("file:///tmp/x\n?size=1MiB", "%0A"),
        ("file:///tmp/x?size=0", "a file store of 0 bytes"),
        ("file:///tmp/x?size=-1", "not a size"),
        ("file:///tmp/x?size=99999999PiB", "more than any machine has"),
        ("file:///tmp/x?size=1MiB&direct=maybe", "auto, on, off"),
        ("file:///tmp/x?size=1MiB&sync=maybe", "yes, no"),
        ("file:///proc/x?size=1MiB", "no store can be made at /proc/x: No such file or directory; name a directory"),
        ("file://[::1/x?size=1", "no URL"),
    ],
)
def test_bad_urls_say_the_way_out(url: str, said: str) -> None:
    with pytest.raises(HybridKVError) as caught:
        open_store([url])
    assert said in str(caught.value)


@given(st.text(max_size=40), st.sampled_from(["", "file://", "file:///", "memory://?", "file:///x?size=1&"]))
def test_any_text_is_a_url_or_refused(text: str, start: str) -> None:
    with suppress(HybridKVError):
        parse_url(start + text)


def test_one_directory_is_not_two_tiers(tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(tmp_path / "a")
    for other in ("a", "b/../a", "link"):
        with pytest.raises(HybridKVError, match="a place twice"):
            open_store([f"file://{tmp_path}/a?size=1MiB", f"file://{tmp_path}/{other}?size=2MiB"])
    assert not (tmp_path / "a").exists()
    with open_store(["memory://?size=1MiB", "memory://?size=2MiB"]):
        pass


def test_no_url_is_an_error() -> None:
    with pytest.raises(HybridKVError, match="memory://"):
        open_store([])


def test_a_tier_that_cannot_be_opened_closes_the_others(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    with pytest.raises(HybridKVError, match="is a file"):
        open_store(["memory://?size=1MiB", f"file://{tmp_path}/file?size=1MiB"])


def test_tools_open_what_exists_without_a_size(tmp_path: Path) -> None:
    with pytest.raises(HybridKVError, match="no store"):
        inspect_store(f"file://{tmp_path}")
    assert list(tmp_path.iterdir()) == []
    with pytest.raises(HybridKVError, match="one process"):
        inspect_store("memory://?size=1MiB")
    with open_store([f"file://{tmp_path}?size=1MiB"]) as store:
        save(store, name_of(1))
    with inspect_store(f"file://{tmp_path}") as store:
        assert load(store, name_of(1)) == rows_of(name_of(1))


@pytest.mark.parametrize(
    "url",
    [
        "redis://:hunter2@host",
        "redis://me:hunter2@host:6379/0?size=1GiB",
        "rediss://me:hunter2@[::1]:1",
        "valkey+unix://me:hunter2@/run/valkey.sock",
        "s3://id:hunter2@bucket",
        "ftp://me:hunter2@host",
        "redis://host?password=hunter2",
        "redis://host?size=1GiB&Password=hunter2",
        "s3://bucket?secret_access_key=hunter2&region=x",
        "az://box?sig=hunter2",
        "redis://me:hunter2@host:port",
        "redis://me:hunter2@host\n",
        "file://me:hunter2@/tmp/x?size=1MiB",
        "redis://me:a/hunter2@host",
        "redis://me:a#hunter2@host",
        "redis://me:a?hunter2@host",
        "redis://me:12/hunter2@host",
        "redis://me%3Ahunter2@host",
        "redis://me%3ahunter2@host",
        "redis://me:hunter2@ho\u2100st",
        "redis://host?auth=hunter2",
        "redis://host?password=a#hunter2",
    ],
)
def test_a_password_in_a_url_is_refused_and_shown_nowhere(url: str, caplog: pytest.LogCaptureFixture) -> None:
    for opening in (open_store, inspect_store):
        with pytest.raises(StoreInputError) as caught:
            opening(url)
        text = "".join(traceback.format_exception(caught.value))
        assert "hunter2" not in text.replace(repr(url), "")
        assert "hunter2" not in str(caught.value) + caplog.text


def test_a_password_comes_from_a_file_or_the_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "secret"
    file.write_text("hunter2\n")
    monkeypatch.setenv("SOME_PASSWORD", "from the environment")
    assert parse_url("redis://host").secret("SOME_PASSWORD") == "from the environment"
    assert parse_url(f"redis://me@host?password_file={file}").secret("SOME_PASSWORD") == "hunter2"
    monkeypatch.delenv("SOME_PASSWORD")
    assert parse_url("redis://host").secret("SOME_PASSWORD") is None
    for bad in (tmp_path, tmp_path / "none", tmp_path / "empty", tmp_path / "large"):
        (tmp_path / "empty").write_text("\n")
        (tmp_path / "large").write_text("x" * 5000)
        with pytest.raises(StoreInputError, match="name a file with a password"):
            parse_url(f"redis://host?password_file={bad}").secret("SOME_PASSWORD")


@pytest.mark.parametrize(
    ("url", "said"),
    [
        ("redis://", "names no host"),
        ("valkey:///0", "names no host"),
        ("s3:///prefix", "names no host"),
        ("redis://host:99999", "no URL"),
        ("redis://host?colour=red", "'colour'; redis stores have size"),
        ("redis+unix://host/run/x.sock", "is no path"),
        ("redis://host?timeout=soon", "write it as 500ms or 2s"),
        ("redis://host?timeout=0s", "write it as 500ms or 2s"),
        (f"redis://host?timeout={'9' * 30}s", "write it as 500ms or 2s"),
        (f"s3://bucket?timeout={'9' * 400}s", "write it as 500ms or 2s"),
    ],
)
def test_bad_urls_of_servers_say_the_way_out(url: str, said: str) -> None:
    with pytest.raises(StoreInputError) as caught:
        parse_url(url).seconds("timeout", 1.0)
    assert said in str(caught.value)


@pytest.mark.parametrize("url", ["file:///tmp?size=3Gx", "valkey://127.0.0.1:1?size=3Gx", "s3://bucket/p?size=3Gx"])
def test_a_wrong_size_is_refused_where_none_is_needed(url: str) -> None:
    with pytest.raises(HybridKVError, match="'3Gx' is not a size"):
        inspect_store(url)


@pytest.mark.parametrize(
    ("one", "other", "is_same"),
    [
        ("valkey://h", "redis://h:6379/0", True),
        ("valkey://h/1", "valkeys://H:6379/1", True),
        ("valkey://h/0", "valkey://h/1", False),
        ("valkey://h:1", "valkey://h:2", False),
        ("valkey://[::1]", "valkey://[::1]:6379", True),
        ("valkey+unix:///run/x", "redis+unix:///run/../run/x?db=0", True),
        ("valkey+unix:///run/x", "valkey+unix:///run/x?db=1", False),
        ("s3://bucket/p", "s3://bucket/p/", True),
        ("s3://bucket/p", "gs://bucket/p", False),
        ("s3://bucket/p", "s3://bucket/p?endpoint=https://other", False),
        ("file:///a/b?size=1", "file:///a/./b?size=2", True),
        ("memory://?size=1", "memory://?size=1", False),
    ],
)
def test_places_are_the_same_if_they_hold_the_same_objects(one: str, other: str, is_same: bool) -> None:
    first, second = parse_url(one).place, parse_url(other).place
    assert (bool(first) and first == second) == is_same
    if is_same:
        with pytest.raises(StoreInputError, match="a place twice"):
            open_store([one, other])


def test_an_at_sign_is_no_password() -> None:
    address = parse_url("redis://host:6379?password_file=/run/a@b")
    assert address.options == {"password_file": "/run/a@b"}
    assert parse_url("file:///a:b@c?size=1MiB").path == "/a:b@c"
