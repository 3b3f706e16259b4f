"""A router: what workers are sent, what clients get, and what happens when workers or clients go."""

from __future__ import annotations

import socket
import threading
import time
from typing import Any

import httpx
import pytest

from hybridkv.errors import InputError
from hybridkv.route import RouteOptions
from hybridkv.route.pool import Pool
from tests.route.standins import EVENTS, LINK, PARAMS, PATIENCE_S, StandIn, eventually, routing, unused_url

ASKED = {
    "do_remote_decode": True,
    "do_remote_prefill": False,
    "remote_engine_id": None,
    "remote_block_ids": None,
    "remote_host": None,
    "remote_port": None,
}


# --- bodies -----------------------------------------------------------------------------------------------------------


def test_both_workers_get_their_bodies(prefill: StandIn, decode: StandIn) -> None:
    body = {"prompt": "ä", "max_tokens": 50, "min_tokens": 5, "temperature": 0.1, "kv_transfer_params": {"x": 1}}
    with routing([prefill], [decode]) as routed:
        reply = routed.http.post(
            "/v1/completions", json=body, headers={"Authorization": "Bearer k", "X-Request-Id": "mine"}
        )
        assert routed.metrics()["prefill_seconds_count"] == 1
        assert routed.metrics()["first_byte_seconds_count"] == 1
        assert routed.metrics()["requests_total|completed"] == 1
    assert (reply.status_code, reply.json()["from"]) == (200, "decode")
    assert reply.headers["x-request-id"] == "mine"
    asked = {**body, "max_tokens": 1, "min_tokens": 1, "stream": False, "kv_transfer_params": ASKED}
    assert prefill.bodies == [asked]
    assert decode.bodies == [
        {"prompt": "ä", "max_tokens": 50, "min_tokens": 5, "temperature": 0.1, "kv_transfer_params": PARAMS}
    ]
    for worker in (prefill, decode):
        assert (worker.seen[0]["authorization"], worker.seen[0]["x-request-id"]) == ("Bearer k", "mine")


def test_a_chat_is_sent_for_one_token(prefill: StandIn, decode: StandIn) -> None:
    body = {"messages": [], "stream": True, "stream_options": {"include_usage": True}}
    decode.events = EVENTS
    with routing([prefill], [decode]) as routed:
        routed.http.post("/v1/chat/completions", json=body)
    assert prefill.bodies == [
        {"messages": [], "stream": False, "max_tokens": 1, "max_completion_tokens": 1, "kv_transfer_params": ASKED}
    ]
    assert decode.bodies == [{**body, "kv_transfer_params": PARAMS}]


def test_both_get_the_same_request_id(prefill: StandIn, decode: StandIn) -> None:
    with routing([prefill], [decode]) as routed:
        given = routed.post(prompt="x").headers["x-request-id"]
    assert prefill.seen[0]["x-request-id"] == decode.seen[0]["x-request-id"] == given


@pytest.mark.parametrize("body", [
    {"prompt": ["a", "b"]}, {"prompt": [[1], [2]]}, {"prompt": "x", "hidden_states": True},
    {"prompt": "x", "prompt_logprobs": 0}, {"prompt": "x", "echo": True, "logprobs": 1},
])  # fmt: skip
def test_what_a_prefill_worker_cannot_help_with(prefill: StandIn, decode: StandIn, body: Any) -> None:
    with routing([prefill], [decode]) as routed:
        assert routed.post(**body, kv_transfer_params={"remote_host": "evil"}).status_code == 200
        assert routed.metrics()["direct_total"] == 1
    assert (prefill.bodies, decode.bodies) == ([], [body])


@pytest.mark.parametrize("prompt", ["x", ["x"], [1, 2, 3], [[1, 2]]])
def test_one_prompt_goes_both_ways(prefill: StandIn, decode: StandIn, prompt: Any) -> None:
    with routing([prefill], [decode]) as routed:
        routed.post(prompt=prompt)
    assert decode.bodies == [{"prompt": prompt, "kv_transfer_params": PARAMS}]


