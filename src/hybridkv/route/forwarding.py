"""The headers that workers get: some of the client's, and for whom the router asks.

A worker without keys takes a call from its own machine for its operator's, unless a proxy has sent it. So every call of
a router has `Via` and `X-Forwarded-For`. A client's values of these two are kept, and the router's follow them.
"""

from __future__ import annotations

from starlette.requests import Request

WorkerHeaders = dict[bytes, bytes]
VIA = b"1.1 hybridkv-route"
_PASSED_ON = ("authorization", "accept", "traceparent", "tracestate")


def headers_for_workers(request: Request) -> WorkerHeaders:
    """Headers of all calls to workers that one request of a client needs."""
    given = {name.encode(): _bytes(request.headers[name]) for name in _PASSED_ON if name in request.headers}
    client = request.client.host if request.client is not None else "unknown"
    return {
        **given,
        b"x-request-id": _bytes(request.state.request_id),
        b"via": _with_own(request, "via", VIA),
        b"x-forwarded-for": _with_own(request, "x-forwarded-for", _bytes(client)),
    }


def _with_own(request: Request, name: str, own: bytes) -> bytes:
    return b", ".join([*map(_bytes, request.headers.getlist(name)), own])


def _bytes(value: str) -> bytes:
    """The bytes of a header that Starlette has decoded. httpx would refuse text that is not ASCII."""
    return value.encode("latin-1")
