"""`kv_transfer_params` of requests and answers, with the names that vLLM's NIXL connector and its proxies use.

    to a prefill worker    {"do_remote_decode": true}                          compute the prompt for another engine
    its answer             {"do_remote_prefill": true, "remote_host": ..}      where the prompt waits
    to a decode worker     the same, unchanged                                 fetch it from there

A proxy may choose a `transfer_id` and send both requests at once: the prompt is then pushed while it is computed.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any
from uuid import uuid4

from hybridkv.errors import RequestError
from hybridkv.link.link import Link

FIELD = "kv_transfer_params"
_LONGEST_ID = 256


@dataclass(frozen=True, slots=True)
class RemoteDecode:
    """The prompt is computed here for another engine, which claims it by this id."""

    request_id: str


@dataclass(frozen=True, slots=True)
class RemotePrefill:
    """The prompt is computed by a peer."""

    url: str
    request_id: str
    is_early: bool
    """The peer may not have the request yet."""


def parse(params: Mapping[str, Any] | None, link: Link | None) -> RemoteDecode | RemotePrefill | None:
    """What a request asks for. Raises RequestError if it cannot be had."""
    if params is None:
        return None
    decode, prefill = _flag(params, "do_remote_decode"), _flag(params, "do_remote_prefill")
    if not decode and not prefill:
        return None
    if decode and prefill:
        raise _wrong("do_remote_decode and do_remote_prefill", "both are true: set one")
    if link is None:
        raise _wrong(
            "do_remote_decode" if decode else "do_remote_prefill", "this engine has no role: start it with one"
        )
    return _remote_decode(params, link) if decode else _remote_prefill(params, link)


def answer(link: Link, request_id: str, num_tokens: int) -> dict[str, Any]:
    """What the answer to a `RemoteDecode` has: a proxy passes it to the decode worker as it is."""
    return {
        "do_remote_prefill": True,
        "do_remote_decode": False,
        "remote_engine_id": link.engine_id,
        "remote_request_id": request_id,
        "remote_host": link.options.host,
        "remote_port": link.port,
        "remote_block_ids": [],
        "remote_num_tokens": num_tokens,
        "tp_size": 1,
    }


def _remote_decode(params: Mapping[str, Any], link: Link) -> RemoteDecode:
    if not link.options.produces:
        raise _wrong("do_remote_decode", f"this engine has role {link.options.role}: send it to one that prefills")
    transfer_id = _text(params, "transfer_id")
    return RemoteDecode(transfer_id or uuid4().hex)


def _remote_prefill(params: Mapping[str, Any], link: Link) -> RemotePrefill:
    if not link.options.consumes:
        raise _wrong("do_remote_prefill", f"this engine has role {link.options.role}: send it to one that decodes")
    host, port = _text(params, "remote_host"), params.get("remote_port")
    if isinstance(port, str) and port.isascii() and port.isdigit():
        port = int(port)
    if not host or isinstance(port, bool) or not isinstance(port, int):
        raise _wrong("remote_host and remote_port", f"{host!r} and {port!r}: pass them as the prefill worker gave them")
    url = link.peer_at(host, port)
    if url is None:
        raise _wrong("remote_host", f"{host}:{port} is not a peer of this engine: add it with --peer if it should be")
    transfer_id, request_id = _text(params, "transfer_id"), _text(params, "remote_request_id")
    if not transfer_id and not request_id:
        raise _wrong("remote_request_id", "it is missing: pass what the prefill worker gave")
    return RemotePrefill(url, request_id or transfer_id or "", is_early=not request_id)


def _flag(params: Mapping[str, Any], name: str) -> bool:
    value = params.get(name)
    if value is not None and not isinstance(value, bool):
        raise _wrong(name, f"{value!r}: pass true or false")
    return bool(value)


def _text(params: Mapping[str, Any], name: str) -> str | None:
    value = params.get(name)
    if value is None:
        return None
    if not isinstance(value, str) or len(value) > _LONGEST_ID:
        raise _wrong(name, f"{str(value)[:80]!r}: pass a text of at most {_LONGEST_ID} characters")
    return value


def _wrong(name: str, what: str) -> RequestError:
    return RequestError(f"{FIELD}: {name}: {what}", FIELD)
