"""What a producer tells a consumer by NIXL's notifications, as JSON.

    plan     a step of a transfer begins: the source pages of its tokens, from which both sides compute the same parcels
    parcel   one parcel of a step has landed, with its checksum; the message comes with the write itself
    end      everything was sent: the number of parcels of each step, and the first tokens
    failed   nothing more is sent, and no write of this transfer is in progress any more

Plans and ends come in order. A parcel may come before its plan.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from hybridkv.link.errors import LinkError
from hybridkv.link.runs import PageTables


@dataclass(frozen=True, slots=True)
class FirstToken:
    """The first token of one sample, which the producer has drawn from the last logits of the prompt."""

    token: int
    logprob: float | None = None
    top: tuple[tuple[int, float], ...] = ()
    """The likeliest tokens and their logprobs, best first."""


@dataclass(frozen=True, slots=True)
class Plan:
    claim: str
    step: int
    start: int
    end: int
    by_layer: bool
    parcel_bytes: int
    pages: PageTables


@dataclass(frozen=True, slots=True)
class ParcelLanded:
    claim: str
    step: int
    number: int
    checksum: int | None


@dataclass(frozen=True, slots=True)
class End:
    claim: str
    num_parcels: tuple[int, ...]
    """Number of parcels of each step."""
    first: tuple[FirstToken, ...]


@dataclass(frozen=True, slots=True)
class Failed:
    claim: str
    reason: str


Message = Plan | ParcelLanded | End | Failed
_KINDS = {"plan": Plan, "parcel": ParcelLanded, "end": End, "failed": Failed}
_NAMES = {kind: name for name, kind in _KINDS.items()}


def encode(message: Message) -> bytes:
    fields = asdict(message)
    if isinstance(message, Plan):
        fields["pages"] = pages_to_json(message.pages)
    return json.dumps({"kind": _NAMES[type(message)], **fields}, separators=(",", ":")).encode()


def decode(data: bytes) -> Message:
    """Raises LinkError if the message is none of ours."""
    try:
        fields = json.loads(data)
        kind = _KINDS[fields.pop("kind")]
        if kind is Plan:
            fields["pages"] = pages_from_json(fields["pages"])
        elif kind is End:
            fields["num_parcels"] = tuple(fields["num_parcels"])
            fields["first"] = tuple(_first(one) for one in fields["first"])
        message: Message = kind(**fields)
        _check(message)
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        raise LinkError(f"a message of {len(data)} bytes is not of this protocol: {error!r}") from error
    return message


def _check(message: Message) -> None:
    """Raises TypeError if a field is not of its type."""
    texts: list[Any] = [message.claim]
    numbers: list[Any] = []
    if isinstance(message, Plan):
        numbers = [message.step, message.start, message.end, message.parcel_bytes]
        numbers += [
            page for pages in (*message.pages.tables.values(), *message.pages.states.values()) for page in pages
        ]
    elif isinstance(message, ParcelLanded):
        numbers = [message.step, message.number, message.checksum or 0]
    elif isinstance(message, End):
        numbers = [*message.num_parcels]
    else:
        texts.append(message.reason)
    if not all(type(one) is int for one in numbers) or not all(type(one) is str for one in texts):
        raise TypeError("a field of another type")


def pages_to_json(pages: PageTables) -> dict[str, Any]:
    return {"tables": _lists(pages.tables), "states": _lists(pages.states)}


def pages_from_json(value: Mapping[str, Any]) -> PageTables:
    return PageTables(dict(value["tables"]), dict(value["states"]))


def _lists(by_name: Mapping[str, Sequence[int]]) -> dict[str, list[int]]:
    return {name: list(pages) for name, pages in by_name.items()}


def _first(value: Mapping[str, Any]) -> FirstToken:
    top = tuple((int(token), float(logprob)) for token, logprob in value["top"])
    return FirstToken(int(value["token"]), value["logprob"], top)
