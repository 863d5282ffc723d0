"""What may stand on the command line."""

from __future__ import annotations

import re
from argparse import ArgumentError, ArgumentTypeError
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, get_args

from jsonargparse import ArgumentParser

from mcore_dsa import __version__
from mcore_dsa.cli.outcome import Outcome
from mcore_dsa.hf_config import shown
from mcore_dsa.settings import BYTES_ACCEPTED, Kernels, Partition, parse_bytes

_PROGRAM = "mcore-dsa"
_CONFIG = "config.json of the checkpoint, or its folder"
_H200_BYTES = 139 * 2**30


class CommandLineError(ValueError):
    """A command line that does not parse.

    Attributes:
        usage: how the command that was meant is called, in lines.
    """

    def __init__(self, message: str, usage: str) -> None:
        super().__init__(message)
        self.usage = usage


def parse(words: Sequence[str]) -> Callable[[], Outcome]:
    """The command that a command line asks for. `--help` and `--version` end the process.

    Raises: CommandLineError.
    """
    name, parser = _chosen_parser(words)
    try:
        options = vars(parser.parse_args(list(words[len(name.split()) :])))
    except ArgumentError as error:
        raise CommandLineError(str(error), parser.format_usage()) from error
    # Some versions of argparse find a command behind "--", where this parser only lists it.
    if "json" not in options:
        raise CommandLineError(f"{shown(list(words))} begins with no command", parser.format_usage())
    del options["json"]
    return partial(_command(name), **options)


def _command(name: str) -> Callable[..., Outcome]:
    """Imported when it is called for: torch alone takes a second, which `--help` and `verify` do without."""
    if name == "plan":
        from mcore_dsa.cli.plan import plan

        return plan
    if name == "verify":
        from mcore_dsa.cli.verify import verify

        return verify
    if name == "doctor":
        from mcore_dsa.cli.doctor import doctor

        return doctor
    if name == "report":
        from mcore_dsa.cli.report import report

        return report
    from mcore_dsa.cli import convert

    return convert.hf2mcore if name == "convert hf2mcore" else convert.mcore2hf


def _chosen_parser(words: Sequence[str]) -> tuple[str, ArgumentParser]:
    """The innermost command that `words` begin with and its parser, so that a fault is told by the command it is in."""
    first, second = (*words, "", "")[:2]
    if first == "convert":
        directions = {"hf2mcore": _hf2mcore_parser, "mcore2hf": _mcore2hf_parser}
        if second in directions:
            return f"convert {second}", directions[second](prog=f"{_PROGRAM} convert {second}")
        return "convert", _overview(
            {
                "hf2mcore": "a checkpoint's DSA tensors, a file for each rank",
                "mcore2hf": "the files of all ranks, a checkpoint again",
            },
            prog=f"{_PROGRAM} convert",
            description="Between a Hugging Face checkpoint and one file for each rank.",
        )
    commands = {
        "plan": _plan_parser,
        "verify": _verify_parser,
        "doctor": _doctor_parser,
        "report": _report_parser,
    }
    if first in commands:
        return first, commands[first](prog=f"{_PROGRAM} {first}")
    return "", _overview(
        {
            "plan": "what a tensor-parallel rank holds and does",
            "verify": "compare a checkpoint with its configuration",
            "convert": "to Megatron's tensors of each rank, and back",
            "doctor": "what this machine and installation would run",
            "report": "one page about a run, with pictures",
        },
        prog=_PROGRAM,
        version=__version__,
        description="Plan the shards and the work of DSA layers, verify their tensors in a checkpoint, convert them; "
        "look at this machine, and at runs.",
        epilog="Exit status: 0, 1 where a checkpoint or the installation is faulty, 2 where a call cannot be answered.",
    )


def _overview(commands: Mapping[str, str], **texts: Any) -> ArgumentParser:
    """Explains itself, and refuses everything but `--help` and `--version`."""
    parser = ArgumentParser(exit_on_error=False, allow_abbrev=False, **texts)
    listed = parser.add_subcommands(dest="command")
    for name, text in commands.items():
        listed.add_subcommand(name, ArgumentParser(), help=text)
    return parser


def _count(value: object) -> int:
    """For jsonargparse, which calls it with the word and then with what it gave."""
    text = str(value)
    if not re.fullmatch("[0-9]{1,18}", text) or int(text) == 0:
        raise ArgumentTypeError(f"{shown(text)}; accepted is an integer >= 1, of at most 18 digits")
    return int(text)


def _bytes(value: object) -> int:
    text = str(value)
    try:
        return parse_bytes(text.strip().lower())
    except LookupError:
        raise ArgumentTypeError(f"{shown(text)}; accepted are {BYTES_ACCEPTED}") from None


def _parser(prog: str, description: str) -> ArgumentParser:
    parser = ArgumentParser(prog=prog, description=description, exit_on_error=False, allow_abbrev=False)
    parser.add_argument("--json", action="store_true", help="answer with one line of JSON on stdout, errors too")
    return parser


