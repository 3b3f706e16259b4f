"""Pages of other origins, as browsers ask for them."""

from __future__ import annotations

from collections.abc import Iterator

import httpx
import pytest

from hybridkv import Engine
from tests.serve.serving import Served, error_of, serving

PAGE = "https://chat.example"
TEXT = "/v1/chat/completions"
BODY = {"messages": [{"role": "user", "content": "x"}], "max_tokens": 1}


@pytest.fixture(scope="module")
def keyless(engine: Engine) -> Iterator[Served]:
    with serving(engine, cors_origins=(PAGE, "http://localhost:3000")) as served:
        yield served


@pytest.fixture(scope="module")
def keyed(engine: Engine) -> Iterator[Served]:
    with serving(engine, cors_origins=("*",), api_keys=("key",)) as served:
        yield served


def preflight(served: Served, path: str = TEXT, origin: str = PAGE, method: str = "POST") -> httpx.Response:
    """As a browser sends it before OpenAI's client sends its request."""
    headers = {
        "Origin": origin,
        "Sec-Fetch-Site": "cross-site",
        "Access-Control-Request-Method": method,
        "Access-Control-Request-Headers": "authorization,content-type,x-request-id,x-stainless-os",
    }
    return served.http.options(path, headers=headers)


def words(response: httpx.Response, header: str) -> set[str]:
    return {word.strip().lower() for word in response.headers.get(header, "").split(",")}


def test_a_preflight_is_answered_and_so_is_the_request(keyless: Served) -> None:
    for origin in (PAGE, "http://localhost:3000"):
        asked = preflight(keyless, origin=origin)
        assert asked.status_code == 200
        assert asked.headers["access-control-allow-origin"] == origin
        assert words(asked, "access-control-allow-headers") >= {"authorization", "content-type", "x-stainless-os"}
        assert words(asked, "access-control-allow-methods") == {"get", "post", "delete"}
        assert "origin" in words(asked, "vary")
        reply = keyless.http.post(TEXT, json=BODY, headers={"Origin": origin, "Sec-Fetch-Site": "cross-site"})
        assert reply.status_code == 200
        assert reply.headers["access-control-allow-origin"] == origin
        assert words(reply, "access-control-expose-headers") == {"x-request-id", "retry-after"}
        assert "access-control-allow-credentials" not in reply.headers
        assert "origin" in words(reply, "vary")


def test_a_page_of_the_internet_may_use_a_server_of_this_network(keyless: Served) -> None:
    """Chromium asks for that before it sends anything to a local address."""
    headers = {
        "Origin": PAGE,
        "Access-Control-Request-Method": "POST",
        "Access-Control-Request-Private-Network": "true",
    }
    asked = keyless.http.options(TEXT, headers=headers)
    assert asked.status_code == 200, asked.text
    assert asked.headers["access-control-allow-private-network"] == "true"
    assert keyless.http.options(TEXT, headers={**headers, "Origin": "https://other.example"}).status_code == 400


def test_an_error_can_be_read_by_the_page(keyless: Served, keyed: Served) -> None:
    for served, status in ((keyless, 400), (keyed, 401)):
        reply = served.http.post(TEXT, json={}, headers={"Origin": PAGE})
        error_of(reply, status)
        assert reply.headers["access-control-allow-origin"] in (PAGE, "*")


def test_with_keys_any_origin_may_be_allowed(keyed: Served) -> None:
    asked = preflight(keyed, origin="http://any.example")
    assert (asked.status_code, asked.headers["access-control-allow-origin"]) == (200, "*")
    headers = {"Origin": "http://any.example", "Authorization": "Bearer key"}
    reply = keyed.http.post(TEXT, json=BODY, headers=headers)
    assert (reply.status_code, reply.headers["access-control-allow-origin"]) == (200, "*")


def test_other_origins_and_other_paths(keyless: Served, keyed: Served) -> None:
    asked = preflight(keyless, origin="https://evil.example")
    assert asked.status_code == 400
    assert "access-control-allow-origin" not in asked.headers
    for path in ("/admin/cache/reset", "/tokenize", "/metrics"):
        assert preflight(keyless, path).status_code in (403, 405)
        for reply in (preflight(keyed, path), keyed.http.get(path, headers={"Origin": PAGE})):
            assert "access-control-allow-origin" not in reply.headers


def test_without_the_option_no_header_allows_a_page(served: Served) -> None:
    assert preflight(served).status_code == 403
    reply = served.http.get("/v1/models")
    assert not [name for name in reply.headers if name.startswith("access-control")]
