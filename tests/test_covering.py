"""The sample that `make test` runs: it covers everything, and what it leaves out is told apart from it."""

from __future__ import annotations

from itertools import combinations, product
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.covering import Share, draw


def cases_of(*sizes: int, seeds: int = 1) -> list[Any]:
    """A file's cases: a test without parameters, and two with every combination of parameters and seeds."""
    names = [f"parameter{index}" for index in range(len(sizes))]
    found = [SimpleNamespace(nodeid="tests/x.py::test_x")]
    for function in ("test_y", "test_z"):
        for values in product(*map(range, sizes), range(seeds)):
            params = dict(zip([*names, "seed"], values, strict=True))
            nodeid, callspec = f"tests/x.py::{function}[...]", SimpleNamespace(params=params)
            found.append(SimpleNamespace(nodeid=nodeid, callspec=callspec))
    return found


SIZES = st.lists(st.integers(1, 6), max_size=3)
SHARES = st.floats(0, 1)


@given(SIZES, st.integers(1, 3), SHARES, st.integers())
def test_every_pair_of_values_is_covered(sizes: list[int], seeds: int, share: float, seed: int) -> None:
    cases = cases_of(*sizes, seeds=seeds)
    chosen = [case for case, runs in zip(cases, draw(cases, Share(0, share, True), seed), strict=True) if runs]
    assert len({case.nodeid for case in chosen}) == 3
    params = [case.callspec.params for case in chosen if hasattr(case, "callspec")]
    for index, size in enumerate(sizes):
        assert {one[f"parameter{index}"] for one in params} == set(range(size))
    for first, second in combinations(range(len(sizes)), 2):
        met = {(one[f"parameter{first}"], one[f"parameter{second}"]) for one in params}
        assert met == set(product(range(sizes[first]), range(sizes[second])))


@given(SIZES, st.integers(1, 3), st.integers())
def test_not_many_more_cases_cover_all_pairs_than_must(sizes: list[int], seeds: int, seed: int) -> None:
    """At least as many as the two largest parameters have pairs; greedily drawn, less than twice as many."""
    most = sorted([1, 1, *sizes])[-2:]
    assert sum(draw(cases_of(*sizes, seeds=seeds), Share(0, 0, True), seed)) <= 2 * most[0] * most[1] + 3


@given(SIZES, st.integers(1, 3), SHARES, SHARES, st.integers())
def test_a_sample_and_what_goes_on_from_it_share_nothing_and_are_all_in_the_end(
    sizes: list[int], seeds: int, first: float, second: float, seed: int
) -> None:
    first, second = sorted((first, second))
    cases = cases_of(*sizes, seeds=seeds)
    parts = [Share(0, first, True), Share(first, second, False), Share(second, 1, False)]
    runs = [draw(cases, part, seed) for part in parts]
    assert [sum(one) for one in zip(*runs, strict=True)] == [1] * len(cases)
    assert draw(cases, parts[0], seed) == runs[0], "the same seed draws the same"


def test_another_seed_draws_other_cases() -> None:
    cases = cases_of(6, 6)
    assert len({tuple(draw(cases, Share(0, 0.1, True), seed)) for seed in range(8)}) > 1


@pytest.mark.parametrize("text", ["", "a", "2", "-1", "0.5:0.2", "0:1:1", ":", "0.1:", "nan"])
def test_shares_that_make_no_sense_are_refused(text: str) -> None:
    with pytest.raises(pytest.UsageError, match=f"--sample {text}: write a share"):
        Share.parse(text)


def test_shares_as_people_write_them() -> None:
    assert Share.parse("0.1") == Share(0.0, 0.1, True)
    assert Share.parse("0.1:0.5") == Share(0.1, 0.5, False)
