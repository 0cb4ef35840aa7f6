"""Advice that follows from the record of a run: one function for each rule.

Each rule reads a `RunReport` and yields what it has to say. A rule says nothing about a run of
fewer than `MIN_STEPS` measured steps, apart from the rule that says so.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Final

import numpy as np

from lbbsp_core.report.causes import causes
from lbbsp_core.report.html.figures import BALANCED, RunReport
from lbbsp_core.report.html.speeds import Drop, lasting_drop, speeds_of
from lbbsp_core.report.wording import duration, percent, times
from lbbsp_core.runtime.record.table import Floats, worker_names

MIN_STEPS: Final = 20
SLOWER: Final = 1.5
"""Slowdown from which on a worker is reported."""

WRONG: Final = 0.25
"""Relative RMSE from which on forecasts are reported."""

SHORT_STEP: Final = 0.02
"""Steps of fewer seconds are reported."""

COMMUNICATION: Final = 0.4
"""Share of communication from which on it is reported."""

EXCLUDED: Final = 0.2
"""Share of excluded steps from which on they are reported."""

FULL_MEMORY: Final = 95.0
"""Percentage of memory from which on it is reported."""

_BINDING: Final = 0.85
"""A limit binds if workers are planned to be ready in less than this part of the slowest time."""

_LISTED: Final = 6
"""Workers that advice names."""


@dataclass(frozen=True)
class Advice:
    """Advice on a run."""

    rule: str  # name of the rule
    text: str  # what was found, and what to do
    workers: tuple[int, ...] = ()  # ranks that it is about; none if it is about the run


def advise(report: RunReport) -> list[Advice]:
    """Applies all rules to the figures of a run."""
    if len(report.measured.steps) < MIN_STEPS:
        return list(few_steps(report))
    return [advice for rule in RULES for advice in rule(report)] or list(varying_speeds(report))


def few_steps(report: RunReport) -> Iterator[Advice]:
    """Reports a record that is too short for the other rules."""
    yield Advice(
        "few-steps",
        f"Only {len(report.measured.steps)} of {len(report.table.steps)} steps were measured: the "
        f"figures are uncertain. Train for at least {MIN_STEPS} steps before you draw conclusions.",
    )


def slower_worker(report: RunReport) -> Iterator[Advice]:
    """Reports workers that have become slower than they were, since when, and a likely cause."""
    table = report.measured
    names = worker_names(table.header, table.workers)
    for rank, speeds in enumerate(speeds_of(table).T):
        if (drop := lasting_drop(speeds, SLOWER)) is not None:
            since, causes = table.steps[drop.start], _causes(report, rank, drop.start)
            yield slower(rank, names[rank], drop, f"step {since}", causes)


def slower(rank: int, name: str, drop: Drop, since: str, causes: Iterable[str] = ()) -> Advice:
    """Returns the advice on a worker whose speed has fallen."""
    reasons = " and ".join(causes)
    ending = f"; {reasons}." if reasons else ". Look for other processes, heat or I/O there."
    text = f"W{name[1:]} has been {drop.ratio:.1f}x slower since {since}{ending}"
    return Advice("slower-worker", text, (rank,))


def unbalanced(report: RunReport) -> Iterator[Advice]:
    """Reports plain BSP, and batches that stayed equal, whose workers wait for slower ones."""
    if report.was_balanced or report.gain is None:
        return
    remedy = "Train with policy=LoadBalanced(), the default."
    if (report.table.header.policy or "").startswith("LoadBalanced("):
        remedy = (
            "The policy balances, but kept equal batches: check its min_gain and interval, limits, "
            "the granularity and short_step_seconds."
        )
    elif not report.table.is_even and not report.table.has_work:
        remedy = (
            "Limits or the granularity keep the batches of plain BSP from being equal: change "
            "those, and train with policy=LoadBalanced(), the default."
        )
    yield Advice(
        "unbalanced",
        f"The batches do not follow the speeds, and workers wait {percent(report.waiting)} of "
        f"the time for slower ones: a step can be up to {times(report.gain)} as fast. " + remedy,
    )


def wrong_forecasts(report: RunReport) -> Iterator[Advice]:
    """Reports workers whose forecasts are far from the measurements."""
    wrong = [w for w in report.workers if w.forecast_rmse is not None and w.forecast_rmse >= WRONG]
    if not wrong or not (report.was_balanced or report.table.is_plain):
        return
    worst = max(wrong, key=lambda worker: worker.forecast_rmse or 0.0)
    assert worst.forecast_rmse is not None
    text = (
        f"Forecasts are wrong by {percent(worst.forecast_rmse)} on {_listed(report, [worst.rank])}"
        + (f" and by {percent(WRONG)} or more on {len(wrong)} workers" if len(wrong) > 1 else "")
    )
    if worst.naive_rmse is not None and worst.naive_rmse < 0.9 * worst.forecast_rmse:
        text += (
            f". The last speed would have been a better forecast ({percent(worst.naive_rmse)}): "
            "compare predictors with lbbsp evaluate --from-run RUN_DIR, and choose one with "
            "predictor=."
        )
    else:
        text += (
            ": speeds change faster than they can be forecast. Find out what else runs on these "
            "hosts; larger global batches average over more of it."
        )
    yield Advice("wrong-forecasts", text, tuple(worker.rank for worker in wrong))


def no_forecasts(report: RunReport) -> Iterator[Advice]:
    """Reports a run that was to be balanced, but has no forecasts."""
    if report.was_balanced and np.isnan(report.table.predicted).all():
        yield Advice(
            "no-forecasts",
            "The record has no forecasts: the batch sizes do not follow predicted speeds. "
            "policy=LoadBalanced(), the default, uses forecasts.",
        )


def short_steps(report: RunReport) -> Iterator[Advice]:
    """Reports steps that are too short to gain much from balancing."""
    seconds = report.measured.step_seconds
    if seconds < SHORT_STEP and len(report.workers) > 1:
        yield Advice(
            "short-steps",
            f"Steps take {duration(seconds)}: what each step costs besides its samples "
            "(Python, the exchange, the all-reduce) counts, and timings are noisy. Raise "
            "the global batch size.",
        )


def much_communication(report: RunReport) -> Iterator[Advice]:
    """Reports runs whose time is mostly communication."""
    figures = report.figures
    if figures.communication >= COMMUNICATION and len(report.workers) > 1:
        hidden = f"; another {percent(figures.hidden_communication)} is hidden behind computing"
        yield Advice(
            "communication",
            f"Communication takes {percent(figures.communication)} of a step, which balancing "
            f"cannot shorten{hidden * figures.hides}. Raise the global batch size, send less "
            "(mixed precision, a smaller model), or use a faster network.",
        )


def binding_limit(report: RunReport) -> Iterator[Advice]:
    """Reports workers whose batch a limit holds, so that the plan itself is unbalanced.

    A worker is held at the top if, in most full steps of the last half, it has the largest batch
    that it ever had, and was *planned* to be ready early; at the bottom likewise.
    """
    table = report.measured
    if not report.was_balanced:
        return
    late = np.arange(len(table.steps)) >= len(table.steps) // 2
    late &= ~np.isnan(table.predicted).any(axis=1) & ~table.is_short
    if late.sum() < MIN_STEPS // 2:
        return
    sizes, planned = table.sizes[late], table.predicted[late]
    slowest = planned.max(axis=1)[:, None]
    second_slowest = np.sort(planned, axis=1)[:, -2][:, None]
    full = table.is_full
    top = (sizes == table.sizes[full].max(axis=0)) & (planned <= _BINDING * slowest)
    bottom = (sizes == table.sizes[full].min(axis=0)) & (planned == slowest)
    bottom &= second_slowest <= _BINDING * slowest
    for held, limit, change, moment, batch in (
        (top, "maximum", "raise it if the memory allows", "before", "largest"),
        (bottom, "minimum", "lower it", "after", "smallest"),
    ):
        ranks = [int(rank) for rank in np.flatnonzero(held.mean(axis=0) > 0.5)]
        if ranks and 2 * len(ranks) <= table.workers:
            yield Advice(
                f"binding-{limit}",
                f"A limit binds on {_listed(report, ranks)}: in most steps it is planned to be "
                f"ready {moment} the others, and stays at its {batch} batch. It is probably "
                f"Limits.{limit}: {change}; otherwise check the granularity, and the interval of "
                "the policy.",
                tuple(ranks),
            )
            return  # of two workers, either may be the one that a limit holds


def full_memory(report: RunReport) -> Iterator[Advice]:
    """Reports workers whose memory is nearly full in the last quarter of the run."""
    for name, kind in (("memory_percent", "memory"), ("gpu_memory_percent", "GPU memory")):
        values = report.measured.drivers.get(name)
        if values is None:
            continue
        recent = _medians(values[3 * len(values) // 4 :])
        ranks = [int(rank) for rank in np.flatnonzero(recent >= FULL_MEMORY)]
        if ranks:
            yield Advice(
                "full-memory",
                f"The {kind} of {_listed(report, ranks)} is at {recent[ranks].max():.0f} %: the "
                "next allocation may fail or swap. Set Limits.maximum there, or free memory.",
                tuple(ranks),
            )


def many_excluded(report: RunReport) -> Iterator[Advice]:
    """Reports records in which many steps are not learned from."""
    events = report.events
    if events.excluded_steps >= EXCLUDED * events.steps:
        yield Advice(
            "excluded-steps",
            f"{events.excluded_steps} of {events.steps} steps are not learned from, because they "
            "follow a start, an evaluation, saving or a compilation, or are the first ones of a "
            "worker with a batch size. Use longer epochs, or evaluate and save less often.",
        )


def varying_speeds(report: RunReport) -> Iterator[Advice]:
    """Reports waits in a run that is to be balanced for which no other rule has a reason."""
    if not report.was_balanced or report.waiting <= BALANCED:
        return
    errors = [w.forecast_rmse for w in report.workers if w.forecast_rmse is not None]
    wrong = f", and forecasts are wrong by {percent(float(np.mean(errors)))}" * bool(errors)
    yield Advice(
        "varying-speeds",
        f"Workers wait {percent(report.waiting)} of the time for slower ones{wrong}: each step "
        "waits for its slowest worker, and speeds vary from step to step. Larger global batches "
        "average over that. Where a batch of any size takes long, as on GPUs, measure what it "
        "costs (lbbsp profile) and pass cost=.",
    )


RULES: Final[tuple[Callable[[RunReport], Iterator[Advice]], ...]] = (
    slower_worker,
    unbalanced,
    binding_limit,
    wrong_forecasts,
    no_forecasts,
    full_memory,
    much_communication,
    short_steps,
    many_excluded,
)


def _causes(report: RunReport, rank: int, start: int) -> Iterator[str]:
    """Yields which driving factors of a worker have risen since a measured step."""
    drivers = {name: values[:, rank] for name, values in report.measured.drivers.items()}
    before, after = (
        {name: float(_medians(values[part])) for name, values in drivers.items()}
        for part in (slice(start), slice(start, None))
    )
    for name, text in causes(after, before):
        yield f"{text} (before: {before[name]:.0f} %)"


def _medians(values: Floats) -> Floats:
    """Returns medians over the first axis, without NaN; NaN where there is nothing else."""
    filled_values = np.where(np.isnan(values).all(axis=0), -np.inf, values)
    medians = np.nanmedian(filled_values, axis=0)
    return np.where(np.isinf(medians), np.nan, medians)


def _listed(report: RunReport, ranks: list[int]) -> str:
    names = worker_names(report.table.header, report.table.workers)
    ending = f" and {len(ranks) - _LISTED} others" * (len(ranks) > _LISTED)
    return ", ".join(names[rank] for rank in ranks[:_LISTED]) + ending
