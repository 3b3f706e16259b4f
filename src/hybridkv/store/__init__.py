"""Stores of cache rows outside the arena: in memory, on disk. They know bytes and names; no tensors, no requests."""

from hybridkv.errors import CorruptObject, MissingObject, StoreError, StoreFault, StoreInputError, UnknownFormat
from hybridkv.store.file.blobs import FileStore
from hybridkv.store.file.io import Direct
from hybridkv.store.guard import Guarded
from hybridkv.store.memory import MemoryStore
from hybridkv.store.names import ObjectName
from hybridkv.store.objects import Header, StoredRow
from hybridkv.store.store import Leftovers, Reader, Store, Stored, StoreStats, Writer
from hybridkv.store.tiers.store import Tier, TieredStore, WritePolicy
from hybridkv.store.urls import inspect_store, open_store

__all__ = [
    "CorruptObject",
    "Direct",
    "FileStore",
    "Guarded",
    "Header",
    "Leftovers",
    "MemoryStore",
    "MissingObject",
    "ObjectName",
    "Reader",
    "Store",
    "StoreError",
    "StoreFault",
    "StoreInputError",
    "StoreStats",
    "Stored",
    "StoredRow",
    "Tier",
    "TieredStore",
    "UnknownFormat",
    "WritePolicy",
    "Writer",
    "inspect_store",
    "open_store",
]
