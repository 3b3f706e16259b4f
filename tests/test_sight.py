"""What a token sees, counted token by token."""

from __future__ import annotations

from itertools import count

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hybridkv.errors import HybridKVError
from hybridkv.sight import EVERYTHING, NEVER, Sight

MOST = 40
"""No window and no chunk here is longer."""
local = st.one_of(st.integers(1, MOST).map(Sight), st.integers(1, MOST).map(lambda size: Sight(chunk=size)))
sights = st.one_of(st.just(EVERYTHING), local)
blocks = st.integers(1, 20)


def seen(sight: Sight, position: int) -> list[int]:
    """The definition: every position up to this one that neither the window nor the chunk hides."""
    start = max(0, position - MOST) if sight.is_local else 0
    return [
        earlier
        for earlier in range(start, position + 1)
        if (sight.window is None or position - earlier < sight.window)
        and (sight.chunk is None or position // sight.chunk == earlier // sight.chunk)
    ]


def seen_blocks(sight: Sight, position: int, block_tokens: int) -> set[int]:
    return {earlier // block_tokens for earlier in seen(sight, position)}


@given(sights, st.integers(0, 300), blocks)
def test_what_is_seen_begins_at_the_first_visible_token(sight: Sight, position: int, block: int) -> None:
    assert seen(sight, position) == list(range(sight.first_visible(position), position + 1))
    assert sight.first_visible_block(position, block) == min(seen_blocks(sight, position, block))


@given(local, st.integers(0, 300), blocks)
def test_a_slide_is_where_the_first_block_is_seen_no_more(sight: Sight, position: int, block: int) -> None:
    first = min(seen_blocks(sight, position, block))
    lost = next(later for later in count(position) if first not in seen_blocks(sight, later, block))
    assert sight.next_slide(position, block) == lost
    assert EVERYTHING.next_slide(position, block) == NEVER


@given(sights, blocks, st.integers(0, 300))
def test_a_request_holds_what_its_tokens_see(sight: Sight, block: int, num_tokens: int) -> None:
    seen_at_once = max((len(seen_blocks(sight, p, block)) for p in range(num_tokens)), default=0)
    held = sight.held_blocks(num_tokens, block)
    assert seen_at_once <= held <= -(-num_tokens // block)
    if sight.chunk is None:
        assert held == seen_at_once


@given(local, blocks)
def test_a_long_request_holds_no_block_too_many(sight: Sight, block: int) -> None:
    num_tokens = (sight.chunk or sight.window or 1) * block + 1
    assert sight.held_blocks(num_tokens, block) == max(len(seen_blocks(sight, p, block)) for p in range(num_tokens))


@given(local, blocks)
def test_a_checkpoint_keeps_what_a_request_that_resumes_there_sees(sight: Sight, block: int) -> None:
    def needed(n: int) -> int:
        later = range(n, n + MOST)
        return len({b for p in later for b in seen_blocks(sight, p, block) if b < n // block})

    span = sight.chunk or sight.window or 1  # boundaries and chunks repeat after at most span * block tokens
    assert sight.checkpoint_blocks(block) == max(needed(n) for n in range(0, (span + 1) * block + span, block))
    assert EVERYTHING.checkpoint_blocks(block) == 0


@given(sights, st.integers(0, 120))
def test_pairs_are_what_counting_gives(sight: Sight, num_tokens: int) -> None:
    assert sight.num_pairs(num_tokens) == sum(len(seen(sight, p)) for p in range(num_tokens))


@pytest.mark.parametrize("size", [0, -1])
def test_a_token_sees_itself(size: int) -> None:
    for window, chunk in ((size, None), (None, size)):
        with pytest.raises(HybridKVError, match=f"={size}.*at least 1 token"):
            Sight(window, chunk)


def test_a_window_and_a_chunk_at_once_are_refused() -> None:
    with pytest.raises(HybridKVError, match="window of 8 and a chunk of 16 tokens: pass one of them"):
        Sight(8, 16)
