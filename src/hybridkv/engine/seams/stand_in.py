"""What a model believes to be its cache. It hands keys and values on to pages, and always denies having a past.

Told that there is none, every mixer takes its one prefill branch, even for a single token, and calls the conv and scan
functions that `functions` stands in for: those read and write the states' pages themselves.
"""

from __future__ import annotations

from typing import Any

import torch
from transformers.cache_utils import Cache

from hybridkv.engine.seams import functions
from hybridkv.engine.seams.frame import current, sees_layers


class PagedCache(Cache):  # type: ignore[misc]
    """One for all steps: what it stands for is in the active frame."""

    def __init__(self) -> None:
        super().__init__(layers=[])

    def update(
        self, key: torch.Tensor, value: torch.Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        if sees_layers():
            current().attention_layer = layer_idx
        return functions.keep(key, value)

    def update_conv_state(self, conv_states: torch.Tensor, layer_idx: int, *args: Any, **kwargs: Any) -> torch.Tensor:
        if sees_layers():
            current().state_layer = layer_idx
        return conv_states

    def update_recurrent_state(self, states: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        return states

    def get_conv_state(self, *args: Any, **kwargs: Any) -> None:
        return None

    def get_recurrent_state(self, *args: Any, **kwargs: Any) -> None:
        return None

    def has_previous_state(self, *args: Any, **kwargs: Any) -> bool:
        return False

    def is_recording_past(self, *args: Any, **kwargs: Any) -> bool:
        return False

    def get_seq_length(self, layer_idx: int | None = None) -> Any:
        """Llama 4 adds this to 0, 1, 2 ... to scale queries by their positions: give it what makes that true."""
        return 0 if layer_idx is None else current().shifts
