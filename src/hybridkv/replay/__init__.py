"""Replaying request traces through the cache core: capacity planning, and the judge of policies. No torch."""

from hybridkv.errors import TraceError
from hybridkv.replay.driver import replay
from hybridkv.replay.reading import load_trace
from hybridkv.replay.replies import Conversations
from hybridkv.replay.report import ReplayReport, Setting
from hybridkv.replay.service import ComputeModel, ServiceModel
from hybridkv.replay.tokenizer import load_tokenizer
from hybridkv.replay.traces import Trace, TraceRequest

__all__ = [
    "ComputeModel",
    "Conversations",
    "ReplayReport",
    "ServiceModel",
    "Setting",
    "Trace",
    "TraceError",
    "TraceRequest",
    "load_tokenizer",
    "load_trace",
    "replay",
]
