"""What of a request is worth storing: whole stretches of blocks, and what it takes to resume where others may."""

from __future__ import annotations

from hybridkv.cache import CacheLayout, StepTables
from hybridkv.cache.policy import Kind, affordable_grid
from hybridkv.engine.request import Sample
from hybridkv.stream import Outgoing, Streamer


class Dumps:
    """Objects of one engine's requests."""

    def __init__(self, streamer: Streamer, layout: CacheLayout) -> None:
        self.streamer = streamer
        self._grid = affordable_grid(layout.checkpoint_bytes, layout.kv_bytes_per_token)
        self._stateful = bool(streamer.catalogue.state_groups)

    def of_step(self, sample: Sample, tables: StepTables) -> list[Outgoing]:
        """Objects whose last tokens this step computes: full stretches, and what resuming takes where others may."""
        catalogue = self.streamer.catalogue
        if tables.start // catalogue.block_tokens == tables.end // catalogue.block_tokens:
            return []  # no block ends here
        points = self._resume_points(sample, tables)
        ends = {*catalogue.stretch_ends(tables.start, tables.end), *points} if catalogue.token_groups else points
        if not ends:
            return []
        assert sample.lease is not None
        size = catalogue.block_tokens
        keys = sample.keys(self.streamer).first(max(ends) // size, sample.lease.tokens)
        found: list[Outgoing | None] = []
        for end in sorted(ends):
            key = keys[end // size - 1]
            found += [
                self.streamer.token_object(group, key, end, tables.tables[group.name])
                for group in catalogue.token_groups
            ]
            if end in points:
                found += [
                    self.streamer.state_object(group, key, end, _state_at(tables, group.name, end), self._grid)
                    for group in catalogue.state_groups
                ]
        return [one for one in found if one is not None]

    def _resume_points(self, sample: Sample, tables: StepTables) -> set[int]:
        """Whole blocks' ends inside the step where requests may resume: ends of prompts, breakpoints, branches.

        On a grid, only where its states take a quarter of the bytes of the KV between them.
        """
        lease, size = sample.lease, self.streamer.catalogue.block_tokens
        assert lease is not None
        points = {(sample.request.prompt_tokens - 1) // size * size}
        points |= {point // size * size for point in sample.request.breakpoints}
        points |= {p for p, kind in lease.wanted.items() if kind is not Kind.GRID or p % self._grid == 0}
        points = {point for point in points if tables.start < point <= tables.end}
        if self._stateful and points:
            name = self.streamer.catalogue.state_groups[0].name
            points &= {segment.end for segment in tables.segments[name]}
        return points

    def of_reply(self, sample: Sample) -> None:
        """Write the last whole block of a complete reply, on models that can resume at every block."""
        lease, catalogue = sample.lease, self.streamer.catalogue
        if lease is None or lease.in_flight or self._stateful or lease.leaf.dead:
            return
        end = lease.computed // catalogue.block_tokens * catalogue.block_tokens
        if not end:
            return
        tables = lease.named_tables
        if not all(self.streamer.has_pages(group, end, tables[group.name]) for group in catalogue.token_groups):
            return  # a window has left it behind
        key = sample.keys(self.streamer).first(end // catalogue.block_tokens, lease.tokens)[-1]
        for group in catalogue.token_groups:
            one = self.streamer.token_object(group, key, end, tables[group.name])
            if one is not None:
                for number in range(len(group.rows)):
                    self.streamer.dumper.row(one, number)
                self.streamer.dumper.judge(one, True)
        self.streamer.settle()


def _state_at(tables: StepTables, group: str, end: int) -> tuple[int, ...]:
    return next(segment.dst for segment in tables.segments[group] if segment.end == end)
