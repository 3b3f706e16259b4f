"""Options of `hybridkv serve` that link it to other servers. Errors are told before a model is loaded."""

from __future__ import annotations

from pathlib import Path

import pytest

from hybridkv.cli.main import run
from hybridkv.errors import InputError
from hybridkv.link.interfaces import interface_of
from hybridkv.link.link import LinkOptions

PEER = ["--peer", "http://127.0.0.1:1"]


@pytest.fixture(autouse=True)
def _own_surroundings(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hybridkv.serve.set_up_logs", lambda log_format, level: None)
    monkeypatch.setenv("HYBRIDKV_LINK_SECRET", "a secret of tests, long enough")


@pytest.mark.parametrize(("args", "message"), [
    (PEER, "--peer without --role"),
    (["--no-link-checksums"], "--no-link-checksums without --role"),
    (["--link-port", "0"], "--link-port without --role"),
    (["--role", "cook"], "role 'cook': choose prefill, decode, both"),
    (["--role", "decode"], "role decode without a peer"),
    (["--role", "both"], "role both without a peer"),
    (["--role", "prefill", *PEER], "only role decode or both"),
    (["--role", "decode", "--peer", "127.0.0.1:1"], "write http://HOST:PORT"),
    (["--role", "prefill", "--link-host", "0.0.0.0"], "name one address"),
    (["--role", "prefill", "--link-port", "70000"], "link port 70000"),
    (["--role", "prefill", "--link-lease", "0"], "link lease 0 s"),
    (["--role", "prefill", "--link-timeout", "nan"], "link timeout nan s"),
    (["--role", "prefill", "--link-secret-file", "nowhere"], "cannot read the link secret"),
])  # fmt: skip
def test_nonsense_is_told(
    args: list[str], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert run(["serve", "no model is loaded", "--port", "0", *args]) == 2
    assert message in " ".join(capsys.readouterr().err.split())


def test_a_missing_secret_is_told(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.delenv("HYBRIDKV_LINK_SECRET")
    assert run(["serve", "no model is loaded", "--port", "0", "--role", "prefill"]) == 2
    assert "HYBRIDKV_LINK_SECRET" in capsys.readouterr().err


def test_peers_are_a_list() -> None:
    with pytest.raises(InputError, match="pass a list"):
        LinkOptions(role="decode", peers="http://127.0.0.1:1").check()


def test_interfaces_by_address() -> None:
    assert interface_of("127.0.0.1") == "lo"
    with pytest.raises(InputError, match=r"192\.0\.2\.1, which this machine does not have"):
        interface_of("192.0.2.1")
    with pytest.raises(InputError, match="give an address of this machine"):
        interface_of("no such host.invalid")
