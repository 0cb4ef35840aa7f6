"""Options of a training session, the same for the plugins of all frameworks."""

from __future__ import annotations

import inspect
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any, Final, TypedDict

from lbbsp_core.policy import BatchConstraints, Even, LoadBalanced, Policy
from lbbsp_core.predict import Predictor
from lbbsp_core.registry import POLICIES
from lbbsp_core.resources.sampler import check_names
from lbbsp_core.runtime.options import env, naming
from lbbsp_core.runtime.options.defaults import SHORT_STEP_SECONDS, SILENCE_SECONDS
from lbbsp_core.runtime.options.naming import AnyCost, LimitsOrMaximum
from lbbsp_core.types import Limits
from lbbsp_core.validate import (
    require_fraction,
    require_integer,
    require_known,
    require_nonnegative,
    require_path,
    require_positive,
    shortened,
)

logger = logging.getLogger("lbbsp.session")

_SHORTEST_SILENCE_SECONDS = 2.0

_ELSEWHERE: Final = {
    "sync": "sync is an option of asynchronous training, where workers run ahead of others: leave "
    "it out here, or use the trainer for asynchronous training",
    "batch_size": "batch_size is no option: pass global_batch_size, the samples of a step over all "
    "workers",
}
"""What to write instead of options that a session does not have."""

_OF_COMMON_STEPS: Final = {
    "metrics_file": "metrics are those of the steps of all workers; the run record (record=) has "
    "a line for each push",
    "limit_seconds": "the trainer's wait_seconds limits all waits",
    "compare_weights": "all workers read the weights of the servers",
    "short_step_seconds": "limits= bounds batches at any time",
}
"""Options without an effect in asynchronous training, and why; their defaults are allowed."""


class AsyncOptions(TypedDict, total=False):
    """Types of the keyword arguments ``**options`` of asynchronous training, all optional.

    They are those of `Options` that have an effect where workers have no common steps.
    """

    policy: Policy | str | None
    predictor: Predictor | str | None
    cost: AnyCost | None
    limits: LimitsOrMaximum | Sequence[LimitsOrMaximum] | None
    granularity: int | None
    interval: int | None
    min_gain: float | None
    record: str | Path | None
    seed: int
    drivers: Sequence[str] | None
    silence_seconds: float


class Options(AsyncOptions, total=False):
    """Types of the keyword arguments ``**options`` of all plugins: those of `SessionOptions`.

    Editors complete them, and type checkers refuse other names and types. A function that passes
    options on declares them as ``**options: Unpack[lbbsp_core.Options]`` (`typing.Unpack`, or that
    of typing_extensions before Python 3.11).
    """

    metrics_file: str | Path | None
    limit_seconds: float | None
    compare_weights: int | None
    short_step_seconds: float


