"""The `hybridkv` command."""

from hybridkv.cli.main import main

__all__ = ["main"]
