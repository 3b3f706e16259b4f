"""Sets up Triton before it is imported: without a GPU its kernels run in its interpreter."""

from __future__ import annotations

import importlib.util
import os
from typing import Any

if importlib.util.find_spec("triton") is not None and os.environ.get("TRITON_INTERPRET") == "1":
    from triton.runtime import interpreter

    _patch = interpreter._patch_lang_tensor

    def _patch_lang_tensor(tensor: Any, scope: Any) -> None:
        """Bounds of loops are arrays of one element in the interpreter, which numpy >= 2.4 refuses as an index."""
        _patch(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: self.handle.data.item())

    interpreter._patch_lang_tensor = _patch_lang_tensor
