"""What runs in a process of tests/link/fault_workers.py: an engine with a link, and seams that stop or spoil it."""

from __future__ import annotations

import os
import random
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
import transformers.models.llama.modeling_llama  # noqa: F401 - the fork server has it then

from hybridkv.engine import Engine, SamplingParams
from hybridkv.link.arena import HostArena
from hybridkv.link.link import Link, LinkOptions
from hybridkv.link.push import Push
from tests.engine import zoo
from tests.link.confusion import Confusion

REPLY_TOKENS = 6
PARAMS = SamplingParams(temperature=0.0, max_tokens=REPLY_TOKENS, ignore_eos=True)
_BULKY = {"num_key_value_heads": 16, "num_attention_heads": 16, "head_dim": 256, "num_hidden_layers": 4}


def model_of(kind: str) -> Any:
    """`bulky`: some 128 KiB of cache for a token."""
    if kind != "bulky":
        return zoo.fresh(kind)  # an engine changes its model, and others use the one that `build` keeps
    torch.manual_seed(0)
    return zoo.make(zoo.family_config("llama", **_BULKY))


def prompt_of(length: int, seed: int) -> list[int]:
    chance = random.Random(seed)
    return [chance.randrange(zoo.FIRST_PLAIN_TOKEN, zoo.VOCAB_SIZE) for _ in range(length)]


