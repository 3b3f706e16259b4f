"""vLLM's load generator, `vllm bench serve`, against our server: as its users call it, without internet."""

from __future__ import annotations

import gc
import importlib.metadata
import json
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from vllm.entrypoints.serve.tokenize.protocol import (
    DetokenizeRequest,
    DetokenizeResponse,
    TokenizeChatRequest,
    TokenizeCompletionRequest,
    TokenizeResponse,
)
from vllm_distribution import ASKED_FOR, INSTALLED, renamed_distribution

from hybridkv.demo import demo_model

Bench = Callable[..., dict[str, Any]]

PATIENCE_S = 300.0
COUNTING_S = 10.0
NUM_PROMPTS = 6
PROMPT_TOKENS = 40
REPLY_TOKENS = 12
RANDOM = [
    "--dataset-name=random",
    f"--num-prompts={NUM_PROMPTS}",
    f"--random-input-len={PROMPT_TOKENS}",
    f"--random-output-len={REPLY_TOKENS}",
]
CHAT = ["--backend=openai-chat", "--endpoint=/v1/chat/completions"]
CONVERSATIONS = [
    {"conversations": [{"from": "human", "value": question}, {"from": "gpt", "value": answer}]}
    for question, answer in (
        ("who keeps the pages of the next request", "the system keeps the state and the window"),
        ("who reads the letter in the garden", "the young people of the old city read it at night"),
    )
]


@pytest.fixture(scope="module")
def model() -> Path:
    return demo_model()


@pytest.fixture(scope="module")
def url(model: Path) -> Iterator[str]:
    """A server in a process of its own. It is killed when patience ends: clients then fail instead of waiting."""
    command = [str(Path(sys.executable).with_name("hybridkv")), "serve", str(model)]
    options = ["--port=0", "--memory=256MiB", "--device=cpu", "--log-level=error"]
    process = subprocess.Popen([*command, *options], stdout=subprocess.PIPE, stdin=subprocess.DEVNULL, text=True)
    deadline = threading.Timer(PATIENCE_S, process.kill)
    deadline.start()
    try:
        yield address_of(process)
    finally:
        deadline.cancel()
        process.terminate()
        process.communicate(timeout=PATIENCE_S)
    assert process.returncode == 0


