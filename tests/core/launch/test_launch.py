"""Parts of the launcher that start no process."""

import math
from pathlib import Path
from random import Random
from signal import SIGCONT

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lbbsp_core.launch import cluster, launch, throttle
from lbbsp_core.launch.cluster import KEEP_FREED_MEMORY, allocator_defaults, free_ports, job_spec
from lbbsp_core.launch.cpu_shares import MAX_LOAD, MAX_SHARE, period_us, quota_us, schedule
from lbbsp_core.launch.throttle import CpuQuotas, remove_leftovers, windows
from lbbsp_core.processes.child import Exited

steady = settings(derandomize=True, deadline=None, max_examples=100)
some_speeds = st.lists(st.floats(0.2, 20.0), min_size=1, max_size=8)
some_cores = st.floats(1.0, 64.0)


@steady
@given(some_speeds, some_cores)
def test_quotas_are_proportional_to_speeds_and_leave_the_machine_air(speeds, cores):
    plan = schedule(speeds, [], workers=len(speeds), cores=cores)
    shares = plan.stages[0].shares
    quotas = [quota_us(share, plan.period_us) / plan.period_us for share in shares]
    for speed, quota in zip(speeds, quotas, strict=True):
        assert quota / quotas[0] == pytest.approx(speed / speeds[0], rel=2e-3)
    assert max(quotas) <= MAX_SHARE * 1.001
    assert sum(quotas) <= MAX_LOAD * cores * 1.001
    busiest = max(max(quotas) / MAX_SHARE, sum(quotas) / (MAX_LOAD * cores))
    assert busiest == pytest.approx(1.0, rel=2e-3)  # and no slower than necessary
    assert plan.period_us <= 1_000_000
    assert min(shares) * plan.period_us >= 999.9  # the kernel takes no smaller quota


@pytest.mark.parametrize(
    ("share", "period"),
    [(0.95, 10_000), (0.2, 10_000), (0.1, 10_000), (0.08, 12_500), (0.05, 20_000)],
)
def test_period(share, period):
    assert period_us(share) == period


def test_slowing_one_worker_leaves_the_others_as_they_were():
    plan = schedule([1, 1, 1], [(20, [1, 1, 1]), (10, [0.5, 1, 1])], workers=3, cores=2)
    assert [stage.seconds for stage in plan.stages] == [0, 10, 20]
    assert plan.stages[0].shares == pytest.approx((0.6, 0.6, 0.6))
    assert plan.stages[1].shares == pytest.approx((0.3, 0.6, 0.6))


def test_a_later_stage_may_not_exceed_the_machine_either():
    plan = schedule([0.1, 0.1], [(1, [1, 1])], workers=2, cores=1)
    assert plan.stages[1].shares == pytest.approx((0.45, 0.45))
    assert plan.stages[0].shares == pytest.approx((0.045, 0.045))


@steady
@given(some_speeds, st.integers(1, 8), st.integers(0, 996))
def test_duty_cycle_runs_no_more_workers_at_once_than_there_are_cores(speeds, cores, tick):
    phase = tick / 997
    shares = schedule(speeds, [], workers=len(speeds), cores=cores).stages[0].shares
    assert sum(window.contains(phase) for window in windows(shares)) <= cores
    for window, share in zip(windows(shares), shares, strict=True):
        edge = window.next_edge(phase)
        assert 0 <= edge <= (share if window.contains(phase) else 1 - share) + 1e-9
        if edge > 1e-9:  # otherwise the result depends on rounding
            assert window.contains(phase + edge / 2) == window.contains(phase)
            assert window.contains(phase + edge + 1e-9) != window.contains(phase)


