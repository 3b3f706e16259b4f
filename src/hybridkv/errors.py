"""The errors that hybridkv raises on purpose.

Each message names the thing, the value and the way out, in one line. Bad input raises an `InputError`, which is a
`ValueError`: the command exits with 2, the server answers with 4xx. Every other kind is a failure that the input did
not cause: the command exits with 1, the server answers with 5xx.
"""

from __future__ import annotations

import errno

_DISK_FAILS = (errno.ENOSPC, errno.EDQUOT, errno.EIO)


class HybridKVError(Exception):
    """Base of every error that hybridkv raises on purpose. Raised itself for a call that the state does not allow."""


# --- bad input --------------------------------------------------------------------------------------------------------


class InputError(HybridKVError, ValueError):
    """Base of every error that bad input causes. Raised itself for an option, argument or file that cannot be used."""


class ConfigError(InputError):
    """A model's configuration is missing, unreadable or ambiguous."""


class MissingFieldError(ConfigError):
    """A model's configuration lacks a field that has no default."""


class ParallelismError(ConfigError):
    """The model cannot be split over the requested number of tensor-parallel ranks."""


class PlanError(InputError):
    """The options contradict each other, or the memory is too small for the model."""


class RequestError(InputError):
    """A request asks for something that does not exist, or for more than is allowed. `param`: the field at fault."""

    def __init__(self, message: str, param: str | None = None) -> None:
        super().__init__(message)
        self.param = param


class CacheError(InputError):
    """A method was called on a lease or a pin in a state that does not allow it."""


class TraceError(InputError):
    """A trace cannot be read."""


# --- failures ---------------------------------------------------------------------------------------------------------


class EngineError(HybridKVError):
    """The engine has stopped and serves no more requests."""


class ReplyError(HybridKVError):
    """The engine could not finish a reply."""


class DiskError(HybridKVError):
    """A file cannot be written because its disk is full or broken."""


class StoreError(HybridKVError):
    """Base of all errors that stores raise. Raised itself if the store is closed."""


class StoreInputError(StoreError, InputError):
    """The caller passed a wrong name, address or size."""


class MissingObject(StoreError):  # noqa: N818 - reads as what it says
    """The object does not exist, or was deleted. Its tokens are computed instead."""


class CorruptObject(StoreError):  # noqa: N818
    """The bytes are not those that were written. The object has been deleted; its tokens are computed instead."""


class UnknownFormat(StoreError):  # noqa: N818
    """A later version of hybridkv has written the object. It is left alone; its tokens are computed instead."""


class StoreFault(StoreError):  # noqa: N818
    """The store itself fails: a full disk, a lost connection, no permission. It is not used for a while (backoff)."""


def is_disk_failure(error: OSError) -> bool:
    """Whether a write failed because of the disk, and not because of its path."""
    return error.errno in _DISK_FAILS
