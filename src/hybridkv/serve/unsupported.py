"""Unsupported fields that clients of OpenAI or vLLM may send.

Fields that would change the reply are refused by name; other unknown fields are ignored.
"""

from __future__ import annotations

from collections.abc import Container, Mapping

from hybridkv.errors import RequestError
from hybridkv.renamed import new_name

_FREE_TEXT = "replies are free text"
_NO_TOOLS = "tools are not called here"
_OTHER_SAMPLING = "use temperature, top_p, top_k and min_p"
_ALL_TOKENS = "tokens are chosen from all; use logit_bias"
_TEMPLATE = "pass what the chat template knows as chat_template_kwargs"
_NO_CHAT = "it is for /v1/chat/completions"
_NO_PROMPT = "it is for /v1/completions"
_UNSUPPORTED = {
    "allowed_token_ids": _ALL_TOKENS,
    "audio": "only text is served",
    "background": "send it again, or stream it",
    "bad_words": _ALL_TOKENS,
    "best_of": "use n, and choose among the replies yourself",
    "chat_template": "the model's own is used",
    "continuous_usage_stats": "use include_usage",
    "continue_final_message": "it is for messages",
    "conversation": "use previous_response_id",
    "documents": _TEMPLATE,
    "ebnf": _FREE_TEXT,
    "echo": _NO_PROMPT,
    "enable_thinking": _TEMPLATE,
    "function_call": _NO_TOOLS,
    "functions": _NO_TOOLS,
    "grammar": _FREE_TEXT,
    "guided_choice": _FREE_TEXT,
    "guided_grammar": _FREE_TEXT,
    "guided_json": _FREE_TEXT,
    "guided_regex": _FREE_TEXT,
    "input": "send messages to /v1/chat/completions, or a prompt to /v1/completions",
    "json_schema": _FREE_TEXT,
    "length_penalty": "there is no beam search",
    "logits_processors": "use logit_bias",
    "max_completion_tokens": "use max_tokens",
    "max_new_tokens": "use max_tokens",
    "messages": _NO_CHAT,
    "mirostat": _OTHER_SAMPLING,
    "modalities": "only text is served",
    "num_beams": "there is no beam search",
    "prediction": "predicted outputs are not supported",
    "prompt": _NO_PROMPT,
    "prompt_embeds": "send text or token ids",
    "prompt_logprobs": "only tokens that are generated have log probabilities",
    "reasoning": _TEMPLATE,
    "reasoning_effort": _TEMPLATE,
    "regex": _FREE_TEXT,
    "response_format": _FREE_TEXT,
    "return_tokens_as_token_ids": "use return_token_ids",
    "skip_special_tokens": "special tokens are left out of texts; return_token_ids shows them",
    "structured_outputs": _FREE_TEXT,
    "suffix": "only what follows a prompt can be generated",
    "thinking": _TEMPLATE,
    "tool_choice": _NO_TOOLS,
    "tools": _NO_TOOLS,
    "top_logprobs": _NO_CHAT,
    "truncate_prompt_tokens": "shorten the prompt yourself",
    "typical_p": _OTHER_SAMPLING,
    "use_beam_search": "use n, and choose among the replies yourself",
    "verbosity": _TEMPLATE,
    "web_search_options": _NO_TOOLS,
}
_HARMLESS: dict[str, tuple[object, ...]] = {
    "best_of": (1,),
    "function_call": ("none",),
    "length_penalty": (1,),
    "mirostat": (0,),
    "modalities": (["text"],),
    "num_beams": (1,),
    "response_format": ({"type": "text"},),
    "skip_special_tokens": (True,),
    "suffix": ("",),
    "tool_choice": ("none", "auto"),
    "top_logprobs": (0,),
    "typical_p": (1,),
    "verbosity": ("medium",),
}
"""Values of unsupported fields that have no effect and are accepted."""
_ON_BY_DEFAULT = frozenset(("skip_special_tokens",))
"""Fields that default to true, so that "false" is the value that has an effect."""


def check_extras(fields: Mapping[str, object], place: str = "", *, known: Container[str] = ()) -> None:
    """Refuse extra fields of a request, or of an object in it, that would change the reply. `known`: allowed fields."""
    for name, value in fields.items():
        new = new_name(name, known)
        if new is not None:
            raise RequestError(f"{place}{name} is now {new}: rename it", f"{place}{name}")
        if name in _UNSUPPORTED and _asks(name, value):
            message = f"{place}{name} is not supported: {_UNSUPPORTED[name]}; leave it out"
            raise RequestError(message, f"{place}{name}")


def _asks(name: str, value: object) -> bool:
    """Whether a field's value has an effect."""
    if value is None or value in _HARMLESS.get(name, ()):
        return False
    return name in _ON_BY_DEFAULT or not (value is False or value in ([], {}))
