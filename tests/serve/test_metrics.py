"""What `/metrics` and the log tell is what happened."""

from __future__ import annotations

import json
import logging
import sys
from collections.abc import Iterator
from typing import Any

import pytest

from hybridkv import Engine
from hybridkv.serve.logs import _JsonFormatter, _TextFormatter
from tests import warm
from tests.engine.zoo import prompt
from tests.serve.serving import Served, check_idle, eventually, serving


@pytest.fixture
def fresh_server(engine: Engine) -> Iterator[Served]:
    """Its own counters begin at zero; the engine's do not."""
    with serving(engine) as served:
        yield served
        check_idle(served)


def with_prefix(metrics: dict[str, float], prefix: str) -> list[float]:
    return [value for name, value in metrics.items() if name.startswith(prefix)]


def test_requests_and_replies_are_counted_by_how_they_ended(fresh_server: Served) -> None:
    def ask(**body: Any) -> None:
        fresh_server.post("/v1/completions", **body)

    ask(prompt=prompt(20, 1), max_tokens=3, n=2, ignore_eos=True)
    ask(prompt=[prompt(20, 1), prompt(9, 2)], max_tokens=4, stream=True, ignore_eos=True)
    ask(prompt=prompt(20, 1), max_tokens=4, logit_bias={"2": 100}, temperature=0)
    ask(prompt=5)
    ask(prompt="x", model="other")
    fresh_server.http.get("/v1/models")
    found = fresh_server.metrics()
    requests = {name.split("|")[1]: n for name, n in found.items() if name.startswith("hybridkv_requests_total|")}
    assert requests == {"completed": 3, "refused": 2, "busy": 0, "disconnected": 0, "stopped": 0, "failed": 0}
    assert (found["hybridkv_replies_total|length"], found["hybridkv_replies_total|stop"]) == (4, 1)
    assert found["hybridkv_reply_tokens_sum"] == 2 * 3 + 2 * 4 + 1
    assert found["hybridkv_prompt_tokens_sum"] == 20 + 20 + 9 + 20
    for name in ("queue_seconds", "time_to_first_token_seconds", "request_seconds"):
        assert found[f"hybridkv_{name}_count"] == 4
    assert found["hybridkv_time_per_output_token_seconds_count"] == 3


def test_every_prompt_token_is_a_hit_or_a_miss(served: Served) -> None:
    before = served.metrics()
    for length in (60, 60, 75, 40):
        served.post("/v1/completions", prompt=prompt(75, 3)[:length], max_tokens=2)
    after = served.metrics()

    def grown(prefix: str) -> float:
        return sum(with_prefix(after, prefix)) - sum(with_prefix(before, prefix))

    assert grown("hybridkv_cache_prompt_tokens_total") == 60 + 60 + 75 + 40
    hits, misses = grown("hybridkv_cache_hit_tokens_total"), grown("hybridkv_cache_missed_tokens_total")
    assert hits + misses == 60 + 60 + 75 + 40
    assert hits >= 48
    assert grown("hybridkv_cache_lookups_total") == 4


def test_memory_adds_up(served: Served) -> None:
    served.post("/v1/completions", prompt=prompt(100, 4), max_tokens=2)
    found = served.metrics()
    slabs, used = with_prefix(found, "hybridkv_memory_slab_bytes|"), with_prefix(found, "hybridkv_memory_used_bytes|")
    null_slab = served.engine.plan.slab_bytes
    assert found["hybridkv_memory_bytes"] == sum(slabs) + found["hybridkv_memory_free_bytes"] + null_slab
    assert len(used) == len(slabs) == len(served.engine.plan.groups)
    assert sum(0 < part <= whole for part, whole in zip(used, slabs, strict=True)) == len(used) - 1
    assert found["hybridkv_memory_used_bytes|taps"] == 0  # nothing asked for hidden states
    served.http.post("/admin/cache/reset")
    assert not any(with_prefix(served.metrics(), "hybridkv_memory_used_bytes|"))


def test_what_prometheus_is_told_is_in_its_format(served: Served) -> None:
    response = served.http.get("/metrics")
    assert response.headers["content-type"].startswith("text/plain; version=0.0.4")
    described = [line for line in response.text.splitlines() if line.startswith("# HELP")]
    assert len(described) > 30
    assert all(line.split()[2].startswith("hybridkv_") and len(line.split()) > 3 for line in described)


def test_a_request_is_a_line_of_facts(served: Served, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "hybridkv.serve")
    headers = {"X-Request-Id": "my id"}
    body = {"prompt": prompt(30, 5), "max_tokens": 3, "ignore_eos": True}
    served.http.post("/v1/completions", json={**body, "stream": True}, headers=headers)
    served.http.get("/health")
    served.http.get("/no%0Awhere")
    assert eventually(lambda: sum(one.name == "hybridkv.serve" for one in caplog.records) == 2)
    first, second = (one for one in caplog.records if one.name == "hybridkv.serve")
    facts = json.loads(_JsonFormatter().format(first))
    assert facts["request"] == "my id"
    assert (facts["path"], facts["status"], facts["outcome"]) == ("/v1/completions", 200, "completed")
    assert (facts["prompt_tokens"], facts["cached_tokens"], facts["reply_tokens"]) == (30, 0, 3)
    assert (facts["finish"], facts["level"], facts["message"]) == (["length"], "info", "request")
    assert 0 < facts["ttft_s"] <= facts["seconds"]
    line = _TextFormatter().format(second)
    assert 'path="/no\\nwhere"' in line
    assert "status=404 outcome=refused" in line


EVERYTHING = """
import logging, threading, warnings
from hybridkv.serve import set_up_logs

set_up_logs({log_format!r}, "info")
logging.getLogger("hybridkv.serve").info("two\\nlines")
logging.getLogger("uvicorn.error").warning("Invalid HTTP request received.")
logging.getLogger("uvicorn.error").info("not worth a line")
logging.getLogger("transformers.tokenization").error("too long")
logging.getLogger("asyncio").error("never retrieved")
warnings.warn("deprecated")
thread = threading.Thread(target=lambda: 1 / 0, name="engine")
thread.start()
thread.join()
"""


def test_whatever_the_process_says_is_json() -> None:
    code = EVERYTHING.format(log_format="json")
    done = warm.run([sys.executable, "-c", code], check=True)
    lines = [json.loads(line) for line in done.stderr.splitlines()]
    assert [line["logger"] for line in lines] == [
        "hybridkv.serve",
        "uvicorn.error",
        "transformers.tokenization",
        "asyncio",
        "py.warnings",
        "hybridkv",
    ]
    assert lines[0]["message"] == "two\nlines"
    assert lines[-1]["message"] == "thread engine has failed"
    assert "ZeroDivisionError" in lines[-1]["error"]
