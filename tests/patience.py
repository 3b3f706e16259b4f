"""How long something took, on a machine that may be busy with something else."""

from __future__ import annotations

import threading
import time
import weakref

_TICK_S = 0.005


class Stopwatch:
    """Seconds as this process could use them: a thread counts short sleeps, which come late where others compute.

    For upper bounds, "it does not wait for that": a timeout ends by the clock, so it never counts more than it takes.
    """

    def __init__(self) -> None:
        self._ticks = 0
        threading.Thread(target=_count, args=(weakref.ref(self),), daemon=True, name="stopwatch").start()

    @property
    def seconds(self) -> float:
        return self._ticks * _TICK_S


def _count(watch: weakref.ref[Stopwatch]) -> None:
    while (alive := watch()) is not None:
        alive._ticks += 1
        del alive
        time.sleep(_TICK_S)
