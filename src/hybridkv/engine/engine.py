"""The engine people use: `Engine(model).generate(prompts)`, or `async for update in engine.stream(prompt)`."""

from __future__ import annotations

import asyncio
import itertools
import queue
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np
import numpy.typing as npt
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from transformers import PreTrainedModel

from hybridkv.cache import DEFAULT_POLICY, Cache, CacheLayout
from hybridkv.cache.tokens import pack_tokens
from hybridkv.engine.chat import Message, Prompt, check_text, render_chat
from hybridkv.engine.core import EngineCore
from hybridkv.engine.host import keep_freed_memory
from hybridkv.engine.loading import LoadedModel, choose_device, load
from hybridkv.engine.loop import EngineLoop
from hybridkv.engine.params import SamplingParams
from hybridkv.engine.results import Result, Update
from hybridkv.engine.runner import Runner
from hybridkv.errors import HybridKVError, RequestError
from hybridkv.memory import Memory
from hybridkv.plan import PlanOptions, make_plan
from hybridkv.plan.plan import DEFAULT_BLOCK_TOKENS
from hybridkv.units import parse_size

TokenIdList = Sequence[int] | npt.NDArray[np.int32]
AnyPrompt = str | TokenIdList | Prompt

_STEP_TOKENS = {"cuda": 8192, "cpu": 1024}
"""Tokens a step at most: enough to keep the device busy, few enough for those that decode not to wait long."""


class Engine:
    """A stock Hugging Face model, served from one arena. Close it, or use it in a `with` block."""

    def __init__(
        self,
        model: str | Path | PreTrainedModel,
        *,
        memory: str | int = "2GiB",
        dtype: str = "auto",
        device: str = "auto",
        kv_dtype: str | None = None,
        state_dtype: str | None = None,
        block_tokens: int = DEFAULT_BLOCK_TOKENS,
        attn_pack_size: int | None = None,
        policy: str = DEFAULT_POLICY,
        max_step_tokens: int | None = None,
        max_running: int = 256,
        max_length: int | None = None,
        tokenizer: str | Path | Any | None = None,
        trust_remote_code: bool = False,
        seed: int | None = None,
    ) -> None:
        """`model`: a directory a transformers model was saved to, or such a model. `memory`: for the cache alone.

        `dtype`, `device`: "auto" takes the checkpoint's dtype, and a GPU if there is one. `kv_dtype`, `state_dtype`: of
        what is cached, if not the model's and float32. `max_step_tokens`: computed at once, at most; `max_running`:
        samples at once. `max_length`: of a prompt and its reply, if less than the model's. `seed`: for requests that
        have none.
        """
        nbytes = _memory_bytes(memory)
        step_tokens = _check_limits(choose_device(device).type, max_step_tokens, max_running, max_length)
        loaded = load(
            model,
            dtype=dtype,
            device=device,
            kv_dtype=kv_dtype,
            state_dtype=state_dtype,
            tokenizer=tokenizer,
            trust_remote_code=trust_remote_code,
        )
        if loaded.device.type == "cpu":
            keep_freed_memory()
        self.plan = make_plan(loaded.spec, PlanOptions(nbytes, block_tokens, attn_pack_size))
        self.model_name = loaded.spec.name
        self.tokenizer = loaded.tokenizer
        self.max_length = min(loaded.max_length, max_length or loaded.max_length)
        self.core = _make_core(self, loaded, policy, step_tokens, max_running, seed)
        self._loop = EngineLoop(self.core)
        self._numbers = itertools.count()

    # --- using it -----------------------------------------------------------------------------------------------------

    def generate(
        self,
        prompts: AnyPrompt | Sequence[AnyPrompt],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        salt: str = "",
        progress: bool = True,
    ) -> list[Result]:
        """Complete all prompts, in order. A prompt is a text, token ids, or what `render_chat` makes of messages.

        `params`: for all of them, or one each. `salt`: requests with different salts never share anything. Bad prompts
        and parameters are refused before any of them starts.
        """
        requests = [self._prepare(prompt) for prompt in _as_list(prompts)]
        chosen = _one_each(params, len(requests))
        for prompt, one in zip(requests, chosen, strict=True):
            self.core.check(prompt.token_ids, one)
        news: queue.SimpleQueue[Update | HybridKVError] = queue.SimpleQueue()
        ids: list[str] = []
        try:
            for prompt, one in zip(requests, chosen, strict=True):
                ids.append(self._submit(prompt, one, salt, news.put))
            results = _collect(news, len(ids), progress)
        except BaseException:
            for request_id in ids:
                self._loop.abort(request_id)
            raise
        return [results[request_id] for request_id in ids]

    async def stream(
        self, prompt: AnyPrompt, params: SamplingParams | None = None, *, salt: str = ""
    ) -> AsyncIterator[Update]:
        """Updates as tokens come; the last one has the whole result. Leaving the loop early aborts the request."""
        ready = self._prepare(prompt)
        chosen = params or SamplingParams()
        self.core.check(ready.token_ids, chosen)
        loop = asyncio.get_running_loop()
        news: asyncio.Queue[Update | HybridKVError] = asyncio.Queue()

        def sink(update: Update | HybridKVError) -> None:
            loop.call_soon_threadsafe(news.put_nowait, update)

        request_id = self._submit(ready, chosen, salt, sink)
        done = False
        try:
            while not done:
                update = await news.get()
                if isinstance(update, HybridKVError):
                    raise update
                done = update.result is not None
                yield update
        finally:
            if not done:
                self._loop.abort(request_id)

    def render_chat(self, messages: Sequence[Message], *, add_generation_prompt: bool = True) -> Prompt:
        """Messages as the model's chat template writes them, with a breakpoint after each."""
        return render_chat(self._need_tokenizer(), messages, add_generation_prompt=add_generation_prompt)

    def reset_cache(self) -> None:
        """Forget everything that is cached. Running requests go on."""
        self._loop.call(self.core.cache.reset)

    def check_integrity(self) -> None:
        """Recount the cache's books from scratch, between two steps; raises AssertionError where they are wrong."""
        self._loop.call(self.core.cache.check_integrity)

    def close(self) -> None:
        """Abort what runs, and stop the engine's thread."""
        self._loop.close()
        self.core.runner.close()

    def __enter__(self) -> Engine:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    # --- helpers ------------------------------------------------------------------------------------------------------

    def _prepare(self, prompt: AnyPrompt) -> Prompt:
        if isinstance(prompt, Prompt):
            return prompt
        if isinstance(prompt, str):
            return Prompt(self._need_tokenizer().encode(check_text(prompt)))
        try:
            return Prompt(prompt.tolist() if isinstance(prompt, np.ndarray) else list(prompt))
        except TypeError:
            kind = type(prompt).__name__
            raise RequestError(f"a prompt of type {kind}: pass a text, a list of token ids, or a Prompt") from None

    def _need_tokenizer(self) -> Any:
        if self.tokenizer is None:
            raise RequestError(f"{self.model_name} has no tokenizer here: pass token ids, or tokenizer= to the engine")
        return self.tokenizer

    def _submit(self, prompt: Prompt, params: SamplingParams, salt: str, sink: Any) -> str:
        request_id = f"request-{next(self._numbers)}"
        packed = pack_tokens(prompt.token_ids)

        def add() -> None:
            self.core.add(request_id, packed, params, salt=salt, breakpoints=prompt.breakpoints)

        self._loop.add(request_id, sink, add)
        return request_id


