"""The secret that two engines share. Only a process that knows it may talk to them."""

from __future__ import annotations

import hmac
import os
from pathlib import Path
from typing import NoReturn

from hybridkv.errors import InputError
from hybridkv.files import FileError, read_text

SECRET_VARIABLE = "HYBRIDKV_LINK_SECRET"
LEAST_CHARACTERS = 16
_MOST_BYTES = 4096
_HOW_TO = "make one with 'openssl rand -hex 32', the same for all engines"


class Secret:
    """A shared secret. It shows itself in no repr, and it cannot be pickled."""

    __slots__ = ("_key",)

    def __init__(self, text: str) -> None:
        """Raises InputError if `text` is too short. The error does not contain it."""
        if len(text) < LEAST_CHARACTERS:
            raise InputError(
                f"the link secret has {len(text)} characters, and needs {LEAST_CHARACTERS} at least: {_HOW_TO}"
            )
        self._key = text.encode("utf-8", "surrogateescape")

    def __repr__(self) -> str:
        return "Secret(...)"

    def __reduce__(self) -> NoReturn:
        raise TypeError("a Secret cannot be pickled: read it again with read_secret")

    def mac(self, label: str, *parts: str) -> bytes:
        """HMAC-SHA256 of the label and the parts. None of them may contain a line break."""
        return hmac.digest(self._key, "\n".join((label, *parts)).encode(), "sha256")


def read_secret(path: Path | None) -> Secret:
    """The secret in the file `path`, or without one in $HYBRIDKV_LINK_SECRET. White space around it is left out."""
    if path is not None:
        return Secret(_text_of(path).strip())
    if SECRET_VARIABLE not in os.environ:
        raise InputError(f"no link secret: set ${SECRET_VARIABLE} or name a file that has one; {_HOW_TO}")
    return Secret(os.environ[SECRET_VARIABLE].strip())


def _text_of(path: Path) -> str:
    try:
        return read_text(path, _MOST_BYTES)
    except FileError as error:
        raise InputError(f"cannot read the link secret in {path}: {error}; {_HOW_TO}") from None
