"""Errors of obstore as errors of stores. Its texts hold whole replies and signed URLs, which are not passed on."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from obstore.exceptions import BaseError, PreconditionError

from hybridkv.errors import MissingObject, StoreError, StoreFault

ERRORS = (BaseError, OSError, ValueError)
"""What obstore raises: its own errors, FileNotFoundError, TimeoutError and ValueError."""

_CODE = re.compile(r"<Code>\s*([A-Za-z0-9]{1,64})\s*</Code>")
_PATH = re.compile(r"(https?://[^/?\s]+)\S*")
_KEY = re.compile(r" (?:for path|at location) [^\s:]+")
_DURATION = re.compile(r" in [0-9.]+[a-zµ]+(?= - )")
_NO_BUCKET = ("NoSuchBucket", "ContainerNotFound")
_MOST_LETTERS = 300


def reason(error: BaseException) -> str:
    """One printable line without paths and queries (they may be signed) and without the server's page."""
    text = str(error)
    code = _CODE.search(text)
    line = text.split("<?xml")[0].strip().split("\n")[0]
    line = _KEY.sub("", _PATH.sub(r"\1", _DURATION.sub("", line)))
    shown = "".join(letter for letter in line if letter.isprintable()).rstrip(" :")[:_MOST_LETTERS]
    return f"{shown} ({code[1]})" if code else shown or type(error).__name__


def is_empty_range(error: BaseException) -> bool:
    """Whether the server said that the object ends before the range."""
    return "416 Range Not Satisfiable" in str(error)


def is_missing(error: BaseException) -> bool:
    """Whether the object is missing, or replaced by another one, in a bucket that exists."""
    if isinstance(error, PreconditionError):
        return True
    return isinstance(error, FileNotFoundError) and not any(code in str(error) for code in _NO_BUCKET)


def fault(place: str, what: str, error: BaseException) -> StoreFault:
    return StoreFault(f"{place}: cannot {what}: {reason(error)}")


def missing_or_fault(place: str, what: str, error: BaseException) -> StoreError:
    if is_missing(error):
        return MissingObject(f"{what.removeprefix('read ')}: not in {place}")
    return fault(place, what, error)


@contextmanager
def faults(place: str, what: str, translate: Callable[[str, str, BaseException], StoreError] = fault) -> Iterator[None]:
    """Raise a StoreError in place of obstore's errors, whose texts must not appear in tracebacks either."""
    try:
        yield
    except ERRORS as error:
        raise translate(place, what, error) from None
