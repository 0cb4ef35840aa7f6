"""Figures and advice of the report, on records whose answers are known in closed form."""

import ast
import inspect
import json
import re
from dataclasses import replace

import numpy as np
import pytest
from report_runs import Page, header, line, push, run_of, save, steady
from typer.testing import CliRunner

from lbbsp_core import Limits, SessionOptions
from lbbsp_core.cli.app import application
from lbbsp_core.cost import Affine, Profile, Proportional, Saturating
from lbbsp_core.report.charts import kept_points
from lbbsp_core.report.html import advice
from lbbsp_core.report.html import pushes as pushes_page
from lbbsp_core.report.html.advice import advise
from lbbsp_core.report.html.figures import run_report
from lbbsp_core.report.html.pushes import advise_pushes, push_report
from lbbsp_core.report.html.speeds import levels, prior_cost
from lbbsp_core.report.html.write import describe
from lbbsp_core.report.live import LiveRun
from lbbsp_core.report.page import page
from lbbsp_core.runtime.record.events import Stop
from lbbsp_core.runtime.record.record import PREEMPTED, Run, read_run


def shown(run):
    return Page(page(describe(run, "a")[0], ""))


def rules(run):
    return {advice.rule: advice for advice in advise(run_report(run))}


# Estimate of plain BSP


def test_the_recorded_estimate_of_even_batches_is_what_the_report_says():
    # 90 + 30 samples in 0.3 s each; 60 + 60 would take 0.6 s; communication 20 ms.
    run = steady([300, 100])
    run = replace(run, steps=[replace(each, even_seconds=0.6) for each in run.steps])
    report = run_report(run)
    assert report.figures.speedup == pytest.approx(0.62 / 0.32)
    assert report.waiting == pytest.approx(0, abs=1e-9)
    assert report.figures.communication == pytest.approx(0.02 / 0.32)
    assert report.verdict.startswith("Balanced: 1.9 times as fast as plain BSP would have been, by")
    assert "waited 0 % of the time for slower ones, 6 % including communication" in report.verdict


def test_records_without_an_estimate_promise_what_the_largest_believed_overhead_leaves():
    report = run_report(steady([300, 100]))
    # kappa = X / 2N = 30: the slow worker would need 0.3 * (60 + 30) / (30 + 30) s.
    assert report.figures.speedup == pytest.approx((0.3 * 90 / 60 + 0.02) / 0.32)


@pytest.mark.parametrize(
    "cost",
    [
        Proportional(100.0),
        Affine(0.5, 0.1),
        Saturating(0.2, 0.1, 0.01),
        Profile([8, 16, 32], [0.05, 0.05, 0.09]),
        Profile([8], [0.05], out_of_memory_at=48),
    ],
)
def test_each_form_of_cost_is_read_from_its_repr(cost):
    assert prior_cost(repr(cost)) == cost


def test_only_literals_are_read_from_the_repr_of_a_cost():
    assert prior_cost("Affine(overhead_seconds=1.0, seconds_per_sample=0.5)").effective_samples(0)
    for text in (None, "", "Affine(", "Affine(overhead_seconds=open('x'))", "Mine(a=1)", "(" * 999,
                 f"Profile(batches=(1, {10**400}), seconds=(1.0, 2.0))",
                 "Profile(batches=(2, 1), seconds=(1.0, 2.0))"):  # fmt: skip
        assert prior_cost(text).effective_samples(0) == 0


# Figures


def test_workers_wait_and_forecasts_are_off_by_what_was_put_in():
    report = run_report(steady([300, 100], [2, 1], forecast=1.1))
    fast, slow = report.workers
    assert (fast.batch, slow.batch) == (80, 40)
    wall = 0.4 + 0.02
    assert fast.busy_share == pytest.approx(80 / 300 / wall)
    assert fast.waiting == pytest.approx((0.4 - 80 / 300) / wall)
    assert slow.waiting == 0
    assert slow.forecast_rmse == pytest.approx(0.1)
    assert slow.naive_rmse == pytest.approx(0, abs=1e-9)
    assert report.waiting == pytest.approx(fast.waiting / 2)


