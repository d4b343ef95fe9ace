"""The job's GPUs as metrics, told by a fake NVML at the border of the process (tests/fakes/nvml.c)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from fake_nvml import H200, FakeNvml

from tuneplane.report.hardware import nvml
from tuneplane.report.hardware.nvml import Gpus, visible_devices

A, B, MIG = "GPU-1111aaaa-0000", "GPU-2222bbbb-0000", "MIG-3333cccc-0000"


@pytest.fixture
def fake(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> FakeNvml:
    library = FakeNvml(tmp_path / "nvml")
    for name, value in library.environment.items():
        monkeypatch.setenv(name, value)
    return library


def gpu(uuid: str = A, **more: Any) -> dict[str, Any]:
    return {**H200, "uuid": uuid, **more}


def read(fake: FakeNvml, visible: str | None) -> dict[str, float]:
    return Gpus(visible_devices(visible), str(fake.library)).read()


@pytest.mark.parametrize(
    ("value", "found"),
    [
        (None, None),
        ("", []),
        ("0,1", ["0", "1"]),
        (" 3 , 1", ["3", "1"]),
        ("1,-1,0", ["1"]),
        ("NoDevFiles", []),
        (f"{A},MIG-GPU-x/1/0", [A, "MIG-GPU-x/1/0"]),
        ("0,٣", ["0"]),
        ("0;1", []),
    ],
    ids=str,
)
def test_the_visible_gpus_are_those_that_cuda_would_take(value: str | None, found: list[str] | None) -> None:
    assert visible_devices(value) == found


def test_a_gpu_tells_its_values_in_the_units_of_their_names(fake: FakeNvml) -> None:
    assert read(fake, "0") == {
        "gpu0/utilization_percent": 97,
        "gpu0/memory_used_bytes": 75_377_410_048,
        "gpu0/memory_percent": 50,
        "gpu0/power_watts": pytest.approx(612.345),
        "gpu0/temperature_celsius": 58,
    }


@pytest.mark.parametrize(
    ("visible", "watts"),
    [
        ("2", [3]),
        ("2,0", [3, 1]),
        (None, [1, 2, 3]),
        (B, [2]),
        (f"{B},{A}", [2, 1]),
        ("GPU-2222", [2]),
        ("", []),
        ("7", []),
        ("GPU-none", []),
        ("0,7,1", [1, None, 2]),
    ],
    ids=str,
)
def test_only_the_jobs_gpus_are_sampled_in_the_order_of_cuda(
    fake: FakeNvml, visible: str | None, watts: list[int | None]
) -> None:
    fake.gpus([gpu(A, power=1000), gpu(B, power=2000), gpu("GPU-3", power=3000)])
    found = {name: value for name, value in read(fake, visible).items() if name.endswith("power_watts")}
    assert found == {f"gpu{i}/power_watts": value for i, value in enumerate(watts) if value is not None}


def test_a_mig_instance_tells_what_it_can_and_a_gpu_cut_into_them_nothing_of_others(fake: FakeNvml) -> None:
    fake.gpus([gpu(A, mig=1), {"uuid": MIG, "total": 100, "used": 25}])
    assert read(fake, MIG) == {"gpu0/memory_used_bytes": 25, "gpu0/memory_percent": 25}
    assert read(fake, "0") == {}


def test_a_value_that_a_gpu_does_not_tell_is_left_out(fake: FakeNvml) -> None:
    fake.gpus([{"utilization": 5, "temperature": 40}])
    assert read(fake, "0") == {"gpu0/utilization_percent": 5, "gpu0/temperature_celsius": 40}


def test_an_older_driver_is_asked_for_memory_in_the_older_way(tmp_path: Path, fake: FakeNvml) -> None:
    old = FakeNvml(tmp_path / "old", "-DOLD")
    assert read(old, "0") == read(fake, "0")


def test_a_gpu_that_falls_off_the_bus_is_left_out_and_comes_back(fake: FakeNvml) -> None:
    fake.gpus([gpu(A), gpu(B)])
    gpus = Gpus(["0", "1"], str(fake.library))
    assert len(gpus.read()) == 10
    fake.gpus([gpu(A, error=15), gpu(B)])  # NVML_ERROR_GPU_IS_LOST
    assert {name.split("/")[0] for name in gpus.read()} == {"gpu1"}
    fake.gpus([gpu(A), gpu(B)])
    assert len(gpus.read()) == 10


def test_a_driver_that_goes_away_is_asked_again_after_a_while(
    fake: FakeNvml, monkeypatch: pytest.MonkeyPatch
) -> None:
    gpus = Gpus(None, str(fake.library))
    assert len(gpus.read()) == 5
    fake.gpus([gpu(error=999)], init=9)  # NVML_ERROR_DRIVER_NOT_LOADED
    assert gpus.read() == {}
    fake.gpus([gpu()])
    assert gpus.read() == {}, "it is left alone for a minute"
    monkeypatch.setattr(nvml, "RETRY_S", 0.0)
    other = Gpus(None, str(fake.library))
    fake.gpus([gpu()], init=9)
    assert other.read() == {}
    fake.gpus([gpu()])
    assert len(other.read()) == 5


def test_a_machine_without_nvml_or_with_another_file_of_its_name_has_no_gpus(tmp_path: Path) -> None:
    assert Gpus(None, str(tmp_path / "none.so")).read() == {}
    (tmp_path / "text.so").write_text("no library")
    assert Gpus(["0"], str(tmp_path / "text.so")).read() == {}


def test_a_library_without_the_functions_has_no_gpus() -> None:
    assert Gpus(["0"], "libc.so.6").read() == {}
