"""Driving factors: exact values on a fake machine, lower bounds on the real machine."""

from __future__ import annotations

import itertools
import logging
import math
import os
import subprocess
import sys
import threading
from collections import namedtuple
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path, PurePosixPath
from types import SimpleNamespace
from typing import Any, NoReturn

import psutil
import pytest
from hypothesis import given
from hypothesis import strategies as st
from waits import HANG_SECONDS, until

from lbbsp_core import ResourceSampler
from lbbsp_core.launch.throttle import open_quotas
from lbbsp_core.resources import polling
from lbbsp_core.resources.base import DESCRIPTIONS, Factor, Meter, Source
from lbbsp_core.resources.cgroup import cpu_quotas, hierarchies
from lbbsp_core.resources.gpu import driver_version
from lbbsp_core.resources.host import Host
from lbbsp_core.resources.sampler import DEFAULT_GPU_NAMES, DEFAULT_NAMES, DEFAULT_QUOTA_NAMES
from lbbsp_core.resources.sources import SOURCES, TICK_SECONDS, OtherCpuTime

linux = pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")

V2 = "30 1 0:27 / /sys/fs/cgroup rw,nosuid shared:4 - cgroup2 cgroup2 rw,nsdelegate\n"
V1 = (
    "33 31 0:30 / /sys/fs/cgroup/cpu,cpuacct rw - cgroup cgroup rw,cpu,cpuacct\n"
    "35 31 0:32 / /sys/fs/cgroup/memory rw - cgroup cgroup rw,memory\n"
    "36 31 0:33 / /sys/fs/cgroup/unified rw - cgroup2 cgroup2 rw\n"
)
CGROUPS = "sys/fs/cgroup"

KINDS = ("user", "nice", "system", "idle", "iowait", "irq", "softirq", "steal")
CoreTimes = namedtuple("CoreTimes", KINDS)


class Machine:
    """Fake machine: a tree of files, and clocks that tests advance."""

    def __init__(self, root: Path, cores: tuple[int, ...] = (1, 2)) -> None:
        self.root, self.seconds, self.own = root, 100.0, 10.0
        self.ticks = {core: [0] * 8 for core in range(4)}
        self.memory(total=1000, available=750)
        self.loadavg(1)
        self.write("proc/self/cgroup", "")
        self.write("proc/self/mountinfo", "24 1 254:0 / / rw - ext4 /dev/root rw\n")
        self.host = Host(
            root=root, environ={}, cores=frozenset(cores), core_times=self.core_times,
            clock=lambda: self.seconds, process_seconds=lambda: self.own, memory=lambda: self.bytes,
        )  # fmt: skip

    def write(self, path: str, text: str) -> None:
        (self.root / path).parent.mkdir(parents=True, exist_ok=True)
        (self.root / path).write_text(text)

    def work(self, core: int, **ticks: int) -> None:
        """Adds ticks to a core, by kind."""
        for kind, number in ticks.items():
            self.ticks[core][KINDS.index(kind)] += number

    def core_times(self) -> list[CoreTimes]:
        """Returns the seconds of all cores, as psutil does."""
        return [CoreTimes(*(each * TICK_SECONDS for each in row)) for row in self.ticks.values()]

    def loadavg(self, runnable: int) -> None:
        self.write("proc/loadavg", f"0.31 0.25 0.21 {runnable}/412 9031\n")

    def memory(self, total: int, available: int) -> None:
        self.bytes = 1024 * total, 1024 * available

    def groups(self, mounts: str, memberships: str) -> None:
        self.write("proc/self/mountinfo", mounts)
        self.write("proc/self/cgroup", memberships)

    def wait(self, seconds: float, own: float) -> None:
        """Lets time pass, in which this process computes."""
        self.seconds += seconds
        self.own += own

    def open_files(self) -> int:
        descriptors = Path("/proc/self/fd").iterdir()
        return sum(self.root in descriptor.resolve().parents for descriptor in descriptors)

    def sampler(self, *names: str) -> ResourceSampler:
        return ResourceSampler(names, host=self.host)


@pytest.fixture(autouse=True)
def no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Hides pynvml; tests of the GPU install a fake one."""
    monkeypatch.setitem(sys.modules, "pynvml", None)  # type: ignore[arg-type]


@pytest.fixture(autouse=True)
def no_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lets samples read all sources that do not block, however slow, and the background none."""
    monkeypatch.setattr(polling, "BUDGET_SECONDS", math.inf)
    monkeypatch.setattr(polling, "PERIOD_SECONDS", 3600.0)
    monkeypatch.setattr(polling, "CLOSE_SECONDS", HANG_SECONDS)