def address_of(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    for line in process.stdout:
        if line.startswith("Serving at "):
            return line.split()[2]
    raise AssertionError("the server ended before it served")


@pytest.fixture
def bench(url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Bench:
    """Runs the command, checks what every run must show, and returns the results that it saved."""
    from vllm.entrypoints.cli.main import main

    def run(*options: str) -> dict[str, Any]:
        before = counted(url)
        saving = ["--save-result", "--save-detailed", f"--result-dir={tmp_path}", "--result-filename=result.json"]
        command = ["vllm", "bench", "serve", f"--base-url={url}", "--temperature=0", "--disable-tqdm", *saving]
        monkeypatch.setattr(sys, "argv", [*command, *options])
        with renamed_distribution():
            main()
        gc.unfreeze()  # which the command has frozen: at its end, this process would tell of leaks
        result: dict[str, Any] = json.loads((tmp_path / "result.json").read_text(encoding="utf-8"))
        assert (result["completed"], result["failed"]) == (result["num_prompts"], 0), result["errors"]
        assert result["total_input_tokens"] == sum(result["input_lens"])
        assert result["total_output_tokens"] == sum(result["output_lens"])
        done = {
            "requests": result["completed"],
            "prompt_tokens": result["total_input_tokens"],
            "reply_tokens": result["total_output_tokens"],
        }
        wait_until_counted(url, {name: value + before[name] for name, value in done.items()})
        return result

    return run


def counted(url: str) -> dict[str, float]:
    """What the server has counted so far."""
    names = {
        'hybridkv_requests_total{outcome="completed"}': "requests",
        "hybridkv_prompt_tokens_sum": "prompt_tokens",
        "hybridkv_reply_tokens_sum": "reply_tokens",
    }
    lines = [line.rpartition(" ") for line in httpx.get(f"{url}/metrics").text.splitlines()]
    return {names[name]: float(value) for name, _, value in lines if name in names}


def wait_until_counted(url: str, expected: dict[str, float]) -> None:
    """A client has its last byte a moment before the server counts the request."""
    end = time.monotonic() + COUNTING_S
    while counted(url) != expected and time.monotonic() < end:
        time.sleep(0.05)
    assert counted(url) == expected


def test_the_cpu_build_still_has_another_name() -> None:
    """Otherwise vllm_distribution.py is of no use any more."""
    assert importlib.metadata.version(INSTALLED)
    with pytest.raises(importlib.metadata.PackageNotFoundError):
        importlib.metadata.version(ASKED_FOR)
    with renamed_distribution():
        assert importlib.metadata.version(ASKED_FOR) == importlib.metadata.version(INSTALLED)


def test_completions(bench: Bench, model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    result = bench("--model=hybridkv-demo", f"--tokenizer={model}", *RANDOM, "--backend=openai")
    # Its random tokens become text and tokens again: with a trained tokenizer their number may change a little.
    assert len(result["input_lens"]) == NUM_PROMPTS
    assert all(abs(count - PROMPT_TOKENS) <= 5 for count in result["input_lens"])
    assert result["output_lens"] == [REPLY_TOKENS] * NUM_PROMPTS
    assert "/tokenize unavailable" not in capsys.readouterr().out


def test_chats(bench: Bench, model: Path) -> None:
    result = bench("--model=hybridkv-demo", f"--tokenizer={model}", *RANDOM, *CHAT)
    assert all(count > PROMPT_TOKENS for count in result["input_lens"])  # the template's tokens come on top
    assert result["output_lens"] == [REPLY_TOKENS] * NUM_PROMPTS


def test_a_model_that_the_client_asks_for(bench: Bench, capsys: pytest.CaptureFixture[str]) -> None:
    """Without --model it takes the first that the server has, and the tokenizer from where that is."""
    assert bench(*RANDOM)["output_lens"] == [REPLY_TOKENS] * NUM_PROMPTS
    assert "/tokenize unavailable" not in capsys.readouterr().out


@pytest.mark.parametrize("backend", [["--backend=vllm", "--logprobs=3"], CHAT], ids=["completions", "chats"])
def test_conversations_from_a_file(backend: list[str], bench: Bench, model: Path, tmp_path: Path) -> None:
    path = tmp_path / "sharegpt.json"
    path.write_text(json.dumps(CONVERSATIONS), encoding="utf-8")
    data = ["--dataset-name=sharegpt", f"--dataset-path={path}", f"--num-prompts={len(CONVERSATIONS)}", "--ignore-eos"]
    shown = ["--percentile-metrics=ttft,tpot,itl,e2el", "--goodput", "e2el:600000"]
    result = bench("--model=hybridkv-demo", f"--tokenizer={model}", *data, *shown, *backend)
    assert min(result["output_lens"]) > 1
    assert all(result[f"p99_{name}_ms"] > 0 for name in ("ttft", "tpot", "itl", "e2el"))
    assert result["request_goodput"] == pytest.approx(result["request_throughput"])


def test_tokens_are_asked_for_and_answered_as_vllm_has_it(url: str) -> None:
    schemas = httpx.get(f"{url}/openapi.json").json()["components"]["schemas"]
    not_served = {"chat_template", "tools"}  # refused by name
    without_meaning = {"media_io_kwargs", "mm_processor_kwargs"}  # only text is served
    for theirs, ours in (
        (TokenizeCompletionRequest, "TokenizeText"),
        (TokenizeChatRequest, "TokenizeChat"),
        (DetokenizeRequest, "DetokenizeRequest"),
    ):
        assert theirs.model_fields.keys() - not_served - without_meaning <= schemas[ours]["properties"].keys()

    def post(path: str, **body: Any) -> Any:
        return httpx.post(f"{url}{path}", json=body).raise_for_status().json()

    text = "the system keeps the pages"
    for body in ({"prompt": text}, {"messages": [{"role": "user", "content": text}], "return_token_strs": True}):
        reply = post("/tokenize", **body)
        assert reply == TokenizeResponse(**reply).model_dump()
    tokens = post("/tokenize", prompt=text, add_special_tokens=False)["tokens"]
    assert post("/detokenize", tokens=tokens) == DetokenizeResponse(prompt=text).model_dump()
