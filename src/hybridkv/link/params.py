"""`kv_transfer_params` of requests and answers, with the names that vLLM's NIXL connector and its proxies use.

    to a prefill worker    {"do_remote_decode": true}                          compute the prompt for another engine
    its answer             {"do_remote_prefill": true, "remote_host": ..}      where the prompt waits
    to a decode worker     the same, unchanged                                 fetch it from there

A proxy may choose a `transfer_id` and send both requests at once: the prompt is then pushed while it is computed.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple
from uuid import uuid4

from hybridkv.errors import RequestError
from hybridkv.link.link import Link
from hybridkv.texts import has_bytes, shown

FIELD = "kv_transfer_params"
_LONGEST_TEXT = 256
_HIGHEST_PORT = 65535
_PORT = re.compile("[0-9]{1,5}")
_OPTIONAL_TEXT = {"type": ["string", "null"], "maxLength": _LONGEST_TEXT}
_OPTIONAL_FLAG = {"type": ["boolean", "null"]}
SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {
        "do_remote_decode": _OPTIONAL_FLAG,
        "do_remote_prefill": _OPTIONAL_FLAG,
        "transfer_id": _OPTIONAL_TEXT,
        "remote_request_id": _OPTIONAL_TEXT,
        "remote_host": _OPTIONAL_TEXT,
        "remote_port": {
            "anyOf": [
                {"type": ["integer", "null"], "minimum": 1, "maximum": _HIGHEST_PORT},
                {"type": "string", "pattern": "^[0-9]{1,5}$"},
            ]
        },
    },
}
"""JSON schema of `kv_transfer_params`, which `parse` checks. Other fields may have any value: they are not read."""


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
    if not isinstance(params, Mapping):
        raise RequestError(f"{FIELD} of type {type(params).__name__}: pass a dictionary", FIELD)
    fields = _Fields.of(params)
    if not fields.decode and not fields.prefill:
        return None
    if fields.decode and fields.prefill:
        raise _wrong("do_remote_decode and do_remote_prefill", "both are true: set one")
    if link is None:
        raise _wrong(
            "do_remote_decode" if fields.decode else "do_remote_prefill", "this engine has no role: start it with one"
        )
    return _remote_decode(fields, link) if fields.decode else _remote_prefill(fields, link)


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


class _Fields(NamedTuple):
    """The fields that are read, each of its type."""

    decode: bool
    prefill: bool
    transfer_id: str
    request_id: str
    host: str
    port: int | None

    @classmethod
    def of(cls, params: Mapping[str, Any]) -> _Fields:
        return cls(
            _flag(params, "do_remote_decode"),
            _flag(params, "do_remote_prefill"),
            _text(params, "transfer_id"),
            _text(params, "remote_request_id"),
            _text(params, "remote_host"),
            _port(params, "remote_port"),
        )


def _remote_decode(fields: _Fields, link: Link) -> RemoteDecode:
    if not link.options.produces:
        raise _wrong("do_remote_decode", f"this engine has role {link.options.role}: send it to one that prefills")
    return RemoteDecode(fields.transfer_id or uuid4().hex)


def _remote_prefill(fields: _Fields, link: Link) -> RemotePrefill:
    if not link.options.consumes:
        raise _wrong("do_remote_prefill", f"this engine has role {link.options.role}: send it to one that decodes")
    host, port = fields.host, fields.port
    if not host or port is None:
        raise _wrong("remote_host and remote_port", "one is missing: pass both as the prefill worker gave them")
    url = link.peer_at(host, port)
    if url is None:
        raise _wrong("remote_host", f"{host}:{port} is not a peer of this engine: add it with --peer if it should be")
    if not fields.transfer_id and not fields.request_id:
        raise _wrong("remote_request_id", "it is missing: pass what the prefill worker gave")
    return RemotePrefill(url, fields.request_id or fields.transfer_id, is_early=not fields.request_id)


def _flag(params: Mapping[str, Any], name: str) -> bool:
    value = params.get(name)
    if value is not None and not isinstance(value, bool):
        raise _wrong(name, f"{shown(value)}: pass true or false")
    return bool(value)


def _text(params: Mapping[str, Any], name: str) -> str:
    """The text of a field; empty if it is missing."""
    value = params.get(name)
    if value is None:
        return ""
    if not isinstance(value, str) or len(value) > _LONGEST_TEXT or not has_bytes(value):
        raise _wrong(name, f"{shown(value)}: pass a text of at most {_LONGEST_TEXT} whole characters")
    return value


def _port(params: Mapping[str, Any], name: str) -> int | None:
    """The port of a field, which may be a text of digits; None if it is missing."""
    value = given = params.get(name)
    if isinstance(value, str) and _PORT.fullmatch(value):
        value = int(value)
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= _HIGHEST_PORT:
        raise _wrong(name, f"{shown(given)}: pass a number from 1 to {_HIGHEST_PORT}")
    return value


def _wrong(name: str, what: str) -> RequestError:
    return RequestError(f"{FIELD}: {name}: {what}", FIELD)
