"""The engine without threads: add requests, call `step` until nothing is left to do. One caller at a time."""

from __future__ import annotations

import logging
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from itertools import islice

import numpy as np
import torch

from hybridkv.cache import Cache, Lease, NoRoom, StepTables
from hybridkv.cache.tokens import PLAIN_KEY, TOKEN_BYTES, LookupKey
from hybridkv.engine.decoding.launched import Entry, Launched, LookAhead
from hybridkv.engine.decoding.step_buffer import MAX_ENDS, Moved, Row
from hybridkv.engine.inspection.publishing import Publishing
from hybridkv.engine.inspection.record import RequestRecord
from hybridkv.engine.inspection.views import topics
from hybridkv.engine.limits import Limits
from hybridkv.engine.linking.handover import sampled_tokens
from hybridkv.engine.linking.linking import Linking
from hybridkv.engine.prompts import Prompt
from hybridkv.engine.request import Request, Sample
from hybridkv.engine.results import Update
from hybridkv.engine.runner import Runner, Work
from hybridkv.engine.sampling import device_draw
from hybridkv.engine.sampling.device_draw import Draw
from hybridkv.engine.sampling.params import SamplingParams
from hybridkv.engine.sampling.sampler import Sampled, Sampler
from hybridkv.engine.sampling.sampling_state import SamplingState
from hybridkv.engine.scheduler import Scheduled, Scheduler
from hybridkv.engine.streaming.store_traffic import Streaming
from hybridkv.engine.text import TextStream, Tokenizer
from hybridkv.errors import EngineError, RequestError
from hybridkv.link.params import RemoteDecode, RemotePrefill

LOG = logging.getLogger("hybridkv.engine")

_MOST_FAILURES = 2
"""Failed steps in a row after which a request ends with an error."""

_CONTEXT_TOKENS = 6
"""Prompt tokens given to the detokenizer, so that it can tell whether the reply starts with a space."""


