"""The public engine: `Engine(model).generate(prompts)`, or `async for update in engine.stream(prompt)`."""

from __future__ import annotations

import asyncio
import itertools
import queue
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np
import torch
from transformers import PreTrainedModel
from xxhash import xxh3_128

from hybridkv.cache import DEFAULT_POLICY, LookupKey, lookup_key
from hybridkv.chats import Mark, Message, check_text
from hybridkv.engine.adapters.adapters import check_adapter, read_adapters
from hybridkv.engine.assembly import (
    Settings,
    about_kernels,
    as_store,
    build_core,
    check_kinds,
    check_limits,
    plan_options,
)
from hybridkv.engine.batches import AnyPrompt, as_list, collect, one_each
from hybridkv.engine.chat import render_chat
from hybridkv.engine.compiling import check_compile
from hybridkv.engine.inspection.inspection import Inspection
from hybridkv.engine.limits import check_request_id
from hybridkv.engine.loading.checkpoint import load
from hybridkv.engine.loading.devices import choose_device
from hybridkv.engine.loading.identity import model_identity
from hybridkv.engine.loop import EngineLoop, Sink, Submission
from hybridkv.engine.prompts import Prompt, TokenIdList, on_host, pack_ids
from hybridkv.engine.results import Result, Update
from hybridkv.engine.runner import LayerObserver
from hybridkv.engine.sampling.params import SamplingParams
from hybridkv.engine.stats import EngineStats
from hybridkv.engine.streaming.store_traffic import check_streaming
from hybridkv.errors import HybridKVError, InputError, RequestError
from hybridkv.link import params as transfer_params
from hybridkv.link.agent import check_nixl
from hybridkv.link.link import Link, LinkOptions
from hybridkv.link.params import RemoteDecode, RemotePrefill
from hybridkv.plan.plan import DEFAULT_BLOCK_TOKENS, DEFAULT_ROW_ORDER
from hybridkv.renamed import refuses_old_names
from hybridkv.store import Store
from hybridkv.stream import LOAD_TIMEOUT_S


