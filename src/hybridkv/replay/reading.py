"""Trace files: JSON lines of four kinds, plain or gzipped. Every fault names the file and the line.

{"timestamp": 0, "input_length": 6758, "output_length": 500, "hash_ids": [0, 1, 2], "block_size": 512}
{"timestamp": 0, "token_ids": [9, 2, 7], "output_token_ids": [4, 4]}
{"timestamp": 0, "text": "...", "output_text": "..."}
{"timestamp": 0, "messages": [{"role": "user", "content": "..."}], "output_text": "..."}
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from hybridkv.errors import RequestError, TraceError
from hybridkv.files import FileError, parse_json, read_lines
from hybridkv.replay.tokenizer import ChatTokenizer, Tokenize
from hybridkv.replay.traces import TOKEN_BYTES, Chains, Record, Trace

DEFAULT_PIECE_TOKENS = 512
TOKEN_PIECE = 16
_KINDS = {"hash_ids": "Mooncake", "token_ids": "token_ids", "text": "text", "messages": "messages"}
_MOST_TOKEN_ID = 2**31 - 1
_MOST_TOKENS = 2**26
"""Of one prompt or reply: what is longer is a mistake, and would take gigabytes to find out."""

_LATEST_MS = 1e18


def load_trace(path: Path, tokenize: Tokenize | None = None, *, progress: Callable[[], None] = lambda: None) -> Trace:
    """Read a trace; requests are put in the order of their timestamps.

    `tokenize`: for traces of text; those of messages need a `ChatTokenizer`. `progress` is called once a request.
    """
    reader = _Reader(tokenize)
    for number, line in _lines(path):
        try:
            reader.read(line)
        except (RequestError, TraceError) as error:
            raise TraceError(f"trace {path}, line {number}: {' '.join(str(error).split())}") from None
        progress()
    if not reader.records:
        raise TraceError(f"trace {path} has no requests: give a file with one JSON object a line")
    records = sorted(reader.records, key=lambda record: record.arrival_s)
    first = records[0].arrival_s
    for record in records:
        record.arrival_s -= first
    return Trace(path.name, records, reader.chains.fanout)


def _lines(path: Path) -> Iterator[tuple[int, str]]:
    try:
        yield from read_lines(path)
    except FileError as error:
        way_out = "name a file of JSON lines in UTF-8, plain or .gz"
        raise TraceError(f"cannot read trace {path}: {error}; {way_out}") from None


class _Reader:
    """Makes records of lines; all lines of a trace are of one kind, as tokens of different kinds would not compare."""

    def __init__(self, tokenize: Tokenize | None) -> None:
        self.records: list[Record] = []
        self.chains = Chains()
        self._tokenize = tokenize
        self._kind: str | None = None

    def read(self, line: str) -> None:
        try:
            fields = parse_json(line)
        except FileError as error:
            raise TraceError(str(error)) from None
        if not isinstance(fields, dict):
            raise TraceError(f"a {type(fields).__name__}, not an object")
        kind = next((kind for kind in _KINDS if kind in fields), None)
        if kind is None:
            raise TraceError("no hash_ids, token_ids, text or messages in it")
        if kind != (self._kind or kind):
            raise TraceError(f"a {_KINDS[kind]} line in a {_KINDS[self._kind or kind]} trace: keep kinds apart")
        self._kind = kind
        self.records.append(self._pieces(fields) if kind == "hash_ids" else self._tokens(fields, kind))

    def _pieces(self, fields: dict[str, Any]) -> Record:
        length = _integer(fields, "input_length", least=1)
        size = _integer(fields, "block_size", least=1, default=DEFAULT_PIECE_TOKENS)
        ids, needed = fields["hash_ids"], -(-length // size)
        if not isinstance(ids, list) or not all(type(name) in (int, str) for name in ids):
            raise TraceError("hash_ids is not a list of integers or strings")
        if len(ids) < needed:
            raise TraceError(f"{len(ids)} hash_ids for {length} tokens: blocks of {size} make it {needed}")
        chain = self.chains.number(ids[:needed], size)
        output_tokens = _integer(fields, "output_length", default=0)
        return Record(_seconds(fields), length, output_tokens, size, chain, breakpoints=_breakpoints(fields, length))

    def _tokens(self, fields: dict[str, Any], kind: str) -> Record:
        reply_field = "output_token_ids" if kind == "token_ids" else "output_text"
        token_ids, ends = self._prompt(fields, kind)
        prompt = _packed(token_ids, kind)
        given = fields.get(reply_field)
        reply = b"" if given is None else _packed(self._token_ids(given, reply_field), reply_field)
        if not prompt:
            raise TraceError(f"{kind} is empty: a request has at least 1 token")
        output_tokens = len(reply) // TOKEN_BYTES or _integer(fields, "output_length", default=0)
        tokens, size = prompt + reply, TOKEN_PIECE * TOKEN_BYTES
        whole = range(0, len(tokens) // size * size, size)
        chain = self.chains.number([tokens[start : start + size] for start in whole], TOKEN_PIECE)
        count = len(prompt) // TOKEN_BYTES
        breakpoints = _breakpoints(fields, count, ends)
        return Record(_seconds(fields), count, output_tokens, TOKEN_PIECE, chain, prompt, reply, breakpoints)

    def _prompt(self, fields: dict[str, Any], kind: str) -> tuple[Any, Sequence[int]]:
        """The token ids, and the ends of messages."""
        if kind == "messages":
            if self._tokenize is None:
                raise TraceError("a trace of messages needs a tokenizer: pass --tokenizer with its directory")
            if not isinstance(self._tokenize, ChatTokenizer):
                way_out = "pass --tokenizer with a directory that has one, such as in chat_template.jinja"
                raise TraceError(f"a trace of messages needs a chat template, and the tokenizer has none: {way_out}")
            return self._tokenize.chat(fields)
        if kind == "text" and isinstance(self._tokenize, ChatTokenizer) and isinstance(fields[kind], str):
            return self._tokenize.text(fields[kind])
        return self._token_ids(fields[kind], kind), ()

    def _token_ids(self, value: object, name: str) -> object:
        if name not in ("text", "output_text"):
            return value
        if not isinstance(value, str):
            raise TraceError(f"{name} is not a string")
        if self._tokenize is None:
            raise TraceError("a trace of text needs a tokenizer: pass --tokenizer with its directory")
        return self._tokenize(value)


def _packed(token_ids: object, name: str) -> bytes:
    if not isinstance(token_ids, list) or not all(
        type(token) is int and 0 <= token <= _MOST_TOKEN_ID for token in token_ids
    ):
        raise TraceError(f"{name} is not a list of token ids from 0 to {_MOST_TOKEN_ID}")
    return np.array(token_ids, dtype="<i4").tobytes()


def _breakpoints(fields: dict[str, Any], num_tokens: int, ends: Sequence[int] = ()) -> tuple[int, ...]:
    """Positions that the line names and the ends of its messages, as the server joins them."""
    named = fields.get("breakpoints")
    if named is None:
        return tuple(ends)
    if not isinstance(named, list):
        raise TraceError(f"breakpoints is {named!r:.40}: it must be a list of positions in the prompt")
    for position in named:
        if type(position) is not int or not 0 <= position <= num_tokens:
            raise TraceError(
                f"breakpoint {position!r:.40} of a prompt of {num_tokens} tokens: choose 0 to {num_tokens}"
            )
    return tuple(sorted({*ends, *named}))


def _integer(fields: dict[str, Any], name: str, *, least: int = 0, default: int | None = None) -> int:
    value = fields.get(name, default)
    if value is None:
        raise TraceError(f"no {name}")
    if type(value) is not int or not least <= value <= _MOST_TOKENS:
        raise TraceError(f"{name} is {value!r:.40}: it must be an integer from {least} to {_MOST_TOKENS}")
    return value


def _seconds(fields: dict[str, Any]) -> float:
    value = fields.get("timestamp", 0)
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 <= value < _LATEST_MS:
        raise TraceError(f"timestamp is {value!r:.40}: it must be milliseconds, 0 or more")
    return value / 1000
