"""Conversations that `/v1/responses` may go on with by the id of a response, in bounded memory."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from hybridkv.serve.failures import NotFoundError

_MOST_CONVERSATIONS = 1000
_MOST_CHARS = 64 * 2**20
"""Of all contents together. One that is part of several conversations counts for each."""

Messages = Sequence[Mapping[str, Any]]


class _Conversation(NamedTuple):
    client: str
    messages: tuple[Mapping[str, Any], ...]
    num_chars: int


class Conversations:
    """The latest conversations. Those that were used last stay the longest."""

    def __init__(self) -> None:
        self._known: OrderedDict[str, _Conversation] = OrderedDict()
        self._num_chars = 0

    def keep(self, response_id: str, client: str, messages: Messages) -> None:
        """Keep a conversation, with its last reply."""
        one = _Conversation(client, tuple(messages), sum(len(message["content"]) for message in messages))
        self._known[response_id] = one
        self._num_chars += one.num_chars
        while len(self._known) > _MOST_CONVERSATIONS or self._num_chars > _MOST_CHARS:
            _, oldest = self._known.popitem(last=False)
            self._num_chars -= oldest.num_chars

    def find(self, response_id: str, client: str) -> Messages:
        """The messages of a conversation. Raises NotFoundError if it is not kept, or of another client."""
        found = self._known.get(response_id)
        if found is None or found.client != client:
            raise NotFoundError(
                f"previous_response_id {response_id[:100]!r} is not kept here: send the messages before as input",
                "previous_response_id",
            )
        self._known.move_to_end(response_id)
        return found.messages
