"""The command in a good set-up, with the frameworks that are installed, and in broken ones."""

import io
import json
import os
import socket
from functools import partial
from importlib.util import find_spec

import pytest

pytest.importorskip("typer")
pytest.importorskip("rich")

from rich.console import Console
from typer.testing import CliRunner
from waits import HANG_SECONDS

from lbbsp_core import doctor
from lbbsp_core.cli.app import application
from lbbsp_core.cli.doctor import _print
from lbbsp_core.doctor import addresses
from lbbsp_core.doctor.finding import note, ok, problem

FRAMEWORKS = [name for name in ("tensorflow", "mxnet") if find_spec(name)]
OURS = ("TF_CONFIG", "DMLC_", "SLURM_", "LBBSP_", "TF_USE_LEGACY_KERAS", "KERAS_BACKEND")


def run(folder, *options, **variables):
    """Runs the command on a machine without a CPU quota; returns status, output and findings."""
    with pytest.MonkeyPatch.context() as patch:
        for name in filter(lambda name: name.startswith(OURS), list(os.environ)):
            patch.delenv(name)
        for name, value in {"COLUMNS": "120", **variables}.items():
            patch.setenv(name, value)
        patch.setattr("lbbsp_core.doctor.machine.cpu_quotas", lambda host: [])
        unhurried = partial(doctor.check_framework, seconds=HANG_SECONDS)
        patch.setattr(doctor, "check_framework", unhurried)
        patch.setattr(addresses.resolve, "__defaults__", (HANG_SECONDS,))
        command = ["doctor", *options, "--json", str(folder / "doctor.json")]
        done = CliRunner().invoke(application(), command)
    found = {"ok": [], "note": [], "problem": []}
    topics = json.loads((folder / "doctor.json").read_text())["topics"]
    for finding in (each for findings in topics.values() for each in findings):
        found[finding["status"]].append(finding)
    return done.exit_code, done.output, found


def config(addresses, index=0):
    task = {"type": "worker", "index": index}
    return json.dumps({"cluster": {"worker": list(addresses)}, "task": task})


def local(*ports):
    return [f"127.0.0.1:{port}" for port in ports]


@pytest.mark.slow
@pytest.mark.skipif(not FRAMEWORKS, reason="no framework is installed")
def test_a_good_set_up_has_no_problem(tmp_path, monkeypatch):
    # A port that is free now may be another job's when the frameworks have been imported.
    monkeypatch.setattr("lbbsp_core.doctor.addresses.bind_error", lambda number, port: 0)
    step = {"SLURM_JOB_ID": "9", "SLURM_PROCID": "2", "SLURM_STEP_NUM_TASKS": "3",
            "SLURM_STEP_NODELIST": "n[9-10]", "SLURM_STEP_TASKS_PER_NODE": "2,1",
            "SLURMD_NODENAME": "n10"}  # fmt: skip
    status, output, found = run(tmp_path, TF_CONFIG=config(local(20_001, 20_002)), **step)
    assert found["problem"] == []
    assert status == 0, output
    assert f"problems: 0, notes: {len(found['note'])}" in output
    assert "patch: " not in output
    right = {each["check"]: each["message"] for each in found["ok"]}
    assert right["CPU"].endswith(" cores")
    if "tensorflow" in FRAMEWORKS:
        patches = [text for check, text in right.items() if check.startswith("patch: ")]
        assert len(patches) >= 17
        assert {text.split(":")[0] for text in patches} >= {"needed, and in place"}
        # Task 2 runs on n10, but names are sorted as texts: n10, n9.
        cluster = "this is worker 2 of worker n10:8888, n9:8888, n9:8889"
        assert cluster in right["SlurmClusterResolver"]
        [noted] = [each for each in found["note"] if each["check"] == "SlurmClusterResolver"]
        assert "gives this task the address n9:8889, but it runs on n10" in noted["message"]
        assert "srun lbbsp launch" in noted["remedy"]
    if "mxnet" in FRAMEWORKS:
        [restored] = [text for check, text in right.items() if "names of NumPy" in check]
        assert "bool" in restored


@pytest.fixture
def busy_port():
    with socket.create_server(("", 0)) as server:
        yield server.getsockname()[1]


@pytest.mark.parametrize(
    ("variables", "message", "remedy"),
    [
        ({"TF_CONFIG": '{"cluster": '}, "is not JSON", "it must look like"),
        (
            {"TF_CONFIG": config(["192.0.2.7:2222", "127.0.0.2:2223"])},
            "192.0.2.7 is not an address of this machine",
            "correct the task's index",
        ),
        ({"TF_CONFIG": config(local("BUSY", 1))}, "is used by process PID (", "ss -ltnp"),
        (
            {"TF_USE_LEGACY_KERAS": "1", "DMLC_ROLE": "worker"},
            "DMLC_NUM_WORKER must be set together with DMLC_ROLE",
            "set DMLC_ROLE (worker",
        ),
    ],
)
def test_a_broken_set_up_has_its_reason_and_its_remedy(
    tmp_path, busy_port, variables, message, remedy
):
    given = {name: value.replace("BUSY", str(busy_port)) for name, value in variables.items()}
    status, output, found = run(tmp_path, "--framework", "none", **given)
    assert status == 1, output
    message = message.replace("PID", str(os.getpid()))
    [finding] = [each for each in found["problem"] if message in each["message"]]
    assert remedy in finding["remedy"]
    assert output.startswith(f"problems: {len(found['problem'])}")
    assert f"  Remedy: {finding['remedy']}" in output.splitlines()


@pytest.mark.parametrize("width", [30, 120])
def test_findings_are_first_and_a_remedy_can_be_pasted_at_any_width(width):
    remedy = "export MALLOC_MMAP_MAX_=0 MALLOC_TRIM_THRESHOLD_=1099511627776 [x] " + "y" * 200
    diagnosis = {
        "TensorFlow": [ok("import", "all"), *(ok(f"patch: {k}", "in place") for k in range(17))],
        "MXNet": [ok("patch: a", "in place"), problem("patch: b", "gone", "see `nvidia-smi`")],
        "machine": [note("allocator", "clears " * 20, remedy), note("driver", "is old")],
    }
    out = Console(file=io.StringIO(), width=width, force_terminal=True, color_system=None)
    _print(out, diagnosis)
    lines = out.file.getvalue().splitlines()
    assert lines[0] == "problems: 1, notes: 2"
    assert f"  Remedy: {remedy}" in lines
    titles = ["problem MXNet: patch: b", "note machine: allocator", "note machine: driver"]
    assert [each for each in lines if each in titles] == titles
    text = " ".join(out.file.getvalue().split())
    assert text.index("driver") < text.index("TensorFlow")
    assert (text.count("patches"), "17 in" in text, "1 in" in text) == (2, True, True)
    assert all(len(each) <= width for each in lines if remedy not in each)
