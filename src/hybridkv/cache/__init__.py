"""The cache core: arena, index, leases and policies. Pure Python, no torch."""

from hybridkv.cache.arena import NULL_PAGE, CopyPage, Operation, OperationBatch, ZeroPage, ZeroSlab
from hybridkv.cache.cache import Cache, CacheError, Pin
from hybridkv.cache.layout import CacheGroup, CacheLayout, Role
from hybridkv.cache.lease import Lease, Match, NoRoom, Segment, StepTables
from hybridkv.cache.policy import Candidate, CheckpointPolicy, EvictionPolicy, PromptFacts
from hybridkv.cache.stats import CacheStats, Event

__all__ = [
    "NULL_PAGE",
    "Cache",
    "CacheError",
    "CacheGroup",
    "CacheLayout",
    "CacheStats",
    "Candidate",
    "CheckpointPolicy",
    "CopyPage",
    "Event",
    "EvictionPolicy",
    "Lease",
    "Match",
    "NoRoom",
    "Operation",
    "OperationBatch",
    "Pin",
    "PromptFacts",
    "Role",
    "Segment",
    "StepTables",
    "ZeroPage",
    "ZeroSlab",
]
