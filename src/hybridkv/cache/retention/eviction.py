"""The eviction queue: evictable nodes and checkpoints, in the order of the eviction policy."""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Iterable, Sequence
from heapq import heappop, heappush, heapreplace, nsmallest
from itertools import islice

from hybridkv.cache.index.tree import Checkpoint, Node
from hybridkv.cache.layout import CacheLayout, Role
from hybridkv.cache.retention.lifetimes import Lifetimes, weighted
from hybridkv.cache.retention.policy import Candidate, EvictionPolicy, Kind, Numbers, Rating

Item = Node | Checkpoint
_NUM_PRICES = 16
"""The price of memory is the mean value of about as many evicted items."""
_TRY_ONE_IN = 16
"""Part of the items of too little value that are kept all the same."""
_WEIGH_EVERY = 8
"""Number of requests after which values are computed again."""
_MOST_LOOKED_AT = 1024
"""Most entries of a lane or of bare nodes that `first` looks at."""


class _Lane:
    """Items in order of last use. Stale entries are skipped, and removed when they outnumber the valid ones."""

    def __init__(self) -> None:
        self.num_filed = 0
        self.value = 0.0
        """Value of the oldest item, as of the last `weigh`."""
        self._weighed: tuple[int, int] = (0, 0)
        self._heap: list[tuple[int, int, Item]] = []

    def file(self, item: Item) -> None:
        self.num_filed += 1
        heappush(self._heap, (item.last_used, item.ticket, item))
        if len(self._heap) > 2 * self.num_filed + 16:
            self._heap = sorted((item.last_used, item.ticket, item) for item in self.filed())

    def filed(self) -> list[Item]:
        """All items, in no particular order."""
        return [item for _, ticket, item in self._heap if ticket == item.ticket]

    def oldest(self) -> Item | None:
        while self._heap:
            last_used, ticket, item = self._heap[0]
            if ticket != item.ticket:
                heappop(self._heap)
            elif last_used != item.last_used:  # it was used since
                heapreplace(self._heap, (item.last_used, ticket, item))
            else:
                return item
        return None

    def first(self, count: int) -> list[Item]:
        """The `count` oldest items, among those that the heap has near its top. Items that were used since may come
        too early."""
        near = nsmallest(2 * count, self._heap[:_MOST_LOOKED_AT])
        return [item for _, ticket, item in near if ticket == item.ticket][:count]

    def weigh(self, key: Numbers, policy: EvictionPolicy, now: int, oldest_age: int) -> None:
        """Compute the value of the oldest item, unless that was done recently: values change slowly."""
        oldest = self.oldest()
        assert oldest is not None
        if self._weighed != (oldest.ticket, now // _WEIGH_EVERY):
            self.value = policy.value(key, now - oldest.last_used, oldest_age)
            self._weighed = (oldest.ticket, now // _WEIGH_EVERY)


class EvictionQueue:
    """Evictable items in lanes: checkpoints, or nodes for layouts that need no checkpoints.

    An item that turns out to be in use when `pop` reaches it is removed, and must be offered again when it is no longer
    in use. Blocks that no checkpoint needs are *bare*: no request can resume from them, or only while the blocks of its
    windows stay in idle memory, so they are evicted first.
    """

    def __init__(self, layout: CacheLayout, policy: EvictionPolicy, lifetimes: Lifetimes | None = None) -> None:
        """`lifetimes`: of checkpoints; None: they have none."""
        self.policy = policy
        self._block_tokens = layout.block_tokens
        self._checkpoint_bytes = layout.checkpoint_bytes
        self._keeps_idle = layout.keeps_idle_windows
        self._block_bytes = sum(group.page_bytes for group in layout.token_groups if group.role is Role.FULL)
        self._lanes: dict[Numbers, _Lane] = {}
        self._spare_lanes: dict[Numbers, _Lane] = {}
        """Lanes of items that go before all others."""
        self._wanted_lanes: dict[Numbers, _Lane] = {}
        """Lanes of checkpoints that have a lifetime."""
        self._lifetimes = lifetimes
        self._bare: OrderedDict[Node, None] = OrderedDict()
        self._next_ticket = 1
        self._known_oldest_age = 0
        self._look_at = 0
        self._price = 0.0
        """The price of memory: mean value of the items that were evicted last."""
        self._num_declined = 0

    def __len__(self) -> int:
        return len(self._bare) + sum(lane.num_filed for lanes in self._all_lanes for lane in lanes.values())

    @property
    def _all_lanes(self) -> tuple[dict[Numbers, _Lane], ...]:
        return self._spare_lanes, self._lanes, self._wanted_lanes

    @property
    def num_spare(self) -> int:
        """Number of items that go before all others."""
        return sum(lane.num_filed for lane in self._spare_lanes.values())

    def offer(self, item: Item) -> Rating:
        """Add an item to the lane of its current rating."""
        rating, before = self._rate(item), item.rating
        if before is not None and _is_same_lane(before, rating):  # already there; the lane checks `last_used` itself
            item.rating = rating
            return rating
        self.withdraw(item)
        item.rating, item.ticket = rating, self._next_ticket
        self._next_ticket += 1
        lanes = self._lanes_of(rating)
        lane = lanes.get(rating.lane)
        if lane is None:
            lane = lanes[rating.lane] = _Lane()
        lane.file(item)
        return rating

    def _lanes_of(self, rating: Rating) -> dict[Numbers, _Lane]:
        if rating.is_spare:
            return self._spare_lanes
        return self._wanted_lanes if rating.is_wanted else self._lanes

    def _rate(self, item: Item) -> Rating:
        rating = self.policy.rate(self.facts(item))
        if not isinstance(item, Checkpoint):
            return rating
        if item.wanted_until:
            return rating._replace(is_wanted=True)
        if item.kind is Kind.FILL and not item.num_hits:
            return rating._replace(is_spare=True)
        return rating

    def start_lifetime(self, checkpoint: Checkpoint, client: str, lifetime_s: float) -> None:
        """Give a checkpoint a lifetime, or start it anew."""
        assert self._lifetimes is not None
        num_bytes = self.facts(checkpoint).num_bytes
        self._offer_again([checkpoint, *self._lifetimes.start(checkpoint, client, lifetime_s, num_bytes)])

    def forget_lifetime(self, checkpoint: Checkpoint) -> None:
        """End the lifetime of a checkpoint that is removed, if it has one."""
        if checkpoint.wanted_until and self._lifetimes is not None:
            self._lifetimes.forget(checkpoint)

    def _offer_again(self, checkpoints: Iterable[Checkpoint]) -> None:
        """Lifetimes of these have begun or ended. Those that are not queued are in use."""
        for checkpoint in checkpoints:
            if checkpoint.rating is not None:
                self.offer(checkpoint)

    def offer_bare(self, node: Node, *, is_next: bool = False) -> None:
        """Add a node with bare blocks: its last ones, or blocks of windows that are idle. `is_next`: it goes first."""
        self._bare[node] = None
        self._bare.move_to_end(node, last=not is_next)

    def is_bare(self, node: Node) -> bool:
        """Whether the node is queued because of bare blocks. It may have none any more."""
        return node in self._bare

    def withdraw(self, item: Item) -> None:
        if item.rating is not None:
            lanes = self._lanes_of(item.rating)
            lane = lanes[item.rating.lane]
            lane.num_filed -= 1
            if not lane.num_filed:
                del lanes[item.rating.lane]
            item.rating, item.ticket = None, 0
        if isinstance(item, Node):
            self._bare.pop(item, None)

    def pop(self, now: int) -> tuple[Item, Rating | None] | None:
        """Remove and return the evictable item of least value, with its rating (None for a bare node)."""
        if self._lifetimes is not None and self._wanted_lanes:
            self._offer_again(self._lifetimes.take_ended())
        popped = self.pop_spare(now) or self._pop((self._lanes, self._wanted_lanes), now)
        if popped is not None and popped[1] is not None and not popped[1].is_spare:
            value = self.policy.value(popped[1].lane, now - popped[0].last_used, self._oldest_age(now))
            self._price += (value - self._price) / _NUM_PRICES
        return popped

    def is_worth_keeping(self, candidate: Candidate, now: int) -> bool:
        """Whether something new is worth more than what is evicted for it. Some are kept anyway: the policy learns."""
        if self.policy.value(self.policy.rate(candidate).lane, 0, self._oldest_age(now)) >= self._price:
            return True
        self._num_declined += 1
        return self._num_declined % _TRY_ONE_IN == 0

    def inner(self, kind: Kind, turn: int, new_tokens: int, start: int, end: int) -> Candidate:
        """A checkpoint that a request may keep before its end, as policies see it."""
        return Candidate(kind, True, turn, new_tokens, 0, start, end, self._checkpoint_bytes)

    def pop_spare(self, now: int) -> tuple[Item, Rating | None] | None:
        """Remove and return an item that goes before all others, with its rating: a bare node, or else a spare item.

        A bare node may be in use: then only its idle windows can go. It may have none any more.
        """
        while self._bare:
            node, _ = self._bare.popitem(last=False)
            if not node.gone and (self._keeps_idle or may_go(node)):
                return node, None
        return self._pop((self._spare_lanes,), now)

    def _pop(self, lanes: Sequence[dict[Numbers, _Lane]], now: int) -> tuple[Item, Rating | None] | None:
        if not any(lanes):
            return None
        while (item := self._least(lanes, now)) is not None:
            if not may_go(item):
                self.withdraw(item)
                continue
            before, rating = item.rating, self._rate(item)
            if before is not None and _is_same_lane(before, rating):
                self.withdraw(item)
                return item, rating
            self.offer(item)  # its lane has changed
        return None

    def first(self, count: int, now: int) -> list[tuple[Item, float | None]]:
        """The items that `pop` would return next, with their values (None for a bare node). Nothing is removed.

        Items in use are left out. The order is as of now: each eviction may change it.
        """
        bare = [node for node in islice(self._bare, _MOST_LOOKED_AT) if not node.gone and may_go(node)]
        found: list[tuple[Item, float | None]] = [(node, None) for node in bare[:count]]
        oldest_age = self._oldest_age(now)
        rated: list[tuple[float, int, Item]] = []
        for groups in ((self._spare_lanes,), (self._lanes, self._wanted_lanes)):
            rated.clear()
            for lanes in groups:
                for key, lane in lanes.items():
                    for item in filter(may_go, lane.first(count)):
                        value = self.policy.value(key, now - item.last_used, oldest_age)
                        rated.append((weighted(value, is_wanted=lanes is self._wanted_lanes), item.ticket, item))
            rated.sort(key=lambda one: one[:2])
            found += [(item, value) for value, _, item in rated]
        return found[:count]

    def value(self, item: Item, now: int) -> float | None:
        """The current value of an item; None if it is not queued."""
        if item.rating is None:
            return None
        value = self.policy.value(item.rating.lane, now - item.last_used, self._oldest_age(now))
        return weighted(value, is_wanted=item.rating.is_wanted)

    def _least(self, lanes: Sequence[dict[Numbers, _Lane]], now: int) -> Item | None:
        """The item of least value among the oldest items of these lanes."""
        best: _Lane | None = None
        least = 0.0
        oldest_age = self._oldest_age(now)
        for some in lanes:
            for key, lane in some.items():
                lane.weigh(key, self.policy, now, oldest_age)
                value = weighted(lane.value, is_wanted=some is self._wanted_lanes)
                if best is None or value < least:
                    best, least = lane, value
        return None if best is None else best.oldest()

    def _oldest_age(self, now: int) -> int:
        """Age of the oldest item in the queue, recomputed every `_WEIGH_EVERY` requests."""
        if now >= self._look_at:
            lanes = (*self._lanes.values(), *self._wanted_lanes.values())
            ages = (now - item.last_used for lane in lanes if (item := lane.oldest()) is not None)
            self._known_oldest_age, self._look_at = max(ages, default=0), now + _WEIGH_EVERY
        return self._known_oldest_age

    def check_integrity(self, candidates: Iterable[Item]) -> None:
        """Assert that all `candidates` (evictable items) are queued once, in the lane of their rating."""
        filed: Counter[Item] = Counter()
        for lanes in self._all_lanes:
            for key, lane in lanes.items():
                items = lane.filed()
                assert len(items) == lane.num_filed > 0
                ratings = [item.rating for item in items]
                assert all(rating and rating.lane == key and self._lanes_of(rating) is lanes for rating in ratings)
                assert not any(item.gone if isinstance(item, Node) else item.node is None for item in items)
                filed.update(items)
        assert all(count == 1 for count in filed.values())
        for item in candidates:
            assert item in filed or item in self._bare, "something may be evicted, but nobody will"

    def facts(self, item: Item) -> Candidate:
        """An item as policies see it."""
        if isinstance(item, Node):
            tokens, end = item.num_blocks * self._block_tokens, item.end * self._block_tokens
            num_bytes = item.num_blocks * self._block_bytes
            return Candidate(Kind.END, False, item.turn, item.new_tokens, 0, end - tokens, end, num_bytes)
        node = item.node
        assert node is not None
        before = node.checkpoint_before(item)
        start = 0 if before is None else before.position
        num_bytes, superseded = self._checkpoint_bytes, is_superseded(item)
        if not num_bytes:  # every block boundary can be resumed: it adds only a partial block
            start, num_bytes = item.position // self._block_tokens * self._block_tokens, self._block_bytes
        elif not superseded:
            first = max(start // self._block_tokens, node.start)
            num_bytes += (item.position // self._block_tokens - first) * self._block_bytes
        return Candidate(
            item.kind, superseded, item.turn, item.new_tokens, item.num_hits, start, item.position, num_bytes
        )


def is_superseded(checkpoint: Checkpoint) -> bool:
    """Whether a deeper node or checkpoint is kept on its path."""
    node = checkpoint.node
    return node is None or bool(node.children) or node.checkpoints[-1] is not checkpoint


def _is_same_lane(before: Rating, rating: Rating) -> bool:
    return before.lane == rating.lane and before[2:] == rating[2:]


def may_go(item: Item) -> bool:
    """Whether an item is not in use, so that all of it can be evicted."""
    if isinstance(item, Checkpoint):
        return item.node is not None and not item.holds
    return not item.dead and not item.refs and not item.children and item.parent is not None
