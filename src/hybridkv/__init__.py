"""hybridkv: the KV cache of hybrid LLMs."""

from importlib.metadata import version

__version__ = version("hybridkv")
