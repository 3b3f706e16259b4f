"""Request bodies in OpenAI's format, and their conversion to prompts and sampling parameters."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated, Any, ClassVar, NamedTuple

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, WithJsonSchema

from hybridkv.engine import Engine, Prompt, SamplingParams
from hybridkv.engine.batches import as_list
from hybridkv.engine.sampling.params import (
    MAX_LOGIT_BIASES,
    MAX_LOGPROBS,
    MAX_N,
    MAX_STOPS,
    MAX_TEMPERATURE,
    MAX_TOKEN_ID,
)
from hybridkv.errors import RequestError
from hybridkv.link import params as transfer_params
from hybridkv.serve.cache_fields import CacheFields
from hybridkv.serve.hidden_request import HiddenStatesField
from hybridkv.serve.messages import MAX_BREAKPOINTS, ChatPrompt
from hybridkv.serve.unsupported import check_extras

MAX_PROMPTS = 128
COMPLETION_TOKENS = 16
"""Default of `max_tokens` in `/v1/completions`, as in OpenAI's API."""
EITHER = {
    "prompt": f"pass a text, token ids (0 to {MAX_TOKEN_ID}), or a list of 1 to {MAX_PROMPTS} of either, not mixed",
    "stop": f"pass a text, or a list of at most {MAX_STOPS}",
    "content": "pass a text, or a list of parts of type text",
    "system": "pass a text, or a list of blocks of type text",
}
"""Descriptions of fields that accept several types, for errors: pydantic has an error for each type it tried."""

TokenId = Annotated[int, Field(ge=0, le=MAX_TOKEN_ID)]
TokenIds = Annotated[list[TokenId], Field(fail_fast=True)]
"""Validation stops at the first bad id: there may be millions."""


def _few_biases(value: object) -> object:
    """Check the number of biases before their values: each bad value costs an error message."""
    if isinstance(value, dict) and len(value) > MAX_LOGIT_BIASES:
        raise ValueError(f"{len(value)} tokens: pass at most {MAX_LOGIT_BIASES}")
    return value


class Asked(NamedTuple):
    """Prompts, and the texts that replies begin with, if any."""

    prompts: list[Prompt]
    echoes: Sequence[str] = ()
    conversation: Sequence[Mapping[str, Any]] | None = None
    """Messages to keep with the reply, for requests that go on with it."""


class StreamOptions(BaseModel):
    model_config = ConfigDict(extra="allow", strict=True)

    include_usage: bool | None = None


class _SampledRequest(BaseModel):
    """Fields common to completion and chat requests."""

    model_config = ConfigDict(extra="allow", strict=True)

    model: str | None = Field(None, description="The served model's name, or an adapter's; may be left out.")
    n: int | None = Field(None, ge=1, le=MAX_N, description="Replies to the same prompt.")
    temperature: float | None = Field(None, ge=0, le=MAX_TEMPERATURE, description="0: always the likeliest token.")
    top_p: float | None = Field(None, gt=0, le=1)
    top_k: int | None = Field(None, ge=-1, le=MAX_TOKEN_ID, description="0 or -1: all tokens.")
    min_p: float | None = Field(None, ge=0, le=1)
    presence_penalty: float | None = Field(None, ge=-2, le=2)
    frequency_penalty: float | None = Field(None, ge=-2, le=2)
    repetition_penalty: float | None = Field(None, ge=0.01, le=100)
    seed: int | None = Field(None, ge=-(2**63), le=2**64 - 1)
    stop: str | Annotated[list[str], Field(max_length=MAX_STOPS)] | None = None
    stop_token_ids: TokenIds | None = None
    ignore_eos: bool | None = None
    min_tokens: int | None = Field(None, ge=0, le=MAX_TOKEN_ID)
    logit_bias: Annotated[dict[str, float], BeforeValidator(_few_biases)] | None = Field(
        None, description="By token id, as text: JSON has no other keys."
    )
    include_stop_str_in_output: bool | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    cache_salt: str | None = Field(
        None, max_length=1024, description="Requests with different salts never share anything in the cache."
    )
    breakpoints: TokenIds | None = Field(
        None, max_length=MAX_BREAKPOINTS, description="Tokens of the prompt after which others may go on differently."
    )
    kv_transfer_params: Annotated[dict[str, Any], WithJsonSchema(transfer_params.SCHEMA)] | None = Field(
        None, description="As vLLM's: keep the prompt for a decode worker, or fetch it from a prefill worker."
    )
    return_token_ids: bool | None = Field(None, description="Add the token ids of prompts and replies.")
    hidden_states: HiddenStatesField = Field(
        None, description="Write hidden states of these layers to a file; the reply has its path. true: the default's."
    )

    repeated: ClassVar[None] = None

    @property
    def wants_usage(self) -> bool:
        """Whether a stream ends with a usage piece."""
        return self.stream_options is not None and bool(self.stream_options.include_usage)

    def refuse_unsupported(self) -> None:
        extras = dict(self.model_extra or {})
        if (self.kv_transfer_params or {}).get("do_remote_decode"):
            extras.pop("max_completion_tokens", None)  # proxies send it to both endpoints, and it is 1
        check_extras(extras, known=type(self).model_fields)
        if self.stream_options is None:
            return
        if not self.stream:
            message = "stream_options without stream: they are for streams; set stream, or leave them out"
            raise RequestError(message, "stream_options")
        check_extras(self.stream_options.model_extra or {}, "stream_options.")

    def sampling(self, max_tokens: int | None, logprobs: int | None) -> SamplingParams:
        given = {
            "n": self.n,
            "temperature": self.temperature,
            "top_p": self.top_p,
            "top_k": self.top_k,
            "min_p": self.min_p,
            "presence_penalty": self.presence_penalty,
            "frequency_penalty": self.frequency_penalty,
            "repetition_penalty": self.repetition_penalty,
            "seed": self.seed,
            "stop": self.stop,
            "stop_token_ids": self.stop_token_ids,
            "ignore_eos": self.ignore_eos,
            "min_tokens": self.min_tokens,
            "logit_bias": _biases(self.logit_bias),
            "include_stop_str_in_output": self.include_stop_str_in_output,
        }
        named: dict[str, Any] = {name: value for name, value in given.items() if value is not None}
        return SamplingParams(max_tokens=max_tokens, logprobs=logprobs, **named)

    def with_breakpoints(self, prompt: Prompt) -> Prompt:
        if not self.breakpoints:
            return prompt
        return Prompt(prompt.ids, sorted({*prompt.breakpoints, *self.breakpoints}), dict(prompt.lifetimes))


