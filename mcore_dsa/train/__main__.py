"""`torchrun ... -m mcore_dsa.train --config FILE`."""

import logging
import os
import sys
import warnings

from mcore_dsa.train.ending import die_with_launcher


def main() -> int:
    """Parse the command line and train; a bad command line ends here, before Megatron is imported."""
    # Before all that takes seconds to import. What else starts ranks may leave them to themselves.
    if "TORCHELASTIC_RUN_ID" in os.environ:
        die_with_launcher(os.getppid())
    from mcore_dsa.train.attendance import Attendance
    from mcore_dsa.train.config import parse_config

    attendance = Attendance(debug="--debug" in sys.argv[1:])
    try:
        attendance.begin()
        config = parse_config()
        attendance.wait_for(say_after_s=config.waiting.say_after_s, end_after_s=config.waiting.end_after_s)
        _quieten()
        from mcore_dsa.train.job import run

        return run(config, attendance)
    except SystemExit:
        raise
    # What torch raises where a checkpoint cannot be read is no subclass of Exception.
    except BaseException as error:
        # Without the end of the interpreter, which takes down a process group in any order.
        os._exit(attendance.failed(error))


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
    sys.exit(main())
