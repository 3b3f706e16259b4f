"""Converts one sample's page tables to `PageRequest`: the pages a load fills, and the pages a step writes."""

from __future__ import annotations

from collections.abc import Sequence

from hybridkv.cache import CacheGroup, Lease, StepTables
from hybridkv.engine.request import Sample
from hybridkv.stream import PageRequest, Progress


def load_request(tables: StepTables) -> PageRequest:
    """The tokens that the step loads before it computes the rest."""
    loaded = tables.loaded
    assert loaded is not None
    states = {group: {tables.start: pages} for group, pages in loaded.states.items()}
    return PageRequest(loaded.start, tables.start, tables.tables, states, loaded.copied)


def step_request(tables: StepTables) -> PageRequest:
    """The tokens that the step computes, and the states it writes."""
    states = {group: {one.end: one.dst for one in segments} for group, segments in tables.segments.items()}
    return PageRequest(tables.start, tables.end, tables.tables, states)


def reply_request(lease: Lease, state_groups: Sequence[CacheGroup]) -> PageRequest:
    """All tokens that the lease has computed, and the states at their end."""
    states = {
        group.name: {lease.computed: state.pages}
        for group, state in zip(state_groups, lease.pages.states, strict=True)
        if state is not None
    }
    return PageRequest(0, lease.computed, lease.named_tables, states)


def step_progress(sample: Sample, lease: Lease, tables: StepTables) -> Progress:
    request = sample.request
    return Progress(
        tables.start, tables.end, request.prompt_tokens, request.breakpoints, lease.wanted, bool(lease.taps)
    )
