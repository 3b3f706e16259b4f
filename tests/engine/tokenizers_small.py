"""Two small tokenizers of the kinds that models have: byte-level BPE, and sentencepiece with byte fallback."""

from __future__ import annotations

from functools import cache

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

TEXT = [
    "The quick brown fox jumps over the lazy dog, and then: it naps.",
    "Zwölf Boxkämpfer jagen Viktor quer über den großen Sylter Deich.",
    "祝你好运，世界！你好，世界。こんにちは世界。",
    "Emoji 🙂🙃😀 and families 👩‍👩‍👧‍👦 and flags 🇩🇪.",
    "def f(x):\n    return  x + 1\n",
] * 4
SPECIAL = "<|end|>"


@cache
def byte_level() -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=420, special_tokens=[SPECIAL], initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator(TEXT, trainer)
    return tokenizer


@cache
def sentencepiece() -> Tokenizer:
    learner = Tokenizer(models.Unigram())
    learner.pre_tokenizer = pre_tokenizers.Metaspace()
    learner.train_from_iterator(TEXT[1:2] + TEXT[:1], trainers.UnigramTrainer(vocab_size=80, show_progress=False))
    pieces = [("<unk>", 0.0), *((f"<0x{byte:02X}>", -20.0) for byte in range(256)), ("▁", -5.0), ("世", -9.0)]
    known = {piece for piece, _ in pieces}
    pieces += [(piece, -8.0) for piece in sorted(learner.get_vocab()) if piece not in known]
    tokenizer = Tokenizer(models.Unigram(pieces, unk_id=0, byte_fallback=True))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    tokenizer.add_special_tokens([SPECIAL])
    return tokenizer


KINDS = {"byte level": byte_level, "sentencepiece": sentencepiece}
