"""`hybridkv chat`: talk to a model in the terminal. Each turn resumes from what the last ones left in the cache."""

from __future__ import annotations

import asyncio
import sys
from dataclasses import replace
from typing import TYPE_CHECKING, Annotated

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
from hybridkv.errors import InputError, ReplyError, RequestError

if TYPE_CHECKING:
    from hybridkv.engine import Engine, Prompt, Result, SamplingParams


@takes_engine_options("max_num_seqs", "seed")
def chat_command(
    model: ModelArgument,
    system_prompt: Annotated[
        str | None, typer.Option(help="A first message that tells the model how to behave.")
    ] = None,
    max_tokens: MaxTokensOption = 512,
    temperature: TemperatureOption = 0.7,
    top_p: TopPOption = 1.0,
    top_k: TopKOption = 0,
    seed: SeedOption = None,
    stats: Annotated[bool, typer.Option("--stats", help="After each reply: cached tokens and times.")] = False,
    *,
    options: EngineOptions,
) -> None:
    """Talk to a local checkpoint. An empty line or Ctrl-D ends the conversation, Ctrl-C a reply.

    Each turn takes up the cache where the last reply ended, as far as its text gives the same tokens again.
    """
    adapter, params = options.only_adapter(), sampling(max_tokens, temperature, top_p, top_k, seed)
    with replace(options, max_num_seqs=1).start(model) as engine:
        messages = [{"role": "system", "content": system_prompt}] if system_prompt else []
        _check_template(engine, messages)
        while line := _ask():
            messages.append({"role": "user", "content": line})
            result = _answer(engine, engine.render_chat(messages), params, adapter)
            if result is None:
                messages.pop()
                continue
            messages.append({"role": "assistant", "content": result.text})
            if stats:
                _tell(result)


def _check_template(engine: Engine, messages: list[dict[str, str]]) -> None:
    """Known before anybody has typed anything."""
    try:
        engine.render_chat([*messages, {"role": "user", "content": "Hello"}])
    except RequestError as error:
        raise InputError(f"{engine.model_name} cannot chat: {error}; hybridkv generate completes texts") from None


def _ask() -> str:
    is_typed = sys.stdin.isatty()
    try:
        return input("> " if is_typed else "").strip()
    except (EOFError, KeyboardInterrupt):
        if is_typed:
            write("")
        return ""
    except UnicodeDecodeError as error:
        raise InputError(f"cannot read a message from standard input: {error}") from None


def _answer(engine: Engine, prompt: Prompt, params: SamplingParams, adapter: str | None) -> Result | None:
    """Print a reply as it comes; None if it was interrupted."""

    async def stream() -> Result | None:
        result = None
        async for update in engine.stream(prompt, params, adapter=adapter):
            write(update.text, end="")
            result = update.result
        return result

    try:
        result = asyncio.run(stream())
    except KeyboardInterrupt:
        result = None
    write("")
    if result is not None and result.completions[0].error is not None:
        raise ReplyError(result.completions[0].error)
    return result


def _tell(result: Result) -> None:
    metrics = result.metrics
    typer.echo(
        f"[{len(result.prompt_token_ids)} prompt tokens, {result.cached_tokens} of them cached; first token after "
        f"{metrics.ttft_s * 1000:.0f} ms, then {metrics.per_token_s * 1000:.1f} ms a token]",
        err=True,
    )
