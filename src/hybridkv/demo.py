"""A small hybrid model made on this machine: something to run, serve and test where nothing can be downloaded.

It has the shape of Qwen3-Next: three gated-delta layers, then one of full attention, and so on. It is untrained: what
it writes is noise. This module makes files; it knows nothing of the engine that reads them. Torch and transformers are
imported when a model is built.
"""

from __future__ import annotations

import os
import secrets
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from hybridkv.errors import DiskError, InputError, is_disk_failure

DEMO_NAME = "demo-v1"
"""One name, one model: what is built differently gets another."""

NOISE_NOTE = "the demo model is untrained: what it writes is noise"

_END_OF_TEXT, _MESSAGE_START, _MESSAGE_END = "<|endoftext|>", "<|im_start|>", "<|im_end|>"
_CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>' + '\\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)

_WORDS = """
the a of and to in is it that for on with as are this be at by from or not have an was they which one all there were
can has been if more when will would who so no out up into them then she he we you your our their his her its what some
time new only could these two may first any my now like people over such make even most after also did many before must
through back where much way well down should because each just those how too little state good very world still own see
work long here get both between life being under never day same another know while last might us great old year off
come since go came right used take three small large few house use during without again place around however home found
thought went say part once high upon school every does got left number course until always away something fact water
less put think almost hand enough far took head yet better set told nothing night end why called find going look asked
later point knew next city give group toward young days let room word token block page slab row layer cache prefix
lease checkpoint window prompt reply request model memory answer question attention sequence position engine server
stream decode prefill share resume keep evict remember forget copy read write system user assistant tool message hello
thanks please sure yes maybe today tomorrow morning evening red green blue white black river mountain forest garden
table chair letter paper story music dance summer winter spring autumn bread apple
"""
"""What the tokenizer learns. Each is a token, with a space before it and without; other text goes down to bytes."""

_VOCAB_LIMIT = 4096
"""More than the words give: the vocabulary ends where every one of them is a token."""

_SHAPE: dict[str, Any] = {
    "hidden_size": 256,
    "intermediate_size": 768,
    "num_hidden_layers": 8,
    "mlp_only_layers": list(range(8)),
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "linear_num_key_heads": 4,
    "linear_num_value_heads": 8,
    "linear_key_head_dim": 64,
    "linear_value_head_dim": 64,
    "max_position_embeddings": 8192,
    "initializer_range": 256**-0.5,  # a layer's output is as large as its input
}
_SEED = 0
_DECAY_BIAS = -5.0  # states remember hundreds of tokens; with transformers' own start they forget the last one
_LOGIT_STD = 4.0
_END_IS_LOUDER = 1.3

_CARD = f"""# {DEMO_NAME}

Made by `hybridkv demo`: the shape of Qwen3-Next, with random weights. Note: {NOISE_NOTE}.
"""
_CARD_NAME = "README.md"
_FILES = ("config.json", "generation_config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json")


def demo_directory() -> Path:
    """Where the demo model is kept: under $HYBRIDKV_HOME, or in the user's cache."""
    home = os.environ.get("HYBRIDKV_HOME")
    caches = os.environ.get("XDG_CACHE_HOME")
    if home:
        return Path(home) / DEMO_NAME
    return (Path(caches) if caches else Path.home() / ".cache") / "hybridkv" / DEMO_NAME


def build_demo_model(directory: Path) -> Path:
    """Build the demo model as `directory`, unless it is there already; returns the absolute path.

    It is built beside its place and renamed when complete: nobody finds a part of it, and of several builders at once
    the first to finish wins.
    """
    place = Path(os.path.abspath(directory))
    workshop = place.parent / f".{place.name}.{secrets.token_hex(4)}.part"
    try:
        if not _is_there(place):
            workshop.mkdir(parents=True)
            _write(workshop)
            _put_in_place(workshop, place)
    except OSError as error:
        reason = error.strerror or str(error)
        kind = DiskError if is_disk_failure(error) else InputError
        raise kind(f"cannot build the demo model as {place}: {reason}; name another directory") from error
    finally:
        shutil.rmtree(workshop, ignore_errors=True)
    return place


def _is_there(place: Path) -> bool:
    """False if the place is free. What is neither free nor the whole demo model belongs to somebody: hands off."""
    if _is_whole(place):
        return True
    if place.exists() and not (place.is_dir() and not any(place.iterdir())):
        raise InputError(f"{place} exists and is not a whole demo model: remove it, or name another directory")
    return False


def _is_whole(place: Path) -> bool:
    card = place / _CARD_NAME
    return all((place / name).is_file() for name in _FILES) and card.is_file() and card.read_bytes() == _CARD.encode()


def _put_in_place(workshop: Path, place: Path) -> None:
    try:
        workshop.rename(place)
    except OSError:
        if not _is_whole(place):  # otherwise another builder was faster, and its model is the same
            raise


def _write(directory: Path) -> None:
    """All files of the demo model."""
    try:
        import torch
        import transformers
        from safetensors.torch import save_file
    except ModuleNotFoundError as error:
        raise InputError(f"building the demo model needs {error.name}: pip install 'hybridkv[engine]'") from error
    tokenizer = _tokenizer()
    config = transformers.Qwen3NextConfig(
        architectures=["Qwen3NextForCausalLM"],
        vocab_size=len(tokenizer),
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        **_SHAPE,
    )
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        torch.manual_seed(_SEED)
        model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32)
        _adjust(model, tokenizer)
    for part in (model.config, model.generation_config, tokenizer):
        part.save_pretrained(directory)
    weights, card = directory / "model.safetensors", directory / _CARD_NAME
    save_file(model.state_dict(), weights, metadata={"format": "pt"})
    card.write_text(_CARD, encoding="utf-8")
    weights.chmod(card.stat().st_mode)  # safetensors makes files for their owner alone


def _tokenizer() -> Any:
    """Byte-level BPE: any text goes in, and the same text comes out."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=_VOCAB_LIMIT,
        special_tokens=[_END_OF_TEXT, _MESSAGE_START, _MESSAGE_END],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    bpe.train_from_iterator([f"{word} {word}\n{word.capitalize()}" for word in _WORDS.split()], trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=bpe,
        pad_token=_END_OF_TEXT,
        eos_token=_MESSAGE_END,
        additional_special_tokens=[_MESSAGE_START],
        chat_template=_CHAT_TEMPLATE,
        clean_up_tokenization_spaces=False,
        model_max_length=_SHAPE["max_position_embeddings"],
    )


def _adjust(model: Any, tokenizer: Any) -> None:
    """Make the noise one of words: readable, tokens again when it comes back as text, and with an end some day."""
    for name, weight in model.named_parameters():
        if name.endswith("dt_bias"):
            weight.fill_(_DECAY_BIAS)
    words: Sequence[int] = sorted({tokenizer.encode(f" {word}")[0] for word in _WORDS.split()})
    head = model.lm_head.weight  # [vocabulary, hidden]
    loud = head.normal_(std=_LOGIT_STD / head.shape[1] ** 0.5)[[*words, tokenizer.eos_token_id]]
    loud[-1] *= _END_IS_LOUDER
    head.zero_()
    head[[*words, tokenizer.eos_token_id]] = loud
