"""Reads the tokenizer of a checkpoint, and the tokens that end replies."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from transformers import AutoTokenizer, PreTrainedModel

from hybridkv.engine.loading.model_files import HUB_NAME, check_model_folder, first_line
from hybridkv.errors import ConfigError


def check_tokenizer(tokenizer: str | Path | Any | None) -> None:
    """Refuse a bad `tokenizer` argument before the model is loaded."""
    if isinstance(tokenizer, (str, Path)):
        if Path(tokenizer).is_dir():
            check_model_folder(Path(tokenizer), "cannot load the tokenizer")
        elif not HUB_NAME.fullmatch(str(tokenizer)):
            raise ConfigError(f"no directory {str(tokenizer)!r}: name one that a tokenizer was saved to")
    elif tokenizer is not None and not callable(getattr(tokenizer, "decode", None)):
        raise ConfigError(f"a tokenizer of type {type(tokenizer).__name__}: pass a directory, or a tokenizer")


def read_tokenizer(tokenizer: str | Path | Any | None, trust_remote_code: bool, must_exist: bool) -> Any | None:
    """Return the tokenizer of a directory, or the one given. None: the directory has none, and none `must_exist`."""
    if not isinstance(tokenizer, (str, Path)):
        return tokenizer
    try:
        found: Any = AutoTokenizer.from_pretrained(str(tokenizer), trust_remote_code=trust_remote_code)
    except Exception as error:  # the parser of tokenizer.json raises nothing narrower
        absent = isinstance(error, (OSError, ValueError, KeyError)) and not any(Path(tokenizer).glob("tokenizer*"))
        if must_exist or not absent:
            way_out = "name a directory a tokenizer was saved to"
            raise ConfigError(
                f"cannot load the tokenizer {str(tokenizer)!r}: {first_line(error)}; {way_out}"
            ) from error
        return None  # token ids in, token ids out
    if len(found) <= len(set(found.all_special_ids)):  # transformers' result for a directory without a tokenizer
        if must_exist:
            raise ConfigError(f"{str(tokenizer)!r} has no vocabulary: name a directory a tokenizer was saved to")
        return None
    return found


def eos_ids(model: PreTrainedModel, tokenizer: Any | None) -> frozenset[int]:
    """Return the tokens that end replies: those of the generation config, the config and the tokenizer."""
    stated = [
        getattr(model.generation_config, "eos_token_id", None),
        getattr(model.config.get_text_config(decoder=True), "eos_token_id", None),
        getattr(tokenizer, "eos_token_id", None),
    ]
    ids: set[int] = set()
    for one in stated:
        ids.update(one if isinstance(one, (list, tuple)) else [] if one is None else [one])
    return frozenset(ids)
