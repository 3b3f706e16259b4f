"""The first half of a request: a prefill worker computes its prompt, or the decode worker is left to do so."""

from __future__ import annotations

import asyncio
import logging
import time
from typing import NamedTuple

import httpx

from hybridkv.route.bodies import Body, early_params, prefill_body, transfer_params
from hybridkv.route.forwarding import WorkerHeaders
from hybridkv.route.metrics import Metrics
from hybridkv.route.pool import Pool, Worker
from hybridkv.route.upstream import Link, Reply, ReplyTooLarge, Upstream
from hybridkv.serve.service import CHAT

LOG = logging.getLogger("hybridkv.route")
_ASK_AGAIN_S = 5.0
"""Time after which a worker is asked again where its link is, if it did not say."""


class Asked(NamedTuple):
    """One request of a client."""

    id: str
    path: str
    body: Body
    headers: WorkerHeaders

    @property
    def is_chat(self) -> bool:
        return self.path == CHAT


class PrefillRefused(Exception):  # noqa: N818 - no error of ours
    """The prefill worker answers 4xx, which is for the client."""

    def __init__(self, reply: Reply) -> None:
        self.reply = reply


class Early(NamedTuple):
    """A prefill under a chosen transfer id."""

    worker: Worker
    transfer_id: str
    link: Link

    @property
    def params(self) -> Body:
        """For the decode worker."""
        return early_params(self.transfer_id, *self.link)


class Prefills:
    """Sends prompts to prefill workers."""

    def __init__(self, pool: Pool, upstream: Upstream, metrics: Metrics, timeout_s: float) -> None:
        self._pool = pool
        self._upstream = upstream
        self._metrics = metrics
        self._timeout_s = timeout_s
        self._links: dict[Worker, tuple[Link | None, float]] = {}

    def choose(self, asked: Asked) -> Worker | None:
        worker = self._pool.choose()
        if worker is None:
            self._fall_back(asked, None, "no_worker")
        return worker

    async def compute(self, worker: Worker, asked: Asked) -> Body | None:
        """Compute a prompt. Returns what the decode worker is told, or None if it has to compute the prompt itself."""
        reply = await self._send(worker, asked, prefill_body(asked.body, asked.is_chat))
        params = transfer_params(reply.content) if reply is not None else None
        if reply is not None and params is None:
            self._fall_back(asked, worker, "no_transfer")
        return params

    async def early(self, worker: Worker, asked: Asked, transfer_id: str) -> Early | None:
        """A prefill that a decode worker can wait for, or None if the worker does not tell its link's address."""
        link, asked_at = self._links.get(worker, (None, float("-inf")))
        if link is None and time.monotonic() - asked_at > _ASK_AGAIN_S:
            link = await self._upstream.link_of(worker, asked.headers)
            self._links[worker] = (link, time.monotonic())
            if link is None:
                LOG.warning("no early prefill: GET /v1/link does not answer", extra={"facts": {"worker": worker.url}})
        return Early(worker, transfer_id, link) if link is not None else None

    async def compute_early(self, early: Early, asked: Asked) -> bool:
        """Compute a prompt under a chosen transfer id. False: it has failed."""
        body = prefill_body(asked.body, asked.is_chat, early.transfer_id)
        is_done = await self._send(early.worker, asked, body) is not None
        if not is_done:
            self._links.pop(early.worker, None)  # it may start again elsewhere
        return is_done

    async def _send(self, worker: Worker, asked: Asked, body: Body) -> Reply | None:
        """The reply of a worker that has computed the prompt. None: it has not, which is counted."""
        start = time.monotonic()
        try:
            async with asyncio.timeout(self._timeout_s):
                reply = await self._upstream.post(worker, asked.path, body, asked.headers)
        except (TimeoutError, httpx.ConnectTimeout):
            self._pool.mark_down(worker)
            self._fall_back(asked, worker, "timeout")
            return None
        except httpx.TransportError:
            self._pool.mark_down(worker)
            self._fall_back(asked, worker, "down")
            return None
        except ReplyTooLarge:
            self._fall_back(asked, worker, "failed")
            return None
        if 400 <= reply.status < 500:
            raise PrefillRefused(reply)
        if reply.status != 200:
            self._fall_back(asked, worker, "failed")
            return None
        self._metrics.prefill_s.observe(time.monotonic() - start)
        return reply

    def _fall_back(self, asked: Asked, worker: Worker | None, reason: str) -> None:
        self._metrics.fell_back(reason)
        facts = {"request": asked.id, "reason": reason, "worker": worker.url if worker is not None else "none"}
        LOG.warning("the decode worker computes the prompt", extra={"facts": facts})
