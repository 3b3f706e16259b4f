"""Batches of prompts: normalizes what callers pass, and waits for all results."""

from __future__ import annotations

import queue
from collections.abc import Sequence
from typing import TypeAlias

import numpy as np
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from hybridkv.engine.prompts import Prompt, TokenIdList, on_host
from hybridkv.engine.results import Result, Update
from hybridkv.engine.sampling.params import SamplingParams
from hybridkv.errors import HybridKVError, RequestError

AnyPrompt: TypeAlias = str | TokenIdList | Prompt


def as_list(prompts: AnyPrompt | Sequence[AnyPrompt]) -> Sequence[AnyPrompt]:
    """The prompts as a sequence. A list of numbers is one prompt."""
    if isinstance(prompts, (str, Prompt)):
        return [prompts]
    prompts = on_host(prompts)
    if isinstance(prompts, np.ndarray):
        return [prompts] if prompts.ndim == 1 and len(prompts) else list(prompts)
    if isinstance(prompts, bytes) or not isinstance(prompts, Sequence):
        raise RequestError(f"prompts of type {type(prompts).__name__}: pass a text, token ids, or a list of those")
    if len(prompts) and isinstance(prompts[0], (int, np.integer)):
        return [prompts]
    return prompts


def one_each(params: SamplingParams | Sequence[SamplingParams] | None, count: int) -> Sequence[SamplingParams]:
    if params is None or isinstance(params, SamplingParams):
        return [params or SamplingParams()] * count
    if not isinstance(params, Sequence) or not all(isinstance(one, SamplingParams) for one in params):
        raise RequestError(f"params of type {type(params).__name__}: pass SamplingParams, or a list of one each")
    if len(params) != count:
        raise RequestError(f"{len(params)} sampling parameters for {count} prompts: give one for all, or one each")
    return params


def collect(news: queue.SimpleQueue[Update | HybridKVError], count: int, progress: bool) -> dict[str, Result]:
    """Wait for all results, and show progress."""
    results: dict[str, Result] = {}
    columns = TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn()
    tokens = TextColumn("{task.fields[tokens]:,} tokens")
    screen = Console(stderr=True)  # standard output is for results
    hidden = not progress or not screen.is_terminal
    with Progress(*columns, tokens, console=screen, disable=hidden, transient=True) as bar:
        task, num_tokens = bar.add_task("Generating", total=count, tokens=0), 0
        while len(results) < count:
            update = news.get()
            if isinstance(update, HybridKVError):
                raise update
            num_tokens += len(update.token_ids)
            if update.result is not None:
                results[update.request_id] = update.result
            bar.update(task, completed=len(results), tokens=num_tokens)
    return results