LEFT: list[threading.Thread] = []


@pytest.fixture(autouse=True)
def _threads_before() -> None:
    """Notes the threads of samplers that other tests have left to the garbage collector."""
    LEFT[:] = threading.enumerate()


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    return Machine(tmp_path)


# Names


def test_names_are_fixed_and_in_order(machine: Machine) -> None:
    names = "runnable", "cpu_other_percent"
    assert machine.sampler(*names).names == names
    assert machine.sampler().sample() == ()
    assert set(ResourceSampler.available) == set(DESCRIPTIONS)
    assert set(DESCRIPTIONS) >= {*DEFAULT_NAMES, *DEFAULT_GPU_NAMES}


def test_the_default_is_what_the_machine_provides(machine: Machine) -> None:
    bare = tuple(name for name in DEFAULT_NAMES if name != "throttled_percent")
    assert ResourceSampler(host=machine.host).names == bare
    machine.groups(V2, "0::/job\n")
    usage = "usage_usec 0\nnr_throttled 0\nthrottled_usec 0\n"
    machine.write(f"{CGROUPS}/job/cpu.stat", usage)
    machine.write(f"{CGROUPS}/job/cgroup.type", "domain\n")
    machine.write(f"{CGROUPS}/job/cpu.max", "max 100000\n")
    assert ResourceSampler(host=machine.host).names == DEFAULT_NAMES
    machine.write(f"{CGROUPS}/job/cpu.max", "50000 100000\n")
    assert ResourceSampler(host=machine.host).names == (*DEFAULT_NAMES, *DEFAULT_QUOTA_NAMES)


def test_invalid_arguments_are_named(machine: Machine) -> None:
    with pytest.raises(ValueError, match=r"no driving factor 'cpu_others'.*'cpu_other_percent'"):
        machine.sampler("runnable", "cpu_others")
    with pytest.raises(ValueError, match="no driving factor 'zzz'"):
        machine.sampler("zzz")
    with pytest.raises(ValueError, match="contain a repeated name"):
        machine.sampler("runnable", "runnable")
    with pytest.raises(ValueError, match="gpu must be >= 0, got -1"):
        ResourceSampler(("runnable",), gpu=-1)
    assert ResourceSampler("runnable", host=machine.host).names == ("runnable",)


# Totals of the kernel

CPUACCT = f"{CGROUPS}/cpu,cpuacct"
ROOT1, JOB1 = (V1, "4:cpu,cpuacct:/\n"), (V1, "7:memory:/other\n4:cpu,cpuacct:/job\n0::/\n")
ROOT2, JOB2 = (V2, "0::/\n"), (V2, "0::/job\n")
BIND_MOUNT = V2, "0::/docker/a1\n"  # without a namespace: the mount is our cgroup
NAMESPACE = V2, "0::/../../other\n"  # it shows only its own root
DOCKER = V2.replace(" / /sys", " /docker/a1 /sys")
DOCKER_ROOT, DOCKER_JOB = (DOCKER, "0::/docker/a1\n"), (DOCKER, "0::/docker/a1/job\n")
SPACES = V2.replace("/sys/fs/cgroup", "/a\\040b"), "0::/x y:z\n"
SCHEDSTAT = "version 15\ncpu0 0 0 0 0 0 0 {0} 1 4\ndomain0 ff 1\n" + "".join(
    f"cpu{core} 0 0 0 0 0 0 {text} 123 45\n" for core, text in ((1, "{0}"), (2, 50))
)
USAGES, USAGE1, USAGE2 = "{0} {0} 5 {0}\n", "{}\n", "usage_usec {}\nuser_usec 9\n"
PRECISE = 25.0061728  # 0.5 s of 2 s, and 123,456 ns: finer than ticks
QUOTA1 = "nr_periods 7\nnr_throttled {0}\nthrottled_time {0}\n"
QUOTA2 = "usage_usec 9\nnr_periods 7\nnr_throttled {0}\nthrottled_usec {0}\n"


