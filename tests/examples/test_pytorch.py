"""The plugin for PyTorch in examples/ is exact, in an environment with a PyTorch for CPUs.

`make campaigns` makes the environment once, in .venv-torch. It takes the build of PyTorch that pip
finds: with an index or a folder of builds for CPUs in pip's configuration one of 190 MB, and else,
on Linux, one for CUDA of some gigabytes.
"""

import json
import os
import re
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

pytestmark = pytest.mark.campaign

ROOT = Path(__file__).parents[2]
ENVIRONMENT = ROOT / ".venv-torch"
SCRIPTS, EXAMPLES = ROOT / "tests" / "examples" / "scripts", ROOT / "examples"
PACKAGES = "torch==2.13.*", "scikit-learn"
TOLERANCE = 2e-6
CASES = {
    "sgd_clipping", "buckets_prefetching", "penalty_bucket_views", "adamw_double", "load_balanced",
}  # fmt: skip


@pytest.fixture(scope="module")
def python():
    """A Python with PyTorch and this package: this one, or that of the environment."""
    if find_spec("torch"):
        return sys.executable
    ready, own = ENVIRONMENT / ".ready", ENVIRONMENT / "bin" / "python"
    if not ready.exists():
        subprocess.run([sys.executable, "-m", "venv", ENVIRONMENT], check=True)
        ours = f"{ROOT}[cli,report]"
        install = [own, "-m", "pip", "install", "--quiet", "--editable", ours, *PACKAGES]
        done = subprocess.run(install, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        if done.returncode:
            pytest.skip(f"PyTorch cannot be installed: {done.stdout[-500:]}")
        ready.touch()
    return str(own)


@pytest.fixture
def start(python):
    """Returns a function that runs a command, and returns its exit status and its output."""

    def run(*words, status=0):
        environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
        done = subprocess.run(
            [python, *map(str, words)], env=environment, stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT, text=True,
        )  # fmt: skip
        print(done.stdout)
        assert done.returncode == status
        return done.stdout

    return run


def job(workers, *words):
    return "-m", "lbbsp_core", "launch", "--framework", "torch", "-n", workers, *words


def check(said, cases=CASES):
    results = re.findall(r"RESULT (\S+) (.*)", said)
    found = {case: json.loads(text) for case, text in results}
    assert found.keys() == set(cases)
    for case, each in found.items():
        assert each["moved"] > 0.01, f"{case}, which learns nothing, would prove nothing"
        assert each["plans"] > 2, case
        assert each["difference"] <= TOLERANCE, case
    assert found.get("adamw_double", {"difference": 0})["difference"] <= 1e-12


@pytest.mark.parametrize("workers", [2, 3])
def test_uneven_changing_batches_learn_what_one_process_learns(start, workers):
    check(start(*job(workers, SCRIPTS / "torch_equivalence.py")))


def test_torchrun_starts_it_too(start):
    torchrun = "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", 2
    check(start(*torchrun, SCRIPTS / "torch_equivalence.py", "load_balanced"), ["load_balanced"])


def test_an_end_right_after_a_collective_aborts_no_worker(start):
    start(*job(2, SCRIPTS / "torch_exit.py"))


@pytest.mark.parametrize(
    ("by", "cause"),
    [
        ("SIGKILL", "worker 1 was ended by SIGKILL"),
        ("SIGTERM", "leaves after step 9, because a worker got SIGTERM"),
        ("SIGSTOP", "worker 1 has given no sign of life for 10 s"),
    ],
)
def test_a_restart_continues_at_the_same_step(start, tmp_path, by, cause):
    case = "sgd_clipping"
    asked = SCRIPTS / "torch_equivalence.py", case, "--restart", tmp_path, "--by", by
    said = start(*job(2, "--max-restarts", 1, *asked))
    assert cause in said
    step = 9 if by == "SIGTERM" else 6
    assert f"continues after step {step} from {tmp_path}" in said
    check(said, [case])


def test_what_would_be_silently_wrong_is_refused(start):
    said = start(SCRIPTS / "torch_misuse.py")
    found = dict(re.findall(r"^(\w+): (.*)", said, re.MULTILINE))
    expected = {
        "without_ddp": "TypeError: model must be a DistributedDataParallel, got Linear: wrap it",
        "synchronized": "ValueError: SyncBatchNorm mixes the losses of the workers",
        "twice": "ValueError: backward was called without a batch .*, or twice for one: call it",
        "skipped": "ValueError: no gradients were summed for the batch of step 2: call backward",
        "accumulated": "ValueError: no gradients were summed for the batch of step 0: .* no_sync",
        "own_batch": "ValueError: backward was called without a batch of balancer.loader",
        "outside": "ValueError: iterate over the loader in `for epoch in balancer.epochs",
        "trained_twice": r"ValueError: epochs\(...\) trains once",
        "without_loader": "ValueError: epochs.* call balancer.loader",
        "batch_size": "ValueError: .* mutually exclusive with batch_size",
        "option": "TypeError: there is no option 'polcy': did you mean 'policy'",
        "every": "ValueError: every = 4 has no effect without a folder of checkpoints",
        "other_data": "ValueError: the checkpoint .* of another job: number of samples was 40",
        # After `break` the next epoch follows; a request to stop is heard of in the next step.
        "fine": r"ValueError: steps \[\(0, 0, 1\), \(0, 1, 2\), \(1, 0, 6\), \(1, 1, 7\), "
        r"\(1, 2, 8\), \(1, 3, 9\)\]",
    }
    assert found.keys() == expected.keys()
    for case, pattern in expected.items():
        assert re.match(pattern, found[case]), (case, found[case])
    assert said.count("batch normalisation uses the samples of each worker") == 1


@pytest.mark.parametrize("workers", [None, 2])
@pytest.mark.parametrize("kind", ["plain", "balanced"])
def test_an_example_learns(start, workers, kind):
    script = EXAMPLES / f"pytorch_digits_{kind}.py"
    said = start(*([script] if workers is None else job(workers, script)))
    assert float(re.findall(r"accuracy: (\S+)", said)[-1]) > 0.8


def test_a_run_is_watched_and_reported(start, tmp_path):
    start(*job(2, "--run-dir", tmp_path, EXAMPLES / "pytorch_digits_balanced.py"))
    start("-m", "lbbsp_core", "watch", "--json", tmp_path / "seen.json", tmp_path)
    watched = json.loads((tmp_path / "seen.json").read_text())
    assert (watched["framework"], watched["end"]) == ("torch", "finished")
    assert watched["step"] + 1 == watched["planned_steps"] == 8 * 8
    assert "report written" in start("-m", "lbbsp_core", "report", tmp_path)
    assert "torch" in (tmp_path / "report.html").read_text()
