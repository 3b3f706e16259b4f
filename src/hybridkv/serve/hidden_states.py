"""Hidden states of requests: which layers, and the way from a result to a file whose path the reply has.

One thread reserves, writes, discards and sweeps, in the order in which it is told to. So what a disconnected client
asked for is discarded after it was written, and the directory needs no lock.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import TypeVar

import torch

from hybridkv.engine import Engine, Prompt, Result, SamplingParams
from hybridkv.errors import DiskError, RequestError
from hybridkv.serve.hidden_folder import HiddenFolder, new_name
from hybridkv.serve.requests import ChatRequest, CompletionRequest
from hybridkv.workers import Workers

LOG = logging.getLogger("hybridkv.serve")
T = TypeVar("T")
FIELD = "hidden_states"
_SWEEPS_PER_TTL = 10
_LEAST_REST_S = 0.05
_MOST_REST_S = 60.0
_PATIENCE_S = 5.0
"""Time for the last files to be written or discarded when the server stops."""


class HiddenStates:
    """Hidden states of one server."""

    def __init__(self, engine: Engine, folder: HiddenFolder | None, layers: Sequence[int | str]) -> None:
        """`layers`: the operator's default. Raises RequestError if the model does not have them."""
        self.folder = folder
        self._engine = engine
        self._layers = tuple(layers)
        self._workers = Workers(1, "hybridkv-hidden-states")
        if layers:
            engine.check(Prompt([0]), SamplingParams(max_tokens=1, hidden_layers=self._layers))

    def params(self, body: CompletionRequest | ChatRequest, params: SamplingParams) -> SamplingParams:
        """`params` with the layers that are asked for, or by default. Raises RequestError if there can be none."""
        wanted, obstacle = body.hidden_states, _obstacle(body, params)
        if wanted is None:
            is_default = body.return_token_ids and obstacle is None and self.folder is not None
            return replace(params, hidden_layers=self._layers) if is_default else params
        if wanted is False:
            return params
        if self.folder is None:
            raise RequestError("hidden_states: this server writes none; start it with --hidden-states-dir", FIELD)
        if obstacle is not None:
            raise RequestError(f"hidden_states with {obstacle}: ask for one reply to one prompt, in one piece", FIELD)
        layers = self._layers if wanted is True or wanted.layers is None else wanted.layers
        if not layers:
            raise RequestError(
                'hidden_states without layers, and the server has no --hidden-layers: name some, as {"layers": [2]}',
                FIELD,
            )
        return replace(params, hidden_layers=layers, hidden_tokens="prompt" if wanted is True else wanted.tokens)

    @asynccontextmanager
    async def place(
        self, prompt: Prompt, params: SamplingParams
    ) -> AsyncGenerator[Callable[[Result], Awaitable[Path | None]]]:
        """Space for the hidden states of a prompt, and the function that writes them. An error leaves no file."""
        folder, name = self.folder, new_name()
        assert folder is not None

        async def write(result: Result) -> Path | None:
            rows = result.hidden_states
            if rows is None:  # the reply failed
                self._workers.submit(lambda: folder.discard(name))
                return None
            token_ids = torch.tensor([*result.prompt_token_ids, *result.token_ids][: len(rows)])
            return await self._run(lambda: folder.write(name, rows, token_ids))

        most_tokens, num_layers = self._most_tokens(prompt, params), len(params.hidden_layers)
        hidden_size = self._engine.plan.model.hidden_size
        try:
            await self._run(lambda: folder.reserve(name, most_tokens, num_layers, hidden_size))
            yield write
        except BaseException:
            self._workers.submit(lambda: folder.discard(name))
            raise

    async def sweep_forever(self) -> None:
        """Remove files whose time has passed, again and again."""
        folder = self.folder
        if folder is None:
            return
        rest_s = min(max(folder.ttl_s / _SWEEPS_PER_TTL, _LEAST_REST_S), _MOST_REST_S)
        while True:
            try:
                await self._run(folder.sweep)
            except DiskError as error:
                LOG.warning("hidden states are not removed in time: %s", error)
            await asyncio.sleep(rest_s)

    def close(self) -> None:
        """Files that are there stay: their readers may be about to read them."""
        self._workers.close(_PATIENCE_S)

    def _most_tokens(self, prompt: Prompt, params: SamplingParams) -> int:
        """Most tokens that have hidden states. The last one of a reply has none."""
        if params.hidden_tokens == "prompt":
            return prompt.num_tokens
        longest = self._engine.max_model_len
        return min(longest, prompt.num_tokens + (params.max_tokens or longest)) - 1

    async def _run(self, work: Callable[[], T]) -> T:
        return await asyncio.wrap_future(self._workers.submit(work))


def _obstacle(body: CompletionRequest | ChatRequest, params: SamplingParams) -> str | None:
    """Why a request can have no hidden states."""
    if body.stream:
        return "stream"
    if params.n > 1:
        return f"n {params.n}"
    return f"{body.num_prompts} prompts" if body.num_prompts > 1 else None
