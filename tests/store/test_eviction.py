"""What goes first when a store is full."""

from __future__ import annotations

from hybridkv.store.eviction import Evictable, chosen, ranked, with_slack
from tests.store.samples import name_of

NOW = 1_000_000.0


def candidate(
    number: int, age: float = 100, value: float | None = 1, position: int = 0, group: str = "full"
) -> Evictable:
    return Evictable(name_of(number, group), 10, NOW - age, value, position)


def order(*candidates: Evictable) -> list[int]:
    found = ranked(candidates, NOW)
    return [candidates.index(one) for one in found]


def test_the_longest_unused_goes_first() -> None:
    assert order(candidate(0, age=10), candidate(1, age=1000), candidate(2, age=100)) == [1, 2, 0]


def test_of_the_same_age_the_least_valuable_group_goes_first() -> None:
    states = [candidate(number, value=50, group="state") for number in (0, 1)]
    assert order(states[0], candidate(2), states[1], candidate(3))[:2] == [1, 3]


def test_value_makes_up_for_age_and_no_more() -> None:
    state = candidate(0, age=1000, value=50, group="state")
    assert order(state, candidate(1, age=100)) == [1, 0]
    assert order(state, candidate(1, age=5)) == [0, 1]


def test_a_chain_goes_from_its_end_even_where_deeper_is_worth_more() -> None:
    chain = [candidate(number, value=1 + number, position=256 * (number + 1), age=100 - number) for number in range(8)]
    assert order(*chain) == [7, 6, 5, 4, 3, 2, 1, 0]


def test_of_the_same_age_and_depth_the_least_valuable_goes_first() -> None:
    assert order(candidate(0, value=3), candidate(1, value=2), candidate(2, value=4)) == [1, 0, 2]


def test_worthless_and_future_objects_have_a_place_too() -> None:
    assert order(candidate(0, age=-50), candidate(1, value=0, group="state"))[0] == 1


def test_unknown_values_count_as_the_mean_of_their_group() -> None:
    states = [candidate(number, value=50, group="state") for number in (0, 1)]
    assert order(candidate(2, value=None), candidate(3, value=None, group="state"), *states, candidate(4)) == [
        0,
        4,
        1,
        2,
        3,
    ]


def test_unknown_objects_go_by_age_where_all_of_their_group_are_unknown() -> None:
    known = [candidate(number, age=100, value=8) for number in (0, 1)]
    for age, first in ((1000, True), (10, False)):
        found = order(*known, candidate(2, age=age, value=None, group="later"))
        assert found == ([2, 0, 1] if first else [0, 1, 2])


def test_unknown_objects_alone_go_by_age() -> None:
    assert order(*(candidate(number, age=age, value=None) for number, age in enumerate((10, 1000, 1010)))) == [2, 1, 0]


def test_as_many_go_as_are_needed() -> None:
    ten = [candidate(number) for number in range(10)]
    assert len(chosen(ten, 25)) == 3
    assert len(chosen(ten, 1000)) == 10
    assert chosen(ten, 0) == []
    assert with_slack(0, 6400, is_told=False) == with_slack(-5, 6400, is_told=True) == 0
    assert with_slack(5, 6400, is_told=False) == 105
    for spare_bytes, freed in ((4, 105), (5, 5), (60, 60), (500, 105)):
        assert with_slack(5, 6400, is_told=False, spare_bytes=spare_bytes) == freed


def test_values_that_overflow_together_are_ranked() -> None:
    """Whoever wrote an object says what it is worth."""
    found = [candidate(number, value=1.7e308) for number in range(3)]
    assert len(ranked(found, 1000.0)) == 3
