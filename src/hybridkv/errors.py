"""The errors that hybridkv raises on purpose.

Each message names the thing, the value and the way out, in one line. Bad input raises an `InputError`, which is a
`ValueError`: the command exits with 2, the server answers with 4xx. Every other kind is a failure that the input did
not cause: the command exits with 1, the server answers with 5xx.
"""

from __future__ import annotations

import errno

_DISK_FAILS = (errno.ENOSPC, errno.EDQUOT, errno.EIO)


class HybridKVError(Exception):
    """Base of every error that hybridkv raises on purpose. Itself: a call that the engine's state does not allow."""


# --- bad input --------------------------------------------------------------------------------------------------------


class InputError(HybridKVError, ValueError):
    """Base of every error that bad input causes. Itself: an option, argument or file that cannot be used."""


class ConfigError(InputError):
    """A model's configuration is missing, unreadable, or says something we refuse to guess about."""


class MissingFieldError(ConfigError):
    """A model's configuration does not say something that has no default."""


class ParallelismError(ConfigError):
    """The model cannot be split over the asked number of tensor-parallel ranks."""


class PlanError(InputError):
    """The options contradict each other, or the memory is too small for the model."""


class RequestError(InputError):
    """A request asks for something that does not exist, or for more than anyone may ask. `param`: by which field."""

    def __init__(self, message: str, param: str | None = None) -> None:
        super().__init__(message)
        self.param = param


class CacheError(InputError):
    """A verb was used on a lease or a pin that does not allow it now."""


class TraceError(InputError):
    """A trace that cannot be read."""


# --- failures ---------------------------------------------------------------------------------------------------------


class EngineError(HybridKVError):
    """The engine has stopped and serves nothing any more."""


class ReplyError(HybridKVError):
    """The engine could not finish a reply."""


class DiskError(HybridKVError):
    """A file cannot be written because its disk is full or broken."""


class StoreError(HybridKVError):
    """Base of all that stores raise. Itself: the store is closed."""


class StoreInputError(StoreError, InputError):
    """A wrong name, address or size: the caller's mistake."""


class MissingObject(StoreError):  # noqa: N818 - reads as what it says
    """There is no such object, or not any more. It is computed again."""


class CorruptObject(StoreError):  # noqa: N818
    """The bytes are not those that were written. The object has been deleted, and is computed again."""


class StoreFault(StoreError):  # noqa: N818
    """The store itself fails: a full disk, a lost connection, no permission. It is left alone for a while."""


def is_disk_failure(error: OSError) -> bool:
    """Whether a write failed because of the disk, and not because of the path it was told to write to."""
    return error.errno in _DISK_FAILS
