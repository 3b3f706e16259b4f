"""Limits of an engine: token ids of the model's vocabulary, and lengths that the model and the memory allow."""

from __future__ import annotations

from functools import lru_cache

from hybridkv.cache import CacheLayout, longest_fit
from hybridkv.engine.prompts import Ids, Prompt
from hybridkv.engine.sampling.params import SamplingParams
from hybridkv.engine.taps import Tapped, resolve
from hybridkv.errors import RequestError
from hybridkv.texts import has_bytes, shown

_LONGEST_REQUEST_ID = 256


class Limits:
    """Limits of one engine. Immutable: may be used on any thread."""

    def __init__(
        self, layout: CacheLayout, vocab_size: int, max_model_len: int, num_layers: int, *, has_tokenizer: bool
    ) -> None:
        self.max_model_len = longest_fit(layout, max_model_len - 1) + 1
        """Most tokens of a prompt and its reply together. The last token is never computed."""
        self.is_short_of_memory = self.max_model_len < max_model_len
        """Whether more memory would raise `max_model_len`."""
        self._vocab_size = vocab_size
        self._num_layers = num_layers
        self._layout = layout
        self._has_tokenizer = has_tokenizer

    def check(self, prompt: Prompt, params: SamplingParams) -> None:
        """Refuse a request that can never be served. May be called on any thread. Does not scan the tokens."""
        params.check_vocab(self._vocab_size)
        self.check_ids(prompt.ids, "prompt")
        if not prompt.num_tokens:
            raise RequestError("the prompt is empty: give it at least one token", "prompt")
        self.check_length(prompt.num_tokens)
        if params.hidden_layers:
            self._check_taps(prompt.num_tokens, len(self.tapped(params).numbers))
        if params.stops and not self._has_tokenizer:
            raise RequestError(f"stop text {params.stops[0]!r} without a tokenizer: use stop_token_ids", "stop")

    def tapped(self, params: SamplingParams) -> Tapped:
        """The layers whose hidden states are asked for."""
        return resolve(params.hidden_layers, self._num_layers)

    def max_len(self, params: SamplingParams) -> int:
        """Most tokens of a prompt and its reply, for a request with these parameters."""
        if params.hidden_layers and params.hidden_tokens == "all":
            return self._longest(len(params.hidden_layers)) + 1
        return self.max_model_len

    def _check_taps(self, num_tokens: int, num_taps: int) -> None:
        longest = self._longest(num_taps)
        if not self._layout.tap_groups:
            message = "hidden states do not fit into a cache this small: give the engine more memory"
            raise RequestError(message, "hidden_layers")
        if num_tokens > longest:
            raise RequestError(
                f"a prompt of {num_tokens} tokens with hidden states of {num_taps} layers: {longest} tokens of them "
                f"fit into the cache; shorten it, ask for fewer layers, or give the engine more memory",
                "hidden_layers",
            )

    def _longest(self, num_taps: int) -> int:
        """Most tokens whose hidden states of `num_taps` layers fit."""
        return _longest_fit(self._layout, self.max_model_len - 1, num_taps)

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

    def check_ids(self, ids: Ids, param: str | None = None) -> None:
        """Refuse ids that the model does not have. `param`: the parameter to name in the error."""
        if ids.lowest < 0 or ids.highest >= self._vocab_size:
            bad = ids.lowest if ids.lowest < 0 else ids.highest
            raise RequestError(f"token id {bad}: the model's ids go from 0 to {self._vocab_size - 1}", param)


_longest_fit = lru_cache(maxsize=256)(longest_fit)


def check_request_id(request_id: object) -> None:
    """Refuse names of requests that records and replies could not have. None is for a name of the engine's."""
    if request_id is None:
        return
    if not isinstance(request_id, str) or not 1 <= len(request_id) <= _LONGEST_REQUEST_ID or not has_bytes(request_id):
        way_out = f"pass a text of 1 to {_LONGEST_REQUEST_ID} whole characters"
        raise RequestError(f"request_id is {shown(request_id)}: {way_out}", "request_id")
