"""A router passes on calls of a few endpoints only, says for whom it asks, and keeps no reply that is too large."""

from __future__ import annotations

import socket
import time
from collections.abc import Iterator

import httpx
import pytest

from hybridkv.errors import InputError
from hybridkv.route import RouteOptions
from tests.patience import Stopwatch
from tests.route.standins import LINK, PATIENCE_S, PIECE, Routed, StandIn, eventually, routing

DETOURS = [
    "/v1/models/../../{}",
    "/v1/models/%2e%2e/%2e%2e/{}",
    "/v1/models/..%2f..%2f{}",
    "/v1/models/%2E%2E%2F%2e./{}",
    "/v1/models/x/../../../{}",
    "/v1/models/./../../{}",
    "/v1/models/..//../{}",
    "/v1/../{}",
    "/{}",
    "//{}",
    "http://127.0.0.1/v1/models/../../{}",
]
"""Targets that lead to another endpoint of a worker, for a server or client that makes them shorter."""
KEEPS = 4 << 20
"""Bytes that sockets and buffers between a worker and a client may hold."""


@pytest.fixture
def routed(prefill: StandIn, decode: StandIn) -> Iterator[Routed]:
    with routing([prefill], [decode]) as one:
        yield one


# --- paths ------------------------------------------------------------------------------------------------------------


def test_no_target_leads_to_another_endpoint(routed: Routed, prefill: StandIn, decode: StandIn) -> None:
    for target in DETOURS:
        status, body = routed.raw(f"GET {target.format('v1/hybridkv/requests')} HTTP/1.1\r\nHost: 127.0.0.1")
        assert (status, b"error" in body, b"secret" in body) == (404, True, False), target
        assert prefill.strays == decode.strays == []


def test_a_host_header_leads_nowhere_else(routed: Routed, decode: StandIn) -> None:
    head = "POST /v1/completions HTTP/1.1\r\nHost: 127.0.0.1/admin/cache/reset?\r\nContent-Length: 2\r\n"
    assert routed.raw(f"{head}Content-Type: application/json\r\nConnection: close\r\n\r\n{{}}")[0] == 403
    assert (decode.strays, len(decode.bodies)) == ([], 0)


def test_names_of_models_stay_whole(routed: Routed, decode: StandIn) -> None:
    for target, sent in {
        "": "",
        "/": "/",
        "/org/model": "/org%2Fmodel",
        "/org%2Fmodel": "/org%2Fmodel",
        "//home/me/model": "/%2Fhome%2Fme%2Fmodel",
        "/a..b/...": "/a..b%2F...",
        "/a%20b%3Fc%23d%25e": "/a%20b%3Fc%23d%25e",
        "/%252e%252e": "/%252e%252e",
        "/%C3%A4": "/%C3%A4",
        "/x?y=../z": "/x",
    }.items():
        status, body = routed.raw(f"GET /v1/models{target} HTTP/1.1\r\nHost: 127.0.0.1")
        assert (status, body) == (200, b'{"data":["decode","/v1/models%s"]}' % sent.encode()), target
    assert decode.strays == []


def test_a_name_that_is_too_long_is_refused(routed: Routed, decode: StandIn) -> None:
    assert routed.raw(f"GET /v1/models/{'/' * 1024} HTTP/1.1\r\nHost: 127.0.0.1")[0] == 200
    assert routed.raw(f"GET /v1/models/{'/' * 1025} HTTP/1.1\r\nHost: 127.0.0.1")[0] == 404
    assert len(decode.seen) == 1


# --- for whom it asks -------------------------------------------------------------------------------------------------


def test_every_call_says_for_whom_it_is(prefill: StandIn, decode: StandIn) -> None:
    prefill.link = LINK
    with routing([prefill], [decode], is_early=True) as routed:
        assert routed.post(prompt="x").status_code == 200
        for path in ("/v1/models", "/v1/models/x", "/health"):
            assert routed.http.get(path).status_code == 200
    assert (len(prefill.seen), prefill.links_asked) == (2, 1)
    assert len(decode.seen) == 4
    for seen in (*prefill.seen, *decode.seen):
        assert (seen["via"], seen["x-forwarded-for"]) == ("1.1 hybridkv-route", "127.0.0.1")


def test_what_clients_say_of_proxies_stays_before_that(routed: Routed, prefill: StandIn, decode: StandIn) -> None:
    head = "GET /v1/models HTTP/1.1\r\nHost: 127.0.0.1\r\nVia: 1.0 a\r\nVia: 1.1 b\r\nX-Forwarded-For: 10.0.0.1"
    assert routed.raw(f"{head}\r\nForwarded: for=x\r\nReferer: y\r\nCookie: z")[0] == 200
    [seen] = decode.seen
    assert seen["via"] == "1.0 a, 1.1 b, 1.1 hybridkv-route"
    assert seen["x-forwarded-for"].startswith("10.0.0.1, ")
    assert not {"forwarded", "referer", "cookie"} & set(seen)


