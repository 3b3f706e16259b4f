"""Sampling parameters of a request: how tokens are chosen and when it ends. No torch, no model, no tokenizer.

Names and meanings are those of vLLM and OpenAI.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from hybridkv.errors import RequestError
from hybridkv.renamed import refuses_old_names
from hybridkv.texts import has_bytes, shown

MAX_N = 128
MAX_LOGPROBS = 64
MAX_STOPS = 16
MAX_STOP_CHARS = 256
MAX_STOP_TOKEN_IDS = 128
MAX_LOGIT_BIASES = 1024
MAX_TOKEN_ID = 2**31 - 1
MAX_TEMPERATURE = 10_000
GREEDY_BELOW = 1e-5
"""A smaller temperature is zero: dividing by it would overflow."""

_NUMBERS = (int, float, np.integer, np.floating)


@refuses_old_names
@dataclass(frozen=True, slots=True)
class SamplingParams:
    """Sampling parameters of one request. The constructor raises `RequestError` for the first bad value."""

    max_tokens: int | None = 128
    """Most tokens of the reply; None: up to the model's limit."""
    min_tokens: int = 0
    """Before this number of tokens only `max_tokens` can end the reply."""
    temperature: float = 1.0
    """0: always the likeliest token."""
    top_k: int = 0
    """Only the k likeliest tokens; 0 or -1: all."""
    top_p: float = 1.0
    """Only the likeliest tokens whose probabilities add up to top_p."""
    min_p: float = 0.0
    """Only tokens at least min_p times as likely as the likeliest."""
    presence_penalty: float = 0.0
    """Subtracted from the logit of every token in the output."""
    frequency_penalty: float = 0.0
    """Subtracted from the logit of every token in the output, once for each occurrence."""
    repetition_penalty: float = 1.0
    """For every token in the prompt or output: divides a positive logit, multiplies a negative one."""
    seed: int | None = None
    n: int = 1
    """Number of replies to the same prompt."""
    stop: str | Sequence[str] = ()
    """Texts that end the reply; stored as a tuple."""
    stop_token_ids: Sequence[int] = ()
    ignore_eos: bool = False
    logprobs: int | None = None
    """None: no logprobs; k: logprobs of the chosen token and of the k likeliest tokens."""
    logit_bias: Mapping[int, float] = field(default_factory=dict, hash=False)
    """Added to the logits of these tokens."""
    include_stop_str_in_output: bool = False
    hidden_layers: Sequence[int | str] = ()
    """Layers whose hidden states the result has: i is what enters layer i, -1 the last layer's output, "final" that
    after the final norm. Stored as a tuple."""
    hidden_tokens: str = "prompt"
    """Tokens whose hidden states the result has: "prompt", or "all" for the reply's too."""

    def __post_init__(self) -> None:
        _check_lengths(self)
        _check_distribution(self)
        stop = (self.stop,) if isinstance(self.stop, str) else _listed("stop", self.stop)
        ids = _listed("stop_token_ids", self.stop_token_ids)
        _check_ends(stop, ids)
        for name in ("ignore_eos", "include_stop_str_in_output"):
            if not isinstance(getattr(self, name), bool):
                raise _refuse(name, getattr(self, name), "pass true or false")
        layers = _listed("hidden_layers", self.hidden_layers)
        _check_hidden(layers, self.hidden_tokens)
        object.__setattr__(self, "hidden_layers", layers)
        object.__setattr__(self, "stop", stop)
        object.__setattr__(self, "stop_token_ids", ids)
        object.__setattr__(self, "logit_bias", _checked_bias(self.logit_bias))

    @property
    def greedy(self) -> bool:
        return self.temperature < GREEDY_BELOW

    @property
    def needs_penalties(self) -> bool:
        """Whether some logits depend on earlier tokens."""
        return self.repetition_penalty != 1 or self.presence_penalty != 0 or self.frequency_penalty != 0

    @property
    def stops(self) -> tuple[str, ...]:
        """`stop`, typed as the tuple that the constructor makes of it."""
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop)

    def ends(self, eos_token_ids: Iterable[int]) -> frozenset[int]:
        """The token ids that end a reply, given the model's EOS ids."""
        return frozenset(self.stop_token_ids) | (frozenset() if self.ignore_eos else frozenset(eos_token_ids))

    def check_vocab(self, vocab_size: int) -> None:
        """Refuse token ids that the model does not have."""
        for name, ids in (("logit_bias", self.logit_bias), ("stop_token_ids", self.stop_token_ids)):
            for token in ids:
                if token >= vocab_size:
                    way_out = f"this model's tokens are 0 to {vocab_size - 1}"
                    raise _refuse(name, token, way_out, called=f"a token of {name}")


