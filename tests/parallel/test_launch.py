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
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest
from waits import HANG_SECONDS, until

from lbbsp_core import read_run
from lbbsp_core.launch import launch, supervise, throttle
from lbbsp_core.launch.cpu_shares import quota_us, schedule
from lbbsp_core.launch.throttle import available_cores
from lbbsp_core.processes import child

ME = os.getpid()
# A launched worker rests for longer than a test may take: it ends because it is ended.
pytestmark = pytest.mark.timeout(HANG_SECONDS)

WORKER = """
import json, os, signal, subprocess, sys, time
from pathlib import Path

rank = json.loads(os.environ["TF_CONFIG"])["task"]["index"]
folder = Path(__file__).parent

def rest():
    # Several sleeps: SIGCONT restarts one, and a SIGTERM just before waits for its end.
    while True: time.sleep(0.1)

def tell(name):
    (folder / name).touch()

def wait_for(*names):
    while not all((folder / name).exists() for name in names): time.sleep(0.005)

def start_sleeper(**options):
    subprocess.Popen([sys.executable, folder / "sleeper.py"], **options)

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
    """Returns a function that writes the script of a worker, which can start a sleeper."""
    (tmp_path / "sleeper.py").write_text("import time\nwhile True: time.sleep(1)")

    def write(body: str) -> str:
        (tmp_path / "worker.py").write_text(WORKER + body)
        return str(tmp_path / "worker.py")

    return write


@pytest.fixture
def clock(monkeypatch):
    """Clock of the launcher, which a test moves on by setting `passed`."""
    clock = SimpleNamespace(passed=0.0)
    clock.monotonic = lambda: time.monotonic() + clock.passed
    for module in (supervise, child):
        monkeypatch.setattr(module, "time", clock)
    return clock


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
    """Checks what a launch leaves, and shortens what it grants to processes that do not end."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    for name in ("CLEANUP_SECONDS", "TERM_SECONDS", "MARKS_SECONDS"):
        monkeypatch.setattr(supervise, name, 0.1)
    handlers = {signum: signal.getsignal(signum) for signum in (signal.SIGINT, signal.SIGTERM)}
    threads = set(threading.enumerate())
    for _, base in throttle.parent_cgroups():
        throttle.remove_leftovers(base)  # of earlier tests
    yield
    until(lambda: not left_over(tmp_path))
    assert {signum: signal.getsignal(signum) for signum in handlers} == handlers
    assert set(threading.enumerate()) <= threads


def need_cgroups():
    groups = throttle.open_quotas([min(0.5, available_cores())], 10_000)
    if groups is None:
        pytest.skip("the cpu cgroup controller is not writable here: CPU quotas cannot be tested")
    groups.close()


# --- output of the workers ------------------------------------------------------------------------


def test_lines_are_prefixed_by_rank_and_whole(script, capfd):
    body = "for i in range(300): print(f'out {i} ' + 'x' * 300); sys.stderr.write(f'err {i}\\n')"
    assert launch([script(body)], workers=2) == 0
    lines = capfd.readouterr().out.splitlines()
    for rank in range(2):
        mine = [line for line in lines if line.startswith(f"[{rank}] ")]
        expected = [f"[{rank}] {word} {i}" for i in range(300) for word in ("out", "err")]
        assert [line.removesuffix(" " + "x" * 300) for line in mine] == expected
    assert len(lines) == 2 * 600


def test_a_flood_of_output_without_line_ends_blocks_nobody(script):
    seen = defaultdict(int)
    body = "sys.stdout.write('y' * 3_000_000); sys.stdout.buffer.write(b'\\xff last')"

    def count(rank: int, line: str) -> None:
        seen[rank] += len(line)

    assert launch([script(body)], workers=2, output=count) == 0
    assert seen == {0: 3_000_006, 1: 3_000_006}


@pytest.mark.parametrize("kind", [str, Path])
def test_arguments_environment_and_folders(script, tmp_path, kind):
    lines = {}
    body = "print(sys.argv[1:], os.environ['LBBSP_RUN_DIR'], os.path.isdir(sys.argv[2]))\n"
    body += "os._exit(0)  # as a script without a plugin may"
    run_dir = tmp_path / "runs" / "one"
    command = [script(body), "--epochs", str(run_dir), "a b"]
    folders = {"run_dir": kind(run_dir), "log_dir": kind(tmp_path / "logs")}
    assert launch(command, workers=2, output=lines.__setitem__, **folders) == 0
    assert lines[0] == lines[1] == f"['--epochs', '{run_dir}', 'a b'] {run_dir} True"
    assert lines[0] in (tmp_path / "logs" / "worker-0.log").read_text()


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