@pytest.mark.parametrize("content", [b"{", b"[]", b"\xff", b"[" * 100000])
def test_what_is_no_json_object(prefill: StandIn, decode: StandIn, content: bytes) -> None:
    with routing([prefill], [decode]) as routed:
        reply = routed.http.post("/v1/completions", content=content)
        assert (reply.status_code, reply.json()["error"]["type"]) == (400, "invalid_request_error")


# --- replies ----------------------------------------------------------------------------------------------------------


def test_a_stream_comes_byte_for_byte(prefill: StandIn, decode: StandIn) -> None:
    decode.events = EVENTS
    with routing([prefill], [decode]) as routed:
        reply = routed.post(prompt="x", stream=True)
        assert routed.metrics()["first_byte_seconds_count"] == 1
    assert reply.content == b"".join(EVENTS)
    assert reply.headers["content-type"] == "text/event-stream; charset=utf-8"


def test_events_come_as_they_are_sent(prefill: StandIn, decode: StandIn) -> None:
    decode.events = [EVENTS[0], b"hold"]
    with routing([prefill], [decode]) as routed:
        with httpx.stream("POST", f"{routed.url}/v1/completions", json={"prompt": "x"}, timeout=PATIENCE_S) as reply:
            pieces = reply.iter_raw()
            assert next(pieces) == EVENTS[0]
            assert routed.metrics()[f"in_flight|decode|{decode.url}"] == 1
        assert decode.ended.wait(PATIENCE_S)
        assert eventually(lambda: routed.metrics()[f"in_flight|decode|{decode.url}"] == 0)


@pytest.mark.parametrize("status", [400, 429, 500, 503])
def test_the_status_of_the_decode_worker_is_relayed(prefill: StandIn, decode: StandIn, status: int) -> None:
    decode.status = status
    with routing([prefill], [decode]) as routed:
        reply = routed.post(prompt="x")
    assert (reply.status_code, reply.json()["from"]) == (status, "decode")
    assert reply.headers.get("retry-after") == ("7" if status == 429 else None)


def test_a_stream_whose_worker_dies_ends_with_an_error(prefill: StandIn, decode: StandIn) -> None:
    decode.events = [EVENTS[0], b"die"]
    with routing([prefill], [decode]) as routed:
        text = routed.post(prompt="x", stream=True).text
        assert '"error"' in text.split("\n\n")[-2]
        assert routed.metrics()["requests_total|failed"] == 1


# --- prefill workers that do not help ---------------------------------------------------------------------------------


@pytest.mark.parametrize("status", [400, 401, 404, 422, 429])
def test_a_refusal_of_the_prefill_worker_is_relayed(prefill: StandIn, decode: StandIn, status: int) -> None:
    prefill.status = status
    with routing([prefill], [decode]) as routed:
        reply = routed.post(prompt="x")
        assert sum(routed.metrics()[f"fallbacks_total|{reason}"] for reason in ("failed", "down", "no_transfer")) == 0
    assert (reply.status_code, reply.json()["from"], decode.bodies) == (status, "prefill", [])


@pytest.mark.parametrize("reason", ["failed", "no_transfer", "down", "timeout", "hidden", "no json"])
def test_the_decode_worker_computes_the_prompt(prefill: StandIn, decode: StandIn, reason: str) -> None:
    url = prefill.url
    if reason == "failed":
        prefill.status = 500
    elif reason == "no_transfer":
        prefill.params = None
    elif reason == "hidden":
        prefill.params, reason = {"hidden_states_path": "/x"}, "no_transfer"
    elif reason == "no json":
        prefill.reply, reason = "text", "no_transfer"
    elif reason == "down":
        url = unused_url()
    else:
        prefill.is_held = True
    with routing([url], [decode], prefill_timeout_s=0.2 if reason == "timeout" else 60) as routed:
        assert routed.post(prompt="x").json()["from"] == "decode"
        metrics = routed.metrics()
        assert metrics[f"fallbacks_total|{reason}"] == 1
        assert metrics[f"worker_up|prefill|{url}"] == (reason not in ("down", "timeout"))
    assert decode.bodies == [{"prompt": "x"}]


