"""Replies are found in the turn that contains them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from hybridkv.replay import Conversations, Trace, load_trace
from tests.replay.traces import blocks, mooncake, numbers, write_trace


def tokens(path: Path, lines: list[dict[str, Any]]) -> Trace:
    return load_trace(write_trace(path / "t.jsonl", lines))


def test_the_next_turn_has_the_end_of_the_prompt_and_the_reply(tmp_path: Path) -> None:
    first, second = blocks([1, 2, 3], 40, 20), blocks([1, 2, 4, 5, 6], 75, 9)
    conversations = Conversations(mooncake(tmp_path, [first, second]))
    assert conversations.continued_by == [1, None]
    turn, following = conversations[0], conversations[1]
    assert following.prompt.startswith(turn.prompt + turn.reply)
    assert len(numbers(turn.reply)) == 20
    assert turn.chain_tokens == 60
    assert len(numbers(following.reply)) == 9
    assert all(token < 0 for token in numbers(following.reply))
    assert turn.known_tokens == 32, "what only later requests tell is not known when a prompt arrives"


def test_three_turns_fit_into_each_other(tmp_path: Path) -> None:
    lines = [blocks([1, 2, 3], 40, 3), blocks([1, 2, 4], 45, 40), blocks([1, 2, 5, 6, 7, 8], 90)]
    conversations = Conversations(mooncake(tmp_path, lines))
    assert conversations.continued_by == [1, 2, None]
    one, two, three = (conversations[i] for i in range(3))
    assert two.prompt.startswith(one.prompt + one.reply)
    assert three.prompt.startswith(two.prompt + two.reply)


def test_a_repeated_prompt_is_no_continuation(tmp_path: Path) -> None:
    lines = [blocks([1, 2, 3], 40, 5), blocks([1, 2, 3], 40, 5), blocks([1, 2, 4, 5], 60)]
    conversations = Conversations(mooncake(tmp_path, lines))
    assert conversations.continued_by == [2, 2, None]
    assert conversations[0].reply == conversations[1].reply


def test_a_shared_system_prompt_is_no_conversation(tmp_path: Path) -> None:
    lines = [blocks([1, 2, 10 + i], 40, 5) for i in range(6)]
    lines.append(blocks([1, 2, 30, 31], 60))
    assert Conversations(mooncake(tmp_path, lines)).continued_by == [None] * 7
    lines[0] = blocks([1, 2, 40, 41, 42], 70, 5)
    lines.append(blocks([1, 2, 40, 41, 43, 44], 90))
    assert Conversations(mooncake(tmp_path, lines)).continued_by[0] == 7
    short = [blocks([1, 2], 20, 5), blocks([1, 3, 4], 40)]
    assert Conversations(mooncake(tmp_path, short)).continued_by == [None, None]


def test_what_the_next_turn_does_not_have_is_made_up(tmp_path: Path) -> None:
    lines = [blocks([1, 2, 3], 40, 30), blocks([1, 2, 4], 47)]
    turn = Conversations(mooncake(tmp_path, lines))[0]
    assert [token < 0 for token in numbers(turn.reply)] == [False] * 7 + [True] * 23
    assert turn.chain_tokens == 47


def test_token_traces_compare_the_whole_prompt(tmp_path: Path) -> None:
    prompt = list(range(20))
    lines: list[dict[str, Any]] = [
        {"token_ids": prompt, "output_length": 4},
        {"token_ids": [*prompt[:-1], 99, *range(50)], "output_length": 4},
        {"token_ids": [*prompt, 70, 71, 72, 73, 74, 75], "output_length": 1},
        {"token_ids": [3], "output_length": 2},
        {"token_ids": [3, 4, 5, 6]},
    ]
    conversations = Conversations(tokens(tmp_path, lines))
    assert conversations.continued_by == [2, None, None, 4, None]
    assert numbers(conversations[0].reply) == [70, 71, 72, 73]
    assert numbers(conversations[3].reply) == [4, 5]


def test_replies_that_the_trace_has_are_kept(tmp_path: Path) -> None:
    lines = [{"token_ids": [1, 2, 3], "output_token_ids": [7, 8]}, {"token_ids": [1, 2, 3, 9, 9, 9]}]
    conversations = Conversations(tokens(tmp_path, lines))
    assert numbers(conversations[0].reply) == [7, 8]
    assert conversations.continued_by == [1, None]
