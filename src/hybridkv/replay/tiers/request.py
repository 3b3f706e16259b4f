"""One request of a replay with tiers: what it loads, and what its steps leave."""

from __future__ import annotations

from collections.abc import Sequence

from hybridkv.cache import Lease, StepTables
from hybridkv.replay.tiers.tiers import TierLoad, Tiers
from hybridkv.replay.traces import TraceRequest
from hybridkv.stream import Progress


class TieredRequest:
    """Connects a request with the tiers."""

    def __init__(self, tiers: Tiers, request: TraceRequest, reply: bytes, breakpoints: Sequence[int]) -> None:
        """`reply`: what is fed of it. No key covers a token of it before that token is computed."""
        self._tiers = tiers
        self._keys = tiers.keys(request.prompt + reply)
        self._prompt_tokens = request.prompt_tokens
        self._breakpoints = breakpoints

    def find(self, lease: Lease, now: float) -> TierLoad | None:
        return self._tiers.find(self._keys, lease, now)

    def stepped(self, lease: Lease, tables: StepTables, now: float) -> None:
        """A step was committed."""
        progress = Progress(tables.start, tables.end, self._prompt_tokens, self._breakpoints, lease.wanted)
        self._tiers.dump_step(self._keys, tables, progress, now)

    def ended(self, lease: Lease, now: float) -> None:
        """The reply is complete. Call before the lease is released."""
        self._tiers.dump_reply(self._keys, lease, now)
