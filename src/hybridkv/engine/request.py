"""Requests and their samples: parameters, progress and results."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

from torch import Tensor

from hybridkv.cache import Lease, LookupKey, Match
from hybridkv.cache.tokens import TOKEN_BYTES, pack_tokens
from hybridkv.engine.inspection.publishing import Publishing
from hybridkv.engine.inspection.record import RequestRecord
from hybridkv.engine.inspection.request_log import RequestLog
from hybridkv.engine.prompts import Prompt
from hybridkv.engine.results import Completion, Metrics, Received, Result, Update
from hybridkv.engine.sampling.params import SamplingParams
from hybridkv.engine.sampling.sampler import Sampled, TokenLogprobs
from hybridkv.engine.sampling.sampling_state import SamplingState
from hybridkv.engine.streaming.transfer import Stage, Transfer
from hybridkv.engine.taps import Tapped
from hybridkv.engine.text import TextStream
from hybridkv.stream import BlockKeys, Streamer

if TYPE_CHECKING:
    from hybridkv.engine.linking.prefills import Prefill
    from hybridkv.link.arrival import Arrival


class Sample:
    """One of the n continuations of a request. It has a lease while it runs."""

    def __init__(self, request: Request, index: int, row: SamplingState, text: TextStream) -> None:
        self.request = request
        self.index = index
        self.row = row
        self.text = text
        self.turn = 0
        """Number of its first start, counted over all samples. A fork has its parent's; 0: it has not run yet."""
        self.lease: Lease | None = None
        self.token_ids: list[int] = []
        self.logprobs: list[TokenLogprobs] = []
        self.match: Match | None = None
        """The cache's match, from the scheduler's last lookup. None while the sample runs."""
        self.has_followed = False
        self.transfer: Transfer | None = None
        """The transfer from the store; None if no lookup was made since the sample was last queued."""
        self.preemptions = 0
        self.failures = 0
        """Failed steps since the sample last made progress."""
        self.failed_at = 0
        """Highest end position of those failed steps."""
        self.error: str | None = None
        self.finish_reason: str | None = None
        self.stop: int | str | None = None
        self._pieces: list[str] = []
        self._told = 0
        self._told_pieces = 0
        self.hidden: Tensor | None = None
        """Hidden states of its prompt and reply, once it has ended; of "all" tokens only."""
        self._keys: BlockKeys | None = None
        self._tokens = request.prompt.ids.packed

    @property
    def has_run(self) -> bool:
        return self.turn > 0

    @property
    def rank(self) -> tuple[int, int]:
        """Scheduling order of samples that have run: a lower rank is older."""
        return self.turn, self.index

    @property
    def tokens(self) -> bytes:
        """The prompt and the sampled tokens, packed. The same object until a token is added."""
        num_packed = len(self._tokens) // TOKEN_BYTES - self.request.prompt_tokens
        if num_packed < len(self.token_ids):
            self._tokens += pack_tokens(self.token_ids[num_packed:])
        return self._tokens

    @property
    def key(self) -> LookupKey:
        """Lookup key for its tokens in the cache. It has taps until the hidden states have been read."""
        request = self.request
        is_read = request.hidden is not None and request.params.hidden_tokens == "prompt"
        return request.key if is_read else request.key._replace(taps=request.tapped.groups)

    @property
    def wants_prompt_rows(self) -> bool:
        """Whether the hidden states of its prompt are to be read as soon as they are computed.

        Of "all" tokens those of the prompt are needed alone if some of its siblings may end without a lease.
        """
        request = self.request
        is_alone = request.params.hidden_tokens == "all" and request.params.n == 1
        return bool(request.tapped.numbers) and request.hidden is None and not is_alone

    @property
    def wants_all_rows(self) -> bool:
        """Whether the hidden states of its prompt and reply are to be read when it ends."""
        return bool(self.request.tapped.numbers) and self.request.params.hidden_tokens == "all"

    @property
    def remaining(self) -> int:
        """Number of known tokens that are not computed yet."""
        assert self.lease is not None
        return self.lease.num_tokens - self.lease.computed

    @property
    def to_compute(self) -> int:
        """Number of tokens its next steps compute: 0 while a step is in flight; tokens to be loaded do not count."""
        assert self.lease is not None
        if not self.is_idle:
            return 0
        return self.lease.num_tokens - max(self.lease.computed, self.load_to)

    @property
    def load_to(self) -> int:
        """Token position up to which its next step loads from the store; 0 if it loads nothing."""
        return 0 if self.transfer is None else self.transfer.load_to

    @property
    def is_idle(self) -> bool:
        """Whether it runs, has no step in flight, and does not wait for another engine to send its prompt."""
        return self.lease is not None and not self.lease.in_flight and self.request.arrival is None

    @property
    def is_loading(self) -> bool:
        """Whether it waits for an asynchronous load."""
        return self.transfer is not None and self.transfer.stage is Stage.LOADING

    @property
    def full_text(self) -> str:
        return "".join(self._pieces)

    def started(self) -> None:
        """Called when it gets a lease, for the first time or again."""
        assert self.lease is not None
        if self.request.started_s is None:
            self.request.started_s = time.monotonic()
            self.request.log.note("started", end=self.lease.cached_tokens)
            self.request.cached_tokens = min(self.lease.cached_tokens, self.request.prompt_tokens)

    def keys(self, streamer: Streamer) -> BlockKeys:
        """The keys of its blocks in stores."""
        if self._keys is None:
            self._keys = streamer.finder.block_keys(self.request.key.root)
        return self._keys

    def loaded(self, position: int) -> None:
        """Called when a store has supplied its tokens up to `position`."""
        if self.request.first_token_s is None:
            self.request.cached_tokens = min(position, self.request.prompt_tokens)

    def tokens_left(self, max_model_len: int) -> int:
        """Tokens that the sample may have after the next one."""
        count, params = len(self.token_ids) + 1, self.request.params
        most = max_model_len - self.request.prompt_tokens
        return (most if params.max_tokens is None else min(most, params.max_tokens)) - count

    def ends_at(self, sampled: Sampled) -> bool:
        """Whether the token itself ends the sample."""
        return sampled.error is not None or sampled.token in self.row.ends

    def push(self, sampled: Sampled, max_model_len: int) -> None:
        """Append one sampled token; finish the sample if it is the last one."""
        request, params, token = self.request, self.request.params, sampled.token
        now = time.monotonic()
        if request.first_token_s is None:
            request.first_token_s = now
            request.log.note("first token")
        request.last_token_s = now
        self.token_ids.append(token)
        if sampled.logprobs is not None:
            self.logprobs.append(sampled.logprobs)
        self.row.append(token)
        if token in self.row.ends:
            self.finish("stop", token if token in params.stop_token_ids else None)
            return
        self._pieces.append(self.text.push(token))
        if self.text.stopped_by is not None:
            self.finish("stop", self.text.stopped_by)
        elif len(self.token_ids) == params.max_tokens or request.prompt_tokens + len(self.token_ids) >= max_model_len:
            self.finish("length")

    def finish(self, reason: str, stop: int | str | None = None) -> None:
        self._pieces.append(self.text.finish())
        self.finish_reason, self.stop = reason, stop

    def completion(self) -> Completion:
        assert self.finish_reason is not None
        logprobs = self.logprobs if self.request.params.logprobs is not None else None
        return Completion(
            self.index,
            self.token_ids,
            self.full_text,
            self.finish_reason,
            self.stop,
            logprobs,
            self.error,
            self._rows(),
        )

    def _rows(self) -> Tensor | None:
        """Hidden states for its completion. One that failed or was aborted has none."""
        if self.finish_reason not in ("stop", "length"):
            return None
        return self.request.hidden if self.hidden is None else self.hidden

    def take_update(self) -> Update:
        """The tokens and text since the previous update."""
        first, first_piece = self._told, self._told_pieces
        self._told, self._told_pieces = len(self.token_ids), len(self._pieces)
        return Update(
            self.request.id,
            self.index,
            self.token_ids[first:],
            "".join(self._pieces[first_piece:]),
            self.logprobs[first:] if self.request.params.logprobs is not None else None,
            self.request.cached_tokens,
            self.finish_reason,
            self.request.result() if self.finish_reason is not None else None,
        )