def test_headers_with_other_bytes_are_passed_on(routed: Routed, decode: StandIn) -> None:
    assert routed.raw("GET /v1/models HTTP/1.1\r\nHost: 127.0.0.1\r\nAuthorization: Bearer \xe4")[0] == 200
    assert decode.seen[0]["authorization"] == "Bearer \xe4"


# --- replies that are too large, or have no end -----------------------------------------------------------------------


@pytest.mark.parametrize("status", [200, 400])
def test_a_reply_that_is_too_large(prefill: StandIn, decode: StandIn, status: int) -> None:
    decode.endless, decode.status = "application/json", status
    with routing([prefill], [decode], max_reply_bytes=1 << 20) as routed:
        for path in ("/v1/completions", "/v1/models", "/v1/models/x"):
            reply = routed.post(prompt="x") if path == "/v1/completions" else routed.http.get(path)
            assert (reply.status_code, reply.json()["error"]["type"]) == (502, "server_error")
            assert f"worker {decode.url} has more than 1 MiB" in reply.json()["error"]["message"]
            assert "--max-reply" in reply.json()["error"]["message"]
            assert decode.ended.wait(PATIENCE_S)
            decode.ended.clear()
        assert routed.metrics()[f"worker_up|decode|{decode.url}"] == 1


def test_a_reply_of_just_the_limit_is_relayed(prefill: StandIn, decode: StandIn) -> None:
    decode.reply = "x" * (1 << 20)
    size = (1 << 20) + 2
    for most, status in ((size, 200), (size - 1, 502)):
        with routing([prefill], [decode], max_reply_bytes=most) as routed:
            assert routed.post(prompt="x").status_code == status


@pytest.mark.parametrize("status", [200, 400])
def test_a_prefill_worker_that_says_too_much(prefill: StandIn, decode: StandIn, status: int) -> None:
    prefill.endless, prefill.status = "application/json", status
    with routing([prefill], [decode], max_reply_bytes=1 << 20) as routed:
        assert routed.post(prompt="x").json()["from"] == "decode"
        assert routed.metrics()["fallbacks_total|failed"] == 1
        assert prefill.ended.wait(PATIENCE_S)
    assert decode.bodies == [{"prompt": "x"}]


def test_the_least_limit_of_replies() -> None:
    with pytest.raises(InputError, match="max reply 1023 bytes"):
        RouteOptions(("http://x",), ("http://y",), max_reply_bytes=1023)


@pytest.mark.parametrize("path", ["/v1/models", "/health"])
def test_a_question_is_given_up_with_its_client(prefill: StandIn, decode: StandIn, path: str) -> None:
    """Long before the worker's time to answer ends, and whatever it sends."""
    decode.endless, decode.health_is_endless = "application/json", True
    with routing([prefill], [decode], max_reply_bytes=1 << 40) as routed:
        with socket.create_connection(("127.0.0.1", int(routed.url.split(":")[-1]))) as one:
            one.sendall(f"GET {path} HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n".encode())
            assert eventually(lambda: decode.num_sent > 0)
        begin = Stopwatch()
        assert decode.ended.wait(PATIENCE_S)
        assert begin.seconds < 4.0


def test_a_question_is_given_up_after_a_time(
    prefill: StandIn, decode: StandIn, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Although the worker sends all the time."""
    monkeypatch.setattr("hybridkv.route.upstream._QUESTION_S", 0.3)
    decode.endless = "application/json"
    with routing([prefill], [decode], max_reply_bytes=1 << 40) as routed:
        assert routed.http.get("/v1/models").status_code == 503
        assert decode.ended.wait(PATIENCE_S)


def test_a_client_that_does_not_read_fills_no_memory(prefill: StandIn, decode: StandIn) -> None:
    decode.endless = "text/event-stream"
    with routing([prefill], [decode]) as routed:
        with httpx.stream("POST", f"{routed.url}/v1/completions", json={"prompt": "x"}, timeout=PATIENCE_S) as reply:
            assert eventually(lambda: decode.num_sent > 0)
            sent = -1
            while sent != decode.num_sent:
                sent = decode.num_sent
                time.sleep(0.3)
                assert sent * len(PIECE) < KEEPS * 8
            assert next(reply.iter_raw(1 << 20)) == PIECE * 16
        assert decode.ended.wait(PATIENCE_S)
