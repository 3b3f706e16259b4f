"""The demo model's tokenizer, and rows of tokens to train on."""

from __future__ import annotations

import lzma
import os
import random
import re
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from chat import conversation
from skills import SKILLS, Material, Message

VOCABULARY = 4096
END_OF_TEXT, MESSAGE_START, MESSAGE_END = "<|endoftext|>", "<|im_start|>", "<|im_end|>"
CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>' + '\\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
MODEL_MAX_TOKENS = 8192
_CHARS_PER_TOKEN = 3.0  # a little below what it is, so that a conversation made for some room fits


def read_corpus(directory: Path) -> list[str]:
    """The documents of all shards that `corpus.py` wrote."""
    shards = sorted(directory.glob("corpus-*.xz"))
    if not shards:
        raise SystemExit(f"no corpus-*.xz in {directory}: run corpus.py {directory} first")
    texts = (lzma.decompress(shard.read_bytes()).decode() for shard in shards)
    return [document.strip() for text in texts for document in text.split("\n\0\n") if document.strip()]


def make_material(documents: Sequence[str]) -> Material:
    """Paragraphs of a few sentences, and words that are neither rare nor glue."""
    paragraphs = [p for document in documents for p in re.split(r"\n+", document) if 80 < len(p) < 900]
    counts = Counter(word for p in paragraphs[:60_000] for word in re.findall(r"\b[a-z]{4,9}\b", p))
    return Material([word for word, n in sorted(counts.items()) if n >= 12], paragraphs)


