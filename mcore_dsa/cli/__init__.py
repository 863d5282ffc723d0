"""The command line `mcore-dsa`: plan a layer's shards and work, verify and convert checkpoints, look at runs."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Sequence

# Libraries that some command needs, and the extra that brings each.
_EXTRAS = {"jsonargparse": "cli", "packaging": "cli", "matplotlib": "plot", "safetensors": "hf"}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command.

    Args:
        arguments: the command line without the program's name, by default this process's own.

    Returns: the exit status: 0; 1 where a checkpoint or the installation is faulty; 2 for a call that cannot be
    answered, with the error in one line on stderr, or with `--json` as JSON on stdout. `--help` and `--version` raise
    `SystemExit` with 0.
    """
    words = list(sys.argv[1:] if arguments is None else arguments)
    as_json = "--json" in words
    try:
        from mcore_dsa.cli.arguments import parse

        outcome = parse(words)()
        print(json.dumps(outcome.report) if as_json else outcome.text(), flush=True)
    except ModuleNotFoundError as error:
        library = str(error.name).partition(".")[0]
        if library not in _EXTRAS:
            raise
        message = f"{library} is not installed; pip install 'mcore-dsa[{_EXTRAS[library]}]' brings it"
        return _complain(message, 2, as_json=as_json)
    except BrokenPipeError:
        # The reader has seen enough; what is still buffered must not go into the closed pipe at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except (ValueError, OSError) as error:
        return _complain(str(error), 2, as_json=as_json, usage=getattr(error, "usage", ""))
    except KeyboardInterrupt:
        return _complain("interrupted", 130, as_json=as_json)
    return 0 if outcome.ok else 1


def _complain(message: str, status: int, *, as_json: bool, usage: str = "") -> int:
    line = " ".join(message.split())
    if as_json:
        print(json.dumps({"ok": False, "error": line}), flush=True)
    else:
        print(f"{usage}mcore-dsa: error: {line}", file=sys.stderr)
    return status
