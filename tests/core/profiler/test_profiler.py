"""Profiling: the sweep against known memory sizes, real processes that are killed, bad scripts."""

from __future__ import annotations

import json
import os
import select
import sys
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest
from hypothesis import given
from hypothesis import strategies as st
from waits import HANG_SECONDS, until

from lbbsp_core import Affine, Profile
from lbbsp_core.cost.fitting import Point, fit_costs
from lbbsp_core.profiler import (
    BatchSweep,
    ProfileError,
    ProfileResult,
    _step,
    process,
    profile_step,
)

QUICK = BatchSweep(max_batch=16, repeats=1, point_seconds=0, longest_step=1e9, rounds=1)


class Machine:
    """Simulates a step with exact times on a memory of so many samples."""

    def __init__(self, memory: float, after: int = 0, less: int = 0) -> None:
        self.memory, self.after, self.less = memory, after, less
        self.batches: list[int] = []

    def step(self, batch: int) -> float | None:
        self.batches.append(batch)
        if len(self.batches) == self.after:
            self.memory -= self.less
        return None if batch > self.memory else 0.25 + batch / 64


def silent(_done: str, _batch: int, _seconds: float | None) -> None:
    return


# The sweep


@given(st.integers(1, 5000), st.integers(1, 5000))
def test_the_end_of_memory_is_exact(memory: int, max_batch: int) -> None:
    machine = Machine(memory)
    found = BatchSweep(max_batch, 2, 0, 1e9).run(machine.step, silent)
    assert found.out_of_memory_at == (memory + 1 if memory < max_batch else None)
    batches = [point.batch for point in found.points]
    assert batches == sorted(set(batches))
    assert batches[0] == 1
    assert batches[-1] == min(memory, max_batch)
    assert all(point.seconds == 0.25 + point.batch / 64 for point in found.points)
    failures = sum(batch > memory for batch in machine.batches)
    assert failures <= 2 + max_batch.bit_length()  # each may cost a process


def test_batches_grow_by_a_half_and_a_third_in_turn() -> None:
    assert list(BatchSweep(max_batch=20).batches()) == [1, 2, 3, 4, 6, 8, 12, 16, 20]
    assert list(BatchSweep(max_batch=6).batches()) == [1, 2, 3, 4, 6]
    assert list(BatchSweep(max_batch=1).batches()) == [1]


def test_the_first_step_of_a_batch_is_not_counted_and_the_median_is() -> None:
    times = iter([99.0, 1.0, 5.0, 2.0, 99.0, 3.0, 3.0, 3.0])
    found = BatchSweep(2, 3, 0, 1e9, rounds=1).run(lambda batch: next(times), silent)
    assert found.points == [Point(1, 2.0, 3), Point(2, 3.0, 3)]


def test_short_steps_are_repeated_more_often() -> None:
    sweep = BatchSweep(1, 2, point_seconds=1.0, rounds=1)
    assert sweep.run(lambda batch: 0.125, silent).points == [Point(1, 0.125, 8)]
    assert sweep.run(lambda batch: 1e-6, silent).points == [Point(1, 1e-6, 100)]


def test_bursts_of_others_are_left_out_by_coming_back() -> None:
    """Steps take twice as long in round 1, except for batch 2, and in round 3."""
    calls = iter([2.0] * 3 + [1.25] * 3 + [1.0, 1.0, 1.0] + [2.5] * 3 + [3.0] * 6)
    sweep = BatchSweep(2, 2, point_seconds=2.0, rounds=3, longest_step=9)
    assert sweep.run(lambda batch: next(calls), silent).points == [
        Point(1, 1.0, 6),
        Point(2, 1.25, 6),
    ]


def test_slow_steps_end_the_growth() -> None:
    found = BatchSweep(64, 1, 0, longest_step=0.3).run(Machine(1e9).step, silent)
    assert [point.batch for point in found.points] == [1, 2, 3, 4]
    assert found.slow
    assert not BatchSweep(4, 1, 0, longest_step=0.3).run(Machine(1e9).step, silent).slow


