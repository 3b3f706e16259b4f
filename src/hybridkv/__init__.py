"""hybridkv: the KV cache of hybrid LLMs."""

from __future__ import annotations

from importlib.metadata import version
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from hybridkv.engine import Engine, Prompt, Result, SamplingParams, Update

__version__ = version("hybridkv")
__all__ = ["Engine", "Prompt", "Result", "SamplingParams", "Update", "__version__"]


def __getattr__(name: str) -> Any:
    """The engine's names are looked up when they are used: planning and replaying need no torch."""
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    try:
        from hybridkv import engine
    except ModuleNotFoundError as error:
        if error.name not in ("torch", "transformers"):
            raise
        raise ImportError(f"{name} needs {error.name}: pip install 'hybridkv[engine]'") from error
    return getattr(engine, name)
