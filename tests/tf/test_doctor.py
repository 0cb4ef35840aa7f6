"""What `lbbsp doctor` says of GPUs, with an invented TensorFlow and driver."""

from types import SimpleNamespace

import pytest

from lbbsp_core.doctor.finding import ok
from lbbsp_tf import doctor

WHEEL = ["sm_60", "sm_70", "sm_80", "sm_89", "compute_90"]
"""Capabilities of the wheels of TensorFlow 2.20."""


@pytest.mark.parametrize(
    ("capability", "built", "status"),
    [
        ((8, 6), WHEEL, "ok"),  # code of 8.0
        ((9, 0), WHEEL, "ok"),  # "compute" contains the code, too
        ((10, 0), WHEEL, "note"),
        ((12, 0), WHEEL, "problem"),
        ((12, 1), [*WHEEL, "sm_120"], "ok"),
        ((12, 0), ["7.5", "12.0"], "ok"),
        ((5, 2), WHEEL, "problem"),
        ((8, 0), ["sm_86", "compute_90"], "problem"),
        ((8, 6), ["compute_70", "sm_90"], "note"),
        ((9, 0), ["sm_80"], "problem"),  # without PTX
        ((9, 0), ["sm_90a"], "ok"),
        ((10, 3), ["sm_100a", "compute_100a"], "problem"),  # for that GPU alone
        ((10, 3), ["sm_100f"], "ok"),
    ],
)
def test_a_gpu_needs_code_of_its_major_version_or_ptx_of_an_earlier_one(capability, built, status):
    found = doctor.check_capability("RTX", capability, built)
    assert (found.check, found.status) == ("GPU: RTX", status)
    version = ".".join(map(str, capability))
    assert f"compute capability {version}, " in found.message
    if status != "ok":
        assert f"only {', '.join(built)}" in found.message
        assert f"use a TensorFlow that is built for {version} (as in NVIDIA's" in found.remedy
    assert ("half an hour" in found.message) == (status == "note")


def test_ptx_that_fails_is_said_to_fail():
    assert "whose PTX fails" in doctor.check_capability("RTX", (12, 0), WHEEL).message
    assert "PTX" not in doctor.check_capability("RTX", (5, 2), WHEEL).message


@pytest.fixture
def machine(monkeypatch):
    """Returns a function that returns the findings for invented GPUs."""
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)

    def devices(*details, by_driver=0, **build):
        monkeypatch.setattr(doctor, "count_gpus", lambda: by_driver)
        monkeypatch.setattr(doctor, "tf", SimpleNamespace(
            config=SimpleNamespace(
                list_physical_devices={"GPU": range(len(details))}.get,
                experimental=SimpleNamespace(get_device_details=details.__getitem__),
            ),
            sysconfig=SimpleNamespace(get_build_info=lambda: build),
        ))  # fmt: skip
        return doctor._devices()

    return devices


def test_each_model_of_the_gpus_of_nvidia_is_compared_with_the_build(machine):
    old, new = ({"device_name": f"X{major}", "compute_capability": (major, 0)} for major in (8, 12))
    count, *models = machine(old, new, new, by_driver=3, cuda_compute_capabilities=WHEEL)
    assert count == ok("devices of TensorFlow", "3 GPUs")
    statuses = {found.check: found.status for found in models}
    assert statuses == {"GPU: X8": "ok", "GPU: X12": "problem"}
    assert len(machine({"device_name": "MI300"}, is_rocm_build=True)) == 1
    assert len(machine({}, cuda_compute_capabilities=WHEEL)) == 1


@pytest.mark.parametrize(
    ("is_cuda_build", "message", "remedy"),
    [(False, "is built without CUDA", "pip uninstall tensorflow-cpu, and then pip install"),
     (True, "it cannot load CUDA's libraries", "see what `python -c 'import lbbsp_tf'`")],
)  # fmt: skip
def test_gpus_that_only_the_driver_sees_are_noted(
    machine, monkeypatch, is_cuda_build, message, remedy
):
    [found] = machine(by_driver=2, is_cuda_build=is_cuda_build)
    assert found.status == "note"
    assert "no GPU, but the driver has 2: it trains on the CPU, because" in found.message
    assert message in found.message
    assert found.remedy.startswith(remedy)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "-1")
    assert machine(by_driver=2) == machine() == [
        ok("devices of TensorFlow", "no GPU: it trains on the CPU")
    ]  # fmt: skip
