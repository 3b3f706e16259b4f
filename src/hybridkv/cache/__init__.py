"""The cache core: arena, index, leases and policies. Pure Python, no torch; may be compiled at installation."""

from hybridkv.cache import cache
from hybridkv.cache.arena.operations import CopyPage, Operation, OperationBatch, ZeroPage, ZeroSlab
from hybridkv.cache.arena.pages import NULL_PAGE
from hybridkv.cache.cache import Cache
from hybridkv.cache.index.leaders import Match
from hybridkv.cache.inspection.breakpoints import BreakpointAccount, Outcome
from hybridkv.cache.inspection.explanation import Evicted, Explanation, GroupSupply
from hybridkv.cache.inspection.memory_map import MemoryMap
from hybridkv.cache.inspection.prefix_tree import PrefixTree
from hybridkv.cache.layout import CacheGroup, CacheLayout, Role
from hybridkv.cache.pins import Pin, PinnedPages, PinState
from hybridkv.cache.retention.named import DEFAULT_POLICY, POLICIES, named_policy
from hybridkv.cache.retention.policy import (
    KIND_NAMES,
    Candidate,
    CheckpointPolicy,
    EvictionPolicy,
    Kind,
    PromptFacts,
    Rating,
)
from hybridkv.cache.stats import CacheStats, Event
from hybridkv.cache.steps.lease import Lease
from hybridkv.cache.steps.reclaim import NoRoom
from hybridkv.cache.steps.room import could_fit, extend_some, longest_fit
from hybridkv.cache.steps.step_tables import Segment, StepTables
from hybridkv.cache.tokens import LookupKey, lookup_key
from hybridkv.errors import CacheError

IS_COMPILED = not str(cache.__file__).endswith(".py")
"""Whether this is the compiled core, built with HYBRIDKV_COMPILE=1."""

__all__ = [
    "DEFAULT_POLICY",
    "IS_COMPILED",
    "KIND_NAMES",
    "NULL_PAGE",
    "POLICIES",
    "BreakpointAccount",
    "Cache",
    "CacheError",
    "CacheGroup",
    "CacheLayout",
    "CacheStats",
    "Candidate",
    "CheckpointPolicy",
    "CopyPage",
    "Event",
    "Evicted",
    "EvictionPolicy",
    "Explanation",
    "GroupSupply",
    "Kind",
    "Lease",
    "LookupKey",
    "Match",
    "MemoryMap",
    "NoRoom",
    "Operation",
    "OperationBatch",
    "Outcome",
    "Pin",
    "PinState",
    "PinnedPages",
    "PrefixTree",
    "PromptFacts",
    "Rating",
    "Role",
    "Segment",
    "StepTables",
    "ZeroPage",
    "ZeroSlab",
    "could_fit",
    "extend_some",
    "longest_fit",
    "lookup_key",
    "named_policy",
]