class EngineCore:
    """Serves requests from arrival to the last token, on one cache and one runner."""

    def __init__(
        self,
        cache: Cache,
        runner: Runner,
        *,
        vocab_size: int,
        max_model_len: int,
        max_num_batched_tokens: int,
        max_num_seqs: int,
        eos_ids: Iterable[int] = (),
        tokenizer: Tokenizer | None = None,
        seed: int | None = None,
        streaming: Streaming | None = None,
        linking: Linking | None = None,
    ) -> None:
        self.cache = cache
        self.runner = runner
        self.streaming = streaming
        self.linking = linking
        self._prefills = linking.prefills if linking is not None else None
        self._receipts = linking.receipts if linking is not None else None
        self.scheduler = Scheduler(
            cache,
            max_num_batched_tokens=max_num_batched_tokens,
            max_num_seqs=max_num_seqs,
            streaming=streaming,
            receipts=self._receipts,
            prefills=self._prefills,
        )
        self.waits = False
        """The last step had nothing to compute: all requests wait for a store."""
        self.calls_wait: Callable[[], bool] = lambda: False
        """Whether calls wait for the end of the current step. Set by the loop."""
        self.limits = Limits(
            cache.layout, vocab_size, max_model_len, runner.num_layers, has_tokenizer=tokenizer is not None
        )
        self.seconds = {"schedule": 0.0, "model": 0.0, "sample": 0.0, "commit": 0.0}
        """Total time of each part of a step."""
        self.steps = 0
        self.computed_tokens = 0
        self.computed_prompt_tokens = 0
        """The part of `computed_tokens` that is of prompts."""
        self.scheduled_samples = 0
        """Samples in steps, all steps together."""
        self.captured_steps = 0
        """Decoding steps that ran as one graph."""
        self._launched: Launched | None = None
        """The decoding step on the device, if there is one."""
        draws_on_device = runner.decoder is not None or device_draw.is_available(runner.device)
        self._sampler = Sampler(runner.device, seed, draws_on_device=draws_on_device)
        self._requests: dict[str, Request] = {}
        self._eos_ids = frozenset(eos_ids)
        self._tokenizer = tokenizer
        if streaming is not None:
            streaming.others_wait = self.others_wait
        self.publishing = Publishing(lambda: sum(self.seconds.values()), lambda: self.has_work)
        self.publishing.topics.update(topics(self))
        self._steps_log = self.publishing.steps
        self.on_record: Callable[[RequestRecord], None] | None = None
        """Called with the record of every request that has ended."""

    @property
    def has_work(self) -> bool:
        return self.scheduler.has_work or self._launched is not None

    def add(
        self,
        request_id: str,
        prompt: Prompt,
        params: SamplingParams,
        key: LookupKey = PLAIN_KEY,
        remote: RemoteDecode | RemotePrefill | None = None,
        client: str = "",
        adapter: str | None = None,
    ) -> None:
        """Queue a request, or refuse it at once if it can never be served.

        `remote`: another engine continues it after its first token, or computes its prompt. `client`: whose request it
        is; those of different clients start in turn. `adapter`: the name of its adapter, whose key is in `key`.
        """
        self.limits.check(prompt, params)
        if isinstance(remote, RemoteDecode):
            params = replace(params, max_tokens=1, min_tokens=min(params.min_tokens, 1))
        if request_id in self._requests:
            raise RequestError(f"request id {request_id!r} is in use: choose another, or leave it out")
        request = Request(
            request_id,
            prompt,
            params,
            key,
            self.limits.tapped(params),
            self.publishing,
            client=client,
            has_store=self.streaming is not None,
            adapter=adapter,
        )
        if isinstance(remote, RemoteDecode):
            assert self._prefills is not None
            request.prefill = self._prefills.begin(request, remote)
        elif remote is not None:
            assert self._receipts is not None
            request.arrival = self._receipts.expect(remote)
        self.scheduler.add(self._new_sample(request, 0))
        self._requests[request_id] = request

    def abort(self, request_id: str) -> list[Update]:
        """End a request now; unknown ids have ended already."""
        request = self._requests.get(request_id)
        if request is None:
            return []
        return self._end_all(request, "abort")

    def step(self) -> list[Update]:
        """Schedule and run one step; returns the updates of the samples in it.

        On a GPU a decoding step is only submitted: the next call returns its updates, after it has submitted the step
        that follows, if nothing but decoding is to be done.
        """
        updates = self._step()
        self._steps_log.note(self)
        return updates

    def _step(self) -> list[Update]:
        if self._launched is not None:
            launched, self._launched = self._launched, None
            return self._finish(launched)
        with self._timed("schedule"):
            if self.streaming is not None:
                self.streaming.collect()
            received = self._receive()
            if received:  # first tokens do not wait for the next step
                self.waits = False
                return received
            scheduled, stuck = self.scheduler.schedule()
        updates = [self._give_up(sample) for sample in stuck]
        self.waits = not scheduled and not stuck
        if not scheduled:
            return updates
        self.steps += 1
        begin = time.perf_counter()
        try:
            with self._timed("model"):
                self._begin_step(scheduled)
                self._launched = self._launch(scheduled)
                if self._launched is not None:
                    return updates
                logits = self._run(scheduled)
            with self._timed("sample"):
                drawing = [self._drawing(sample, tables) for sample, tables in scheduled]
                sampled = self._sample(logits, drawing)
        except Exception as error:
            return updates + self._failed(scheduled, error)
        spent_s = time.perf_counter() - begin
        if self.streaming is None or not self.streaming.is_busy:  # waiting for a store would distort the model's pace
            self.scheduler.pace.observe(sum(tables.end - tables.start for _, tables in scheduled), spent_s)
        for sample, tables in scheduled:
            if tables.start < sample.request.prompt_tokens:
                sample.request.log.computed(tables.start, min(tables.end, sample.request.prompt_tokens), spent_s)
        with self._timed("commit"):
            return updates + self._commit(scheduled, drawing, sampled)

    def others_wait(self) -> bool:
        """Whether a sample that waits for a store in the current step makes others wait: samples or callers."""
        return self.scheduler.num_samples > 1 or self.calls_wait()

    # --- decoding steps on a GPU --------------------------------------------------------------------------------------

    def _launch(self, scheduled: Sequence[Scheduled]) -> Launched | None:
        """Submit a decoding step. None if the step must run as any other."""
        if self.runner.decoder is None:
            return None
        entries = [
            Entry(row, sample, lease, tables, sent=tables.tables)
            for row, (sample, tables) in enumerate(scheduled)
            if (lease := sample.lease) is not None
        ]
        if not all(_decodes(one) for one in entries) or not self.runner.can_decode([one.tables for one in entries]):
            return None
        draws = self._sampler.draws([one.sample.row for one in entries])
        rows = [self._row(one, draw, self._tokens_left(one.sample)) for one, draw in zip(entries, draws, strict=True)]
        return Launched(self.runner.decode(rows), entries)

    def _row(self, one: Entry, draw: Draw, left: int) -> Row:
        return Row(_last_token(one.lease), one.tables, draw, one.sample.row.ends, left)

    def _tokens_left(self, sample: Sample) -> int:
        return sample.tokens_left(self.limits.max_len(sample.request.params))

    def _finish(self, launched: Launched) -> list[Update]:
        """Read the results of a decoding step. If nothing but decoding is to be done, submit the next one, too.

        It is submitted before the results are read if the device needs nothing from them, else right after.
        """
        entries = launched.entries
        with self._timed("schedule"):
            ahead = self._look_ahead(entries)
            following = self._begin_following(entries, ahead) if ahead is not None and ahead.is_free else None
        try:
            with self._timed("sample"):
                rows, places = [one.sample.row for one in entries], [one.row for one in entries]
                sampled = self._sampler.collect(*launched.decoded, rows, places)
        except Exception as error:
            self._drop_aborted(entries)
            return self._failed([Scheduled(one.sample, one.tables) for one in entries if one.is_alive], error)
        self.captured_steps += 1
        self.computed_tokens += len(entries)
        self.scheduled_samples += len(entries)
        self._ran()
        self._drop_aborted(entries)
        drawn = list(zip(entries, sampled, strict=True))
        with self._timed("commit"):
            if ahead is None or (ahead.is_free and following is None):
                return self._commit(*_parted([(one, token) for one, token in drawn if one.is_alive]))
            if self.streaming is not None:
                self.streaming.end_step()
            if following is not None:
                return self._catch_up(drawn, ahead, following)
            return self._follow(drawn, ahead)

    def _drop_aborted(self, entries: Sequence[Entry]) -> None:
        """Free the pages of samples that were aborted while the device worked for them."""
        for one in entries:
            if one.lease.aborted and one.lease.in_flight:
                self.cache.commit(one.lease)

    def _look_ahead(self, entries: Sequence[Entry]) -> LookAhead | None:
        """What is known of the next step while this one runs. None unless it decodes samples of this one alone."""
        alive = [one for one in entries if one.is_alive]
        most = max((one.tables.end for one in alive), default=0)
        if not self.scheduler.only_runs(len(alive)) or not self.runner.can_decode_on(len(alive), most + 1):
            return None
        streaming = self.streaming
        if streaming is not None and any(streaming.dumps_after(one.sample, one.tables) for one in alive):
            return None
        following: dict[int, StepTables] = {}
        unsent: dict[int, StepTables] = {}
        is_free = len(alive) == len(entries)
        for row, sample, lease, tables, sent in alive:
            if sample.request.params.stops or not sample.row.is_plain or len(sample.row.ends) > MAX_ENDS:
                is_free = False
            if sample.request.params.stops or self._tokens_left(sample) <= 0:
                continue
            ahead = self.cache.extend_ahead(lease, tables)
            if ahead is None:
                is_free = False
                continue
            following[row] = ahead
            if ahead.tables is not sent:
                unsent[row] = ahead
        seeds = None
        if any(not one.sample.row.params.greedy for one in alive):
            seeds = self._sampler.draw_seeds([one.sample.row for one in entries], ahead=1)
        moved = Moved([one.row for one in entries], seeds, unsent)
        return LookAhead(following, moved, is_free and bool(following))

    def _begin_following(self, entries: Sequence[Entry], ahead: LookAhead) -> Launched | None:
        """Submit the next step before this one has ended. None if it cannot be submitted: all is committed first."""
        try:
            decoded = self.runner.decode_on(ahead.moved)
        except Exception:
            LOG.exception("a decoding step could not be submitted; the engine prepares it again")
            return None
        self.steps += 1
        going = [_going(one, ahead.following[one.row]) for one in entries if one.row in ahead.following]
        return Launched(decoded, going)

    def _catch_up(self, drawn: Sequence[tuple[Entry, Sampled]], ahead: LookAhead, following: Launched) -> list[Update]:
        """Commit a step while the next one runs. Samples that have ended are padding there."""
        updates: list[Update] = []
        going = {one.row: one for one in following.entries}
        ended: list[int] = []
        for one, token in drawn:
            if one.row in going and not one.sample.ends_at(token):
                going[one.row], update = self._go_on_with(one, token, going[one.row])
                updates += update
            else:
                updates += self._commit(*_parted([(one, token)]))
                going.pop(one.row, None)
                ended.append(one.row)
        assert self.runner.decoder is not None
        self.runner.decoder.retire(ended)
        if going:
            self._launched = following._replace(entries=list(going.values()))
        return updates

    def _follow(self, drawn: Sequence[tuple[Entry, Sampled]], ahead: LookAhead) -> list[Update]:
        """Submit the next decoding step, then commit this one while the next one runs.

        Samples that end here, or whose next step cannot run before this one is committed, are committed first.
        """
        updates: list[Update] = []
        going: dict[int, Entry] = {}
        late: list[tuple[Entry, Sampled]] = []
        changed: dict[int, Row | None] = {}
        for one, token in drawn:
            tables = ahead.following.get(one.row)
            if tables is not None and not one.sample.ends_at(token):
                late.append((one, token))
                going[one.row] = _going(one, tables)
                continue
            following, more = self._go_on_alone(one, token)
            updates += more
            changed[one.row] = None
            if following is not None:
                going[one.row] = following
                [draw] = self._sampler.draws([one.sample.row])
                changed[one.row] = self._row(following, draw, self._tokens_left(one.sample))
        if not going:
            return updates
        try:
            decoded = self.runner.decode_on(ahead.moved, [token.token for _, token in drawn], changed)
        except Exception as error:
            updates += self._commit(*_parted(late))
            lost = [one for one in going.values() if one.is_alive]
            return updates + self._failed([Scheduled(one.sample, one.tables) for one in lost], error)
        self.steps += 1
        for one, token in late:
            going[one.row], update = self._go_on_with(one, token, going[one.row])
            updates += update
        self._launched = Launched(decoded, list(going.values()))
        return updates

    def _go_on_alone(self, one: Entry, token: Sampled) -> tuple[Entry | None, list[Update]]:
        """Commit a sample's step and begin its next one. None if there is none, or no room: the scheduler makes it."""
        if not one.is_alive:
            return None, []
        updates = self._commit(*_parted([(one, token)]))
        sample = one.sample
        if sample.lease is None or sample.remaining != 1:
            return None, updates
        tables = self.cache.extend(one.lease, 1)
        return (None if isinstance(tables, NoRoom) else _going(one, tables)), updates

    def _go_on_with(self, one: Entry, token: Sampled, following: Entry) -> tuple[Entry, list[Update]]:
        """Commit a step whose successor already runs, and begin the successor. Returns the successor's entry."""
        sample, lease, end = one.sample, one.lease, one.tables.end
        if self.cache.commit(lease, sampled=[token.token]) < end:
            return following, []  # a page it read was bad: the successor's result is dropped, too
        given = self.cache.extend(lease, 1)
        if isinstance(given, NoRoom) or not _same_writes(following.tables, given):
            raise EngineError("the pages of a decoding step have changed while it ran: this is a bug")
        if given.tables != following.tables.tables:  # a block is shared now that another request has published, too
            following = following._replace(tables=given)
        if end >= sample.failed_at:
            sample.failures = sample.failed_at = 0
        return following, [self._push(sample, token)]

    # --- a step -------------------------------------------------------------------------------------------------------

    def _run(self, scheduled: Sequence[Scheduled]) -> torch.Tensor:
        work = []
        for sample, tables in scheduled:
            assert sample.lease is not None
            packed = bytes(sample.lease.tokens[tables.start * TOKEN_BYTES : tables.end * TOKEN_BYTES])
            tokens = np.frombuffer(packed, dtype=np.int32)
            work.append(Work(tokens, tables, _is_last(sample.lease, tables.end), sample.request.adapter))
            self.computed_tokens += tables.end - tables.start
            self.computed_prompt_tokens += max(0, min(tables.end, sample.request.prompt_tokens) - tables.start)
        self.scheduled_samples += len(scheduled)
        logits = self.runner.run(work)
        self._ran()
        return logits

    def _begin_step(self, scheduled: Sequence[Scheduled]) -> None:
        if self.streaming is not None:
            self.streaming.begin_step(scheduled)
        if self._prefills is not None:
            self._prefills.begin_step(scheduled)

    def _ran(self) -> None:
        if self.streaming is not None:
            self.streaming.ran()
        if self._prefills is not None:
            self._prefills.ran()

    def _drawing(self, sample: Sample, tables: StepTables) -> list[Sample]:
        """The samples that draw a token from this sample's last logits: none during prefill, else the sample itself.

        At the end of the prompt all n samples of the request draw from the same logits.
        """
        assert sample.lease is not None
        if not _is_last(sample.lease, tables.end):
            return []
        request = sample.request
        if sample.token_ids or sample.index:
            return [sample]
        while len(request.samples) < request.num_samples:
            self._new_sample(request, len(request.samples))
        return list(request.samples)

    def _sample(self, logits: torch.Tensor, drawing: Sequence[Sequence[Sample]]) -> list[Sampled]:
        """One token for each sample that draws. `logits` has one row for each non-empty list in `drawing`."""
        groups = [samples for samples in drawing if samples]
        rows = [sample.row for samples in groups for sample in samples]
        if len(rows) > len(groups):
            logits = logits[[number for number, samples in enumerate(groups) for _ in samples]]
        return self._sampler.sample(logits, rows)

    def _commit(
        self, scheduled: Sequence[Scheduled], drawing: Sequence[Sequence[Sample]], sampled: Sequence[Sampled]
    ) -> list[Update]:
        updates: list[Update] = []
        tokens = iter(sampled)
        for (sample, tables), samples in zip(scheduled, drawing, strict=True):
            lease = sample.lease
            assert lease is not None
            own = list(islice(tokens, len(samples)))
            if lease.poisoned is not None:
                self._not_counted(sample)
            if self.streaming is not None and not self._counts(sample, lease, own):
                continue
            if tables.end >= sample.failed_at:  # earlier steps only recompute lost tokens
                sample.failures = sample.failed_at = 0
            if not own:
                self.cache.commit(lease)
            elif len(own) > 1:
                updates += self._branch(sample, lease, tables.end, own)
            else:
                updates += self._accept(sample, lease, tables.end, own[0])
        if self.streaming is not None:
            self.streaming.end_step()
        return updates

    def _counts(self, sample: Sample, lease: Lease, sampled: Sequence[Sampled]) -> bool:
        """Whether a sample's part of the step is valid. If its load failed or is late, that part is discarded."""
        assert self.streaming is not None
        if not self.streaming.is_in_step:
            return True
        if not self.streaming.lacks_rows(sample):
            is_sound = lease.poisoned is None and all(one.error is None for one in sampled)
            self.streaming.judge(sample, is_sound)
            return True
        self.streaming.discard(sample)
        self._not_counted(sample)
        return False

    def _accept(self, sample: Sample, lease: Lease, end: int, sampled: Sampled) -> list[Update]:
        if sampled.error is not None:
            self.cache.commit(lease, failed=True)
            sample.error = sampled.error
            return [self._end(sample, "error")]
        if self.cache.commit(lease, sampled=[sampled.token]) < end:
            return []  # a page it read was bad: it was rolled back, and the token is dropped
        if sample.wants_prompt_rows:
            self._read_prompt_rows(sample.request, lease)
        return [self._push(sample, sampled)]

    def _branch(self, first: Sample, lease: Lease, end: int, sampled: Sequence[Sampled]) -> list[Update]:
        return [] if self.cache.commit(lease) < end else self._fork(first, lease, sampled)

    def _fork(self, first: Sample, lease: Lease, sampled: Sequence[Sampled]) -> list[Update]:
        """Fork n samples at the end of the prompt. Samples that do not fit are queued."""
        updates: list[Update] = []
        if first.wants_prompt_rows:
            self._read_prompt_rows(first.request, lease)
        samples = first.request.samples
        twins = self.cache.fork(lease, min(self.scheduler.num_free_for(first.request.client), len(samples) - 1))
        leases: list[Lease | None] = [lease, *(() if isinstance(twins, NoRoom) else twins)]
        leases += [None] * (len(samples) - len(leases))
        for sample, one, token in zip(samples, leases, sampled, strict=True):
            if sample is not first:
                sample.lease = one
                self.scheduler.add(sample)
            if token.error is not None:
                sample.error = token.error
                updates.append(self._end(sample, "error"))
                continue
            if one is not None:
                one.append([token.token])
            updates.append(self._push(sample, token))
        return updates

    def _push(self, sample: Sample, sampled: Sampled) -> Update:
        try:
            sample.push(sampled, self.limits.max_len(sample.request.params))
        except Exception as error:  # tokenizers are third-party code; fail only this sample
            sample.error = f"token {sampled.token} cannot become text: {type(error).__name__}: {error}"
            sample.finish_reason = "error"
        return sample.take_update() if sample.finish_reason is None else self._end(sample, sample.finish_reason)

    def _read_prompt_rows(self, request: Request, lease: Lease) -> None:
        """Read the hidden states of a prompt that has been computed. If no more is wanted, the lease drops its taps.

        A prompt that is computed for another engine keeps them: they are offered with it.
        """
        numbers = request.tapped.numbers
        request.hidden = self.runner.taps.read(lease.named_tables, numbers, request.prompt_tokens)
        if request.params.hidden_tokens == "prompt" and request.prefill is None:
            self.cache.drop_taps(lease)

    def _failed(self, scheduled: Sequence[Scheduled], error: Exception) -> list[Update]:
        """Handle a forward pass that raised. All samples roll back to their last kept state and retry a few times."""
        updates: list[Update] = []
        if self.streaming is not None:
            self.streaming.ran(failed=True)
        for sample, tables in scheduled:
            assert sample.lease is not None
            self.cache.commit(sample.lease, failed=True)
            self._not_counted(sample)
            sample.failures += 1
            sample.failed_at = max(sample.failed_at, tables.end)
        if self.streaming is not None:
            self.streaming.end_step()
        for sample, _ in scheduled:
            if sample.failures >= _MOST_FAILURES:
                reason = f"the model failed: {type(error).__name__}: {error}"
                updates += self._end_all(sample.request, "error", reason)
        return updates

    def _not_counted(self, sample: Sample) -> None:
        """A sample's part of the step is discarded."""
        if self._prefills is not None:
            self._prefills.failed(sample)

    # --- prompts of other engines -------------------------------------------------------------------------------------

    def _receive(self) -> list[Update]:
        """Take in the prompts that have come, or will not come."""
        updates: list[Update] = []
        if self._receipts is None:
            return updates
        for sample in [one for one in self.scheduler.running if one.request.arrival is not None]:
            arrival = sample.request.arrival
            assert arrival is not None
            if not arrival.is_over:
                continue
            sample.request.arrival = None
            if not self._receipts.commit(sample, arrival):
                self.scheduler.start_again(sample)
            elif sample.remaining == 0 and len(arrival.first) == sample.request.num_samples:
                updates += self._go_on(sample, sampled_tokens(arrival.first))
            elif sample.remaining == 0 and sample.lease is not None:  # first tokens are missing: compute the last again
                self.cache.rollback(sample.lease, sample.request.prompt_tokens - 1)
        return updates

    def _go_on(self, sample: Sample, sampled: Sequence[Sampled]) -> list[Update]:
        """The whole prompt has come, with the first token of each sample."""
        lease, request = sample.lease, sample.request
        assert lease is not None
        while len(request.samples) < request.num_samples:
            self._new_sample(request, len(request.samples))
        if len(sampled) > 1:
            return self._fork(sample, lease, sampled)
        lease.append([sampled[0].token])
        if sample.wants_prompt_rows:
            self._read_prompt_rows(request, lease)
        return [self._push(sample, sampled[0])]

    # --- requests -----------------------------------------------------------------------------------------------------

    def _new_sample(self, request: Request, index: int) -> Sample:
        params = request.params
        prompt = request.prompt.ids.as_array()
        row = SamplingState(params, prompt, ends=params.ends(self._eos_ids), sibling=index)
        text = TextStream(
            self._tokenizer,
            stop=params.stops,
            include_stop=params.include_stop_str_in_output,
            min_tokens=params.min_tokens,
            context=prompt[-_CONTEXT_TOKENS:].tolist() if self._tokenizer else (),
        )
        sample = Sample(request, index, row, text)
        request.samples.append(sample)
        return sample

    def _end_all(self, request: Request, reason: str, error: str | None = None) -> list[Update]:
        request.num_samples = len(request.samples)
        going = [sample for sample in request.samples if sample.finish_reason is None]
        for sample in going:
            sample.error = error
        return [self._end(sample, reason) for sample in going]

    def _give_up(self, sample: Sample) -> Update:
        """End a sample that does not fit even alone, although `limits` admitted it. `sample.error` has the reason."""
        return self._end(sample, "error")

    def _end(self, sample: Sample, reason: str) -> Update:
        if sample.finish_reason is None:
            sample.finish(reason)
        if reason in ("stop", "length"):
            if sample.wants_all_rows and sample.lease is not None:
                tables, numbers = sample.lease.named_tables, sample.request.tapped.numbers
                sample.hidden = self.runner.taps.read(tables, numbers, sample.lease.computed)
            if self.streaming is not None:
                self.streaming.dump_reply(sample)
        request = sample.request
        if sample.lease is not None:
            request.log.ends(self.cache, sample.lease, request)
        self.scheduler.remove(sample)
        if len(request.samples) < request.num_samples:
            request.num_samples = len(request.samples)  # it ended before the others were forked
        if request.prefill is not None and self._prefills is not None and request.is_over:
            self._prefills.offer(request, request.prefill)
        if request.is_over:
            del self._requests[request.id]
            self._record(request)
        return sample.take_update()

    def _record(self, request: Request) -> None:
        with self.publishing.counted():
            request.record = request.log.record(request)
            if self.on_record is not None:
                try:
                    self.on_record(request.record)
                except Exception:  # the requests of the engine go on
                    LOG.exception("a record of request %s was refused", request.id)

    @contextmanager
    def _timed(self, name: str) -> Iterator[None]:
        start = time.perf_counter()
        yield
        self.seconds[name] += time.perf_counter() - start


