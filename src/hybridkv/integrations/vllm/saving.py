"""Where objects of a request end in vLLM, which has states only where a step ends."""

from __future__ import annotations

from typing import TYPE_CHECKING

from hybridkv.cache import Kind
from hybridkv.stream import Catalogue, DumpPoint, DumpRule, Progress

if TYPE_CHECKING:
    from vllm.v1.request import Request


def points_of_step(
    rule: DumpRule, catalogue: Catalogue, request: Request, start: int, end: int, stored_until: int
) -> list[DumpPoint]:
    """Ends of objects that a step completes: it computes the tokens from `start` up to `end`.

    `stored_until`: full stretches up to here were saved before. With asynchronous scheduling the last token of a
    decoding step is not known when the step is scheduled, so its objects are saved with a later step.
    """
    known = request.num_tokens
    points = {late: DumpPoint(late, False) for late in catalogue.stretch_ends(stored_until, min(start, known))}
    if end <= known:
        checkpoints = {end: Kind.GRID} if end % catalogue.grid_tokens == 0 else {}
        progress = Progress(start, end, request.num_prompt_tokens, checkpoints=checkpoints)
        points.update((point.end, point) for point in rule.of_step(progress))
        if catalogue.state_groups and start < request.num_prompt_tokens:
            points.update((point.end, point) for point in rule.of_reply(end))
    return [points[one] for one in sorted(points)]


def points_of_end(rule: DumpRule, catalogue: Catalogue, request: Request, stored_until: int) -> list[DumpPoint]:
    """Ends of objects of a finished request: its last token, and full stretches that were not saved yet."""
    end = request.num_computed_tokens
    if end > request.num_tokens:
        return []
    points = {late: DumpPoint(late, False) for late in catalogue.stretch_ends(stored_until, end)}
    points.update((point.end, point) for point in rule.of_reply(end))
    return [points[one] for one in sorted(points)]
