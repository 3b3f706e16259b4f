"""The last steps of an engine: how long their parts took, and what they computed."""

from __future__ import annotations

import time
from collections import deque
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from hybridkv.engine.core import EngineCore

_KEPT = 1024


@dataclass(frozen=True, slots=True)
class Step:
    """One step. Of decoding steps that run on a GPU one after another: the end of one and the start of the next."""

    n: int
    t: float
    """Unix time of its end."""
    schedule: float
    model: float
    sample: float
    commit: float
    """The four parts, in seconds."""
    samples: int
    prompt_tokens: int
    reply_tokens: int
    captured: bool
    """Whether it ran as a CUDA graph."""
    waited: float
    """Seconds that layers waited for rows from a store."""


class StepLog:
    """A bounded number of steps, made from the engine's counters."""

    def __init__(self) -> None:
        self._steps: deque[Step] = deque(maxlen=_KEPT)
        self._before: tuple[float, ...] = (0.0,) * 9
        self._n = 0

    def note(self, core: EngineCore) -> None:
        """Called on the engine's thread after each step, and after each look for one."""
        if core.computed_tokens == self._before[4]:
            return
        totals = (
            *core.seconds.values(),
            core.computed_tokens,
            core.computed_prompt_tokens,
            core.scheduled_samples,
            core.captured_steps,
            0.0 if core.streaming is None else core.streaming.streamer.stats.wait_seconds,
        )
        spent = [now - then for now, then in zip(totals, self._before, strict=True)]
        self._before = totals
        self._n += 1
        schedule, model, sample, commit, tokens, prompt, samples, captured, waited = spent
        self._steps.append(
            Step(
                self._n,
                time.time(),
                schedule,
                model,
                sample,
                commit,
                int(samples),
                int(prompt),
                int(tokens - prompt),
                bool(captured),
                waited,
            )
        )

    def since(self, n: int) -> list[dict[str, Any]]:
        """The steps after number `n`, as far as they are kept. Called on any thread."""
        return [asdict(step) for step in tuple(self._steps) if step.n > n]
