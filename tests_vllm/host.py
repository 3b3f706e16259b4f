"""Engines in processes of their own. vLLM is imported once: every connection forks a process that has it already.

    python host.py SOCKET

Requests and replies are lines of JSON. The first request of a connection says what the process becomes: see
`engines.py`.
"""

from __future__ import annotations

import faulthandler
import json
import os
import signal
import socket
import sys
import time
import traceback
from typing import Any

import stand_ins

SETTLING_S = 30.0
PREIMPORTED = (
    "vllm.entrypoints.launchers.api_server.entry",
    "vllm.model_executor.models.gemma3",
    "vllm.model_executor.models.qwen3_next",
    "vllm.v1.worker.cpu_worker",
    "vllm.v1.executor.multiproc_executor",
    "vllm.v1.executor.uniproc_executor",
    "vllm.v1.core.sched.async_scheduler",
    "transformers",
)


def main() -> None:
    import importlib

    for name in PREIMPORTED:
        importlib.import_module(name)
    stand_ins.install()
    path = sys.argv[1]
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(f"{path}.new")
    listener.listen()
    os.rename(f"{path}.new", path)  # it exists once it answers
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nothing waits for the processes: let them go
    while True:
        connection, _ = listener.accept()
        if os.fork() == 0:
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            listener.close()
            serve(connection)
        connection.close()


