"""Breakpoints in OpenAI's words: what a prompt gets from them, and what the record tells of them."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import openai
import pytest

from hybridkv import Engine
from tests.serve.serving import MODEL, Served, record, serving

SYSTEM = "The system keeps the pages that the next request will read. " * 3
EXPLICIT = {"mode": "explicit"}


@pytest.fixture
def served(recorded: Served) -> Served:
    return recorded


def ask(served: Served, messages: list[Any], **extra: Any) -> dict[str, Any]:
    """The record of a request."""
    sent: Any = {"model": MODEL, "messages": messages, "max_tokens": 2, "temperature": 0}
    reply = served.client.chat.completions.create(**sent, extra_body=extra)
    [one] = record(served, reply.id)["prompts"]
    return dict(one)


def parts(*texts: str, mark: Any = EXPLICIT) -> list[dict[str, Any]]:
    """A content whose first part ends at a breakpoint."""
    first, *others = ({"type": "text", "text": text} for text in texts)
    return [{**first, "prompt_cache_breakpoint": mark}, *others]


def length(served: Served, text: str) -> int:
    return len(served.engine.prepare(text).token_ids)


def test_a_part_ends_at_a_breakpoint(served: Served) -> None:
    messages = [{"role": "user", "content": parts(SYSTEM, "Who?")}]
    implicit = ask(served, messages)
    assert implicit["breakpoints"] == [length(served, f"<|im_start|>user\n{SYSTEM}")]
    system = {"role": "system", "content": "Be brief."}
    end = length(served, "<|im_start|>system\nBe brief.<|im_end|>\n")
    inner = length(served, f"<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\n{SYSTEM}")
    assert ask(served, [system, *messages])["breakpoints"] == [end, inner]
    assert ask(served, [system, *messages], prompt_cache_options=EXPLICIT)["breakpoints"] == [inner]


def test_what_parts_share_is_read_by_the_next(served: Served) -> None:
    first, second = (ask(served, [{"role": "user", "content": parts(SYSTEM, one)}]) for one in ("Who?", "And why?"))
    [kept] = first["kept"]
    assert (kept["outcome"], kept["kept_at"] % 16) == ("kept", 0)
    assert kept["kept_at"] == first["breakpoints"][0] // 16 * 16
    assert kept["bytes"] == served.engine._core.cache.layout.checkpoint_bytes > 0
    assert second["cached_tokens"] == kept["kept_at"]
    assert [one["outcome"] for one in second["kept"]] == ["cached"]


def test_a_breakpoint_in_the_first_block_keeps_nothing(served: Served) -> None:
    record = ask(served, [{"role": "user", "content": parts("Hi", SYSTEM)}])
    assert [(one["kept_at"], one["outcome"], one["bytes"]) for one in record["kept"]] == [(0, "too_early", 0)]
    assert record["warnings"] == []


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"prompt_cache_retention": "long"}, "prompt_cache_retention is 'long': pass a time such as 30s, 5m, 1h or 1d"),
        ({"prompt_cache_options": {"ttl": "0m"}}, "prompt_cache_options.ttl is '0m': pass a time"),
        ({"prompt_cache_options": {"mode": "never"}}, "prompt_cache_options.mode is 'never'"),
        ({"prompt_cache_key": "k" * 1025}, "at most 1024"),
    ],
)
def test_wrong_fields_are_refused_by_name(served: Served, fields: dict[str, Any], message: str) -> None:
    with pytest.raises(openai.BadRequestError, match=message.replace(".", r"\.")):
        ask(served, [{"role": "user", "content": "Hi"}], **fields)
    with pytest.raises(openai.BadRequestError, match=r"content\.0\.prompt_cache_breakpoint\.ttl is 'x'"):
        ask(served, [{"role": "user", "content": parts("Hi", "x", mark={**EXPLICIT, "ttl": "x"})}])


def test_fields_that_ask_for_nothing_are_fine(served: Served) -> None:
    fields = {"prompt_cache_key": "mine", "prompt_cache_retention": "in_memory", "prompt_cache_options": {"ttl": "30m"}}
    assert ask(served, [{"role": "user", "content": "Hi"}], **fields)["finish_reason"] in ("stop", "length")


def test_more_than_memory_holds_is_a_warning(checkpoint: Path) -> None:
    """The reply is the same, and the record says which breakpoints were kept."""
    texts = [f"{number}: {SYSTEM[:60]}" for number in range(8)]
    content = [{"type": "text", "text": text, "prompt_cache_breakpoint": {**EXPLICIT, "ttl": "12h"}} for text in texts]
    with Engine(checkpoint, memory="240KiB", device="cpu") as small, serving(small) as tight:
        record = ask(tight, [{"role": "user", "content": content}], prompt_cache_options=EXPLICIT)
        metrics = tight.metrics()
        small.check_integrity()
    outcomes = Counter(one["outcome"] for one in record["kept"])
    assert set(outcomes) == {"kept", "no_room"}
    [warning] = record["warnings"]
    assert warning.startswith(f"Memory had no room for {outcomes['no_room']} of 8 breakpoints (at token ")
    assert record["kept"][-1]["outcome"] == "kept"  # the last ones save the most
    assert metrics["hybridkv_breakpoints_total|kept"] == outcomes["kept"]
    assert metrics["hybridkv_breakpoints_total|no_room"] == outcomes["no_room"]
    assert metrics["hybridkv_breakpoint_bytes_total"] == sum(one["bytes"] for one in record["kept"]) > 0
