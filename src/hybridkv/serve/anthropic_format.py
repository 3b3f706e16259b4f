"""Anthropic's format of messages: replies and the events of streams."""

from __future__ import annotations

from collections.abc import Container, Sequence
from pathlib import Path

from pydantic import BaseModel

from hybridkv.cache import Outcome
from hybridkv.engine import Completion, Result, Update
from hybridkv.errors import HybridKVError
from hybridkv.serve.anthropic_replies import (
    AnthropicReply,
    AnthropicText,
    AnthropicUsage,
    BlockDelta,
    BlockStart,
    BlockStop,
    CacheCreation,
    MessageDelta,
    MessageStart,
    MessageStop,
    StopDelta,
    StreamEvent,
    TextDelta,
)
from hybridkv.serve.failures import anthropic_error_body, code_of, status_of
from hybridkv.serve.reply_format import ReplyFormat
from hybridkv.serve.streams import data_event

_LONG_S = 3600.0
"""Breakpoints with at least this lifetime count as those of one hour."""


class MessagesDialect(ReplyFormat):
    """`/v1/messages`. There is one prompt, with one reply."""

    prefix = "msg"
    last_event = b""

    def whole(self, results: Sequence[Result], hidden_states: Path | None = None) -> AnthropicReply:
        [(_, one)] = self.choices(results)
        text = [AnthropicText(text=one.text)] if one.text else []
        return self._reply(text, _stop(one), self._final_usage(results[0], one))

    def pieces(self, prompt: int, update: Update) -> list[BaseModel]:
        pieces: list[BaseModel] = []
        if not self._begun:
            self._begun.add(prompt)
            usage = self._usage(update.cached_tokens, len(update.token_ids))
            pieces += [
                MessageStart(message=self._reply([], None, usage)),
                BlockStart(content_block=AnthropicText(text="")),
            ]
        if update.text:
            pieces.append(BlockDelta(delta=TextDelta(text=update.text)))
        return pieces

    def last_pieces(self, results: Sequence[Result], *, wants_usage: bool) -> list[BaseModel]:
        [(_, one)] = self.choices(results)
        return [BlockStop(), MessageDelta(delta=_stop(one), usage=self._final_usage(results[0], one)), MessageStop()]

    def event(self, piece: BaseModel) -> bytes:
        assert isinstance(piece, StreamEvent)
        return data_event(piece.model_dump_json(), piece.type)

    def failure(self, error: HybridKVError) -> bytes:
        return data_event(anthropic_error_body(status_of(error), str(error), code_of(error)), "error")

    def _reply(self, content: list[AnthropicText], stop: StopDelta | None, usage: AnthropicUsage) -> AnthropicReply:
        return AnthropicReply(
            id=self.id,
            model=self.model,
            content=content,
            stop_reason=None if stop is None else stop.stop_reason,
            stop_sequence=None if stop is None else stop.stop_sequence,
            usage=usage,
        )

    def _final_usage(self, result: Result, one: Completion) -> AnthropicUsage:
        """Usage with what is kept in fact, as the record of the request has it."""
        assert result.record is not None
        kept = {account.kept_at for account in result.record.kept if account.outcome is Outcome.KEPT}
        return self._usage(result.cached_tokens, len(one.token_ids), kept)

    def _usage(self, cached: int, output: int, kept: Container[int] | None = None) -> AnthropicUsage:
        """`kept`: positions at which something was kept; None: it is not known yet, and is assumed of all."""
        created, done = CacheCreation(), cached
        for position, lifetime_s in self.prompts[0].lifetimes:
            place = position // self.block_tokens * self.block_tokens
            if place <= done or (kept is not None and place not in kept):
                continue
            if lifetime_s >= _LONG_S:
                created.ephemeral_1h_input_tokens += place - done
            else:
                created.ephemeral_5m_input_tokens += place - done
            done = place
        return AnthropicUsage(
            input_tokens=self.prompts[0].num_tokens - done,
            cache_creation_input_tokens=done - cached,
            cache_read_input_tokens=cached,
            cache_creation=created,
            output_tokens=output,
        )


def _stop(one: Completion) -> StopDelta:
    if one.finish_reason == "length":
        return StopDelta(stop_reason="max_tokens", stop_sequence=None)
    if isinstance(one.stop, str):
        return StopDelta(stop_reason="stop_sequence", stop_sequence=one.stop)
    return StopDelta(stop_reason="end_turn", stop_sequence=None)
