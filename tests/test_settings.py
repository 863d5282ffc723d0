import os
import subprocess
import sys

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from mcore_dsa.settings import (
    ATTEND_BYTES_VARIABLE,
    DRIFT_VARIABLE,
    KERNELS_VARIABLE,
    OVERLAP_VARIABLE,
    PARTITION_VARIABLE,
    SCORE_BYTES_VARIABLE,
    VERIFY_VARIABLE,
    bytes_text,
    read_settings,
    unknown_variables,
)

OFF = ["", " ", "0", "false", "FALSE", "off", " Off\n"]
CONTIGUOUS = ["1", "true", "True", "on", "ON", "contiguous", "\tContiguous "]
NAMED = {"zigzag": "zigzag", " ZigZag": "zigzag", "balanced": "balanced"}
UNKNOWN = ["zig-zag", "striped", "2", "yes", "no", "none", "contiguous,", "1 1", "-1", "01"]
BYTES = {
    "1": 1,
    "67108864": 2**26,
    "64B": 64,
    "3KiB": 3 * 2**10,
    "64MiB": 64 * 2**20,
    " 64 mib ": 64 * 2**20,
    "1GiB": 2**30,
    "007": 7,
    str(2**63 - 1): 2**63 - 1,
}
NOT_BYTES = ["0", "0MiB", "-1", "+1", "1.5GiB", "1e9", "64KB", "64MB", "64M", "MiB", "1 2", "1_000", "0x10", "٣"]
TOO_MANY_BYTES = [str(2**63), "8589934592GiB", "9" * 10_000]


@given(st.integers(1, 2**63 - 1) | st.integers(1, 2**33 - 1).map(lambda units: units << 30))
def test_a_size_is_shown_as_it_is_read(size: int) -> None:
    settings = read_settings({SCORE_BYTES_VARIABLE: bytes_text(size), OVERLAP_VARIABLE: "0"})
    assert settings.score_bytes.value == size
    assert settings.score_bytes.shown == bytes_text(size)
    shown = f"{SCORE_BYTES_VARIABLE} {bytes_text(size)} (set to {bytes_text(size)!r})"
    assert shown in map(str, settings)
    assert f"{OVERLAP_VARIABLE} off (set to '0')" in map(str, settings)
    assert f"{KERNELS_VARIABLE} auto (default)" in map(str, settings)


def test_a_variable_that_is_none_of_ours_is_found_by_its_name() -> None:
    known = dict.fromkeys(read_settings({}).describe(), "1")
    assert unknown_variables(known | {"PATH": "x", "NOT_MCORE_DSA_DRIFT": "1"}) == []
    assert unknown_variables(known | {"SKYRL_DSA_SHARD": "1", "MCORE_DSA_DRIFT": ""}) == [
        "MCORE_DSA_DRIFT",
        "SKYRL_DSA_SHARD",
    ]


def test_a_setting_is_shown_by_the_word_that_turns_it_off() -> None:
    assert [read_settings({VERIFY_VARIABLE: word}).verify.shown for word in ("", "off", "0", "on")] == [
        "off",
        "off",
        "off",
        "16",
    ]


def test_nothing_set_means_off_and_the_default_budgets() -> None:
    settings = read_settings({})
    assert settings.partition.value == "off"
    assert settings.partition.raw is None
    assert settings.partition.reason == "default, SKYRL_DSA_INDEXER_TP_SHARD is unset"
    assert settings.score_bytes.value == settings.attend_bytes.value == 268_435_456
    assert settings.faults == ()
    settings.raise_faults()


@given(st.integers(0, 2**41))
def test_default_budgets_follow_the_memory_of_a_device(device_bytes: int) -> None:
    """A power of two between a 32nd and a 16th of it, and never below 256 MiB; what is set stands."""
    settings = read_settings({ATTEND_BYTES_VARIABLE: "64MiB"}, device_bytes=device_bytes)
    budget = settings.score_bytes.value
    assert settings.attend_bytes.value == 2**26
    assert budget == 2**28 or device_bytes / 32 < budget <= device_bytes / 16
    assert budget >= 2**28
    assert budget.bit_count() == 1


def test_the_budget_of_a_known_device() -> None:
    """An H200's 139.8 GiB, an H100's 79.2 GiB."""
    for mib, gib in ((143_156, 8), (81_100, 4)):
        assert read_settings({}, device_bytes=mib << 20).attend_bytes.value == gib << 30


