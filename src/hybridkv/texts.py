"""Texts of callers: whether they have bytes, and how any value of a caller is shown in a message."""

from __future__ import annotations

_MOST_BITS = 128
_LONGEST_SHOWN = 80


def has_bytes(text: str) -> bool:
    """Whether a text can be encoded: JSON may have half of a surrogate pair, which UTF-8 has not."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def shown(value: object) -> str:
    """The beginning of a value as Python writes it. Python refuses very long numbers and very deep nesting."""
    if isinstance(value, int) and value.bit_length() > _MOST_BITS:
        return f"a number of {value.bit_length()} bits"
    try:
        written = repr(value)
    except (ValueError, RecursionError):
        return f"a {type(value).__name__} that Python does not write"
    return written if len(written) <= _LONGEST_SHOWN else written[:_LONGEST_SHOWN] + "..."
