"""Lattices: every array of places that has the form is described by it, every other one is refused."""

from __future__ import annotations

from itertools import pairwise, product
from math import prod

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from hybridkv.stream.boxes import Axis
from hybridkv.stream.lattice import Lattice, lattice

AXES = st.lists(st.builds(Axis, st.integers(2, 5), st.integers(-40, 600)), max_size=3).map(tuple)
LATTICES = st.builds(Lattice, st.integers(0, 10_000), st.lists(AXES, max_size=4).map(tuple))
SHAPES = st.lists(st.integers(1, 4), min_size=1, max_size=2)


def naive_place(one: Lattice, index: tuple[int, ...]) -> int:
    """Digit by digit, from the innermost."""
    place = one.offset
    for number, digits in zip(index, one.axes, strict=True):
        for digit in reversed(digits):
            number, value = divmod(number, digit.size)
            place += value * digit.stride
    return place


def radices(size: int) -> list[tuple[int, ...]]:
    """All ways to write an axis with digits, outermost first."""
    if size == 1:
        return [()]
    return [(*outer, inner) for inner in range(2, size + 1) if size % inner == 0 for outer in radices(size // inner)]


def has_a_lattice(places: NDArray[np.int64]) -> bool:
    """By brute force: for some ways to write the axes, the strides that the first elements have explain all others."""
    for ways in product(*(radices(size) for size in places.shape)):
        axes = []
        for number, way in enumerate(ways):
            index, digits = [0] * places.ndim, list[Axis]()
            for position, size in enumerate(way):
                index[number] = prod(way[position + 1 :])
                digits.append(Axis(size, int(places[tuple(index)] - places.flat[0])))
            axes.append(tuple(digits))
        one = Lattice(int(places.flat[0]), tuple(axes))
        if all(naive_place(one, index) == place for index, place in np.ndenumerate(places)):
            return True
    return False


@given(LATTICES)
def test_places_are_the_sum_of_the_digits(one: Lattice) -> None:
    places = one.places()
    assert places.shape == one.shape
    assert all(naive_place(one, index) == place for index, place in np.ndenumerate(places))


@given(LATTICES)
def test_every_lattice_is_found_again(one: Lattice) -> None:
    """The digits may differ: those that continue one another are one digit."""
    found = lattice(one.places())
    assert found is not None
    assert found.shape == one.shape
    assert np.array_equal(found.places(), one.places())
    assert all(outer.stride != inner.size * inner.stride for digits in found.axes for outer, inner in pairwise(digits))


@given(SHAPES.flatmap(lambda shape: st.permutations(range(prod(shape))).map(lambda order: (shape, order))))
def test_a_permutation_has_a_lattice_or_is_refused(drawn: tuple[list[int], list[int]]) -> None:
    shape, order = drawn
    places = np.array(order, np.int64).reshape(shape)
    found = lattice(places)
    assert (found is not None) == has_a_lattice(places)
    assert found is None or np.array_equal(found.places(), places)


@pytest.mark.parametrize("shape", [(64,), (16, 8), (2, 32, 4, 16)])
def test_a_random_permutation_is_refused(shape: tuple[int, ...]) -> None:
    random = np.random.default_rng(5)
    for _ in range(20):
        assert lattice(random.permutation(prod(shape)).astype(np.int64).reshape(shape)) is None


@pytest.mark.parametrize("place", [(0, 0, 0), (1, 0, 0), (0, 5, 0), (0, 0, 63), (1, 2, 3), (1, 31, 63)])
def test_one_wrong_element_is_seen(place: tuple[int, int, int]) -> None:
    places = Lattice(64, ((Axis(2, 8192),), (Axis(2, 4096), Axis(16, 4)), (Axis(32, 64), Axis(2, 2)))).places()
    places[place] += 2
    assert lattice(places) is None


def test_pairs_and_groups() -> None:
    """Tokens in groups of 16, and pairs of dims side by side: keys as kernels for matrix units read them."""
    one = Lattice(0, ((Axis(4, 2048), Axis(16, 4)), (Axis(32, 64), Axis(2, 2))))
    assert lattice(one.places()) == one


def test_digits_that_continue_one_another_are_one() -> None:
    assert lattice(np.arange(24, dtype=np.int64).reshape(4, 6) * 2) == Lattice(0, ((Axis(4, 12),), (Axis(6, 2),)))
    assert lattice(Lattice(6, ((Axis(4, 6), Axis(3, 2)),)).places()) == Lattice(6, ((Axis(12, 2),),))


def test_axes_of_size_one_have_no_digits() -> None:
    assert lattice(np.array([[[7]]])) == Lattice(7, ((), (), ()))
    assert lattice(np.array([[7], [9]])) == Lattice(7, ((Axis(2, 2),), ()))
    assert lattice(np.array(7)) == Lattice(7, ())


def test_nothing_has_no_lattice() -> None:
    assert lattice(np.empty((2, 0), np.int64)) is None