@pytest.mark.parametrize("raw", OFF)
def test_partition_off(raw: str) -> None:
    settings = read_settings({PARTITION_VARIABLE: raw})
    assert settings.partition.value == "off"
    assert settings.partition.raw == raw
    assert settings.faults == ()


@pytest.mark.parametrize("raw", CONTIGUOUS)
def test_partition_contiguous(raw: str) -> None:
    settings = read_settings({PARTITION_VARIABLE: raw})
    assert settings.partition.value == "contiguous"
    assert settings.partition.reason == f"SKYRL_DSA_INDEXER_TP_SHARD={raw!r}"
    assert settings.faults == ()


@pytest.mark.parametrize("raw", UNKNOWN)
def test_unknown_partition_is_kept_as_a_fault(raw: str) -> None:
    settings = read_settings({PARTITION_VARIABLE: raw})
    assert settings.partition.value == "off"
    (fault,) = settings.faults
    assert f"SKYRL_DSA_INDEXER_TP_SHARD is {raw!r}; accepted are unset" in fault
    assert "0, false or off; 1, true or on; contiguous" in fault
    assert settings.partition.raw == raw
    assert "refused" in settings.partition.reason


@pytest.mark.parametrize("raw", BYTES)
def test_byte_sizes(raw: str) -> None:
    settings = read_settings({SCORE_BYTES_VARIABLE: raw})
    assert settings.score_bytes.value == BYTES[raw]
    assert settings.attend_bytes.value == 268_435_456
    assert settings.faults == ()
    assert read_settings({ATTEND_BYTES_VARIABLE: raw}).attend_bytes.value == BYTES[raw]


@pytest.mark.parametrize("raw", NOT_BYTES + TOO_MANY_BYTES)
def test_bad_byte_size_is_kept_as_a_fault(raw: str) -> None:
    settings = read_settings({ATTEND_BYTES_VARIABLE: raw})
    assert settings.attend_bytes.value == 268_435_456
    (fault,) = settings.faults
    assert f"MCORE_DSA_ATTEND_BYTES is {raw!r}; accepted are positive" in fault
    assert "B, KiB, MiB or GiB" in fault


@pytest.mark.parametrize(("raw", "partition"), NAMED.items())
def test_partition_by_name(raw: str, partition: str) -> None:
    settings = read_settings({PARTITION_VARIABLE: raw})
    assert settings.partition.value == partition
    assert settings.faults == ()


def test_overlap_is_a_switch() -> None:
    assert read_settings({}).overlap.value is True
    assert read_settings({OVERLAP_VARIABLE: "0"}).overlap.value is False
    (fault,) = read_settings({OVERLAP_VARIABLE: "yes"}).faults
    assert "MCORE_DSA_OVERLAP is 'yes'; accepted are 1 and 0" in fault


def test_kernels_are_named() -> None:
    assert read_settings({}).kernels.value == "auto"
    assert read_settings({KERNELS_VARIABLE: " Torch "}).kernels.value == "torch"
    assert read_settings({KERNELS_VARIABLE: "TRITON"}).kernels.value == "triton"
    (fault,) = read_settings({KERNELS_VARIABLE: "cuda"}).faults
    assert fault == "MCORE_DSA_KERNELS is 'cuda'; accepted are auto, torch and triton"


@pytest.mark.parametrize(
    ("variable", "raw", "value"),
    [
        (DRIFT_VARIABLE, " 1 ", 1),
        (DRIFT_VARIABLE, "0", 0),
        (DRIFT_VARIABLE, str(2**31 - 1), 2**31 - 1),
        (VERIFY_VARIABLE, "Off", 0),
        (VERIFY_VARIABLE, "on", 16),
        (VERIFY_VARIABLE, "1", 1),
        (VERIFY_VARIABLE, "512", 512),
    ],
)
def test_counts(variable: str, raw: str, value: int) -> None:
    settings = read_settings({variable: raw})
    assert settings.faults == ()
    assert (settings.drift_every if variable == DRIFT_VARIABLE else settings.verify).value == value


@pytest.mark.parametrize("raw", ["-1", "1.5", "yes", "1e3", str(2**31), "9" * 30, "٣"])
def test_what_is_no_count_is_kept_as_a_fault(raw: str) -> None:
    settings = read_settings({DRIFT_VARIABLE: raw, VERIFY_VARIABLE: raw})
    assert (settings.drift_every.value, settings.verify.value) == (100, 0)
    drift, verify = settings.faults
    assert drift == f"MCORE_DSA_DRIFT_EVERY is {raw!r}; accepted are whole numbers below 2**31, 0 for never"
    assert verify == f"MCORE_DSA_VERIFY is {raw!r}; accepted are off, on, and whole numbers of rows below 2**31"


