"""A running request: its tokens, how far they are computed, and the step in flight."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from hybridkv.cache.arena.pages import Pages
from hybridkv.cache.index.tree import Node, State
from hybridkv.cache.retention.history import Lineage
from hybridkv.cache.retention.policy import Kind
from hybridkv.cache.steps.lease_pages import LeasePages
from hybridkv.cache.tokens import TOKEN_BYTES, TokenIds, pack_tokens


class Kept(NamedTuple):
    """A position inside a step where a state was kept."""

    position: int
    states: list[State | None]


@dataclass(slots=True)
class InFlight:
    """A step that was handed out and has not come back."""

    start: int
    end: int
    num_known: int
    """Tokens known without the step's drafts."""
    old_states: list[State | None]
    """The states at `start`, one hold each; None for those written in place."""
    in_place: bool
    """Some state at `start` is being overwritten: if the step fails, it is lost."""
    kept: list[Kept]
    """States of positions inside the step, one hold each."""
    loaded_to: int = 0
    """The tokens from `start` up to here are not computed: their pages are filled from elsewhere."""
    poisoned: int | None = None
    """The first position that was found invalid since the step left."""


class CheckpointPlan:
    """Where one request leaves checkpoints."""

    __slots__ = ("ahead", "wanted")

    def __init__(self) -> None:
        self.wanted: dict[int, Kind] = {}
        """Positions where a checkpoint is wanted, and why."""
        self.ahead: list[int] = []
        """Those of them that are not computed yet, in order."""

    def want(self, position: int, kind: Kind) -> None:
        """Call `restart` after the last one."""
        self.wanted.setdefault(position, kind)

    def restart(self, computed: int) -> None:
        """The request computes from `computed` on."""
        self.ahead = sorted(position for position in self.wanted if position > computed)

    def advance(self, computed: int) -> None:
        """The request has computed up to `computed`."""
        if self.ahead and self.ahead[0] <= computed:
            self.ahead = [position for position in self.ahead if position > computed]

    def copy(self) -> CheckpointPlan:
        twin = CheckpointPlan()
        twin.wanted, twin.ahead = dict(self.wanted), list(self.ahead)
        return twin


class Lease:
    """A running request, and its place in the index: a lease refers to its leaf, which keeps the whole path."""

    __slots__ = (
        "aborted",
        "announced",
        "cached_tokens",
        "computed",
        "id",
        "is_pin",
        "leaf",
        "lineage",
        "matched_tokens",
        "pages",
        "plan",
        "prompt_tokens",
        "released",
        "root_key",
        "step",
        "taps",
        "tokens",
    )

    leaf: Node

    def __init__(self, lease_id: int, root_key: bytes, tokens: bytearray, taps: Sequence[int]) -> None:
        self.id = lease_id
        self.root_key = root_key
        self.tokens = tokens
        self.prompt_tokens = len(tokens) // TOKEN_BYTES
        self.taps = tuple(taps)
        """The tapped layers it uses, as indices of token groups."""
        self.computed = 0
        """Tokens whose KV and state are there: full, local and state groups all stand at this same depth."""
        self.cached_tokens = 0
        """What the index supplied when the lease began, and what was loaded then."""
        self.matched_tokens = 0
        """Full-attention KV that matched when the lease began, in whole blocks."""
        self.pages = LeasePages()
        self.plan = CheckpointPlan()
        self.lineage = Lineage()
        self.step: InFlight | None = None
        self.announced: tuple[Node, bytes] | None = None
        """The block it computes next, as `leaders` has it."""
        self.is_pin = False
        """It belongs to a pin, and computes nothing."""
        self.aborted = False
        self.released = False

    @property
    def num_tokens(self) -> int:
        """Tokens known: the prompt, and what has been sampled."""
        return len(self.tokens) // TOKEN_BYTES

    @property
    def in_flight(self) -> bool:
        return self.step is not None

    @property
    def poisoned(self) -> int | None:
        """The first position that was found invalid while a step is in flight: its result does not count."""
        return None if self.step is None else self.step.poisoned

    @property
    def named_tables(self) -> dict[str, Pages]:
        """By token group: a page a block."""
        return self.pages.named_tables

    @property
    def wanted(self) -> dict[int, Kind]:
        """Positions where a checkpoint is wanted, and why."""
        return self.plan.wanted

    def append(self, tokens: TokenIds) -> None:
        """More tokens are known: a forced continuation, a tool's answer. Sampled ones come with `commit`."""
        self.tokens += pack_tokens(tokens)

    def forget_after(self, num_tokens: int) -> None:
        """Only the first `num_tokens` tokens are known after all."""
        del self.tokens[num_tokens * TOKEN_BYTES :]

    def keep_at(self, position: int) -> bool:
        """Ask for a checkpoint at `position`; False if it is too late for that."""
        if self.step is not None and any(kept.position == position for kept in self.step.kept):
            return True
        ahead = self.step.end if self.step else self.computed
        if position > ahead:
            self.plan.want(position, Kind.BRANCH)
            self.plan.restart(self.computed)
        return position in self.plan.ahead
