"""Triton's interpreter looks the whole language up anew for every function that a kernel calls; here it does so once.

That is two fifths of its time (M). What it puts in the language's place stays there until the kernel has run.
"""

import os
from typing import Any

if os.environ.get("TRITON_INTERPRET") == "1":
    import triton.language as tl
    from triton.runtime import interpreter

    patch, run = interpreter._patch_lang, interpreter.GridExecutor.__call__
    patched: set[str] = set()

    def patch_once(function: Any) -> Any:
        modules = {value.__name__ for value in function.__globals__.values() if value is tl or value is tl.core}
        if modules <= patched:
            return interpreter._LangPatchScope()
        patched.update(modules)
        return patch(function)

    def run_anew(self: Any, *arguments: Any, **options: Any) -> None:
        patched.clear()
        run(self, *arguments, **options)

    interpreter._patch_lang, interpreter.GridExecutor.__call__ = patch_once, run_anew