def _decodes(one: Entry) -> bool:
    """Whether a sample computes one token and draws the next one alone. Decoding steps have no adapters."""
    sample, lease, tables = one.sample, one.lease, one.tables
    if sample.request.adapter is not None:
        return False
    is_alone = bool(sample.token_ids or sample.index) or sample.request.num_samples == 1
    return tables.end - tables.start == 1 and tables.loaded is None and _is_last(lease, tables.end) and is_alone


def _last_token(lease: Lease) -> int:
    return int.from_bytes(lease.tokens[-TOKEN_BYTES:], sys.byteorder)


def _parted(drawn: Sequence[tuple[Entry, Sampled]]) -> tuple[list[Scheduled], list[list[Sample]], list[Sampled]]:
    """The arguments of `_commit`."""
    scheduled = [Scheduled(one.sample, one.tables) for one, _ in drawn]
    return scheduled, [[one.sample] for one, _ in drawn], [token for _, token in drawn]


def _going(one: Entry, tables: StepTables) -> Entry:
    """The entry of the next step, with tables that the device gets."""
    return one._replace(tables=tables, sent=tables.tables)


def _same_writes(one: StepTables, other: StepTables) -> bool:
    """Whether two tables of a decoding step write to the same pages."""
    block = one.start // one.block_tokens
    return one.segments == other.segments and all(
        pages[block] == other.tables[name][block] for name, pages in one.tables.items()
    )


def _is_last(lease: Lease, end: int) -> bool:
    """Whether a step up to `end` computes all known tokens, so that a token is sampled."""
    return end == lease.num_tokens
