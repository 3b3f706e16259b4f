"""Texts of single tokens."""

from __future__ import annotations

import functools
from typing import Any


class TokenTexts:
    """Texts of single tokens, for logprobs."""

    def __init__(self, tokenizer: Any | None) -> None:
        self._tokenizer = tokenizer
        self.text = functools.lru_cache(maxsize=65536)(self._text)

    def _text(self, token: int) -> str:
        if self._tokenizer is None:
            return f"token:{token}"
        text: str = self._tokenizer.decode([token], skip_special_tokens=False)
        return text
