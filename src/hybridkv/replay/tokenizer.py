"""Tokenizers for traces of text and of messages: local files only, and no tokenizer library until one is asked for."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from hybridkv.chats import ChatStyle, ChatTokens, check_text, read_messages, render_chat, tokenize_chat
from hybridkv.chats.messages import check_template_options
from hybridkv.errors import InputError, RequestError
from hybridkv.files import FileError, check_folder, read_bytes, read_json

Tokenize = Callable[[str], list[int]]

_MOST_BYTES = 2**30
"""Largest tokenizer.json that is read. Large vocabularies take 30 MB."""
_FLAGS = ("add_generation_prompt", "continue_final_message", "add_special_tokens")


class ChatTokenizer:
    """A tokenizer with a chat template. It sets breakpoints at the ends of messages, by the code of the server."""

    def __init__(self, tokenizer: Any) -> None:
        """`tokenizer`: from transformers."""
        self._tokenizer = tokenizer
        self._style = ChatStyle(tokenizer)

    def __call__(self, text: str) -> list[int]:
        token_ids: list[int] = self._tokenizer(check_text(text), add_special_tokens=False)["input_ids"]
        return token_ids

    def text(self, text: str) -> ChatTokens:
        """The tokens of a text, with the ends of messages if it is a rendered chat."""
        return tokenize_chat(self._tokenizer, self._style.find(check_text(text)))

    def chat(self, fields: dict[str, Any]) -> ChatTokens:
        """The tokens of a chat, given as in a request to the server: `messages`, and what else the template gets."""
        messages = read_messages(fields["messages"])
        options = fields.get("chat_template_kwargs") or {}
        tools = fields.get("tools") or []
        if not isinstance(options, dict):
            raise RequestError(f"chat_template_kwargs is a {type(options).__name__}: give an object")
        if not isinstance(tools, list) or not all(isinstance(tool, dict) for tool in tools):
            raise RequestError("tools is not a list of objects: give each as the chat template knows it")
        check_template_options(options)
        given = {name: fields[name] for name in _FLAGS if fields.get(name) is not None}
        for name, value in given.items():
            if not isinstance(value, bool):
                raise RequestError(f"{name} is {value!r:.40}: it must be true or false")
        return render_chat(
            self._tokenizer,
            messages,
            options={**options, "tools": tools} if tools else options,
            **{"add_generation_prompt": not given.get("continue_final_message"), **given},
        )


def load_tokenizer(path: Path) -> Tokenize:
    """A function from text to token ids, without special tokens: the text of a trace has its own.

    It is a `ChatTokenizer` if the directory has a chat template.
    """
    file = path / "tokenizer.json" if path.is_dir() else path
    if not os.path.lexists(path):
        raise InputError(f"no tokenizer at {path}: give a directory with a tokenizer.json, or that file")
    return _from_file(file) if os.path.lexists(file) and not _has_chat_template(path) else _from_directory(path)


def _has_chat_template(path: Path) -> bool:
    if (path / "chat_template.jinja").exists():
        return True
    try:
        config = read_json(path / "tokenizer_config.json")
    except FileError:
        return False  # there is none, or loading the tokenizer says what is wrong with it
    return isinstance(config, dict) and bool(config.get("chat_template"))


def _from_file(file: Path) -> Tokenize:
    try:
        from tokenizers import Tokenizer
    except ImportError:
        raise _missing("tokenizers") from None
    try:
        tokenizer = Tokenizer.from_buffer(read_bytes(file, _MOST_BYTES))
    except Exception as error:  # the library raises bare Exception, whatever is wrong with the file
        raise InputError(f"cannot read tokenizer {file}: {error}") from None
    return lambda text: list(tokenizer.encode(check_text(text), add_special_tokens=False).ids)


def _from_directory(path: Path) -> Tokenize:
    try:
        from transformers import AutoTokenizer
    except ImportError:
        way_out = ", or give its tokenizer.json: texts have no breakpoints then"
        raise _missing("transformers", way_out if (path / "tokenizer.json").exists() else "") from None
    try:
        check_folder(path)
        tokenizer = AutoTokenizer.from_pretrained(path, local_files_only=True)
    except Exception as error:  # as above
        raise InputError(f"cannot read tokenizer {path}: {' '.join(str(error).split())}") from None
    # Longer texts are only warned of, and whether they fit is the cache's to say.
    tokenizer.model_max_length = sys.maxsize
    if getattr(tokenizer, "chat_template", None):
        return ChatTokenizer(tokenizer)
    return lambda text: list(tokenizer.encode(check_text(text), add_special_tokens=False))


def _missing(library: str, way_out: str = "") -> InputError:
    return InputError(f"a trace of text needs {library}: pip install 'hybridkv[engine]'{way_out}")
