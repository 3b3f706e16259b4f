"""Chats as prompts of an engine."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from hybridkv.chats import Mark, Message, rendering
from hybridkv.engine.prompts import Prompt


def render_chat(
    tokenizer: Any,
    messages: Sequence[Message],
    *,
    add_generation_prompt: bool = True,
    continue_final_message: bool = False,
    add_special_tokens: bool = False,
    options: Mapping[str, Any] | None = None,
    marks: Sequence[Mark] = (),
    has_ends: bool = True,
) -> Prompt:
    """Render messages with the tokenizer's chat template: that of `chats` as a prompt, with its breakpoints."""
    rendered, lifetimes = rendering.render_marked(
        tokenizer,
        messages,
        marks,
        has_ends=has_ends,
        add_generation_prompt=add_generation_prompt,
        continue_final_message=continue_final_message,
        add_special_tokens=add_special_tokens,
        options=options,
    )
    return Prompt(rendered.token_ids, sorted(set(rendered.breakpoints)), lifetimes)
