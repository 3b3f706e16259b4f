"""What processes of linked engines have from the beginning: the process that forks them has imported this.

NIXL's plugin for UCX takes longer to load than an engine to start, and a model's first pass imports modules.
"""

from __future__ import annotations

import ctypes
import gc
import importlib
import importlib.util
import os
from pathlib import Path

import torch

import hybridkv.engine.engine
import hybridkv.link.link
import tests.link.fault_workers
from tests.engine import zoo
from tests.engine.checkpoints import tokenizer

_FAMILIES = ["llama", "gemma3", "qwen3_next", "mamba2", "nemotron_h", "kimi_linear", "falcon_h1"]
"""Those that tests start again and again."""


def _load_nixl() -> None:
    found = importlib.util.find_spec("nixl_cu12")
    if found is None or found.origin is None:
        return
    os.environ.setdefault("NIXL_LOG_LEVEL", "ERROR")
    importlib.import_module("nixl_cu12._api")
    for plugin in Path(found.origin).parent.parent.glob(".nixl_cu12*/plugins/libplugin_UCX.so"):
        ctypes.CDLL(str(plugin))


torch.set_num_threads(1)  # threads would not be there after the fork
_load_nixl()
tokenizer()
for _family in _FAMILIES:
    zoo.oracle_logits(zoo.build(_family), zoo.prompt(8))
gc.collect()
gc.freeze()
__all__ = ["hybridkv", "tests"]  # imported for those who are forked
