"""Reads files that users name: regular files alone, opened without waiting, and no more of them than a limit.

Opening a FIFO waits for a writer, a device such as /dev/zero never ends, and deeply nested JSON exhausts the stack.
The kind of a file is that of the open file: its path may lead elsewhere by now.
"""

from __future__ import annotations

import gzip
import json
import os
import zlib
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from stat import S_IFDIR, S_IFIFO, S_IFLNK, S_IFMT, S_IFREG, S_IFSOCK, S_ISBLK, S_ISCHR, S_ISFIFO, S_ISREG
from typing import Any, BinaryIO, cast

from hybridkv.units import format_bytes

MOST_BYTES = 64 * 2**20
"""Largest text and longest line that are read. With a larger limit a wrong file takes more memory until refused."""
MOST_DEPTH = 64
"""Deepest nesting of JSON. Configurations and tool schemas have less than 20; recursive code fails at some hundreds."""
_FLAGS = os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOCTTY
_KINDS = {S_IFDIR: "directory", S_IFIFO: "FIFO", S_IFSOCK: "socket", S_IFLNK: "link to nothing", S_IFREG: "file"}


class FileError(ValueError):
    """A file cannot be read. The message is the reason: callers raise an InputError with the file and the way out."""

    def __init__(self, reason: str, *, is_missing: bool = False) -> None:
        super().__init__(reason)
        self.is_missing = is_missing
        """True if there is nothing at the path."""


def open_file(path: Path) -> BinaryIO:
    """Open a regular file. Raises FileError for anything else."""
    with _explained():
        try:
            fd = os.open(path, _FLAGS)
        except OSError:
            if path.is_socket():  # "No such device or address" explains nothing
                raise _irregular(S_IFSOCK) from None
            raise
        mode = os.fstat(fd).st_mode
        if not S_ISREG(mode):
            os.close(fd)
            raise _irregular(mode)
        return os.fdopen(fd, "rb")


def read_bytes(path: Path, most_bytes: int = MOST_BYTES) -> bytes:
    """Return the content of a file. Raises FileError if it has more than `most_bytes`."""
    with open_file(path) as file, _explained():
        data = file.read(most_bytes + 1)
    if len(data) > most_bytes:
        raise FileError(f"it has more than {format_bytes(most_bytes)}")
    return data


def read_text(path: Path, most_bytes: int = MOST_BYTES) -> str:
    """Return the text of a file in UTF-8, without a byte order mark."""
    try:
        return read_bytes(path, most_bytes).decode("utf-8-sig")
    except UnicodeDecodeError:  # its message has the bytes, which may be secret
        raise FileError("it is no text in UTF-8") from None


def read_json(path: Path) -> Any:
    """Return the JSON value in a file."""
    return parse_json(read_text(path))


def read_lines(path: Path, most_bytes: int = MOST_BYTES) -> Iterator[tuple[int, str]]:
    """Yield the lines of a text in UTF-8 that are not blank, with their numbers from 1 and without line ends.

    A file whose name ends in .gz is decompressed. Raises FileError at a line of more than `most_bytes`.
    """
    number = 0
    with open_file(path) as file, _explained():
        content = cast("BinaryIO", gzip.GzipFile(fileobj=file)) if path.suffix == ".gz" else file
        while line := content.readline(most_bytes + 1):
            number += 1
            if len(line) > most_bytes:
                raise FileError(f"line {number} has more than {format_bytes(most_bytes)}")
            try:
                text = line.decode("utf-8-sig" if number == 1 else "utf-8").rstrip("\r\n")
            except UnicodeDecodeError:
                raise FileError(f"it is no text in UTF-8 after line {number - 1}") from None
            if text and not text.isspace():
                yield number, text


def parse_json(text: str | bytes) -> Any:
    """Return the value of a JSON text. Raises FileError if it is no JSON, or nested too deeply."""
    try:
        value = json.loads(text)
    except RecursionError:
        raise _too_deep() from None
    except ValueError as error:
        raise FileError(f"not JSON: {error}") from None
    opening = ("[", "{") if isinstance(text, str) else (b"[", b"{")
    if sum(map(text.count, opening)) > MOST_DEPTH and _is_deep(value):  # type: ignore[arg-type]
        raise _too_deep()
    return value


def check_folder(directory: Path) -> None:
    """Raise FileError if `directory` has a FIFO or a device: libraries open files by name, and would not return."""
    with _explained(), os.scandir(directory) as entries:
        for entry in entries:
            with suppress(OSError):  # a link to nothing, say: the library reports it if it needs it
                mode = entry.stat().st_mode
                if S_ISFIFO(mode) or S_ISCHR(mode) or S_ISBLK(mode):
                    raise FileError(f"{entry.name} is a {_kind(mode)}, not a regular file")


def kind_of(path: Path) -> str:
    """Return the file type at `path`, in words for an error message."""
    try:
        return _kind(path.stat().st_mode)
    except FileNotFoundError:
        return _kind(path.lstat().st_mode)


def _kind(mode: int) -> str:
    return _KINDS.get(S_IFMT(mode), "device")


def _irregular(mode: int) -> FileError:
    return FileError(f"it is a {_kind(mode)}, not a regular file")


def _too_deep() -> FileError:
    return FileError(f"not JSON that can be used: it is nested more than {MOST_DEPTH} deep")


def _is_deep(value: Any) -> bool:
    """Whether lists and objects lie in one another more than `MOST_DEPTH` times."""
    level = [value] if isinstance(value, (dict, list)) else []
    for _ in range(MOST_DEPTH):
        inner = (one.values() if isinstance(one, dict) else one for one in level)
        level = [one for values in inner for one in values if isinstance(one, (dict, list))]
    return bool(level)


@contextmanager
def _explained() -> Iterator[None]:
    """Raise FileError in place of what the system and gzip raise."""
    try:
        yield
    except (OSError, EOFError, zlib.error) as error:
        reason = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
        raise FileError(reason, is_missing=isinstance(error, (FileNotFoundError, NotADirectoryError))) from None
    except ValueError as error:
        if isinstance(error, FileError):
            raise
        raise FileError(str(error)) from None  # a path with a null byte
