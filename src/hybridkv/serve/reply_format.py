"""What the formats of all endpoints have in common: they convert the engine's updates and results to replies.

A request may have several prompts, each with n replies: choice number `prompt * n + sample`.
"""

from __future__ import annotations

import time
import uuid
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from pydantic import BaseModel

from hybridkv.engine import Completion, Prompt, Result, Update
from hybridkv.errors import HybridKVError, ReplyError
from hybridkv.serve.failures import error_body, status_of
from hybridkv.serve.streams import DONE, data_event
from hybridkv.serve.token_texts import TokenTexts


class ReplyFormat(ABC):
    """Reply format of one request."""

    prefix: str
    """Begins the ids of replies."""
    last_event: bytes = DONE
    """Follows the last piece of a stream."""

    def __init__(
        self,
        model: str,
        texts: TokenTexts,
        *,
        n: int,
        prompts: Sequence[Prompt],
        block_tokens: int,
        with_ids: bool = False,
        echoes: Sequence[str] = (),
        repeated: Mapping[str, Any] | None = None,
    ) -> None:
        """`with_ids`: whether token ids were requested. `repeated`: fields of the request that the reply repeats.

        `echoes`: texts that replies begin with, one for each prompt, if `echo` was requested.
        """
        self.id = f"{self.prefix}-{uuid.uuid4().hex}"
        self.created = int(time.time())
        self.model = model
        self.texts = texts
        self.n = n
        self.prompts = prompts
        self.block_tokens = block_tokens
        self.with_ids = with_ids
        self.repeated = repeated or {}
        self._echoes = echoes
        self._begun: set[int] = set()
        """Choices of which at least one piece was sent."""

    @property
    def names(self) -> dict[str, Any]:
        """Fields that every reply and every piece begins with."""
        return {"id": self.id, "created": self.created, "model": self.model}

    @abstractmethod
    def whole(self, results: Sequence[Result], hidden_states: Path | None = None) -> BaseModel:
        """The reply to a request that is not streamed. `hidden_states`: the file they were written to."""

    @abstractmethod
    def pieces(self, prompt: int, update: Update) -> list[BaseModel]:
        """The pieces to send for an update of a prompt; empty if there is no new text or token to show."""

    @abstractmethod
    def last_pieces(self, results: Sequence[Result], *, wants_usage: bool) -> list[BaseModel]:
        """The pieces to send once all prompts have ended. `wants_usage`: whether the client requested usage."""

    def event(self, piece: BaseModel) -> bytes:
        """A piece as it is sent."""
        return data_event(piece.model_dump_json())

    def failure(self, error: HybridKVError) -> bytes:
        """The end of a stream that failed after its status was sent."""
        return data_event(error_body(status_of(error), str(error))) + self.last_event

    def prompt_ids(self, index: int) -> list[int] | None:
        """Token ids of the prompt of a choice, if they were requested."""
        return self.prompts[index // self.n].token_ids if self.with_ids else None

    def ids(self, token_ids: list[int]) -> list[int] | None:
        return token_ids if self.with_ids else None

    def choices(self, results: Sequence[Result]) -> list[tuple[int, Completion]]:
        return [
            (prompt * self.n + one.index, check_finished(one))
            for prompt, result in enumerate(results)
            for one in result.completions
        ]


def check_finished(one: Completion) -> Completion:
    """Return the completion; raises if it ended with an error or was aborted."""
    if one.finish_reason in ("stop", "length"):
        return one
    raise ReplyError(one.error or "the engine was shut down before the reply was complete: send it again")
