"""Tokenizers for traces of text: local files only, and no tokenizer library until one is asked for."""

from __future__ import annotations

from pathlib import Path

from hybridkv.errors import InputError
from hybridkv.replay.reading import Tokenize


def load_tokenizer(path: Path) -> Tokenize:
    """A function from text to token ids, without special tokens: the text of a trace has its own."""
    file = path / "tokenizer.json" if path.is_dir() else path
    if not path.exists():
        raise InputError(f"no tokenizer at {path}: give a directory with a tokenizer.json, or that file")
    return _from_file(file) if file.exists() else _from_directory(path)


def _from_file(file: Path) -> Tokenize:
    try:
        from tokenizers import Tokenizer
    except ImportError:
        raise _missing("tokenizers") from None
    try:
        tokenizer = Tokenizer.from_file(str(file))
    except Exception as error:  # the library raises bare Exception, whatever is wrong with the file
        raise InputError(f"cannot read tokenizer {file}: {error}") from None
    return lambda text: list(tokenizer.encode(text, add_special_tokens=False).ids)


def _from_directory(path: Path) -> Tokenize:
    try:
        from transformers import AutoTokenizer
    except ImportError:
        raise _missing("transformers") from None
    try:
        tokenizer = AutoTokenizer.from_pretrained(path, local_files_only=True)
    except (OSError, ValueError) as error:
        raise InputError(f"cannot read tokenizer {path}: {error}") from None
    return lambda text: list(tokenizer.encode(text, add_special_tokens=False))


def _missing(library: str) -> InputError:
    return InputError(f"a trace of text needs {library}: pip install 'hybridkv[engine]'")