def _plan_parser(prog: str) -> ArgumentParser:
    parser = _parser(
        prog,
        "The 14 tensors of a DSA layer on each tensor-parallel rank, and what selecting costs each of "
        "them in one forward of one layer: FLOPs of scored pairs, bytes received, bytes held at the peak (BF16, on "
        "CUDA devices of --device-bytes, under the budgets that are default there). Nothing is run.",
    )
    parser.add_argument("--config", type=str, required=True, help=_CONFIG)
    parser.add_argument("--tp", type=_count, required=True, help="tensor-parallel ranks")
    parser.add_argument(
        "--cp",
        type=_count,
        default=1,
        help="context-parallel ranks. Each has a tensor-parallel group of its own, with two of the 2 * CP equal "
        "chunks of every document, one counted from the front and one from the end, and the pools of the whole pack. "
        "Shown is the group with the most pairs. Bytes received and held, and the balanced partition, are not modelled "
        "with more than 1",
    )
    parser.add_argument("--seq", type=_count, required=True, help="tokens in one pack of documents")
    parser.add_argument(
        "--segments",
        type=str,
        default=None,
        help="file of the documents' lengths in tokens, between white space; "
        "they add up to --seq. By default the pack is one document",
    )
    parser.add_argument(
        "--partition",
        choices=get_args(Partition),
        default=None,
        help="whose ranks to list; by default the best, with --cp above 1 contiguous",
    )
    parser.add_argument(
        "--kernels",
        choices=get_args(Kernels),
        default="auto",
        help="whose scratch and traffic to count; by default triton where that takes the geometry, else torch",
    )
    parser.add_argument(
        "--device-bytes",
        type=_bytes,
        default=_H200_BYTES,
        help="memory of a rank's device, as 80GiB, which the default budgets follow; by default 139GiB, an H200's",
    )
    parser.add_argument("--plot", type=str, default=None, help="file for a picture of the work of each rank")
    return parser


def _verify_parser(prog: str) -> ArgumentParser:
    parser = _parser(prog, "Compare the headers of a checkpoint's files with its configuration. All faults are listed.")
    parser.add_argument(
        "--values",
        # A namespace of jsonargparse has a method of the option's name.
        dest="read_values",
        action="store_true",
        help="read the DSA tensors too: NaN, infinities, tensors of zeros, scales of zero",
    )
    parser.add_argument("path", type=str, help="folder, .safetensors file or index of the checkpoint")
    parser.add_argument("--config", type=str, default=None, help=_CONFIG + "; by default the one beside the files")
    return parser


def _doctor_parser(prog: str) -> ArgumentParser:
    return _parser(
        prog,
        "What would run here: versions, and which of them are not supported, devices, kernels, the settings as read "
        "from the environment, and what is missing for what. A library that is not installed is no fault.",
    )


def _report_parser(prog: str) -> ArgumentParser:
    parser = _parser(
        prog,
        "Draw one page about a run of the training job: loss, tokens a second, what indexer and exchange take, work of "
        "each rank, and which pools the rows select. The page holds its pictures, and needs no other file.",
    )
    parser.add_argument("run", type=str, help="folder of the run, with metrics.jsonl")
    parser.add_argument("--out", type=str, default=None, help="the page; by default report.html in the run's folder")
    return parser


def _hf2mcore_parser(prog: str) -> ArgumentParser:
    parser = _parser(
        prog,
        "Write a new folder with config.json and, for each tensor-parallel rank, one safetensors file of "
        "its DSA tensors under Megatron's names, layers.N.self_attention.*, N being the checkpoint's. FP8 weights "
        "become BF16. The folder appears complete or not at all.",
    )
    parser.add_argument("source", type=str, help="folder, .safetensors file or index of the checkpoint")
    parser.add_argument("target", type=str, help="folder to make")
    parser.add_argument("--tp", type=_count, required=True, help="tensor-parallel ranks")
    parser.add_argument(
        "--layers", type=str, default=None, help="FIRST-LAST, layers of the checkpoint, both included; by default all"
    )
    parser.add_argument("--config", type=str, default=None, help=_CONFIG + "; by default the one beside the files")
    return parser


def _mcore2hf_parser(prog: str) -> ArgumentParser:
    parser = _parser(
        prog,
        "Put the files of all ranks, as hf2mcore writes them, together into a new folder: a checkpoint of "
        "the DSA tensors alone, or a copy of --template with them in place of its own. The folder appears complete or "
        "not at all.",
    )
    parser.add_argument("source", type=str, help="folder with one file for each rank")
    parser.add_argument("target", type=str, help="folder to make")
    parser.add_argument("--template", type=str, default=None, help="checkpoint to copy, with attention in BF16 or F32")
    parser.add_argument("--config", type=str, default=None, help=_CONFIG + "; by default the one beside the files")
    return parser
