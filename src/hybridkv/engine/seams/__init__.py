"""Where our paged memory meets stock transformers models: a cache, an attention function, and conv and scan functions.

No model code is copied or changed. Everything here that names something of transformers is pinned by a test, so that an
upgrade which moves it fails loudly.
"""

from hybridkv.engine.seams.frame import Frame, active
from hybridkv.engine.seams.patches import ATTENTION, attach
from hybridkv.engine.seams.stand_in import PagedCache

__all__ = ["ATTENTION", "Frame", "PagedCache", "active", "attach"]
