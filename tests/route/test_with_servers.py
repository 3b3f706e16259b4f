"""A router in front of two servers whose prefill worker transfers nothing: the decode worker computes all prompts."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import openai
import pytest

from hybridkv import Engine
from tests.engine.checkpoints import save_checkpoint
from tests.route.standins import Routed, routing
from tests.serve.serving import MODEL, Served, eventually, serving


@pytest.fixture(scope="module")
def workers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Served, Served]]:
    checkpoint = tmp_path_factory.mktemp("route") / "tiny"
    save_checkpoint("qwen3_next", checkpoint)
    with (
        Engine(checkpoint, memory="16MiB", device="cpu") as one,
        Engine(checkpoint, memory="16MiB", device="cpu") as other,
        serving(one) as prefill,
        serving(other) as decode,
    ):
        yield prefill, decode


@pytest.fixture
def routed(workers: tuple[Served, Served]) -> Iterator[Routed]:
    with routing([workers[0].url], [workers[1].url]) as routed:
        yield routed


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
    assert routed.metrics()["fallbacks_total|no_transfer"] == 4


def test_a_mistake_is_told_by_the_prefill_worker(workers: tuple[Served, Served], routed: Routed) -> None:
    client = openai.OpenAI(base_url=f"{routed.url}/v1", api_key="none", max_retries=0)
    with pytest.raises(openai.BadRequestError, match="temperature"):
        client.completions.create(model=MODEL, prompt="x", temperature=-1)
    assert routed.post(prompt="x", model="else").status_code == 404
