"""Chat templates in the styles of published models, and a byte-level tokenizer that has one of them."""

from __future__ import annotations

import functools
from typing import Any

CHATML = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)

CHATML_DEFAULT_SYSTEM = (
    "{% if messages[0].role != 'system' %}<|im_start|>system\nYou are a helpful assistant.<|im_end|>\n{% endif %}"
    + CHATML
)
"""As Qwen2.5: a system message is written even if there is none."""

CHATML_TOOLS = (
    "{%- if tools %}<|im_start|>system\n{% if messages[0].role == 'system' %}{{ messages[0].content }}\n\n{% endif %}"
    "# Tools\n{% for tool in tools %}{{ tool | tojson }}\n{% endfor %}<|im_end|>\n"
    "{%- elif messages[0].role == 'system' %}<|im_start|>system\n{{ messages[0].content }}<|im_end|>\n{% endif %}"
    "{%- for message in messages %}"
    "{%- if message.role == 'tool' %}"
    "{% if loop.first or messages[loop.index0 - 1].role != 'tool' %}<|im_start|>user{% endif %}"
    "\n<tool_response>\n{{ message.content }}\n</tool_response>"
    "{% if loop.last or messages[loop.index0 + 1].role != 'tool' %}<|im_end|>\n{% endif %}"
    "{%- elif message.role != 'system' or not loop.first %}<|im_start|>{{ message.role }}\n{{ message.content }}"
    "{% for call in message.tool_calls or [] %}\n<tool_call>\n{{ call.function | tojson }}\n</tool_call>{% endfor %}"
    "<|im_end|>\n"
    "{%- endif %}{% endfor %}"
    "{%- if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
"""As Qwen's: results of tools are user messages, and those that follow each other are one."""

CHATML_THINKING = (
    "{%- set ns = namespace(last=-1) %}"
    "{%- for message in messages %}"
    "{% if message.role == 'user' and not message.content.startswith('<tool_response>') %}"
    "{% set ns.last = loop.index0 %}{% endif %}{% endfor %}"
    "{%- for message in messages %}<|im_start|>{{ message.role }}\n"
    "{%- if message.role == 'assistant' %}"
    "{%- set parts = message.content.split('</think>') %}"
    "{%- if loop.index0 > ns.last and (loop.last or parts | length > 1) %}\n<think>\n"
    "{{ parts[0].split('<think>')[-1].strip('\n') if parts | length > 1 else '' }}\n</think>\n\n"
    "{%- else %}\n{% endif %}{{ parts[-1].lstrip('\n') }}"
    "{%- else %}\n{{ message.content }}{% endif %}<|im_end|>\n{% endfor %}"
    "{%- if add_generation_prompt %}<|im_start|>assistant\n"
    "{%- if enable_thinking is defined and not enable_thinking %}\n<think>\n\n</think>\n\n{% else %}\n{% endif %}"
    "{% endif %}"
)
"""As Qwen3's: thoughts are left out of earlier replies, so that a reply is written differently when others follow."""

LLAMA_3 = (
    "{{ bos_token }}{% for message in messages %}<|start_header_id|>{{ message.role }}<|end_header_id|>\n\n"
    "{{ message.content | trim }}<|eot_id|>{% endfor %}"
    "{% if add_generation_prompt %}<|start_header_id|>assistant<|end_header_id|>\n\n{% endif %}"
)

LLAMA_3_1 = (
    "{{- bos_token }}{% if messages[0].role == 'system' %}{% set system = messages[0].content | trim %}"
    "{% set messages = messages[1:] %}{% else %}{% set system = '' %}{% endif %}"
    "<|start_header_id|>system<|end_header_id|>\n\nCutting Knowledge Date: December 2023\n"
    "Today Date: {{ date_string if date_string is defined else '26 Jul 2024' }}\n\n{{ system }}<|eot_id|>"
    "{% for message in messages %}<|start_header_id|>{{ 'ipython' if message.role == 'tool' else message.role }}"
    "<|end_header_id|>\n\n{{ message.content | trim }}<|eot_id|>{% endfor %}"
    "{% if add_generation_prompt %}<|start_header_id|>assistant<|end_header_id|>\n\n{% endif %}"
)
"""A system message with a date, whether there is one or not."""

GEMMA = (
    "{{ bos_token }}{% if messages[0].role == 'system' %}{% set first = messages[0].content + '\n\n' %}"
    "{% set messages = messages[1:] %}{% else %}{% set first = '' %}{% endif %}"
    "{% for message in messages %}"
    "{% if (message.role == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('Conversation roles must alternate user/assistant/user/assistant/...') }}{% endif %}"
    "<start_of_turn>{{ 'model' if message.role == 'assistant' else message.role }}\n"
    "{{ first if loop.first else '' }}{{ message.content | trim }}<end_of_turn>\n{% endfor %}"
    "{% if add_generation_prompt %}<start_of_turn>model\n{% endif %}"
)
"""The system message is the beginning of the first user message."""

MISTRAL = (
    "{{ bos_token }}{% for message in messages %}"
    "{% if (message.role == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('Conversation roles must alternate user/assistant/user/assistant/...') }}{% endif %}"
    "{% if message.role == 'user' %}[INST] {{ message.content }} [/INST]"
    "{% elif message.role == 'assistant' %} {{ message.content }}{{ eos_token }}"
    "{% else %}{{ raise_exception('Only user and assistant roles are supported!') }}{% endif %}{% endfor %}"
)
"""Replies have no beginning of their own."""

MISTRAL_LAST_SYSTEM = (
    "{%- if messages[0].role == 'system' %}{% set system = messages[0].content %}{% set messages = messages[1:] %}"
    "{%- else %}{% set system = '' %}{% endif %}{{ bos_token }}"
    "{%- for message in messages %}{% if message.role == 'user' %}[INST] "
    "{%- if loop.last and system %}{{ system }}\n\n{% endif %}{{ message.content }}[/INST]"
    "{%- else %} {{ message.content }}{{ eos_token }}{% endif %}{% endfor %}"
)
"""The system message is the beginning of the last user message."""

LLAMA_2 = (
    "{% if messages[0].role == 'system' %}{% set system = '<<SYS>>\n' + messages[0].content + '\n<</SYS>>\n\n' %}"
    "{% set messages = messages[1:] %}{% else %}{% set system = '' %}{% endif %}"
    "{% for message in messages %}{% if message.role == 'user' %}{{ bos_token }}[INST] "
    "{{ system if loop.first else '' }}{{ message.content | trim }} [/INST]"
    "{% else %} {{ message.content | trim }} {{ eos_token }}{% endif %}{% endfor %}"
)

DEEPSEEK = (
    "{{ bos_token }}{% for message in messages %}{% if message.role == 'system' %}{{ message.content }}"
    "{% elif message.role == 'user' %}<|User|>{{ message.content }}"
    "{% else %}<|Assistant|>{{ message.content }}<|end_of_sentence|>{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|Assistant|>{% endif %}"
)
"""User messages have no end of their own."""

HARMONY = (
    "{% for message in messages %}<|start|>{{ message.role }}"
    "{{ '<|channel|>final' if message.role == 'assistant' else '' }}<|message|>{{ message.content }}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|start|>assistant{% endif %}"
)
"""The model writes a part of what stands before a reply."""

PLAIN = "{% for message in messages %}{{ message.content }}\n{% endfor %}"
"""Nothing tells where a message ends."""

STYLES = {
    "chatml": CHATML,
    "chatml-default-system": CHATML_DEFAULT_SYSTEM,
    "chatml-tools": CHATML_TOOLS,
    "chatml-thinking": CHATML_THINKING,
    "llama-3": LLAMA_3,
    "llama-3.1": LLAMA_3_1,
    "gemma": GEMMA,
    "mistral": MISTRAL,
    "mistral-last-system": MISTRAL_LAST_SYSTEM,
    "llama-2": LLAMA_2,
    "deepseek": DEEPSEEK,
    "harmony": HARMONY,
}

_SPECIAL = [
    "<s>", "</s>", "<|im_start|>", "<|im_end|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>",
    "<start_of_turn>", "<end_of_turn>", "<|User|>", "<|Assistant|>", "<|end_of_sentence|>", "<|start|>", "<|message|>",
    "<|channel|>", "<|end|>",
]  # fmt: skip


@functools.cache
def tokenizer(template: str | None) -> Any:
    """Bytes and a few words as tokens; the marks of all styles above are special tokens."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=400,
        special_tokens=_SPECIAL,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    bpe.train_from_iterator(["What does the answer to the question of the user say about the weather?\n\n"], trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=bpe,
        bos_token="<s>",
        eos_token="</s>",
        additional_special_tokens=_SPECIAL[2:],
        chat_template=template,
        clean_up_tokenization_spaces=False,
    )
