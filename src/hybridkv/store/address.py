"""A store's URL, taken apart. Passwords never stand in a URL: command lines, logs and `ps` show it."""

from __future__ import annotations

import os
import re
from enum import Enum
from pathlib import Path
from typing import NamedTuple, TypeVar

from hybridkv.errors import StoreInputError
from hybridkv.files import FileError, read_text
from hybridkv.units import parse_size

Choice = TypeVar("Choice", bound=Enum)

_USER = re.compile(r"(?<=://).*@", re.DOTALL)
"""Up to the last @: a password may hold / ? and #, which should be written as %2F and so on."""
_COLON = re.compile(":|%3a", re.IGNORECASE)
_SECRET = re.compile(r"([?&][^=&]*(?:pass|pw|auth|secret|token|key|credential|sig)[^=&]*=)[^&]*", re.IGNORECASE)
_SECONDS = re.compile(r"(\d+(?:\.\d+)?)(ms|s)")
_MOST_SECRET_BYTES = 4096
_MOST_SECONDS = 86_400.0


def shown(url: str) -> str:
    """The URL as errors and logs show it: whatever may be a password is replaced by `***`."""
    masked = _USER.sub(lambda match: "***@" if _COLON.search(match[0]) else match[0], url)
    return _SECRET.sub(r"\1***", masked)


class Address(NamedTuple):
    """A parsed URL. All its options are known to the scheme."""

    url: str
    """As `shown` shows it."""
    scheme: str
    host: str
    """With a port, if the URL has one. Empty for schemes without hosts."""
    user: str
    path: str
    options: dict[str, str]
    example: str

    @property
    def place(self) -> tuple[str, ...]:
        """Two stores of one place hold the same objects. One host may have several names, which are not compared."""
        if not self.host and not self.path:
            return ()
        is_server = self.scheme.startswith(("valkey", "redis"))
        path = os.path.realpath(self.path) if not self.host else self.path.strip("/")
        if not is_server:
            return self.scheme, self.host, path, self.options.get("endpoint", "")
        if not self.host:
            return "valkey", path, self.options.get("db", "0")
        host = self.host.lower()
        return "valkey", host if re.search(r":\d+$", host) else f"{host}:6379", path or "0"

    @property
    def label(self) -> str:
        return f"{self.scheme}://{self.host}{self.path}"

    def size(self) -> int:
        found = self.size_or(None)
        if found is None:
            raise StoreInputError(f"{self.url!r} has no size: add size=, as in {self.example}")
        return found

    def size_or(self, default: int | None, option: str = "size") -> int | None:
        return parse_size(self.options[option]) if option in self.options else default

    def choose(self, option: str, choices: type[Choice], default: Choice) -> Choice:
        text = self.options.get(option, default.value)
        try:
            return choices(text)
        except ValueError:
            known = ", ".join(choice.value for choice in choices)
            raise StoreInputError(f"{self.url!r}: {option}={text} is none of {known}") from None

    def seconds(self, option: str, default: float) -> float:
        """A time such as 500ms or 2s."""
        text = self.options.get(option)
        if text is None:
            return default
        match = _SECONDS.fullmatch(text)
        found = float(match[1]) * (0.001 if match[2] == "ms" else 1.0) if match is not None else 0.0
        if not 0 < found <= _MOST_SECONDS:
            raise StoreInputError(f"{self.url!r}: {option}={text} is no time up to a day; write it as 500ms or 2s")
        return found

    def secret(self, variable: str) -> str | None:
        """The password: the content of the file that `password_file` names, or that environment variable."""
        file = self.options.get("password_file")
        if file is None:
            return os.environ.get(variable) or None
        try:
            text = read_text(Path(file), _MOST_SECRET_BYTES).strip("\r\n")
        except FileError as error:
            raise StoreInputError(
                f"password_file={file} cannot be read: {error}; name a file with a password alone"
            ) from None
        if not text:
            raise StoreInputError(f"password_file={file} is empty: name a file with a password alone")
        return text
