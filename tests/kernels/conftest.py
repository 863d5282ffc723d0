"""What Triton's interpreter does anew for every function and every value, it does once here.

For each function that a kernel calls it looks the whole language up: two fifths of its time (M). What it puts in the
language's place stays there until the kernel has run. For each value it makes a table of numpy's types: a tenth.
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

    numpy_type, known = interpreter._get_np_dtype, dict[str, Any]()

    def numpy_type_once(kind: Any) -> Any:
        # Of a block it is that of its elements.
        name = kind.scalar.name
        if name not in known:
            known[name] = numpy_type(kind)
        return known[name]

    interpreter._patch_lang, interpreter.GridExecutor.__call__ = patch_once, run_anew
    interpreter._get_np_dtype = numpy_type_once
