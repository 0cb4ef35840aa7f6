"""Views of a record that grows: what is read, over restarts, and what cannot be."""

import json
import os
from dataclasses import replace

import pytest
import report_runs

from lbbsp_core.report.live import LiveRun, Tail
from lbbsp_core.runtime.record.figures import RECENT, figures_of
from lbbsp_core.runtime.record.json_lines import to_json
from lbbsp_core.runtime.record.record import PushLine
from lbbsp_core.runtime.record.writer import RunRecord

BUSY = (0.1, 0.4)


def line(step, sizes=(8, 8), busy=BUSY, **changes):
    made = report_runs.line(step, sizes, busy, 0.5, time=1e9 + step)
    return replace(made, **{"predicted_seconds": (0.05, None), **changes})


def write(path, *lines, workers=2, **facts):
    record = RunRecord(path, report_runs.header(workers, 16, started=1e9 - 5, **facts))
    for each in lines:
        record.write(each)
    record.close()


def test_a_view_names_who_waits_for_whom(tmp_path):
    path = tmp_path / "run.jsonl"
    run = LiveRun(tmp_path)
    assert not run.read()
    steps = [line(0, excluded=(0,)), *(line(step) for step in range(1, 5))]
    write(path, *steps, hosts=("a", "b"), devices=("cpu", "gpu"))
    assert run.read()
    view = run.view(1e9 + 7)
    fast, slow = view.workers
    assert (fast.host, fast.device, fast.batch_size) == ("a", "cpu", 8)
    assert (fast.waiting_seconds, fast.waiting) == pytest.approx((0.3, 0.3 / 0.5))
    assert (slow.waiting_seconds, slow.waiting, slow.host) == (0, 0, "b")
    assert (fast.prediction, slow.prediction) == (pytest.approx(0.5), None)
    assert (view.slowest, view.step, view.restarts, view.unreadable) == (1, 4, 0, 0)
    assert view.recent == view.so_far == pytest.approx(figures_of(steps[1:]))
    assert (view.steps_per_second, view.samples_per_second) == pytest.approx((2, 32))
    assert (view.age_seconds, view.elapsed_seconds) == (3, 9)
    assert json.loads(json.dumps(view.to_json()))["recent"]["waiting"] == pytest.approx(0.3)


def test_a_long_record_is_summed_up_and_only_its_end_is_shown(tmp_path):
    even, balanced = line(0), line(0, (12, 4), (0.2, 0.2))
    steps = [replace(even if k < 100 else balanced, step=k) for k in range(200)]
    write(tmp_path / "run.jsonl", *steps)
    at_once, bit_by_bit = LiveRun(tmp_path), LiveRun(tmp_path / "copy.jsonl")
    assert at_once.read()
    whole = (tmp_path / "run.jsonl").read_bytes()
    with bit_by_bit.path.open("wb", buffering=0) as stream:
        for start in range(0, len(whole), 1000):
            stream.write(whole[start : start + 1000])
            bit_by_bit.read()
    assert at_once.view(0.0) == bit_by_bit.view(0.0)
    view = at_once.view(0.0)
    assert view.recent == pytest.approx(figures_of(steps[-RECENT:]))
    assert view.so_far == pytest.approx(figures_of(steps))
    # all steps take 0.5 s; even batches of the last ones 0.2 (8 + 4) / (4 + 4) s of computing
    assert view.so_far.speedup == pytest.approx((100 * 0.5 + 100 * (0.3 + 0.3)) / (200 * 0.5))