@pytest.mark.parametrize("late", [0.0, 0.15, 0.4])
def test_duty_cycle_keeps_the_shares_though_signals_go_out_late(monkeypatch, late):
    """Runs three workers on two cores; every switch is up to ``late`` cycles late."""
    random, ran, runs = Random(7), [0.0] * 3, dict.fromkeys(range(3), True)
    monkeypatch.setattr(
        throttle, "signal_group", lambda rank, what: runs.update({rank: what == SIGCONT})
    )
    cycle, clock = throttle.DutyCycle([0.475, 0.19, 0.95]), 100.0
    for rank in range(3):
        cycle.attach(rank, rank)

    def run(cycles):
        nonlocal clock
        ran[:], end = [0.0] * 3, clock + cycles
        while clock < end:
            passed = cycle.switch(clock) + random.random() * late
            clock += passed
            for rank in runs:
                ran[rank] += passed * runs[rank] / cycles

    run(1)  # the debt starts at 0
    for shares in [0.475, 0.19, 0.95], [0.2375, 0.475, 0.9]:
        cycle.apply(shares)
        run(400)
        assert ran == pytest.approx(shares, abs=0.01)


def test_duty_cycle_does_not_make_good_a_long_stall(monkeypatch):
    sent = []
    monkeypatch.setattr(throttle, "signal_group", lambda rank, what: sent.append(what == SIGCONT))
    cycle = throttle.DutyCycle([0.5])
    cycle.attach(0, 0)
    cycle.switch(10.0)
    cycle.switch(30.0)  # twenty cycles late
    assert sent == [False], "it ran too long"
    pauses = [cycle.switch(30.0 + quarter / 4) for quarter in range(1, 8)]
    assert sent == [False]
    cycle.switch(32.0)
    assert sent == [False, True], "its debt is limited to one cycle, and its share is half a cycle"
    assert all(0 < pause <= 1 for pause in pauses)


@pytest.mark.parametrize(
    ("emulation", "is_writable", "slowest", "said"),
    [
        ("auto", True, 0.5, ""),
        ("auto", True, 0.05, "the quota period is 21.053 ms"),
        ("auto", False, 0.5, "20 ms, which is coarser than CPU quotas, because cgroups are not"),
        ("duty-cycle", True, 0.5, "by stopping and continuing the workers every 20 ms"),
    ],
)
def test_quotas_where_they_are_permitted_and_else_a_duty_cycle(
    monkeypatch, emulation, is_writable, slowest, said
):
    quotas = throttle.Throttle() if is_writable else None
    monkeypatch.setattr(throttle, "open_quotas", lambda *_: quotas)
    plan, heard = schedule([1, slowest], [], workers=2, cores=2), []
    made = throttle.create_throttle(plan, emulation, heard.append, contended=False)
    made.close()
    assert isinstance(made, throttle.DutyCycle) == ("coarser" in "".join(heard))
    assert said in "".join(heard)
    assert bool(said) == bool(heard)


@pytest.mark.parametrize(
    ("emulation", "contended", "message"),
    [
        ("cgroup", False, "must not be 'cgroup' where the cpu controller is not writable"),
        ("auto", True, "contention needs CPU quotas where speeds are emulated"),
        ("magic", False, "there is no emulation 'magic'. Known names: auto"),
    ],
)
def test_emulation_that_needs_quotas(monkeypatch, emulation, contended, message):
    monkeypatch.setattr(throttle, "open_quotas", lambda *_: None)
    plan = schedule([1, 1], [], workers=2, cores=2)
    with pytest.raises(ValueError, match=message):
        throttle.create_throttle(plan, emulation, print, contended=contended)