def test_a_dead_prefill_worker_is_skipped_for_a_while(prefill: StandIn, decode: StandIn) -> None:
    dead = unused_url()
    with routing([dead, prefill], [decode], rest_s=0.5) as routed:
        for _ in range(4):
            routed.post(prompt="x")
        assert len(prefill.bodies) == 3
        assert routed.metrics()["fallbacks_total|down"] == 1
        time.sleep(0.6)
        for _ in range(2):
            routed.post(prompt="x")
        assert routed.metrics()["fallbacks_total|down"] == 2
    with routing([dead], [decode], rest_s=60) as routed:
        for _ in range(2):
            routed.post(prompt="x")
        assert routed.metrics()["fallbacks_total|no_worker"] == 1


# --- decode workers ---------------------------------------------------------------------------------------------------


def test_another_decode_worker_is_tried(prefill: StandIn, decode: StandIn) -> None:
    dead = unused_url()
    with routing([prefill], [dead, decode], rest_s=60) as routed:
        for _ in range(3):
            assert routed.post(prompt="x").json()["from"] == "decode"
        assert routed.metrics()[f"worker_up|decode|{dead}"] == 0
    assert len(prefill.bodies) == 3


def test_no_decode_worker(prefill: StandIn) -> None:
    with routing([prefill], [unused_url(), unused_url()]) as routed:
        reply = routed.post(prompt="x")
        assert set(reply.json()["error"]) == {"message", "type", "param", "code"}
        assert "of 2: check that they run" in reply.json()["error"]["message"]
        assert [routed.http.get(path).status_code for path in ("/v1/models", "/health")] == [503, 503]
        assert routed.metrics()["requests_total|failed"] == 1
    assert reply.status_code == 503


def test_requests_spread_over_workers() -> None:
    pool = Pool("decode", ["a", "b", "c"], rest_s=60)
    assert [one.url for one in (pool.choose() for _ in range(4)) if one is not None] == ["a", "b", "c", "a"]
    a, b, c = pool.workers
    with a.busy(), a.busy(), b.busy():
        assert pool.choose() is c
        with c.busy():
            assert {pool.choose(), pool.choose()} == {b, c}
        pool.mark_down(c)
        assert pool.choose() is b
        assert pool.choose([b]) is a
        assert pool.choose([a, b]) is None
        assert pool.choose_any([a, b]) is c


# --- clients that go --------------------------------------------------------------------------------------------------