@pytest.mark.parametrize("end", ["rest()", ""])
def test_output_that_cannot_be_handed_on_ends_the_job_with_its_error(script, end):
    def broken(rank: int, line: str) -> None:
        raise BrokenPipeError("the reader has exited")

    with pytest.raises(BrokenPipeError, match="the reader has exited"):
        launch([script(f"print('x')\n{end}")], workers=2, output=broken)


def test_each_process_is_asked_to_end_once(script, tmp_path, monkeypatch, capfd):
    def wait_until_gone(self, _seconds):
        (tmp_path / "all-are-asked").touch()
        return wait(self, HANG_SECONDS)

    wait = supervise.Supervisor._wait_until_gone
    monkeypatch.setattr(supervise.Supervisor, "_wait_until_gone", wait_until_gone)
    body = """
if rank == 1:
    wait_for('ready')
    sys.exit(5)
asked = []
signal.signal(signal.SIGTERM, lambda *_: asked.append(1))
if not os.fork():
    os.setsid()
    tell('ready')
wait_for('all-are-asked')
sys.stdout.write(f'asked {len(asked)}\\n')  # at once: both processes write to the same pipe
"""
    assert launch([script(body)], workers=2) == 5
    assert sorted(capfd.readouterr().out.splitlines()) == ["[0] asked 1"] * 2


# --- failures -------------------------------------------------------------------------------------


def test_one_killed_worker_ends_all_and_is_named_last(script, capfd):
    body = """
start_sleeper()
if rank == 2: signal.signal(signal.SIGTERM, signal.SIG_IGN)
print('here', rank)
tell(f'started-{rank}')
if rank == 1:
    wait_for('started-0', 'started-2')
    os.kill(os.getpid(), signal.SIGKILL)
rest()
"""
    assert launch([script(body)], workers=3) == 137
    error = capfd.readouterr().err.splitlines()
    assert error == ["[1] here 1", "lbbsp launch: worker 1 was ended by SIGKILL"]


def test_the_first_traceback_comes_last(script, tmp_path, capfd, monkeypatch):
    body = """
if rank == 0:
    wait_for('first-is-noted')
    sys.exit('a consequence')
raise RuntimeError('the culprit')
"""
    failures_within = supervise.Supervisor._failures_within

    def noted(self, seconds):
        (tmp_path / "first-is-noted").touch()
        return failures_within(self, HANG_SECONDS)

    monkeypatch.setattr(supervise.Supervisor, "_failures_within", noted)
    assert launch([script(body)], workers=2) == 1
    captured = capfd.readouterr()
    assert "[0] a consequence" in captured.out
    lines = captured.err.splitlines()
    assert lines[0] == "[1] Traceback (most recent call last):"
    assert lines[-2] == "[1] RuntimeError: the culprit"
    assert lines[-1] == (
        "lbbsp launch: worker 1 failed with exit status 1 "
        "(followed by: worker 0 failed with exit status 1)"
    )


MARKS = "from lbbsp_core.runtime.reliability import exit, marks\nmarks.begin()\n"
IN_A_CHILD = f"subprocess.run([sys.executable, '-c', {MARKS!r}])\n"


