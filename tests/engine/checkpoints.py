"""Tiny checkpoints on disk, as a user would have them: config, safetensors weights, tokenizer and chat template.

Everything is made in this process; nothing is downloaded.
"""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

from tests.engine.composites import build_composite
from tests.engine.zoo import VOCAB_SIZE, build

# The ids are those of the tiny configs; a chat message ends a reply.
SPECIAL_TOKENS = ["<pad>", "<s>", "<|im_end|>", "<|im_start|>"]
CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>' + '\\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
_SENTENCES = [
    "The user asks and the assistant answers.",
    "A state remembers what the window forgets.",
    "The system keeps the pages that the next request will read.",
    "user assistant system tool",
]


@functools.cache
def tokenizer() -> Any:
    """A byte-level tokenizer: any text goes in, and the same text comes out."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE,
        special_tokens=SPECIAL_TOKENS,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    bpe.train_from_iterator(_SENTENCES, trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=bpe,
        pad_token="<pad>",
        bos_token="<s>",
        eos_token="<|im_end|>",
        additional_special_tokens=["<|im_start|>"],
        chat_template=CHAT_TEMPLATE,
        clean_up_tokenization_spaces=False,
    )


def save_checkpoint(family: str, directory: Path, *, composite: bool = False, seed: int = 0) -> None:
    """Write the tiny model of a family, or the composite around it, and the tokenizer."""
    model = build_composite(family, seed) if composite else build(family, seed)
    model.save_pretrained(directory)
    tokenizer().save_pretrained(directory)
