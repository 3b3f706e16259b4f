"""An engine whose every logit is compared with the stock model's, whatever path the tokens took.

The stock model runs once for the longest of several sequences that begin alike, not once a step: what it says of a
token does not depend on those after it. So steps are compared a few at a time, and at the latest when a test ends.
"""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
import transformers

from hybridkv.cache import Cache, CacheLayout, lookup_key
from hybridkv.cache.tokens import TOKEN_BYTES
from hybridkv.engine.adapters.adapters import read_adapters
from hybridkv.engine.core import EngineCore
from hybridkv.engine.decoding.decoder import Decoded, Decoder, DrawnTokens
from hybridkv.engine.decoding.launched import Launched
from hybridkv.engine.decoding.step_buffer import Moved, Row
from hybridkv.engine.loading.checkpoint import load
from hybridkv.engine.pace import Pace
from hybridkv.engine.prompts import Prompt
from hybridkv.engine.results import Result, Update
from hybridkv.engine.runner import Runner, Work
from hybridkv.engine.sampling.params import SamplingParams
from hybridkv.engine.seams import Frame
from hybridkv.engine.text import Tokenizer
from hybridkv.errors import PlanError
from hybridkv.memory import Memory
from hybridkv.models.layers import with_all_taps
from hybridkv.plan import PlanOptions, make_plan
from tests.engine.zoo import oracle_logits

TOLERANCE = 1e-4
_STEPS_AT_ONCE = 24
"""Steps that wait to be compared, at most."""
_unfinished: list[Driver] = []
"""Drivers of the present test with steps that wait to be compared."""
NOT_CAPTURED = {"phimoe", "step3p5"} | (
    {"gemma3n"} if tuple(map(int, transformers.__version__.split(".")[:2])) < (5, 23) else set()
)
"""Families whose stock code makes a tensor on the host in every step, or waits for one: no graph can hold that."""
GREEDY = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)


class WatchedRunner(Runner):
    """Keeps the logits of every token it computes, not only of those that something is sampled after."""

    failure: BaseException | None = None
    """The error of the last step: a core turns it into the end of the requests."""

    def run(self, work: Sequence[Work]) -> torch.Tensor:
        self.work = work
        self.__dict__.pop("logits", None)  # of the step before: a step that fails has none
        try:
            return super().run(work)
        except BaseException as error:
            self.failure = error
            raise

    def _forward(self, frame: Frame, tokens: torch.Tensor, logits_to_keep: torch.Tensor | int) -> torch.Tensor:
        self.logits = super()._forward(frame, tokens, 0)
        return self.logits if isinstance(logits_to_keep, int) else self.logits[logits_to_keep]


class WatchedCore(EngineCore):
    """Tells which decoding steps it submits."""

    watch: Callable[[Launched], None]

    def _finish(self, launched: Launched) -> list[Update]:
        self.watch(launched)  # its logits may be gone when the next step has been submitted
        return super()._finish(launched)


class PackedDecoder(Decoder):
    """Runs decoding steps as packed ones: to test what is around them without Triton."""

    def __init__(self, runner: Runner) -> None:
        self._runner = runner
        self._rows: dict[int, Row] = {}
        self.graph_bytes = 0

    def takes(self, num_rows: int, num_tokens: int) -> bool:
        return num_rows > 0

    def can_follow(self, num_rows: int, num_tokens: int) -> bool:
        return num_rows > 0

    def start(self, rows: Sequence[Row]) -> Decoded:
        self._rows = dict(enumerate(rows))
        self._num_rows = len(rows)
        return self._submit()

    def follow(self, moved: Moved, tokens: Sequence[int], changed: Mapping[int, Row | None]) -> Decoded:
        assert list(moved.rows) == list(self._rows)
        for place, token in zip(moved.rows, tokens, strict=True):
            self._move(place, token, moved)
        for place, row in changed.items():
            self._rows.pop(place)
            if row is not None:
                self._rows[place] = row
        return self._submit()

    def advance(self, moved: Moved) -> Decoded:
        assert list(moved.rows) == list(self._rows)
        for place, row in list(self._rows.items()):
            token = int(self._tokens[place])
            if token < 0 or token in row.ends or row.left <= 0:
                del self._rows[place]
            else:
                self._move(place, token, moved)
        return self._submit()

    def retire(self, rows: Sequence[int]) -> None:
        assert not self._rows.keys() & set(rows)

    def _move(self, place: int, token: int, moved: Moved) -> None:
        row = self._rows[place]
        tables = moved.tables.get(place, row.tables.following())
        self._rows[place] = row._replace(token=token, tables=tables, left=row.left - 1)

    def _submit(self) -> Decoded:
        self._rows = dict(sorted(self._rows.items()))
        rows = self._rows.values()
        found = self._runner.run([Work(np.array([row.token], dtype=np.int32), row.tables, True) for row in rows])
        logits = found.new_full((self._num_rows, found.shape[1]), torch.nan)  # a row that has ended must not be read
        logits[list(self._rows)] = found
        self._tokens = logits.argmax(-1)
        drawn = DrawnTokens(self._num_rows, self._tokens.device)
        return Decoded(logits, drawn.take(self._tokens))