def test_a_plain_run_says_what_balancing_would_gain():
    report = run_report(steady([300, 100], [1, 1], forecast=None, policy="Even()"))
    assert not report.was_balanced
    assert report.verdict.startswith("Not balanced, plain BSP: workers waited ")
    assert "up to 1.9 times as fast" in report.verdict  # (0.6 + 0.02) / (0.3 + 0.02)


@pytest.mark.parametrize(
    ("policy", "forecast", "found"),
    [("Even()", None, set()), ("Observe()", 1.5, {"wrong-forecasts"}), ("Observe()", 1.0, set())],
)
def test_plain_is_what_the_header_says_although_batches_are_not_equal(policy, forecast, found):
    run = steady([300, 300], [16, 8], total=24, policy=policy, forecast=forecast)
    report = run_report(run)
    assert not report.was_balanced
    assert report.verdict.startswith("Not balanced, plain BSP: workers waited ")
    assert set(rules(run)) == {"unbalanced", *found}
    assert "Limits or the granularity keep the batches" in rules(run)["unbalanced"].text
    worked = replace(run, steps=[replace(each, work=(12.0, 12.0)) for each in run.steps])
    assert "granularity" not in rules(worked)["unbalanced"].text


def test_equal_batches_of_a_policy_that_balances_are_not_plain():
    # Of 8 samples 2 each are best: the slowest takes 2 / 7 s, and 3 on another one 3 / 10 s.
    run = steady([10, 10, 10, 7], [1] * 4, total=8, forecast=None)
    report = run_report(run)
    assert not report.was_balanced
    assert report.waiting > 0.1
    assert report.verdict.startswith("Batches stayed equal: workers waited ")
    assert report.verdict.endswith(". Balancing would gain little.")
    assert rules(run) == {}
    assert run_report(replace(run, header=replace(run.header, policy=None))).verdict.startswith(
        "Plain BSP: workers waited "
    )


def test_uneven_batches_of_short_steps_are_seen():
    lines = [line(k, [60, 20], [0.2, 0.2], short=True) for k in range(30)]
    report = run_report(Run(header(2, 120, policy=None), lines))
    assert not report.table.is_even
    assert report.figures.speedup == pytest.approx((0.2 * 60 / 40 + 0.02) / 0.22)


def test_events_are_counted():
    lines = [line(k, [6, 6] if k < 4 else [8, 4], [0.1, 0.1]) for k in range(8)]
    lines[2] = replace(lines[2], excluded=(0, 1))
    lines.append(line(8, [2, 2], [0.1, 0.1], short=True))
    three = [line(0, sizes, [0.1] * 3) for sizes in ([4, 4, 4], [6, 4, 2])]
    stops = (Stop(1, None), Stop(8, PREEMPTED))
    run = Run(header(2, 12), [*three, *lines[1:]], starts=2, restarts=(1,), stops=stops)
    events = run_report(run).events
    assert (events.steps, events.plan_changes, events.excluded_steps) == (10, 2, 1)
    assert ["stops", "2", "1, 8 (preempted)"] in shown(run).rows
    assert run_report(run).to_json()["events"]["stops"] == ((1, None), (8, "preempted"))
    assert (events.short_steps, events.restarts, events.worker_changes) == (1, (1,), ((1, 2),))
    assert run_report(run).table.steps[0] == 1  # figures since the number of workers changed


def test_host_names_do_not_turn_sentences_around():
    hosts = ("a\u202eb", "c\nd")
    run = run_of([(300, 100)] * 200, [(3, 1)] * 200, hosts=hosts)
    assert [worker.host for worker in run_report(run).workers] == ["a?b", "c?d"]


def test_changes_of_the_plan_are_unknown_where_work_cuts_the_steps():
    lines = [line(k, [6 + k % 2, 6 - k % 2], [0.1, 0.1], work=(6.0, 6.0)) for k in range(8)]
    run = Run(header(2, 12), lines)
    assert run_report(run).events.plan_changes is None
    assert "changes of the plan" not in {row[0] for row in shown(run).rows}
    without = replace(run, steps=[replace(each, work=()) for each in lines])
    assert ["changes of the plan", "7", ""] in shown(without).rows


