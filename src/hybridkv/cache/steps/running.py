"""The leases that have not ended, and the slabs whose pages must not move for their sake."""

from __future__ import annotations

from hybridkv.cache.arena.pools import Slab
from hybridkv.cache.steps.lease import Lease


class Pinned:
    """The slabs of steps in flight and of transfers, collected at the first question."""

    def __init__(self, running: Running) -> None:
        self.refused: set[Slab] = set()
        """The slabs that were asked for and are pinned."""
        self._running = running
        self._slabs: set[Slab] | None = None

    def is_pinned(self, slab: Slab) -> bool:
        if self._slabs is None:
            self._slabs = self._running.transfer_slabs()
            for lease in self._running.in_flight.values():
                self._slabs.update(lease.pages.slabs, *(node.slabs for node in lease.leaf.path()))
        if slab in self._slabs:
            self.refused.add(slab)
        return slab in self._slabs


class Running:
    """Leases by id."""

    def __init__(self) -> None:
        self.leases: dict[int, Lease] = {}
        """Requests that run, and the leases of pins."""
        self.in_flight: dict[int, Lease] = {}
        """Those of them that have a step in flight."""
        self.transfers: dict[int, set[Slab]] = {}
        """By the id of a pin's lease: the slabs that its pages are in."""

    def transfer_slabs(self) -> set[Slab]:
        """The slabs that transfers pin."""
        slabs: set[Slab] = set()
        return slabs.union(*self.transfers.values())