def _check_lengths(params: SamplingParams) -> None:
    if params.max_tokens is not None:
        _check_int("max_tokens", params.max_tokens, 1, MAX_TOKEN_ID, "or none for the model's limit")
    _check_int("min_tokens", params.min_tokens, 0, MAX_TOKEN_ID)
    if params.max_tokens is not None and params.min_tokens > params.max_tokens:
        raise _refuse("min_tokens", params.min_tokens, f"pass at most max_tokens, which is {params.max_tokens}")
    _check_int("n", params.n, 1, MAX_N, "send more requests for more replies")
    if params.logprobs is not None:
        _check_int("logprobs", params.logprobs, 0, MAX_LOGPROBS)


def _check_distribution(params: SamplingParams) -> None:
    _check_number("temperature", params.temperature, 0, MAX_TEMPERATURE, "0 is greedy")
    _check_int("top_k", params.top_k, -1, MAX_TOKEN_ID, "0 or -1 for all tokens")
    _check_number("top_p", params.top_p, 0, 1, "1 for all tokens")
    if params.top_p == 0:
        raise _refuse("top_p", params.top_p, "pass more than 0 and at most 1; temperature 0 is greedy")
    _check_number("min_p", params.min_p, 0, 1, "0 for all tokens")
    _check_number("presence_penalty", params.presence_penalty, -2, 2)
    _check_number("frequency_penalty", params.frequency_penalty, -2, 2)
    _check_number("repetition_penalty", params.repetition_penalty, 0.01, 100, "1 for none")
    if params.seed is not None:
        _check_int("seed", params.seed, -(2**63), 2**64 - 1)


def _check_ends(stop: tuple[object, ...], ids: tuple[object, ...]) -> None:
    if len(stop) > MAX_STOPS:
        raise RequestError(f"stop has {len(stop)} texts: pass at most {MAX_STOPS}", "stop")
    for text in stop:
        if not isinstance(text, str) or not 1 <= len(text) <= MAX_STOP_CHARS or not has_bytes(text):
            raise _refuse("stop", text, f"pass texts of 1 to {MAX_STOP_CHARS} whole characters")
    if len(ids) > MAX_STOP_TOKEN_IDS:
        message = f"stop_token_ids has {len(ids)} ids: pass at most {MAX_STOP_TOKEN_IDS}"
        raise RequestError(message, "stop_token_ids")
    for token in ids:
        _check_int("stop_token_ids", token, 0, MAX_TOKEN_ID, called="a token of stop_token_ids")


def _check_hidden(layers: tuple[object, ...], tokens: object) -> None:
    for layer in layers:
        if isinstance(layer, bool) or not (isinstance(layer, int) or layer == "final"):
            raise _refuse("hidden_layers", layer, "pass whole numbers, or 'final'", called="a layer of hidden_layers")
    if tokens not in ("prompt", "all"):
        raise _refuse("hidden_tokens", tokens, "pass 'prompt' or 'all'")


def _checked_bias(bias: object) -> dict[int, float]:
    if bias is None:
        return {}
    if not isinstance(bias, Mapping):
        raise _refuse("logit_bias", bias, "pass a mapping from token ids to numbers")
    if len(bias) > MAX_LOGIT_BIASES:
        raise RequestError(f"logit_bias has {len(bias)} tokens: pass at most {MAX_LOGIT_BIASES}", "logit_bias")
    for token, value in bias.items():
        _check_int("logit_bias", token, 0, MAX_TOKEN_ID, called="a token of logit_bias")
        _check_number("logit_bias", value, -100, 100, called=f"logit_bias of token {token}")
    return {token: float(value) for token, value in bias.items()}


def _listed(name: str, values: object) -> tuple[object, ...]:
    """The values as a tuple. None, the default in other APIs, gives an empty one."""
    if values is None:
        return ()
    if isinstance(values, (bytes, str)) or not isinstance(values, Iterable):
        raise _refuse(name, values, "pass a list")
    return tuple(values)


def _check_int(name: str, value: object, low: int, high: int, hint: str = "", *, called: str = "") -> None:
    if isinstance(value, bool) or not isinstance(value, (int, np.integer)) or not low <= value <= high:
        raise _refuse(name, value, f"pass a whole number from {low} to {high}{hint and ', ' + hint}", called=called)


def _check_number(name: str, value: object, low: float, high: float, hint: str = "", *, called: str = "") -> None:
    # NaN fails the range check.
    if isinstance(value, bool) or not isinstance(value, _NUMBERS) or not low <= value <= high:
        raise _refuse(name, value, f"pass a number from {low} to {high}{hint and ', ' + hint}", called=called)


def _refuse(name: str, value: object, way_out: str, *, called: str = "") -> RequestError:
    """`called`: the part of the parameter that is wrong, if not all of it."""
    return RequestError(f"{called or name} is {shown(value)}: {way_out}", name)