def _memory_bytes(memory: str | int) -> int:
    if isinstance(memory, str):
        return parse_size(memory)
    if not isinstance(memory, int) or isinstance(memory, bool):
        raise HybridKVError(f"memory {memory!r}: write a size such as '2GiB', or a whole number of bytes")
    return memory


def _check_limits(device: str, max_step_tokens: int | None, max_running: int, max_length: int | None) -> int:
    """Tokens of a step. Refuses what contradicts itself before a model is loaded."""
    step_tokens = _STEP_TOKENS.get(device, _STEP_TOKENS["cpu"]) if max_step_tokens is None else max_step_tokens
    if step_tokens < 1:
        raise HybridKVError(f"max_step_tokens {step_tokens}: a step has at least 1 token; leave it out for a default")
    if not 1 <= max_running <= step_tokens:
        raise HybridKVError(
            f"max_running {max_running}: each running sample needs a token of a step's {step_tokens}; "
            f"choose 1 to {step_tokens}, or raise max_step_tokens"
        )
    if max_length is not None and max_length < 2:
        raise HybridKVError(f"max_length {max_length}: a prompt and its reply have at least 2 tokens")
    return step_tokens


def _make_core(
    engine: Engine, loaded: LoadedModel, policy: str, step_tokens: int, max_running: int, seed: int | None
) -> EngineCore:
    layout = CacheLayout.from_plan(engine.plan)
    memory = Memory(engine.plan, layout, loaded.device)
    cache = Cache(layout, policy=policy, run_operations=memory.run)
    return EngineCore(
        cache,
        Runner(loaded.model, memory, layout),
        vocab_size=loaded.vocab_size,
        max_length=engine.max_length,
        max_step_tokens=step_tokens,
        max_running=max_running,
        eos_ids=loaded.eos_ids,
        tokenizer=loaded.tokenizer,
        seed=seed,
    )


def _as_list(prompts: AnyPrompt | Sequence[AnyPrompt]) -> Sequence[AnyPrompt]:
    """One prompt, or several? A list of numbers is one."""
    if isinstance(prompts, (str, Prompt)):
        return [prompts]
    if not hasattr(prompts, "__len__"):
        raise RequestError(f"prompts of type {type(prompts).__name__}: pass a text, token ids, or a list of those")
    if len(prompts) and isinstance(prompts[0], (int, np.integer)):
        return [prompts]  # type: ignore[list-item]
    return prompts  # type: ignore[return-value]


def _one_each(params: SamplingParams | Sequence[SamplingParams] | None, count: int) -> Sequence[SamplingParams]:
    if params is None or isinstance(params, SamplingParams):
        return [params or SamplingParams()] * count
    if len(params) != count:
        raise RequestError(f"{len(params)} sampling parameters for {count} prompts: give one for all, or one each")
    return params


def _collect(news: queue.SimpleQueue[Update | HybridKVError], count: int, progress: bool) -> dict[str, Result]:
    """Wait for all results; tell how far things are."""
    results: dict[str, Result] = {}
    columns = TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn()
    tokens = TextColumn("{task.fields[tokens]:,} tokens")
    screen = Console(stderr=True)  # standard output is for what people ask for
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
