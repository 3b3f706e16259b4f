"""One vLLM engine in a process of its own, told by lines of JSON what to do: the children of vllm_connector.py.

    python vllm_child.py MODEL '{"kv_transfer_config": {...}}'

A line in is a request, {"prompt": [...], "max_tokens": 1, "breakpoints": []}, or {"do": "reset"} or {"do": "settle"}.
A line out answers it. What vLLM prints goes to standard error. The engine stops when standard input ends.
"""

from __future__ import annotations

import json
import os
import sys
import time
from dataclasses import asdict
from typing import Any

from engine_peers import VLLM_ENVIRONMENT, Vllm

PATIENCE_S = 60.0
QUIET_WINDOW_S = 0.05
QUIET_CORES = 0.2
"""A process that keeps less than this busy for two windows has nothing left to write."""
DEFAULTS = dict.fromkeys(("block_size", "prefix_cache_retention_interval", "prefix_match_unit"), "default")


class ConnectedVllm(Vllm):
    """vLLM with its own defaults and, where the options name one, a connector."""

    def __init__(self, model_dir: str, dtype: str, options: dict[str, Any]) -> None:
        from vllm.config import KVTransferConfig

        if "kv_transfer_config" in options:
            options = options | {"kv_transfer_config": KVTransferConfig(**options["kv_transfer_config"])}
        super().__init__(model_dir, dtype, DEFAULTS | options)
        self._core = self._engine.engine_core.engine_core
        step = self._core.step_fn

        def yielding_step() -> Any:
            """vLLM's own loop sleeps the same way in a process of its own: threads that load need the interpreter."""
            outputs, executed = step()
            if not executed and self._core.scheduler.has_unfinished_requests():
                time.sleep(0.001)
            return outputs, executed

        self._core.step_fn = yielding_step

    def release(self) -> None:
        """Step until no finished request holds blocks: connectors hold them while they save."""
        deadline = time.monotonic() + PATIENCE_S
        while self._core.scheduler.has_requests():
            if time.monotonic() > deadline:
                raise RuntimeError(f"finished requests still hold blocks after {PATIENCE_S:.0f} s")
            self._engine.step()
            time.sleep(0.001)

    def settle(self) -> None:
        """Wait until what was computed is saved: no block is held, and the threads of this process rest."""
        self.release()
        deadline = time.monotonic() + PATIENCE_S
        quiet = 0
        while quiet < 2 and time.monotonic() < deadline:
            begin_cpu, begin = time.process_time(), time.perf_counter()
            time.sleep(QUIET_WINDOW_S)
            cores = (time.process_time() - begin_cpu) / (time.perf_counter() - begin)
            quiet = quiet + 1 if cores < QUIET_CORES else 0

    def reset(self) -> None:
        """Empty vLLM's own prefix cache, not the connector's store."""
        self.settle()
        if not self._engine.reset_prefix_cache():
            raise RuntimeError("vLLM did not reset its prefix cache: blocks are held")


def answer(peer: ConnectedVllm, command: dict[str, Any]) -> dict[str, Any]:
    if "prompt" in command:
        named = command.get("breakpoints")
        peer.extra_args = {"kv_transfer_params": {"breakpoints": named}} if named else None
        begin_cpu = time.process_time()
        [record] = peer.serve([command["prompt"]], command["max_tokens"])
        return asdict(record) | {"cpu_s": time.process_time() - begin_cpu}
    {"settle": peer.settle, "reset": peer.reset}[command["do"]]()
    return {}


def main() -> None:
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    model_dir, options = sys.argv[1], json.loads(sys.argv[2])
    for key, value in VLLM_ENVIRONMENT.items():
        os.environ.setdefault(key, value)
    import torch

    torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
    peer = ConnectedVllm(model_dir, "bfloat16", {"enforce_eager": True} | options)
    try:
        print("{}", file=answers, flush=True)
        for line in sys.stdin:
            print(json.dumps(answer(peer, json.loads(line))), file=answers, flush=True)
        peer.release()
    finally:
        peer.close()


if __name__ == "__main__":
    main()