class Request:
    """A prompt and its samples."""

    def __init__(
        self,
        request_id: str,
        prompt: Prompt,
        params: SamplingParams,
        key: LookupKey,
        tapped: Tapped,
        publishing: Publishing,
        *,
        client: str,
        has_store: bool,
        adapter: str | None = None,
    ) -> None:
        self.id = request_id
        self.client = client
        """Requests of different clients start in turn."""
        self.adapter = adapter
        """The name of the adapter that computes it; None: the model alone. Its key is in `key`."""
        self.prompt = prompt
        self.prompt_tokens = prompt.num_tokens
        self.breakpoints = prompt.breakpoints
        self.params = params
        self.key = key
        """Lookup key for its tokens, in the cache and in stores."""
        self.tapped = tapped
        self.hidden: Tensor | None = None
        """Hidden states of its prompt, once they have been read."""
        self.samples: list[Sample] = []
        self.num_samples = params.n
        """Number of samples at the end. Lower than `params.n` if the request ends before its samples are forked."""
        self.cached_tokens = 0
        self.arrival: Arrival | None = None
        """Its prompt, while it is to come from another engine."""
        self.prefill: Prefill | None = None
        """Set if its prompt is computed for another engine."""
        self.kv_transfer_params: dict[str, Any] | None = None
        """What the other engine needs to fetch its prompt."""
        self.received: Received | None = None
        """What came from another engine."""
        self.arrived_s = time.monotonic()
        self.log = RequestLog(publishing, self.arrived_s, has_store=has_store)
        self.record: RequestRecord | None = None
        """Set once all its samples have ended."""
        self.started_s: float | None = None
        self.first_token_s: float | None = None
        self.last_token_s: float | None = None

    @property
    def num_to_fork(self) -> int:
        """Number of its samples that are forked when its prompt has been computed."""
        return max(0, self.num_samples - len(self.samples))

    @property
    def is_over(self) -> bool:
        """Whether all its samples have ended."""
        return len(self.samples) >= self.num_samples and all(one.finish_reason is not None for one in self.samples)

    def result(self) -> Result | None:
        """The result; None until all samples have ended."""
        if not self.is_over:
            return None
        samples = sorted(self.samples, key=lambda sample: sample.index)
        completions = [sample.completion() for sample in samples]
        return Result(
            self.id,
            self.prompt.token_ids,
            self.cached_tokens,
            completions,
            self.metrics(),
            self.tapped.names,
            self.kv_transfer_params,
            self.received,
            self.record,
        )

    def metrics(self) -> Metrics:
        now = time.monotonic()
        first = self.first_token_s or now
        last = self.last_token_s or now
        longest = max(len(sample.token_ids) for sample in self.samples)
        return Metrics(
            queue_s=(self.started_s or now) - self.arrived_s,
            ttft_s=first - self.arrived_s,
            total_s=last - self.arrived_s,
            per_token_s=(last - first) / (longest - 1) if longest > 1 else 0.0,
            preemptions=sum(sample.preemptions for sample in self.samples),
        )
