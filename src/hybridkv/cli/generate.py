"""`hybridkv generate`: complete prompts in the terminal or in a script."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from hybridkv.cli.engine_options import (
    EngineOptions,
    MaxTokensOption,
    ModelArgument,
    SeedOption,
    TemperatureOption,
    TopKOption,
    TopPOption,
    sampling,
    takes_engine_options,
)
from hybridkv.cli.tables import write
from hybridkv.errors import InputError, ReplyError
from hybridkv.files import MOST_BYTES, FileError, parse_json, read_lines
from hybridkv.units import format_bytes

if TYPE_CHECKING:
    from hybridkv.engine import Result


@takes_engine_options("seed")
def generate_command(
    model: ModelArgument,
    prompts: Annotated[
        list[str] | None,
        typer.Option(
            "--prompt", "-p", metavar="TEXT", help="A prompt; repeat it for several. Default: standard input."
        ),
    ] = None,
    prompt_file: Annotated[
        Path | None,
        typer.Option(
            "--file",
            "-f",
            help="One prompt a line, or .jsonl with 'prompt' or 'token_ids'; -: standard input, by line.",
        ),
    ] = None,
    max_tokens: MaxTokensOption = 128,
    temperature: TemperatureOption = 1.0,
    top_p: TopPOption = 1.0,
    top_k: TopKOption = 0,
    seed: SeedOption = None,
    stop: Annotated[
        list[str] | None, typer.Option(metavar="TEXT", help="A text that ends the reply; repeat it for several.")
    ] = None,
    n: Annotated[int, typer.Option("-n", help="Replies to each prompt.")] = 1,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object a prompt, with tokens and times.")] = False,
    *,
    options: EngineOptions,
) -> None:
    """Complete prompts with a local checkpoint.

    Prompts that begin alike share what they have in common; --json tells how many tokens the cache supplied.
    """
    adapter, wanted = options.only_adapter(), _read_prompts(prompts, prompt_file)
    params = sampling(max_tokens, temperature, top_p, top_k, seed, tuple(stop or ()), n)
    at_once = min(options.max_num_seqs, max(1, len(wanted) * n))
    with replace(options, max_num_seqs=at_once).start(model) as engine:
        results = engine.generate(wanted, params, adapter=adapter, progress=sys.stderr.isatty())
        for result, prompt in zip(results, wanted, strict=True):
            if as_json:
                write(json.dumps(_report(result), ensure_ascii=False))
            else:
                _show(result, prompt if len(wanted) > 1 else None, engine.tokenizer is not None)
    _check_errors(results)


def _read_prompts(prompts: list[str] | None, path: Path | None) -> list[str | list[int]]:
    if prompts and path:
        raise InputError("both --prompt and --file: give one of them")
    if prompts:
        return list(prompts)
    if path is None:
        return [_piped()]
    try:
        found = [_line(path, number, line) for number, line in _lines(path)]
    except FileError as error:
        raise InputError(f"cannot read {path}: {error}; name a file with a prompt a line") from None
    if not found:
        raise InputError(f"{path} has no prompts: write one a line")
    return found


def _lines(path: Path) -> Iterable[tuple[int, str]]:
    if str(path) != "-":
        return read_lines(path)
    lines = _piped().split("\n")  # a prompt may hold other characters that end lines
    return ((number, line) for number, line in enumerate(lines, 1) if line.strip())


def _piped() -> str:
    try:
        text = "" if sys.stdin.isatty() else sys.stdin.read(MOST_BYTES + 1)
    except UnicodeDecodeError as error:
        raise InputError(f"cannot read the prompt from standard input: {error}") from None
    if len(text) > MOST_BYTES:
        raise InputError(
            f"standard input has more than {format_bytes(MOST_BYTES)}: pipe in a prompt, or a line for each"
        )
    text = text.removesuffix("\n")
    if not text:
        raise InputError("no prompt: give one with -p, a file with -f, or pipe one in")
    return text


def _line(path: Path, number: int, line: str) -> str | list[int]:
    if not path.name.endswith((".jsonl", ".jsonl.gz")):
        return line
    try:
        raw = parse_json(line)
        prompt = raw["prompt"] if "prompt" in raw else raw["token_ids"]
    except (ValueError, KeyError, TypeError):
        raise InputError(f"{path}, line {number}: expected an object with 'prompt' or 'token_ids'") from None
    if isinstance(prompt, str) or (isinstance(prompt, list) and all(type(token) is int for token in prompt)):
        return prompt
    raise InputError(f"{path}, line {number}: a prompt is a text or a list of token ids")


def _show(result: Result, prompt: str | list[int] | None, has_text: bool) -> None:
    """Without a tokenizer a reply is its token ids."""
    if prompt is not None:
        write(f"> {prompt if isinstance(prompt, str) else f'{len(prompt)} tokens'}")
    for completion in result.completions:
        write(completion.text if has_text else " ".join(map(str, completion.token_ids)))


def _check_errors(results: list[Result]) -> None:
    """Once everything is written: what one reply failed at takes no other along."""
    errors = [one.error for result in results for one in result.completions if one.error is not None]
    if errors:
        raise ReplyError(f"{len(errors)} of {sum(len(r.completions) for r in results)} replies failed: {errors[0]}")


def _report(result: Result) -> dict[str, Any]:
    return {
        "text": result.text,
        "token_ids": result.token_ids,
        "finish_reason": result.finish_reason,
        "prompt_tokens": len(result.prompt_token_ids),
        "cached_tokens": result.cached_tokens,
        "completions": [
            {
                "index": one.index,
                "text": one.text,
                "token_ids": one.token_ids,
                "finish_reason": one.finish_reason,
                "error": one.error,
            }
            for one in result.completions
        ],
        "metrics": {
            "queue_s": result.metrics.queue_s,
            "ttft_s": result.metrics.ttft_s,
            "total_s": result.metrics.total_s,
            "per_token_s": result.metrics.per_token_s,
            "preemptions": result.metrics.preemptions,
        },
    }
