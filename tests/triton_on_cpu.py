"""Sets up Triton before it is imported: without a GPU its kernels run in its interpreter.

The interpreter replaces the functions of triton.language whenever a kernel or a function of one is called, and looks
for them through whole modules each time. Here that happens once.
"""

from __future__ import annotations

import importlib.util
import os
from typing import Any

if importlib.util.find_spec("triton") is not None and os.environ.get("TRITON_INTERPRET") == "1":
    from triton.runtime import interpreter

    _patch_tensor, _patch_lang, _tl = interpreter._patch_lang_tensor, interpreter._patch_lang, interpreter.tl

    def _patch_lang_tensor(tensor: Any, scope: Any) -> None:
        """Bounds of loops are arrays of one element in the interpreter, which numpy >= 2.4 refuses as an index."""
        _patch_tensor(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: self.handle.data.item())

    _patched: set[int] = set()
    """Modules of Triton's that are replaced for good, by their ids."""

    def _patch_lang_once(fn: Any) -> Any:
        seen = {id(value) for value in fn.__globals__.values() if value is _tl or value is _tl.core}
        if not seen <= _patched:
            _patch_lang(fn)
            _patched.update(seen)
        return interpreter._LangPatchScope()

    interpreter._patch_lang_tensor = _patch_lang_tensor
    interpreter._patch_lang = _patch_lang_once
