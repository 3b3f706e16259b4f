"""The page and its files: known names only, with headers that let a browser do little."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from importlib import resources

import pytest

from hybridkv import Engine
from tests.serve.serving import PATIENCE_S, Served, error_of, serving

FILES = sorted(one.name for one in (resources.files("hybridkv.serve") / "ui").iterdir())
TYPES = {
    "css": "text/css; charset=utf-8",
    "html": "text/html; charset=utf-8",
    "js": "text/javascript; charset=utf-8",
    "svg": "image/svg+xml",
}


@pytest.fixture(scope="module")
def keyed(engine: Engine) -> Iterator[Served]:
    """The page needs no key."""
    with serving(engine, api_keys=("key",), operator_key="root") as served:
        yield served


def raw(served: Served, path: str) -> bytes:
    """The status line of a request whose path no client would send so."""
    with socket.create_connection(("127.0.0.1", int(served.url.split(":")[-1])), timeout=PATIENCE_S) as connection:
        connection.sendall(f"GET {path} HTTP/1.1\r\nHost: 127.0.0.1\r\nConnection: close\r\n\r\n".encode())
        return connection.recv(64).split(b"\r\n")[0]


@pytest.mark.parametrize("name", ["", *FILES])
def test_files(keyed: Served, name: str) -> None:
    path = f"/ui/{name}" if name else "/"
    got = keyed.http.get(path)
    assert got.status_code == 200
    assert got.content == (resources.files("hybridkv.serve") / "ui" / (name or "index.html")).read_bytes()
    headers = got.headers
    assert headers["content-type"] == TYPES[(name or "index.html").rpartition(".")[2]]
    assert headers["content-security-policy"] == (
        "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; connect-src 'self'; "
        "base-uri 'none'; form-action 'none'; frame-ancestors 'none'; require-trusted-types-for 'script'; "
        "trusted-types 'none'"
    )
    assert headers["x-content-type-options"] == "nosniff"
    assert headers["referrer-policy"] == "no-referrer"
    assert headers["cross-origin-opener-policy"] == headers["cross-origin-resource-policy"] == "same-origin"
    assert headers["cache-control"] == "no-cache"
    assert "set-cookie" not in headers
    head = keyed.http.head(path)
    assert (head.status_code, head.content) == (200, b"")
    assert head.headers["content-length"] == str(len(got.content))
    for tags in (headers["etag"], f'"x", {headers["etag"]}'):
        again = keyed.http.get(path, headers={"If-None-Match": tags})
        assert (again.status_code, again.content) == (304, b"")
    assert keyed.http.get(path, headers={"If-None-Match": '"x"'}).status_code == 200


@pytest.mark.parametrize(
    "path",
    [
        "/ui/",
        "/ui/nothing.js",
        "/ui/../app.py",
        "/ui/%2e%2e/app.py",
        "/ui/..%2fapp.py",
        "/ui//etc/passwd",
        "/ui/%2fetc%2fpasswd",
        "/ui/..%5c..%5capp.py",
        "/ui/app.js/",
        "/ui/app.js%00",
        "/ui/APP.JS",
        "/ui/__init__.py",
        "/ui/./app.js",
        "/ui/../v1/models",
        "/ui/..%2fv1/models",
    ],
)
def test_nothing_else_is_a_file(keyed: Served, path: str) -> None:
    assert raw(keyed, path) == b"HTTP/1.1 404 Not Found"


def test_other_methods_are_refused(keyed: Served) -> None:
    for path in ("/", "/ui/app.js"):
        message = error_of(keyed.http.post(path), 405)["message"]
        assert set(message.rpartition("takes ")[2].split(", ")) == {"GET", "HEAD"}


def test_a_key_opens_nothing_of_the_api_by_the_page(keyed: Served) -> None:
    for path in ("/v1/hybridkv/whoami", "/v1/hybridkv/requests", "/v1/models", "/openapi.json", "/ui"):
        error_of(keyed.http.get(path), 401)


def test_a_server_without_a_page(engine: Engine) -> None:
    with serving(engine, ui=False) as served:
        for path in ("/", "/ui/app.js", "/ui/"):
            error_of(served.http.get(path), 404)
        assert served.http.get("/v1/hybridkv/whoami").json()["is_operator"]


def test_the_page_names_only_files_that_are_there(keyed: Served) -> None:
    """And no code or style stands in it: its policy would refuse that."""
    page = keyed.http.get("/").text
    for name in FILES:
        if name.endswith((".js", ".css")) and f"/ui/{name}" in page:
            assert keyed.http.get(f"/ui/{name}").status_code == 200
    assert "<style" not in page
    assert " style=" not in page
    assert " onclick=" not in page
