"""Launcher with real processes, which are small: none of them imports a framework."""

import os
import platform
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple, TypeAlias

import psutil
import pytest

from lbbsp_core import read_run
from lbbsp_core.launch import launch, throttle
from lbbsp_core.launch.cpu_shares import schedule
from lbbsp_core.launch.throttle import CpuQuotas, DutyCycle, available_cores

ME = os.getpid()
Lines: TypeAlias = dict[int, list[str]]
# A launched worker sleeps for 60 s if it is not ended: ending it takes less, on a busy machine too.
pytestmark = pytest.mark.timeout(50)
ENDS_SOON = pytest.mark.timeout(25, func_only=True)

RANK = "import json, os, signal, subprocess, sys, time\n"
RANK += "rank = json.loads(os.environ['TF_CONFIG'])['task']['index']\n"
# The third worker only claims the largest quota: the two that are measured then need less than one
# core together, which they get even if other processes use the machine.
BURN = """
if rank == 2: sys.exit()
print(os.getpid())
end = time.monotonic() + float(sys.argv[1])
while time.monotonic() < end:
    print(time.monotonic(), time.process_time())
    pause = time.monotonic() + 0.05
    while time.monotonic() < pause:
        pass
"""
# Two tensors of 80 MiB, which is more than the largest threshold that glibc chooses by itself.
ALLOCATE = """
import ctypes, resource
libc, size = ctypes.CDLL(None), ctypes.c_size_t(80 << 20)
libc.malloc.restype, libc.free.argtypes = ctypes.c_void_p, [ctypes.c_void_p]
for _ in range(3):
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    tensors = [libc.malloc(size) for _ in range(2)]
    for tensor in tensors:
        ctypes.memset(tensor, 1, 80 << 20)
    for tensor in tensors:
        libc.free(tensor)
    print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""
# A shell without job control starts background jobs with SIGINT ignored: undo that.
DRIVER = """
import signal, sys
signal.signal(signal.SIGINT, signal.default_int_handler)
signal.signal(signal.SIGHUP, signal.SIG_DFL)  # ignored below nohup
from lbbsp_core.launch import launch
sys.exit(launch(sys.argv[2:], workers=2, **eval(sys.argv[1])))
"""


@pytest.fixture
def script(tmp_path):
    """Returns a function that writes the script of a worker, which knows its rank."""

    def write(body: str) -> str:
        (tmp_path / "worker.py").write_text(RANK + body)
        return str(tmp_path / "worker.py")

    return write


@pytest.fixture
def sleeper(tmp_path):
    """Returns the script of a process that a worker starts and leaves running."""
    (tmp_path / "sleeper.py").write_text("import time; time.sleep(60)")
    return str(tmp_path / "sleeper.py")


@pytest.fixture
def driver(tmp_path):
    """Returns a function that starts a launcher process and waits for both workers' output."""
    started = []

    def start(worker: str, options: str = "{}") -> subprocess.Popen:
        (tmp_path / "driver.py").write_text(DRIVER)
        root = str(Path(__file__).parents[2])
        process = subprocess.Popen(
            [sys.executable, str(tmp_path / "driver.py"), options, worker],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env={**os.environ, "PYTHONPATH": root, "TMPDIR": str(tmp_path)},
        )
        started.append(process)
        greetings = set()
        while len(greetings) < 2:
            line = process.stdout.readline()
            assert line, "the launcher ended early"
            greetings.update([line] if "hello" in line else [])
        return process

    yield start
    for process in started:
        process.kill()
        process.communicate()


def cgroups() -> set[Path]:
    """Returns the cgroups of launches that have ended."""
    groups = {group for _, base in throttle.parent_cgroups() for group in base.glob("lbbsp-*-*-*")}
    pids = {group: int(group.name.split("-")[1]) for group in groups}
    return {group for group in groups if not psutil.pid_exists(pids[group]) or pids[group] == ME}


