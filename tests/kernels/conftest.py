"""Under Triton's interpreter, all of `strict_interpreter.py`."""

import os

if os.environ.get("TRITON_INTERPRET") == "1":
    from strict_interpreter import install

    install()
