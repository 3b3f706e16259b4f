"""State machine of one sample's transfer from the store, from the lookup to the last row.

    ASKED ──► FOUND ──► LOADING ──► DONE      a step of its own, beside those that compute
      │         │          ▲
      │         │          │ late
      │         └─────► IN_STEP ──► DONE      the first part of the sample's next step, layer by layer
      └───────────────► DONE                  the store adds nothing, or there is no room for what it adds

LOADING and IN_STEP end in FAILED if a row is missing, bad or late. A load that hangs needs no state: giving it up takes
effect at once. A late load that ends inside a block goes back to FOUND, and then on to LOADING.
"""

from __future__ import annotations

from enum import Enum

from hybridkv.cache import Lease
from hybridkv.stream import Fetch, Load


class Stage(Enum):
    ASKED = "asked"
    """A lookup in the store is pending."""
    FOUND = "found"
    """The sample has a lease, and `position` is known. Nothing is loaded yet."""
    LOADING = "loading"
    IN_STEP = "in step"
    DONE = "done"
    FAILED = "failed"


class Transfer:
    """One sample's transfer, from the lookup until the sample goes back to the queue."""

    __slots__ = ("fetch", "lease", "load", "position", "stage", "was_late", "was_prefetched")

    def __init__(self, fetch: Fetch | None) -> None:
        """`fetch`: None if no lookup was worthwhile."""
        self.stage = Stage.DONE if fetch is None else Stage.ASKED
        self.fetch = fetch
        self.position = 0
        """Token position at which the sample resumes after the load."""
        self.lease: Lease | None = None
        """The lease whose pages are filled."""
        self.was_late = False
        """A step did not wait for its rows: it loads asynchronously now."""
        self.was_prefetched = False
        """The store was told that the sample waits."""
        self.load: Load | None = None

    @property
    def load_to(self) -> int:
        """Token position up to which the sample's next step loads from the store; 0 if it loads nothing."""
        return self.position if self.stage is Stage.FOUND else 0

    def found(self, position: int) -> None:
        self._leave(Stage.ASKED)
        self.stage, self.position = Stage.FOUND, position

    def begin(self, stage: Stage, lease: Lease, load: Load) -> None:
        self._leave(Stage.FOUND)
        self.stage, self.lease, self.load = stage, lease, load

    def is_late(self) -> None:
        """Called when the step goes on without the load, which continues beside later steps."""
        self._leave(Stage.IN_STEP)
        self.stage = Stage.LOADING

    def begins_again(self) -> None:
        """Called when the step goes on without the load, which was given up."""
        self._leave(Stage.IN_STEP)
        self.stage, self.was_late, self.load = Stage.FOUND, True, None

    def end(self) -> None:
        """Called when the load has ended, or when nothing will be loaded."""
        self._leave(Stage.ASKED, Stage.FOUND, Stage.LOADING, Stage.IN_STEP)
        self.stage = Stage.FAILED if self.load is not None and self.load.failure is not None else Stage.DONE

    def _leave(self, *stages: Stage) -> None:
        assert self.stage in stages, f"a transfer that is {self.stage.value} cannot go on from there"