@pytest.mark.parametrize(
    ("groups", "path", "text", "increase", "factor", "expected"),
    [
        (ROOT1, f"{CPUACCT}/cpuacct.usage_percpu", USAGES, 10**9 + 123_456, "cpu_other", PRECISE),
        (JOB2, "proc/schedstat", SCHEDSTAT, 10**9 + 123_456, "cpu_other", PRECISE),
        (JOB1, f"{CPUACCT}/job/cpuacct.usage", USAGE1, 10**9, "cgroup_other", 25),
        (JOB2, f"{CGROUPS}/job/cpu.stat", USAGE2, 1_000_000, "cgroup_other", 25),
        (ROOT2, f"{CGROUPS}/cpu.stat", USAGE2, 1_000_000, "cgroup_other", 0),  # the machine's
        (JOB1, f"{CPUACCT}/job/cpu.stat", QUOTA1, 500_000_000, "throttled", 25),
        (JOB2, f"{CGROUPS}/job/cpu.stat", QUOTA2, 500_000, "throttled", 25),
        (JOB2, f"{CGROUPS}/cpu.stat", QUOTA2, 500_000, "throttled", 25),  # of an ancestor
        (JOB2, f"{CGROUPS}/other/cpu.stat", QUOTA2, 500_000, "throttled", 0),
        (BIND_MOUNT, f"{CGROUPS}/cpu.stat", QUOTA2, 500_000, "throttled", 25),
        (NAMESPACE, f"{CGROUPS}/cpu.stat", QUOTA2, 500_000, "throttled", 25),
        (DOCKER_JOB, f"{CGROUPS}/job/cpu.stat", QUOTA2, 500_000, "throttled", 25),
        (DOCKER_ROOT, f"{CGROUPS}/cpu.stat", QUOTA2, 500_000, "throttled", 25),
        (SPACES, "a b/x y:z/cpu.stat", QUOTA2, 500_000, "throttled", 25),
    ],
)
def test_totals_become_percents(
    machine: Machine,
    groups: tuple[str, str],
    path: str,
    text: str,
    increase: int,
    factor: str,
    expected: float,
) -> None:
    """2 s pass, for 0.5 s of which this process computes."""
    machine.write(f"{CPUACCT}/release_agent", "")  # of the root alone
    machine.write(f"{CGROUPS}/job/cgroup.type", "domain\n")  # of all others
    machine.write(f"{CGROUPS}/job/cpu.stat", QUOTA2.format(1))
    machine.write(path, text.format(100))
    machine.groups(*groups)
    sampler = machine.sampler(f"{factor}_percent")
    machine.wait(2.0, own=0.5)
    machine.write(path, text.format(100 + increase))
    assert sampler.sample() == (pytest.approx(expected, rel=1e-12),)


def test_the_usage_of_a_container_is_not_that_of_the_machine(machine: Machine) -> None:
    machine.groups(*ROOT1)  # without release_agent
    machine.write(f"{CPUACCT}/cpuacct.usage_percpu", "0 0 0\n")
    sampler = machine.sampler("cpu_other_percent")
    machine.seconds += 2.0
    machine.write(f"{CPUACCT}/cpuacct.usage_percpu", "0 1000000000 0\n")
    assert sampler.sample() == (0.0,)


def test_throttling_of_our_cgroup_and_its_ancestors_adds_up(machine: Machine) -> None:
    for group in ("", "job/"):
        machine.write(f"{CGROUPS}/{group}cpu.stat", QUOTA2.format(7))
    machine.groups(*JOB2)
    sampler = machine.sampler("throttled_percent")
    machine.seconds += 2.0
    for group, microseconds in (("", 200_007), ("job/", 600_007)):
        machine.write(f"{CGROUPS}/{group}cpu.stat", QUOTA2.format(microseconds))
    assert sampler.sample() == (pytest.approx(40.0),)


def test_the_hierarchies_that_may_have_a_controller(machine: Machine) -> None:
    for folder in ("cpu,cpuacct/job", "unified"):
        machine.write(f"{CGROUPS}/{folder}/cgroup.procs", "")
    machine.groups(V1, "7:memory:/other\n4:cpu,cpuacct:/job\n0::/outside/the/mount\n")
    found = hierarchies(machine.host, "cpu")
    mounts = PurePosixPath("/sys/fs/cgroup/cpu,cpuacct"), PurePosixPath("/sys/fs/cgroup/unified")
    assert found == [[(1, mounts[0] / "job"), (1, mounts[0])], [(2, mounts[1])]]
    assert cpu_quotas(machine.host) == []
    for folder, quota in (("cpu,cpuacct/job", -1), ("cpu,cpuacct", 25_000)):
        machine.write(f"{CGROUPS}/{folder}/cpu.cfs_quota_us", f"{quota}\n")
        machine.write(f"{CGROUPS}/{folder}/cpu.cfs_period_us", "50000\n")
    assert cpu_quotas(machine.host) == [0.5]
    machine.groups(V2, "0::/job\n")
    machine.write(f"{CGROUPS}/job/cpu.max", "150000 100000\n")
    machine.write(f"{CGROUPS}/cpu.max", "max 100000\n")
    assert cpu_quotas(machine.host) == [1.5]