def left_over(tmp_path: Path) -> list[str]:
    """Returns processes that run a file of this test; cgroups, folders of launches that ended."""
    found = [
        f"{process.pid}: {process.info['cmdline']}"
        for process in psutil.process_iter(["cmdline"])
        if any(str(tmp_path) in word for word in process.info["cmdline"] or [])
    ]
    return found + sorted(map(str, [*cgroups(), *tmp_path.glob("lbbsp-launch-*")]))


@pytest.fixture(autouse=True)
def nothing_left_behind(tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    handlers = {signum: signal.getsignal(signum) for signum in (signal.SIGINT, signal.SIGTERM)}
    threads = set(threading.enumerate())
    for _, base in throttle.parent_cgroups():
        throttle.remove_leftovers(base)  # of earlier tests
    yield
    assert wait_until(lambda: not left_over(tmp_path)), left_over(tmp_path)
    assert {signum: signal.getsignal(signum) for signum in handlers} == handlers
    assert set(threading.enumerate()) <= threads


def wait_until(condition, seconds: float = 10.0) -> bool:
    """Polls a condition and returns whether it became true in time."""
    end = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > end:
            return False
        time.sleep(0.02)
    return True


def need_cgroups():
    groups = throttle.open_quotas([0.5], 5_000)
    if groups is None:
        pytest.skip("the cpu cgroup controller is not writable here: CPU quotas cannot be tested")
    groups.close()


# --- output of the workers ------------------------------------------------------------------------


def test_lines_are_prefixed_by_rank_and_whole(script, capfd):
    body = "for i in range(300): print(f'out {i} ' + 'x' * 300); sys.stderr.write(f'err {i}\\n')"
    assert launch([script(body)], workers=3) == 0
    lines = capfd.readouterr().out.splitlines()
    for rank in range(3):
        mine = [line for line in lines if line.startswith(f"[{rank}] ")]
        expected = [f"[{rank}] {word} {i}" for i in range(300) for word in ("out", "err")]
        assert [line.removesuffix(" " + "x" * 300) for line in mine] == expected
    assert len(lines) == 3 * 600


def test_a_flood_of_output_without_line_ends_blocks_nobody(script):
    seen = defaultdict(int)
    body = "sys.stdout.write('y' * 3_000_000); sys.stdout.buffer.write(b'\\xff last')"

    def count(rank: int, line: str) -> None:
        seen[rank] += len(line)

    assert launch([script(body)], workers=2, output=count) == 0
    assert seen == {0: 3_000_006, 1: 3_000_006}


def test_arguments_environment_and_run_dir(script, tmp_path):
    lines = {}
    body = "print(sys.argv[1:], os.environ['LBBSP_RUN_DIR'], os.path.isdir(sys.argv[2]))"
    run_dir = tmp_path / "runs" / "one"
    command = [script(body), "--epochs", str(run_dir), "a b"]
    assert launch(command, workers=2, run_dir=run_dir, output=lines.__setitem__) == 0
    assert lines[0] == lines[1] == f"['--epochs', '{run_dir}', 'a b'] {run_dir} True"


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="another allocator than glibc's")
@pytest.mark.parametrize("kept", [True, False])
def test_tensors_are_allocated_without_page_faults(script, monkeypatch, kept):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "-1")
    if not kept:  # the user's own setting, here glibc's default
        monkeypatch.setenv("GLIBC_TUNABLES", "glibc.malloc.tcache_count=7")
    lines = []
    launch([script(ALLOCATE)], workers=1, output=lambda rank, line: lines.append(line))
    first, *later = [int(line) for line in lines]
    assert max(later) < 0.02 * first if kept else min(later) > 0.9 * first


def test_output_that_cannot_be_handed_on_ends_the_job_with_its_error(script):
    def broken(rank: int, line: str) -> None:
        raise BrokenPipeError("the reader has exited")

    with pytest.raises(BrokenPipeError, match="the reader has exited"):
        launch([script("print('x')\ntime.sleep(60)")], workers=2, output=broken)
    with pytest.raises(BrokenPipeError, match="the reader has exited"):
        launch([script("print('x')")], workers=2, output=broken)


