"""Replaying request traces through the cache core: capacity planning, and the judge of policies. No torch."""

from hybridkv.errors import TraceError
from hybridkv.replay.driver import replay
from hybridkv.replay.reading import load_trace
from hybridkv.replay.replies import Conversations
from hybridkv.replay.report import ReplayReport, Setting
from hybridkv.replay.service import ComputeModel, ServiceModel
from hybridkv.replay.tiers.figures import LoadReport, TierReport
from hybridkv.replay.tiers.spec import LOAD_RULES, TierSpec, parse_tier
from hybridkv.replay.tokenizer import ChatTokenizer, load_tokenizer
from hybridkv.replay.traces import Trace, TraceRequest

__all__ = [
    "LOAD_RULES",
    "ChatTokenizer",
    "ComputeModel",
    "Conversations",
    "LoadReport",
    "ReplayReport",
    "ServiceModel",
    "Setting",
    "TierReport",
    "TierSpec",
    "Trace",
    "TraceError",
    "TraceRequest",
    "load_tokenizer",
    "load_trace",
    "parse_tier",
    "replay",
]