# CPU


def test_other_cpu_time_is_that_of_our_cores_minus_our_own(machine: Machine) -> None:
    sampler = machine.sampler("cpu_other_percent", "steal_percent")
    assert sampler.sample() == (0, 0)
    machine.wait(2.0, own=0.5)
    machine.work(1, user=30, nice=20, system=10, irq=5, softirq=5, idle=99, iowait=44, steal=10)
    machine.work(2, user=80, steal=30)
    machine.work(0, user=200, steal=200)  # not one of our cores
    # 1.5 s busy, 0.5 s ours, 0.4 s stolen, in 2 s
    assert sampler.sample() == pytest.approx((50.0, 20.0))
    machine.wait(1.0, own=7.0)
    machine.work(1, user=5000, steal=5000)
    assert sampler.sample() == (200.0, 200.0), "at most all of our cores"


def test_rates_are_means_over_the_freshest_window(machine: Machine) -> None:
    """Samples every 20 ms: the window reaches back to the newest reading at least 50 ms old."""
    sampler = machine.sampler("cpu_other_percent")
    # user: 10 ms of work at 20 and 60 ms; 20 ms at 80 ms
    for user, expected in ((1, 0), (0, 0), (1, 200 / 6), (2, 50), (0, 50), (0, 200 / 6)):
        machine.seconds += 0.02
        machine.work(1, user=user)
        assert sampler.sample() == (pytest.approx(expected),)


def test_the_background_reads_the_start_of_a_window(machine: Machine) -> None:
    """A neighbour that starts in the last 0.2 s of a step of 3 s: the mean would be 6 %."""
    with machine.sampler("cpu_other_percent") as sampler:
        [counted] = sampler._polling._background
        machine.seconds += 2.8
        counted.refresh()
        machine.work(1, user=20)
        machine.seconds += 0.2
        assert sampler.sample() == (pytest.approx(100),)


def test_a_counter_that_restarts_keeps_the_value(machine: Machine) -> None:
    sampler = machine.sampler("cpu_other_percent", "steal_percent")
    machine.seconds += 1.0
    machine.work(1, user=50, steal=20)
    assert sampler.sample() == pytest.approx((50.0, 20.0))
    machine.seconds += 1.0
    machine.work(1, user=-40, steal=-15)
    assert sampler.sample()[1] == pytest.approx(20.0)
    machine.seconds += 1.0
    machine.work(1, user=10, steal=10)
    assert sampler.sample() == pytest.approx((10.0, 10.0))


def test_cores_that_are_or_go_offline(machine: Machine, caplog: pytest.LogCaptureFixture) -> None:
    del machine.ticks[0]
    machine.write("proc/stat", "cpu  9 9 9\ncpu1 1 1 1\ncpu2 1 1 1\ncpu3 1 1 1\nintr 7\n")
    sampler = machine.sampler("cpu_other_percent")
    machine.seconds += 1.0
    machine.work(1, user=50)
    machine.work(3, user=90)  # not ours
    assert sampler.sample() == (50.0,)
    del machine.ticks[1]
    for _ in range(3):
        machine.seconds += 1.0
        machine.work(2, user=5)
        assert sampler.sample() == (50.0,)
    assert [r.levelno for r in caplog.records] == [logging.WARNING]


