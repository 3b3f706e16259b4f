"""Names of objects. A name covers everything that an object's bytes depend on, so equal names mean equal bytes."""

from __future__ import annotations

import re
from dataclasses import dataclass

from hybridkv.errors import StoreInputError

NAMESPACE_DIGITS = 32
KEY_DIGITS = 64
MOST_GROUP_LETTERS = 64
_NAMESPACE = re.compile(f"[0-9a-f]{{{NAMESPACE_DIGITS}}}")
_KEY = re.compile(f"[0-9a-f]{{{KEY_DIGITS}}}")
_GROUP = re.compile(f"[a-z0-9][a-z0-9._-]{{0,{MOST_GROUP_LETTERS - 1}}}")


@dataclass(frozen=True, slots=True, order=True)
class ObjectName:
    """Safe to use as a path and as a key of any key-value server."""

    namespace: str
    """A digest of everything that changes the bytes of all objects alike: model, types, layout."""
    group: str
    key: str
    """The chained digest of the tokens before the object's end."""

    def __post_init__(self) -> None:
        check_namespace(self.namespace)
        check_group(self.group)
        if not _KEY.fullmatch(self.key):
            raise StoreInputError(f"key {self.key!r}: an object's key has {KEY_DIGITS} hex digits, in lower case")

    @property
    def path(self) -> str:
        """Relative path. A level named by the first two digits of the key keeps directories small."""
        return f"{self.namespace}/{self.group}/{self.key[:2]}/{self.key}"

    def __str__(self) -> str:
        return f"{self.namespace}/{self.group}/{self.key}"


def check_namespace(namespace: str) -> None:
    if not _NAMESPACE.fullmatch(namespace):
        raise StoreInputError(f"namespace {namespace!r}: a namespace has {NAMESPACE_DIGITS} hex digits, in lower case")


def check_group(group: str) -> None:
    if not _GROUP.fullmatch(group):
        raise StoreInputError(
            f"group {group!r}: a group has 1 to {MOST_GROUP_LETTERS} letters of a-z, 0-9, '.', '_' and '-', "
            "the first of them a letter or digit"
        )


def is_namespace(text: str) -> bool:
    return _NAMESPACE.fullmatch(text) is not None


def is_group(text: str) -> bool:
    return _GROUP.fullmatch(text) is not None


def is_key(text: str) -> bool:
    return _KEY.fullmatch(text) is not None
