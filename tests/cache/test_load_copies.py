"""Loads of blocks whose pages are in the index, without a state, window or tap to resume from: they are copied."""

from __future__ import annotations

import pytest

from hybridkv.cache import CacheGroup, Role, StepTables, lookup_key
from hybridkv.cache.steps.running import Pinned
from tests.cache.sim import Sim
from tests.cache.test_load import PROMPT, check_empty, tainted_tokens
from tests.cache.test_named import FULL, MIXES, STATE, sim, tokens, window

SIBLING = PROMPT[:85] + tokens(20, 9)
"""Shares five whole blocks with the prompt."""
WITH_STATES = sorted(
    name
    for name, groups in MIXES.items()
    if {Role.FULL, Role.STATE} <= {group.role for group in groups}  # memory has KV beyond what can be resumed
)
TAPS = [CacheGroup(f"tap{i}", Role.TAP, 2, pool="taps") for i in range(2)]


def copied(step: StepTables | None) -> dict[str, list[int]]:
    assert step is not None
    assert step.loaded is not None
    return step.loaded.copied


def full_groups(cache: Sim) -> list[str]:
    return [group.name for group in cache.layout.token_groups if group.role is Role.FULL]


@pytest.mark.parametrize("name", WITH_STATES)
@pytest.mark.parametrize("count", [0, 1, 16], ids=["load alone", "with one", "with some"])
@pytest.mark.parametrize(("at", "blocks"), [(80, [0, 1, 2, 3, 4]), (75, [0, 1, 2, 3]), (84, [0, 1, 2, 3, 4]), (7, [])])
def test_blocks_of_the_index_are_copied(name: str, at: int, blocks: list[int], count: int) -> None:
    """The sim fills only the other blocks, and checks what the step reads."""
    cache = sim(*MIXES[name])
    cache.serve(PROMPT)
    lease = cache.cache.begin(SIBLING)
    assert (lease.computed, lease.matched_tokens) == (0, 80)
    before = cache.cache.pages_in_use()
    step = cache.extend(lease, at + count, num_loaded=at)
    for group in full_groups(cache):
        assert copied(step).get(group, []) == blocks
    cache.cache.check_integrity()
    assert cache.cache.commit(lease) == at + count
    cache.cache.check_integrity()
    after = cache.cache.pages_in_use()
    for group in full_groups(cache):  # whole blocks that both have are shared: the copies are free
        assert after[group] - before[group] == -(-(at + count) // 16) - min((at + count) // 16, 5)
    assert cache.compute(lease)
    cache.cache.release(lease)
    check_empty(cache)


@pytest.mark.parametrize("name", WITH_STATES)
@pytest.mark.parametrize(("at", "blocks"), [(80, [3, 4]), (75, [3]), (84, [3, 4]), (60, [])])
def test_a_load_from_a_tail_copies_the_whole_block_over_it(name: str, at: int, blocks: list[int]) -> None:
    cache = sim(*MIXES[name])
    cache.serve(PROMPT[:40], PROMPT[40:52])
    cache.serve(PROMPT)
    lease = cache.cache.begin(SIBLING)
    assert (lease.computed, lease.matched_tokens) == (51, 80)
    step = cache.extend(lease, 90 - 51, num_loaded=at - 51)
    for group in full_groups(cache):
        assert copied(step).get(group, []) == blocks
    assert cache.cache.commit(lease) == 90
    assert cache.compute(lease)
    cache.cache.release(lease)
    check_empty(cache)


def test_the_lease_s_own_partial_block_is_copied_over_too() -> None:
    """Two requests compute the same prompt. One stops inside a block and loads the rest."""
    cache = sim(FULL, STATE, window(24))
    lease = cache.cache.begin(SIBLING)
    assert cache.compute(lease, 51)
    cache.serve(PROMPT)
    step = cache.extend(lease, 90 - 51, num_loaded=80 - 51)
    assert copied(step) == {"full": [3, 4], "window24": [4]}
    assert cache.cache.commit(lease) == 90
    assert cache.compute(lease)
    cache.cache.release(lease)
    check_empty(cache)


def test_windows_are_copied_where_a_page_is_left_and_seen() -> None:
    """The prompt's checkpoint at 96 keeps blocks 4 and 5 of the window. From 80 on, blocks 3 and 4 are seen."""
    cache = sim(FULL, STATE, window(24))
    cache.serve(PROMPT)
    lease = cache.cache.begin(SIBLING)
    step = cache.extend(lease, 80, num_loaded=80)
    assert copied(step) == {"full": [0, 1, 2, 3, 4], "window24": [4]}
    assert cache.cache.commit(lease) == 80
    assert cache.compute(lease)
    cache.cache.release(lease)
    check_empty(cache)


def test_windows_are_not_copied_where_they_are_not_seen() -> None:
    """Another request keeps blocks 0 and 1 of the window for a checkpoint. From 80 on they are not seen."""
    cache = sim(FULL, STATE, window(24))
    lease = cache.cache.begin(SIBLING)
    cache.serve(PROMPT[:60], breakpoints=[32])
    step = cache.extend(lease, 80, num_loaded=80)
    assert copied(step) == {"full": [0, 1, 2]}
    assert cache.cache.commit(lease) == 80
    cache.cache.release(lease)
    check_empty(cache)


@pytest.mark.parametrize("num_good", [None, 0, 40, 70])
def test_taps_are_copied_as_far_as_the_request_uses_them(num_good: int | None) -> None:
    cache = sim(FULL, *TAPS)
    cache.serve(PROMPT[:50], key=lookup_key(taps=["tap0"]))
    cache.serve(PROMPT)
    lease = cache.cache.begin(PROMPT, lookup_key(taps=["tap0", "tap1"]))
    assert (lease.computed, lease.matched_tokens) == (0, 96)
    step = cache.extend(lease, 75, num_loaded=75, num_good=num_good)
    assert copied(step) == {"full": [0, 1, 2, 3], "tap0": [0, 1, 2]}
    expected = 75 if num_good is None else num_good // 16 * 16
    assert cache.cache.commit(lease, num_good) == expected
    cache.cache.check_integrity()
    cache.acknowledge_all()
    assert not tainted_tokens(cache)
    assert cache.cache.match(PROMPT, lookup_key(taps=["tap0", "tap1"])).num_tokens == expected // 16 * 16
    assert cache.compute(lease)
    cache.cache.release(lease)
    check_empty(cache)


# --- sources that go away ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", WITH_STATES)
@pytest.mark.parametrize("ends", ["committed", "aborted"])
def test_a_copy_of_a_page_that_proves_bad_is_dropped(name: str, ends: str) -> None:
    cache = sim(*MIXES[name])
    cache.serve(PROMPT)
    lease = cache.cache.begin(SIBLING)
    assert cache.extend(lease, 84, num_loaded=80) is not None
    (root,) = cache.cache._prefixes.index.roots.values()
    (node,) = root.children.values()
    group, pages = full_groups(cache)[0], node.pages[0]
    assert pages is not None
    cache.cache.invalidate({group: [pages[2]]})
    assert lease.poisoned is not None
    if ends == "aborted":
        cache.cache.abort(lease)
    assert cache.cache.commit(lease) == 0
    cache.cache.check_integrity()
    if ends == "committed":
        assert cache.compute(lease)
        cache.cache.release(lease)
    check_empty(cache)


def test_a_page_that_was_copied_does_not_move_before_the_commit() -> None:
    """Else the lease would not know the page any more when it proves bad."""
    cache = sim(CacheGroup("full", Role.FULL, 4))
    owner = cache.prompt(PROMPT[:16])
    filler = cache.prompt(tokens(48, 1))  # the other pages of the owner's slab
    lease = cache.cache.begin(SIBLING)
    cache.cache.rollback(lease, 0)
    assert copied(cache.extend(lease, 32, num_loaded=32)) == {"full": [0]}
    other = cache.prompt([*tokens(48, 2), 1])
    cache.cache.release(filler, keep=False)
    assert cache.cache._reclaimer.evict_least({})
    other.append([1])
    assert cache.extend(other, 1) is not None
    page = owner.named_tables["full"][0]
    cache.cache._reclaimer.compactor.compact({}, Pinned(cache.cache._running))
    assert owner.named_tables["full"][0] == page, "a slab with one page, and holes elsewhere"
    cache.cache.invalidate({"full": [page]})
    assert lease.poisoned == 0
    cache.cache.commit(lease)
    cache.cache.commit(other)
    assert lease.computed == 0
    for one in (owner, lease, other):
        cache.cache.release(one)
    check_empty(cache)


def test_blocks_that_were_evicted_for_the_load_itself_are_not_copied() -> None:
    """Only the load's own pages fit: the index loses blocks, and the step names those that are left."""
    cache = sim(CacheGroup("full", Role.FULL, 1), STATE, num_slabs=12)
    cache.serve(PROMPT)
    lease = cache.cache.begin(SIBLING)
    assert lease.matched_tokens == 80
    step = cache.extend(lease, 80, num_loaded=80)
    assert len(copied(step).get("full", [])) < 5
    cache.cache.check_integrity()
    assert cache.cache.commit(lease) == 80
    cache.cache.release(lease)
    check_empty(cache)


def test_a_request_of_an_earlier_epoch_copies_nothing_of_this_one() -> None:
    cache = sim(FULL, STATE)
    cache.serve(PROMPT)
    lease = cache.cache.begin(SIBLING)
    cache.cache.reset()
    cache.serve(PROMPT)
    step = cache.extend(lease, 80, num_loaded=80)
    assert copied(step) == {}
    assert cache.cache.commit(lease) == 80
    cache.cache.release(lease)
    check_empty(cache)


def test_other_salts_and_other_tokens_are_not_copied() -> None:
    cache = sim(FULL, STATE)
    cache.serve(PROMPT, key=lookup_key("other"))
    cache.serve([*PROMPT[:16], 5, *PROMPT[17:]])
    lease = cache.cache.begin(PROMPT)
    assert copied(cache.extend(lease, 80, num_loaded=80)) == {"full": [0]}
    cache.cache.commit(lease)
    cache.cache.release(lease)
    check_empty(cache)