@pytest.mark.parametrize(
    ("body", "status", "message"),
    [
        ("sys.exit(7 if rank == 1 else 0)", 7, "worker 1 failed with exit status 7"),
        (MARKS + "sys.exit(0)", 0, None),
        (MARKS + "sys.exit(3) if rank else rest()", 3, "worker 1 failed with exit status 3"),
        (MARKS + "1 / 0 if rank else rest()", 1, "worker 1 failed with exit status 1"),
        (
            # A process that a worker starts says nothing about the end of the worker.
            MARKS + IN_A_CHILD + "os._exit(0) if rank else rest()",
            1,
            "worker 1 ended with status 0 before the end of its script: it has called os._exit, "
            "or a library that ends processes; let the script return, or use sys.exit",
        ),
        (
            MARKS + "if rank == 1: sys.exit(0)\nwith marks.waiting(): rest()",
            1,
            "worker 1 ended with status 0 before training, and worker 0 waits for it",
        ),
        (
            MARKS + "if rank == 1: os.kill(os.getpid(), signal.SIGSTOP)\n"
            "marks.note_lost(1, 'worker 1 was silent')\nsys.exit(4)",
            4,
            "worker 1 was silent",
        ),
    ],
)
def test_a_worker_must_end_its_script_in_order(script, capfd, body, status, message):
    assert launch([script(body)], workers=2) == status
    error = capfd.readouterr().err.splitlines()
    assert error[-1:] == ([f"lbbsp launch: {message}"] if message else [])


@pytest.mark.parametrize("fails", [True, False])
def test_processes_in_a_session_of_their_own_are_ended_too(script, tmp_path, fails):
    body = f"start_sleeper(start_new_session=rank == 1)\n1 / {not fails}"
    assert launch([script(body)], workers=2) == int(fails)
    assert not left_over(tmp_path)


@pytest.mark.parametrize("end", ["", "exit.end_now(1)", "os.kill(os.getpid(), signal.SIGKILL)"])
def test_a_folder_for_scratch_is_removed_however_a_worker_ends(script, tmp_path, end):
    lines = {}
    body = "folder = marks.scratch_folder()\nopen(folder / 'file', 'w').close()\nprint(folder)\n"
    launch([script(MARKS + body + end)], workers=1, output=lines.__setitem__)
    assert Path(lines[0]).is_relative_to(tmp_path)
    assert not Path(lines[0]).exists()


def test_timeout_ends_all_and_names_who_still_ran(script, clock, capfd, monkeypatch):
    mark_exited = supervise.Supervisor._mark_exited

    def exited(self, event):
        clock.passed = 5_000
        return mark_exited(self, event)

    monkeypatch.setattr(supervise.Supervisor, "_mark_exited", exited)
    assert launch([script("if rank != 1: rest()")], workers=3, timeout=5_000) == 124
    assert capfd.readouterr().err == "lbbsp launch: timed out after 5000 s; still running: 0, 2\n"
    assert launch([script("")], workers=2, timeout=20_000) == 0


def test_from_a_thread_without_handlers(script):
    status = []
    thread = threading.Thread(target=lambda: status.append(launch([script("")], workers=2)))
    thread.start()
    thread.join(HANG_SECONDS)
    assert status == [0]


# --- end of the launcher itself -----------------------------------------------------------------

HELLO = """
start_sleeper(start_new_session=rank == 1)
print('hello', rank)
rest()
"""
RECORDS = """
from lbbsp_core.runtime.record.record import run_header
from lbbsp_core.runtime.record.writer import open_record
path = os.path.join(os.environ['LBBSP_RUN_DIR'], 'run.jsonl')
if rank == 0:
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    record = open_record(path, run_header('none', workers=2, global_batch_size=2, versions={}))
    tell('opened')
    rest()
wait_for('opened')
"""


@pytest.mark.parametrize(
    ("end", "options", "event"),
    [
        ("os.kill(os.getpid(), signal.SIGKILL)", {}, "failed"),
        ("sys.exit(143)", {"grace": 0}, "interrupted"),
    ],
)
def test_the_record_says_whether_a_job_has_failed_or_was_ended(
    script, tmp_path, monkeypatch, end, options, event
):
    monkeypatch.setattr(supervise, "TERM_SECONDS", HANG_SECONDS)  # worker 0 ends its record
    assert launch([script(RECORDS + end)], workers=2, run_dir=tmp_path / "run", **options) != 0
    assert [each.event for each in read_run(tmp_path / "run").events] == [event]


@pytest.mark.parametrize(
    ("signum", "status", "options"),
    [
        (signal.SIGINT, 130, "{}"),
        (signal.SIGHUP, 129, "{}"),
        (signal.SIGTERM, 143, "{'speeds': [1, 0.5]}"),
    ],
)
def test_asking_the_launcher_to_end(script, driver, tmp_path, signum, status, options):
    process = driver(script(HELLO), options)
    process.send_signal(signum)
    output, _ = process.communicate(timeout=HANG_SECONDS)
    assert process.returncode == status
    assert output.splitlines()[-1] == f"lbbsp launch: ended by {signal.Signals(signum).name}"
    assert not left_over(tmp_path)


