"""Block names: what they cover, and that they are the same wherever their computation begins."""

from __future__ import annotations

from hashlib import sha256

from hypothesis import given
from hypothesis import strategies as st

from hybridkv.cache import Cache, CacheGroup, CacheLayout, Role
from hybridkv.cache.tokens import ANCHOR_BLOCKS, anchor_block, block_keys, lookup_key, pack_tokens

BLOCK = 4 * 16
ROOT = lookup_key("tenant").root
PROMPT = bytearray(pack_tokens(list(range(16 * 70))))


def names(last: int, prompt: bytearray = PROMPT, root: bytes = ROOT) -> list[bytes]:
    return block_keys(root, prompt, 0, last, BLOCK)


def test_a_name_is_a_digest_of_the_anchor_before_it_and_all_tokens_since() -> None:
    found = names(40)
    assert found[0] == sha256(ROOT + PROMPT[:BLOCK]).digest()
    assert found[ANCHOR_BLOCKS - 1] == sha256(ROOT + PROMPT[: ANCHOR_BLOCKS * BLOCK]).digest()
    since = PROMPT[ANCHOR_BLOCKS * BLOCK : (ANCHOR_BLOCKS + 3) * BLOCK]
    assert found[ANCHOR_BLOCKS + 2] == sha256(found[ANCHOR_BLOCKS - 1] + since).digest()


@given(st.lists(st.integers(0, 70), max_size=6))
def test_names_are_the_same_in_pieces(cuts: list[int]) -> None:
    found: list[bytes] = []
    for last in sorted({*cuts, 70}):
        first = len(found)
        anchor = found[start - 1] if (start := anchor_block(first)) else ROOT
        found += block_keys(anchor, PROMPT, first, last, BLOCK)
    assert found == names(70)


@given(st.integers(0, len(PROMPT) - 1))
def test_a_changed_byte_changes_all_names_from_its_block_on(position: int) -> None:
    changed = bytearray(PROMPT)
    changed[position] ^= 1
    block, before, after = position // BLOCK, names(70), names(70, changed)
    assert before[:block] == after[:block]
    assert set(before[block:]).isdisjoint(after[block:])


def test_roots_share_no_names() -> None:
    assert set(names(40)).isdisjoint(names(40, root=lookup_key("other").root))
    assert len(set(names(70))) == 70


def test_what_is_published_in_pieces_has_the_names_of_the_whole_prompt() -> None:
    layout = CacheLayout.of([CacheGroup("full", Role.FULL, 8)], block_tokens=16, num_slabs=40)
    cache = Cache(layout, run_operations=lambda operations: None, event_limit=100)
    lease = cache.begin(bytes(PROMPT), lookup_key("tenant"))
    for num_tokens in (16 * 5, 16 * 20, 16, 16 * 30, 16 * 14):
        assert cache.extend(lease, num_tokens)
        cache.commit(lease)
    stored = [key for event in cache.take_events() if event.kind == "stored" for key in event.keys]
    assert stored == names(70)
