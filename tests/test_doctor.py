"""`mcore-dsa doctor`: what it says of this installation, and what it finds wrong with another."""

import importlib.metadata
import json
from typing import Any

import pytest
import torch
from command_line import command

from mcore_dsa.backends.torch import TorchBackend
from mcore_dsa.cli import doctor
from mcore_dsa.settings import KERNELS_VARIABLE, PARTITION_VARIABLE, SCORE_BYTES_VARIABLE, read_settings


def told(*words: str) -> tuple[int, dict[str, Any]]:
    status, out, err = command("doctor", "--json", *words)
    assert (err, out.count("\n")) == ("", 1)
    return status, json.loads(out)


def test_it_says_what_runs_here(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(PARTITION_VARIABLE, "zigzag")
    monkeypatch.setenv(SCORE_BYTES_VARIABLE, "64 MiB")
    monkeypatch.setenv("MCORE_DSA_" + "DRIFT", "1")
    status, report = told()
    assert (status, report["ok"], report["faults"]) == (0, True, [])
    assert [setting["name"] for setting in report["settings"]] == [setting.name for setting in read_settings()]
    read = {setting["name"]: (setting["value"], setting["shown"]) for setting in report["settings"]}
    assert read[PARTITION_VARIABLE] == ("zigzag", "zigzag")
    assert read[SCORE_BYTES_VARIABLE] == (64 << 20, "64MiB")
    versions = {library["name"]: library["version"] for library in report["libraries"]}
    assert versions["torch"] == importlib.metadata.version("torch")
    assert versions["megatron-core"] == importlib.metadata.version("megatron-core")
    assert (report["runs"]["device"] == "cuda") == torch.cuda.is_available()
    status, out, _ = command("doctor")
    assert status == 0
    for said in (
        f"{PARTITION_VARIABLE}='zigzag'",
        "64MiB",
        versions["torch"],
        "no faults",
        "set, and no settings: MCORE_DSA_DRIFT",
    ):
        assert said in out


def test_what_is_not_installed_is_told_and_no_fault(monkeypatch: pytest.MonkeyPatch) -> None:
    found = importlib.metadata.version

    def version(name: str) -> str:
        if name in ("matplotlib", "transformers"):
            raise importlib.metadata.PackageNotFoundError(name)
        return found(name)

    monkeypatch.setattr(doctor, "version", version)
    status, report = told()
    assert status == 0
    missing = {entry["extra"]: (entry["libraries"], entry["brings"]) for entry in report["missing"]}
    assert missing["plot"] == (["matplotlib"], "pip install 'mcore-dsa[plot]'")
    assert missing["hf"][0] == ["transformers"]
    assert "pictures of plan and report" in command("doctor")[1]


def test_versions_settings_and_devices_that_cannot_be_used_are_faults(monkeypatch: pytest.MonkeyPatch) -> None:
    found = importlib.metadata.version
    monkeypatch.setattr(doctor, "version", lambda name: "0.99.0" if name == "megatron-core" else found(name))
    monkeypatch.setenv(KERNELS_VARIABLE, "fast")

    def broken(*_: object) -> str:
        raise RuntimeError("a place in the tile matters")

    monkeypatch.setattr(TorchBackend, "fingerprint", staticmethod(broken))
    status, report = told()
    assert status == 1
    version, setting, contract = report["faults"]
    assert version.startswith("megatron-core is 0.99.0; accepted is ")
    assert setting.startswith(f"{KERNELS_VARIABLE} is 'fast'; accepted are ")
    assert contract.endswith("a place in the tile matters")
    assert f"fault: {version}" in command("doctor")[1]
