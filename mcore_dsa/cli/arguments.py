"""What may stand on the command line."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import get_args

from jsonargparse import ArgumentParser, Namespace
from jsonargparse.typing import PositiveInt

from mcore_dsa import __version__
from mcore_dsa.cli.convert import hf2mcore, mcore2hf
from mcore_dsa.cli.outcome import Outcome
from mcore_dsa.cli.plan import plan
from mcore_dsa.cli.verify import verify
from mcore_dsa.settings import Partition

_COMMANDS: dict[str, Callable[..., Outcome]] = {
    "plan": plan,
    "verify": verify,
    "hf2mcore": hf2mcore,
    "mcore2hf": mcore2hf,
}
_CONFIG = "config.json of the checkpoint, or its folder"


def parse(arguments: Sequence[str]) -> tuple[Callable[[], Outcome], bool]:
    """The command that ``arguments`` ask for, and whether to answer in JSON; ends the process if they do not parse."""
    values = _build_parser().parse_args(list(arguments))
    name = values.command
    chosen: Namespace = values[name]
    if name == "convert":
        name = chosen.direction
        chosen = chosen[name]
    options = vars(chosen)
    as_json = options.pop("json")
    return partial(_COMMANDS[name], **options), as_json


def _build_parser() -> ArgumentParser:
    parser = ArgumentParser(
        prog="mcore-dsa",
        version=__version__,
        description="Plan the shards and the work of DSA layers, verify their tensors in a checkpoint, convert them.",
        epilog="Exit status: 0, 1 where a checkpoint is faulty, 2 where a call cannot be answered.",
    )
    commands = parser.add_subcommands(dest="command")
    commands.add_subcommand("plan", _plan_parser(), help="what a tensor-parallel rank holds and does")
    commands.add_subcommand("verify", _verify_parser(), help="compare a checkpoint with its configuration")
    convert = ArgumentParser(description="Between a Hugging Face checkpoint and one file for each rank.")
    commands.add_subcommand("convert", convert, help="to Megatron's tensors of each rank, and back")
    directions = convert.add_subcommands(dest="direction")
    directions.add_subcommand("hf2mcore", _hf2mcore_parser(), help="a checkpoint's DSA tensors, a file for each rank")
    directions.add_subcommand("mcore2hf", _mcore2hf_parser(), help="the files of all ranks, a checkpoint again")
    return parser


def _with_json(parser: ArgumentParser) -> ArgumentParser:
    parser.add_argument("--json", action="store_true", help="answer with one line of JSON on stdout")
    return parser


def _plan_parser() -> ArgumentParser:
    parser = ArgumentParser(
        description="The 14 tensors of a DSA layer on each tensor-parallel rank, and what selecting costs each of "
        "them in one forward of one layer: FLOPs of scored pairs, bytes received, bytes held at the peak (BF16, tiles "
        "of a CUDA device, default budgets). Nothing is run."
    )
    parser.add_argument("--config", type=str, required=True, help=_CONFIG)
    parser.add_argument("--tp", type=PositiveInt, required=True, help="tensor-parallel ranks")
    parser.add_argument(
        "--cp",
        type=PositiveInt,
        default=1,
        help="context-parallel ranks. Each has a tensor-parallel group of its own, with two of the 2 * CP equal "
        "chunks of every document, one counted from the front and one from the end, and the pools of the whole pack. "
        "Shown is the group with the most pairs. Bytes received and held, and the balanced partition, are not modelled "
        "with more than 1",
    )
    parser.add_argument("--seq", type=PositiveInt, required=True, help="tokens in one pack of documents")
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
    parser.add_argument("--plot", type=str, default=None, help="file for a picture of the work of each rank")
    return _with_json(parser)


def _verify_parser() -> ArgumentParser:
    parser = ArgumentParser(
        description="Compare the headers of a checkpoint's files with its configuration. All faults are listed."
    )
    parser.add_argument("path", type=str, help="folder, .safetensors file or index of the checkpoint")
    parser.add_argument("--config", type=str, default=None, help=_CONFIG + "; by default the one beside the files")
    return _with_json(parser)


def _hf2mcore_parser() -> ArgumentParser:
    parser = ArgumentParser(
        description="Write a new folder with config.json and, for each tensor-parallel rank, one safetensors file of "
        "its DSA tensors under Megatron's names, layers.N.self_attention.*, N being the checkpoint's. FP8 weights "
        "become BF16. The folder appears complete or not at all."
    )
    parser.add_argument("source", type=str, help="folder, .safetensors file or index of the checkpoint")
    parser.add_argument("target", type=str, help="folder to make")
    parser.add_argument("--tp", type=PositiveInt, required=True, help="tensor-parallel ranks")
    parser.add_argument(
        "--layers", type=str, default=None, help="FIRST-LAST, layers of the checkpoint, both included; by default all"
    )
    parser.add_argument("--config", type=str, default=None, help=_CONFIG + "; by default the one beside the files")
    return _with_json(parser)


def _mcore2hf_parser() -> ArgumentParser:
    parser = ArgumentParser(
        description="Put the files of all ranks, as hf2mcore writes them, together into a new folder: a checkpoint of "
        "the DSA tensors alone, or a copy of --template with them in place of its own. The folder appears complete or "
        "not at all."
    )
    parser.add_argument("source", type=str, help="folder with one file for each rank")
    parser.add_argument("target", type=str, help="folder to make")
    parser.add_argument("--template", type=str, default=None, help="checkpoint to copy, with attention in BF16 or F32")
    parser.add_argument("--config", type=str, default=None, help=_CONFIG + "; by default the one beside the files")
    return _with_json(parser)
