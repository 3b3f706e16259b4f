"""The `hybridkv` command."""

from __future__ import annotations

import atexit
import os
import sys

from hybridkv.cli.interrupts import QuietImports


def main() -> None:
    """Run the command line; bad input ends in one line on stderr and exit code 2, another failure in exit code 1."""
    code = 1

    def leave() -> None:
        """The last thing that happens: taking torch's modules apart would take another second or two."""
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)

    atexit.register(leave)
    with QuietImports():
        from hybridkv.cli.main import run
    code = run(sys.argv[1:])
    sys.exit(code)
