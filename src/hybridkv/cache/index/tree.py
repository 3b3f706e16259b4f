"""The index: a radix tree of segments.

A node is a run of whole blocks: their tokens, their pages in every group, and checkpoints attached at exact positions.
Matching compares token bytes. A lease references only its leaf, which keeps the whole path alive. A node with one child
and no lease of its own is merged into that child, so chains stay short. Published pages never change; a node can only
be truncated at its end.

Nodes that lookups must not return any more (invalid pages, a new epoch) are *dead*: cut off from the root, but kept
until no lease uses them. The index neither allocates nor frees pages: `PrefixCache` does.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import OrderedDict
from collections.abc import Iterable, Iterator
from operator import attrgetter
from typing import NamedTuple

from hybridkv.cache.arena.pages import NULL_PAGE, Pages, make_pages
from hybridkv.cache.arena.pools import Slab
from hybridkv.cache.retention.policy import Kind, Rating
from hybridkv.cache.tokens import TOKEN_BYTES, anchor_block, block_keys


class State:
    """One recurrent state: its pages and its reference count. Only a sole holder may write it in place."""

    __slots__ = ("pages", "refs")

    def __init__(self, pages: tuple[int, ...]) -> None:
        self.pages = pages
        self.refs = 1


class Checkpoint:
    """Everything a request needs to resume at `position`, besides the full-attention KV before it.

    If `position` is inside a block, the *tail* holds the tokens and pages since the last block boundary.
    """

    __slots__ = (
        "holds",
        "is_news",
        "kind",
        "last_used",
        "new_tokens",
        "node",
        "num_hits",
        "position",
        "rating",
        "states",
        "tail_pages",
        "tail_tokens",
        "ticket",
        "turn",
        "wanted_by",
        "wanted_until",
    )

    def __init__(
        self,
        position: int,
        states: list[State | None],
        kind: Kind,
        tail_tokens: bytes = b"",
        tail_pages: list[int] | None = None,
    ) -> None:
        self.position = position
        self.kind = kind
        self.states = states
        """By state group; None if the state was lost."""
        self.tail_tokens = tail_tokens
        self.tail_pages = tail_pages or []
        """By token group; NULL_PAGE for groups that the request did not use."""
        self.node: Node | None = None
        self.holds = 0
        """Number of leases and pins that use it; while there are any, it is not evicted."""
        self.turn = 0
        """Conversation turn: number of earlier requests that its request continues."""
        self.new_tokens = position
        """Tokens that its request added to the request it continues."""
        self.num_hits = 0
        self.last_used = 0
        self.is_news = True
        """Whether no deeper checkpoint was kept on its path since it was kept or last used."""
        self.rating: Rating | None = None
        """Its rating in the eviction queue; None if it is not queued."""
        self.ticket = 0
        """Number of its entry in the eviction queue."""
        self.wanted_until = 0.0
        """When its lifetime ends: see `Lifetimes`. 0: it has none."""
        self.wanted_by = ""
        """The client that gave it a lifetime."""


class Node:
    """A run of blocks that follows its parent's."""

    __slots__ = (
        "checkpoints",
        "children",
        "dead",
        "first",
        "gone",
        "keys",
        "last_used",
        "new_tokens",
        "pages",
        "parent",
        "prompt_tokens",
        "rating",
        "refs",
        "slabs",
        "start",
        "ticket",
        "tokens",
        "turn",
    )

    def __init__(self, parent: Node | None, start: int, tokens: bytearray, pages: list[Pages | None]) -> None:
        self.parent = parent
        self.start = start
        """Number of blocks before this node."""
        self.tokens = tokens
        self.first = b""
        """Tokens of its first block: its key in `parent.children`."""
        self.pages = pages
        """By token group, one page per block. None: no pages; NULL_PAGE: none for that block. Full groups have all."""
        self.keys: list[bytes] = []
        """Block keys: the name of each block outside this process. The root has one: the root key."""
        self.checkpoints: list[Checkpoint] = []
        """In order of position. A checkpoint inside a block belongs to the node that ends with the block before."""
        self.children: dict[bytes, Node] = {}
        self.refs = 0
        """Number of leases whose leaf this is, and of dead children that were cut off."""
        self.dead = False
        """Whether it is cut off from the index."""
        self.gone = False
        """Whether it was merged into its child or freed."""
        self.slabs: set[Slab] = set()
        self.turn = 0
        """Conversation turn of the request that ends here, as in `Checkpoint`."""
        self.new_tokens = 0
        """Tokens that the request that ends here added, as in `Checkpoint`."""
        self.prompt_tokens = 0
        """Length of the prompt of the request that published its last blocks."""
        self.last_used = 0
        self.rating: Rating | None = None
        self.ticket = 0

    @property
    def num_blocks(self) -> int:
        return len(self.keys) if self.parent is not None else 0

    @property
    def end(self) -> int:
        """Number of blocks up to the end of this node."""
        return self.start + self.num_blocks

    def path(self) -> Iterator[Node]:
        """This node and its ancestors, the root last."""
        node: Node | None = self
        while node is not None:
            yield node
            node = node.parent

    def subtree(self) -> Iterator[Node]:
        """This node and all below it, parents first."""
        waiting = [self]
        while waiting:
            node = waiting.pop()
            yield node
            waiting.extend(node.children.values())

    def at_block(self, block: int) -> Node:
        """The node on this path that holds block number `block`."""
        node = self
        while node.start > block:
            assert node.parent is not None
            node = node.parent
        return node

    def key_before(self, block: int) -> bytes:
        """The key of the block before `block` on this path; the root key if `block` is 0."""
        if not block:
            *_, root = self.path()
            return root.keys[0]
        node = self.at_block(block - 1)
        return node.keys[block - 1 - node.start]

    def checkpoint_at(self, position: int, tail_tokens: bytes = b"") -> Checkpoint | None:
        index = bisect_left(self.checkpoints, position, key=_position)
        while index < len(self.checkpoints) and self.checkpoints[index].position == position:
            if self.checkpoints[index].tail_tokens == tail_tokens:
                return self.checkpoints[index]
            index += 1
        return None

    def checkpoint_before(self, checkpoint: Checkpoint) -> Checkpoint | None:
        """The last checkpoint before `checkpoint` on its path. `self` is its node."""
        index = bisect_left(self.checkpoints, checkpoint.position, key=_position)
        if index:
            return self.checkpoints[index - 1]
        for node in self.path():
            if node is not self and node.checkpoints:
                return node.checkpoints[-1]
        return None

    def add_checkpoint(self, checkpoint: Checkpoint) -> None:
        checkpoint.node = self
        insort(self.checkpoints, checkpoint, key=_position)

    def hold_slabs(self, slabs: set[Slab]) -> None:
        for slab in slabs - self.slabs:
            if slab.is_owned:
                slab.add_holder(self)


