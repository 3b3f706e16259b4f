"""Texts of tokens."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any


class TokenTexts:
    """Texts of tokens, for logprobs and records."""

    def __init__(self, tokenizer: Any | None) -> None:
        self._tokenizer = tokenizer
        self.text = functools.lru_cache(maxsize=65536)(self._text)

    def _text(self, token: int) -> str:
        if self._tokenizer is None:
            return f"token:{token}"
        text: str = self._tokenizer.decode([token], skip_special_tokens=False)
        return text

    def joined(self, tokens: Sequence[int]) -> str:
        """The text of tokens that follow each other."""
        if self._tokenizer is None:
            return " ".join(map(self._text, tokens))
        text: str = self._tokenizer.decode(list(tokens), skip_special_tokens=False)
        return text