@given(after=st.integers(40, 55), less=st.integers(1, 11))
def test_a_memory_that_shrinks_while_it_is_sought(after: int, less: int) -> None:
    machine = Machine(90, after, less)
    found = BatchSweep(1024, 2, 0, 1e9).run(machine.step, silent)
    assert found.out_of_memory_at is not None
    assert found.points[-1].batch == found.out_of_memory_at - 1 or found.points[-1].batch == 64
    Profile([p.batch for p in found.points], [p.seconds for p in found.points])


def test_not_one_sample_fits() -> None:
    assert BatchSweep().run(Machine(0).step, silent) == ([], 1, False)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"max_batch": 0}, "max_batch must be an integer >= 1, got 0"),
        ({"max_batch": 4.0}, "max_batch must be an integer >= 1, got 4.0"),
        ({"rounds": 0}, "rounds must be an integer >= 1, got 0"),
        ({"repeats": 1.5}, "repeats must be an integer >= 1, got 1.5"),
        ({"longest_step": -1.0}, "longest_step must be >= 0 seconds, got -1.0"),
        ({"point_seconds": float("nan")}, "point_seconds must be >= 0 seconds, got nan"),
    ],
)
def test_a_search_that_makes_no_sense(options: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        BatchSweep(**options)


# A function in this process


def test_a_function_of_this_process_with_an_exact_memory() -> None:
    def step(batch_size: int) -> None:
        if batch_size > 11:
            raise MemoryError
        sum(range(1000))

    result = profile_step(step, sweep=QUICK)
    assert result.out_of_memory_at == 12
    assert result.profile.limits().maximum == 11
    assert result.device


class Promise:
    """Array of a framework that computes asynchronously."""

    def __init__(self) -> None:
        self.waited_for = False

    def block_until_ready(self) -> None:
        self.waited_for = True


def test_arrays_in_any_nest_are_waited_for() -> None:
    promises = [Promise() for _ in range(4)]
    first, second, third, fourth = promises
    _step.synchronize((first, {"loss": second, "others": [third, (fourth,)]}))
    assert all(promise.waited_for for promise in promises)


def test_a_function_that_fails_says_so_itself() -> None:
    def step(batch_size: int) -> None:
        raise KeyError("labels")

    with pytest.raises(KeyError, match="labels"):
        profile_step(step, sweep=QUICK)


class ResourceExhaustedError(Exception):
    """Has the name of TensorFlow's error."""


class OutOfMemoryError(RuntimeError):
    """Has the name of PyTorch's error."""


@pytest.mark.parametrize(
    ("error", "is_memory"),
    [
        (MemoryError(), True),
        (OutOfMemoryError("CUDA"), True),
        (ResourceExhaustedError("OOM when allocating tensor"), True),
        (RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried ..."), True),
        (RuntimeError("CUDA error: out of memory"), True),
        (RuntimeError("RESOURCE_EXHAUSTED: Out of memory while trying to allocate"), True),
        (OSError(12, "Cannot allocate memory"), True),
        (RuntimeError("shapes do not match"), False),
        (ValueError("out of memory of what happened"), False),
        (KeyError("x"), False),
    ],
)
def test_missing_memory_is_told_from_other_failures(error: Exception, is_memory: bool) -> None:
    assert _step.is_out_of_memory(error) == is_memory


def test_missing_memory_behind_another_exception() -> None:
    error = RuntimeError("the step failed")
    assert not _step.is_out_of_memory(error)
    error.__cause__ = MemoryError()
    assert _step.is_out_of_memory(error)


# Scripts in processes that are killed


def script(folder: Path, text: str) -> Path:
    path = folder / "train.py"
    path.write_text(
        f"import os, signal, sys, time\nPIDS = {str(folder / 'pids')!r}\n{REMEMBER}{text}"
    )
    return path


REMEMBER = "with open(PIDS, 'a') as stream:\n    print(os.getpid(), file=stream)\n"


def pids(folder: Path) -> list[int]:
    file = folder / "pids"
    return [int(line) for line in file.read_text().split()] if file.exists() else []


def is_left(pid: int) -> bool:
    """Returns whether a process is alive, or a zombie that this process has not reaped."""
    try:
        found = psutil.Process(pid)
        return found.status() != psutil.STATUS_ZOMBIE or found.ppid() == os.getpid()
    except psutil.NoSuchProcess:
        return False


def reapers() -> set[psutil.Process]:
    """Returns the reapers of this process, which jobs of other tests may have."""
    return {each for each in psutil.Process().children() if "_reaper" in str(each.cmdline())}


@pytest.fixture(autouse=True)
def _no_process_is_left(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(process, "EXIT_SECONDS", HANG_SECONDS)
    monkeypatch.setattr(process, "REAP_SECONDS", HANG_SECONDS)
    before = reapers()
    yield
    assert not [pid for pid in pids(tmp_path) if is_left(pid)]
    assert reapers() <= before


DEATHS = {
    "MemoryError": "raise MemoryError",
    "killed": "os.kill(os.getpid(), signal.SIGKILL)",
    "framework": "raise RuntimeError('CUDA out of memory. Tried to allocate 2 GiB')",
    "limit": "held.append(bytearray(32_000_000 * batch_size)); held.clear()",
}


@pytest.mark.parametrize(
    "death",
    [pytest.param(death, marks=[pytest.mark.slow] * (death == "limit")) for death in DEATHS],
)
def test_the_end_of_memory_in_a_process_that_may_die(tmp_path: Path, death: str) -> None:
    guard = "" if death == "limit" else "if batch_size > 5: "
    path = script(
        tmp_path,
        "import resource\nheld = []\n"
        "now = int(open('/proc/self/statm').read().split()[0]) * resource.getpagesize()\n"
        "resource.setrlimit(resource.RLIMIT_AS, (now + 176_000_000,) * 2)\n"
        f"def step(batch_size):\n    {guard}{DEATHS[death]}\n    sum(range(1000))\n",
    )
    events: list[tuple[str, int, bool]] = []

    def progress(done: str, batch: int, seconds: float | None) -> None:
        events.append((done, batch, seconds is None))

    result = profile_step(path, sweep=QUICK, timeout=HANG_SECONDS, progress=progress)
    fit = [("measured", batch, False) for batch in (1, 2, 3, 4)]
    assert events == [*fit, ("measured", 6, True), ("probed", 5, False), ("measured", 5, False)]
    assert result.out_of_memory_at == 6
    assert result.points[-1].batch == 5
    assert len(pids(tmp_path)) == 2  # a new one after the failure at 6


def test_noise_arguments_main_guard_and_another_name(tmp_path: Path) -> None:
    path = script(
        tmp_path,
        "print('garbage\\n' * 100_000)\n"
        "os.write(2, bytes(range(256)) * 100)\n"
        "import helper\n"
        "if __name__ == '__main__':\n    sys.exit('trained')\n"
        "assert sys.argv[1:] == ['--model', 'big'], sys.argv\n"
        "def other(batch_size):\n    print('{\"seconds\": -1}')\n    time.sleep(helper.SECONDS)\n",
    )
    (tmp_path / "helper.py").write_text("SECONDS = 0.001\n")
    arguments = ["--model", "big"]
    result = profile_step(f"{path}:other", sweep=QUICK, timeout=HANG_SECONDS, arguments=arguments)
    assert result.points[-1].batch == 16
    assert result.out_of_memory_at is None
    assert all(point.seconds >= 0.001 for point in result.points)  # the sleep, not the printed -1


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", r"train\.py:step: the script cannot be loaded: .* defines no function step"),
        ("step = 3", "defines no function step"),
        ("step = (", "cannot be loaded: .*SyntaxError|cannot be loaded:"),
        ("print('bye')\nsys.exit(3)", r"called exit\(3\)(.|\n)*its last output:\nbye"),
        ("os._exit(3)", "the script ended with status 3 before its step was called"),
        ("os.kill(os.getpid(), 9)", "was killed by SIGKILL before its step was called"),
        ("def step(): pass", r"step\(1\) failed: TypeError: .*positional"),
        ("def step(n):\n  raise OSError('no data')", r"step\(1\) failed: OSError: no data .*:6\)"),
        ("def step(n):\n  sys.exit()", r"step\(1\) failed: the script called exit\(None\)"),
        ("def step(n):\n  os._exit(0)", r"step\(1\): the process ended with status 0"),
        ("def step(n):\n  os.kill(os.getpid(), 15)", r"the process was killed by SIGTERM"),
        ("def step(n):\n  raise MemoryError", r"step\(1\) already runs out of memory"),
        ("def step(n):\n  os.abort()", r"step\(1\) already runs out of memory .*SIGABRT"),
        (
            "def step(n):\n  for fd in range(3, 64):\n    try: os.write(fd, b'x' * 99 + b'\\n')\n"
            "    except OSError: pass",
            r"step\(1\): the answer must be a JSON object, got b'xxx",
        ),
    ],
)  # fmt: skip
def test_a_bad_script_is_an_error_that_says_why(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(ProfileError, match=message):
        profile_step(script(tmp_path, text), sweep=QUICK, timeout=HANG_SECONDS)


def test_a_script_that_closes_our_pipes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(process, "EXIT_SECONDS", 0.0)
    path = script(tmp_path, "def step(b):\n  os.closerange(3, 256)\n  while True: time.sleep(1)")
    with pytest.raises(ProfileError, match="process closed its pipe"):
        profile_step(path, sweep=QUICK, timeout=HANG_SECONDS)


HANGS = """
import subprocess
child = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(1e6)'])
print(child.pid, file=open(PIDS, 'a'), flush=True)
def hang(*_):
    open(PIDS + '.hangs', 'w')
    time.sleep(1e6)
"""


@pytest.mark.parametrize(
    ("text", "doing"), [("hang()", "loading the script"), ("step = hang", r"step\(1\)")]
)
def test_a_script_that_hangs_is_ended_with_its_children(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str, doing: str
) -> None:
    def wait(answers: list[int], *_others: object) -> tuple[list, list, list]:
        """Returns when there is an answer, or the script hangs, as if the time had passed."""
        answered = lambda: select.select(answers, [], [], 0)[0]  # noqa: E731
        until(lambda: (tmp_path / "pids.hangs").exists() or answered())
        return answered(), [], []

    monkeypatch.setattr(process, "select", SimpleNamespace(select=wait))
    path = script(tmp_path, HANGS + text)
    with pytest.raises(ProfileError, match=f"{doing} did not end within 300 s: raise the timeout"):
        profile_step(path, sweep=QUICK, timeout=HANG_SECONDS)
    assert len(pids(tmp_path)) == 2
    until(lambda: not any(map(is_left, pids(tmp_path))))


@pytest.mark.parametrize("name", ["none.py", "none.py:step"])
def test_a_script_that_is_not_there(tmp_path: Path, name: str) -> None:
    with pytest.raises(ProfileError, match="there is no such file: give the path"):
        profile_step(tmp_path / name)


def test_a_timeout_that_makes_no_sense() -> None:
    with pytest.raises(ValueError, match="timeout must be a positive number of seconds, got 0"):
        profile_step("x.py", timeout=0)


def test_open_files_do_not_add_up(tmp_path: Path) -> None:
    path = script(tmp_path, "def step(n):\n  if n > 2: raise MemoryError")
    profile_step(path, sweep=QUICK)
    before = len(os.listdir("/proc/self/fd"))
    profile_step(path, sweep=QUICK)
    assert len(os.listdir("/proc/self/fd")) <= before


# What comes out


def result() -> ProfileResult:
    points = tuple(Point(x, 0.01 + 0.001 * x, 5) for x in (1, 2, 4, 8, 16))
    return ProfileResult("an abacus", points, 20, fit_costs(points))


def test_its_file_is_a_profile(tmp_path: Path) -> None:
    path = tmp_path / "abacus.json"
    result().save(path)
    document = json.loads(path.read_text())
    assert list(document) == ["schema", "device", "points", "out_of_memory_at", "fits", "best"]
    assert document["points"][2] == {"batch": 4, "seconds": 0.014, "repeats": 5}
    assert document["best"] == "affine"
    assert Affine(**document["fits"]["affine"]["parameters"]) == result().cost
    assert Profile.load(path) == result().profile
    assert Profile.load(path).limits().maximum == 19


def test_the_child_needs_nothing_but_python() -> None:
    """Checks that the program, which is started by its path, has no dependencies."""
    names = {line.split()[1].split(".")[0] for line in Path(_step.__file__).read_text().splitlines()
             if line.startswith(("import ", "from "))}  # fmt: skip
    assert names <= sys.stdlib_module_names
