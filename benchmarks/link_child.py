"""An object in a process of its own, whose methods are called through a pipe."""

from __future__ import annotations

import multiprocessing
import os
import traceback
from collections.abc import Callable, Mapping
from multiprocessing.connection import Connection
from types import TracebackType
from typing import Any
from unittest.mock import patch

_WAIT_S = 120.0


class Child:
    """One process. Calls are answered in their order; `begin` and `end` bracket a call that others run beside."""

    def __init__(self, name: str, make: Callable[..., Any], *args: Any, env: Mapping[str, str], **kwargs: Any) -> None:
        """`make`: a class or function that is importable in the child, which calls it with the other arguments."""
        self.name = name
        context = multiprocessing.get_context("spawn")
        self._pipe, theirs = context.Pipe()
        self._process = context.Process(target=_serve, args=(theirs, make, args, kwargs), name=name, daemon=True)
        with patch.dict(os.environ, env):
            self._process.start()
        theirs.close()

    def call(self, method: str, *args: Any, **kwargs: Any) -> Any:
        self.begin(method, *args, **kwargs)
        return self.end()

    def begin(self, method: str, *args: Any, **kwargs: Any) -> None:
        self._pipe.send((method, args, kwargs))

    def end(self) -> Any:
        """What the oldest call that was begun has returned."""
        if not self._pipe.poll(_WAIT_S):
            raise TimeoutError(f"{self.name} has not answered in {_WAIT_S:g} s")
        is_good, value = self._pipe.recv()
        if not is_good:
            raise RuntimeError(f"{self.name} has failed:\n{value}")
        return value

    def __enter__(self) -> Child:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._pipe.close()  # the child ends at the end of its pipe
        self._process.join(10)
        if self._process.is_alive():
            self._process.kill()


def _serve(pipe: Connection, make: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
    served: Any = None
    try:
        while True:
            method, its_args, its_kwargs = pipe.recv()
            try:
                served = served or make(*args, **kwargs)
                pipe.send((True, getattr(served, method)(*its_args, **its_kwargs)))
            except Exception:  # the parent raises it
                pipe.send((False, traceback.format_exc()))
    except EOFError:
        pass
    finally:
        if served is not None:
            served.close()
