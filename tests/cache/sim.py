"""A cache over a pretend memory that remembers what was written where.

Every token of every group has a value that names the whole prefix it stands for; a state names the prefix it has
seen. Running a step reads, through the tables alone, everything a model would read, and compares. So a wrong page, a
stale tail, a state from elsewhere or a page reused too early is seen at once.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from hashlib import blake2b
from typing import Any

from hybridkv.cache import (
    NULL_PAGE,
    Cache,
    CacheLayout,
    CopyPage,
    Lease,
    NoRoom,
    Operation,
    Pin,
    Role,
    StepTables,
    ZeroPage,
)
from hybridkv.cache.index.tree import Checkpoint, Node
from hybridkv.cache.tokens import TOKEN_BYTES


@dataclass(frozen=True)
class Value:
    """What a slot holds: which prefix, and whether it came from a page gone bad."""

    prefix: bytes
    tainted: bool = False


ZERO = Value(b"")


def prefix_value(tokens: bytes | bytearray, position: int, group: str) -> bytes:
    """The name of the first `position` tokens as `group` sees them."""
    return blake2b(bytes(tokens[: position * TOKEN_BYTES]), digest_size=8, person=group.encode()[:16]).digest()


@dataclass
class Memory:
    """Slots by pool and page. A state takes one value on each of its pages."""

    layout: CacheLayout
    slots: dict[tuple[str, int], dict[int, Value]] = field(default_factory=dict)

    def run(self, operations: Iterable[Operation]) -> None:
        per_slab = {g.pool_name: g.pages_per_slab for g in self.layout.groups}
        for operation in operations:
            if isinstance(operation, CopyPage):
                self.slots[operation.pool, operation.dst] = dict(self.page(operation.pool, operation.src))
            elif isinstance(operation, ZeroPage):
                self.slots.pop((operation.pool, operation.page), None)
            else:
                first = operation.slab * per_slab[operation.pool]
                for page in range(first, first + per_slab[operation.pool]):
                    self.slots.pop((operation.pool, page), None)

    def page(self, pool: str, page: int) -> dict[int, Value]:
        return self.slots.setdefault((pool, page), {})


class Sim:
    """A cache, its memory, and the steps in between."""

    def __init__(self, layout: CacheLayout, *, at_once: bool = True, **options: Any) -> None:
        self.layout = layout
        self.memory = Memory(layout)
        self.cache = Cache(layout, run_operations=self.memory.run if at_once else None, **options)
        self.unacknowledged: list[int] = []
        self.groups = {group.name: group for group in layout.groups}

    # --- steps --------------------------------------------------------------------------------------------------------

    def extend(
        self, lease: Lease, num_tokens: int, *, num_good: int | None = None, **options: Any
    ) -> StepTables | None:
        """Extend and run, but do not commit. None: no room. `num_good`: so many of the loaded tokens are right."""
        step = self.cache.extend(lease, num_tokens, **options)
        if isinstance(step, NoRoom):
            return None
        self.run_operations()
        step = StepTables.decode(step.encode())
        if step.loaded is not None:
            self.load(lease, step, num_good)
        if step.end > step.start:
            self.run(lease, step)
        return step

    def load(self, lease: Lease, step: StepTables, num_good: int | None = None) -> None:
        """Fill the pages that come from elsewhere: blocks that are seen from there on, and states.

        Blocks that the cache has copied are not filled: they must be right already.
        """
        assert step.loaded is not None
        good_until = step.start if num_good is None else step.loaded.start + num_good
        for name, table in step.tables.items():
            group = self.groups[name]
            first = group.sight.first_visible(step.start) // step.block_tokens * step.block_tokens
            for position in range(max(first, step.loaded.start), step.start):
                page = table[position // step.block_tokens]
                assert page >= group.pages_per_slab, "a write into the null slab"
                prefix, slot = prefix_value(lease.tokens, position + 1, name), position % step.block_tokens
                if position // step.block_tokens in step.loaded.copied.get(name, ()):
                    assert self.memory.page(group.pool_name, page)[slot].prefix == prefix, (name, position)
                    continue
                value = Value(prefix, position >= good_until)
                self.memory.page(group.pool_name, page)[slot] = value
            blocks = step.loaded.copied.get(name, [])
            assert set(blocks) <= set(range(max(first, step.loaded.start) // step.block_tokens, len(table)))
        for name, pages in step.loaded.states.items():
            for page in pages:
                value = Value(prefix_value(lease.tokens, step.start, name), good_until < step.start)
                self.memory.page(self.groups[name].pool_name, page)[0] = value

    def run_operations(self) -> None:
        """As a memory layer must: in order, before the step. Acknowledged some other time."""
        batch = self.cache.take_operations()
        if batch is not None:
            self.memory.run(batch.operations)
            self.unacknowledged.append(batch.id)

    def acknowledge_all(self) -> None:
        self.run_operations()
        while self.unacknowledged:
            self.cache.acknowledge(self.unacknowledged.pop())

    def compute(self, lease: Lease, num_tokens: int | None = None, **options: Any) -> bool:
        """Extend, run and commit; all known tokens by default."""
        count = lease.num_tokens - lease.computed if num_tokens is None else num_tokens
        if self.extend(lease, count) is None:
            return False
        self.cache.commit(lease, **options)
        return True

    def prompt(self, tokens: Sequence[int], **options: Any) -> Lease:
        """Begin a request and compute its prompt."""
        lease = self.cache.begin(tokens, **options)
        assert self.compute(lease)
        return lease

    def serve(self, tokens: Sequence[int], reply: Sequence[int] = (), **options: Any) -> int:
        """A whole request, its reply decoded token by token; returns how much of it was cached."""
        lease = self.cache.begin(tokens, **options)
        if reply:
            assert self.compute(lease, sampled=reply[:1])
            for token in reply[1:]:
                assert self.compute(lease, sampled=[token])
        else:
            assert self.compute(lease)
        self.cache.release(lease)
        self.cache.check_integrity()
        return lease.cached_tokens

    def run(self, lease: Lease, step: StepTables) -> None:
        """Read what the step's tokens see, check it, and write what they leave."""
        tainted = False
        for name, table in step.tables.items():
            tainted |= self._read_tokens(lease, step.start, name, table)
        for name, segments in step.segments.items():
            assert segments[0].start == step.start
            assert segments[-1].end == step.end
            tainted |= self._read_state(lease, name, segments[0].start, segments[0].src)
        for name, table in step.tables.items():
            self._write_tokens(lease, step, name, table, tainted)
        for name, segments in step.segments.items():
            for before, segment in zip([None, *segments], segments, strict=False):
                if before is not None:
                    assert segment.start == before.end
                    assert segment.src == before.dst
                    tainted |= self._read_state(lease, name, segment.start, segment.src)
                value = Value(prefix_value(lease.tokens, segment.end, name), tainted)
                for page in segment.dst:
                    assert page >= self.groups[name].pages_per_slab, "a write into the null slab"
                    self.memory.page(self.groups[name].pool_name, page)[0] = value

    def check_pinned(self, pin: Pin) -> None:
        """Through the pin's pages alone, read all that who resumes at its end would read."""
        tables, states = pin.pages
        size, end = self.layout.block_tokens, pin.num_tokens
        for name, table in tables.items():
            assert len(table) == -(-end // size)
            assert not self._read_tokens(pin.lease, end, name, table)
            unseen = self.groups[name].sight.first_visible_block(end, size)
            assert set(table[:unseen]) <= {NULL_PAGE}, "a page that nobody needs"
        assert states.keys() == {group.name for group in self.layout.state_groups}
        for name, pages in states.items():
            assert not self._read_state(pin.lease, name, end, pages)

    def _read_tokens(self, lease: Lease, end: int, name: str, table: Sequence[int]) -> bool:
        """Read what the token at `end` sees before it; whether any of it is tainted."""
        group, size, tainted = self.groups[name], self.layout.block_tokens, False
        first = 0 if group.role is Role.TAP else group.sight.first_visible(end)
        for position in range(first, end):
            page = table[position // size]
            assert page != NULL_PAGE
            value = self.memory.page(group.pool_name, page).get(position % size)
            assert value is not None
            assert value.prefix == prefix_value(lease.tokens, position + 1, name), (name, position)
            tainted |= value.tainted
        return tainted

    def _read_state(self, lease: Lease, name: str, position: int, src: Sequence[int]) -> bool:
        group = self.groups[name]
        assert len(src) == group.pages_per_state
        values = [self.memory.page(group.pool_name, page).get(0, ZERO) for page in src]
        expected = prefix_value(lease.tokens, position, name) if position else ZERO.prefix
        assert all(value.prefix == expected for value in values), (name, position)
        return any(value.tainted for value in values)

    def _write_tokens(self, lease: Lease, step: StepTables, name: str, table: Sequence[int], tainted: bool) -> None:
        group, size = self.groups[name], step.block_tokens
        assert len(table) >= -(-step.end // size)
        for position in range(step.start, step.end):
            page = table[position // size]
            assert page >= group.pages_per_slab, "a write into the null slab"
            value = Value(prefix_value(lease.tokens, position + 1, name), tainted)
            self.memory.page(group.pool_name, page)[position % size] = value

    # --- what can be found --------------------------------------------------------------------------------------------

    def brute_force_resume(self, tokens: bytes, key: bytes, taps: Sequence[str] = ()) -> int:
        """The resume rule, word by word, over everything in the tree."""
        size, index = self.layout.block_tokens, self.cache._prefixes.index
        blocks: dict[bytes, tuple[Node, int]] = {}
        checkpoints: dict[bytes, list[Checkpoint]] = {}
        for node in index.roots[key].subtree() if key in index.roots else ():
            prefix = b"".join(bytes(n.tokens) for n in reversed([*node.path()][1:]))
            for i in range(node.num_blocks):
                blocks[prefix + bytes(node.tokens[: (i + 1) * index.block_bytes])] = (node, i)
            whole = prefix + bytes(node.tokens)
            for checkpoint in node.checkpoints:
                start = whole[: checkpoint.position // size * index.block_bytes]
                checkpoints.setdefault(start + checkpoint.tail_tokens, []).append(checkpoint)

        def has_page(group: int, block: int) -> bool:
            node, i = blocks[tokens[: (block + 1) * index.block_bytes]]
            pages = node.pages[group]
            return pages is not None and pages[i] != NULL_PAGE

        def possible(n: int) -> bool:
            whole, inside = divmod(n, size)
            if any(tokens[: (b + 1) * index.block_bytes] not in blocks for b in range(whole)):
                return False
            here = checkpoints.get(tokens[: n * TOKEN_BYTES], [])
            if n and (inside or self.layout.state_groups):
                here = [c for c in here if None not in c.states]
                if not here:
                    return False
            for g, group in enumerate(self.cache._groups.token_groups):
                if group.role is Role.TAP and group.name not in taps:
                    continue
                if group.role is Role.TAP and inside and not any(c.tail_pages[g] != NULL_PAGE for c in here):
                    return False
                if not all(has_page(g, b) for b in range(group.sight.first_visible(n) // size, whole)):
                    return False
            return True

        return max(n for n in range(len(tokens) // TOKEN_BYTES) if possible(n))

    def reachable_taint(self) -> list[str]:
        """Bad content that the index or a lease could still hand out."""
        index, found = self.cache._prefixes.index, []
        for root in index.roots.values():
            for node in root.subtree():
                for group, pages in enumerate(node.pages):
                    found += self._tainted(self.cache._groups.token_groups[group].name, pages or ())
                for checkpoint in node.checkpoints:
                    for group, page in enumerate(checkpoint.tail_pages):
                        inside = checkpoint.position % self.layout.block_tokens  # after that: leftovers nobody reads
                        found += self._tainted(self.cache._groups.token_groups[group].name, [page], inside)
                    for group, state in enumerate(checkpoint.states):
                        if state is not None:
                            found += self._tainted(self.layout.state_groups[group].name, state.pages)
        return found

    def _tainted(self, name: str, pages: Iterable[int], num_slots: int | None = None) -> list[str]:
        pool = self.groups[name].pool_name
        slots = self.layout.block_tokens if num_slots is None else num_slots
        return [
            f"{name} page {page}"
            for page in pages
            if page != NULL_PAGE
            and any(v.tainted for slot, v in self.memory.slots.get((pool, page), {}).items() if slot < slots)
        ]
