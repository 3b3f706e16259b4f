"""Reading traces: every format, and every fault by file and line."""

from __future__ import annotations

import gzip
import json
import time
from pathlib import Path
from typing import Any

import pytest

from hybridkv.errors import HybridKVError
from hybridkv.replay import TraceError, load_tokenizer, load_trace
from tests.replay.traces import blocks, mooncake, numbers, write_trace


def test_a_block_is_its_number_repeated(tmp_path: Path) -> None:
    trace = mooncake(tmp_path, [blocks([70, 8], 20, 5), blocks([70, 9, 10], 48, 0, 2500)])
    assert len(trace) == 2
    first, second = trace[0], trace[1]
    assert numbers(first.prompt) == [0] * 16 + [1] * 4
    assert numbers(second.prompt) == [0] * 16 + [2] * 16 + [3] * 16
    assert (first.prompt_tokens, first.output_tokens, first.known_tokens, first.reply) == (20, 5, 16, b"")
    assert (second.known_tokens, second.arrival_s) == (48, 2.5)


def test_a_block_is_512_tokens_unless_the_line_says_otherwise(tmp_path: Path) -> None:
    trace = mooncake(tmp_path, [{"input_length": 600, "output_length": 1, "hash_ids": [1, 2]}])
    assert trace[0].known_tokens == 512
    assert trace[0].arrival_s == 0


def test_a_name_means_its_prefix_too(tmp_path: Path) -> None:
    """Names that are not chained: the same block after another one is another prefix."""
    trace = mooncake(tmp_path, [blocks([1, 7], 32), blocks([2, 7], 32), blocks([1, 7], 32), blocks([1], 32, size=32)])
    assert trace[0].prompt == trace[2].prompt
    assert set(numbers(trace[0].prompt)).isdisjoint(numbers(trace[1].prompt))
    assert set(numbers(trace[0].prompt)).isdisjoint(numbers(trace[3].prompt))


def test_requests_are_put_in_order_and_time_starts_at_the_first(tmp_path: Path) -> None:
    lines = [blocks([3], 16, at_ms=9000), blocks([1], 15, at_ms=4000), blocks([2], 14, at_ms=4000)]
    trace = mooncake(tmp_path, lines)
    assert [(trace[i].arrival_s, trace[i].prompt_tokens) for i in range(3)] == [(0, 15), (0, 14), (5, 16)]
    assert len(trace.head(2)) == 2


def test_tokens_and_replies_are_taken_as_they_are(tmp_path: Path) -> None:
    lines: list[dict[str, Any]] = [
        {"token_ids": [5, 6, 7], "output_token_ids": [8, 9]},
        {"timestamp": 10, "token_ids": [5], "output_length": 4},
    ]
    trace = load_trace(write_trace(tmp_path / "t.jsonl", lines))
    assert numbers(trace[0].prompt) == [5, 6, 7]
    assert numbers(trace[0].reply) == [8, 9]
    assert (trace[0].output_tokens, trace[0].known_tokens) == (2, 3)
    assert (trace[1].output_tokens, trace[1].reply) == (4, b"")


