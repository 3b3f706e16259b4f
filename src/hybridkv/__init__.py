"""hybridkv: the KV cache of hybrid LLMs."""

from __future__ import annotations

TYPE_CHECKING = False  # typing is slow to import, and commands import this before they can be interrupted quietly
if TYPE_CHECKING:
    from typing import Any

    from hybridkv.engine import Engine, Prompt, Result, SamplingParams, Update
    from hybridkv.errors import (
        CacheError,
        ConfigError,
        CorruptObject,
        DiskError,
        EngineError,
        HybridKVError,
        InputError,
        MissingFieldError,
        MissingObject,
        ParallelismError,
        PlanError,
        ReplyError,
        RequestError,
        StoreError,
        StoreFault,
        StoreInputError,
        TraceError,
        UnknownFormat,
    )

__version__: str
__all__ = [
    "CacheError",
    "ConfigError",
    "CorruptObject",
    "DiskError",
    "Engine",
    "EngineError",
    "HybridKVError",
    "InputError",
    "MissingFieldError",
    "MissingObject",
    "ParallelismError",
    "PlanError",
    "Prompt",
    "ReplyError",
    "RequestError",
    "Result",
    "SamplingParams",
    "StoreError",
    "StoreFault",
    "StoreInputError",
    "TraceError",
    "UnknownFormat",
    "Update",
    "__version__",
]
_OF_ENGINE = ("Engine", "Prompt", "Result", "SamplingParams", "Update")


def __getattr__(name: str) -> Any:
    """Names are looked up when they are used: planning and replaying need no torch, and most need no version."""
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    if name == "__version__":
        from importlib.metadata import version

        return version("hybridkv")
    if name not in _OF_ENGINE:
        from hybridkv import errors

        return getattr(errors, name)
    try:
        from hybridkv import engine
    except ModuleNotFoundError as error:
        if error.name not in ("torch", "transformers"):
            raise
        raise ImportError(f"{name} needs {error.name}: pip install 'hybridkv[engine]'") from error
    return getattr(engine, name)