@pytest.mark.parametrize("emulation", ["auto", "duty-cycle"])
def test_killing_the_launcher(script, driver, emulation):
    process = driver(script(HELLO), f"{{'speeds': [1, 0.5], 'emulation': '{emulation}'}}")
    process.kill()  # nothing is left behind
    process.wait()


def test_killing_the_launcher_after_its_reaper(script, driver, tmp_path):
    need_cgroups()
    process = driver(script("print('hello')\nrest()"), "{'speeds': [1, 0.5]}")
    for reaper in psutil.Process(process.pid).children():
        if any(word.endswith("_reaper.py") for word in reaper.cmdline()):
            reaper.kill()
    process.kill()
    process.wait()
    until(lambda: not any("worker.py" in line for line in left_over(tmp_path)))
    need_cgroups()  # the next launch removes the cgroups
    for folder in tmp_path.glob("lbbsp-launch-*"):
        shutil.rmtree(folder)


# --- emulated slowness: shares, quota files and the duty cycle are tested without processes -------


def test_speeds_change_in_time_and_all_workers_are_let_go(script, tmp_path, clock, monkeypatch):
    applied, released = [], set()

    class Recording(throttle.Throttle):
        def release(self, rank: int) -> None:
            released.add(rank)
            clock.passed = 3_600  # at the first end of a worker

        def apply(self, shares):
            applied.append(shares)
            (tmp_path / "changed").touch()

    monkeypatch.setattr("lbbsp_core.launch.create_throttle", lambda *_, **__: Recording())
    now, later = [1, 0.4, 1], [(3_600, [0.5, 1, 1]), (100_000, [1, 1, 1])]
    body = "if rank == 0: wait_for('changed'); sys.exit(3)\nif rank == 2: rest()"
    assert launch([script(body)], workers=3, speeds=now, speeds_at=later) == 3
    plan = schedule(now, later, workers=3, cores=available_cores())
    assert applied == [plan.stages[1].shares]
    assert released == {0, 1, 2}


def test_a_worker_is_in_its_cgroup_with_its_quota_before_its_first_line(script, tmp_path):
    need_cgroups()
    found = {}

    def read(rank: int, line: str) -> None:
        [*_, (_, base)] = throttle.parent_cgroups()
        [group] = base.glob(f"lbbsp-{ME}-*-{rank}")
        [file] = [*group.glob("cpu.max"), *group.glob("cpu.cfs_quota_us")]
        found[rank] = group.name in line, int(file.read_text().split()[0])
        (tmp_path / f"read-{rank}").touch()

    body = "print(Path('/proc/self/cgroup').read_text().split())\nwait_for(f'read-{rank}')"
    assert launch([script(body)], workers=2, speeds=[1, 0.5], output=read) == 0
    plan = schedule([1, 0.5], [], workers=2, cores=available_cores())
    quotas = [quota_us(share, plan.period_us) for share in plan.stages[0].shares]
    assert found == {rank: (True, quota) for rank, quota in enumerate(quotas)}


@pytest.mark.parametrize(
    ("emulation", "signals"), [("auto", []), ("duty-cycle", ["SIGSTOP", "SIGCONT"])]
)
def test_a_slowed_worker_is_let_go_to_end_properly(
    script, tmp_path, monkeypatch, capfd, emulation, signals
):
    def told(group, signum):
        signal_group(group, signum)
        (tmp_path / signum.name).touch()

    signal_group = throttle.signal_group
    monkeypatch.setattr(throttle, "signal_group", told)
    monkeypatch.setattr(supervise, "TERM_SECONDS", HANG_SECONDS)
    body = """
if rank == 1:
    wait_for('ready', *sys.argv[1:])
    sys.exit(5)
signal.signal(signal.SIGTERM, lambda *_: sys.exit('goodbye'))
tell('ready')
rest()
"""
    command = [script(body), *signals]
    assert launch(command, workers=2, speeds=[0.1, 1], emulation=emulation) == 5
    captured = capfd.readouterr()
    assert "[0] goodbye" in captured.out
    assert "worker 1 failed with exit status 5" in captured.err.splitlines()[-1]
