"""Sizes as people write them."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hybridkv.errors import HybridKVError
from hybridkv.units import format_at_least, format_bytes, parse_size


@pytest.mark.parametrize(
    ("text", "nbytes"),
    [
        ("80GiB", 80 * 2**30),
        ("80G", 80 * 2**30),
        ("80g", 80 * 2**30),
        ("80 GB", 80 * 10**9),
        ("512M", 512 * 2**20),
        ("1.5T", 3 * 2**39),
        (".5k", 512),
        ("4096", 4096),
        ("4096B", 4096),
        ("2PiB", 2**51),
    ],
)
def test_sizes_are_read(text: str, nbytes: int) -> None:
    assert parse_size(text) == nbytes


@pytest.mark.parametrize("text", ["80QB", "", "GiB", "-5G", "1e9", "80GiBs", "8 0G", "1.2.3M", "nan", "80iB"])
def test_nonsense_is_refused_with_the_way_out(text: str) -> None:
    with pytest.raises(HybridKVError, match="is not a size: write it as 80GiB"):
        parse_size(text)


@pytest.mark.parametrize("text", ["9" * 5000, "9" * 400 + ".5G", "5000P"])
def test_impossible_sizes_are_refused(text: str) -> None:
    with pytest.raises(HybridKVError, match="more than any machine has"):
        parse_size(text)


@pytest.mark.parametrize(
    ("nbytes", "text"), [(0, "0 B"), (1023, "1,023 B"), (1536, "1.5 KiB"), (2**30, "1 GiB"), (5 * 2**50, "5,120 TiB")]
)
def test_sizes_are_written(nbytes: int, text: str) -> None:
    assert format_bytes(nbytes) == text


@given(st.integers(1, 2**50))
def test_at_least_rounds_up_by_no_more_than_a_percent(nbytes: int) -> None:
    assert nbytes <= parse_size(format_at_least(nbytes)) <= nbytes * 1.011
