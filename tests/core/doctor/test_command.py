"""The command as a process, in a good set-up and in broken ones."""

import io
import json
import os
import socket
import subprocess
import sys
from contextlib import ExitStack
from importlib.util import find_spec

import pytest

pytest.importorskip("typer")
pytest.importorskip("rich")

from rich.console import Console
from typer.testing import CliRunner

from lbbsp_core.cli.app import application
from lbbsp_core.cli.doctor import _print
from lbbsp_core.doctor.finding import note, ok, problem
from lbbsp_core.launch.cluster import free_ports

pytestmark = pytest.mark.slow

COMMAND = [sys.executable, "-c", "from lbbsp_core.cli import main; main()", "doctor"]
FRAMEWORKS = [name for name in ("tensorflow", "mxnet") if find_spec(name)]
OURS = ("TF_CONFIG", "DMLC_", "SLURM_", "LBBSP_", "TF_USE_LEGACY_KERAS", "KERAS_BACKEND")


def run(folder, *options, **variables):
    """Runs the command in an environment of its own; returns status, output and findings."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith(OURS)}
    done = subprocess.run(
        [*COMMAND, *options, "--json", str(folder / "doctor.json")],
        env={**kept, "COLUMNS": "120", **variables},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=200,
    )
    found = {"ok": [], "note": [], "problem": []}
    topics = json.loads((folder / "doctor.json").read_text())["topics"]
    for finding in (each for findings in topics.values() for each in findings):
        found[finding["status"]].append(finding)
    return done.returncode, done.stdout, found


def config(addresses, index=0):
    task = {"type": "worker", "index": index}
    return json.dumps({"cluster": {"worker": list(addresses)}, "task": task})


def local(*ports):
    return [f"127.0.0.1:{port}" for port in ports]


def busy_port(stack):
    return stack.enter_context(socket.create_server(("", 0))).getsockname()[1]


@pytest.fixture(scope="module")
def good(tmp_path_factory):
    """The command with all frameworks that are installed, and an address of its own."""
    if not FRAMEWORKS:
        pytest.skip("no framework is installed")
    folder = tmp_path_factory.mktemp("good")
    step = {"SLURM_JOB_ID": "9", "SLURM_PROCID": "2", "SLURM_STEP_NUM_TASKS": "3",
            "SLURM_STEP_NODELIST": "n[9-10]", "SLURM_STEP_TASKS_PER_NODE": "2,1",
            "SLURMD_NODENAME": "n10"}  # fmt: skip
    return run(folder, TF_CONFIG=config(local(*free_ports(2))), **step)


def test_a_good_set_up_has_no_problem(good):
    status, output, found = good
    assert found["problem"] == []
    assert status == 0, output
    assert f"problems: 0, notes: {len(found['note'])}" in output
    assert "patch: " not in output


def test_each_patch_of_keras_is_needed_and_in_place(good):
    if "tensorflow" not in FRAMEWORKS:
        pytest.skip("TensorFlow is not installed")
    _, _, found = good
    patches = [each for each in found["ok"] if each["check"].startswith("patch: ")]
    assert len(patches) >= 17
    assert {each["message"].split(":")[0] for each in patches} >= {"needed, and in place"}


def test_the_cluster_of_slurm_is_compared_with_the_node(good):
    if "tensorflow" not in FRAMEWORKS:
        pytest.skip("TensorFlow is not installed")
    _, _, found = good
    slurm = [
        each for each in (*found["ok"], *found["note"]) if each["check"] == "SlurmClusterResolver"
    ]
    # Task 2 runs on n10, but names are sorted as texts: n10, n9.
    assert "this is worker 2 of worker n10:8888, n9:8888, n9:8889" in slurm[0]["message"]
    assert "gives this task the address n9:8889, but it runs on n10" in slurm[1]["message"]
    assert "srun lbbsp launch" in slurm[1]["remedy"]


def test_names_of_numpy_are_restored_for_mxnet(good):
    if "mxnet" not in FRAMEWORKS:
        pytest.skip("MXNet is not installed")
    _, _, found = good
    messages = [each["message"] for each in found["ok"] if "names of NumPy" in each["check"]]
    assert len(messages) == 1
    assert "bool" in messages[0]


BROKEN = {
    "TF_CONFIG is no JSON": (
        lambda _: {"TF_CONFIG": '{"cluster": '},
        "is not JSON", "it must look like",
    ),
    "address of another host": (
        lambda _: {"TF_CONFIG": config(["192.0.2.7:2222", "127.0.0.2:2223"])},
        "192.0.2.7 is not an address of this machine", "correct the task's index",
    ),
    "port in use": (
        lambda stack: {"TF_CONFIG": config(local(busy_port(stack), *free_ports(1)))},
        f"is used by process {os.getpid()}", "ss -ltnp",
    ),
    "Keras 2, and a variable of MXNet is missing": (
        lambda _: {"TF_USE_LEGACY_KERAS": "1", "DMLC_ROLE": "worker"},
        "DMLC_NUM_WORKER must be set together with DMLC_ROLE", "set DMLC_ROLE (worker",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", BROKEN)
def test_a_broken_set_up_has_its_reason_and_its_remedy(tmp_path, name):
    variables, message, remedy = BROKEN[name]
    with ExitStack() as stack:
        status, output, found = run(tmp_path, "--framework", "none", **variables(stack))
    assert status == 1, output
    [finding] = [each for each in found["problem"] if message in each["message"]]
    assert remedy in finding["remedy"]
    assert output.startswith(f"problems: {len(found['problem'])}")
    assert f"  Remedy: {finding['remedy']}" in output.splitlines()


@pytest.mark.parametrize("terminal", [True, False])
@pytest.mark.parametrize("width", [30, 60, 120])
def test_findings_are_first_and_a_remedy_can_be_pasted_at_any_width(width, terminal):
    remedy = "export MALLOC_MMAP_MAX_=0 MALLOC_TRIM_THRESHOLD_=1099511627776 [x] " + "y" * 200
    diagnosis = {
        "TensorFlow": [ok("import", "all"), *(ok(f"patch: {k}", "in place") for k in range(17))],
        "MXNet": [ok("patch: a", "in place"), problem("patch: b", "gone", "see `nvidia-smi`")],
        "machine": [note("allocator", "clears " * 20, remedy), note("driver", "is old")],
    }
    out = Console(file=io.StringIO(), width=width, force_terminal=terminal, color_system=None)
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


def test_wrong_usage_has_status_2(tmp_path):
    for options in (["--framework", "torch"], ["--json", str(tmp_path)]):
        result = CliRunner().invoke(application(), ["doctor", *options])
        assert result.exit_code == 2, options
        assert options[0].strip("-") in result.stderr
