"""The arena's tensors: one buffer, a strided view of every part of every layer, and the cache core's operations."""

from hybridkv.memory.memory import LayerMemory, Memory
from hybridkv.memory.uploads import Column, Uploader

__all__ = ["Column", "LayerMemory", "Memory", "Uploader"]
