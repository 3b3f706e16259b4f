"""Requests that schemathesis makes of the API's own description: whatever they are, they are answered as described."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import schemathesis
from hypothesis import HealthCheck, given, settings
from schemathesis import GenerationMode, checks

from hybridkv import Engine
from tests.serve.serving import check_idle, serving


@pytest.fixture(scope="module")
def api(checkpoint: Path) -> Iterator[Any]:
    """Replies are short: what is asked for is seldom modest."""
    with Engine(checkpoint, memory="16MiB", device="cpu", max_model_len=24) as engine, serving(engine) as served:
        yield schemathesis.openapi.from_url(f"{served.url}/openapi.json")
        check_idle(served)


OPERATIONS = [
    ("get", "/v1/link"),
    ("post", "/v1/completions"),
    ("post", "/v1/chat/completions"),
    ("post", "/v1/responses"),
    ("post", "/v1/messages"),
    ("post", "/v1/messages/count_tokens"),
    ("get", "/v1/models"),
    ("get", "/v1/models/{name}"),
    ("post", "/tokenize"),
    ("post", "/detokenize"),
    ("get", "/health"),
    ("get", "/metrics"),
    ("post", "/admin/cache/reset"),
    ("get", "/v1/hybridkv/whoami"),
    ("get", "/v1/hybridkv/requests"),
    ("get", "/v1/hybridkv/requests/{id}"),
    ("get", "/v1/hybridkv/requests/{id}/tokens"),
    ("get", "/v1/hybridkv/prefixes"),
    ("get", "/v1/hybridkv/prefixes/{key}"),
    ("delete", "/v1/hybridkv/prefixes/{key}"),
    ("post", "/v1/hybridkv/prefixes/{key}/pin"),
    ("delete", "/v1/hybridkv/prefixes/{key}/pin"),
]
ENDLESS = ("get", "/v1/hybridkv/live")
"""A stream without an end: tests/serve/test_live.py is about it."""
MAY_LACK = (
    "/v1/models/{name}",
    "/v1/link",
    "/v1/hybridkv/requests/{id}",
    "/v1/hybridkv/requests/{id}/tokens",
    "/v1/hybridkv/prefixes/{key}",
    "/v1/hybridkv/prefixes/{key}/pin",
)
"""Operations without a right answer here: other models than the served one, a link without a role, random names."""
BODIES = [
    "/v1/completions",
    "/v1/chat/completions",
    "/v1/messages",
    "/v1/messages/count_tokens",
    "/tokenize",
    "/detokenize",
]
# What is right in form may still be wrong, and what is unknown is ignored: neither is held against an answer.
DESCRIBED: list[Any] = [
    checks.not_a_server_error,
    checks.status_code_conformance,
    checks.content_type_conformance,
    checks.response_schema_conformance,
    checks.response_headers_conformance,
]


def test_all_operations_are_known(api: Any) -> None:
    found = {(one.method, path) for path in api for one in api[path].values()}
    assert found == {*OPERATIONS, ENDLESS}


def answers(api: Any, method: str, path: str, mode: GenerationMode) -> Counter[int]:
    """How often each status was answered."""
    statuses: Counter[int] = Counter()

    @settings(max_examples=60, derandomize=True, deadline=None, database=None, suppress_health_check=list(HealthCheck))
    @given(case=api[path][method].as_strategy(generation_mode=mode))
    def ask(case: Any) -> None:
        if isinstance(case.body, dict):
            case.body.pop("model", None)  # any other would not be found
        response = case.call_and_validate(checks=DESCRIBED, timeout=60)
        statuses[response.status_code] += 1

    ask()
    return statuses


@pytest.mark.parametrize(("method", "path"), OPERATIONS, ids=[" ".join(one) for one in OPERATIONS])
def test_what_is_right_in_form_is_answered_as_described(method: str, path: str, api: Any) -> None:
    assert answers(api, method, path, GenerationMode.POSITIVE)[200] or path in MAY_LACK


@pytest.mark.parametrize(("method", "path"), [one for one in OPERATIONS if one[1] in BODIES], ids=BODIES)
def test_what_is_wrong_in_form_is_answered_as_described(method: str, path: str, api: Any) -> None:
    assert answers(api, method, path, GenerationMode.NEGATIVE)[400]