def train_tokenizer(documents: Sequence[str], seed: int) -> Any:
    """Byte-level BPE with single digits: any text goes in, and the same text comes out."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    rng, material = random.Random(seed), make_material(documents)

    def texts() -> Iterable[str]:
        yield from rng.sample(list(documents), min(len(documents), 3000))
        for _ in range(20_000):
            yield "\n".join(message["content"] for message in conversation(rng))
        for _ in range(4_000):
            yield "\n".join(
                message["content"] for message in rng.choice(list(SKILLS.values()))(rng, material, 300, False)
            )

    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    bpe.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        special_tokens=[END_OF_TEXT, MESSAGE_START, MESSAGE_END],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    bpe.train_from_iterator(texts(), trainer)
    return bpe


def save_tokenizer(bpe: Any, directory: Path) -> None:
    from transformers import PreTrainedTokenizerFast

    PreTrainedTokenizerFast(
        tokenizer_object=bpe,
        pad_token=END_OF_TEXT,
        eos_token=MESSAGE_END,
        additional_special_tokens=[MESSAGE_START],
        chat_template=CHAT_TEMPLATE,
        clean_up_tokenization_spaces=False,
        model_max_length=MODEL_MAX_TOKENS,
    ).save_pretrained(directory)


@dataclass(frozen=True)
class Stage:
    """Rows of one length. `mix`: shares of the kinds of rows."""

    until: float  # share of all steps
    tokens: int
    mix: dict[str, float]


STAGES = (
    Stage(0.04, 1024, {"copy": 0.35, "text": 0.15, "chat": 0.15, "skill": 0.35}),
    Stage(0.45, 1024, {"copy": 0.02, "text": 0.28, "chat": 0.25, "skill": 0.45}),
    Stage(0.88, 2048, {"copy": 0.02, "text": 0.25, "chat": 0.25, "skill": 0.48}),
    Stage(1.00, 4096, {"copy": 0.02, "text": 0.15, "chat": 0.28, "skill": 0.55}),
)
NEXT_STAGES = (
    Stage(0.75, 1024, {"copy": 0.02, "text": 0.15, "chat": 0.25, "skill": 0.58}),
    Stage(1.00, 4096, {"copy": 0.02, "text": 0.13, "chat": 0.25, "skill": 0.60}),
)
"""For a model that copies already: more questions and less text."""
SKILL_SHARES = {"recall": 0.32, "lookup": 0.04, "document": 0.27, "repeat": 0.22, "count": 0.15}

# How much a token counts in the loss. What a user writes is hard to guess and need not be learned.
TEXT, PROMPT, CHAT, EXACT = 40, 8, 100, 200


@dataclass
class Rows:
    """Makes batches. The same seed and step give the same batch, whichever process makes it."""

    bpe: Any
    documents: Sequence[str]
    seed: int
    batch_tokens: int
    total_steps: int
    stages: Sequence[Stage] = STAGES

    @cached_property
    def material(self) -> Material:
        return make_material(self.documents)

    @cached_property
    def end(self) -> int:
        return int(self.bpe.token_to_id(END_OF_TEXT))

    def stage(self, step: int) -> Stage:
        return next(stage for stage in self.stages if step < stage.until * self.total_steps or stage is self.stages[-1])

    def batch(self, step: int) -> tuple[np.ndarray, np.ndarray]:
        """Tokens [rows, T + 1], and the importance [rows, T] of each token after the first."""
        stage, rng = self.stage(step), random.Random(f"{self.seed} {step}")
        kinds = rng.choices(list(stage.mix), list(stage.mix.values()), k=self.batch_tokens // stage.tokens)
        made = [self._row(kind, rng, stage.tokens + 1) for kind in kinds]
        return np.stack([tokens for tokens, _ in made]), np.stack([importance[1:] for _, importance in made])

    def _row(self, kind: str, rng: random.Random, size: int) -> tuple[np.ndarray, np.ndarray]:
        tokens, importance = np.full(size, self.end, np.uint16), np.zeros(size, np.uint8)
        at = 0
        while (room := size - at) > 48:
            found, weights = getattr(self, f"_{kind}")(rng, room)
            found, weights = found[:room], weights[:room]
            tokens[at : at + len(found)], importance[at : at + len(found)] = found, weights
            at += len(found)
        return tokens, importance

    def _copy(self, rng: random.Random, room: int) -> tuple[list[int], list[int]]:
        """Something, and the same again: the shortest way to learn to look back."""
        size = rng.randint(8, max(9, min(room, 512) // 2 - 4))
        if rng.random() < 0.5:
            once = [rng.randrange(3, self.bpe.get_vocab_size()) for _ in range(size)]
        else:
            once = self.encode(" ".join(self.material.filler(rng, size * 4)))[:size]
        return [*once, *once, self.end], [0] * len(once) + [TEXT] * len(once) + [0]

    def _text(self, rng: random.Random, room: int) -> tuple[list[int], list[int]]:
        document = rng.choice(self.documents)
        start = rng.randrange(max(1, len(document) - room * 3)) if rng.random() < 0.7 else 0
        found = [*self.encode(document[start : start + room * 5]), self.end]
        return found, [TEXT] * len(found)

    def _chat(self, rng: random.Random, room: int) -> tuple[list[int], list[int]]:
        return self.encode_messages(conversation(rng))

    def _skill(self, rng: random.Random, room: int) -> tuple[list[int], list[int]]:
        skill = rng.choices(list(SKILL_SHARES), list(SKILL_SHARES.values()))[0]
        most = int((room - 160) * _CHARS_PER_TOKEN)
        if most < 200:
            return self._chat(rng, room)
        chars = most if rng.random() < 0.3 else int(100 * (most / 100) ** rng.random())
        return self.encode_messages(SKILLS[skill](rng, self.material, chars, False))

    def encode(self, text: str) -> list[int]:
        return list(self.bpe.encode(text, add_special_tokens=False).ids)

    def encode_messages(self, messages: Sequence[Message]) -> tuple[list[int], list[int]]:
        """As the chat template writes them, with an end-of-text token last. Replies are learned, and that they end."""
        found: list[int] = []
        weights: list[int] = []
        for message in messages:
            head = self.encode(f"{MESSAGE_START}{message['role']}\n")
            body = self.encode(f"{message['content']}{MESSAGE_END}")
            tail = self.encode("\n")
            worth = PROMPT
            if message["role"] == "assistant":
                worth = EXACT if "exact" in message else CHAT
            found += head + body + tail
            weights += [0] * len(head) + [worth] * len(body) + [0] * len(tail)
        return [*found, self.end], [*weights, 0]


def probe(rows: Rows, skill: str, tokens: int, held_out: bool, rng: random.Random) -> tuple[list[int], list[int]]:
    """A prompt that ends with a question, and the one right reply with its end: at most `tokens` tokens together."""
    chars = int(tokens * 4)
    while True:
        messages = SKILLS[skill](rng, rows.material, chars, held_out)
        last = next(i for i, message in enumerate(messages) if "exact" in message)
        prompt = [*rows.encode_messages(messages[:last])[0][:-1], *rows.encode(f"{MESSAGE_START}assistant\n")]
        reply = rows.encode(messages[last]["content"] + MESSAGE_END)
        excess = len(prompt) + len(reply) - tokens
        if excess <= 0:
            return prompt, reply
        chars = max(60, chars - max(20, excess * 3))


def load_rows(
    corpus: Path, tokenizer: Path, seed: int, batch_tokens: int, total_steps: int, stages: Sequence[Stage] = STAGES
) -> Rows:
    from tokenizers import Tokenizer

    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    rows = Rows(Tokenizer.from_file(str(tokenizer)), read_corpus(corpus), seed, batch_tokens, total_steps, stages)
    assert rows.material.words  # made once, before processes share it
    return rows
