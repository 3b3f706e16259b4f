"""Who may see what: keys, the operator's key, and callers of a server without keys."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from starlette.datastructures import Headers

from hybridkv import Engine
from hybridkv.errors import InputError
from hybridkv.route import RouteOptions, make_router
from hybridkv.serve.access import Access, Caller
from hybridkv.serve.failures import KeyNeededError
from tests.route.standins import listening
from tests.serve.serving import Served, error_of, eventually, serving

LOCAL = {"host": "127.0.0.1:8000"}
ROOT = "/v1/hybridkv"
FOR_THE_OPERATOR = [
    ("GET", f"{ROOT}/prefixes"),
    ("GET", f"{ROOT}/prefixes/ab"),
    ("DELETE", f"{ROOT}/prefixes/ab"),
    ("POST", f"{ROOT}/prefixes/ab/pin"),
    ("DELETE", f"{ROOT}/prefixes/ab/pin"),
    ("GET", f"{ROOT}/live?topics=memory,prefixes"),
]
FOR_CALLERS = [
    ("GET", f"{ROOT}/requests"),
    ("GET", f"{ROOT}/requests/x"),
    ("GET", f"{ROOT}/requests/x/tokens"),
    ("GET", f"{ROOT}/live"),
]


def caller(access: Access, **headers: str) -> Caller:
    return access.caller(Headers({name.replace("_", "-"): value for name, value in headers.items()}))


def bearer(key: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {key}"}


# --- servers without keys ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("headers", "is_operator"),
    [
        ({"host": "127.0.0.1:8000"}, True),
        ({"host": "localhost:8000"}, True),
        ({"host": "LocalHost"}, True),
        ({"host": "[::1]:8000"}, True),
        ({"host": "127.0.0.1:8000", "origin": "http://127.0.0.1:8000"}, True),
        ({"host": "127.0.0.1:8000", "origin": "http://127.0.0.1:8000", "sec_fetch_site": "same-origin"}, True),
        ({"host": "127.0.0.1:8000", "sec_fetch_site": "none"}, True),
        ({"host": "127.0.0.1:8000", "authorization": "Bearer none"}, True),
        ({}, False),
        ({"host": ""}, False),
        ({"host": "evil.example"}, False),
        ({"host": "evil.example:8000"}, False),
        ({"host": "localhost.evil.example"}, False),
        ({"host": "127.0.0.1.evil.example"}, False),
        ({"host": "127.0.0.1:8000@evil.example"}, False),
        ({"host": "127.0.0.1 "}, False),
        ({"host": "10.0.0.1"}, False),
        ({"host": "[::1"}, False),
        ({"host": "127.0.0.1:8000", "origin": "http://evil.example"}, False),
        ({"host": "127.0.0.1:8000", "origin": "null"}, False),
        ({"host": "127.0.0.1:8000", "origin": ""}, False),
        ({"host": "127.0.0.1:8000", "origin": "http://127.0.0.1:9000"}, False),
        ({"host": "127.0.0.1:8000", "origin": "https://127.0.0.1:8000"}, False),
        ({"host": "127.0.0.1:8000", "origin": "http://localhost:8000"}, False),
        ({"host": "127.0.0.1:8000", "sec_fetch_site": "cross-site"}, False),
        ({"host": "127.0.0.1:8000", "sec_fetch_site": "same-site"}, False),
        ({"host": "127.0.0.1:8000", "x_forwarded_for": "10.0.0.1"}, False),
        ({"host": "127.0.0.1:8000", "forwarded": "for=10.0.0.1"}, False),
        ({"host": "127.0.0.1:8000", "via": "1.1 proxy"}, False),
    ],
)
def test_without_keys_only_this_machine_is_the_operator(headers: dict[str, str], is_operator: bool) -> None:
    found = caller(Access(is_local=True), **headers)
    assert found.is_operator is is_operator
    assert (found.refusal is None) is is_operator
    assert not caller(Access(), **headers).is_operator, "on another address there is no operator"
    assert not caller(Access(["key"], is_local=True), **headers).is_operator, "nor with keys"
    assert not caller(Access([], "key", is_local=True), **headers).is_operator


def test_two_hosts_are_none() -> None:
    headers = Headers(raw=[(b"host", b"127.0.0.1"), (b"host", b"evil.example")])
    assert not Access(is_local=True).caller(headers).is_operator


# --- keys -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("scheme", ["Bearer ", "bearer ", "BEARER   "])
def test_keys_name_their_owner(scheme: str) -> None:
    access = Access(["one", "two"], "three")
    one, two, operator = (caller(access, authorization=scheme + key) for key in ("one", "two", "three"))
    assert len({one.owner, two.owner, operator.owner}) == 3
    assert [found.is_operator for found in (one, two, operator)] == [False, False, True]
    assert one.may_see(one.owner)
    assert not one.may_see(two.owner)
    assert not one.may_see("")
    assert operator.may_see(one.owner)
    assert operator.may_see("")
    assert "one" not in one.owner
    assert one.owner != caller(Access(["one"]), authorization="Bearer one").owner, "digests are of one process"


@pytest.mark.parametrize("given", ["", "Bearer", "Bearer ", "Bearer on", "Bearer one two", "Basic one", "one"])
def test_other_keys_name_nobody(given: str) -> None:
    for access in (Access(["one"]), Access([], "one"), Access(["one"], "two")):
        found = caller(access, authorization=given, **LOCAL)
        assert (found.owner, found.is_operator) == ("", False)
        assert found.refusal is not None
        assert not found.may_see("")


@pytest.mark.parametrize(
    ("path", "is_open"),
    [
        ("/health", True),
        ("/metrics", True),
        ("/", True),
        ("/ui/app.js", True),
        ("/ui", False),
        ("/uix", False),
        ("//", False),
        ("/v1/models", False),
        ("/v1/hybridkv/whoami", False),
        ("/docs", False),
    ],
)
def test_what_needs_no_key(path: str, is_open: bool) -> None:
    nobody = Caller("", False, "no key")
    keyed, operated = Access(["key"], has_page=True), Access([], "key", has_page=True)
    assert (keyed.refusal(nobody, "GET", path, Headers()) is None) is is_open
    assert operated.refusal(nobody, "GET", path, Headers()) is None, "an operator's key alone closes nothing else"
    assert isinstance(Access(["key"]).refusal(nobody, "GET", "/", Headers()), KeyNeededError), "a router has no page"


# --- over HTTP --------------------------------------------------------------------------------------------------------


@pytest.fixture
def keyed(engine: Engine) -> Iterator[Served]:
    with serving(engine, api_keys=("alice", "bob"), operator_key="root") as served:
        yield served


def ask(served: Served, method: str, path: str, **headers: str) -> httpx.Response:
    body = {"seconds": 5} if method == "POST" else None
    with served.http.stream(method, path, json=body, headers={"Connection": "close", **headers}) as reply:
        if not reply.headers["content-type"].startswith("text/event-stream"):  # which has no end
            reply.read()
    return reply


@pytest.mark.parametrize(("method", "path"), FOR_THE_OPERATOR)
def test_what_is_for_the_operator(keyed: Served, method: str, path: str) -> None:
    error_of(ask(keyed, method, path), 401)
    error_of(ask(keyed, method, path, **bearer("wrong")), 401)
    assert "operator" in error_of(ask(keyed, method, path, **bearer("alice")), 403)["message"]
    if "live" not in path:
        assert ask(keyed, method, path, **bearer("root")).status_code in (200, 404)


@pytest.mark.parametrize(("method", "path"), FOR_CALLERS)
def test_what_is_for_those_with_a_key(keyed: Served, method: str, path: str) -> None:
    error_of(ask(keyed, method, path), 401)
    error_of(ask(keyed, method, path, **bearer("wrong")), 401)
    error_of(ask(keyed, method, path + "?key=alice", **{"X-Api-Key": "alice"}), 401)


def test_a_record_is_for_its_key_and_the_operator(keyed: Served) -> None:
    body = {"prompt": [5, 6, 7], "max_tokens": 2}
    headers = {**bearer("alice"), "X-Request-Id": "mine"}
    reply = keyed.http.post("/v1/completions", json=body, headers=headers).json()
    assert eventually(lambda: ask(keyed, "GET", f"{ROOT}/requests/mine", **bearer("alice")).json()["prompts"] != [None])
    for name in (reply["id"], "mine"):
        for tail in ("", "/tokens"):
            path = f"{ROOT}/requests/{name}{tail}"
            assert ask(keyed, "GET", path, **bearer("alice")).status_code == 200
            assert ask(keyed, "GET", path, **bearer("root")).status_code == 200
            hidden = error_of(ask(keyed, "GET", path, **bearer("bob")), 404)
            unknown = error_of(ask(keyed, "GET", f"{ROOT}/requests/nothing{tail}", **bearer("bob")), 404)
            assert hidden["message"].replace(name, "nothing") == unknown["message"]
            assert {**hidden, "message": ""} == {**unknown, "message": ""}
    for key, count in (("alice", 1), ("bob", 0), ("root", 1)):
        found = ask(keyed, "GET", f"{ROOT}/requests", **bearer(key)).json()["data"]
        assert [one["id"] for one in found] == [reply["id"]] * count


def test_a_request_id_of_another_key_finds_nothing_of_it(keyed: Served) -> None:
    body = {"prompt": [5, 6, 7], "max_tokens": 1}

    def send(key: str, request_id: str) -> str:
        headers = {**bearer(key), "X-Request-Id": request_id}
        return str(keyed.http.post("/v1/completions", json=body, headers=headers).json()["id"])

    mine = send("alice", "same")
    other = send("bob", mine)
    found = {
        (key, name): ask(keyed, "GET", f"{ROOT}/requests/{name}", **bearer(key)).json()["id"]
        for key, name in (("alice", "same"), ("alice", mine), ("bob", mine), ("root", mine))
    }
    assert found == {("alice", "same"): mine, ("alice", mine): mine, ("bob", mine): other, ("root", mine): mine}


@pytest.mark.parametrize(("key", "is_operator"), [("alice", False), ("root", True)])
def test_who_am_i(keyed: Served, key: str, is_operator: bool) -> None:
    found = ask(keyed, "GET", f"{ROOT}/whoami", **bearer(key)).json()
    assert found.pop("version")
    assert found == {
        "object": "hybridkv.caller",
        "is_operator": is_operator,
        "key_needed": True,
        "key_ok": True,
        "model": "tiny",
    }
    error_of(ask(keyed, "GET", f"{ROOT}/whoami"), 401)


def test_the_cache_is_reset_by_the_operator_if_there_is_one(keyed: Served, served: Served) -> None:
    error_of(ask(keyed, "POST", "/admin/cache/reset"), 401)
    error_of(ask(keyed, "POST", "/admin/cache/reset", **bearer("alice")), 403)
    assert ask(keyed, "POST", "/admin/cache/reset", **bearer("root")).json() == {"reset": True}
    assert ask(served, "POST", "/admin/cache/reset").json() == {"reset": True}


def test_with_an_operator_key_alone_the_rest_stays_open(engine: Engine) -> None:
    with serving(engine, operator_key="root") as served:
        reply = served.post("/v1/completions", prompt=[5, 6], max_tokens=1).json()
        found = ask(served, "GET", f"{ROOT}/whoami").json()
        assert (found["is_operator"], found["key_needed"], found["key_ok"]) == (False, True, False)
        error_of(ask(served, "GET", f"{ROOT}/requests/{reply['id']}"), 401)
        error_of(ask(served, "POST", "/admin/cache/reset"), 401)
        assert ask(served, "GET", f"{ROOT}/requests/{reply['id']}", **bearer("root")).status_code == 200


def test_with_api_keys_alone_there_is_no_operator(engine: Engine) -> None:
    with serving(engine, api_keys=("alice",)) as served:
        assert "--operator-key" in error_of(ask(served, "GET", f"{ROOT}/prefixes", **bearer("alice")), 403)["message"]
        assert ask(served, "GET", f"{ROOT}/requests", **bearer("alice")).json()["data"] == []
        assert ask(served, "POST", "/admin/cache/reset", **bearer("alice")).json() == {"reset": True}


def test_on_another_address_without_keys_there_is_no_operator(engine: Engine) -> None:
    with serving(engine, is_local=False) as served:
        for path in ("requests", "requests/x", "requests/x/tokens", "live", "prefixes", "prefixes/ab"):
            assert "--operator-key" in error_of(ask(served, "GET", f"{ROOT}/{path}"), 403)["message"]
        found = ask(served, "GET", f"{ROOT}/whoami").json()
        assert (found["is_operator"], found["key_needed"], found["key_ok"]) == (False, False, False)


NO_API_KEYS: list[Any] = [(), ([], "operator's")]
FOREIGN = [
    {"Host": "evil.example"},
    {"Host": "evil"},
    {"Origin": "http://evil.example"},
    {"Origin": "null"},
    {"Sec-Fetch-Site": "cross-site"},
    {"Sec-Fetch-Site": "same-site", "Sec-Fetch-Mode": "no-cors"},
]


@pytest.mark.parametrize("headers", FOREIGN)
def test_a_page_of_another_site_may_do_nothing(headers: dict[str, str], served: Served) -> None:
    served.post("/v1/completions", prompt=[5, 6, 7] * 20, max_tokens=1)
    used = served.engine.stats().memory.used_bytes
    for method, path in (
        ("POST", "/admin/cache/reset"),
        ("POST", "/v1/completions"),
        ("POST", "/tokenize"),
        ("GET", "/v1/models"),
        ("GET", "/openapi.json"),
        ("GET", "/no/such/path"),
        *FOR_CALLERS,
        *FOR_THE_OPERATOR,
    ):
        error = error_of(ask(served, method, path, **headers), 403)
        assert ("--allowed-host" if "Host" in headers else "--cors-origin") in error["message"]
        assert error["type"] == "permission_error"
    assert served.engine.stats().memory.used_bytes == used


def test_the_page_itself_may_do_everything(served: Served) -> None:
    for headers in ({"Origin": served.url}, {"Origin": served.url, "Sec-Fetch-Site": "same-origin"}):
        assert ask(served, "GET", "/", **headers).status_code == 200
        assert ask(served, "GET", f"{ROOT}/requests", **headers).status_code == 200
        assert ask(served, "POST", "/admin/cache/reset", **headers).status_code == 200


OPENED = {"sec-fetch-site": "cross-site", "sec-fetch-mode": "navigate", "sec-fetch-dest": "document"}


@pytest.mark.parametrize(
    ("method", "path", "headers", "enters"),
    [
        ("POST", "/v1/completions", {"host": "10.0.0.5:8000"}, True),
        ("POST", "/v1/completions", {"host": "[2001:db8::1]:8000"}, True),
        ("POST", "/v1/completions", {"host": "LocalHost:8000"}, True),
        ("POST", "/v1/completions", {"host": "gpu.example"}, True),
        ("POST", "/v1/completions", {"host": "GPU.example:8000"}, True),
        ("POST", "/v1/completions", {"host": "a.wild.example"}, True),
        ("POST", "/v1/completions", {}, True),
        ("POST", "/v1/completions", {"host": "10.0.0.5:8000", "origin": "http://10.0.0.5:8000"}, True),
        (
            "POST",
            "/v1/completions",
            {"host": "gpu.example", "origin": "https://gpu.example", "sec-fetch-site": "same-origin"},
            True,
        ),  # its own page, behind a TLS proxy
        (
            "POST",
            "/v1/completions",
            {"host": "evil.example", "origin": "http://evil.example", "sec-fetch-site": "same-origin"},
            False,
        ),  # a name that leads here
        ("POST", "/v1/completions", {"host": "10.0.0.5", "origin": "https://chat.example"}, True),
        ("POST", "/v1/completions", {"host": "10.0.0.5", "origin": "https://chat.example", **OPENED}, True),
        ("GET", "/metrics", {"host": "hybridkv:8000"}, True),
        ("GET", "/health", {"host": "hybridkv:8000"}, True),
        ("GET", "/", OPENED, True),
        ("GET", "/docs", {"host": "localhost", **OPENED}, True),
        ("POST", "/v1/completions", {"host": "hybridkv:8000"}, False),
        ("POST", "/v1/completions", {"host": "other.example"}, False),
        ("POST", "/v1/completions", {"host": "wild.example"}, False),
        ("POST", "/v1/completions", {"host": "notwild.example"}, False),
        ("POST", "/v1/completions", {"host": "gpu.example.evil.example"}, False),
        ("POST", "/v1/completions", {"host": "127.0.0.1.evil.example"}, False),
        ("POST", "/v1/completions", {"host": "10.0.0.5:8000@evil.example"}, False),
        ("POST", "/v1/completions", {"host": ""}, False),
        ("POST", "/v1/completions", {"host": "10.0.0.5", "origin": "http://10.0.0.5:9000"}, False),
        ("POST", "/v1/completions", {"host": "10.0.0.5", "origin": "https://chat.example.evil.example"}, False),
        ("POST", "/v1/completions", {"host": "10.0.0.5", "sec-fetch-site": "cross-site"}, False),
        ("POST", "/admin/cache/reset", {"host": "10.0.0.5", "origin": "https://chat.example"}, False),
        ("POST", "/v1/completions", OPENED, False),
        ("GET", "/docs", {**OPENED, "sec-fetch-dest": "iframe"}, False),
        ("GET", "/docs", {**OPENED, "host": "evil.example"}, False),
        ("GET", "/metrics", {"origin": "http://evil.example"}, False),
        ("GET", "/", {"host": "evil.example"}, False),
    ],
)
def test_hosts_and_pages_without_keys(method: str, path: str, headers: dict[str, str], enters: bool) -> None:
    sites: Any = {"allowed_hosts": ["gpu.example", "*.wild.example"], "cors_origins": ["https://chat.example"]}
    given = Headers(headers)
    for keys in NO_API_KEYS:
        access = Access(*keys, has_page=True, **sites)
        assert (access.refusal(access.caller(given), method, path, given) is None) is enters
        assert (
            Access(allowed_hosts=["*"]).refusal(Caller("", False), "GET", "/", Headers({"host": "x.example"})) is None
        )
    keyed = Access(["key"], "operator's", **sites)
    for key in ("key", "operator's"):
        with_key = Headers({**headers, "authorization": f"Bearer {key}"})
        assert keyed.refusal(keyed.caller(with_key), method, path, with_key) is None


def test_a_refused_host_is_told_the_way_in() -> None:
    headers = Headers({"host": "Hybridkv.example:8000"})
    told = str(Access().refusal(Caller("", False), "GET", "/v1/models", headers))
    assert told.endswith("call it by its IP address, or start it with --allowed-host hybridkv.example")


@pytest.mark.parametrize(
    ("hosts", "origins", "words"),
    [
        (["http://x"], [], "allowed host 'http://x': write a name without a port"),
        (["x:80"], [], "allowed host 'x:80'"),
        ([""], [], "allowed host ''"),
        (["a*.example"], [], "allowed host"),
        ([], ["chat.example"], "CORS origin 'chat.example': write it as browsers send it"),
        ([], ["https://chat.example/"], "CORS origin"),
        ([], ["null"], "CORS origin 'null'"),
        ([], ["*"], "CORS origin '*' without an API key: any page"),
    ],
)
def test_sites_that_are_none(hosts: list[str], origins: list[str], words: str) -> None:
    for keys in NO_API_KEYS:
        with pytest.raises(InputError, match=re.escape(words)):
            Access(*keys, allowed_hosts=hosts, cors_origins=origins)


def test_the_router_has_the_same_rules() -> None:
    workers = ("http://127.0.0.1:1",)
    options = RouteOptions(workers, workers, allowed_hosts=("gpu.example",), cors_origins=("https://chat.example",))
    with listening(make_router(options)) as url:
        statuses = [
            httpx.post(f"{url}/v1/completions", json={"prompt": "x"}, headers=headers).status_code
            for headers in ({"Host": "evil.example"}, {"Host": "gpu.example"}, {"Origin": "https://chat.example"})
        ]
        allowed = httpx.get(f"{url}/v1/models", headers={"Origin": "https://chat.example"}).headers
    assert statuses == [403, 503, 503]
    assert allowed["access-control-allow-origin"] == "https://chat.example"
