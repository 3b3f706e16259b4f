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
    """A position inside a step at which states are kept: a checkpoint, or the end of a load inside a block."""

    position: int
    states: list[State | None]


@dataclass(slots=True)
class InFlight:
    """A step that has begun and is not committed."""

    start: int
    end: int
    num_known: int
    """Number of tokens of the lease without the step's drafts."""
    old_states: list[State | None]
    """The states at `start`, with one reference each; None for states written in place."""
    in_place: bool
    """Whether the step overwrites a state at `start`. If the step fails, that state is lost."""
    kept: list[Kept]
    """States at positions inside the step, with one reference each."""
    loaded_to: int = 0
    """The tokens from `start` up to here are loaded: the caller fills their pages."""
    poisoned: int | None = None
    """The first position that was invalidated since the step began."""


class CheckpointPlan:
    """Positions at which one request keeps checkpoints."""

    __slots__ = ("ahead", "client", "has_fill", "lifetimes", "wanted")

    def __init__(self) -> None:
        self.wanted: dict[int, Kind] = {}
        """Positions where a checkpoint is wanted, and why."""
        self.ahead: list[int] = []
        """The positions of `wanted` that are not computed yet, in order."""
        self.has_fill = False
        """Whether some of them only fill idle memory."""
        self.lifetimes: dict[int, float] = {}
        """Seconds for which the client would like to have them kept."""
        self.client = ""
        """The client."""

    def want(self, position: int, kind: Kind) -> None:
        """Add a position; any other reason replaces FILL. Call `restart` after the last one."""
        if self.wanted.setdefault(position, kind) is Kind.FILL:
            self.wanted[position] = kind
        self.has_fill = self.has_fill or kind is Kind.FILL

    def restart(self, computed: int) -> None:
        """Set `ahead` for a request that computes from `computed` on."""
        self.ahead = sorted(position for position in self.wanted if position > computed)

    def advance(self, computed: int) -> None:
        """Remove the positions up to `computed` from `ahead`."""
        if self.ahead and self.ahead[0] <= computed:
            self.ahead = [position for position in self.ahead if position > computed]

    def copy(self) -> CheckpointPlan:
        twin = CheckpointPlan()
        twin.wanted, twin.ahead, twin.has_fill = dict(self.wanted), list(self.ahead), self.has_fill
        twin.lifetimes, twin.client = self.lifetimes, self.client
        return twin


class Lease:
    """A running request and its place in the index: a lease references its leaf, which keeps the whole path alive."""

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
        """Number of tokens whose KV and state are present, the same in full, local and state groups."""
        self.cached_tokens = 0
        """Number of tokens that the index supplied when the lease began, or that were loaded."""
        self.matched_tokens = 0
        """Full-attention KV that matched when the lease began, in whole blocks."""
        self.pages = LeasePages()
        self.plan = CheckpointPlan()
        self.lineage = Lineage()
        self.step: InFlight | None = None
        self.announced: tuple[Node, bytes] | None = None
        """The block it computes next, as registered in `Leaders`."""
        self.is_pin = False
        """Whether it belongs to a pin and computes nothing."""
        self.aborted = False
        self.released = False

    @property
    def num_tokens(self) -> int:
        """Number of known tokens: the prompt and the sampled tokens."""
        return len(self.tokens) // TOKEN_BYTES

    @property
    def in_flight(self) -> bool:
        return self.step is not None

    @property
    def poisoned(self) -> int | None:
        """The first position invalidated while a step is in flight: the step's result is dropped."""
        return None if self.step is None else self.step.poisoned

    @property
    def named_tables(self) -> dict[str, Pages]:
        """By token group: one page per block."""
        return self.pages.named_tables

    @property
    def wanted(self) -> dict[int, Kind]:
        """Positions where a checkpoint is wanted, and why."""
        return self.plan.wanted

    def has_taps(self, taps: Sequence[int]) -> bool:
        """Whether it uses all these tapped layers."""
        return not taps or set(taps) <= set(self.taps)

    def append(self, tokens: TokenIds) -> None:
        """Append tokens: a forced continuation, a tool's answer. Sampled tokens are passed to `commit`."""
        self.tokens += pack_tokens(tokens)

    def forget_after(self, num_tokens: int) -> None:
        """Drop all tokens after the first `num_tokens`."""
        del self.tokens[num_tokens * TOKEN_BYTES :]

    def keep_at(self, position: int) -> bool:
        """Request a checkpoint at `position`. False if the lease is already past it."""
        if self.step is not None and any(kept.position == position for kept in self.step.kept):
            return True
        ahead = self.step.end if self.step else self.computed
        if position <= ahead:
            return False
        self.plan.want(position, Kind.BRANCH)
        self.plan.restart(self.computed)
        return True
