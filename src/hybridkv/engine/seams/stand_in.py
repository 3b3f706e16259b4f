"""The cache object that models get. It passes keys and values on to pages, and always reports that there is no past.

Without a past every mixer takes its prefill branch, even for a single token, and calls the conv and scan functions that
`functions` replaces. Those read and write the pages of states themselves.
"""

from __future__ import annotations

from typing import Any

import torch
from transformers.cache_utils import Cache

from hybridkv.engine.seams import functions
from hybridkv.engine.seams.frame import current, sees_layers


class PagedCache(Cache):  # type: ignore[misc]
    """One object for all steps: the data is in the active frame."""

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
        """Llama 4 adds this to 0, 1, 2 ... to get the positions it scales queries by: return the matching offsets."""
        return 0 if layer_idx is None else current().shifts
