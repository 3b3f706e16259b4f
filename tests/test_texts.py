"""Values of callers in messages: any value can be shown, in few characters."""

from __future__ import annotations

from typing import Any

import pytest

from hybridkv.texts import has_bytes, shown


def deep() -> list[Any]:
    value: list[Any] = []
    for _ in range(100_000):
        value = [value]
    return value


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        ("text", "'text'"),
        (5, "5"),
        (10**5000, "a number of 16610 bits"),
        ([10**5000], "a list that Python does not write"),
        (deep(), "a list that Python does not write"),
        ("x" * 100, "'" + 79 * "x" + "..."),
    ],
    ids=["text", "number", "long-number", "long-number-in-a-list", "deep", "long-text"],
)
def test_any_value_can_be_shown(value: object, expected: str) -> None:
    assert shown(value) == expected


def test_half_of_a_pair_has_no_bytes() -> None:
    assert has_bytes("\U0001f600")
    assert not has_bytes("\ud83d")