# --- failures -------------------------------------------------------------------------------------


@ENDS_SOON
def test_one_killed_worker_ends_all_and_is_named_last(script, sleeper, capfd):
    body = """
child = subprocess.Popen([sys.executable, sys.argv[1], '60'])
print('here', rank)
time.sleep(0.3)
if rank == 1: os.kill(os.getpid(), signal.SIGKILL)
if rank == 2: signal.signal(signal.SIGTERM, signal.SIG_IGN)
time.sleep(60)
"""
    assert launch([script(body), sleeper], workers=3) == 137
    error = capfd.readouterr().err.splitlines()
    assert error == ["[1] here 1", "lbbsp launch: worker 1 was ended by SIGKILL"]


def test_the_first_traceback_comes_last(script, tmp_path, capfd):
    body = """
os.chdir(sys.argv[1])
def wait_for(what):
    while not what(): time.sleep(0.005)
if rank == 0:
    signal.signal(signal.SIGTERM, lambda *_: sys.exit('parting words'))
    open('ready', 'w').close()
    time.sleep(60)
wait_for(lambda: os.path.exists('ready'))
if rank == 1:
    wait_for(lambda: os.path.exists('two'))
    with open('one', 'w') as file: file.write(str(os.getpid()))
    raise RuntimeError('the culprit')
open('two', 'w').close()
wait_for(lambda: os.path.exists('one') and open('one').read())
pid = open('one').read()
wait_for(lambda: open(f'/proc/{pid}/stat').read().split()[2] == 'Z')
sys.exit('a consequence')
"""
    assert launch([script(body), str(tmp_path)], workers=3) == 1
    captured = capfd.readouterr()
    assert "[0] parting words" in captured.out
    assert "[2] a consequence" in captured.out
    lines = captured.err.splitlines()
    assert lines[0] == "[1] Traceback (most recent call last):"
    assert lines[-2] == "[1] RuntimeError: the culprit"
    first, _, others = lines[-1].partition(" (")
    assert first == "lbbsp launch: worker 1 failed with exit status 1"
    assert others in ("", "followed by: worker 2 failed with exit status 1)")  # "": a busy machine


def test_exit_status_of_the_first_failure(script, capfd):
    assert launch([script("sys.exit(7 if rank == 1 else 0)")], workers=2) == 7
    assert "worker 1 failed with exit status 7" in capfd.readouterr().err


MARKS = "from lbbsp_core.runtime.reliability import marks\n"


@ENDS_SOON
@pytest.mark.parametrize(
    ("end", "status"),
    [("pass", 0), ("sys.exit(0)", 0), ("os._exit(0)", 1), ("sys.exit(3)", 3), ("1 / 0", 1)],
)
def test_a_worker_must_end_its_script_in_order(script, capfd, end, status):
    body = MARKS + f"marks.begin()\nif rank == 1: {end}\ntime.sleep(60 * {status})"
    assert launch([script(body)], workers=2) == status
    error = capfd.readouterr().err
    assert "worker 1" in error.splitlines()[-1] if status else not error
    assert ("before the end of its script: it has called os._exit" in error) == ("_exit" in end)


def test_a_script_without_a_plugin_may_end_as_it_likes(script):
    assert launch([script("os._exit(0)")], workers=2) == 0


def test_a_process_that_a_worker_starts_says_nothing_about_its_end(script, capfd):
    tool = "from lbbsp_core.runtime.reliability import marks; marks.begin()"
    body = MARKS + f"marks.begin()\nsubprocess.run([sys.executable, '-c', {tool!r}])\nos._exit(0)"
    assert launch([script(body)], workers=1) == 1
    assert "worker 0 ended with status 0 before the end" in capfd.readouterr().err


