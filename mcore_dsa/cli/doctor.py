"""`mcore-dsa doctor`: what this machine and this installation would run, and what is missing for what."""

from __future__ import annotations

import platform
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, requires, version
from typing import Any

import torch
from packaging.requirements import Requirement

from mcore_dsa import __version__
from mcore_dsa.backends import Target, choose
from mcore_dsa.cli.outcome import Outcome, table
from mcore_dsa.settings import read_settings, unknown_variables

type Report = dict[str, Any]

_DISTRIBUTION = "mcore-dsa"
# What each extra is for, in the order in which a user meets them.
_PURPOSES = {
    "megatron": "the modules in a Megatron model",
    "train": "the training job",
    "tokenizer": "training on the ids of a tokenizer.json",
    "wandb": "logging to Weights & Biases",
    "te": "Transformer Engine's norms and linear layers; the local ones stand in",
    "triton": "kernels on GPUs; torch operations stand in",
    "hf": "Hugging Face checkpoints, records of selections",
    "plot": "pictures of plan and report",
}
# GLM-5.3-Flash's.
_HEADS, _DIM, _CHANNELS = 32, 128, 512


def doctor() -> Outcome:
    """Versions, devices, settings and faults; a library that is not there is no fault, one that does not fit is."""
    libraries = list(_libraries())
    settings = read_settings()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    runs, fault = _runs(device)
    faults = [
        f"{library['name']} is {library['version']}; accepted is {library['accepted']}"
        for library in libraries
        if library["supported"] is False
    ]
    report: Report = {
        "ok": True,
        "mcore_dsa": __version__,
        "python": platform.python_version(),
        "system": f"{platform.system()} {platform.machine()}",
        "device": _device(),
        "runs": runs,
        "settings": [
            {
                "name": setting.name,
                "value": setting.value,
                "shown": setting.shown,
                "raw": setting.raw,
                "reason": setting.reason,
            }
            for setting in settings
        ],
        "unknown_variables": unknown_variables(),
        "libraries": libraries,
        "missing": _missing(libraries),
        "faults": [*faults, *settings.faults, *fault],
    }
    report["ok"] = not report["faults"]
    return Outcome(report, lambda: _text(report), ok=report["ok"])


def _libraries() -> Iterator[Report]:
    """What the package's metadata asks for, always or by an extra, and what is installed of it."""
    try:
        asked = [Requirement(line) for line in requires(_DISTRIBUTION) or ()]
    except PackageNotFoundError:
        # Found on a path and not installed: nothing says which versions it takes.
        asked = [Requirement("torch")]
    for extra in ("", *_PURPOSES):
        for requirement in asked:
            wanted = requirement.marker is None or requirement.marker.evaluate({"extra": extra})
            belongs = wanted and (requirement.marker is None) == (extra == "")
            if belongs and requirement.name != _DISTRIBUTION:
                yield _library(requirement, extra)


def _library(requirement: Requirement, extra: str) -> Report:
    try:
        found: str | None = version(requirement.name)
    except PackageNotFoundError:
        found = None
    fits = None if found is None else requirement.specifier.contains(found, prereleases=True)
    return {
        "name": requirement.name,
        "version": found,
        "accepted": str(requirement.specifier) or "any",
        "extra": extra,
        "supported": fits,
    }


def _missing(libraries: list[Report]) -> list[Report]:
    """Extras of which something is not installed, each with what it is for and how it comes."""
    missing = []
    for extra, purpose in _PURPOSES.items():
        names = [library["name"] for library in libraries if library["extra"] == extra and not library["version"]]
        if names:
            brings = f"pip install '{_DISTRIBUTION}[{extra}]'"
            missing.append({"for": purpose, "extra": extra, "libraries": names, "brings": brings})
    return missing


def _device() -> Report:
    found = torch.cuda.is_available()
    devices = [torch.cuda.get_device_properties(index) for index in range(torch.cuda.device_count() if found else 0)]
    nccl = found and torch.distributed.is_nccl_available()
    return {
        "cuda_of_torch": torch.version.cuda,
        "devices": [
            {"name": each.name, "capability": f"{each.major}.{each.minor}", "memory_bytes": each.total_memory}
            for each in devices
        ],
        "nccl": ".".join(map(str, torch.cuda.nccl.version())) if nccl else None,
        "gloo": torch.distributed.is_gloo_available(),
        "threads": torch.get_num_threads(),
    }


def _runs(device: torch.device) -> tuple[Report, list[str]]:
    """What would compute and exchange here for GLM-5.3-Flash in BF16; a fault where the kernels asked for cannot run,
    or the device cannot keep the selection contract.
    """
    settings = read_settings()
    target = Target.of(device, torch.bfloat16, heads=_HEADS, dim=_DIM, channels=_CHANNELS)
    choice = choose(settings.kernels.value, target)
    runs: Report = {
        "device": device.type,
        "kernels": choice.backend.name,
        "why": "; ".join(filter(None, (settings.kernels.reason, choice.reason))),
        "collectives": "nccl" if device.type == "cuda" else "gloo",
        "bits": None,
    }
    if choice.fault:
        return runs, [choice.fault]
    try:
        runs["bits"] = choice.backend.fingerprint(device, _HEADS, _DIM)
    except RuntimeError as error:
        return runs, [f"the selection contract is not kept on {device.type}: {error}"]
    return runs, []


def _text(report: Report) -> str:
    runs, device = report["runs"], report["device"]
    devices = [
        f"{each['name']} of capability {each['capability']} and {each['memory_bytes'] / 2**30:.0f} GiB"
        for each in device["devices"]
    ]
    lines = [
        f"mcore_dsa {report['mcore_dsa']}, Python {report['python']}, {report['system']}",
        f"device: {', '.join(devices) or 'no CUDA device'}; torch is built for CUDA {device['cuda_of_torch'] or '-'}, "
        f"NCCL {device['nccl'] or '-'}; {device['threads']} threads",
        f"runs: {runs['kernels']} kernels on {runs['device']} ({runs['why']}), collectives over {runs['collectives']}",
        f"bits: {runs['bits'] or '-'}",
    ]
    settings = [(setting["name"], setting["shown"], setting["reason"]) for setting in report["settings"]]
    libraries = [
        (
            library["name"],
            library["version"],
            library["accepted"],
            {True: "yes", False: "NO", None: "-"}[library["supported"]],
            library["extra"] or "always",
        )
        for library in report["libraries"]
    ]
    missing = [(entry["for"], ", ".join(entry["libraries"]), entry["brings"]) for entry in report["missing"]]
    blocks = [
        "\n".join(lines),
        table(("setting", "value", "why"), settings, text_columns=3),
        table(("library", "installed", "accepted", "fits", "extra"), libraries, text_columns=5),
    ]
    if unknown := report["unknown_variables"]:
        blocks.append(f"set, and no settings: {', '.join(unknown)}")
    if missing:
        blocks.append(table(("missing for", "library", "brought by"), missing, text_columns=3))
    blocks.append("\n".join(f"fault: {fault}" for fault in report["faults"]) or "no faults")
    return "\n\n".join(blocks)