class CompletionRequest(_SampledRequest, CacheFields):
    """Body of `/v1/completions`."""

    source: ClassVar[str] = "prompt"
    """The field that holds the prompts."""
    prompt: (
        str
        | Annotated[list[TokenId], Field(min_length=1, fail_fast=True)]
        | Annotated[list[str], Field(min_length=1, max_length=MAX_PROMPTS, fail_fast=True)]
        | Annotated[list[TokenIds], Field(min_length=1, max_length=MAX_PROMPTS, fail_fast=True)]
    ) = Field(description="One text, several, one list of token ids, or several.")
    max_tokens: int | None = Field(None, ge=1, le=MAX_TOKEN_ID, description=f"Default: {COMPLETION_TOKENS}.")
    logprobs: int | None = Field(None, ge=0, le=MAX_LOGPROBS)
    echo: bool | None = Field(None, description="Begin the text with the prompt's.")
    add_special_tokens: bool | None = Field(
        None, description="Of a text: add those that the tokenizer puts around it. Default: true."
    )

    @property
    def num_prompts(self) -> int:
        return len(as_list(self.prompt))

    def params(self) -> SamplingParams:
        self.refuse_unsupported()
        if self.echo and self.logprobs is not None:
            message = "echo with logprobs: only tokens that are generated have them; leave one of both out"
            raise RequestError(message, "echo")
        return self.sampling(COMPLETION_TOKENS if self.max_tokens is None else self.max_tokens, self.logprobs)

    def prepare(self, engine: Engine) -> Asked:
        texts = as_list(self.prompt)
        adds = self.add_special_tokens is not False
        plain = [self.with_breakpoints(engine.prepare(one, add_special_tokens=adds)) for one in texts]
        prompts = [self.with_lifetimes(one) for one in plain]
        if not self.echo:
            return Asked(prompts)
        pairs = zip(texts, prompts, strict=True)
        return Asked(prompts, [text if isinstance(text, str) else engine.detokenize(p) for text, p in pairs])


class ChatRequest(_SampledRequest, CacheFields, ChatPrompt):
    """Body of `/v1/chat/completions`."""

    num_prompts: ClassVar[int] = 1
    max_tokens: int | None = Field(None, ge=1, le=MAX_TOKEN_ID, description="The older name of max_completion_tokens.")
    max_completion_tokens: int | None = Field(None, ge=1, le=MAX_TOKEN_ID, description="Default: the model's limit.")
    logprobs: bool | None = None
    top_logprobs: int | None = Field(None, ge=0, le=MAX_LOGPROBS)

    def params(self) -> SamplingParams:
        self.refuse_unsupported()
        if self.top_logprobs and not self.logprobs:
            message = "top_logprobs without logprobs: set logprobs to true, or leave it out"
            raise RequestError(message, "top_logprobs")
        max_tokens = self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens
        return self.sampling(max_tokens, (self.top_logprobs or 0) if self.logprobs else None)

    def prepare(self, engine: Engine) -> Asked:
        prompt = self.with_breakpoints(self.render(engine, has_ends=self.has_ends))
        return Asked([self.with_lifetimes(prompt)])


def _biases(biases: Mapping[str, float] | None) -> dict[int, float] | None:
    if biases is None:
        return None
    for token in biases:
        if not token.isascii() or not token.isdigit() or len(token) > 10 or token != str(int(token)):
            message = f'logit_bias of {token[:80]!r}: name tokens by their ids, such as "42"'
            raise RequestError(message, "logit_bias")
    return {int(token): value for token, value in biases.items()}
