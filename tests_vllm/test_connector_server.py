"""vLLM's own server with the connector: an engine in a process of its own, and clients all at once."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest
from engines import Host, Server, file_url, transfer_config
from shelves import verify, wait_until_quiet

from hybridkv.demo import demo_document, demo_model, demo_questions

CLIENTS = 6


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("served-store")


@pytest.fixture(scope="module")
def url(host: Host, directory: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    options = [
        "--served-model-name=demo",
        "--dtype=bfloat16",
        "--max-model-len=4096",
        "--max-num-seqs=8",
        "--enable-prompt-tokens-details",
        f"--kv-transfer-config={json.dumps(transfer_config([file_url(directory)]))}",
    ]
    host.wait_until_started()
    server = Server(host, tmp_path_factory.mktemp("server") / "log", demo_model(), *options)
    server.wait_until_healthy()
    yield server.url
    server.terminate()


def ask(url: str, question: str) -> tuple[str, int]:
    """The answer, and how many of the prompt's tokens were found."""
    messages = [{"role": "system", "content": demo_document()}, {"role": "user", "content": question}]
    body = {"model": "demo", "messages": messages, "temperature": 0, "max_tokens": 48}
    reply = httpx.post(f"{url}/v1/chat/completions", json=body, timeout=120).raise_for_status().json()
    details = reply["usage"]["prompt_tokens_details"] or {}
    return reply["choices"][0]["message"]["content"], details.get("cached_tokens") or 0


def burst(url: str) -> list[int]:
    """All questions at once, from many clients. Each is answered correctly; how many tokens were found for each."""
    questions = [demo_questions()[n % len(demo_questions())] for n in range(CLIENTS)]
    with ThreadPoolExecutor(CLIENTS) as clients:
        replies = list(clients.map(lambda one: ask(url, one.question), questions))
    for (answer, _), question in zip(replies, questions, strict=True):
        assert question.expected in answer
    return [cached for _, cached in replies]


def hang_up(url: str) -> None:
    """Clients that leave in the middle of their answers."""

    def leave(question: str) -> None:
        messages = [{"role": "system", "content": demo_document()}, {"role": "user", "content": question}]
        body: dict[str, Any] = {"model": "demo", "messages": messages, "max_tokens": 400, "stream": True}
        with httpx.stream("POST", f"{url}/v1/chat/completions", json=body, timeout=120) as stream:
            for _ in stream.iter_raw():
                return

    leaving = [threading.Thread(target=leave, args=(one.question,)) for one in demo_questions()[:3]]
    for thread in leaving:
        thread.start()
    for thread in leaving:
        thread.join()


def metric(url: str, name: str) -> float:
    lines = httpx.get(f"{url}/metrics").text.splitlines()
    return sum(float(line.rpartition(" ")[2]) for line in lines if line.startswith((f"{name}{{", f"{name} ")))


def reset(url: str, directory: Path) -> None:
    wait_until_quiet(directory)
    httpx.post(f"{url}/reset_prefix_cache").raise_for_status()


def test_a_burst_of_clients(url: str, directory: Path) -> None:
    burst(url)
    reset(url, directory)
    hits = metric(url, "vllm:external_prefix_cache_hits_total")
    hang_up(url)
    assert min(burst(url)) > 0
    assert metric(url, "vllm:external_prefix_cache_hits_total") > hits
    assert metric(url, "vllm:hybridkv_hit_tokens_total") > 0
    assert metric(url, "vllm:hybridkv_saved_objects_total") > 0
    assert metric(url, "vllm:hybridkv_load_failures_total") == 0
    assert verify(directory) > 0