def test_a_client_goes_before_its_body_is_complete(prefill: StandIn, decode: StandIn) -> None:
    with routing([prefill], [decode]) as routed:
        with socket.create_connection(("127.0.0.1", int(routed.url.split(":")[-1]))) as connection:
            connection.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Length: 100\r\n\r\n{")
        assert eventually(lambda: routed.metrics()["requests_total|disconnected"] == 1)
        assert routed.metrics()["requests_total|failed"] == 0


def test_a_client_goes_during_prefill(prefill: StandIn, decode: StandIn) -> None:
    prefill.is_held = True
    with routing([prefill], [decode]) as routed:
        routed.vanish(lambda _: bool(prefill.bodies), prompt="x")
        assert prefill.ended.wait(PATIENCE_S)
        assert eventually(lambda: routed.metrics()["requests_total|disconnected"] == 1)
        assert routed.metrics()[f"in_flight|prefill|{prefill.url}"] == 0
    assert decode.bodies == []


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_goes_during_decode(prefill: StandIn, decode: StandIn, stream: bool) -> None:
    if stream:
        decode.events = [EVENTS[0], b"hold"]
    decode.is_held = not stream
    with routing([prefill], [decode]) as routed:
        routed.vanish(lambda got: EVENTS[0] in got if stream else bool(decode.bodies), prompt="x")
        assert decode.ended.wait(PATIENCE_S)
        assert eventually(lambda: routed.metrics()["requests_total|disconnected"] == 1)
        assert routed.metrics()[f"in_flight|decode|{decode.url}"] == 0


def test_a_client_that_goes_after_the_last_event_has_its_reply(prefill: StandIn, decode: StandIn) -> None:
    decode.events = [*EVENTS, b"hold"]
    with routing([prefill], [decode]) as routed:
        routed.vanish(lambda got: EVENTS[-1] in got, prompt="x")
        assert decode.ended.wait(PATIENCE_S)
        assert eventually(lambda: routed.metrics()["requests_total|completed"] == 1)


# --- early ------------------------------------------------------------------------------------------------------------


def test_early_asks_both_at_once(prefill: StandIn, decode: StandIn) -> None:
    prefill.link, prefill.is_held, decode.events = LINK, True, EVENTS
    with routing([prefill], [decode], is_early=True) as routed:
        for _ in range(2):
            assert routed.post(prompt="x", max_tokens=9).content == b"".join(EVENTS)
        assert prefill.ended.wait(PATIENCE_S)  # the reply is complete: nobody waits for the prefill
    assert prefill.links_asked == 1
    ids = [body["kv_transfer_params"]["transfer_id"] for body in prefill.bodies]
    assert len(set(ids)) == 2
    assert prefill.bodies[0]["max_tokens"] == 1
    assert [body["kv_transfer_params"] for body in prefill.bodies] == [
        {"do_remote_decode": True, "transfer_id": one} for one in ids
    ]
    assert [body["kv_transfer_params"] for body in decode.bodies] == [
        {"do_remote_prefill": True, "transfer_id": one, "remote_host": "10.0.0.7", "remote_port": 5600} for one in ids
    ]


def test_a_link_on_all_addresses_is_reached_at_the_workers(prefill: StandIn, decode: StandIn) -> None:
    prefill.link = {**LINK, "host": "0.0.0.0"}
    with routing([prefill], [decode], is_early=True) as routed:
        routed.post(prompt="x")
    assert decode.bodies[0]["kv_transfer_params"]["remote_host"] == "127.0.0.1"


@pytest.mark.parametrize("status", [400, 500])
def test_an_early_prefill_fails_first(prefill: StandIn, decode: StandIn, status: int) -> None:
    prefill.link, prefill.status, decode.is_held = LINK, status, True
    prefill.is_ready = lambda: bool(decode.bodies)
    with routing([prefill], [decode], is_early=True) as routed:
        letting = threading.Thread(target=decode.let_go_when_left)
        letting.start()
        reply = routed.post(prompt="x")
        letting.join(PATIENCE_S)
        assert routed.metrics()["fallbacks_total|failed"] == (status == 500)
    if status == 500:
        assert reply.json()["from"] == "decode"
        assert decode.bodies[1:] == [{"prompt": "x"}]
    else:
        assert (reply.status_code, reply.json()["from"]) == (400, "prefill")


def test_a_worker_without_a_link_computes_first(prefill: StandIn, decode: StandIn) -> None:
    with routing([prefill], [decode], is_early=True) as routed:
        for _ in range(2):
            routed.post(prompt="x")
    assert prefill.links_asked == 1
    assert [body["kv_transfer_params"] for body in decode.bodies] == [PARAMS, PARAMS]


# --- other endpoints, options -----------------------------------------------------------------------------------------


def test_models_and_health_are_those_of_a_decode_worker(prefill: StandIn, decode: StandIn) -> None:
    with routing([prefill], [unused_url(), decode]) as routed:
        for path in ("/v1/models", "/v1/models/a%2Fb"):
            reply = routed.http.get(path, headers={"Authorization": "Bearer k"})
            assert reply.json() == {"data": ["decode", path]}
        assert decode.seen[0]["authorization"] == "Bearer k"
        assert routed.http.get("/health").json() == {"status": "ok"}
        decode.status = 503
        assert routed.http.get("/health").status_code == 503


def test_keys_and_large_bodies(prefill: StandIn, decode: StandIn) -> None:
    with routing([prefill], [decode], api_keys=("k3y",), max_body_bytes=2000) as routed:
        assert routed.post(prompt="x").status_code == 401
        routed.http.headers["Authorization"] = "Bearer k3y"
        assert routed.post(prompt="x").status_code == 200
        assert routed.post(prompt="x" * 3000).status_code == 413
        assert routed.http.get("/health").status_code == 200
    assert len(prefill.bodies) == 1


@pytest.mark.parametrize(
    "url", ["", "localhost", "127.0.0.1:80", "ftp://x", "http://", "http://x:y", "http://u@x", "http://x?y"]
)
def test_a_bad_url_is_refused(url: str) -> None:
    with pytest.raises(InputError, match=r"--decode.*write http://HOST:PORT"):
        RouteOptions(("http://x",), (url,))
