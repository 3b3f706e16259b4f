"""What can go wrong with stored objects, and who has to care.

Missing and corrupt objects are computed again; a store that fails is left alone for a while.
"""

from hybridkv.errors import HybridKVError


class StoreError(HybridKVError):
    """Base of all that stores raise. Itself: a wrong name, address or size; the caller's mistake."""


class MissingObject(StoreError):  # noqa: N818 - reads as what it says
    """There is no such object, or not any more."""


class CorruptObject(StoreError):  # noqa: N818
    """The bytes are not those that were written. The object has been deleted."""


class StoreFault(StoreError):  # noqa: N818
    """The store itself fails: a full disk, a lost connection, no permission."""
