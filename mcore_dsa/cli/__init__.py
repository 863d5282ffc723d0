"""The command line ``mcore-dsa``: plan a layer's shards and work, verify a checkpoint, convert one."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Sequence

# Libraries that some command needs, and the extra that brings each.
_EXTRAS = {"jsonargparse": "cli", "matplotlib": "plot", "safetensors": "hf"}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command.

    Args:
        arguments: the command line without the program's name, by default this process's own.

    Returns:
        The exit status: 0; 1 where a checkpoint is faulty; 2 for a call that cannot be answered, with one line on
        stderr. A command line that does not parse raises ``SystemExit`` with 2, ``--help`` with 0.
    """
    try:
        from mcore_dsa.cli.arguments import parse

        command, as_json = parse(sys.argv[1:] if arguments is None else arguments)
        outcome = command()
        print(json.dumps(outcome.report) if as_json else outcome.text(), flush=True)
    except ModuleNotFoundError as error:
        library = str(error.name).partition(".")[0]
        if library not in _EXTRAS:
            raise
        return _complain(f"{library} is not installed; pip install 'mcore-dsa[{_EXTRAS[library]}]' brings it", 2)
    except BrokenPipeError:
        # The reader has seen enough; what is still buffered must not go into the closed pipe at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except (ValueError, OSError) as error:
        return _complain(str(error), 2)
    except KeyboardInterrupt:
        return _complain("interrupted", 130)
    return 0 if outcome.ok else 1


def _complain(message: str, status: int) -> int:
    print("mcore-dsa: error:", " ".join(message.split()), file=sys.stderr)
    return status
