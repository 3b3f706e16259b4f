"""The leases that have not ended, and the slabs whose pages must not move because leases use them."""

from __future__ import annotations

from collections.abc import Iterable

from hybridkv.cache.arena.pools import Slab
from hybridkv.cache.steps.lease import Lease


class Pinned:
    """The slabs of steps in flight and of transfers, collected at the first call of `is_pinned`."""

    def __init__(self, running: Running) -> None:
        self.refused: set[Slab] = set()
        """The slabs for which `is_pinned` has returned True."""
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
        """Running requests, and the leases of pins."""
        self.in_flight: dict[int, Lease] = {}
        """Leases with a step in flight."""
        self.transfers: dict[int, set[Slab]] = {}
        """By the id of a pin's lease: the slabs that contain its pages."""

    def transfer_slabs(self, lease_ids: Iterable[int] | None = None) -> set[Slab]:
        """The slabs that transfers pin: all of them, or those whose leases have these ids and have not ended."""
        slabs: set[Slab] = set()
        if lease_ids is None:
            return slabs.union(*self.transfers.values())
        return slabs.union(*(self.transfers.get(one, ()) for one in lease_ids))
