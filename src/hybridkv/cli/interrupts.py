"""Ctrl-C while modules are imported: the process ends there, with nothing to say and nothing to clean up.

An exception raised in the middle of an import is no way out: it shows a traceback, and what imports torch may take it
for a failure of its own. This module is imported first: it must stay light.
"""

from __future__ import annotations

import os
import signal
from types import FrameType

INTERRUPTED = 130
"""The exit code of what Ctrl-C has ended."""


class QuietImports:
    """Ctrl-C inside this block ends the process at once, without a word."""

    def __enter__(self) -> None:
        """Nothing to do where the signal is ignored, as in the background of a script, or somebody else's."""
        self._is_ours = signal.getsignal(signal.SIGINT) is signal.default_int_handler
        if self._is_ours:
            signal.signal(signal.SIGINT, _leave)

    def __exit__(self, *_: object) -> None:
        if self._is_ours:
            signal.signal(signal.SIGINT, signal.default_int_handler)


def _leave(number: int, frame: FrameType | None) -> None:
    os._exit(INTERRUPTED)
