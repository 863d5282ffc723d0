"""`torchrun ... -m mcore_dsa.train --config FILE`."""

import logging
import os
import sys
import warnings

from torch.distributed.elastic.multiprocessing.errors import record

from mcore_dsa.train.config import parse_config


def main() -> int:
    """Parse the command line and train; a bad command line ends here, before Megatron is imported."""
    config = parse_config()
    _quieten()
    from mcore_dsa.train.job import run

    return run(config)


def _quieten() -> None:
    """Leave the progress bar alone on the terminal: Megatron warns in every rank, some of it while it is imported."""
    warnings.filterwarnings("ignore", module=r"megatron\.")
    warnings.filterwarnings("ignore", category=FutureWarning, message=r"`torch\.distributed\.\w+` is deprecated")
    logging.basicConfig(level=logging.WARNING, format="%(name)s: %(message)s")
    logging.getLogger("megatron").setLevel(logging.ERROR)
    if os.environ.get("RANK", "0") == "0":
        logging.getLogger("mcore_dsa").setLevel(logging.INFO)
    # One line for each of some thirty replaced symbols; the run logs their number.
    logging.getLogger("mcore_dsa.patches").setLevel(logging.WARNING)


# Guarded, because a distributed checkpoint may start a process that imports this module again.
if __name__ == "__main__":
    sys.exit(record(main)())
