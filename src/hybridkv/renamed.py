"""Options that were renamed to vLLM's names. Python, the command line and the server refuse the old names."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Container, Iterable
from functools import wraps
from typing import Any, TypeVar

RENAMED = {
    "block_tokens": "block_size",
    "drain_s": "shutdown_timeout",
    "include_stop_in_text": "include_stop_str_in_output",
    "kv_dtype": "kv_cache_dtype",
    "max_len": "max_model_len",
    "max_length": "max_model_len",
    "max_running": "max_num_seqs",
    "max_step_tokens": "max_num_batched_tokens",
    "model_name": "served_model_name",
    "name": "served_model_name",
    "params": "sampling_params",
    "salt": "cache_salt",
    "system": "system_prompt",
    "template_options": "chat_template_kwargs",
    "tp": "tensor_parallel_size",
}
"""New names by old names."""

C = TypeVar("C", bound=Callable[..., Any])


def new_name(name: str, known: Container[str]) -> str | None:
    """The new name of an option; None if it was not renamed. `known`: the valid options; the new name must be one."""
    new = RENAMED.get(name)
    return new if new is not None and new in known and name not in known else None


def new_flag(flag: str, known: Iterable[str]) -> str | None:
    """`new_name` for command-line flags, which have dashes."""
    new = new_name(flag.replace("-", "_"), {name.replace("-", "_") for name in known})
    return new.replace("_", "-") if new is not None else None


def refuses_old_names(function: C) -> C:
    """Decorator of functions and classes: an old name among keyword arguments raises TypeError with the new name."""
    called: Callable[..., Any] = vars(function)["__init__"] if isinstance(function, type) else function
    known = inspect.signature(called).parameters

    @wraps(called)
    def checked(*args: Any, **options: Any) -> Any:
        for name in options:
            new = new_name(name, known)
            if new is not None:
                raise TypeError(f"{name} is now {new}")
        return called(*args, **options)

    if isinstance(function, type):
        function.__init__ = checked  # type: ignore[misc]
        return function
    return checked  # type: ignore[return-value]