def test_every_fault_is_raised_at_once() -> None:
    settings = read_settings({PARTITION_VARIABLE: "striped", SCORE_BYTES_VARIABLE: "0", ATTEND_BYTES_VARIABLE: "64KB"})
    assert len(settings.faults) == 3
    with pytest.raises(ValueError, match=r"INDEXER_TP_SHARD is 'striped'.*SCORE_BYTES is '0'.*ATTEND_BYTES is '64KB'"):
        settings.raise_faults()


@given(st.text(), st.text())
@example("striped", "zigzag")
def test_no_value_raises_while_reading(partition: str, size: str) -> None:
    settings = read_settings({PARTITION_VARIABLE: partition, SCORE_BYTES_VARIABLE: size})
    assert settings.partition.value in ("off", "contiguous", "zigzag", "balanced")
    assert 0 < settings.score_bytes.value < 2**63
    if not settings.faults:
        settings.raise_faults()
        return
    with pytest.raises(ValueError, match="accepted are"):
        settings.raise_faults()


def test_description_is_equal_for_two_spellings_and_different_for_two_values() -> None:
    environments: list[list[dict[str, str]]] = [
        [{}, *({PARTITION_VARIABLE: raw} for raw in OFF), {SCORE_BYTES_VARIABLE: "256MiB"}],
        [{PARTITION_VARIABLE: raw} for raw in CONTIGUOUS],
        [{SCORE_BYTES_VARIABLE: raw} for raw in ("1GiB", "1024MiB", "1073741824")],
        [{ATTEND_BYTES_VARIABLE: "1GiB"}],
        *([{PARTITION_VARIABLE: raw}] for raw in ("zigzag", "balanced")),
        [{OVERLAP_VARIABLE: "0"}],
        [{KERNELS_VARIABLE: "torch"}],
        *([{PARTITION_VARIABLE: raw}] for raw in UNKNOWN),
        *([{SCORE_BYTES_VARIABLE: raw}] for raw in NOT_BYTES),
    ]
    described = [[read_settings(environ).describe() for environ in group] for group in environments]
    for number, group in enumerate(described):
        assert all(description == group[0] for description in group)
        assert all(group[0] != other[0] for other in described[:number])


def test_description_is_plain_text() -> None:
    assert read_settings(
        {PARTITION_VARIABLE: "1", SCORE_BYTES_VARIABLE: "1MiB", ATTEND_BYTES_VARIABLE: "-1"}
    ).describe() == {
        "SKYRL_DSA_INDEXER_TP_SHARD": "contiguous",
        "MCORE_DSA_SCORE_BYTES": "1048576",
        "MCORE_DSA_ATTEND_BYTES": "'-1'; accepted are positive whole numbers of bytes below 2**63, as 67108864, or "
        "with a unit: B, KiB, MiB or GiB",
        "MCORE_DSA_ATTEND_SHARD": "heads",
        "MCORE_DSA_OVERLAP": "True",
        "MCORE_DSA_KERNELS": "auto",
        "MCORE_DSA_RECOMPUTE_STORE": "True",
        "MCORE_DSA_RECOMPUTE_STORE_BYTES": "8589934592",
        "MCORE_DSA_DRIFT_EVERY": "100",
        "MCORE_DSA_VERIFY": "0",
    }
    assert read_settings({}).describe()["SKYRL_DSA_INDEXER_TP_SHARD"] == "off"


def test_the_process_environment_is_the_default(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(PARTITION_VARIABLE, "on")
    monkeypatch.setenv(SCORE_BYTES_VARIABLE, "1KiB")
    monkeypatch.delenv(ATTEND_BYTES_VARIABLE, raising=False)
    settings = read_settings()
    assert settings.partition.value == "contiguous"
    assert settings.score_bytes.value == 1024
    assert settings.attend_bytes.raw is None


def test_nothing_is_read_at_import() -> None:
    program = (
        "import os, mcore_dsa.settings as s; os.environ[s.PARTITION_VARIABLE] = '1'; "
        "print(s.read_settings().partition.value)"
    )
    environ = os.environ | {PARTITION_VARIABLE: "0"}
    done = subprocess.run([sys.executable, "-c", program], env=environ, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "contiguous"