@pytest.mark.parametrize(
    ("speeds", "message"),
    [
        ([1, 1], r"one value per worker = 3, got 2 .*give 3 speeds"),
        ([1, 1, 0], r"got 0.0 for worker 2: give"),
        ([1, -2, 1], r"got -2.0 for worker 1"),
        ([math.nan, 1, 1], r"got nan for worker 0"),
        ([1, math.inf, 1], r"got inf for worker 1"),
        ([1e308, 1e308, 1], r"between 1e-12 and 1e12, got 1e\+308 for worker 0"),
        ([1, 1e-320, 1], r"got 1e-320 for worker 1"),
        ([1, 1, 1e-5], r"bring the speeds closer together"),
    ],
)
def test_impossible_speeds(speeds, message):
    with pytest.raises(ValueError, match=message):
        launch([__file__], workers=3, speeds=speeds)
    with pytest.raises(ValueError, match=message):
        launch([__file__], workers=3, speeds=[1, 1, 1], speeds_at=[(3, speeds)])


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"command": []}, "command must be a script and its arguments"),
        ({"command": "train.py"}, "command must be a script and its arguments"),
        ({"workers": 0}, r"workers must be an integer >= 1, got 0"),
        ({"timeout": 0}, r"timeout must be a positive .* got 0"),
        ({"timeout": math.nan}, r"timeout .* got nan"),
        (
            {"framework": "jax"},
            "there is no framework 'jax'. Known names: tensorflow, mxnet, torch",
        ),
        ({"speeds_at": [(1, [1, 1])]}, r"needs the speeds at the start"),
        ({"speeds": [1, 1], "speeds_at": [(-1, [1, 1])]}, r"got -1"),
        ({"speeds": [1, 1], "speeds_at": [(math.nan, [1, 1])]}, r"got nan"),
        ({"framework": "mxnet", "servers": 0}, "servers must be an integer >= 1, got 0$"),
        ({"framework": "mxnet", "servers": 1.5}, "servers must be an integer >= 1, got 1.5"),
        ({"servers": 1}, "must be omitted for tensorflow, got 1: .* needs --framework mxnet"),
        ({"framework": "torch", "servers": 1}, "must be omitted for torch, got 1: .* mxnet"),
        ({"max_restarts": -1}, "max_restarts must be an integer >= 0, got -1"),
        ({"max_restarts": 1.5}, "got 1.5"),
        ({"max_restarts": 1, "elastic": 0}, "elastic must be .* = 2, got 0"),
        ({"max_restarts": 1, "elastic": 3}, "elastic must be .* = 2, got 3"),
        ({"elastic": 1}, "give max_restarts >= 1 as well"),
        ({"grace": -1}, "grace must be .* got -1"),
        ({"grace": math.nan}, "grace must be .* got nan"),
        ({"ranks": [0, 2]}, "ranks must be from 0 to 1, got 2"),
    ],
)
def test_impossible_arguments(arguments, message):
    with pytest.raises(ValueError, match=message):
        launch(**{"command": [__file__], "workers": 2, **arguments})


def test_ports_differ_and_are_free():
    ports = free_ports(50)
    assert len(set(ports)) == 50
    assert all(1024 <= port < 65536 for port in ports)


def test_mxnet_gets_a_scheduler_servers_and_workers_in_the_order_of_their_ports():
    made = job_spec("mxnet", 3, emulated=False, run_dir=None, servers=2)
    assert [(h.name, h.environment["DMLC_ROLE"], h.command[1]) for h in made.helpers] == [
        ("scheduler", "scheduler", "lbbsp_mx.server"),
        ("server 0", "server", "lbbsp_mx.server"),
        ("server 1", "server", "lbbsp_mx.server"),
    ]
    ports = [int(worker["PORT"]) for worker in made.workers]
    assert ports == sorted(set(ports))
    assert "PORT" not in made.helpers[0].environment, "the scheduler has the root port"
    one = job_spec("mxnet", 1, emulated=False, run_dir=None)
    assert [helper.name for helper in one.helpers] == ["scheduler", "server 0"]