def test_starts_without_a_step_count_as_restarts_as_in_watch(tmp_path):
    empty, run = Run(header(2, 12), []), Run(header(2, 12), [line(0, [6, 6], [0.1, 0.1])])
    for each in (run, empty, replace(run, steps=[line(1, [6, 6], [0.1, 0.1])]), empty):
        save(tmp_path, each)
    report, live = run_report(read_run(tmp_path)), LiveRun(tmp_path)
    assert live.read()
    assert (report.events.starts, report.events.restarts) == (4, (1,))
    assert live.view().restarts == 3
    assert ["restarts", "3", "1"] in shown(read_run(tmp_path)).rows


@pytest.mark.parametrize(
    "lines",
    [
        [line(0, [6, 6], [0.1, 0.3], excluded=(0, 1))],
        [line(0, [6, 6], [0.1, 0.3], short=True)],
        [line(0, [6, 6], [1e-9, 1e11], wall=2e11)],
        [line(0, [12, 0], [0.1, 0.3]), line(1, [6, 6], [0.1, 0.1], wall=0.05)],
        [line(0, [8, 4], [0.1, 0.0]), line(1, [8, 4], [0.1, 0.1])],
    ],
)
def test_odd_runs_have_finite_figures(lines):
    report = run_report(Run(header(2, 12), lines))
    figures = json.loads(json.dumps({**report.to_json()}, allow_nan=False))
    assert 0 <= figures["waiting"] < 1
    assert [advice.rule for advice in advise(report)] == ["few-steps"]


@pytest.mark.parametrize(
    ("lines", "words"),
    [([], "at least one step, got none"), ([line(0, [6, 6], [0.1, 0.0])], "none of 1 does")],
)
def test_runs_without_measurements_are_refused(lines, words):
    with pytest.raises(ValueError, match=words):
        run_report(Run(header(2, 12), lines))


def test_one_worker_has_nothing_to_balance():
    assert run_report(steady([100], [1])).verdict.startswith("One worker: there is nothing to")


def test_the_steps_and_their_time_are_those_with_the_same_workers():
    lines = [line(k, [4] * 3, [0.1] * 3, wall=0.1) for k in range(1000)]
    lines += [line(k, [8, 4], [0.1] * 2, wall=0.12) for k in range(1000, 1010)]
    assert shown(Run(header(2, 12), lines)).tiles["Steps"] == ["10", "in 1.2 s with 2 workers"]
    assert shown(Run(header(2, 12), lines[:1000])).tiles["Steps"] == ["1,000", "in 1 min 40 s"]


@pytest.mark.parametrize(
    ("samples", "seconds", "rate"), [(1, 8, "0.125"), (25, 1, "25"), (40_000, 1, "40,000")]
)
def test_the_throughput_of_any_run_is_a_plain_number(samples, seconds, rate):
    run = Run(header(1, samples), [line(0, [samples], [seconds], wall=seconds)])
    assert shown(run).tiles["Throughput"][0] == rate
    pushed = push(0, samples=samples, busy_seconds=seconds, seconds=float(seconds))
    run = Run(header(1, samples, sync="ASP()"), [], [pushed])
    assert shown(run).tiles["Throughput"][0] == rate
    assert push_report(run).verdict.startswith(f"Asynchronous run: {rate} samples per second; ")