@given(st.lists(st.tuples(st.integers(0, 300), st.integers(0, 300)), min_size=1, max_size=60))
def test_rounding_to_ticks_neither_adds_nor_loses(steps: list[tuple[int, int]]) -> None:
    """Takes milliseconds of us and of others on one core; the kernel counts ticks of the sum."""
    others, ours, theirs = OtherCpuTime(cores=1), 0, 0
    others.seconds(0.0, 0.0)
    for own_ms, other_ms in steps:
        ours, theirs = ours + own_ms, theirs + other_ms
        seconds = others.seconds((ours + theirs) // 10 / 100, ours / 1000)
        assert abs(seconds - theirs / 1000) <= 0.01 + 1e-9


def test_threads_of_ours_on_other_cores_do_not_hide_others() -> None:
    others = OtherCpuTime(cores=1)
    others.seconds(0.0, 0.0)
    assert others.seconds(1.0, 50.0) == 0.0  # 49 s on cores that are not counted
    assert others.seconds(2.0, 50.0) == pytest.approx(0.98)  # less two ticks


def test_time_may_stand_still_or_go_back(machine: Machine) -> None:
    machine.work(1, steal=1000)
    sampler = machine.sampler("steal_percent")
    for ticks, seconds, expected in (
        (7, 0.25, 28), (0, 0.5, 0), (10, 1.0, 10), (5, 0.0, 10), (5, 1.0, 10), (8, -5.0, 10),
        (6, 2.0, 3),
    ):  # fmt: skip
        machine.seconds += seconds
        machine.work(1, steal=ticks)
        assert sampler.sample() == (pytest.approx(expected),)


# Runnable tasks


def test_runnable_is_the_current_value(machine: Machine) -> None:
    sampler = machine.sampler("runnable")
    for runnable in (3, 1, 250):
        machine.loadavg(runnable)
        assert sampler.sample() == (runnable,)


# Memory


def test_memory_of_the_machine(machine: Machine) -> None:
    sampler = machine.sampler("memory_percent")
    assert sampler.sample() == (25.0,)
    machine.memory(total=1000, available=100)
    machine.seconds += 0.4
    assert sampler.sample() == (25.0,), "it is read twice a second"
    machine.seconds += 0.4
    assert sampler.sample() == (pytest.approx(90.0),)


MEMORY1 = V1, "7:memory:/pod/job\n4:cpu,cpuacct:/\n0::/\n"
NAMES1 = "limit_in_bytes", "usage_in_bytes", "total_inactive_file"


@pytest.mark.parametrize(
    ("groups", "folder", "names", "unlimited"),
    [
        (MEMORY1, f"{CGROUPS}/memory", NAMES1, 2**63 - 4096),
        ((V2, "0::/pod/job\n"), CGROUPS, ("max", "current", "inactive_file"), "max"),
    ],
    ids=["version 1", "version 2"],
)
def test_memory_under_the_lowest_limit(
    machine: Machine, groups: tuple[str, str], folder: str, names: tuple[str, ...], unlimited: Any
) -> None:
    machine.groups(*groups)
    limit, used, cache = names
    for group, most, bytes_used in (
        ("/pod", 512_000, 400_000), ("/pod/job", 900_000, 100_000), ("", unlimited, 1),
    ):  # fmt: skip
        machine.write(f"{folder}{group}/memory.{limit}", f"{most}\n")
        machine.write(f"{folder}{group}/memory.{used}", f"{bytes_used}\n")
        machine.write(f"{folder}{group}/memory.stat", f"anon 5\n{cache} 16000\nfile 3\n")
    sampler = machine.sampler("memory_percent")
    assert sampler.sample() == (75.0,)
    machine.memory(total=1000, available=100)
    machine.seconds += 1.0
    assert sampler.sample() == (pytest.approx(90.0),), "the larger one, of machine and cgroup"


# Failures


def test_an_unreadable_source_keeps_its_value_and_warns_once(
    machine: Machine, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    sampler = machine.sampler("runnable", "steal_percent")
    machine.loadavg(5)
    assert sampler.sample() == (5, 0)
    machine.write("proc/loadavg", "")
    for _ in range(3):
        machine.seconds += 1.0
        machine.work(1, steal=9)
        assert sampler.sample() == pytest.approx((5, 9))
    machine.loadavg(2)
    assert sampler.sample()[0] == 2, "the file is readable again"

    def gone(*_: object) -> bytes:
        raise OSError(19, "No such device")

    monkeypatch.setattr(os, "pread", gone)
    assert sampler.sample()[0] == 2
    (message,) = caplog.messages
    assert message.startswith("runnable cannot be read any more and ")


def test_a_machine_without_sources(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    caplog.set_level(logging.INFO)

    def unknown() -> NoReturn:
        raise OSError("it is unknown here")

    monkeypatch.setattr(psutil, "getloadavg", unknown)
    unknowns = dict.fromkeys(("memory", "core_times"), unknown)
    host = Host(root=tmp_path, environ={}, clock=itertools.count().__next__, **unknowns)
    with ResourceSampler(tuple(DESCRIPTIONS), host=host) as sampler:
        assert set(sampler.sample()) == {0.0}
    assert len(caplog.records) == len(SOURCES), "one message per source"
    assert "The driving factors gpu_percent, gpu_memory_percent are unavailable" in caplog.text
    with ResourceSampler(host=host) as sampler:
        assert sampler.names == ()


def test_garbled_files_count_as_missing(machine: Machine) -> None:
    machine.bytes = ()  # type: ignore[assignment]
    for path in ("loadavg", "self/cgroup", "self/mountinfo"):
        machine.write(f"proc/{path}", "not\nthe format\n")
    with machine.sampler(*DESCRIPTIONS) as sampler:
        assert set(sampler.sample()) == {0.0}
    machine.write("proc/self/mountinfo", "")
    assert cpu_quotas(machine.host) == []


@given(st.lists(st.tuples(st.floats(), st.floats(), st.floats()), max_size=12))
def test_values_are_finite_and_bounded(readings: list[tuple[float, float, float]]) -> None:
    factors = (Factor("runnable", 50.0), Factor("steal_percent", 200.0, is_total=True))
    meter = Meter(factors, (0.0, (math.nan, math.nan)), ["runnable", "steal_percent"])
    for seconds, level, total in readings:
        meter.add((seconds, (level, total)))
        values = meter.values()
        assert 0 <= values["runnable"] <= 50
        assert 0 <= values["steal_percent"] <= 200


# Other platforms


def test_psutil_where_there_is_no_proc(tmp_path: Path) -> None:
    seconds = itertools.count().__next__  # each look at the clock takes a second
    host = Host(root=tmp_path / "none", environ={"CUDA_VISIBLE_DEVICES": "-1"}, clock=seconds)
    with ResourceSampler(tuple(DESCRIPTIONS), host=host) as sampler:
        values = dict(zip(sampler.names, sampler.sample(), strict=True))
    assert 0 < values["memory_percent"] < 100
    assert values["throttled_percent"] == 0.0
    times = namedtuple("times", "user nice system idle")  # as on macOS
    macos = replace(host, core_times=lambda: [times(1, 2, 3, 4)], cores=frozenset({0}))
    with ResourceSampler(host=macos) as sampler:
        assert sampler.names == ("cpu_other_percent", "runnable", "memory_percent")


# GPU


class FakeNvml:
    """Fake of the part of pynvml that is used, with a given number of devices."""

    class NVMLError(Exception):
        pass

    def __init__(self, devices: int, mig: bool = False) -> None:
        self.devices, self.mig, self.opened = devices, mig, 0
        self.use = [10 * index for index in range(devices)]

    def nvmlInit(self) -> None:  # noqa: N802
        if not self.devices:
            raise self.NVMLError("Driver Not Loaded")
        self.opened += 1

    def nvmlShutdown(self) -> None:  # noqa: N802
        self.opened -= 1

    def nvmlDeviceGetHandleByIndex(self, index: int) -> int:  # noqa: N802
        if index >= self.devices:
            raise self.NVMLError("Invalid Argument")
        return index

    def nvmlDeviceGetHandleByUUID(self, uuid: str) -> int:  # noqa: N802
        return int(uuid.removeprefix("GPU-").removeprefix("MIG-"))

    def nvmlSystemGetDriverVersion(self) -> bytes:  # noqa: N802
        if self.mig:
            raise self.NVMLError("Unknown Error")
        return b"570.86.10"

    def nvmlDeviceGetUtilizationRates(self, device: int) -> SimpleNamespace:  # noqa: N802
        if self.mig:
            raise self.NVMLError("Not Supported")
        return SimpleNamespace(gpu=self.use[device], memory=99)

    def nvmlDeviceGetMemoryInfo(self, device: int) -> SimpleNamespace:  # noqa: N802
        return SimpleNamespace(total=200, used=50 + device, free=150 - device)


@pytest.fixture
def nvml(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., FakeNvml]]:
    made = []

    def install(devices: int, mig: bool = False) -> FakeNvml:
        made.append(FakeNvml(devices, mig))
        monkeypatch.setitem(sys.modules, "pynvml", made[-1])  # type: ignore[arg-type]
        return made[-1]

    yield install
    assert [fake.opened for fake in made] == [0] * len(made), "each nvmlInit has its nvmlShutdown"


def test_the_version_of_the_driver_is_empty_where_it_is_unknown(
    nvml: Callable[..., FakeNvml],
) -> None:
    assert driver_version() == ""  # without nvidia-ml-py
    nvml(0)
    assert driver_version() == ""  # without a driver
    nvml(1)
    assert driver_version() == "570.86.10"
    nvml(1, mig=True)
    assert driver_version() == ""


@pytest.mark.parametrize(
    ("visible", "index", "device"),
    [(None, 0, 0), (None, 2, 2), ("3,1", 0, 3), ("3, 1", 1, 1), ("GPU-2", 0, 2), ("0,MIG-1", 1, 1)],
)
def test_the_gpu_is_the_one_that_cuda_uses(
    nvml: Callable[..., FakeNvml], machine: Machine, visible: str | None, index: int, device: int
) -> None:
    nvml(4)
    environ = {} if visible is None else {"CUDA_VISIBLE_DEVICES": visible}
    host = replace(machine.host, environ=environ)
    with ResourceSampler(gpu=index, host=host) as sampler:
        assert sampler.names[-2:] == DEFAULT_GPU_NAMES
        assert sampler.sample()[-2:] == (10.0 * device, 100 * (50 + device) / 200)


@pytest.mark.parametrize(
    ("devices", "visible"), [(0, "0"), (1, ""), (1, "-1"), (1, "5"), (1, "none")]
)
def test_no_gpu_is_no_error(
    nvml: Callable[..., FakeNvml], machine: Machine, devices: int, visible: str
) -> None:
    nvml(devices)
    host = replace(machine.host, environ={"CUDA_VISIBLE_DEVICES": visible})
    with ResourceSampler(DEFAULT_GPU_NAMES, host=host) as sampler:
        assert sampler.sample() == (0.0, 0.0)
    with ResourceSampler(host=host) as sampler:
        assert not {*DEFAULT_GPU_NAMES} & {*sampler.names}


def test_a_mig_instance_has_memory_only(nvml: Callable[..., FakeNvml], machine: Machine) -> None:
    nvml(1, mig=True)
    with machine.sampler(*DEFAULT_GPU_NAMES) as sampler:
        assert sampler.sample() == (0.0, 25.0)


def test_a_driver_that_hangs_does_not_block_a_sample(
    nvml: Callable[..., FakeNvml], monkeypatch: pytest.MonkeyPatch
) -> None:
    fake = nvml(1)
    asked, released = threading.Event(), threading.Event()

    def hang(_: int) -> SimpleNamespace:
        asked.set()
        assert released.wait(HANG_SECONDS)
        return SimpleNamespace(total=2, used=1)

    monkeypatch.setattr(polling, "PERIOD_SECONDS", 0.005)
    with ResourceSampler(("gpu_percent",), host=Host(environ={})) as sampler:
        fake.nvmlDeviceGetMemoryInfo = hang  # type: ignore[method-assign]
        assert asked.wait(HANG_SECONDS)
        fake.use[0] = 70
        assert sampler.sample() == (0.0,), "the driver has not answered yet"
        released.set()
        until(lambda: sampler.sample() == (70.0,))
    assert polling_threads() == 0, "no thread reads the driver after close"


# Slow sources, threads, forks, files


def polled(machine: Machine, microseconds: int, may_block: bool = False) -> polling.PolledSource:
    """Returns a source whose readings take a given time on the fake clock."""

    def read() -> tuple[float, ...]:
        machine.seconds += microseconds / 1e6
        return (1.0,)

    source = Source((Factor("runnable", 1e5),), read, 0.0, may_block)
    return polling.PolledSource(source, machine.host, ())


def test_the_slowest_and_those_that_may_block_go_to_the_background(
    machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    blocking, other = polled(machine, 1, may_block=True), polled(machine, 2)
    assert polling.split([blocking, other]) == ([other], [blocking])
    monkeypatch.setattr(polling, "BUDGET_SECONDS", 100e-6)
    sources = [polled(machine, microseconds) for microseconds in (50, 1000, 20, 29, 2)]
    foreground, background = polling.split(sources)
    assert [round(source.read_seconds * 1e6) for source in foreground] == [2, 20, 29]
    assert [round(source.read_seconds * 1e6) for source in background] == [50, 1000]


def polling_threads() -> int:
    started = [thread.name for thread in threading.enumerate() if thread not in LEFT]
    return started.count("lbbsp-resources")


def test_the_background_keeps_reading(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(polling, "BUDGET_SECONDS", -1.0)
    monkeypatch.setattr(polling, "PERIOD_SECONDS", 0.005)
    with machine.sampler("runnable") as sampler:
        machine.loadavg(77)
        until(lambda: sampler.sample() == (77,))
        assert polling_threads() == 1
    assert polling_threads() == 0


def test_after_close_the_last_sample_stays(
    machine: Machine, caplog: pytest.LogCaptureFixture
) -> None:
    sampler = machine.sampler("steal_percent", "runnable")
    sampler.close()
    machine.seconds += 1.0
    machine.work(1, steal=5)
    machine.loadavg(9)
    assert sampler.sample() == (0.0, 1.0)
    assert not caplog.records
    sampler.close()


@linux
def test_files_are_closed_and_threads_end(machine: Machine) -> None:
    for _ in range(5):
        with machine.sampler(*DESCRIPTIONS) as sampler:
            sampler.sample()
            assert machine.open_files() > 0
            assert polling_threads() == 1
        assert (machine.open_files(), polling_threads()) == (0, 0)
        machine.sampler(*DESCRIPTIONS).sample()  # dropped without close
        assert (machine.open_files(), polling_threads()) == (0, 0)


def test_many_threads_may_sample(machine: Machine) -> None:
    found: list[tuple[float, ...]] = []
    with machine.sampler("runnable", "memory_percent") as sampler:
        threads = [
            threading.Thread(target=lambda: found.extend(sampler.sample() for _ in range(50)))
            for _ in range(4)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert found == [(1.0, 25.0)] * 200


FORK = """
import os, signal, sys
from lbbsp_core import ResourceSampler
from lbbsp_core.resources import polling
from lbbsp_core.resources.host import Host
polling.BUDGET_SECONDS = 0.0  # by the thread alone, which a child does not have
host = Host(process_seconds=lambda: 0.0)  # our own time counts as that of others
sampler = ResourceSampler(("cpu_other_percent", "runnable"), host=host)
child = os.fork()
if not child:
    signal.alarm(int(sys.argv[1]))  # it must not outlive a test that fails
    files = len(os.listdir("/proc/self/fd"))
    while not sampler.sample()[0]: pass
    assert len(os.listdir("/proc/self/fd")) == files, "the parent's files are closed"
    os._exit(0)
assert os.waitpid(child, 0)[1] == 0
"""


@pytest.mark.slow
@linux
def test_a_forked_child_opens_its_own_sources() -> None:
    command = [sys.executable, "-c", FORK, f"{HANG_SECONDS:.0f}"]
    subprocess.run(command, check=True, timeout=HANG_SECONDS)


# The real machine, which may be busy with other work

BURN = """
import os, sys, time
os.sched_setaffinity(0, {int(sys.argv[1])})
while time.process_time() < 0.3: pass
print(time.process_time())
"""


@pytest.mark.slow
@linux
def test_the_kernel_counts_our_neighbours() -> None:
    """Whatever else runs on our core adds to the neighbour; ticks are a sample of its time."""
    core, seconds = min(os.sched_getaffinity(0)), 0.0
    host = Host(cores=frozenset({core}), clock=lambda: seconds, environ={})
    with ResourceSampler(("cpu_other_percent", "runnable"), host=host) as sampler:
        burn = [sys.executable, "-c", BURN, str(core)]
        burned = float(subprocess.check_output(burn, timeout=HANG_SECONDS))
        seconds = 10.0
        other_percent, runnable = sampler.sample()
    assert other_percent * seconds / 100 > burned / 2
    assert runnable >= 1


SPIN = """
import os, sys
from lbbsp_core import ResourceSampler
from lbbsp_core.resources import polling
polling.BUDGET_SECONDS = float("inf")
with open(sys.argv[1] + "/cgroup.procs", "w") as procs:
    procs.write(str(os.getpid()))
with ResourceSampler(("throttled_percent",)) as sampler:
    while not sampler.sample()[0]: pass
    os._exit(0)  # at this quota a regular exit takes a second
"""


@pytest.mark.slow
@linux
def test_a_quota_is_seen() -> None:
    """Spins under a quota of 20 % of a core until the process has been throttled."""
    groups = open_quotas([0.2], period_us=100_000)
    if groups is None:
        pytest.skip("no cgroup can be created on this machine")
    try:
        command = [sys.executable, "-c", SPIN, str(groups.cgroups()[0])]
        subprocess.run(command, check=True, timeout=HANG_SECONDS)
    finally:
        groups.close()
