"""The tiers of a replay: what requests load from them and leave in them, as an engine with a tiered store would.

Where objects end is decided by the engine's own rule (`stream.DumpRule`). New objects are written to all tiers, reads
come from the first tier that has an object, and an object that was read is written to the tiers above. Checkpoints that
fill idle room go to the first tier alone, if it is host memory. Objects are visible when the step that computed them is
committed; writes take no time.

    all       everything that is found is loaded, as engines do
    faster    only what is loaded sooner than it would be computed
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import NamedTuple

from hybridkv.cache import NULL_PAGE, CacheLayout, Lease, Role, StepTables
from hybridkv.errors import InputError
from hybridkv.replay.report import Setting, percentiles
from hybridkv.replay.service import ServiceModel
from hybridkv.replay.tiers.figures import LoadReport, TierReport
from hybridkv.replay.tiers.keys import PositionKeys
from hybridkv.replay.tiers.lookup import Index, Supply
from hybridkv.replay.tiers.objects import Objects
from hybridkv.replay.tiers.shelf import Shelf
from hybridkv.replay.tiers.spec import check_rule
from hybridkv.stream import LOAD_TIMEOUT_S, Catalogue, DumpPoint, DumpRule, Progress
from hybridkv.stream.form import StoredGroup

Blocks = Mapping[str, Sequence[int]]
"""By token group: the page of each block."""
StateEnds = Mapping[str, Collection[int]]
"""By state group: positions at which there is a state."""


class TierLoad(NamedTuple):
    """A load that is worth beginning."""

    supply: Supply
    read_bytes: Sequence[int]
    """By tier."""
    seconds: float
    is_slower: bool
    """It takes longer than computing the same tokens."""

    @property
    def is_late(self) -> bool:
        """Engines give it up after `LOAD_TIMEOUT_S`."""
        return self.seconds > LOAD_TIMEOUT_S

    @property
    def wait_s(self) -> float:
        return min(self.seconds, LOAD_TIMEOUT_S)


class Tiers:
    """The tiers of one replay, the fastest first."""

    def __init__(
        self, catalogue: Catalogue, layout: CacheLayout, setting: Setting, service: ServiceModel | None
    ) -> None:
        """`service`: how long computing takes. Without it loads are not compared with computing."""
        check_rule(setting.tier_loads)
        if setting.tier_loads == "faster" and service is None:
            raise InputError("tier loads 'faster' without a service model: pass one, or load 'all'")
        self.specs = setting.tiers
        self._rule = setting.tier_loads
        self._has_time = not setting.serial
        self._service = service
        self._catalogue = catalogue
        self._layout = layout
        self._objects = Objects(catalogue, setting.tp)
        self._shelves = [Shelf(spec.size_bytes, self._objects.values) for spec in self.specs]
        self._filled = self._shelves[0] if setting.tier_fill else None
        """The tier whose idle room is filled."""
        self._index = Index(self._objects, self._shelves)
        self._dump_rule = DumpRule(catalogue)
        self._free_at = [0.0] * len(self.specs)
        """When each tier has read what was asked of it so far."""
        self._hit_tokens = [0] * len(self.specs)
        self._read_bytes = [0] * len(self.specs)
        self._num_loads = self._num_slower = self._num_declined = self._num_timeouts = 0
        self._seconds: list[float] = []

    def keys(self, tokens: bytes) -> PositionKeys:
        """Names of the positions of a request: prompt and reply, as far as they are known."""
        return PositionKeys(tokens, self._objects.stretch_tokens)

    # --- loads --------------------------------------------------------------------------------------------------------

    def find(self, keys: PositionKeys, lease: Lease, now: float) -> TierLoad | None:
        """What a request that just began should load. None: tiers have no more than memory, or computing is faster."""
        supply = self._index.find(keys, lease.computed, lease.matched_tokens, lease.num_tokens - 1)
        if supply is None:
            return None
        read_bytes = [0] * len(self.specs)
        for read in supply.reads:
            read_bytes[read.level] += self._objects.read_bytes(read.need.group, read.need.end)
        seconds = max(self._read_until(level, nbytes, now) for level, nbytes in enumerate(read_bytes) if nbytes) - now
        is_slower = self._service is not None and seconds > self._service.prefill_seconds(supply.start, supply.end)
        if is_slower and self._rule == "faster":
            self._num_declined += 1
            return None
        return TierLoad(supply, read_bytes, seconds, is_slower)

    def _read_until(self, level: int, nbytes: int, now: float) -> float:
        """A tier reads one load after another."""
        spec = self.specs[level]
        return max(now, self._free_at[level]) + nbytes / spec.bytes_per_s + spec.latency_s

    def begin(self, load: TierLoad, now: float) -> None:
        """A load begins to use the tiers' bandwidth; one that is given up uses it until then."""
        for level, nbytes in enumerate(load.read_bytes):
            if nbytes:
                free_at = self._read_until(level, nbytes, now) - self.specs[level].latency_s
                self._free_at[level] = max(self._free_at[level], min(free_at, now + LOAD_TIMEOUT_S))

    def end(self, load: TierLoad, now: float) -> None:
        """A load has ended, or was given up. What was read is used, and now in all tiers above."""
        if load.is_late:
            self._num_timeouts += 1
            return
        self._num_loads += 1
        self._num_slower += load.is_slower
        self._seconds.append(load.seconds)
        for level, nbytes in enumerate(load.read_bytes):
            self._read_bytes[level] += nbytes
        for need, key, level in load.supply.reads:
            for shelf in self._shelves:
                shelf.touch(need.group, key, now)
            for shelf in self._shelves[:level]:
                shelf.add(need.group, key, need.end, self._objects.stored_bytes(need.group, need.end), now)

    def count_hit(self, load: TierLoad) -> None:
        """Count the tokens of a request that starts for the first time."""
        for level, tokens in load.supply.tokens_by_level().items():
            self._hit_tokens[level] += tokens

    @property
    def num_idle_checkpoints(self) -> int:
        """Number of checkpoints that would fill idle room of the first tier."""
        nbytes = self._objects.state_bytes
        return self._filled.idle_bytes // nbytes if self._filled is not None and nbytes else 0

    # --- dumps --------------------------------------------------------------------------------------------------------

    def dump_step(self, keys: PositionKeys, tables: StepTables, progress: Progress, now: float) -> None:
        """Store what a step has computed."""
        states = {name: {one.end for one in segments} for name, segments in tables.segments.items()}
        for point in self._dump_rule.of_step(progress):
            self._dump(keys, point, tables.tables, states, now)

    def dump_reply(self, keys: PositionKeys, lease: Lease, now: float) -> None:
        """Store the end of a reply, to the token."""
        kept = zip(self._layout.state_groups, lease.pages.states, strict=True)
        states = {group.name: {lease.computed} for group, state in kept if state is not None}
        for point in self._dump_rule.of_reply(lease.computed):
            self._dump(keys, point, lease.named_tables, states, now)

    def _dump(self, keys: PositionKeys, point: DumpPoint, blocks: Blocks, states: StateEnds, now: float) -> None:
        """As `stream.Mover.dump`: states, and what does not fill a stretch, only where all groups can resume."""
        found = [self._has_object(group, point.end, blocks, states) for group in self._objects.groups]
        resumes = point.resumes and None not in found and (not point.is_spare or self.num_idle_checkpoints > 0)
        if not resumes and not self._catalogue.ends_stretch(point.end):
            return
        key = keys.at(point.end)
        for number, group in enumerate(self._objects.groups):
            if found[number] and (resumes or not group.is_state):
                nbytes = self._objects.stored_bytes(number, point.end)
                is_spare = point.is_spare and (group.is_state or not self._catalogue.ends_stretch(point.end))
                for shelf in self._shelves[:1] if is_spare else self._shelves:
                    shelf.add(number, key, point.end, nbytes, now, is_spare=is_spare)
        self._index.add(keys, point.end)

    def _has_object(self, group: StoredGroup, end: int, blocks: Blocks, states: StateEnds) -> bool | None:
        """Whether an object of the group ends at `end`; None: it would, but a page or a state is missing."""
        if group.is_state:
            return True if all(end in states.get(chunk.table, ()) for chunk in group.chunks) else None
        if not self._catalogue.num_tokens(group, end):
            return False
        if group.role is not Role.FULL:
            stretch = self._catalogue.stretch(group, end)
            if any(NULL_PAGE in blocks[chunk.table][stretch.first : stretch.last] for chunk in group.chunks):
                return None
        return True

    # --- figures ------------------------------------------------------------------------------------------------------

    def tier_reports(self) -> list[TierReport]:
        return [
            TierReport(
                size_bytes=spec.size_bytes,
                bytes_per_s=spec.bytes_per_s,
                latency_s=spec.latency_s,
                hit_tokens=self._hit_tokens[level],
                read_bytes=self._read_bytes[level],
                written_bytes=shelf.written_bytes,
                peak_bytes=shelf.peak_bytes,
                spare_bytes=shelf.spare_bytes,
                evicted=shelf.evicted,
                dropped=shelf.dropped,
            )
            for level, (spec, shelf) in enumerate(zip(self.specs, self._shelves, strict=True))
        ]

    def load_report(self) -> LoadReport:
        return LoadReport(
            rule=self._rule,
            loads=self._num_loads,
            slower=None if self._service is None else self._num_slower,
            declined=self._num_declined,
            timeouts=self._num_timeouts,
            seconds=percentiles(self._seconds) if self._has_time else None,
        )