def test_restarts_with_other_workers_and_a_replaced_file_are_followed(tmp_path):
    path = tmp_path / "run.jsonl"
    write(path, line(0), line(1))
    run = LiveRun(path)
    assert run.read()
    with path.open("a") as stream:
        stream.write('{"step": 2, "siz')
    three = line(1, (4, 4, 8), (0.1, 0.1, 0.2), predicted_seconds=(None,) * 3)
    write(path, three, workers=3)
    assert run.read()
    view = run.view(0.0)
    assert (view.restarts, len(view.workers), view.slowest, view.step) == (1, 3, 2, 1)
    assert view.unreadable == 1
    assert view.recent == pytest.approx(figures_of([three]))
    write(tmp_path / "new.jsonl", line(7))
    os.replace(tmp_path / "new.jsonl", path)
    assert run.read()
    view = run.view(0.0)
    assert (view.restarts, len(view.workers), view.step, view.unreadable) == (0, 2, 7, 0)


def test_before_the_first_step_the_workers_are_known(tmp_path):
    write(tmp_path / "run.jsonl", hosts=("a",))
    run = LiveRun(tmp_path)
    assert run.read()
    view = run.view(1e9)
    assert [worker.host for worker in view.workers] == ["a", ""]
    assert view.step is view.slowest is view.recent is view.so_far is None
    assert view.age_seconds == 5


@pytest.mark.parametrize(
    "text",
    ["not json", "[1]", '"step"', '{"step": 1}', '{"step": 1, "sizes": ["a", "b"]}', "[" * 9000,
     '{"step": 1, "sizes": [8, 8], "busy_seconds": [NaN, 1], "excluded": []}',
     '{"step": 1, "sizes": [8, 8], "busy_seconds": ["x", "y"], "excluded": []}',
     '{"step": 1, "sizes": [], "busy_seconds": [], "excluded": []}'],
)  # fmt: skip
@pytest.mark.parametrize("later", [0, RECENT])
def test_lines_that_cannot_be_read_are_counted(tmp_path, text, later):
    path = tmp_path / "run.jsonl"
    write(path, line(0))
    with path.open("a") as stream:
        stream.write(text + "\n")
    steps = [line(step) for step in range(2, 2 + later)]
    with path.open("a") as stream:
        stream.writelines(json.dumps(to_json(each)) + "\n" for each in steps)
    run = LiveRun(path)
    assert run.read()
    view = run.view(0.0)
    assert view.unreadable == 1
    assert view.so_far == pytest.approx(figures_of([line(0), *steps]))


def test_a_record_of_another_version_is_refused(tmp_path):
    (tmp_path / "run.jsonl").write_text('{"schema": 99}\n')
    with pytest.raises(ValueError, match="line 1: schema must be"):
        LiveRun(tmp_path).read()


def test_pushes_are_shown_by_worker(tmp_path):
    """Worker 0 pushes 8 samples every 0.1 s, worker 1 pushes 4 samples every second."""
    times = sorted([(k / 10, 0, 8) for k in range(50)] + [(k + 0.01, 1, 4) for k in range(5)])
    counts = [0, 0]
    pushes = []
    for number, (seconds, worker, samples) in enumerate(times):
        pushes.append(
            PushLine(
                push=number, worker=worker, iteration=counts[worker], samples=samples,
                busy_seconds=0.25, seconds=seconds, staleness=1, lead=0,
            )
        )  # fmt: skip
        counts[worker] += 1
    write(tmp_path / "run.jsonl", *pushes)
    run = LiveRun(tmp_path)
    assert run.read()
    view = run.view(1e9)
    assert [worker.pushes for worker in view.workers] == [50, 5]
    assert [worker.waiting for worker in view.workers] == [None, None]
    assert (view.step, view.steps_per_second) == pytest.approx((54, 11))
    assert view.samples_per_second == pytest.approx(84)
    assert view.age_seconds == pytest.approx(0.1)


def test_a_tail_starts_again_in_a_file_that_was_cut_off(tmp_path):
    path = tmp_path / "file"
    tail = Tail(path)
    assert tail.read() == []
    path.write_bytes(b"one\ntwo\nthr")
    assert (tail.read(), tail.lines) == ([b"one", b"two"], 2)
    assert tail.read() == []
    path.write_bytes(b"new\n")
    assert (tail.read(), tail.lines) == ([b"new"], 1)
