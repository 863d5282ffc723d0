"""`make soak`: the hypothesis properties with other examples in every round, until time is up or one of them fails."""

import argparse
import random
import shlex
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).parents[1]


def main() -> int:
    parser = argparse.ArgumentParser(prog="tests/soak.py", description=__doc__)
    parser.add_argument("--minutes", type=float, default=10.0, help="after which no round begins (default 10)")
    parser.add_argument(
        "--seed", type=int, default=random.randrange(1 << 30), help="of the first round (default random)"
    )
    parser.add_argument("rest", nargs="*", help="arguments for pytest, after --")
    arguments = parser.parse_args()
    end, seed = time.monotonic() + 60 * arguments.minutes, arguments.seed
    while (left := end - time.monotonic()) > 0:
        command = [sys.executable, "-m", "pytest", "-q", "-x", "-m", "hypothesis", "--hypothesis-profile=soak"]
        command += [f"--hypothesis-seed={seed}", *arguments.rest]
        print(f"seed {seed}, {left / 60:.1f} minutes left", flush=True)
        code = subprocess.run(command, cwd=ROOT).returncode
        if code:
            print(f"again with: {shlex.join(command)}")
            return code
        seed += 1
    print(f"time is up: nothing failed under seeds {arguments.seed} to {seed - 1}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