# Change points


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize(
    ("steps", "change"), [(1000, 400), (1000, 20), (1000, 980), (20_000, 400), (20_000, 19_900)]
)
def test_a_change_of_speed_is_found_where_it_is(steps, change, seed):
    rng = np.random.default_rng(seed)
    slow = np.arange(steps) >= change
    speeds = np.where(slow, 100.0, 300.0) * np.exp(rng.normal(0, 0.1, steps))
    speeds[rng.integers(0, steps, steps // 33)] /= 10  # outliers
    found = levels(speeds)
    assert [round(level.median / 100) for level in found] == [3, 1]
    assert abs(found[1].start - change) <= 5
    assert len(levels(speeds[slow])) == len(levels(speeds[~slow])) == 1


def test_the_last_of_many_changes_is_found():
    rng = np.random.default_rng(0)
    speeds = np.where(np.arange(2000) // 100 % 2, 100.0, 150.0) * np.exp(rng.normal(0, 0.05, 2000))
    found = levels(speeds)
    assert len(found) == 20
    assert abs(found[-1].start - 1900) <= 5


def test_noise_is_one_level():
    rng = np.random.default_rng(0)
    for steps in (16, 200, 5000):
        counts = [len(levels(np.exp(rng.normal(0, 0.7, steps)))) for _ in range(50)]
        assert max(counts) == 1


def test_a_recovery_is_a_level_of_its_own():
    speeds = np.repeat([300.0, 100.0, 300.0], 200)
    assert [level.start for level in levels(speeds)] == [0, 200, 400]
    assert levels(np.array([])) == []


def test_peaks_survive_the_reduction():
    rng = np.random.default_rng(0)
    values = rng.normal(size=20_000)
    values[12_345], values[777], values[50] = 99.0, -99.0, np.nan
    kept = kept_points(values)
    assert len(kept) <= 1500
    assert {0, 777, 12_345, 19_999} <= set(kept.tolist())
    assert (np.diff(kept) > 0).all()


# Advice: for each rule, a record in which it must fire, and one in which it must not

BALANCED = steady([300, 100], noise=0.02)


def slowed(at, steps=400, factor=3.0, drivers=None, **facts):
    """Worker 2 becomes slower at a step; the batches follow."""
    speeds = np.tile([300.0, 300, 300], (steps, 1))
    speeds[at:, 2] /= factor
    return run_of(speeds, speeds, noise=0.05, drivers=drivers or {}, total=240, **facts)


def changed(run, change):
    return replace(run, steps=[change(each) for each in run.steps])


def plain(policy, speeds=(300, 100), forecast=None):
    return steady(speeds, [1, 1], forecast=forecast, policy=policy)


def excluded(period):
    return changed(BALANCED, lambda s: replace(s, excluded=(0,) * (s.step % period == 0)))


def quick(communication):
    """Steps that are busy for 3 ms."""
    run = steady([30_000, 10_000])
    return changed(run, lambda s: replace(s, wall_seconds=max(s.busy_seconds) + communication))


FULL = np.tile([40.0, 97.0], (60, 1))


def with_memory(memory_percent, **others):
    drivers = {"memory_percent": memory_percent, **others}
    workers = np.shape(memory_percent)[1]
    return steady([100] * workers, total=100 * workers, drivers=drivers)


VARYING = [(300, 100, 100, 100)] * 200, [(3, 1, 1, 1)] * 200
UNLIKE = np.tile([600.0, 100.0, 100.0], (80, 1))
RAISED = np.tile([400.0, 400, 20], (80, 1)), np.tile([45.0, 45, 30], (80, 1))
MANY = np.tile(np.linspace(100, 300, 40), (60, 1))  # worker 0 takes what rounding leaves
RECOVERED = np.repeat([[300.0, 300], [300, 100], [300, 300]], 100, axis=0)


@pytest.mark.parametrize(
    ("rule", "run", "text"),
    [
        ("slower-worker", slowed(250), "Look for other processes"),
        ("unbalanced", plain("Even()"), "can be up to 1.9 times.* Train with policy=LoadBalanced"),
        ("unbalanced", plain("FixedShares(shares=(1.0, 1.0))"), "Train with policy=LoadBalanced"),
        ("unbalanced", plain(None), "Train with policy=LoadBalanced"),
        ("unbalanced", plain("LoadBalanced(min_gain=0.9)"), "equal batches: check its min_gain"),
        ("unbalanced", plain("Observe()", forecast=1.4), ""),
        ("wrong-forecasts", plain("Observe()", forecast=1.4), ""),
        ("wrong-forecasts", steady([300, 100], forecast=1.4), r"wrong by 40 %.* better .*\(0 %\)"),
        ("wrong-forecasts", steady([300, 100], noise=0.5), "change faster than they can be"),
        ("varying-speeds", run_of(*VARYING, noise=0.15), "slower ones, and forecasts are wrong by"),
        ("no-forecasts", steady([300, 100], forecast=None), ""),
        ("communication", quick(0.02), "takes 87 %.* which balancing cannot shorten. Raise"),
        ("short-steps", quick(0.004), "^Steps take 7 ms"),
        ("binding-maximum", run_of(UNLIKE, [[60.0, 30, 30]] * 80), "A limit binds on worker 0"),
        ("binding-minimum", run_of(*RAISED), "worker 2"),
        ("binding-minimum", run_of(MANY, MANY, total=4000), "worker 0"),
        ("full-memory", with_memory(FULL), "worker 1 is at 97 %"),
        ("full-memory", with_memory([[97.0] * 40] * 60), "worker 5 and 34 others is at 97 %"),
        ("excluded-steps", excluded(3), "^20 of 60 steps"),
    ],
)
def test_advice_that_is_given(rule, run, text):
    assert re.search(text, rules(run)[rule].text)


@pytest.mark.parametrize(
    ("rule", "run"),
    [
        (None, BALANCED),
        (None, slowed(400)),
        (None, run_of(*VARYING, noise=0.01)),
        ("slower-worker", slowed(250, factor=1.3)),
        ("slower-worker", run_of(RECOVERED, RECOVERED)),
        ("unbalanced", plain("Even()", (300, 290))),
        ("wrong-forecasts", steady([300, 100], forecast=1.1)),
        ("wrong-forecasts", steady([300, 100], [1, 1], forecast=1.4)),  # equal anyway
        ("varying-speeds", run_of(VARYING[0], [(1,) * 4] * 200)),  # plain BSP
        ("binding-maximum", run_of(MANY, MANY, total=4000)),
        ("binding-maximum", run_of(UNLIKE, UNLIKE, noise=0.5)),  # not as planned
        ("binding-minimum", run_of(UNLIKE, UNLIKE, noise=0.5)),
        ("full-memory", with_memory(FULL - 10, gpu_memory_percent=FULL * 0)),
        ("full-memory", with_memory(np.where(FULL > 50, np.nan, FULL))),
        ("excluded-steps", excluded(10)),
    ],
)
def test_advice_that_is_not_given(rule, run):
    assert rule not in rules(run)
    assert rule is not None or not rules(run)


@pytest.mark.parametrize("module", [advice, pushes_page])
def test_advice_names_only_what_there_is(module):
    """Options, classes, commands and their options, in all texts of the rules."""
    found = ast.walk(ast.parse(inspect.getsource(module)))
    text = "\n".join(node.value for node in found if isinstance(node, ast.Constant)
                     and isinstance(node.value, str) and " " in node.value)  # fmt: skip
    options = {*SessionOptions.__annotations__, "sync"}  # of `AsyncTrainer`
    assert set(re.findall(r"\b([a-z_]+)=", text)) <= options
    assert set(re.findall(r"(?<![\w(])[a-z]+(?:_[a-z]+)+(?![\w(])", text)) <= options
    assert all(hasattr(Limits, name) for name in re.findall(r"\bLimits\.(\w+)", text))
    for command, option in re.findall(r"lbbsp ([a-z]+)(?: (--[a-z-]+))?", text):
        described = CliRunner().invoke(application(), [command, "--help"])
        assert described.exit_code == 0
        assert option in described.output


def test_slower_worker():
    memory = np.full((400, 3), 40.0)
    memory[250:, 2] = 97.0
    others = np.full((400, 3), 2.0)
    others[250:, 2] = 95.0
    run = slowed(250, hosts=("a", "a", "B"),
                 drivers={"memory_percent": memory, "cpu_other_percent": others})  # fmt: skip
    advice = rules(run)["slower-worker"]
    assert advice.workers == (2,)
    assert advice.text.startswith("Worker 2 on B has been 3.0x slower since step 2")
    since = int(advice.text.split("since step ")[1].split(";")[0])
    assert abs(since - 250) <= 3
    assert "its memory is at 97 %" in advice.text
    assert "other processes take 95 % of a core on its cores (before: 2 %)" in advice.text


@pytest.mark.parametrize(
    ("speeds", "expected"),
    [
        ((300, 150, 115), "Worker 1 has been 2.6x slower since step 40."),
        ((300, 120, 170), "Worker 1 has been 1.8x slower since step 40."),
        ((300, 200, 100), "Worker 1 has been 3.0x slower since step 100."),
        ((300, 100, 250), None),
    ],
)
def test_a_worker_is_compared_with_its_best_level(speeds, expected):
    own = np.repeat(np.array(speeds, float), (40, 60, 50))
    both = np.column_stack([np.full(150, 300.0), own])
    advice = rules(run_of(both, both)).get("slower-worker")
    assert (advice and advice.text.split(" Look")[0]) == expected
    pushed = [replace(each, samples=int(own[each.iteration]), busy_seconds=1.0) if each.worker
              else each for each in pushes(count=300).pushes]  # fmt: skip
    found = advise_pushes(push_report(Run(header(2, 20, sync="SSP(3)"), [], pushed)))
    assert [advice.rule for advice in found] == ["slower-worker"] * (expected is not None)


@pytest.mark.parametrize(("factor", "shown"), [(1.6, "1.6x"), (1.4, None)])
def test_a_smaller_batch_with_an_overhead_is_no_slower_worker(factor, shown):
    speeds = np.tile([300.0, 300.0], (100, 1))
    speeds[50:, 1] /= factor
    cost = repr(Affine(overhead_seconds=1.6, seconds_per_sample=0.1))
    run = run_of(speeds, speeds, total=64, overhead=16, cost=cost)
    advice = rules(run).get("slower-worker")
    assert (advice and advice.text.split()[4]) == shown
    again = run.steps[70]
    assert again.sizes[1] / again.busy_seconds[1] < 200 / 1.5, "1.5x slower in samples/s"


def test_hidden_communication_is_shown_where_there_is_some():
    run = steady([3000, 1000])  # busy for 30 ms
    run = replace(run, steps=[replace(each, wall_seconds=0.06) for each in run.steps])
    hiding = replace(run, steps=[replace(each, hidden_seconds=0.012) for each in run.steps])
    text = rules(hiding)["communication"].text
    assert "Communication takes 50 % of a step" in text
    assert "cannot shorten; another 20 % is hidden behind computing. Raise" in text
    text = " ".join(shown(hiding).texts)
    assert "20.0\u00a0% of the measured steps, 29\u00a0% of all communication" in text
    assert "another 20 % was, while the slowest worker computed." in text
    assert run_report(hiding).to_json()["hidden_communication"] == pytest.approx(0.2)
    assert "idden" not in " ".join(shown(run).texts)


# Asynchronous runs


def pushes(staleness=(1, 1), slow_from=10**9, count=200):
    lines = []
    for k in range(count):
        busy = 0.15 * (3 if k % 2 and k >= slow_from else 1)
        facts = {"busy_seconds": busy, "seconds": 0.1 * (k + 1), "staleness": staleness[k % 2]}
        lines.append(push(k, samples=10, **facts))
    return Run(header(2, 20, sync="SSP(3)"), [], lines)


def test_an_asynchronous_run_has_figures_of_its_own():
    report = push_report(pushes(staleness=(1, 3)))
    assert report.total_seconds == pytest.approx(20)
    assert report.samples_per_second == pytest.approx(100)
    assert [worker.busy_share for worker in report.workers] == pytest.approx([0.75, 0.75])
    assert "busy 75 % of the time, and their gradients were 2.0 updates old" in report.verdict
    assert json.loads(json.dumps(report.to_json(), allow_nan=False))["max_staleness"] == 3


def test_figures_of_pushes_are_of_the_last_start(tmp_path):
    for count in (100, 30):
        save(tmp_path, pushes(count=count))
    report = push_report(read_run(tmp_path))
    assert (len(report.push), report.starts) == (30, 2)
    assert report.total_seconds == pytest.approx(3.0)
    assert report.samples_per_second == pytest.approx(100)
    tiles = shown(read_run(tmp_path)).tiles
    assert tiles["Starts"][1] == "of the run; figures are of the last one"
    assert tiles["Pushes"][0] == "30"


def test_advice_on_asynchronous_runs():
    assert advise_pushes(push_report(pushes())) == []
    [slower] = advise_pushes(push_report(pushes(slow_from=100)))
    assert (slower.rule, slower.workers) == ("slower-worker", (1,))
    [stale] = advise_pushes(push_report(pushes(staleness=(1, 5))))
    assert (stale.rule, stale.workers) == ("stale-gradients", (1,))
    [few] = advise_pushes(push_report(pushes(count=4)))
    assert few.rule == "few-steps"


@pytest.mark.parametrize("change", [{"worker": 2}, {"staleness": -1}, {"samples": -5}])
def test_impossible_pushes_are_refused(change):
    run = pushes()
    run.pushes[7] = replace(run.pushes[7], **change)
    with pytest.raises(ValueError, match="push 7: "):
        push_report(run)