def test_gzip_and_blank_lines(tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl.gz"
    path.write_bytes(gzip.compress(b"\n" + json.dumps(blocks([1], 9)).encode() + b"\n\n"))
    assert len(load_trace(path)) == 1


def test_text_needs_a_tokenizer(tmp_path: Path) -> None:
    path = write_trace(tmp_path / "t.jsonl", [{"text": "ab", "output_text": "c"}])
    with pytest.raises(TraceError, match=r"line 1: .*--tokenizer"):
        load_trace(path)
    trace = load_trace(path, lambda text: [ord(letter) for letter in text])
    assert (numbers(trace[0].prompt), numbers(trace[0].reply)) == ([97, 98], [99])


def test_tokenizers_are_read_from_local_files(tmp_path: Path) -> None:
    tokenizers = pytest.importorskip("tokenizers")
    model = tokenizers.models.WordLevel({"a": 0, "b": 1, "?": 2}, unk_token="?")
    tokenizer = tokenizers.Tokenizer(model)
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    for path in (tmp_path, tmp_path / "tokenizer.json"):
        assert load_tokenizer(path)("b a z") == [1, 0, 2]
    with pytest.raises(HybridKVError, match="no tokenizer at"):
        load_tokenizer(tmp_path / "nothing")
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(HybridKVError, match="cannot read tokenizer"):
        load_tokenizer(tmp_path)


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("{", "not JSON"),
        ("[1]", "a list, not an object"),
        ("{}", "no hash_ids, token_ids, text or messages"),
        ({"hash_ids": [1]}, "no input_length"),
        (blocks([1], -5), "input_length is -5"),
        (blocks([1], 0), "from 1 to"),
        (blocks([1], 5, -1), "output_length is -1"),
        (blocks([1], 5, size=0), "block_size is 0"),
        (blocks([1], 17), "1 hash_ids for 17 tokens: blocks of 16 make it 2"),
        ({"input_length": 5, "hash_ids": 7}, "hash_ids is not a list"),
        ({"input_length": 5, "hash_ids": [None]}, "hash_ids is not a list"),
        ({"input_length": "5", "hash_ids": [1]}, "input_length is '5'"),
        (blocks([1], 5, at_ms=-1), "timestamp is -1"),
        (blocks([1], 5, at_ms=float("nan")), "timestamp is nan"),
        ('{"timestamp": 1' + "0" * 400 + ', "hash_ids": [1], "input_length": 5}', "timestamp is 1000"),
        ("[" * 200_000, "not JSON"),
        (blocks([1], 5, 2 * 10**9), "output_length is 2000000000: it must be an integer from 0 to"),
        ({"input_length": 5, "hash_ids": [True]}, "hash_ids is not a list"),
        ({"token_ids": []}, "a token_ids line in a Mooncake trace"),
    ],
)
def test_faults_name_the_file_and_the_line(line: Any, words: str, tmp_path: Path) -> None:
    path = tmp_path / "bad.jsonl"
    text = line if isinstance(line, str) else json.dumps(line)
    path.write_text(json.dumps(blocks([1], 9)) + "\n\n" + text + "\n")
    with pytest.raises(TraceError) as caught:
        load_trace(path)
    assert "bad.jsonl, line 3: " in str(caught.value)
    assert words in str(caught.value)


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ({"token_ids": []}, "token_ids is empty"),
        ({"token_ids": [1, -2]}, "token ids from 0"),
        ({"token_ids": [2**31]}, "token ids from 0"),
        ({"token_ids": [1, 2.5]}, "token ids from 0"),
        ({"token_ids": [1], "output_token_ids": "x"}, "output_token_ids is not"),
        ({"token_ids": [1], "output_length": -2}, "output_length is -2"),
        ({"text": 5}, "text is not a string"),
    ],
)
def test_faults_of_token_traces(line: dict[str, Any], words: str, tmp_path: Path) -> None:
    with pytest.raises(TraceError, match=words):
        load_trace(write_trace(tmp_path / "bad.jsonl", [line]))


def test_files_that_cannot_be_read(tmp_path: Path) -> None:
    with pytest.raises(TraceError, match=r"cannot read trace .*No such file"):
        load_trace(tmp_path / "none.jsonl")
    with pytest.raises(TraceError, match="cannot read trace"):
        load_trace(tmp_path)
    (tmp_path / "empty.jsonl").write_text("\n")
    with pytest.raises(TraceError, match="has no requests"):
        load_trace(tmp_path / "empty.jsonl")
    (tmp_path / "raw.jsonl").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(TraceError, match="no text in UTF-8 after line 0"):
        load_trace(tmp_path / "raw.jsonl")
    whole = gzip.compress(json.dumps(blocks([1], 9)).encode() * 50)
    for data in (b"nothing of the kind", whole[:-9]):
        (tmp_path / "cut.jsonl.gz").write_bytes(data)
        with pytest.raises(TraceError, match="cannot read trace"):
            load_trace(tmp_path / "cut.jsonl.gz")


def test_reading_is_fast(tmp_path: Path) -> None:
    lines = [blocks(range(24 * i, 24 * i + 24), 24 * 512, size=512) for i in range(2000)]
    path = write_trace(tmp_path / "t.jsonl", lines)
    start = time.process_time()
    assert len(load_trace(path)) == 2000
    assert time.process_time() - start < 5
