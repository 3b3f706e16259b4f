"""The cached prefixes as a tree: runs of tokens with checkpoints. A run is named by the key of its first block."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple

from hybridkv.cache.index.prefix_cache import PrefixCache
from hybridkv.cache.index.tree import Node
from hybridkv.cache.tokens import TOKEN_BYTES

_MOST_VISITED = 1 << 15
_MOST_CHECKPOINTS = 64


@dataclass(frozen=True, slots=True)
class KeptCheckpoint:
    position: int
    kind: str
    num_hits: int
    idle_s: float
    """Seconds since it was kept or last used."""
    worth: float | None
    """The eviction policy's value of it; None while it is in use."""


@dataclass(frozen=True, slots=True)
class Run:
    """A node of the index: the tokens from `start` to `end` of one or more prompts."""

    key: bytes
    parent: bytes | None
    start: int
    end: int
    leases: int
    """Requests that run at its end; pins are not among them."""
    is_pinned: bool
    num_children: int
    idle_s: float
    """Seconds since a request last ended or resumed here or below."""
    head: bytes
    """Its first tokens, packed."""
    checkpoints: tuple[KeptCheckpoint, ...]
    """The last 64."""


@dataclass(frozen=True, slots=True)
class PrefixTree:
    runs: tuple[Run, ...]
    """Parents before children; the most recently used ones, if there are too many."""
    num_runs: int
    is_cut: bool
    """Whether runs were left out."""


class Place(NamedTuple):
    """Where a block is in the index."""

    node: Node
    block: int
    """Its number in the node."""


def prefix_tree(prefixes: PrefixCache, pinned: Iterable[Node], max_runs: int, head_tokens: int) -> PrefixTree:
    """`pinned`: the leaves of pins. `head_tokens`: number of tokens in the `head` of a run."""
    order, last_used, has_more = _visit(prefixes)
    kept = order
    if len(order) > max_runs:
        recent = sorted(order, key=lambda node: -last_used[node])[:max_runs]
        chosen = set(recent)
        kept = [node for node in order if node in chosen]
    pins = Counter(pinned)
    held = {node for leaf in pins for node in leaf.path()}
    runs = tuple(_run(prefixes, node, last_used[node], pins[node], node in held, head_tokens) for node in kept)
    return PrefixTree(runs, len(order), has_more or len(kept) < len(order))


def find_block(prefixes: PrefixCache, key: bytes) -> Place | None:
    """The block with this key, if it is in the index."""
    nodes = [node for root in prefixes.index.roots.values() for node in root.subtree() if node.parent is not None]
    for node in nodes:
        if node.keys and node.keys[0] == key:
            return Place(node, 0)
    for node in nodes:
        if key in node.keys:  # its run was merged with the one before
            return Place(node, node.keys.index(key))
    return None


def tokens_up_to(node: Node) -> bytes:
    """All tokens of the path to the end of a node."""
    parts = [bytes(one.tokens) for one in node.path()]
    parts.reverse()
    return b"".join(parts)


def resumable_prefixes(node: Node, block_tokens: int, most: int) -> list[bytes]:
    """The tokens up to each of the last `most` checkpoints of a node; up to its end if it has none."""
    tokens = tokens_up_to(node)
    size = block_tokens * TOKEN_BYTES
    ends = [(one.position // block_tokens * size, one.tail_tokens) for one in node.checkpoints[-most:]]
    return [tokens[:end] + tail for end, tail in ends] or [tokens]


def _visit(prefixes: PrefixCache) -> tuple[list[Node], dict[Node, int], bool]:
    """Nodes, parents first; when each of them or one below it was last used; whether there are more nodes."""
    order: list[Node] = []
    has_more = False
    for root in prefixes.index.roots.values():
        for node in root.subtree():
            if len(order) == _MOST_VISITED:
                has_more = True
                break
            if node.parent is not None:
                order.append(node)
    now = prefixes.history.clock
    last_used: dict[Node, int] = {}
    for node in reversed(order):
        used = max((one.last_used for one in node.checkpoints), default=node.last_used)
        used = now if node.refs else max(used, node.last_used, last_used.get(node, 0))
        last_used[node] = used
        if node.parent is not None:
            last_used[node.parent] = max(used, last_used.get(node.parent, 0))
    return order, last_used, has_more


def _run(prefixes: PrefixCache, node: Node, last_used: int, num_pins: int, is_pinned: bool, head_tokens: int) -> Run:
    size, history = prefixes.block_tokens, prefixes.history
    above = node.parent
    checkpoints = tuple(
        KeptCheckpoint(
            one.position,
            one.kind.name.lower(),
            one.num_hits,
            history.seconds_since(one.last_used),
            prefixes.queue.value(one, history.clock),
        )
        for one in node.checkpoints[-_MOST_CHECKPOINTS:]
    )
    return Run(
        node.keys[0],
        above.keys[0] if above is not None and above.parent is not None else None,
        node.start * size,
        node.end * size,
        node.refs - num_pins,
        is_pinned,
        len(node.children),
        history.seconds_since(last_used),
        bytes(node.tokens[: head_tokens * TOKEN_BYTES]),
        checkpoints,
    )
