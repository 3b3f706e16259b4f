"""A match serves `begin` as long as nothing in the index has changed, and not a moment longer."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from hybridkv.cache import CacheError, CacheGroup, Match, Role, lookup_key
from hybridkv.errors import RequestError
from tests.cache.sim import Sim
from tests.cache.test_named import FULL, STATE, sim, tokens, window

PROMPT = tokens(200)
TAP = CacheGroup("tap", Role.TAP, 8)


def full_and_more() -> Sim:
    """A cache that has the first 160 tokens of the prompt, and something else."""
    cache = sim(FULL, STATE, window(24), num_slabs=60)
    cache.serve(PROMPT[:160])
    cache.serve(tokens(300, 5))
    return cache


def evict(cache: Sim) -> None:
    for seed in range(20, 40):
        cache.serve(tokens(300, seed))


def spoil(cache: Sim) -> None:
    lease = cache.cache.begin(PROMPT)
    page = lease.named_tables["full"][3]
    cache.cache.abort(lease)
    cache.cache.invalidate({"full": [page]})


CHANGES: dict[str, Callable[[Sim], object]] = {
    "split": lambda cache: cache.serve(PROMPT[:96] + tokens(50, 2)),
    "longer": lambda cache: cache.serve(PROMPT[:190]),
    "other salt": lambda cache: cache.serve(PROMPT, key=lookup_key("other")),
    "evicted": evict,
    "reset": lambda cache: cache.cache.reset(),
    "invalid": spoil,
    "pinned": lambda cache: cache.cache.unpin(cache.cache.pin(PROMPT[:50], 1)),
}


def place(match: Match) -> object:
    return match.found.path, match.found.resume


@pytest.mark.parametrize("name", sorted(CHANGES))
def test_begin_with_an_old_match_is_begin_without_one(name: str) -> None:
    old_cache, new_cache = full_and_more(), full_and_more()
    match = old_cache.cache.match(PROMPT)
    assert match.num_tokens > 0
    for cache in (old_cache, new_cache):
        CHANGES[name](cache)
    assert not match.found.is_current or place(old_cache.cache.match(PROMPT)) == place(match)
    lease, other = old_cache.cache.begin(PROMPT, match=match), new_cache.cache.begin(PROMPT)
    assert (lease.computed, lease.matched_tokens) == (other.computed, other.matched_tokens)
    assert lease.named_tables == other.named_tables
    assert old_cache.cache.stats == new_cache.cache.stats
    for cache, one in ((old_cache, lease), (new_cache, other)):
        assert cache.compute(one)
        cache.cache.release(one)
        cache.cache.check_integrity()


def test_a_match_is_current_until_something_is_published() -> None:
    cache = full_and_more()
    match = cache.cache.match(PROMPT)
    first = cache.cache.begin(PROMPT, match=match)
    second = cache.cache.begin(PROMPT, match=cache.cache.match(PROMPT))
    match = cache.cache.match(PROMPT)
    assert cache.extend(first, 20) is not None
    assert match.found.is_current
    cache.cache.commit(first)
    assert not match.found.is_current
    assert first.computed > second.computed > 0


def test_a_new_root_outdates_matches() -> None:
    """What a short prompt lacks has another name once there is a tree to look at."""
    cache = sim(FULL)
    match = cache.cache.match([1, 2, 3])
    lease = cache.cache.begin([4, 5, 6])
    assert not match.found.is_current
    match = cache.cache.match([1, 2, 3])
    cache.cache.abort(lease)
    assert not match.found.is_current


def test_a_tap_that_was_lent_outdates_matches() -> None:
    cache, tapped = sim(FULL, TAP), lookup_key(taps=["tap"])
    cache.serve(PROMPT)
    match = cache.cache.match(PROMPT, tapped)
    assert match.missing == "tap_missing"
    lease = cache.cache.begin(PROMPT, tapped, match=match)
    match = cache.cache.match(PROMPT, tapped)
    assert cache.compute(lease)
    assert not match.found.is_current
    assert cache.cache.begin(PROMPT, tapped, match=match).computed == 192


def test_a_match_of_something_else_is_refused() -> None:
    cache, other = full_and_more(), full_and_more()
    match = cache.cache.match(PROMPT)
    calls: list[Callable[[], object]] = [
        lambda: cache.cache.begin(PROMPT[:-1], match=match),
        lambda: cache.cache.begin(PROMPT, lookup_key("salt"), match=match),
        lambda: other.cache.begin(PROMPT, match=match),
    ]
    for call in calls:
        with pytest.raises(CacheError, match="the match is not of these tokens and this key"):
            call()
    assert cache.cache.begin(PROMPT, match=match).computed == match.num_tokens


@pytest.mark.parametrize("bad", [None, 7, "\ud800", ["a"]])
def test_a_key_is_made_of_texts(bad: str) -> None:
    with pytest.raises(RequestError, match="a salt or an extra key that is no text"):
        lookup_key(bad)
    with pytest.raises(RequestError, match="a salt or an extra key that is no text"):
        lookup_key(extra_keys=[bad])


def test_keys_differ_in_salt_extra_keys_and_taps() -> None:
    keys = {lookup_key(), lookup_key("a"), lookup_key(extra_keys=["a"]), lookup_key("a", ["a"]), lookup_key(taps=["a"])}
    assert len(keys) == 5
    assert lookup_key("a", ["b"], ["c"]) == lookup_key("a", ("b",), ("c",))


def test_the_end_of_a_run_that_was_evicted_outdates_matches() -> None:
    cache = sim(FULL, num_slabs=6)
    cache.serve(tokens(480))
    lease = cache.cache.begin(tokens(240, 9))
    match = cache.cache.match(tokens(490))
    assert match.num_tokens == 480
    assert cache.extend(lease, 240) is not None
    assert not match.found.is_current
    assert cache.cache.begin(tokens(490), match=match).computed == 240


def test_a_cut_outdates_matches_and_so_does_its_end() -> None:
    cache = sim(FULL)
    cache.serve(PROMPT)
    match = cache.cache.match(PROMPT)
    lease = cache.cache.begin(PROMPT[:96] + tokens(9, 2))
    assert not match.found.is_current
    match = cache.cache.match(PROMPT)
    cache.cache.abort(lease)
    assert not match.found.is_current


@pytest.mark.parametrize("way", ["invalid", "reset"])
def test_what_is_dead_is_not_found_although_a_step_in_flight_keeps_it(way: str) -> None:
    cache = sim(FULL)
    lease = cache.cache.begin(PROMPT)
    assert cache.compute(lease, 160)
    assert cache.extend(lease, 20) is not None
    match = cache.cache.match(PROMPT)
    assert match.num_tokens == 160
    if way == "invalid":
        cache.cache.invalidate({"full": [lease.named_tables["full"][0]]})
    else:
        cache.cache.reset()
    assert not match.found.is_current
    assert cache.cache.begin(PROMPT, match=match).computed == 0
