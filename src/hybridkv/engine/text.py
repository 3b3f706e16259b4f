"""Incremental detokenization and stop texts. Knows no requests and no tensors.

Detokenization is not additive: a character may take several tokens, sentencepiece drops a leading space, byte fallback
turns a whole run of bytes into U+FFFD while one of them is missing. So a short window is decoded for every token:

    ... dropped │ context: shown, decoded to `_context` │ pending: not shown, or not all │
                0                                    _clean                        len(_window)

The text of the pending tokens is what they add to the text of the context. The window is bounded, so the total cost is
linear.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from hybridkv.errors import RequestError

UNKNOWN = "\N{REPLACEMENT CHARACTER}"
MAX_UNFINISHED = 3
"""Most bytes of an incomplete UTF-8 character, so also most of its tokens, and most U+FFFD it decodes to."""
MAX_CONTEXT_TOKENS = 16
MAX_PENDING_TOKENS = 32
"""Most pending tokens. More are bytes that never become a character."""


class Tokenizer(Protocol):
    """The methods used of a transformers tokenizer, fast or slow."""

    def decode(self, token_ids: list[int], /, *, skip_special_tokens: bool) -> str: ...


class TextStream:
    """The text of one reply as it grows: the concatenation of all results of `push` and `finish`.

    Without a tokenizer the text stays empty. min_tokens: stop texts count from this token on.
    context: the last tokens of the prompt, if the text should continue theirs: a first "▁word" then keeps its space.
    """

    def __init__(
        self,
        tokenizer: Tokenizer | None,
        *,
        stop: Sequence[str] = (),
        include_stop: bool = False,
        min_tokens: int = 0,
        skip_special_tokens: bool = True,
        context: Sequence[int] = (),
    ) -> None:
        if tokenizer is None and stop:
            raise RequestError(f"stop is {stop[0]!r}: stop texts need a tokenizer; use stop_token_ids without one")
        self._tokenizer = tokenizer
        self._skip_special_tokens = skip_special_tokens
        self._stops = StopTexts(stop, include_stop)
        self._plain_tokens = max(0, min_tokens - 1)
        """Number of first tokens whose text is not searched for stop texts."""
        self._window = list(context)
        self._clean = len(self._window)
        self._context = self._decode(self._window) if context else ""
        self._num_shown = 0
        """Number of characters of the pending text that were returned."""

    @property
    def stopped_by(self) -> str | None:
        """The stop text that ended the reply."""
        return self._stops.found

    def push(self, token: int) -> str:
        """Add a token; returns the new text that is final: complete characters, before any possible stop text."""
        if self._tokenizer is None or self.stopped_by is not None:
            return ""
        self._window.append(token)
        text = self._advance()
        if self._plain_tokens:
            self._plain_tokens -= 1
            return text
        return self._stops.push(text)

    def finish(self) -> str:
        """The remaining text: a possible beginning of a stop text, and U+FFFD for an incomplete character."""
        if self._tokenizer is None or self.stopped_by is not None:
            return ""
        rest = self._pending_text()[0][self._num_shown :]
        self._window, self._context = [], ""
        self._clean = self._num_shown = 0
        return self._stops.push(rest) + self._stops.finish()

    def _decode(self, tokens: list[int]) -> str:
        assert self._tokenizer is not None
        return self._tokenizer.decode(tokens, skip_special_tokens=self._skip_special_tokens)

    def _pending_text(self) -> tuple[str, bool]:
        """The text of the pending tokens, and whether the text of the context is unchanged by them."""
        text = self._decode(self._window)
        if text.startswith(self._context):
            return text[len(self._context) :], True
        # An incomplete run of bytes also changes bytes that were returned before it: decode the pending tokens alone.
        return self._decode(self._window[self._clean :]), False

    def _advance(self) -> str:
        """New text, without a possibly incomplete character at its end."""
        text, stands = self._pending_text()
        if text and not text.endswith(UNKNOWN):
            return self._settle(text, stands)
        if not text and self._context:  # a special token that is skipped
            self._window.pop()
            return ""
        certain = len(text)
        while certain and len(text) - certain < MAX_UNFINISHED and text[certain - 1] == UNKNOWN:
            certain -= 1
        if len(self._window) - self._clean > MAX_PENDING_TOKENS:
            return self._give_up(text)
        new = text[self._num_shown : certain]
        self._num_shown = max(self._num_shown, certain)
        return new

    def _settle(self, text: str, stands: bool) -> str:
        """Make the pending tokens context: all of them are complete characters."""
        new = text[self._num_shown :]
        self._num_shown = 0
        if stands and len(self._window) <= MAX_CONTEXT_TOKENS:
            self._context += text
        else:  # the pending tokens are complete characters, so they suffice as context
            del self._window[: self._clean]
            self._context = self._decode(self._window)
        self._clean = len(self._window)
        return new

    def _give_up(self, text: str) -> str:
        """Return the text of pending tokens that never become characters, but the last, cut where no text changes."""
        pending = self._window[self._clean :]
        for tail in range(MAX_UNFINISHED, 2 * MAX_UNFINISHED + 1):
            head = self._decode(pending[:-tail])
            if head + self._decode(pending[-tail:]) == text:
                break
        new = text[self._num_shown : len(head)]
        self._num_shown = max(0, self._num_shown - len(head))
        self._window, self._context, self._clean = pending[-tail:], "", 0
        return new


class StopTexts:
    """Finds the first of several stop texts in a text that arrives in pieces. The result does not depend on the pieces.

    The first stop text is the one that ends first; of those that end together, the longest.
    """

    def __init__(self, stops: Sequence[str], include: bool = False) -> None:
        self._stops = tuple(stops)
        self._include = include
        self._held = ""
        """Text that is held back because a stop text may have begun in it."""
        self.found: str | None = None

    def push(self, text: str) -> str:
        """Add text; returns the new part that is certain to come before any stop text."""
        text = self._held + text
        if not self._stops or not text:
            return text
        ends = [(at + len(stop), at, stop) for stop in self._stops if (at := text.find(stop)) >= 0]
        if ends:
            end, start, self.found = min(ends)
            self._held = ""
            return text[: end if self._include else start]
        certain = min(_first_beginning(text, stop) for stop in self._stops)
        self._held = text[certain:]
        return text[:certain]

    def finish(self) -> str:
        held, self._held = self._held, ""
        return held


def _first_beginning(text: str, stop: str) -> int:
    """Start of the longest suffix of `text` that is a prefix of `stop`; the length of `text` if there is none."""
    at = text.find(stop[0], max(0, len(text) - len(stop) + 1))
    while at >= 0:
        if stop.startswith(text[at:]):
            return at
        at = text.find(stop[0], at + 1)
    return len(text)
