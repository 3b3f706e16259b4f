"""Text that grows token by token: equal to decoding all at once, never half a character, cut at stop texts."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer
from transformers import PreTrainedTokenizerFast

from hybridkv.engine.text import MAX_CONTEXT_TOKENS, MAX_PENDING_TOKENS, StopTexts, TextStream
from hybridkv.errors import RequestError
from tests.engine.tokenizers_small import KINDS, SPECIAL, TEXT, byte_level, sentencepiece

UNKNOWN = "\N{REPLACEMENT CHARACTER}"
kinds = pytest.mark.parametrize("make", KINDS.values(), ids=KINDS)
# What makes streams difficult: spaces in a row, characters of two to four bytes, joiners, text the training never saw.
texts = st.lists(st.sampled_from([*"ab  \n,é世界🙂👩‍👩‍👧§Ω", " the", "fox "]), max_size=40).map("".join)


def stream(tokens: Sequence[int], text: TextStream) -> list[str]:
    return [*(text.push(token) for token in tokens), text.finish()]


def decode(tokenizer: Tokenizer, tokens: Sequence[int]) -> str:
    whole: str = tokenizer.decode(list(tokens), skip_special_tokens=True)
    return whole


class Counting:
    """A tokenizer that counts what it is asked."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.tokenizer, self.decoded, self.calls = tokenizer, 0, 0

    def decode(self, token_ids: list[int], /, *, skip_special_tokens: bool) -> str:
        self.decoded += len(token_ids)
        self.calls += 1
        assert len(token_ids) <= MAX_CONTEXT_TOKENS + MAX_PENDING_TOKENS + 1
        return str(self.tokenizer.decode(token_ids, skip_special_tokens=skip_special_tokens))


@kinds
@given(text=texts)
def test_pieces_make_the_whole(make: Callable[[], Tokenizer], text: str) -> None:
    tokens = make().encode(text).ids
    pieces = stream(tokens, TextStream(make()))
    assert "".join(pieces) == decode(make(), tokens)
    assert not any(UNKNOWN in piece for piece in pieces)


@given(tokens=st.lists(st.integers(0, 419), max_size=120))
def test_byte_level_pieces_make_the_whole_of_any_tokens(tokens: list[int]) -> None:
    assert "".join(stream(tokens, TextStream(byte_level()))) == decode(byte_level(), tokens)


@given(tokens=st.lists(st.integers(257, sentencepiece().get_vocab_size() - 1), max_size=120))
def test_sentencepiece_pieces_make_the_whole_of_any_tokens_but_bytes(tokens: list[int]) -> None:
    assert "".join(stream(tokens, TextStream(sentencepiece()))) == decode(sentencepiece(), tokens)


def single_bytes(letters: str) -> list[int]:
    """Tokens of the bytes that byte-level vocabularies write as these letters: 0xF0 is "ð"."""
    return [byte_level().get_vocab()[letter] for letter in letters]


@settings(max_examples=50)
@given(pieces=st.lists(st.sampled_from(["ð", "ð¿", "ð¿¿", "ä", "ä¸", "Î"]), min_size=60, max_size=120))
def test_endless_bytes_that_become_nothing_cost_little_and_lose_nothing(pieces: list[str]) -> None:
    tokens = single_bytes("".join(pieces))
    assert "".join(stream(tokens, TextStream(Counting(byte_level())))) == decode(byte_level(), tokens)


@kinds
def test_text_comes_as_soon_as_it_is_certain(make: Callable[[], Tokenizer]) -> None:
    tokens = make().encode(TEXT[0]).ids
    text = TextStream(make())
    for end, token in enumerate(tokens, 1):
        before = decode(make(), tokens[: end - 1])
        assert text.push(token) == decode(make(), tokens[:end])[len(before) :]


def test_a_character_cut_off_shows_at_the_end_only() -> None:
    tokens = sentencepiece().encode("a🙂").ids[:-1]
    assert stream(tokens, TextStream(sentencepiece()))[-4:] == ["", "", "", UNKNOWN * 3]


def test_a_bad_byte_after_whole_characters_spoils_itself_only() -> None:
    bad = sentencepiece().get_vocab()["<0xF0>"]
    tokens = [*sentencepiece().encode("🙂🙃").ids, bad, *sentencepiece().encode("the fox the").ids]
    assert "".join(stream(tokens, TextStream(sentencepiece()))) == f"🙂🙃{UNKNOWN} the fox the"


def test_a_literal_replacement_character_is_text() -> None:
    tokens = byte_level().encode(f"a{UNKNOWN}b{UNKNOWN * 5}").ids
    assert "".join(stream(tokens, TextStream(byte_level()))) == f"a{UNKNOWN}b{UNKNOWN * 5}"


def test_no_more_is_held_than_a_character_can_take() -> None:
    assert stream(single_bytes("¿¿¿¿¿"), TextStream(byte_level())) == ["", "", "", UNKNOWN, UNKNOWN, UNKNOWN * 3]