@ENDS_SOON
def test_a_worker_that_ends_before_others_have_started_is_named(script, capfd):
    body = MARKS + "marks.begin()\nif rank == 1: sys.exit(0)\n"
    body += "with marks.waiting(): time.sleep(60)"
    assert launch([script(body)], workers=2) == 1
    assert capfd.readouterr().err.splitlines()[-1] == (
        "lbbsp launch: worker 1 ended with status 0 before training, and worker 0 waits for it"
    )


@ENDS_SOON
def test_the_worker_that_others_have_lost_is_named_as_the_first_cause(script, capfd):
    body = MARKS + "if rank == 1: os.kill(os.getpid(), signal.SIGSTOP)\n"
    body += "print('here')\nmarks.note_lost(1, 'worker 1 was silent')\nsys.exit(4)"
    assert launch([script(body)], workers=2) == 4
    assert capfd.readouterr().err == "lbbsp launch: worker 1 was silent\n"


@pytest.mark.parametrize("fails", [True, False])
def test_processes_in_a_session_of_their_own_are_ended_too(script, sleeper, tmp_path, fails):
    body = (
        f"subprocess.Popen([sys.executable, sys.argv[1]], start_new_session=True)\n1 / {not fails}"
    )
    assert launch([script(body), sleeper], workers=2) == int(fails)
    assert not left_over(tmp_path)


def test_a_folder_for_scratch_is_removed_however_a_worker_ends(script, tmp_path):
    body = (
        MARKS + "from lbbsp_core.runtime.reliability import exit\nfolder = marks.scratch_folder()\n"
    )
    body += "open(folder / 'file', 'w').close()\nprint(folder)\n"
    for end in ("", "exit.end_now(1)", "os.kill(os.getpid(), signal.SIGKILL)"):
        lines = {}
        launch([script(body + end)], workers=1, output=lines.__setitem__)
        assert Path(lines[0]).is_relative_to(tmp_path)
        assert not Path(lines[0]).exists()


@ENDS_SOON
def test_timeout_ends_all_and_names_who_still_ran(script, capfd):
    assert launch([script("")], workers=3, timeout=50) == 0
    assert launch([script("time.sleep(60 * (rank != 1))")], workers=3, timeout=0.8) == 124
    assert capfd.readouterr().err == "lbbsp launch: timed out after 0.8 s; still running: 0, 2\n"


@ENDS_SOON
def test_what_finished_workers_leave_running_is_ended(script, sleeper, tmp_path):
    body = "subprocess.Popen([sys.executable, sys.argv[1]])"
    assert launch([script(body), sleeper], workers=2) == 0
    assert wait_until(lambda: not left_over(tmp_path))


def test_from_a_thread_without_handlers(script):
    status = []
    thread = threading.Thread(target=lambda: status.append(launch([script("")], workers=2)))
    thread.start()
    thread.join(20)
    assert status == [0]


# --- end of the launcher itself -----------------------------------------------------------------

HELLO = """
command = [sys.executable, os.path.dirname(__file__) + '/sleeper.py']
subprocess.Popen(command, start_new_session=rank == 1)
print('hello', rank)
time.sleep(60)
"""


RECORDS = """
from lbbsp_core.runtime.record.record import run_header
from lbbsp_core.runtime.record.writer import open_record
path = os.path.join(os.environ['LBBSP_RUN_DIR'], 'run.jsonl')
if rank == 0:
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    record = open_record(path, run_header('none', workers=2, global_batch_size=2, versions={}))
    open(path + '.opened', 'w')
    while True: time.sleep(0.1)
while not os.path.exists(path + '.opened'): time.sleep(0.01)
"""


@pytest.mark.parametrize(
    ("end", "options", "event"),
    [
        ("os.kill(os.getpid(), signal.SIGKILL)", {}, "failed"),
        ("sys.exit(3)", {}, "failed"),
        ("sys.exit(143)", {"grace": 0}, "interrupted"),
    ],
)
def test_the_record_says_whether_a_job_has_failed_or_was_ended(
    script, tmp_path, end, options, event
):
    assert launch([script(RECORDS + end)], workers=2, run_dir=tmp_path / "run", **options) != 0
    assert [each.event for each in read_run(tmp_path / "run").events] == [event]