_position = attrgetter("position")


class PathNode(NamedTuple):
    """A node on a path, and the number of its blocks that match."""

    node: Node
    num_blocks: int


class Index:
    """Roots by key, and operations on their trees."""

    def __init__(self, block_tokens: int, num_token_groups: int) -> None:
        self.block_tokens = block_tokens
        self.block_bytes = block_tokens * TOKEN_BYTES
        self.num_token_groups = num_token_groups
        self._first_tap = num_token_groups
        self.tapped: OrderedDict[Node, None] = OrderedDict()
        """Nodes with pages of tapped layers; those that a request used last come last."""
        self.roots: dict[bytes, Node] = {}
        self.version = 0
        """While it is the same, lookups return the same result, checkpoints and pages included."""

    def changed(self) -> None:
        """Invalidate earlier lookup results: nodes, checkpoints or missing pages have changed."""
        self.version += 1

    def add_tap(self, nodes: Iterable[Node]) -> None:
        """Add a tapped layer to the token groups. `nodes`: all nodes, those that are cut off too."""
        self.num_token_groups += 1
        for node in nodes:
            node.pages.append(make_pages() if node.parent is None else None)
            for checkpoint in node.checkpoints:
                if checkpoint.tail_tokens:  # its pages are an empty list on models without token groups
                    checkpoint.tail_pages.append(NULL_PAGE)

    def note_taps(self, node: Node) -> None:
        """Call when a node has got pages of a tapped layer."""
        if any(node.pages[self._first_tap :]):
            self.tapped[node] = None

    def touch_taps(self, leaf: Node) -> None:
        """A request uses the tapped layers of a path. Its end counts as older than its beginning."""
        for node in leaf.path():
            if node in self.tapped:
                self.tapped.move_to_end(node)

    def root(self, key: bytes) -> Node:
        """The root for `key`, created on first use."""
        root = self.roots.get(key)
        if root is None:
            root = self.roots[key] = Node(None, 0, bytearray(), [make_pages() for _ in range(self.num_token_groups)])
            root.keys = [key]
            self.changed()
        return root

    def drop_empty_root(self, root: Node) -> None:
        """Remove a root without children and checkpoints, so that unused salts do not accumulate."""
        key = root.keys[0] if root.keys else b""
        if not root.children and not root.checkpoints and self.roots.get(key) is root:
            del self.roots[key]
            self.changed()

    def drop_all_roots(self) -> list[Node]:
        """Remove all roots from the index and return them."""
        roots = list(self.roots.values())
        self.roots.clear()
        self.changed()
        return roots

    def walk(self, key: bytes, tokens: bytes | bytearray, max_blocks: int) -> list[PathNode]:
        """The path of the longest run of matching blocks, at most `max_blocks`; it begins with the root."""
        node = self.roots.get(key)
        if node is None:
            return []
        path = [PathNode(node, 0)]
        size, position, end = self.block_bytes, 0, max_blocks * self.block_bytes
        while position < end:
            child = node.children.get(bytes(tokens[position : position + size]))
            if child is None:
                break
            run = child.tokens
            if position + len(run) <= end and tokens.startswith(run, position):
                position += len(run)
                path.append(PathNode(child, len(run) // size))
                node = child
                continue
            path.append(
                PathNode(child, common_blocks(run, tokens, position, min(len(run), end - position) // size, size))
            )
            break
        return path

    def split(self, node: Node, num_blocks: int) -> Node:
        """Split `node` after `num_blocks`. It keeps its end and its references. Returns the new node before it."""
        assert node.parent is not None
        assert 0 < num_blocks < node.num_blocks
        cut = num_blocks * self.block_bytes
        head = Node(
            node.parent, node.start, node.tokens[:cut], [None if p is None else p[:num_blocks] for p in node.pages]
        )
        head.first, head.keys, head.dead = node.first, node.keys[:num_blocks], node.dead
        head.last_used, head.turn, head.new_tokens = node.last_used, node.turn + 1, node.new_tokens  # it is shared now
        head.prompt_tokens = node.prompt_tokens
        if node.parent.children.get(node.first) is node:  # else it is cut off, and `head` is instead
            node.parent.children[head.first] = head
        node.parent, node.start, node.tokens = head, node.start + num_blocks, node.tokens[cut:]
        node.pages = [None if p is None else p[num_blocks:] for p in node.pages]
        node.first, node.keys = bytes(node.tokens[: self.block_bytes]), node.keys[num_blocks:]
        head.children[node.first] = node
        boundary = (head.start + num_blocks + 1) * self.block_tokens  # `head` gets checkpoints inside the next block
        keep = bisect_left(node.checkpoints, boundary, key=_position)
        head.checkpoints, node.checkpoints = node.checkpoints[:keep], node.checkpoints[keep:]
        for checkpoint in head.checkpoints:
            checkpoint.node = head
        head.hold_slabs(node.slabs)
        if node in self.tapped:
            self.note_taps(head)
        self.changed()
        return head

    def absorb(self, node: Node) -> Node:
        """Merge `node`, which has one child and no leases, into that child. Leases of the child are not affected."""
        (child,) = node.children.values()
        assert node.parent is not None
        assert not node.refs
        child.tokens = node.tokens + child.tokens
        child.pages = [
            _join(upper, node.num_blocks, lower, child.num_blocks)
            for upper, lower in zip(node.pages, child.pages, strict=True)
        ]
        child.keys = node.keys + child.keys
        child.checkpoints = node.checkpoints + child.checkpoints
        for checkpoint in node.checkpoints:
            checkpoint.node = child
        child.first, child.start, child.parent = node.first, node.start, node.parent
        node.parent.children[child.first] = child
        child.hold_slabs(node.slabs)
        if node in self.tapped:
            self.note_taps(child)
        self.forget(node)
        self.changed()
        return child

    def append(self, node: Node, prompt: bytearray, end: int, pages: list[Pages | None], may_grow: bool) -> Node:
        """Add the blocks of `prompt` from the end of `node` up to `end`.

        They extend `node` itself if no other lease is at its end (`may_grow`), else they become a child.
        """
        self.changed()
        first, size = node.end, self.block_bytes
        keys = block_keys(node.key_before(anchor_block(first)), prompt, first, end, size)
        tokens = prompt[first * size : end * size]
        if may_grow and node.parent is not None and not node.children:
            node.pages = [
                _join(old, node.num_blocks, new, len(keys)) for old, new in zip(node.pages, pages, strict=True)
            ]
            node.tokens += tokens
            node.keys += keys
            self.note_taps(node)
            return node
        child = Node(node, first, tokens, pages)
        child.first, child.keys, child.dead = bytes(tokens[:size]), keys, node.dead
        node.children[child.first] = child
        self.note_taps(child)
        return child

    def truncate(self, node: Node, num_blocks: int) -> list[Pages | None]:
        """Remove the blocks after the first `num_blocks` and return their pages.

        `node` has no children, and no checkpoints on these blocks.
        """
        assert not node.children
        self.changed()
        lost = [None if pages is None else pages[num_blocks:] for pages in node.pages]
        if num_blocks == 0:
            self.unlink(node)
            self.forget(node)
            return lost
        node.pages = [None if pages is None else pages[:num_blocks] for pages in node.pages]
        del node.tokens[num_blocks * self.block_bytes :]
        del node.keys[num_blocks:]
        return lost

    def unlink(self, node: Node) -> None:
        """Remove a node from its parent's children. Its own children are untouched."""
        if node.parent is not None and node.parent.children.get(node.first) is node:
            del node.parent.children[node.first]
            self.changed()

    def forget(self, node: Node) -> None:
        """Mark a node as gone and clear it. Slabs that still list it as a holder drop it later."""
        node.slabs.clear()
        self.tapped.pop(node, None)
        node.pages, node.keys, node.checkpoints, node.children = [], [], [], {}
        node.dead = node.gone = True


def common_blocks(run: bytearray, tokens: bytes | bytearray, position: int, most: int, size: int) -> int:
    """Number of whole blocks that `run` shares with `tokens` from `position` on, at most `most`.

    The caller knows that the first block is equal.
    """
    low, high = 1, most
    while low < high:
        middle = (low + high + 1) // 2
        if tokens[position + low * size : position + middle * size] == run[low * size : middle * size]:
            low = middle
        else:
            high = middle - 1
    return low


def null_pages(count: int) -> Pages:
    """Blocks without pages."""
    return make_pages((NULL_PAGE,)) * count


def _join(upper: Pages | None, num_upper: int, lower: Pages | None, num_lower: int) -> Pages | None:
    if upper is None and lower is None:
        return None
    return (null_pages(num_upper) if upper is None else upper) + (null_pages(num_lower) if lower is None else lower)