def test_emulated_workers_compute_in_one_thread_and_without_gpu(monkeypatch):
    for name in ("CUDA_VISIBLE_DEVICES", "TF_NUM_INTRAOP_THREADS", "TF_CPP_MIN_LOG_LEVEL"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("TF_CONFIG", "of another cluster")
    (slow,) = job_spec("tensorflow", 1, emulated=True, run_dir=Path("here")).workers
    (free,) = job_spec("tensorflow", 1, emulated=False, run_dir=None).workers
    assert slow["CUDA_VISIBLE_DEVICES"] == "-1"
    assert slow["TF_NUM_INTRAOP_THREADS"] == slow["MKL_NUM_THREADS"] == "1"
    assert slow["TF_CONFIG"] != "of another cluster"
    assert slow["LBBSP_RUN_DIR"] == str(Path.cwd() / "here")
    assert not {"CUDA_VISIBLE_DEVICES", "TF_NUM_INTRAOP_THREADS", "LBBSP_RUN_DIR"} & set(free)
    assert free["TF_CPP_MIN_LOG_LEVEL"] == slow["TF_CPP_MIN_LOG_LEVEL"] == "2"
    users = {"CUDA_VISIBLE_DEVICES": "0", "OMP_NUM_THREADS": "7"}
    for name, value in users.items():
        monkeypatch.setenv(name, value)
    (kept,) = job_spec("tensorflow", 1, emulated=True, run_dir=None).workers
    assert kept.items() >= users.items()


def test_workers_without_a_gpu_keep_freed_memory(tmp_path, monkeypatch):
    monkeypatch.setattr(cluster, "GPU_DEVICES", (tmp_path / "other", tmp_path / "driver"))
    assert allocator_defaults({}) == KEEP_FREED_MEMORY
    (tmp_path / "driver").touch()
    assert not allocator_defaults({})
    assert not allocator_defaults({"CUDA_VISIBLE_DEVICES": "0"})
    for hidden in ("", "-1"):
        assert allocator_defaults({"CUDA_VISIBLE_DEVICES": hidden}) == KEEP_FREED_MEMORY
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    job = job_spec("mxnet", 1, emulated=True, run_dir=None)  # emulation hides the GPUs
    for environment in (*job.workers, *(helper.environment for helper in job.helpers)):
        assert environment.items() >= KEEP_FREED_MEMORY.items()
        assert environment["MALLOC_ARENA_MAX"] == "1"


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("MALLOC_TOP_PAD_", "131072"),
        ("MALLOC_MMAP_THRESHOLD_", "1048576"),
        ("GLIBC_TUNABLES", "glibc.pthread.rseq=0:glibc.malloc.trim_threshold=1048576"),
    ],
)
def test_the_users_own_tuning_of_the_allocator_replaces_ours(monkeypatch, name, value):
    monkeypatch.setenv(name, value)
    (worker,) = job_spec("tensorflow", 1, emulated=True, run_dir=None).workers
    assert worker[name] == value
    assert not (KEEP_FREED_MEMORY.keys() - {name}) & worker.keys()


def test_quota_files_of_both_versions(tmp_path):
    one, two = CpuQuotas(1, [tmp_path], 2, 5_000), CpuQuotas(2, [tmp_path], 2, 8_000)
    one.create([0.95, 0.4])
    two.create([0.5, 0.125])
    one.apply([0.2, 0.4])
    two.release(0)
    two.apply([0.25, 0.25])  # never again for worker 0
    assert (one.cgroups()[0] / "cpu.cfs_period_us").read_text() == "5000"
    assert [(g / "cpu.cfs_quota_us").read_text() for g in one.cgroups()] == ["1000", "2000"]
    assert [(g / "cpu.max").read_text() for g in two.cgroups()] == ["max 8000", "2000 8000"]
    one.release(0)
    assert (one.cgroups()[0] / "cpu.cfs_quota_us").read_text() == "-1"


def test_leftovers_of_dead_launchers_only(tmp_path):
    dead, alive = tmp_path / "lbbsp-99999999-0a-0", tmp_path / "lbbsp-1-0a-0"
    busy, other = tmp_path / "lbbsp-99999999-0b-0", tmp_path / "lbbsp-service"
    for group in (dead, alive, busy, other):
        group.mkdir()
    (busy / "something").touch()
    remove_leftovers(tmp_path)
    assert not dead.exists()
    assert alive.exists() and busy.exists() and other.exists()  # noqa: PT018


def test_how_a_worker_ended_in_words_and_as_a_status():
    assert str(Exited(2, 3, "worker 2")) == "worker 2 failed with exit status 3"
    assert str(Exited(1, -9, "worker 1")) == "worker 1 was ended by SIGKILL"
    assert (Exited(0, 3, "worker 0").status, Exited(0, -9, "worker 0").status) == (3, 137)