@pytest.mark.parametrize(
    ("signum", "status"), [(signal.SIGINT, 130), (signal.SIGTERM, 143), (signal.SIGHUP, 129)]
)
@pytest.mark.parametrize("options", ["{}", "{'speeds': [1, 0.5]}"])
def test_asking_the_launcher_to_end(script, sleeper, driver, tmp_path, signum, status, options):
    process = driver(script(HELLO), options)
    process.send_signal(signum)
    output, _ = process.communicate(timeout=30)
    assert process.returncode == status
    assert output == f"lbbsp launch: ended by {signal.Signals(signum).name}\n"
    assert not left_over(tmp_path)


@pytest.mark.parametrize(
    "options",
    ["{}", "{'speeds': [1, 0.5]}", "{'speeds': [1, 0.5], 'emulation': 'duty-cycle'}"],
)
def test_killing_the_launcher(script, sleeper, driver, tmp_path, options):
    process = driver(script(HELLO), options)
    process.kill()
    process.wait()
    assert wait_until(lambda: not left_over(tmp_path), 5), left_over(tmp_path)


def test_killing_the_launcher_after_its_reaper(script, driver, tmp_path):
    need_cgroups()
    process = driver(script("print('hello')\ntime.sleep(60)"), "{'speeds': [1, 0.5]}")
    for child in psutil.Process(process.pid).children():
        if any(word.endswith("_reaper.py") for word in child.cmdline()):
            child.kill()
    process.kill()
    process.wait()
    assert wait_until(lambda: not any("worker.py" in line for line in left_over(tmp_path)), 5)
    need_cgroups()  # the next launch removes the cgroups
    for folder in tmp_path.glob("lbbsp-launch-*"):
        shutil.rmtree(folder)


# --- emulated slowness ----------------------------------------------------------------------------


@pytest.fixture
def precedence(monkeypatch):
    """Gives the cgroups precedence over other load: a quota limits, but does not guarantee."""

    def favoured(self, shares):
        create(self, shares)
        for group in self.cgroups():
            for name, weight in (("cpu.shares", "262144"), ("cpu.weight", "10000")):
                if (group / name).exists():
                    (group / name).write_text(weight)

    create = CpuQuotas.create
    monkeypatch.setattr(CpuQuotas, "create", favoured)


STAGES = [1, 0.4, 2], [0.5, 1, 2]  # speeds; a worker of speed 2 gets 0.95 of a core


class Stage(NamedTuple):
    """Time span of constant speeds, and the share of a core that each worker may use in it."""

    begin: float
    end: float
    shares: Sequence[float]


def run_stages(
    worker: str, throttle: type, emulation: str, monkeypatch
) -> tuple[list[Stage], Lines]:
    """Runs ``BURN`` through both stages and returns their time spans and the workers' output."""
    applied, lines = [], defaultdict(list)
    apply = throttle.apply

    def record(self, shares):
        apply(self, shares)
        applied.append((time.monotonic(), shares))

    monkeypatch.setattr(throttle, "apply", record)
    first = schedule(STAGES[0], [(0, STAGES[1])], workers=3, cores=available_cores()).stages[0]
    options = {"speeds": STAGES[0], "speeds_at": [(2.0, STAGES[1])], "emulation": emulation}
    command, start = [worker, "3.6"], time.monotonic()
    assert launch(command, workers=3, output=lambda i, line: lines[i].append(line), **options) == 0
    ((change, shares),) = applied
    end = min(float(lines[rank][-1].split()[0]) for rank in (0, 1))
    return [Stage(start, change, first.shares), Stage(change + 0.1, end, shares)], lines


def cpu_share(lines: list[str], stage: Stage) -> float:
    """Returns the CPU seconds per second of a worker that runs ``BURN`` in a stage."""
    readings = [tuple(map(float, line.split())) for line in lines[1:]]
    inside = [(clock, cpu) for clock, cpu in readings if stage.begin <= clock <= stage.end]
    return (inside[-1][1] - inside[0][1]) / (inside[-1][0] - inside[0][0])


