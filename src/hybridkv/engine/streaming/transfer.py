"""What a store adds to one sample: a small state machine, from the question to the last row.

    ASKED ──► FOUND ──► LOADING ──► DONE      a step of its own, beside those that compute
      │         └─────► IN_STEP ──► DONE      the first part of the sample's next step, layer by layer
      └───────────────► DONE                  the store adds nothing, or there is no room for what it adds

LOADING and IN_STEP end in FAILED if a row is missing, bad or late. There is no state for a load that hangs: giving it
up takes effect at once.
"""

from __future__ import annotations

from enum import Enum

from hybridkv.cache import Lease
from hybridkv.stream import Fetch, Load


class Stage(Enum):
    ASKED = "asked"
    """The store looks up what it has."""
    FOUND = "found"
    """The sample has a lease, and `position` is known. Nothing is loaded yet."""
    LOADING = "loading"
    IN_STEP = "in step"
    DONE = "done"
    FAILED = "failed"


class Transfer:
    """One sample's, from when it is asked about until the sample waits again."""

    __slots__ = ("fetch", "lease", "load", "position", "stage")

    def __init__(self, fetch: Fetch | None) -> None:
        """`fetch`: None if there was nothing worth asking for."""
        self.stage = Stage.DONE if fetch is None else Stage.ASKED
        self.fetch = fetch
        self.position = 0
        """Where the sample resumes once it is loaded."""
        self.lease: Lease | None = None
        """The lease whose pages are filled."""
        self.load: Load | None = None

    @property
    def load_to(self) -> int:
        """Up to where the sample's next step begins with tokens from the store; 0 if it does not."""
        return self.position if self.stage is Stage.FOUND else 0

    def found(self, position: int) -> None:
        self._leave(Stage.ASKED)
        self.stage, self.position = Stage.FOUND, position

    def begin(self, stage: Stage, lease: Lease, load: Load) -> None:
        self._leave(Stage.FOUND)
        self.stage, self.lease, self.load = stage, lease, load

    def end(self) -> None:
        """The load is over, or nothing is loaded after all."""
        self._leave(Stage.ASKED, Stage.FOUND, Stage.LOADING, Stage.IN_STEP)
        self.stage = Stage.FAILED if self.load is not None and self.load.failure is not None else Stage.DONE

    def _leave(self, *stages: Stage) -> None:
        assert self.stage in stages, f"a transfer that is {self.stage.value} cannot go on from there"