class Rig:
    """One engine with a link, and its seams."""

    def __init__(
        self,
        tell: Callable[[str], None],
        *,
        role: str,
        peers: Sequence[int] = (),
        port: int = 0,
        model: str = "llama",
        memory: str = "2MiB",
        parcel_bytes: int | None = None,
        lease_s: float = 60.0,
        timeout_s: float = 30.0,
        gates: Sequence[str] = (),
        **options: Any,
    ) -> None:
        """`gates`: those that are closed from the beginning."""
        self._tell = tell
        self._gates: dict[str, threading.Event] = {}
        for name in gates:
            self.shut(name)
        self.engine = Engine(
            model_of(model),
            memory=memory,
            device="cpu",
            link=LinkOptions(
                role=role,
                peers=[f"http://127.0.0.1:{one}" for one in peers],
                port=port,
                lease_s=lease_s,
                timeout_s=timeout_s,
            ),
            **options,
        )
        link = self.engine.link
        assert link is not None
        self.link: Link = link
        self._undo: list[Callable[[], None]] = []
        self._num_writes = 0
        if link.producer is not None:
            if parcel_bytes is not None:
                link.producer._parcel_bytes = parcel_bytes
            self._gate_producer()

    def port(self) -> int:
        return self.link.port

    # --- requests -----------------------------------------------------------------------------------------------------

    def prefill(self, prompt: Sequence[int], transfer_id: str | None = None) -> dict[str, Any] | None:
        params: dict[str, Any] = {"do_remote_decode": True}
        if transfer_id is not None:
            params["transfer_id"] = transfer_id
        [result] = self.engine.generate([prompt], PARAMS, kv_transfer_params=params, progress=False)
        return result.kv_transfer_params

    def reply(self, prompt: Sequence[int], params: dict[str, Any] | None = None) -> tuple[list[int], int | None]:
        """The tokens of the reply, and how many tokens of the prompt came over the link."""
        [result] = self.engine.generate([prompt], PARAMS, kv_transfer_params=params, progress=False)
        return list(result.token_ids), None if result.received is None else result.received.num_tokens

    def abort(self) -> None:
        """Abort all requests."""
        loop, core = self.engine._loop, self.engine._core

        def abort_all() -> None:
            for request_id in list(core._requests):
                loop._deliver(core.abort(request_id))

        loop.post(abort_all)

    # --- state --------------------------------------------------------------------------------------------------------

    def report(self) -> dict[str, Any]:
        """What is pinned, quarantined and counted. Fails if the cache's books are wrong."""
        self.engine.check_integrity()
        core, linking, stats = self.engine._core, self.engine._core.linking, self.link.stats.snapshot()
        assert linking is not None
        producer, consumer = self.link.producer, self.link.consumer
        return {
            "pins": len(core.cache.pins),
            "outbound": 0 if producer is None else producer.num_outbound,
            "pushes": 0 if producer is None else producer._pusher.num_active,
            "arrivals": 0 if consumer is None else consumer.num_arrivals,
            "quarantined": 0 if linking.receipts is None else linking.receipts.num_quarantined,
            "quarantine_gauge": stats.quarantined,
            "failures": dict(stats.failures),
            "received": stats.received_requests,
            "sent": stats.sent_requests,
            "requests": len(core._requests),
            "computed": core.computed_tokens,
        }

    def wait_for(self, timeout_s: float = 15.0, **wanted: Any) -> dict[str, Any]:
        """Wait until the report has these values, and return it."""
        end = time.monotonic() + timeout_s
        while True:
            report = self.report()
            if all(report[name] == value for name, value in wanted.items()):
                return report
            assert time.monotonic() < end, f"{wanted} against {report}"
            time.sleep(0.02)

    def listeners(self) -> list[str]:
        """Addresses on which this process listens."""
        inodes = {os.readlink(one) for one in Path("/proc/self/fd").iterdir() if one.is_symlink() and one.exists()}
        found = []
        for name in ("tcp", "tcp6"):
            for line in Path(f"/proc/self/net/{name}").read_text().splitlines()[1:]:
                fields = line.split()
                if fields[3] == "0A" and f"socket:[{fields[9]}]" in inodes:
                    found.append(fields[1].split(":")[0])
        return found

    # --- seams --------------------------------------------------------------------------------------------------------

    def shut(self, gate: str) -> None:
        """Stop the link where it passes `gate` next: connect, claim, write-N, written-N, end."""
        self._gates[gate] = threading.Event()

    def open(self, gate: str, delay_s: float = 0.0) -> None:
        """Open a gate, after some time."""
        opened = self._gates.pop(gate)
        threading.Timer(delay_s, opened.set).start()

    def restore(self) -> None:
        """Undo all other seams, and count writes from 0 again."""
        self._num_writes = 0
        while self._undo:
            self._undo.pop()()

    def _replace(self, owner: Any, name: str, new: Any) -> Any:
        """Replace an attribute until `restore`. Returns the old one."""
        old = getattr(owner, name)
        self._undo.append(lambda: setattr(owner, name, old))
        setattr(owner, name, new)
        return old

    def _pass(self, gate: str) -> None:
        closed = self._gates.get(gate)
        if closed is not None:
            self._tell(gate)
            closed.wait()

    def _gate_producer(self) -> None:
        producer = self.link.producer
        assert producer is not None
        handle, write, say_last = producer.handle, producer._agent.write, Push._say_last

        def gated_handle(method: str, params: Any) -> Any:
            self._pass(method)
            return handle(method, params)

        def gated_write(*args: Any) -> Any:
            number, self._num_writes = self._num_writes, self._num_writes + 1
            self._pass(f"write-{number}")
            posted = write(*args)
            self._pass(f"written-{number}")
            return posted

        def gated_last(push: Push, message: Any) -> bool:
            self._pass("end")
            return say_last(push, message)

        producer.handle = gated_handle  # type: ignore[method-assign]
        producer._agent.write = gated_write  # type: ignore[method-assign, assignment]
        Push._say_last = gated_last  # type: ignore[method-assign, assignment]

    def slow_down(self, delay_s: float) -> None:
        """Pause before each write. The pushing thread alone waits."""
        producer = self.link.producer
        assert producer is not None
        write = producer._agent.write

        def slow(*args: Any) -> Any:
            time.sleep(delay_s)
            return write(*args)

        self._replace(producer._agent, "write", slow)

    def slow_steps(self, delay_s: float) -> None:
        """Pause before each step of the model."""
        runner = self.engine._core.runner
        run = runner.run

        def slow(*args: Any) -> Any:
            time.sleep(delay_s)
            return run(*args)

        self._replace(runner, "run", slow)

    def spoil_source(self, number: int) -> None:
        """Change a byte of the `number`-th write from now on, after its checksum was computed."""
        producer = self.link.producer
        assert producer is not None
        write, numbers = producer._agent.write, iter(range(1 << 30))

        def spoiled(peer: str, place: Any, source: Any, *rest: Any) -> Any:
            if next(numbers) == number:
                self._arena_bytes()[int(source[0])] ^= 255
            return write(peer, place, source, *rest)

        self._replace(producer._agent, "write", spoiled)

    def spoil_target(self, number: int) -> None:
        """Change a byte of the `number`-th parcel that is verified from now on, before it is."""
        consumer = self.link.consumer
        assert consumer is not None
        checksum, numbers = consumer._arena.checksum, iter(range(1 << 30))

        def spoiled(offsets: Any, nbytes: Any) -> int:
            if next(numbers) == number:
                self._arena_bytes()[int(offsets[-1]) + int(nbytes[-1]) - 1] ^= 255
            return checksum(offsets, nbytes)

        self._replace(consumer._arena, "checksum", spoiled)

    def _arena_bytes(self) -> memoryview:
        arena = self.link._arena
        assert isinstance(arena, HostArena)
        return arena._buffer

    def confuse(self, how: str, *args: Any) -> None:
        """Change the messages that reach the consumer: see `Confusion`."""
        consumer = self.link.consumer
        assert consumer is not None
        change = getattr(Confusion(consumer._agent), how)
        self._replace(consumer._agent, "messages", lambda: change(*args))