@refuses_old_names
class Engine:
    """A stock Hugging Face model, served from one arena. Close it, or use it in a `with` block."""

    def __init__(
        self,
        model: str | Path | PreTrainedModel,
        *,
        memory: str | int = "2GiB",
        dtype: str | torch.dtype = "auto",
        device: str | torch.device = "auto",
        kv_cache_dtype: str | torch.dtype | None = None,
        state_dtype: str | torch.dtype | None = None,
        block_size: int = DEFAULT_BLOCK_TOKENS,
        attn_pack_size: int | None = None,
        row_layers: int | None = None,
        row_order: str = DEFAULT_ROW_ORDER,
        policy: str = DEFAULT_POLICY,
        max_num_batched_tokens: int | None = None,
        max_num_seqs: int = 256,
        max_model_len: int | None = None,
        tokenizer: str | Path | Any | None = None,
        trust_remote_code: bool = False,
        seed: int | None = None,
        store: str | Sequence[str] | Store | None = None,
        stream: str = "auto",
        load_timeout_s: float = LOAD_TIMEOUT_S,
        compile: bool | None = None,
        graphs: bool = True,
        adapters: Mapping[str, str | Path] | None = None,
        link: LinkOptions | None = None,
    ) -> None:
        """Load a model and start the engine.

        `model`: directory of a saved transformers model, or a model in memory.
        `memory`: size of the cache; the model's weights are not included.
        `dtype`, `device`: "auto" takes the checkpoint's dtype (float32 for bfloat16 on a CPU that computes it in
            software), and a GPU if there is one.
        `kv_cache_dtype`, `state_dtype`: dtypes of cached keys and values (default: the model's) and states (float32).
        `block_size`: tokens in a block.
        `attn_pack_size`: number of full-attention layers that share a page (default: all).
        `row_layers`: number of layers that are loaded and stored together (default: depends on the device).
        `row_order`: order of heads (h), layers (l), K/V (k) and tokens (t) inside such a row, outermost first.
        `max_num_batched_tokens`, `max_num_seqs`: most tokens in a step, most samples that run at a time.
        `max_model_len`: most tokens of a prompt and its reply; capped by the model and by what fits into `memory`.
        `seed`: for requests without a seed.
        `store`: URLs of stores, the fastest first, or an open store. The engine closes it.
        `stream`: how requests load from the store: "auto", "async" or "layerwise".
        `load_timeout_s`: a request whose load takes longer computes its tokens instead.
        `compile`: compile the model's layers with torch (default: on a GPU, if they can be compiled).
        `graphs`: on a GPU, capture steps that only decode as CUDA graphs when the engine starts.
        `adapters`: directories of LoRA adapters, as peft saves them, by the names that requests give them;
            docs/adapters.md.
        `link`: compute prompts for other engines, or continue prompts of others; docs/disaggregation.md.
        """
        check_streaming(stream, load_timeout_s, has_store=store is not None)
        check_compile(compile)
        if adapters and compile:
            raise InputError("compile=True with adapters: compiled layers compute none; leave one of both out")
        if link is not None:
            link.check()
            check_nixl()
        limits = {"max_num_batched_tokens": max_num_batched_tokens, "max_model_len": max_model_len}
        check_kinds(
            whole={"block_size": block_size, "max_num_seqs": max_num_seqs},
            optional={"attn_pack_size": attn_pack_size, "row_layers": row_layers, **limits},
            seed=seed,
            policy=policy,
            switches={"trust_remote_code": trust_remote_code, "graphs": graphs},
        )
        kind = choose_device(device).type
        settings = Settings(
            plan=plan_options(
                kind,
                memory=memory,
                block_tokens=block_size,
                attn_pack_size=attn_pack_size,
                row_layers=row_layers,
                row_order=row_order,
            ),
            policy=policy,
            max_num_batched_tokens=check_limits(kind, max_num_batched_tokens, max_num_seqs, max_model_len),
            max_num_seqs=max_num_seqs,
            max_model_len=max_model_len,
            seed=seed,
            stream=stream,
            load_timeout_s=load_timeout_s,
            compile=compile,
            graphs=graphs,
            link=link,
            adapters=read_adapters(adapters),
        )
        opened = as_store(store) if store is not None else None  # a bad URL is known before a model is loaded
        try:
            loaded = load(
                model,
                dtype=dtype,
                device=device,
                kv_cache_dtype=kv_cache_dtype,
                state_dtype=state_dtype,
                tokenizer=tokenizer,
                trust_remote_code=trust_remote_code,
                with_identity=opened is not None or link is not None,
                is_alone=max_num_seqs == 1,
            )
            self._core = build_core(loaded, settings, opened)
        except BaseException:
            if opened is not None:
                opened.close()
            raise
        self.plan = self._core.runner.memory.plan
        self.model_name = loaded.spec.name
        self.device = loaded.device
        self.tokenizer = loaded.tokenizer
        self.max_model_len = self._core.limits.max_model_len
        self.is_short_of_memory = self._core.limits.is_short_of_memory
        """Whether more `memory` would raise `max_model_len`."""
        self._streaming = self._core.streaming
        self._loop = EngineLoop(self._core)
        if self._streaming is not None:
            self._streaming.streamer.on_event = self._loop.wake_up
        self._linking = self._core.linking
        if self._linking is not None:
            self._linking.on_event = self._tend_link
        self._inspection = Inspection(self._core, self._loop)
        self._adapters = settings.adapters
        self._numbers = itertools.count()
        self._identity = loaded.identity

    # --- using it -----------------------------------------------------------------------------------------------------

    @refuses_old_names
    def generate(
        self,
        prompts: AnyPrompt | Sequence[AnyPrompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        adapter: str | None = None,
        cache_salt: str = "",
        kv_transfer_params: Mapping[str, Any] | None = None,
        client: str = "",
        progress: bool = True,
    ) -> list[Result]:
        """Complete all prompts; results are in the same order. A prompt is a text, token ids, or from `render_chat`.

        `sampling_params`: one for all prompts, or one for each. `adapter`: the name of one of the engine's `adapters`;
        None: the model alone. `cache_salt`: requests with different salts share no cached data.
        `kv_transfer_params`: of one prompt, for an engine with a link; see `stream`. `client`: whose prompts these
        are; waiting prompts of different clients start in turn.
        Bad prompts and parameters are refused before any request starts. All requests start together: what their
        prompts share is computed once.
        """
        asked = as_list(prompts)
        remote = self.check_transfer(kv_transfer_params, len(asked))
        chosen = one_each(sampling_params, len(asked))
        requests, key = self._checked(asked, chosen), self._key(cache_salt, adapter)
        news: queue.SimpleQueue[Update | HybridKVError] = queue.SimpleQueue()
        submitted = [
            self._submission(prompt, params, key, news.put, remote, client, adapter)
            for prompt, params in zip(requests, chosen, strict=True)
        ]
        try:
            self._loop.add(submitted)
            results = collect(news, len(submitted), progress)
        except BaseException:
            self._loop.abort(submitted)
            raise
        return [results[one.request_id] for one in submitted]

    @refuses_old_names
    async def stream(
        self,
        prompt: AnyPrompt,
        sampling_params: SamplingParams | None = None,
        *,
        adapter: str | None = None,
        cache_salt: str = "",
        kv_transfer_params: Mapping[str, Any] | None = None,
        client: str = "",
        request_id: str | None = None,
    ) -> AsyncIterator[Update]:
        """Yield updates as tokens are sampled; the last has the result. Leaving the loop early aborts the request.

        `adapter`: the name of one of the engine's `adapters`; None: the model alone.
        `client`: whose request it is; waiting requests of different clients start in turn.
        `request_id`: its name in updates, results and records, a text of 1 to 256 characters; no other running request
        may have it.
        `kv_transfer_params`: {"do_remote_decode": True} ends the request after its first token and keeps its prompt for
        another engine; that engine gets the result's `kv_transfer_params`, with the same prompt and parameters.
        """
        remote = self.check_transfer(kv_transfer_params)
        check_request_id(request_id)
        ready = self.prepare(prompt)
        [chosen] = one_each(sampling_params, 1)
        self.check(ready, chosen)
        key = self._key(cache_salt, adapter)
        loop = asyncio.get_running_loop()
        news: asyncio.Queue[Update | HybridKVError] = asyncio.Queue()

        def sink(update: Update | HybridKVError) -> None:
            loop.call_soon_threadsafe(news.put_nowait, update)

        submitted = self._submission(ready, chosen, key, sink, remote, client, adapter, request_id)
        self._loop.add([submitted])
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
                self._loop.abort([submitted])

    def prepare(self, prompt: AnyPrompt, *, add_special_tokens: bool = True) -> Prompt:
        """Tokenize a prompt. `generate` and `stream` call this themselves; a long text may take a while.

        `add_special_tokens`: let the tokenizer add its special tokens to a text, such as a BOS token.
        """
        if isinstance(prompt, Prompt):
            return prompt
        if isinstance(prompt, str):
            return Prompt(self._need_tokenizer().encode(check_text(prompt), add_special_tokens=add_special_tokens))
        ids = on_host(prompt)
        if isinstance(ids, (bytes, bytearray)) or not isinstance(ids, (Sequence, np.ndarray)):
            kind = type(prompt).__name__
            hint = "; render_chat makes one of messages" if isinstance(prompt, Mapping) else ""
            raise RequestError(f"a prompt of type {kind}: pass a text, a list of token ids, or a Prompt{hint}")
        return Prompt(ids)

    def check(self, prompt: Prompt, params: SamplingParams) -> None:
        """Raises RequestError if the request can never be served, and EngineError if the engine is closed or failed."""
        self.check_alive()
        self._core.limits.check(prompt, params)

    def check_transfer(
        self, kv_transfer_params: Mapping[str, Any] | None, num_prompts: int = 1
    ) -> RemoteDecode | RemotePrefill | None:
        """What `kv_transfer_params` ask for. Raises RequestError if this engine cannot do it."""
        remote = transfer_params.parse(kv_transfer_params, self.link)
        if remote is not None and num_prompts > 1:
            raise RequestError(f"kv_transfer_params with {num_prompts} prompts: pass one", transfer_params.FIELD)
        return remote

    @property
    def link(self) -> Link | None:
        """The link to other engines, if there is one."""
        return None if self._linking is None else self._linking.link

    @property
    def adapters(self) -> dict[str, Path]:
        """The directories of its adapters, by name."""
        return {name: one.adapter.directory for name, one in self._adapters.items()}

    @property
    def kernels(self) -> str:
        """Whose kernels compute prefill and decode, such as "prefill torch, decode triton", and which are not used."""
        return about_kernels(self._core.runner)

    def check_length(self, num_tokens: int) -> None:
        """Raises RequestError if a prompt of this length leaves no room for a reply. `check` includes this check."""
        self._core.limits.check_length(num_tokens)

    def check_alive(self) -> None:
        """Raises EngineError if the engine was closed or has failed."""
        self._loop.check_alive()

    @refuses_old_names
    def render_chat(
        self,
        messages: Sequence[Message],
        *,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        add_special_tokens: bool = False,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        marks: Sequence[Mark] = (),
        has_ends: bool = True,
    ) -> Prompt:
        """Render messages with the model's chat template; the prompt has breakpoints after messages.

        `continue_final_message`: leave the last message open; needs `add_generation_prompt=False`.
        `add_special_tokens`: add the tokenizer's special tokens to those of the template.
        `chat_template_kwargs`: further arguments of the template, such as `enable_thinking` of Qwen's.
        `marks`: further breakpoints, inside messages or after tools. `has_ends`: False leaves out those after messages.
        """
        return render_chat(
            self._need_tokenizer(),
            messages,
            add_generation_prompt=add_generation_prompt,
            continue_final_message=continue_final_message,
            add_special_tokens=add_special_tokens,
            options=chat_template_kwargs,
            marks=marks,
            has_ends=has_ends,
        )

    def detokenize(self, token_ids: TokenIdList | Prompt, *, skip_special_tokens: bool = False) -> str:
        """The text of token ids, or of a prompt."""
        ids = token_ids.ids if isinstance(token_ids, Prompt) else pack_ids(on_host(token_ids))
        self._core.limits.check_ids(ids)
        text: str = self._need_tokenizer().decode(ids.as_array().tolist(), skip_special_tokens=skip_special_tokens)
        return text

    def stats(self) -> EngineStats:
        """Counters and current usage, read between two steps. docs/stats.md explains each number."""
        stats = self._loop.call(lambda: EngineStats.of(self._core))
        return stats if self._streaming is None else replace(stats, store=self._streaming.streamer.store.stats)

    @property
    def inspection(self) -> Inspection:
        """What people see of the engine: snapshots of its memory, its last steps, records, and pins by hand."""
        return self._inspection

    def model_digest(self, adapter: str | None = None) -> str:
        """A digest of the model's weights and configuration: the same for the same model, wherever it lies.

        `adapter`: the name of one of the engine's `adapters`, which the digest then covers, too.
        """
        check_adapter(self._adapters, adapter)
        if not self._identity:
            self._identity = self._loop.call(lambda: model_identity(self._core.runner.model))
        if adapter is None:
            return self._identity
        return xxh3_128(f"{self._identity} {self._adapters[adapter].key}".encode()).hexdigest()

    def reset_cache(self) -> None:
        """Drop everything cached in memory. Running requests continue; data in a store can still be loaded."""
        self._loop.call(self._core.cache.reset)

    def flush_store(self) -> None:
        """Wait until all pending writes to the store are done. Returns at once if there is no store."""
        if self._streaming is not None:
            self._streaming.streamer.drain()

    def observe_layers(self, observer: LayerObserver) -> None:
        """Call `observer` on the engine's thread before and after every decoder layer, from the next step on."""
        self._loop.call(lambda: self._core.runner.observe(observer))

    def check_integrity(self) -> None:
        """Verify the cache's bookkeeping from scratch, between two steps. Raises AssertionError if it is wrong."""
        self._loop.call(self._core.cache.check_integrity)

    def close(self) -> None:
        """Abort running requests, stop the engine's thread, and finish pending writes to the store."""
        self._loop.close()
        if self._linking is not None:
            self._linking.link.close()
        self._core.runner.close()
        if self._streaming is not None:
            self._streaming.streamer.close()

    def __enter__(self) -> Engine:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    # --- helpers ------------------------------------------------------------------------------------------------------

    def _checked(self, prompts: Sequence[AnyPrompt], params: Sequence[SamplingParams]) -> list[Prompt]:
        """Prepare and check all prompts. If there are several, an error names the bad one."""
        ready: list[Prompt] = []
        for number, (prompt, one) in enumerate(zip(prompts, params, strict=True), 1):
            try:
                ready.append(self.prepare(prompt))
                self.check(ready[-1], one)
            except RequestError as error:
                if len(prompts) == 1:
                    raise
                raise RequestError(f"prompt {number} of {len(prompts)}: {error}", error.param) from None
        return ready

    def _need_tokenizer(self) -> Any:
        if self.tokenizer is None:
            raise RequestError(f"{self.model_name} has no tokenizer here: pass token ids, or tokenizer= to the engine")
        return self.tokenizer

    def _submission(
        self,
        prompt: Prompt,
        params: SamplingParams,
        key: LookupKey,
        sink: Sink,
        remote: RemoteDecode | RemotePrefill | None,
        client: str,
        adapter: str | None,
        request_id: str | None = None,
    ) -> Submission:
        name = f"request-{next(self._numbers)}" if request_id is None else request_id
        return Submission(name, sink, lambda: self._core.add(name, prompt, params, key, remote, client, adapter))

    def _key(self, cache_salt: str, adapter: str | None) -> LookupKey:
        """The key of a request wherever its KV is kept. Raises RequestError for an adapter that is not known."""
        check_adapter(self._adapters, adapter)
        return lookup_key(cache_salt, () if adapter is None else (self._adapters[adapter].key,))

    def _tend_link(self) -> None:
        """The link has news for the engine's thread."""
        assert self._linking is not None
        self._loop.post(self._linking.tend)
