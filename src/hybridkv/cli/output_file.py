"""Text files that a command writes: whole, or not at all."""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path

from hybridkv.errors import DiskError, InputError, is_disk_failure

_FLAGS = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW | os.O_CLOEXEC


def write_file(path: Path, content: str, what: str) -> None:
    """Write `content` to `path`, in place of a file that is there. `what` names it in errors, such as "--html".

    The file is written beside `path` and renamed when it is on the disk. A link is followed. Characters that UTF-8 does
    not have, as in names of files that are no text, are written as escapes.
    """
    target = check_file(path, what)
    partial = target.with_name(f".{target.name[:200]}.{os.getpid()}.partial")
    try:
        mode = target.stat().st_mode & 0o777 if target.exists() else None
        with os.fdopen(os.open(partial, _FLAGS, 0o666), "w", encoding="utf-8", errors="backslashreplace") as file:
            if mode is not None:
                os.fchmod(file.fileno(), mode)
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        os.replace(partial, target)
    except OSError as error:
        raise _cannot_write(path, error, what) from None
    finally:
        with suppress(OSError):
            os.unlink(partial)


def check_file(path: Path, what: str) -> Path:
    """Refuse what a rename would replace although it is no file to be overwritten. Returns `path` without links."""
    target = Path(os.path.realpath(path))
    try:
        if target.is_dir():
            raise InputError(f"{what} {path} is a directory: name a file in it")
        if not target.parent.is_dir():
            raise InputError(f"{what} {path}: there is no directory {target.parent}; make it first")
        if target.exists() and not target.is_file():
            raise InputError(f"{what} {path} is no regular file: name another")
        if target.exists() and not os.access(target, os.W_OK):
            raise InputError(f"{what} {path} is write-protected: name another file")
    except OSError as error:
        raise _cannot_write(path, error, what) from None
    return target


def _cannot_write(path: Path, error: OSError, what: str) -> InputError | DiskError:
    if is_disk_failure(error):
        return DiskError(f"cannot write {what} {path}: {error.strerror}")
    return InputError(f"cannot write {what} {path}: {error.strerror}; name another file")
