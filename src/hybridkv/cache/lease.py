"""What one running request holds, and the tables of one step."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from hybridkv.cache.index import Checkpoint, Node, State
from hybridkv.cache.pages import Pages, make_pages
from hybridkv.cache.policy import Kind, Numbers
from hybridkv.cache.pools import Slab
from hybridkv.cache.tokens import TOKEN_BYTES, TokenIds, pack_tokens


class Segment(NamedTuple):
    """A run of a request's tokens in one step: the scan reads the state from src and writes it to dst.

    Equal pages: in place. The null page as src: a zero state. A state cut into several pages names them all.
    """

    start: int
    end: int
    src: tuple[int, ...]
    dst: tuple[int, ...]


class Loaded(NamedTuple):
    """What others put into a request's pages before its step computes the rest: blocks, and a state a group."""

    start: int
    """Where the request stood. It is loaded up to the step's own start."""
    states: dict[str, tuple[int, ...]]
    """By state group: the pages of the state at the step's start."""


class StepTables(NamedTuple):
    """Everything a step needs to know of one request: positions are explicit, nothing is inferred from shapes."""

    start: int
    end: int
    block_tokens: int
    tables: dict[str, Pages]
    """By token group: the page of each block, at least up to `end`. The null page: a block it no longer sees."""
    segments: dict[str, list[Segment]]
    """By state group: the step's tokens in order."""
    loaded: Loaded | None = None
    """The tokens before `start` whose pages are filled from elsewhere, if there are such."""

    def encode(self) -> bytes:
        """For another process."""
        tables = {group: list(pages) for group, pages in self.tables.items()}
        return json.dumps({**self._asdict(), "tables": tables}).encode()

    @classmethod
    def decode(cls, data: bytes) -> StepTables:
        raw = json.loads(data)
        segments = {
            group: [Segment(start, end, tuple(src), tuple(dst)) for start, end, src, dst in rows]
            for group, rows in raw["segments"].items()
        }
        tables = {group: make_pages(pages) for group, pages in raw["tables"].items()}
        loaded = raw["loaded"]
        if loaded is not None:
            loaded = Loaded(loaded[0], {group: tuple(pages) for group, pages in loaded[1].items()})
        return cls(raw["start"], raw["end"], raw["block_tokens"], tables, segments, loaded)


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


class Lease:
    """A running request: tokens, page tables, states, and the node that holds its path in the index."""

    __slots__ = (
        "_computing",
        "aborted",
        "cached_tokens",
        "computed",
        "continued_from",
        "copied",
        "has_recalled",
        "id",
        "is_pin",
        "keeps",
        "leaf",
        "lessons",
        "local_first",
        "matched_tokens",
        "named_tables",
        "poisoned",
        "prompt_tokens",
        "released",
        "resumed_from",
        "root_key",
        "slabs",
        "slide_at",
        "states",
        "step",
        "tables",
        "tail",
        "taps",
        "tokens",
        "turn",
        "wanted",
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
        """Full-attention KV that matched then; later, also what is known to have been there once."""
        self.turn = 0
        """How often the request it continues had been continued before, and once more."""
        self.continued_from = 0
        """Where that request ended."""
        self.lessons: list[tuple[Numbers, int]] = []
        """What it reuses, for the eviction policy: group and age. Told when it has computed something."""
        self.resumed_from: Checkpoint | None = None
        self.has_recalled = False
        """It asked for something that was evicted, and that has been counted."""
        self.tables: list[Pages | None] = []
        """By token group: a page a block; None for taps the request did not ask for."""
        self.named_tables: dict[str, Pages] = {}
        """The same lists by the group's name."""
        self.local_first: list[int] = []
        """By token group: the first block a local group still holds."""
        self.slide_at = 0
        """The position at which some local group next lets go of a block."""
        self.states: list[State | None] = []
        """By state group: the state at `computed`, one hold each; None: the zero state of position 0."""
        self.tail: Checkpoint | None = None
        """The checkpoint inside a block that this lease resumes from, until its tail has been copied."""
        self.wanted: dict[int, Kind] = {}
        """Positions where a checkpoint is wanted, and why."""
        self.keeps: list[int] = []
        """Those of them that lie ahead, in order."""
        self.copied: list[tuple[int, int]] = []
        """(token group, page) that the block begun was copied from: if that turns out bad, so is the copy."""
        self.is_pin = False
        """It belongs to a pin, and computes nothing."""
        self.step: InFlight | None = None
        self.slabs: set[Slab] = set()
        self.poisoned: int | None = None
        """The first position that is invalid, found while a step was in flight."""
        self.aborted = False
        self.released = False
        self._computing: tuple[Node, bytes] | None = None

    @property
    def num_tokens(self) -> int:
        """Tokens known: the prompt, and what has been sampled."""
        return len(self.tokens) // TOKEN_BYTES

    @property
    def in_flight(self) -> bool:
        return self.step is not None

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
            self.wanted.setdefault(position, Kind.BRANCH)
            self.plan_keeps()
        return position in self.keeps

    def plan_keeps(self) -> None:
        """Where to keep checkpoints from here on."""
        self.keeps = sorted(position for position in self.wanted if position > self.computed)

    def announce(self, block_bytes: int) -> None:
        """Say in the index which block comes next, so that others with the same prefix can wait for it."""
        self.withdraw()
        start = self.leaf.end * block_bytes
        if not self.is_pin and start + block_bytes <= self.prompt_tokens * TOKEN_BYTES:
            block = bytes(self.tokens[start : start + block_bytes])
            self._computing = (self.leaf, block)
            self.leaf.computing.setdefault(block, self)

    def withdraw(self) -> None:
        if self._computing is not None:
            node, block = self._computing
            if node.computing.get(block) is self:
                del node.computing[block]
            self._computing = None


class NoRoom(NamedTuple):
    """Why pages could not be had. False in a condition, so that `if not (step := extend(...))` reads well."""

    reason: str
    pinned_slabs: int = 0
    """Slabs that could have been emptied but for steps in flight and transfers."""
    wait_for_moves: bool = False
    """Moves are under way: run and acknowledge them, then ask again."""

    never: bool = False
    """Not even an empty arena would do: refuse the request, or extend it by less at a time."""
    transfer_slabs: int = 0
    """Those of `pinned_slabs` that transfers pin (`Cache.pin`): they may take seconds."""

    def __bool__(self) -> bool:
        return False


class Match(NamedTuple):
    """What the index has for some tokens, without touching it."""

    num_tokens: int
    """Where a request would resume."""
    matched_tokens: int
    """Full-attention KV that matches, in whole blocks."""
    missing: str
    leader: Lease | None
    """A running request that computes more of the same prefix right now, or the same again for want of a state."""
    leader_tokens: int
    """How far the prefix shared with the leader goes, in whole blocks; 0 without one."""
