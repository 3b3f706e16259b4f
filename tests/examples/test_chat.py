"""Conversations of the demo model's training: deterministic, well formed, and apart from the held-out wordings."""

from __future__ import annotations

import random
import re
from collections.abc import Callable
from pathlib import Path

import chat
import pytest
import wordings

FOLDER = Path(chat.__file__).parent
CASES = list(chat.held_out_cases())
ONE_MESSAGE = [case for case in CASES if not case[0].startswith("memory.")]


def drawn(count: int, held_out: bool = False, seed: int = 0) -> list[list[chat.Message]]:
    rng = random.Random(seed)
    return [chat.conversation(rng, held_out) for _ in range(count)]


def asked(conversations: list[list[chat.Message]]) -> set[str]:
    return {
        wordings.key_of(message["content"]) for talk in conversations for message in talk if message["role"] == "user"
    }


@pytest.mark.parametrize("held_out", [False, True])
def test_the_same_seed_gives_the_same_conversations(held_out: bool) -> None:
    assert drawn(200, held_out) == drawn(200, held_out)
    assert drawn(200, held_out) != drawn(200, held_out, seed=1)


@pytest.mark.parametrize("held_out", [False, True])
def test_roles_alternate_and_contents_are_plain(held_out: bool) -> None:
    for talk in drawn(2000, held_out):
        turns = talk[1:] if talk[0]["role"] == "system" else talk
        assert 2 <= len(turns) <= 12
        assert [message["role"] for message in turns] == ["user", "assistant"] * (len(turns) // 2)
        for message in talk:
            text = message["content"]
            assert text.isascii()
            assert text == text.strip() != ""
            assert not set("{}[|]") & set(text.replace("hybridkv[", "").replace("]", "")), text


def test_training_never_asks_in_held_out_wordings() -> None:
    trained = asked(drawn(10_000))
    questions = {wordings.key_of(question) for _, question, _, _ in ONE_MESSAGE}
    assert not questions & trained
    assert questions & asked(drawn(10_000, held_out=True))


def test_no_wording_is_both_held_out_and_trained_on() -> None:
    """Also between intents: one may ask what another one holds out."""
    plain = [intent.ask for intent in chat._BY_NAME.values()]
    sets = [*plain, chat._UNKNOWN, *chat._META.values(), *(fact.ask for fact in chat._FACTS)]
    sets += [fact.tell for fact in chat._FACTS]
    held_out = {wordings.key_of(text) for each in plain for text in each.held_out if "{" not in text}
    assert not held_out & {wordings.key_of(text) for each in sets for text in each.train}
    for each in sets:
        share = len(each.held_out) / (len(each.held_out) + len(each.train))
        assert 0.04 < share < 0.16


@pytest.mark.parametrize("seed", range(50))
def test_a_disguise_keeps_the_key(seed: int) -> None:
    rng = random.Random(seed)
    for text in (
        "what is the KV cache?",
        "I am not sure what it is.",
        "do you know what I am?",
        "tell me who you are.",
    ):
        disguise = wordings.disguised(rng, text)
        if sorted(wordings.key_of(disguise)) == sorted(wordings.key_of(text)):  # a typo keeps the letters
            assert len(wordings.key_of(disguise)) == len(wordings.key_of(text))
        else:
            pytest.fail(f"{text!r} became {disguise!r}")


def test_every_pattern_matches_the_answers_of_its_intent_and_of_no_other() -> None:
    unknown = chat._UNKNOWN_SAY
    for name, question, pattern, answers in CASES:
        for answer in answers:
            assert pattern.search(answer), (name, question, answer)
        if name != "unknown":
            assert not any(pattern.search(answer) for answer in unknown), (name, question)


def test_there_is_enough_to_talk_about() -> None:
    assert len(chat._BY_NAME) >= 150
    assert {len(each.ask.train) + len(each.ask.held_out) >= 10 for each in chat._BY_NAME.values()} == {True}
    assert len(chat._LISTS["name"]) >= 200
    assert len(chat._LISTS["noun"]) >= 300


def test_what_was_said_is_repeated_word_for_word() -> None:
    again = {wordings.key_of(text) for text in chat._META["again"].train}
    found = 0
    for talk in drawn(3000):
        for before, question, answer in zip(talk, talk[1:], talk[2:], strict=False):
            if question["role"] == "user" and wordings.key_of(question["content"]) in again:
                assert before["role"] == "system" or answer["content"] == before["content"]
                found += 1
    assert found > 30


def test_what_users_told_is_answered_from_their_messages() -> None:
    found = 0
    for talk in drawn(3000):
        for place, message in enumerate(talk):
            told = re.fullmatch(r"Your name is (\w+)\.|The (?:word|number) is (\w+)\.", message["content"])
            if told and message["role"] == "assistant":
                value = told[1] or told[2]
                assert any(value in before["content"] for before in talk[:place] if before["role"] == "user")
                found += 1
    assert found > 100


@pytest.mark.parametrize(
    ("table", "operation"), [("sum", int.__add__), ("difference", int.__sub__), ("product", int.__mul__)]
)
def test_sums_are_right(table: str, operation: Callable[[int, int], int]) -> None:
    rows = chat._BY_NAME[table].rows
    assert len(rows) >= 66
    for row in rows:
        assert operation(int(row["x"]), int(row["z"])) == int(row["y"])


def test_commands_and_paths_in_answers_exist() -> None:
    root = FOLDER.parents[1]
    makefile = (root / "Makefile").read_text()
    for intent in chat._INTENTS["hybridkv"]:
        for answer in intent.say:
            for word in answer.replace("`", " ").split():
                if word.startswith("docs/"):
                    assert (root / word.rstrip(".,;")).is_file(), answer
            for target in ("serve", "test", "test-all"):
                assert f"make {target}" not in answer or f"\n{target}:" in makefile


def test_data_is_ascii() -> None:
    for path in sorted(FOLDER.glob("*.toml")):
        assert path.read_text(encoding="utf-8").isascii(), path