@dataclass(frozen=True, kw_only=True)
class SessionOptions:
    """Options that the plugins of all frameworks share.

    Args:
        policy: Decides batch sizes: an object, or a name as on the command line, such as
            ``"lbbsp"``, ``"lbbsp:min_gain=0"`` or ``"fixed:9/12/18"``, see `lbbsp_core.registry`.
            Defaults to that of the variable ``LBBSP_POLICY``, or else to
            ``LoadBalanced(min_gain, interval)``, and to `Even` in asynchronous training.
        predictor: Forecasts this worker's speed: an object, or a name such as ``"ema0.5"`` or
            ``"narx"``, which is then trained for the lag of the plans. Defaults to `Mixture`.
        cost: Shape of this worker's batch-time curve: an object, the file of a profile such as
            ``"gpu.json"``, or a name such as ``"affine:0.010:0.001"``. Defaults to `Proportional`.
        limits: Bounds of a batch: `Limits`, or a number, the largest batch in samples; the same
            for all workers, or a sequence with one entry per worker. Defaults to ``Limits(1)``, and
            a maximum of twice the even share for workers whose memory is unknown: those without a
            `Profile` that has a memory limit. Fixed shares have no such maximum, and batches of two
            workers grow in steps instead, see `lbbsp_core.policy.bound_growth`.
        granularity: Batch sizes are multiples of it, in samples, >= 1. Defaults to 1, and to 8 if a
            worker trains on a GPU and an even share has 64 samples or more, but not in asynchronous
            training.
        interval: Steps between decisions, >= 1, of the default policy or of one that is given by
            its name and leaves it open. Defaults to 1.
        min_gain: Minimum relative gain for which that policy adopts a new plan, in [0, 1).
            Defaults to 0.02; 0 is the paper's mode (Chen et al., arXiv 1806.02508).
        record: File for the run record, or its folder; written by rank 0. Defaults to none, or
            to ``RUN_DIR/run.jsonl`` under ``lbbsp launch --run-dir``.
        metrics_file: File for Prometheus' node exporter (its textfile collector), with the suffix
            ``.prom``; written by rank 0 every few seconds, see docs/monitoring.md. Defaults to
            ``LBBSP_METRICS_FILE``, or none.
        seed: Seed of the sample order, >= 0, unless the data set is given its own.
        drivers: Names of the driving factors that the predictor takes as exogenous inputs, see
            `lbbsp_core.ResourceSampler`; ``()`` for none. Defaults to those of the sampler.
        silence_seconds: Seconds without a sign of life after which a worker is lost and the others
            end, >= 2. Signs come from a thread of each worker, twice a second.
        limit_seconds: Seconds for which workers wait for one that is alive before they end, > 0.
            Defaults to no limit: the one that they wait for is reported every minute.
        compare_weights: Steps between comparisons of the workers' weights, >= 1; None compares
            none. Weights may differ by 0.1 % of their norm, by which rounding never differs.
            Unless it is None, `lbbsp_mx` also compares the optimizer's settings, in every step.
        short_step_seconds: Busy seconds of a step, >= 0, below which the batches of `LoadBalanced`
            stay near even shares: within a fifth of them in steps of a fifth of this time. They
            then follow the mean of several steps that take this time together, see
            `runtime.planning.short_steps`. Defaults to 0.025; 0 lets them follow any measurement.

    Raises:
        ValueError: A name is unknown or a file is no profile, `interval` or `min_gain` is given
            together with a policy that has no such open option, a number is out of range, or
            `metrics_file` has another suffix.
        TypeError: A policy, predictor, cost or limit is of the wrong type.
    """

    policy: Policy | str | None = None
    predictor: Predictor | str | None = None
    cost: AnyCost | None = None
    limits: LimitsOrMaximum | Sequence[LimitsOrMaximum] | None = None
    granularity: int | None = None
    interval: int | None = None
    min_gain: float | None = None
    record: str | Path | None = None
    metrics_file: str | Path | None = None
    seed: int = 0
    drivers: Sequence[str] | None = None
    silence_seconds: float = SILENCE_SECONDS
    limit_seconds: float | None = None
    compare_weights: int | None = 50
    short_step_seconds: float = SHORT_STEP_SECONDS

    def __post_init__(self) -> None:
        for name in ("granularity", "interval", "compare_weights"):
            if (value := getattr(self, name)) is not None:  # also one of NumPy
                object.__setattr__(self, name, require_integer(name, value, 1))
        require_integer("seed", self.seed, 0)
        if self.min_gain is not None:
            require_fraction("min_gain", self.min_gain)
        if self.record is not None:
            require_path("record", self.record)
        self._check_drivers()
        self._resolve()
        if require_positive("silence_seconds", self.silence_seconds) < _SHORTEST_SILENCE_SECONDS:
            raise ValueError(
                f"silence_seconds must be >= {_SHORTEST_SILENCE_SECONDS:g}, got "
                f"{self.silence_seconds!r}: a busy machine may delay signs of life for a moment"
            )
        if self.limit_seconds is not None:
            require_positive("limit_seconds", self.limit_seconds)
        require_nonnegative("short_step_seconds", self.short_step_seconds)
        if self.metrics_file is not None:
            _require_prom("metrics_file", self.metrics_file)

    def _check_drivers(self) -> None:
        names = self.drivers
        if names is None:
            return
        is_list = isinstance(names, Sequence) and not isinstance(names, str)
        if not is_list or not all(isinstance(name, str) for name in names):
            raise TypeError(
                f"drivers must be a list of names, got {shortened(names)}: write "
                'drivers=("cpu_other_percent",), or drivers=() for none'
            )
        check_names(names)

    def _resolve(self) -> None:
        """Replaces names by objects, but for the predictor, which depends on the session's lag."""
        read: dict[str, object] = {}
        if self.policy is not None:
            policy = naming.read_policy(self.policy, **self._policy_options)
            read.update(policy=policy, interval=None, min_gain=None)
        if self.cost is not None:
            read["cost"] = naming.read_cost(self.cost)
        if self.limits is not None:
            read["limits"] = naming.read_limits(self.limits)
        if self.predictor is not None:
            naming.read_predictor(self.predictor)
        for name, value in read.items():
            object.__setattr__(self, name, value)

    @classmethod
    def of(
        cls, options: Mapping[str, Any], function: Callable[..., object] | None = None
    ) -> SessionOptions:
        """Creates the options from a plugin's keyword arguments.

        Args:
            options: Further keyword arguments of a function of the plugin.
            function: That function, for an error that names its own arguments, too.

        Raises:
            TypeError: An option is unknown; names the nearest known one.
        """
        for name in _ELSEWHERE.keys() & options.keys():
            raise TypeError(_ELSEWHERE[name])
        names = [*_named_arguments(function), *(field.name for field in fields(cls))]
        try:
            for name in options:
                require_known("option", name, names)
        except ValueError as error:
            raise TypeError(str(error)) from None
        return cls(**options)

    def check_asynchronous(self, rank: int) -> None:
        """Refuses options that have no effect where workers have no common steps.

        ``LBBSP_METRICS_FILE`` may be set for all jobs of a machine: worker 0 warns of it.

        Args:
            rank: Number of this worker.

        Raises:
            ValueError: An option is given; names the reason and the remedy.
        """
        defaults = {field.name: field.default for field in fields(self)}
        same = {"compare_weights": None, "short_step_seconds": 0}  # what is done without them
        for name, why in _OF_COMMON_STEPS.items():
            value = getattr(self, name)
            if value not in (defaults[name], same.get(name, defaults[name])):
                raise ValueError(
                    f"{name} = {value!r} has no effect in asynchronous training, where workers "
                    f"have no common steps: leave it out; {why}"
                )
        if rank == 0 and (path := env.metrics_file()) is not None:
            logger.warning(
                "LBBSP_METRICS_FILE = %s has no effect in asynchronous training: no metrics are "
                "written; %s",
                path,
                _OF_COMMON_STEPS["metrics_file"],
            )

    def for_workers(self, workers: int, global_batch_size: int) -> SessionOptions:
        """Returns the options of a job of `workers` workers.

        A single worker has no limits and no shares, so that scripts for several workers run.
        """
        if workers > 1:
            return self
        options = self if self.limits is None else replace(self, limits=None)
        policy = options.choose_policy()
        try:
            policy.init(BatchConstraints(global_batch_size, (Limits(),)))
        except ValueError:  # it has a value for each of several workers
            options = replace(options, policy=Even(), interval=None, min_gain=None)
        return options

    def choose_policy(self, default: Policy | None = None, *, rank: int | None = None) -> Policy:
        """Returns the given policy, that of the environment, or else the default one.

        Args:
            default: Default if neither `interval` nor `min_gain` is given. None: LB-BSP.
            rank: Number of the worker that will use it: worker 0 says if the environment chooses.

        Raises:
            ValueError: ``LBBSP_POLICY`` names no policy.
        """
        if self.policy is not None:
            return naming.read_policy(self.policy)
        if text := env.policy():
            try:
                policy = POLICIES.build(text, **self._policy_options)  # those that it has
            except ValueError as error:
                raise ValueError(f"LBBSP_POLICY cannot be used: {error}") from None
            if rank == 0:
                logger.warning("LBBSP_POLICY = %s chooses the policy: %r", text, policy)
            return policy
        if default is not None and not self._policy_options:
            return default
        return LoadBalanced(**self._policy_options)

    def choose_drivers(self, policy: Policy) -> Sequence[str] | None:
        """Returns the driving factors to sample: none if `policy` uses no predictions."""
        return self.drivers if policy.uses_costs else ()

    def record_path(self) -> Path | None:
        """Returns the path of the run record: `record`, or else the launcher's; None for none."""
        return Path(self.record) if self.record else env.run_dir()

    def metrics_path(self) -> Path | None:
        """Returns the path of `metrics_file`, or of ``LBBSP_METRICS_FILE``; None for none.

        Raises:
            ValueError: That of the variable has another suffix.
        """
        if self.metrics_file is not None:
            return Path(self.metrics_file)
        path = env.metrics_file()
        return path and _require_prom("LBBSP_METRICS_FILE", path)

    @property
    def _policy_options(self) -> dict[str, Any]:
        options = {"interval": self.interval, "min_gain": self.min_gain}
        return {name: value for name, value in options.items() if value is not None}


def _named_arguments(function: Callable[..., object] | None) -> list[str]:
    parameters = inspect.signature(function).parameters.values() if function else ()
    return [p.name for p in parameters if p.kind is not p.VAR_KEYWORD and p.name != "self"]


def _require_prom(name: str, path: str | Path) -> Path:
    """Returns the path of a file for Prometheus' node exporter."""
    path = require_path(name, path)
    if path.suffix != ".prom":
        raise ValueError(
            f"{name} must end in .prom, got {str(path)!r}: the node exporter reads only such files "
            "in its textfile folder"
        )
    return path