def serve(connection: socket.socket) -> None:
    """Become what the first request says, and answer requests until there are no more. Never returns."""
    lines = connection.makefile("rw", encoding="utf-8")
    become = json.loads(lines.readline())
    log = os.open(become["log"], os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(log, 1)
    os.dup2(log, 2)
    faulthandler.enable()  # a signal that ends the process leaves its last words, too
    os.environ.update(become["environment"])
    sys.path[:0] = become["path"]
    code = 1
    try:
        if "serve" in become:
            reply(lines, pid=os.getpid())
            serve_http(become["serve"])
        elif "layers" in become:
            import vllm_layers

            vllm_layers.write(become["layers"], become["to"])
            reply(lines, pid=os.getpid())
        else:
            answer(lines, Engine(become["engine"]))
        code = 0
    except BaseException:
        traceback.print_exc()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def reply(lines: Any, **fields: Any) -> None:
    lines.write(json.dumps(fields) + "\n")
    lines.flush()


def answer(lines: Any, engine: Engine) -> None:
    reply(lines, pid=os.getpid())
    for line in lines:
        request = json.loads(line)
        reply(lines, result=getattr(engine, request["do"])(**request["with"]))
    engine.quit()


def serve_http(arguments: list[str]) -> None:
    """vLLM's server, as its own module starts it."""
    import uvloop
    from vllm.entrypoints.launchers.api_server.entry import run_server
    from vllm.entrypoints.launchers.cli_args import make_arg_parser, validate_parsed_serve_args
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    parsed = make_arg_parser(FlexibleArgumentParser()).parse_args(arguments)
    validate_parsed_serve_args(parsed)
    uvloop.run(run_server(parsed))


class Engine:
    """One vLLM engine. Its public methods are the requests that it answers."""

    def __init__(self, options: dict[str, Any]) -> None:
        from vllm import LLM

        self._llm = LLM(**options)
        self._engine = self._llm.llm_engine
        self._scheduler: Any = None
        self._spans: dict[str, list[list[int]]] = {}
        self._preemptions = 0
        core = self._engine.engine_core
        if hasattr(core, "engine_core"):  # in this process
            self._scheduler = core.engine_core.scheduler
            self._record_schedules()

    def run(
        self,
        requests: list[dict[str, Any]],
        aborts: dict[str, dict[str, int]],
        chunks: list[int] | None,
        resets: list[int],
    ) -> dict[str, Any]:
        """Run requests to their ends. Each starts at step `at`; `aborts`: the step, the reply's length, or that a
        fault has struck.

        `chunks`: ends of prefill chunks, for one request alone. `resets`: steps before which vLLM's cache is emptied,
        and all that runs is preempted.
        """
        waiting = sorted(requests, key=lambda request: request["at"])
        self._spans = {request["id"]: [] for request in requests}
        self._preemptions = 0
        results: dict[str, dict[str, Any]] = {}
        steps = 0
        while waiting or self._engine.has_unfinished_requests():
            while waiting and waiting[0]["at"] <= steps:
                self._add(waiting.pop(0))
            if chunks is not None:
                self._choose_chunk(chunks)
            if steps in resets:
                self.reset_prefix_cache(reset_running_requests=True)
            for output in self._engine.step():
                results[output.request_id] = plain(output)
            steps += 1
            due = [name for name, when in aborts.items() if is_due(when, steps, results.get(name))]
            for name in due:
                del aborts[name]
                self._engine.abort_request([name])
                results.setdefault(name, {"tokens": [], "logprobs": [], "cached": 0})["finish"] = "abort"
        for name, spans in self._spans.items():
            results[name]["spans"] = spans
        return {"results": results, "steps": steps, "preemptions": self._preemptions}

    def settle(self) -> int:
        """Step until the engine holds nothing back for its connector. Returns the number of steps."""
        deadline = time.monotonic() + SETTLING_S
        steps = 0
        while self._scheduler is not None and self._scheduler.has_requests():
            self._engine.step()
            steps += 1
            if time.monotonic() > deadline:
                raise TimeoutError(f"after {steps} steps the engine still has requests: {self._scheduler.requests}")
        return steps

    def reset_connector(self) -> bool:
        """As after new weights."""
        return bool(self._llm.reset_prefix_cache(reset_connector=True))

    def reset(self) -> bool:
        """Forget vLLM's own prefix cache."""
        self.settle()
        return self.reset_prefix_cache()

    def reset_prefix_cache(self, **options: bool) -> bool:
        return bool(self._llm.reset_prefix_cache(**options))

    def free_blocks(self) -> int:
        self.settle()
        return int(self._scheduler.kv_cache_manager.block_pool.get_num_free_blocks())

    def metrics(self) -> dict[str, float]:
        found = ((metric.name, getattr(metric, "value", None)) for metric in self._llm.get_metrics())
        return {name: value for name, value in found if value is not None}

    def set_faults(self, faults: list[dict[str, Any]]) -> list[int]:
        """Faults of the store from now on (see `faulty.py`). Returns how often each of those before has struck."""
        import faulty

        return faulty.set_faults(faults)

    def struck(self) -> list[int]:
        """How often each of the present faults has struck."""
        import faulty

        return faulty.struck()

    def quit(self) -> None:
        self._engine.engine_core.shutdown()

    def _add(self, request: dict[str, Any]) -> None:
        from vllm import SamplingParams

        prompt = {"prompt_token_ids": request["prompt"]}
        if request["salt"] is not None:
            prompt["cache_salt"] = request["salt"]
        params = SamplingParams(
            temperature=0, max_tokens=request["max_tokens"], ignore_eos=True, logprobs=5, detokenize=False
        )
        self._engine.add_request(request["id"], prompt, params)

    def _record_schedules(self) -> None:
        """Note which tokens of each request every step computes."""
        scheduler, schedule = self._scheduler, self._scheduler.schedule

        def recorded(*args: Any, **options: Any) -> Any:
            output = schedule(*args, **options)
            for name, count in output.num_scheduled_tokens.items():
                end = scheduler.requests[name].num_computed_tokens
                self._spans.get(external(name), []).append([end - count, end])
            self._preemptions += len(output.preempted_req_ids or ())
            return output

        scheduler.schedule = recorded

    def _choose_chunk(self, ends: list[int]) -> None:
        """Let the next step end at the next of these: a step's budget is read every time."""
        computed = max((request.num_computed_tokens for request in self._scheduler.requests.values()), default=0)
        budget = self._scheduler.scheduler_config.max_num_batched_tokens
        following = [end - computed for end in ends if end > computed]
        self._scheduler.max_num_scheduled_tokens = min([budget, *following])


def external(name: str) -> str:
    """vLLM appends random letters to the name of a request."""
    return name.rpartition("-")[0]


def is_due(when: dict[str, int], steps: int, result: dict[str, Any] | None) -> bool:
    if "struck" in when:
        import faulty

        return any(faulty.struck())
    tokens = len(result["tokens"]) if result else 0
    return steps >= when.get("step", 1 << 30) or tokens >= when.get("tokens", 1 << 30)


def plain(output: Any) -> dict[str, Any]:
    [reply] = output.outputs
    logprobs = [{str(token): entry.logprob for token, entry in step.items()} for step in reply.logprobs or ()]
    return {
        "tokens": list(reply.token_ids),
        "logprobs": logprobs,
        "cached": output.num_cached_tokens,
        "finish": reply.finish_reason,
    }


if __name__ == "__main__":
    main()
