"""A router in front of a prefill and a decode server that are linked."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any, cast

import openai
import pytest

from hybridkv import Engine, RequestError
from hybridkv.link.link import LinkOptions
from tests.engine.checkpoints import save_checkpoint
from tests.route.standins import Routed, routing
from tests.route.test_forwarding import DETOURS
from tests.serve.serving import MODEL, Served, error_of, eventually, serving


@pytest.fixture(scope="module")
def workers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Served, Served]]:
    folder = tmp_path_factory.mktemp("route")
    save_checkpoint("qwen3_next", folder / "tiny")
    secret = folder / "secret"
    secret.write_text("a secret of two servers")
    first = LinkOptions(role="prefill", secret_file=secret)
    with Engine(folder / "tiny", memory="16MiB", device="cpu", link=first) as one:
        assert one.link is not None
        second = LinkOptions(role="decode", peers=[f"http://127.0.0.1:{one.link.port}"], secret_file=secret)
        with (
            Engine(folder / "tiny", memory="16MiB", device="cpu", link=second) as other,
            serving(one) as prefill,
            serving(other) as decode,
        ):
            yield prefill, decode


@pytest.fixture
def routed(workers: tuple[Served, Served]) -> Iterator[Routed]:
    with routing([workers[0].url], [workers[1].url]) as routed:
        yield routed


@pytest.mark.parametrize("is_early", [False, True])
def test_prompts_come_from_the_prefill_worker(workers: tuple[Served, Served], is_early: bool) -> None:
    prompt = f"The village of {is_early}"
    body: dict[str, Any] = {"prompt": prompt, "max_tokens": 12, "temperature": 0, "ignore_eos": True, "logprobs": 2}
    before = workers[1].metrics()["hybridkv_link_received_requests_total"]
    with routing([workers[0].url], [workers[1].url], is_early=is_early) as routed:
        via = routed.post(**body).json()
        assert routed.metrics()["prefill_seconds_count"] == 1
    assert via["choices"] == workers[1].post("/v1/completions", **body, cache_salt="alone").json()["choices"]
    assert workers[1].metrics()["hybridkv_link_received_requests_total"] == before + 1
    assert via["usage"]["prompt_tokens_details"]["cached_tokens"] == via["usage"]["prompt_tokens"]


def test_transfers_that_a_server_cannot_do_are_refused(workers: tuple[Served, Served]) -> None:
    asked = {"do_remote_decode": True}
    there = {"do_remote_prefill": True, "remote_host": "10.0.0.1", "remote_port": 80, "remote_request_id": "x"}
    for worker, params, message in (
        (workers[1], asked, "role decode"),
        (workers[0], there, "role prefill"),
        (workers[1], there, "10.0.0.1:80 is not a peer"),
        (workers[1], {**there, "do_remote_decode": True}, "both are true"),
        (workers[0], {"do_remote_decode": "yes"}, "true or false"),
    ):
        error = error_of(worker.post("/v1/completions", prompt="x", kv_transfer_params=params), 400)
        assert message in error["message"]
        assert error["param"] == "kv_transfer_params"
    several = workers[0].post("/v1/completions", prompt=["x", "y"], kv_transfer_params=asked)
    assert "2 prompts" in error_of(several, 400)["message"]
    streamed = workers[0].post("/v1/completions", prompt="x", stream=True, kv_transfer_params=asked)
    assert "stream" in error_of(streamed, 400)["message"]


HALF = "\ud800"
"""Half of a surrogate pair: JSON may have it, UTF-8 not."""
WRONG_PARAMS: list[Any] = [
    {"do_remote_decode": 1},
    *({"do_remote_decode": True, "transfer_id": one} for one in (HALF, "x" * 257, 7, ["x"])),
    *(
        {"do_remote_prefill": True, "remote_request_id": "x", "remote_host": "127.0.0.1", "remote_port": one}
        for one in ("9" * 5000, "", "80a", "\u0663", 0, 65536, -1, 10**400, 80.0, True, [80])
    ),
    *({"do_remote_prefill": True, "remote_host": one, "remote_port": 80} for one in (HALF, "x" * 257, 7)),
    {"do_remote_prefill": True, "remote_host": "x", "remote_port": 80, "remote_request_id": HALF},
    {"do_remote_prefill": True, "remote_host": "x"},
    {"do_remote_prefill": True, "remote_port": 80},
]


def test_transfers_of_a_wrong_form_are_refused_and_pin_nothing(workers: tuple[Served, Served]) -> None:
    for params in WRONG_PARAMS:
        worker = workers["do_remote_prefill" in params]
        body = json.dumps({"prompt": "x", "kv_transfer_params": params})  # with escapes, as httpx would not write it
        reply = worker.http.post("/v1/completions", content=body, headers={"Content-Type": "application/json"})
        error = error_of(reply, 400)
        assert error["param"] == "kv_transfer_params", params
        assert error["message"].startswith("kv_transfer_params: "), params
        assert (": remote_port: " in error["message"]) is (params.get("remote_request_id") == "x"), params
        assert len(error["message"]) < 250
        with pytest.raises(RequestError, match="kv_transfer_params"):
            worker.engine.generate([[5, 6]], kv_transfer_params=params, progress=False)
    for worker in workers:
        for wrong in ([1], {"do_remote_decode": 10**5000}, {"transfer_id": 10**5000}, {"remote_port": 10**5000}):
            with pytest.raises(RequestError, match="kv_transfer_params"):
                worker.engine.generate([[5, 6]], kv_transfer_params=cast(Any, wrong), progress=False)
        assert worker.engine.stats().memory.pinned_prefixes == 0


def test_transfers_with_all_that_proxies_send_are_taken(workers: tuple[Served, Served]) -> None:
    link = workers[0].engine.link
    assert link is not None
    nulls = dict.fromkeys(("remote_engine_id", "remote_block_ids", "remote_host", "remote_port", "transfer_id"))
    body = json.dumps({"prompt": "x y z", "max_tokens": 1, "kv_transfer_params": {
        **nulls, "do_remote_decode": True, "do_remote_prefill": False, "tp_size": float("nan"), HALF: [HALF, 10**400],
    }})  # fmt: skip
    reply = workers[0].http.post("/v1/completions", content=body, headers={"Content-Type": "application/json"})
    params = reply.json()["kv_transfer_params"]
    assert params["remote_port"] == link.port
    taken = workers[1].post(
        "/v1/completions", prompt="x y z", kv_transfer_params={**params, "remote_port": str(link.port)}
    )
    assert taken.json()["usage"]["prompt_tokens_details"]["cached_tokens"] > 0
    assert eventually(lambda: workers[0].engine.stats().memory.pinned_prefixes == 0)


def test_link_says_where_it_is(workers: tuple[Served, Served]) -> None:
    link = workers[0].engine.link
    assert link is not None
    card = workers[0].http.get("/v1/link").json()
    assert card == {"role": "prefill", "engine_id": link.engine_id, "host": "127.0.0.1", "port": link.port}
    assert workers[1].http.get("/v1/link").json()["port"] is None


def test_a_client_gets_what_a_server_says(workers: tuple[Served, Served], routed: Routed) -> None:
    body: dict[str, Any] = {"prompt": "The village of", "max_tokens": 12, "temperature": 0, "ignore_eos": True}
    direct, via = workers[1].post("/v1/completions", **body).json(), routed.post(**body).json()
    assert via["choices"] == direct["choices"]
    assert via["usage"]["completion_tokens"] == 12
    assert routed.metrics()["prefill_seconds_count"] == 1


def test_openai_clients_work(routed: Routed) -> None:
    client = openai.OpenAI(base_url=f"{routed.url}/v1", api_key="none", max_retries=0)
    assert client.models.list().data[0].id == MODEL
    for limit in ("max_tokens", "max_completion_tokens"):
        messages = [{"role": "user", "content": "What does Mira Holt do?"}]
        asked: Any = {"model": MODEL, "messages": messages, "temperature": 0, limit: 8}
        whole = client.chat.completions.create(**asked)
        pieces = client.chat.completions.create(**asked, stream=True, stream_options={"include_usage": True})
        text = "".join(one.choices[0].delta.content or "" for one in pieces if one.choices)
        assert text == whole.choices[0].message.content
    assert eventually(lambda: routed.metrics()["requests_total|completed"] == 4)
    assert not any(count for name, count in routed.metrics().items() if name.startswith("fallbacks_total"))


def test_clients_of_a_router_do_not_become_the_operator(workers: tuple[Served, Served], routed: Routed) -> None:
    """The workers run without keys on this machine, and the router calls them from it."""
    routed.post(prompt="a secret of another client", max_tokens=1)
    for path in ("requests", "live?topics=requests", "prefixes", "whoami"):
        with workers[1].http.stream("GET", f"/v1/hybridkv/{path}") as direct:
            assert direct.status_code == 200
        for target in DETOURS:
            status, body = routed.raw(f"GET {target.format('v1/hybridkv/' + path)} HTTP/1.1\r\nHost: 127.0.0.1")
            assert (status, b"tokens" in body, b"is_operator" in body) == (404, False, False), target


def test_a_mistake_is_told_by_the_prefill_worker(workers: tuple[Served, Served], routed: Routed) -> None:
    client = openai.OpenAI(base_url=f"{routed.url}/v1", api_key="none", max_retries=0)
    with pytest.raises(openai.BadRequestError, match="temperature"):
        client.completions.create(model=MODEL, prompt="x", temperature=-1)
    assert routed.post(prompt="x", model="else").status_code == 404
