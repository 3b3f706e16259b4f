"""Fields that clients of OpenAI or vLLM may send and that are not served.

Those that would change the answer are refused by name; others that are unknown are ignored.
"""

from __future__ import annotations

from collections.abc import Mapping

from hybridkv.errors import RequestError

_FREE_TEXT = "replies are free text"
_NO_TOOLS = "tools are not called here"
_ALL_TOKENS = "tokens are chosen from all; use logit_bias"
_TEMPLATE = "pass what the chat template knows as chat_template_kwargs"
_UNSUPPORTED = {
    "add_special_tokens": "send token ids to decide on every token yourself",
    "allowed_token_ids": _ALL_TOKENS,
    "audio": "only text is served",
    "bad_words": _ALL_TOKENS,
    "best_of": "use n, and choose among the replies yourself",
    "chat_template": "the model's own is used",
    "continue_final_message": "a chat ends with a message that is complete",
    "documents": _TEMPLATE,
    "function_call": _NO_TOOLS,
    "functions": _NO_TOOLS,
    "guided_choice": _FREE_TEXT,
    "guided_grammar": _FREE_TEXT,
    "guided_json": _FREE_TEXT,
    "guided_regex": _FREE_TEXT,
    "length_penalty": "there is no beam search",
    "logits_processors": "use logit_bias",
    "modalities": "only text is served",
    "prediction": "predicted outputs are not supported",
    "prompt_embeds": "send text or token ids",
    "prompt_logprobs": "only tokens that are generated have log probabilities",
    "reasoning_effort": _TEMPLATE,
    "response_format": _FREE_TEXT,
    "skip_special_tokens": "special tokens are left out of texts; return_token_ids shows them",
    "structured_outputs": _FREE_TEXT,
    "suffix": "only what follows a prompt can be generated",
    "tool_choice": _NO_TOOLS,
    "tools": _NO_TOOLS,
    "truncate_prompt_tokens": "shorten the prompt yourself",
    "use_beam_search": "use n, and choose among the replies yourself",
    "web_search_options": _NO_TOOLS,
}
_HARMLESS: dict[str, tuple[object, ...]] = {
    "add_special_tokens": (True,),
    "best_of": (1,),
    "length_penalty": (1,),
    "modalities": (["text"],),
    "response_format": ({"type": "text"},),
    "skip_special_tokens": (True,),
    "tool_choice": ("none",),
}
"""Values of unsupported fields that ask for nothing."""
_ON_BY_DEFAULT = frozenset(("add_special_tokens", "skip_special_tokens"))
"""Fields of which "false" asks for something."""
_NO_TEMPLATE_OPTIONS = frozenset(
    (
        "chat_template", "continue_final_message", "conversation", "max_length", "padding",
        "return_assistant_tokens_mask", "return_dict", "return_tensors", "sanitize_control_tokens",
        "tokenizer_kwargs", "truncation",
    )
)  # fmt: skip
"""What rendering itself has options for, and no template knows. One is a template: a program that need not end."""


def check_extras(fields: Mapping[str, object]) -> None:
    """Of a request: refuse what would change the answer."""
    for name, value in fields.items():
        if name in _UNSUPPORTED and _asks(name, value):
            raise RequestError(f"{name} is not supported: {_UNSUPPORTED[name]}; leave it out", name)


def check_template_options(options: Mapping[str, object]) -> None:
    """Refuse what a chat template would never see."""
    for name in options:
        if name in _NO_TEMPLATE_OPTIONS:
            message = f"chat_template_kwargs has {name}, which no template knows: leave it out"
            raise RequestError(message, "chat_template_kwargs")


def _asks(name: str, value: object) -> bool:
    """Whether a field asks for something."""
    if value is None or value in _HARMLESS.get(name, ()):
        return False
    return name in _ON_BY_DEFAULT or value not in ([], {}, False)
