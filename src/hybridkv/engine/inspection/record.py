"""The record of a finished request: where its prompt came from, what it waited for, and why not more was cached."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict, dataclass
from typing import Any

from hybridkv.cache import BreakpointAccount, Evicted, Explanation, Role
from hybridkv.engine.inspection.why import Reason, breakpoint_warnings, reasons
from hybridkv.engine.prompts import Ids
from hybridkv.stream.times import LayerTime, RowTime

_KINDS = {Role.FULL: "full attention", Role.LOCAL: "window", Role.STATE: "state", Role.TAP: "tap"}


@dataclass(frozen=True, slots=True)
class Span:
    """A part of a prompt that came from one source."""

    start: int
    end: int
    source: str
    """memory, store, engine (another one computed it) or computed."""


@dataclass(frozen=True, slots=True)
class Moment:
    """Something that happened to a request."""

    at: float
    """Seconds since its arrival."""
    what: str
    start: int | None = None
    """First token that it is about, and `end`: the one after the last."""
    end: int | None = None
    seconds: float | None = None
    """How long it took."""


@dataclass(frozen=True, slots=True)
class StoreAccount:
    """What the store did for a request."""

    outcome: str
    """not asked, nothing more, slow, failed, no room, or loaded."""
    found: int = 0
    """It had the prompt up to this position."""
    loaded: int = 0
    """It supplied the prompt up to this position."""
    num_bytes: int = 0
    seconds: float = 0.0
    mode: str | None = None
    """async or layerwise."""
    failure: str | None = None


@dataclass(frozen=True, slots=True)
class RequestRecord:
    """One request, after its end. `to_json` has the fields that docs/why.md explains."""

    request_id: str
    arrived_at: float
    """Unix time."""
    finish_reason: str
    """How its first sample ended: stop, length, abort or error."""
    prompt: Ids
    reply_tokens: int
    """Sum over all samples."""
    cached_tokens: int
    breakpoints: tuple[int, ...]
    kept: tuple[BreakpointAccount, ...]
    """What became of the breakpoints. Empty if it never started."""
    spans: tuple[Span, ...]
    """They cover the prompt."""
    lookup: Explanation | None
    """None if it never started, or if another engine was to send its prompt."""
    evicted: Evicted | None
    """Something evicted that the prompt continued: the request has computed its blocks again."""
    store: StoreAccount | None
    """None without a store."""
    moments: tuple[Moment, ...]
    rows: tuple[RowTime, ...]
    """Rows of its last load, in the order in which they came; times as of the engine's clock."""
    layers: tuple[LayerTime, ...]
    """Layers of the step that waited for these rows."""
    began_s: float
    """The engine's clock at its arrival."""
    queue_s: float
    ttft_s: float
    total_s: float
    per_token_s: float
    preemptions: int
    adapter: str | None = None
    """The name of its adapter; None: the model alone."""

    @property
    def prompt_tokens(self) -> int:
        return self.prompt.num_tokens

    @property
    def why(self) -> list[Reason]:
        """Why not more of the prompt was cached; empty if all that can be was."""
        return reasons(
            self.lookup, self.cached_tokens, self.evicted, self.store, self.preemptions, adapter=self.adapter
        )

    @property
    def warnings(self) -> list[str]:
        """What was asked for and is not there, as sentences."""
        return list(breakpoint_warnings(self.kept))

    @property
    def by_source(self) -> dict[str, int]:
        """Tokens of the prompt by source."""
        counts = dict.fromkeys(("memory", "store", "engine", "computed"), 0)
        for span in self.spans:
            counts[span.source] += span.end - span.start
        return counts

    def to_json(self) -> dict[str, Any]:
        return {
            "request_id": self.request_id,
            "arrived_at": self.arrived_at,
            "adapter": self.adapter,
            "finish_reason": self.finish_reason,
            "prompt_tokens": self.prompt_tokens,
            "reply_tokens": self.reply_tokens,
            "cached_tokens": self.cached_tokens,
            "breakpoints": list(self.breakpoints),
            "kept": [
                {"position": one.position, "kept_at": one.kept_at, "outcome": str(one.outcome), "bytes": one.num_bytes}
                for one in self.kept
            ],
            "warnings": self.warnings,
            "spans": [asdict(span) for span in self.spans],
            "lookup": None if self.lookup is None else self._lookup_json(self.lookup),
            "store": None if self.store is None else _store_json(self.store),
            "why": [asdict(reason) for reason in self.why],
            "events": [asdict(moment) for moment in self.moments],
            "transfer": self._transfer_json() if self.rows else None,
            "metrics": {
                "queue_s": self.queue_s,
                "ttft_s": self.ttft_s,
                "total_s": self.total_s,
                "per_token_s": self.per_token_s,
                "preemptions": self.preemptions,
            },
        }

    def _lookup_json(self, lookup: Explanation) -> dict[str, Any]:
        used = lookup.checkpoint
        return {
            "position": lookup.position,
            "matched_tokens": lookup.matched_tokens,
            "parted_at": lookup.parted_at,
            "limit": lookup.prompt_tokens - 1,
            "block_tokens": lookup.block_tokens,
            "min_prefix": lookup.block_tokens + 1,
            "missing": str(lookup.missing),
            "checkpoint": used
            and {
                "position": used.position,
                "kind": used.kind.name.lower(),
                "hits": used.num_hits,
                "idle_s": used.idle_s,
            },
            "likely": [place._asdict() for place in lookup.likely],
            "groups": [
                {
                    "name": group.name,
                    "kind": _KINDS[group.role],
                    "supplies": group.supplies,
                    "positions": list(group.positions),
                    "num_positions": group.num_positions,
                    "runs": [list(run) for run in group.runs],
                }
                for group in lookup.groups
            ],
            "evicted": [asdict(one) for one in dict.fromkeys((lookup.evicted, self.evicted)) if one is not None],
        }

    def _transfer_json(self) -> dict[str, Any]:
        return {
            "rows": [
                {
                    "group": row.group,
                    "first_layer": row.first_layer,
                    "last_layer": row.last_layer,
                    "bytes": row.num_bytes,
                    "start": row.start - self.began_s,
                    "end": row.end - self.began_s,
                }
                for row in _by_layers(self.rows)
            ],
            "layers": [
                {
                    "layer": one.layer,
                    "start": one.start - self.began_s,
                    "end": one.end - self.began_s,
                    "waited": one.waited,
                }
                for one in self.layers
            ],
        }


def _store_json(store: StoreAccount) -> dict[str, Any]:
    fields = asdict(store)
    fields["bytes"] = fields.pop("num_bytes")
    return fields


def _by_layers(rows: Iterable[RowTime]) -> list[RowTime]:
    """One entry for the rows of all objects that hold the same layers of a group."""
    merged: dict[tuple[str, int, int], RowTime] = {}
    for row in rows:
        key = row.group, row.first_layer, row.last_layer
        known = merged.get(key)
        merged[key] = row if known is None else known.joined(row)
    return sorted(merged.values(), key=lambda row: (row.first_layer, row.group))
