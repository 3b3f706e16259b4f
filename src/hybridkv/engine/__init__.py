"""Continuous batching for stock Hugging Face models: requests, scheduler, runner, sampler."""

from hybridkv.engine.chat import render_chat
from hybridkv.engine.engine import Engine
from hybridkv.engine.inspection.inspection import Inspection
from hybridkv.engine.inspection.record import RequestRecord
from hybridkv.engine.loading.families import SUPPORTED
from hybridkv.engine.prompts import Prompt
from hybridkv.engine.results import Completion, Metrics, Result, Update
from hybridkv.engine.runner import LayerObserver
from hybridkv.engine.sampling.params import SamplingParams
from hybridkv.engine.sampling.sampler import TokenLogprobs
from hybridkv.engine.stats import EngineStats, MemoryUse
from hybridkv.errors import EngineError

__all__ = [
    "SUPPORTED",
    "Completion",
    "Engine",
    "EngineError",
    "EngineStats",
    "Inspection",
    "LayerObserver",
    "MemoryUse",
    "Metrics",
    "Prompt",
    "RequestRecord",
    "Result",
    "SamplingParams",
    "TokenLogprobs",
    "Update",
    "render_chat",
]
