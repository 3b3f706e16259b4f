"""The stock model as torch computes it, whichever packages of kernels are installed.

transformers' models take the kernels of flash-linear-attention, causal-conv1d and mamba-ssm where these can be
imported. They run on a GPU only, and round differently: neither suits an oracle.
"""

from __future__ import annotations

import inspect
import sys
from types import ModuleType
from typing import Any

from hybridkv.engine.seams import patches


def by_torch(model: Any) -> Any:
    """Name torch's functions in the modeling files of a model, and return the model."""
    for module in {sys.modules[type(part).__module__] for part in model.modules()}:
        _name_torch_functions(module)
    return model


def _name_torch_functions(module: ModuleType) -> None:
    was_patched = False
    for name, function in list(vars(module).items()):
        stock = getattr(function, "hybridkv_stock", function)
        plain = inspect.unwrap(stock) if inspect.isfunction(stock) else stock
        if plain is not stock and plain.__module__ == module.__name__:
            was_patched |= stock is not function
            setattr(module, name, plain)
    if was_patched:
        patches._patch(module)
