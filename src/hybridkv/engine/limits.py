"""What an engine can serve at all: ids that the model has, and lengths that the model and the memory have room for."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from hybridkv.cache import CacheLayout, longest_fit
from hybridkv.cache.tokens import TokenIds, pack_tokens
from hybridkv.engine.params import SamplingParams
from hybridkv.errors import HybridKVError, RequestError


class Limits:
    """Of one engine. Nothing in it changes: may be asked on any thread."""

    def __init__(self, layout: CacheLayout, vocab_size: int, max_model_len: int, *, has_tokenizer: bool) -> None:
        self.max_model_len = longest_fit(layout, max_model_len - 1) + 1
        """Tokens of a prompt and its reply together. The last one is never computed."""
        self.is_short_of_memory = self.max_model_len < max_model_len
        """More would be possible with more memory."""
        self._vocab_size = vocab_size
        self._has_tokenizer = has_tokenizer

    def check(self, prompt: TokenIds, params: SamplingParams) -> None:
        """Refuse what can never be served. Changes nothing: may be called on any thread."""
        params.check_vocab(self._vocab_size)
        ids = self.check_ids(prompt, "prompt")
        if not len(ids):
            raise RequestError("the prompt is empty: give it at least one token", "prompt")
        self.check_length(len(ids))
        if params.stops and not self._has_tokenizer:
            raise RequestError(f"stop text {params.stops[0]!r} without a tokenizer: use stop_token_ids", "stop")

    def check_length(self, num_tokens: int) -> None:
        """Refuse a prompt that leaves no room for a reply."""
        if num_tokens < self.max_model_len:
            return
        way_out = "; shorten it"
        if self.is_short_of_memory:
            way_out = ", which is all that fits into the cache; shorten it, or give the engine more memory"
        raise RequestError(
            f"a prompt of {num_tokens} tokens: with its reply it must stay within {self.max_model_len}{way_out}"
        )

    def check_ids(self, token_ids: TokenIds, param: str | None = None) -> npt.NDArray[np.int32]:
        """The ids; refuses those that the model does not have. `param`: the parameter that they are."""
        try:
            ids = np.frombuffer(pack_tokens(token_ids), dtype=np.int32)
        except HybridKVError as error:
            raise RequestError(str(error), param) from None
        low, high = int(ids.min(initial=0)), int(ids.max(initial=0))
        if low < 0 or high >= self._vocab_size:
            bad = low if low < 0 else high
            raise RequestError(f"token id {bad}: the model's ids go from 0 to {self._vocab_size - 1}", param)
        if not isinstance(token_ids, (bytes, bytearray, np.ndarray)):  # those have ids of one type
            few = np.flatnonzero(ids < 2).tolist()  # booleans are packed as 0 or 1: only those need a look
            position = next((position for position in few if type(token_ids[position]) is bool), None)
            if position is not None:
                what = f"token id {token_ids[position]} at position {position}"
                raise RequestError(f"{what}: a boolean is no id; pass whole numbers", param)
        return ids