class Computed(NamedTuple):
    """A span of a step that waits to be compared."""

    known: bytes
    """All tokens up to its end."""
    start: int
    logits: torch.Tensor
    adapter: str | None


@pytest.fixture(autouse=True)
def every_step_is_compared() -> Iterator[None]:
    yield
    drivers = list(_unfinished)
    _unfinished.clear()
    for driver in drivers:
        driver.compare()


class FixedPace(Pace):
    """What a step has in it does not depend on the clock."""

    def observe(self, num_tokens: int, seconds: float) -> None: ...


class Driver:
    """A core to step through by hand. After each step every computed token is checked, and the cache's books.

    decodes: "graphs": decoding steps run as on a GPU, "packed": only their results are read as late as there.
    experts: how transformers computes experts in graphs. Grouped products of float32 cannot be captured.
    adapters: directories of adapters by name, and the models that say what requests with each of them compute.
    """

    def __init__(
        self,
        model: Any,
        *,
        memory_bytes: int = 8 << 20,
        max_num_batched_tokens: int = 64,
        max_num_seqs: int = 16,
        device: str = "cpu",
        tolerance: float = TOLERANCE,
        has_taps: bool = True,
        decodes: str = "",
        experts: str = "batched_mm",
        compiles: bool = False,
        tokenizer: Tokenizer | None = None,
        adapters: Mapping[str, tuple[Path, Any]] | None = None,
        **options: Any,
    ) -> None:
        self.model = model
        self.models: dict[str | None, Any] = {None: model}
        """The oracles of requests, by their adapter."""
        self.tolerance = tolerance
        loaded = load(copy.deepcopy(model), device=device)  # the model itself stays stock: it is the oracle
        plan = make_plan(with_all_taps(loaded.spec) if has_taps else loaded.spec, PlanOptions(memory_bytes, **options))
        self.layout = CacheLayout.from_plan(plan)
        self.memory = Memory(plan, self.layout, loaded.device)
        self.cache = Cache(self.layout, run_operations=self.memory.run)
        self.runner = WatchedRunner(loaded.model, self.memory, self.layout)
        given = dict(adapters or {})
        self.models |= {name: one for name, (_, one) in given.items()}
        self.adapters = read_adapters({name: place for name, (place, _) in given.items()})
        if self.adapters:
            self.runner.use_adapters(self.adapters)
        if decodes == "packed":
            self.runner.decoder = PackedDecoder(self.runner)
        elif decodes:
            self.runner.use_decoder(max_rows=max_num_seqs, max_tokens=loaded.max_model_len)
        if compiles:
            self.runner.compile(True)
        if decodes == "graphs" and device == "cuda":
            set_experts(loaded.model, experts)
            self.runner.capture()
        self.core = WatchedCore(
            self.cache,
            self.runner,
            vocab_size=loaded.vocab_size,
            max_model_len=loaded.max_model_len,
            max_num_batched_tokens=max_num_batched_tokens,
            max_num_seqs=max_num_seqs,
            tokenizer=tokenizer,
            seed=0,
        )
        self.core.scheduler.pace = FixedPace()
        self.core.watch = self._note
        self.results: dict[str, Result] = {}
        self.updates: list[Update] = []
        self.worst = 0.0
        """The largest difference of any logit from the stock model's, of the steps compared so far."""
        self._computed: list[Computed] = []
        self._num_waiting = 0

    def add(
        self,
        name: str,
        prompt: Sequence[int],
        params: SamplingParams = GREEDY,
        *,
        breakpoints: Sequence[int] = (),
        client: str = "",
        adapter: str | None = None,
        **key: Any,
    ) -> None:
        extra = [*key.pop("extra_keys", ()), *([] if adapter is None else [self.adapters[adapter].key])]
        made = lookup_key(extra_keys=extra, **key)
        self.core.add(name, Prompt(prompt, breakpoints), params, made, client=client, adapter=adapter)

    def step(self) -> list[Update]:
        """One step, checked."""
        scheduled: list[Any] = []
        before = self.core.scheduler.schedule

        def watched() -> Any:
            step, stuck = before()
            scheduled.extend((sample.tokens, tables, sample.request.adapter) for sample, tables in step)
            return step, stuck

        self.core.scheduler.schedule = watched  # type: ignore[method-assign]
        try:
            updates = self.core.step()
        finally:
            self.core.scheduler.schedule = before  # type: ignore[method-assign]
        if self.core._launched is None:  # else its logits are compared when it has ended
            self._check(scheduled)
        self.cache.check_integrity()
        self.updates += updates
        self.results |= {update.request_id: update.result for update in updates if update.result is not None}
        return updates

    def run(self, limit: int = 2000) -> dict[str, Result]:
        """Until everything has ended."""
        for _ in range(limit):
            if not self.core.has_work:
                self.compare()
                return self.results
            self.step()
        raise AssertionError(f"still at work after {limit} steps")

    def abort(self, name: str) -> None:
        updates = self.core.abort(name)
        self.results |= {update.request_id: update.result for update in updates if update.result is not None}
        self.cache.check_integrity()

    def _check(self, scheduled: Sequence[Any]) -> None:
        row = 0
        if scheduled and not hasattr(self.runner, "logits"):
            raise AssertionError("the first step has failed") from self.runner.failure
        for packed, tables, adapter in scheduled:
            logits = self.runner.logits[row : row + tables.end - tables.start].float().cpu()
            row += tables.end - tables.start
            self._computed.append(Computed(packed[: tables.end * TOKEN_BYTES], tables.start, logits, adapter))
        self._noted()

    def _note(self, launched: Launched) -> None:
        """A decoding step has run."""
        for one in launched.entries:
            start, end = one.tables.start, one.tables.end
            logits = launched.decoded.logits[one.row][None]
            if one.is_alive:
                known = bytes(one.lease.tokens[: end * TOKEN_BYTES])
                assert one.sample.request.adapter is None  # such a step has no adapters
                self._computed.append(Computed(known, start, logits.float().cpu().clone(), None))
        self._noted()

    def _noted(self) -> None:
        self._num_waiting += 1
        if self not in _unfinished:
            _unfinished.append(self)
        if self._num_waiting >= _STEPS_AT_ONCE:
            self.compare()

    def compare(self) -> None:
        """Compare the logits of all steps that wait for it with the stock model's."""
        waiting, self._computed, self._num_waiting = self._computed, [], 0
        whole, its, expected = b"", None, torch.empty(0)
        longest_first = sorted(waiting, key=lambda one: (one.adapter or "", one.known), reverse=True)
        for known, start, logits, adapter in longest_first:
            if not whole.startswith(known) or not whole or its != adapter:
                whole, its = known, adapter
                expected = oracle_logits(self.models[adapter], list(memoryview(known).cast("i")))
            end = start + len(logits)
            worst = float((logits - expected[start:end]).abs().max())
            self.worst = max(self.worst, worst)
            assert worst <= self.tolerance, (
                f"tokens {start} to {end} of {len(known) // TOKEN_BYTES} are {worst:.1e} from the stock model"
            )


