"""Programs that start at once: forked from a process that has imported torch and transformers, which takes seconds.

    process = warm.Popen([sys.executable, "-m", "tests.stream.remote_engine", url], stdout=subprocess.PIPE)

It is a `subprocess.Popen` for programs of this Python: `-m module`, `-c code`, or a script. At least one test of each
command starts it the usual way, because modules that are imported already hide what importing them does.

This process sends each program to `_fork_programs`, which forks a keeper, which forks the program, reports its process
id and waits for its exit status: the program is nobody's child here, so the status comes by a socket.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import inspect
import io
import os
import pickle
import runpy
import signal
import socket
import subprocess
import sys
from collections.abc import Sequence
from importlib import import_module
from typing import Any, NamedTuple

_IMPORTS = [
    "hybridkv.engine.engine",
    "hybridkv.serve.server",
    "typer",
    "transformers.models.qwen3_next.modeling_qwen3_next",
    "tests.engine.zoo",
]


class _Program(NamedTuple):
    words: Sequence[str]
    """-m module, -c code or a script, and its arguments."""
    cwd: str
    environment: dict[str, str]
    is_leader: bool
    """Whether it leads a session of its own."""


class Popen(subprocess.Popen[Any]):
    """A program that starts at once."""

    def _execute_child(self, *args: Any) -> None:
        told = inspect.signature(subprocess.Popen._execute_child).bind(self, *args).arguments  # type: ignore[attr-defined]
        if told["preexec_fn"] or told["pass_fds"] or told["shell"]:
            raise ValueError("a warm program takes no preexec_fn, no pass_fds and no shell: start it the usual way")
        words = [os.fspath(one) for one in told["args"]]
        program = _Program(
            words[1:] if words[0] == sys.executable else words,
            os.fspath(told["cwd"] or os.getcwd()),
            dict(os.environ if told["env"] is None else told["env"]),
            told["start_new_session"],
        )
        self._status, theirs = socket.socketpair()
        pipes = [told[name] for name in ("p2cread", "c2pwrite", "errwrite")]
        streams = [stream if pipe < 0 else pipe for stream, pipe in enumerate(pipes)]
        with theirs:
            socket.send_fds(_forking(), [pickle.dumps(program)], [*streams, theirs.fileno()])
        self.pid = _read_number(self._status)
        self._child_created = True
        ends = ("p2cread", "p2cwrite", "c2pread", "c2pwrite", "errread", "errwrite")
        self._close_pipe_fds(*(told[name] for name in ends))  # type: ignore[attr-defined]

    def _internal_poll(self, _deadstate: Any = None) -> int | None:
        if self.returncode is None:
            pid, status = self._try_wait(os.WNOHANG)
            if pid:
                self._handle_exitstatus(status)  # type: ignore[attr-defined]
        return self.returncode

    def _try_wait(self, wait_flags: int) -> tuple[int, int]:
        self._status.setblocking(not wait_flags & os.WNOHANG)
        try:
            status = _read_number(self._status)
        except BlockingIOError:
            return 0, 0
        self._status.close()
        return self.pid, status


def run(args: Sequence[Any], *, timeout: float | None = None, check: bool = False, **options: Any) -> Any:
    """`subprocess.run` of a warm program, which captures what it says."""
    streams: dict[str, Any] = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    with Popen(list(map(str, args)), text=True, **streams, **options) as process:
        try:
            said, log = process.communicate(timeout=timeout)
        except BaseException:
            process.kill()
            raise
    done = subprocess.CompletedProcess(process.args, process.returncode, said, log)
    if check:
        done.check_returncode()
    return done


def _read_number(source: socket.socket) -> int:
    data = source.recv(8)
    if len(data) != 8:
        raise ChildProcessError("the process that forks programs has ended: its output says why")
    return int.from_bytes(data, "little", signed=True)


@functools.cache
def _forking() -> socket.socket:
    """The socket of the process that forks programs, which ends with this socket."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    code = f"from tests import warm; warm.fork_programs({theirs.fileno()})"
    with theirs:
        root = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
        subprocess.Popen([sys.executable, "-c", code], pass_fds=[theirs.fileno()], cwd=root, stdin=subprocess.DEVNULL)
    return ours


# --- in the process that forks programs -------------------------------------------------------------------------------


def fork_programs(number: int) -> None:
    """Run each program that comes, until the socket is closed. Returns in the programs, with nothing left to do."""
    for name in _IMPORTS:
        with contextlib.suppress(ImportError):  # of an extra that is not installed: programs that need it say so
            import_module(name)
    gc.collect()
    gc.freeze()
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # keepers are not waited for
    with socket.socket(fileno=number) as orders:
        while True:
            data, fds, _, _ = socket.recv_fds(orders, 1 << 20, 4)
            if not data:
                return
            if not os.fork():
                break
            for fd in fds:
                os.close(fd)
    program: _Program = pickle.loads(data)
    *streams, status = fds
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    child = os.fork()
    if child:
        _keep(child, socket.socket(fileno=status), streams)
    os.close(status)
    _become(program, streams)


def _keep(child: int, status: socket.socket, streams: Sequence[int]) -> None:
    """Report the process id of a program and then how it ended. Does not return."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    for fd in (*streams, 0, 1, 2):  # a reader of the program's output must see its end
        os.close(fd)
    for number in (child, None):
        number = os.waitpid(child, 0)[1] if number is None else number
        with contextlib.suppress(OSError):  # the process that started it has ended
            status.sendall(number.to_bytes(8, "little", signed=True))
    os._exit(0)


def _become(program: _Program, streams: Sequence[int]) -> None:
    """Run a program as Python would. Raises SystemExit as it does."""
    if program.is_leader:
        os.setsid()
    for target, fd in enumerate(streams):
        os.dup2(fd, target)
    for fd in set(streams) - {0, 1, 2}:
        os.close(fd)
    os.chdir(program.cwd)
    os.environ.clear()
    os.environ.update(program.environment)
    is_unbuffered = bool(program.environment.get("PYTHONUNBUFFERED"))
    said, log = (io.BufferedWriter(io.FileIO(fd, "wb", closefd=False)) for fd in (1, 2))
    sys.stdin = io.TextIOWrapper(io.BufferedReader(io.FileIO(0, "rb", closefd=False)))
    sys.stdout = io.TextIOWrapper(said, write_through=is_unbuffered)
    sys.stderr = io.TextIOWrapper(log, errors="backslashreplace", line_buffering=True)
    sys.__stdin__, sys.__stdout__, sys.__stderr__ = sys.stdin, sys.stdout, sys.stderr  # type: ignore[misc]
    kind, *rest = program.words
    if kind == "-m":
        sys.path[0] = program.cwd
        sys.argv = rest
        runpy.run_module(rest[0], run_name="__main__", alter_sys=True)
    elif kind == "-c":
        sys.argv = ["-c", *rest[1:]]
        exec(compile(rest[0], "<string>", "exec"), {"__name__": "__main__"})
    else:
        sys.path[0] = os.path.dirname(kind)
        sys.argv = [kind, *rest]
        runpy.run_path(kind, run_name="__main__")
