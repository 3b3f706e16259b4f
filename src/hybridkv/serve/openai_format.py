"""OpenAI's formats of completions and chats: replies and stream chunks."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from pydantic import BaseModel

from hybridkv.engine import Result, TokenLogprobs, Update
from hybridkv.serve.replies import (
    AssistantMessage,
    ChatChoice,
    ChatChunk,
    ChatChunkChoice,
    ChatDelta,
    ChatLogprobs,
    ChatReply,
    CompletionChoice,
    CompletionLogprobs,
    CompletionReply,
    PromptTokensDetails,
    TokenLogprob,
    TopLogprob,
    Usage,
)
from hybridkv.serve.reply_format import ReplyFormat
from hybridkv.serve.token_texts import TokenTexts

_LEAST_LOGPROB = -9999.0
"""Replaces minus infinity, which JSON does not have."""
_NO_TEXT = "\N{REPLACEMENT CHARACTER}"
"""Decoders write this for bytes that are only a part of a character."""


class CompletionDialect(ReplyFormat):
    """`/v1/completions`."""

    prefix = "cmpl"

    def __init__(self, model: str, texts: TokenTexts, **named: Any) -> None:
        super().__init__(model, texts, **named)
        self._token_chars: Counter[int] = Counter()
        """By choice: characters of its tokens so far, each decoded on its own."""

    def whole(self, results: Sequence[Result], hidden_states: Path | None = None) -> CompletionReply:
        choices = []
        for index, one in self.choices(results):
            text = self._echo(index) + one.text
            logprobs = self._logprobs(index, one.token_ids, one.logprobs)
            choices.append(
                CompletionChoice(
                    index=index,
                    text=text,
                    logprobs=logprobs,
                    finish_reason=one.finish_reason,
                    token_ids=self.ids(one.token_ids),
                    prompt_token_ids=self.prompt_ids(index),
                )
            )
        kept = _kept(results, hidden_states)
        return CompletionReply(**self.names, choices=choices, usage=usage(results), kv_transfer_params=kept)

    def pieces(self, prompt: int, update: Update) -> list[BaseModel]:
        index = prompt * self.n + update.index
        is_first = index not in self._begun
        text = self._echo(index) + update.text if is_first else update.text
        if not (text or update.finish_reason or update.logprobs or self.with_ids):
            return []
        self._begun.add(index)
        logprobs = self._logprobs(index, update.token_ids, update.logprobs)
        choice = CompletionChoice(
            index=index,
            text=text,
            logprobs=logprobs,
            finish_reason=update.finish_reason,
            token_ids=self.ids(update.token_ids),
            prompt_token_ids=self.prompt_ids(index) if is_first else None,
        )
        return [CompletionReply(**self.names, choices=[choice])]

    def last_pieces(self, results: Sequence[Result], *, wants_usage: bool) -> list[BaseModel]:
        return [CompletionReply(**self.names, choices=[], usage=usage(results))] if wants_usage else []

    def _echo(self, index: int) -> str:
        return self._echoes[index // self.n] if self._echoes else ""

    def _logprobs(
        self, index: int, token_ids: Sequence[int], logprobs: Sequence[TokenLogprobs] | None
    ) -> CompletionLogprobs | None:
        if logprobs is None:
            return None
        tokens = [self.texts.text(token) for token in token_ids]
        offsets = []
        for token in tokens:
            offsets.append(self._token_chars[index])
            self._token_chars[index] += len(token)
        return CompletionLogprobs(
            tokens=tokens,
            token_logprobs=[_finite(one.chosen) for one in logprobs],
            top_logprobs=[{self.texts.text(t): _finite(p) for t, p in one.top.items()} for one in logprobs],
            text_offset=offsets,
        )


class ChatDialect(ReplyFormat):
    """`/v1/chat/completions`."""

    prefix = "chatcmpl"

    def whole(self, results: Sequence[Result], hidden_states: Path | None = None) -> ChatReply:
        choices = [
            ChatChoice(
                index=index,
                message=AssistantMessage(content=one.text),
                logprobs=self._logprobs(one.token_ids, one.logprobs),
                finish_reason=one.finish_reason,
                token_ids=self.ids(one.token_ids),
            )
            for index, one in self.choices(results)
        ]
        return ChatReply(
            **self.names,
            choices=choices,
            usage=usage(results),
            prompt_token_ids=self.prompt_ids(0),
            kv_transfer_params=_kept(results, hidden_states),
        )

    def pieces(self, prompt: int, update: Update) -> list[BaseModel]:
        index = prompt * self.n + update.index
        pieces: list[BaseModel] = []
        if index not in self._begun:
            self._begun.add(index)
            first = ChatChunkChoice(index=index, delta=ChatDelta(role="assistant", content=""))
            pieces.append(ChatChunk(**self.names, choices=[first], prompt_token_ids=self.prompt_ids(index)))
        if update.text or update.logprobs or (self.with_ids and update.token_ids):
            choice = ChatChunkChoice(
                index=index,
                delta=ChatDelta(content=update.text),
                logprobs=self._logprobs(update.token_ids, update.logprobs),
                token_ids=self.ids(update.token_ids),
            )
            pieces.append(ChatChunk(**self.names, choices=[choice]))
        if update.finish_reason is not None:
            last = ChatChunkChoice(index=index, delta=ChatDelta(), finish_reason=update.finish_reason)
            pieces.append(ChatChunk(**self.names, choices=[last]))
        return pieces

    def last_pieces(self, results: Sequence[Result], *, wants_usage: bool) -> list[BaseModel]:
        return [ChatChunk(**self.names, choices=[], usage=usage(results))] if wants_usage else []

    def _logprobs(self, token_ids: Sequence[int], logprobs: Sequence[TokenLogprobs] | None) -> ChatLogprobs | None:
        if logprobs is None:
            return None
        content = []
        for token, one in zip(token_ids, logprobs, strict=True):
            top = [TopLogprob(**self._token(other, logprob)) for other, logprob in one.top.items()]
            content.append(TokenLogprob(**self._token(token, one.chosen), top_logprobs=top))
        return ChatLogprobs(content=content)

    def _token(self, token: int, logprob: float) -> dict[str, Any]:
        text = self.texts.text(token)
        has_bytes = _NO_TEXT not in text
        return {"token": text, "logprob": _finite(logprob), "bytes": list(text.encode()) if has_bytes else None}


def _kept(results: Sequence[Result], hidden_states: Path | None) -> dict[str, Any] | None:
    """What was kept for the client, or for the decode worker that it asks next."""
    kept = dict(results[0].kv_transfer_params or {})
    if hidden_states is not None:
        kept["hidden_states_path"] = str(hidden_states)
    return kept or None


def usage(results: Sequence[Result]) -> Usage:
    """Usage of all prompts together. Each prompt counts once, however many replies it has."""
    prompt = sum(len(result.prompt_token_ids) for result in results)
    completion = sum(len(one.token_ids) for result in results for one in result.completions)
    cached = sum(result.cached_tokens for result in results)
    return Usage(
        prompt_tokens=prompt,
        completion_tokens=completion,
        total_tokens=prompt + completion,
        prompt_tokens_details=PromptTokensDetails(cached_tokens=cached),
    )


def _finite(logprob: float) -> float:
    return max(logprob, _LEAST_LOGPROB)
