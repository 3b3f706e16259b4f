"""Sets up Triton before it is imported: without a GPU its kernels run in its interpreter.

The interpreter replaces the functions of triton.language whenever a kernel or a function of one is called, and looks for
them through whole modules each time. Here that happens once.
"""

from __future__ import annotations

import functools
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

    @functools.cache
    def _patched(*modules: str) -> Any:
        """A function that sees these modules of Triton's, patched for good."""

        def sees() -> None: ...

        seen = {name: {"tl": _tl, "core": _tl.core}[name] for name in modules}
        return _patch_lang(type(sees)(sees.__code__, seen))

    def _patch_lang_once(fn: Any) -> Any:
        values = [value for value in fn.__globals__.values() if value is _tl or value is _tl.core]
        _patched(*sorted({"tl" if value is _tl else "core" for value in values}))
        return interpreter._LangPatchScope()

    interpreter._patch_lang_tensor = _patch_lang_tensor
    interpreter._patch_lang = _patch_lang_once
