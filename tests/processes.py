"""Child processes that die on demand. Only for programs that fork while they have one thread."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any


def fork(work: Callable[[], None]) -> int:
    """Run `work` in a child, which exits with 0, or with 1 if it raises. Returns the child's process id."""
    pid = os.fork()
    if pid:
        return pid
    try:
        work()
    except BaseException:
        sys.excepthook(*sys.exc_info())
        os._exit(1)
    os._exit(0)


def die_at_call(calls: Sequence[str], number: int, when: str, work: Callable[[], None]) -> None:
    """Run `work`, and kill this process at the `number`-th call of these functions of `os`: "before" or "after" it."""
    left = [number]

    def deadly(call: Callable[..., Any], *args: Any, **options: Any) -> Any:
        left[0] -= 1
        if left[0] == 0 and when == "before":
            os.kill(os.getpid(), signal.SIGKILL)
        result = call(*args, **options)
        if left[0] == 0:
            os.kill(os.getpid(), signal.SIGKILL)
        return result

    for name in calls:
        setattr(os, name, partial(deadly, getattr(os, name)))
    work()
