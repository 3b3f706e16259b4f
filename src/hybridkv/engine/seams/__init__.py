"""Connects paged memory to stock transformers models: a cache, an attention function, and conv and scan functions.

No model code is copied or changed. Every name of transformers that is used here is checked by a test, so that an
upgrade that moves it fails loudly.
"""

from hybridkv.engine.seams.frame import Frame, active
from hybridkv.engine.seams.patches import ATTENTION, attach
from hybridkv.engine.seams.stand_in import PagedCache

__all__ = ["ATTENTION", "Frame", "PagedCache", "active", "attach"]