@pytest.mark.alone
@pytest.mark.timeout(120)
def test_cpu_quotas_make_speeds_and_change_them_in_time(script, precedence, capfd, monkeypatch):
    """Measures that each worker gets its share of a core, in one of a few attempts.

    If other processes keep the machine busy, no worker gets its share.
    """
    need_cgroups()
    for _ in range(6):
        with monkeypatch.context() as patch:
            stages, lines = run_stages(script(BURN), CpuQuotas, "cgroup", patch)
        used = [cpu_share(lines[rank], stage) for stage in stages for rank in (0, 1)]
        allowed = [stage.shares[rank] for stage in stages for rank in (0, 1)]
        if used == pytest.approx(allowed, rel=0.3):
            break
    else:
        pytest.fail(f"allowed {allowed} cores, used {used}")
    assert capfd.readouterr().err == ""


@pytest.mark.alone
@pytest.mark.timeout(120)
def test_duty_cycle_makes_speeds_and_changes_them_in_time(script, capfd, monkeypatch):
    """Measures that the worker with the larger share uses more CPU time in both stages.

    The exact shares are tested without processes.
    """
    for _ in range(6):
        with monkeypatch.context() as patch:
            stages, lines = run_stages(script(BURN), DutyCycle, "duty-cycle", patch)
        first, second = ([cpu_share(lines[rank], stage) for rank in (0, 1)] for stage in stages)
        if first[0] > 1.3 * first[1] and second[1] > 1.3 * second[0]:
            break
    else:
        pytest.fail(f"of cores allowed {[stage.shares for stage in stages]}, used {first, second}")
    assert "stopping and continuing the workers every 20 ms" in capfd.readouterr().err


def test_a_worker_is_in_its_cgroup_before_its_first_line(script):
    need_cgroups()
    lines = {}
    body = "print(open('/proc/self/cgroup').read().replace('\\n', ' '))"
    assert launch([script(body)], workers=2, speeds=[1, 1], output=lines.__setitem__) == 0
    for rank, line in lines.items():
        assert any(
            f"lbbsp-{os.getpid()}-" in word and word.endswith(f"-{rank}") for word in line.split()
        )


def test_without_writable_cgroups_the_duty_cycle_is_said_aloud(script, monkeypatch, capfd):
    monkeypatch.setattr(throttle, "parent_cgroups", lambda: iter([(1, Path("/proc/not-writable"))]))
    assert launch([script("")], workers=2, speeds=[1, 0.5]) == 0
    assert "cgroups are not writable here" in capfd.readouterr().err
    with pytest.raises(ValueError, match="'cgroup' where the cpu controller is not writable"):
        launch([script("")], workers=2, speeds=[1, 0.5], emulation="cgroup")


def test_long_quota_periods_are_said_aloud(script, capfd):
    need_cgroups()
    assert launch([script("")], workers=2, speeds=[1, 0.05]) == 0
    assert "the quota period is 21.053 ms" in capfd.readouterr().err


@pytest.mark.parametrize("emulation", ["auto", "duty-cycle"])
def test_a_slowed_worker_is_let_go_to_end_properly(script, tmp_path, capfd, emulation):
    body = """
if rank == 1:
    while not os.path.exists(sys.argv[1]): time.sleep(0.01)
    sys.exit(5)
signal.signal(signal.SIGTERM, lambda *_: sys.exit('goodbye'))
open(sys.argv[1], 'w').close()
while True: time.sleep(0.1)
"""
    # One long sleep would be flaky: SIGCONT restarts the system call, and a SIGTERM that arrives
    # just before that runs its Python handler only after the sleep.
    command = [script(body), str(tmp_path / "ready")]
    assert launch(command, workers=2, speeds=[0.1, 1], emulation=emulation) == 5
    captured = capfd.readouterr()
    assert "[0] goodbye" in captured.out
    assert "worker 1 failed with exit status 5" in captured.err.splitlines()[-1]
