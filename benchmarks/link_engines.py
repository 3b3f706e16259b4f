"""Engines in processes of their own, one to three cores wide, and the small models that they run."""

from __future__ import annotations

import asyncio
import os
import threading
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import CancelledError, Future
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from engine_models import Shape

MAX_TOKENS = 8192
VOCAB_SIZE = 2048
BATCHED_TOKENS = 512
"""Prompts are computed in steps of this many tokens."""


def _gemma3() -> Any:
    from transformers import Gemma3TextConfig

    return Gemma3TextConfig(
        vocab_size=VOCAB_SIZE,
        hidden_size=384,
        num_hidden_layers=6,
        num_attention_heads=6,
        num_key_value_heads=2,
        head_dim=64,
        intermediate_size=1024,
        sliding_window=256,
        layer_types=["full_attention" if i == 5 else "sliding_attention" for i in range(6)],
        query_pre_attn_scalar=64,
        max_position_embeddings=MAX_TOKENS,
        bos_token_id=None,
        eos_token_id=None,
        pad_token_id=None,
    )


def _qwen3_next() -> Any:
    from transformers import Qwen3NextConfig

    return Qwen3NextConfig(
        vocab_size=VOCAB_SIZE,
        hidden_size=384,
        num_hidden_layers=4,
        num_attention_heads=6,
        num_key_value_heads=2,
        head_dim=64,
        linear_num_key_heads=2,
        linear_num_value_heads=4,
        linear_key_head_dim=64,
        linear_value_head_dim=64,
        layer_types=["full_attention" if i == 3 else "linear_attention" for i in range(4)],
        intermediate_size=1024,
        moe_intermediate_size=256,
        shared_expert_intermediate_size=256,
        num_experts=4,
        num_experts_per_tok=2,
        decoder_sparse_step=1,
        norm_topk_prob=True,
        max_position_embeddings=MAX_TOKENS,
        bos_token_id=None,
        eos_token_id=None,
        pad_token_id=None,
    )


SHAPES = {
    "gemma3-like": Shape(VOCAB_SIZE, _gemma3, large=False),
    "qwen3_next-like": Shape(VOCAB_SIZE, _qwen3_next, large=False),
}


@dataclass
class Record:
    """What became of one request. Times are of the clock that all processes share."""

    times: list[float] = field(default_factory=list)
    """One for each token."""
    tokens: list[int] = field(default_factory=list)
    cached_tokens: int = 0
    received: dict[str, Any] | None = None
    kv_transfer_params: dict[str, Any] | None = None


class Worker:
    """One engine. Requests run beside each other; `wait` and `stop` end them."""

    def __init__(self, directory: Path, cores: Sequence[int], memory: str, link: Mapping[str, Any] | None) -> None:
        os.sched_setaffinity(0, cores)
        import torch
        from transformers.utils.logging import disable_progress_bar

        from hybridkv import Engine
        from hybridkv.link.link import LinkOptions

        torch.set_num_threads(len(cores))
        disable_progress_bar()
        self.engine = Engine(
            directory,
            memory=memory,
            max_num_batched_tokens=BATCHED_TOKENS,
            link=None if link is None else LinkOptions(**link),
        )
        self._loop = asyncio.new_event_loop()
        threading.Thread(target=self._loop.run_forever, daemon=True).start()
        self._running: dict[str, tuple[Record, Future[None]]] = {}

    def port(self) -> int:
        return 0 if self.engine.link is None else self.engine.link.port

    def failures(self) -> dict[str, int]:
        return {} if self.engine.link is None else dict(self.engine.link.stats.snapshot().failures)

    def submit(self, tag: str, prompt: list[int], max_tokens: int, params: Mapping[str, Any] | None = None) -> None:
        record = Record()
        self._running[tag] = (
            record,
            asyncio.run_coroutine_threadsafe(self._follow(record, prompt, max_tokens, params), self._loop),
        )

    def wait(self, tag: str) -> Record:
        record, future = self._running.pop(tag)
        future.result(120)
        return record

    def stop(self, tag: str) -> Record:
        """Abort a request."""
        record, future = self._running.pop(tag)
        future.cancel()
        with suppress(CancelledError):
            future.result(120)
        return record

    async def _follow(
        self, record: Record, prompt: list[int], max_tokens: int, params: Mapping[str, Any] | None
    ) -> None:
        from hybridkv import SamplingParams

        sampling = SamplingParams(max_tokens=max_tokens, temperature=0, ignore_eos=True)
        async for update in self.engine.stream(prompt, sampling, kv_transfer_params=params):
            record.times += [time.perf_counter()] * len(update.token_ids)
            record.tokens += update.token_ids
            if update.result is not None:
                result = update.result
                record.cached_tokens = result.cached_tokens
                record.kv_transfer_params = result.kv_transfer_params
                if result.received is not None:
                    came = result.received
                    record.received = {
                        "bytes": came.num_bytes,
                        "descriptors": came.num_descriptors,
                        "full_attention_bytes": came.full_attention_bytes,
                        "seconds": came.seconds,
                    }

    def close(self) -> None:
        self.engine.close()