def set_experts(model: Any, kind: str) -> None:
    """How transformers computes the model's experts, where it leaves a choice."""
    with contextlib.suppress(ValueError):
        model.set_experts_implementation(kind)


def check_greedy(driver: Driver, name: str) -> None:
    """Greedy tokens are the stock model's wherever its two best differ by more than the tolerance."""
    record = driver.results[name].record
    model = driver.models[None if record is None else record.adapter]
    for completion in driver.results[name].completions:
        prompt = driver.results[name].prompt_token_ids
        logits = oracle_logits(model, prompt + completion.token_ids)
        for position, token in enumerate(completion.token_ids, len(prompt) - 1):
            best, second = logits[position].topk(2).values.tolist()
            assert token == int(logits[position].argmax()) or best - second <= driver.tolerance


def memory_for(model: Any, num_requests: int, num_tokens: int, **options: Any) -> int:
    """The least memory in which so many requests of that length fit side by side."""
    spec = load(model, device="cpu").spec

    def fits(memory_bytes: int) -> bool:
        try:
            plan = make_plan(spec, PlanOptions(memory_bytes, **options))
        except PlanError:
            return False
        return plan.max_requests(num_tokens) >= num_requests

    high = 1 << 16
    while not fits(high):
        high *= 2
    low = high // 2
    while high - low > low // 50:
        middle = (low + high) // 2
        low, high = (low, middle) if fits(middle) else (middle, high)
    return high