def test_nothing_follows_a_stop_text() -> None:
    text = TextStream(byte_level(), stop=[UNKNOWN], include_stop=True)
    assert stream(single_bytes("¿¿¿¿¿"), text) == ["", "", "", UNKNOWN, "", ""]


@kinds
def test_special_tokens_are_skipped_or_shown(make: Callable[[], Tokenizer]) -> None:
    end = make().get_vocab()[SPECIAL]
    words = make().encode(" the fox").ids
    tokens = [end, *words, *[end] * 100, *words]
    assert "".join(stream(tokens, TextStream(Counting(make())))) == decode(make(), tokens)
    assert SPECIAL in "".join(stream(tokens, TextStream(make(), skip_special_tokens=False)))


def test_the_prompt_keeps_the_first_space() -> None:
    prompt, reply = sentencepiece().encode("The quick").ids, sentencepiece().encode("brown fox").ids
    assert "".join(stream(reply, TextStream(sentencepiece()))) == "brown fox"
    assert "".join(stream(reply, TextStream(sentencepiece(), context=prompt[-4:]))) == " brown fox"


@kinds
@pytest.mark.parametrize("text", ["fox ", "🙂", UNKNOWN, SPECIAL, "\x80"])
def test_the_cost_is_linear(make: Callable[[], Tokenizer], text: str) -> None:
    counting = Counting(make())
    tokens = make().encode(text).ids[:2] * 1000
    stream(tokens, TextStream(counting))
    assert counting.calls <= 2.2 * len(tokens) + 2
    assert counting.decoded <= 40 * len(tokens)


def test_tokenizers_of_transformers_stream() -> None:
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=byte_level())
    tokens = tokenizer.encode(TEXT[3])
    assert "".join(stream(tokens, TextStream(tokenizer))) == TEXT[3]


def test_without_a_tokenizer_there_is_no_text() -> None:
    assert stream([1, 2, 3], TextStream(None)) == [""] * 4
    with pytest.raises(RequestError, match="stop texts need a tokenizer"):
        TextStream(None, stop=["x"])


def first_stop(text: str, stops: Sequence[str]) -> tuple[int, int, str] | None:
    """Reads letter by letter: the first position where some stop text has just ended; the longest of them."""
    for end in range(len(text) + 1):
        for stop in sorted(stops, key=len, reverse=True):
            if text[:end].endswith(stop):
                return end - len(stop), end, stop
    return None


@settings(max_examples=300)
@given(
    text=st.text("ab.", max_size=20),
    stops=st.lists(st.text("ab.", min_size=1, max_size=5), max_size=3),
    cuts=st.lists(st.integers(0, 20), max_size=6).map(sorted),
    include=st.booleans(),
)
def test_stop_texts_are_found_however_the_text_is_cut(
    text: str, stops: list[str], cuts: list[int], include: bool
) -> None:
    matcher, shown = StopTexts(stops, include), ""
    for start, end in zip([0, *cuts], [*cuts, len(text)], strict=True):
        if matcher.found is None:
            shown += matcher.push(text[start:end])
            held = text[: min(end, len(text))].removeprefix(shown)
            assert matcher.found or not held or any(stop.startswith(held) for stop in stops), "held without need"
    shown += matcher.finish()
    found = first_stop(text, stops)
    assert matcher.found == (found[2] if found else None)
    assert shown == (text if found is None else text[: found[1] if include else found[0]])


@kinds
@pytest.mark.parametrize("include", [False, True])
def test_a_stop_text_cuts_at_every_place(make: Callable[[], Tokenizer], include: bool) -> None:
    tokens = make().encode(TEXT[0]).ids
    whole = decode(make(), tokens)
    for match in re.finditer(r"(?=(....))", whole):
        stop = match[1]
        text = TextStream(make(), stop=[stop, "never there"], include_stop=include)
        start = whole.index(stop)
        assert "".join(stream(tokens, text)) == whole[: start + 4 * include]
        assert text.stopped_by == stop
        assert text.push(tokens[0]) == "" == text.finish()


def test_what_only_looked_like_a_stop_text_is_given_back() -> None:
    text = TextStream(byte_level(), stop=["dogs"])
    tokens = byte_level().encode("a dog").ids
    pieces = stream(tokens, text)
    assert "".join(pieces) == "a dog"
    assert pieces[-1] == "dog"
    assert text.stopped_by is None


def test_stop_texts_count_once_there_are_enough_tokens() -> None:
    tokens = [token for _ in range(4) for token in byte_level().encode("a.").ids]
    assert len(tokens) == 8
    for min_tokens, shown in [(0, "a"), (2, "a"), (3, "a.a"), (4, "a.a"), (5, "a.a.a"), (9, "a.a.a.a.")]:
        assert "".join(stream(tokens, TextStream(byte_level(), stop=["."], min_tokens=min_tokens))) == shown
