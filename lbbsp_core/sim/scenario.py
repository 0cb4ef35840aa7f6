"""Scenarios: descriptions of synthetic clusters in a few lines of TOML."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import MISSING, dataclass, field, fields, replace
from functools import cached_property
from pathlib import Path
from typing import Any, Final, TypeVar

from lbbsp_core.cost import Cost, Profile
from lbbsp_core.files import is_file_name, read_regular
from lbbsp_core.installation import extra
from lbbsp_core.sim.communication import Communication, FixedTime, ParameterServer, RingAllReduce
from lbbsp_core.sim.config import LognormalWork
from lbbsp_core.sim.slowdowns import Constant, Disturbance, Lognormal, Markov, Noise, Pareto
from lbbsp_core.sim.synthetic import (
    OMNILEARN,
    Preemption,
    SyntheticCluster,
    cores,
    synthetic_cluster,
)
from lbbsp_core.types import Limits
from lbbsp_core.validate import (
    require_known,
    require_nonnegative,
    require_positive,
    require_whole,
    shortened,
)

T = TypeVar("T")

_TABLES: Final[dict[str, Any]] = {
    "noise": {
        "constant": Constant,
        "lognormal": Lognormal,
        "pareto": Pareto,
        "markov": Markov,
        "dbs": Disturbance,
    },
    "communication": {
        "fixed": FixedTime, "ring": RingAllReduce, "parameter-server": ParameterServer,
    },
    "work": {"lognormal": LognormalWork},
    "preemption": Preemption,
}  # fmt: skip


@dataclass(frozen=True)
class Scenario:
    """Synthetic cluster, and the length of its run.

    At most one of `speeds`, `cores` and `profiles` is given; the list is repeated until there are
    enough workers.

    Args:
        name: Name of the scenario in tables.
        workers: Number of workers, N; 0: the length of the given list, or 4 without one.
        steps: Number of global batches, >= 1.
        seed: Seed of all randomness, >= 0.
        global_batch_size: X, in samples; 0: 64 samples per worker.
        samples_per_second: Speed of a worker of relative speed 1, or of one core, > 0.
        overhead_seconds: Seconds of every iteration, whatever its batch, >= 0.
        first_use_seconds: Further seconds of an iteration with a batch size that is new to its
            worker, >= 0, see `SimConfig`.
        speeds: Relative speeds, > 0.
        cores: Numbers of cores of CPU workers, > 0.
        serial_share: Share of a sample's work that only one core does, see
            `lbbsp_core.sim.cores`.
        profiles: Files from ``lbbsp profile`` with the cost curves of GPUs.
        steps_per_epoch: Steps in an epoch, >= 1, for policies that plan once per epoch.
        noise: Distribution of slowdowns.
        communication: Seconds that an exchange of gradients takes.
        preemption: Departures and returns of workers; None: no worker leaves.
        work: Work of the samples, where they differ; None: all are equal.

    Raises:
        ValueError: An option is out of range, or options exclude each other.
    """

    name: str
    workers: int = 0
    steps: int = 500
    seed: int = 0
    global_batch_size: int = 0
    samples_per_second: float = 64.0
    overhead_seconds: float = 0.0
    first_use_seconds: float = 0.0
    speeds: tuple[float, ...] = ()
    cores: tuple[float, ...] = ()
    serial_share: float = 0.0
    profiles: tuple[str, ...] = ()
    steps_per_epoch: int = 50
    noise: Noise = field(default_factory=Constant)
    communication: Communication = field(default_factory=FixedTime)
    preemption: Preemption | None = None
    work: LognormalWork | None = None

    def __post_init__(self) -> None:
        for name, minimum in _MINIMUM.items():
            value = require_whole(name, getattr(self, name), minimum)
            if value >= _LARGEST:
                raise ValueError(f"{name} must be below 1e15, got {shortened(value)}")
            object.__setattr__(self, name, value)  # 1e6, as TOML has it, is a float
        if not isinstance(self.name, str):
            raise ValueError(f"name must be a text, got {shortened(self.name)}")
        require_positive("samples_per_second", self.samples_per_second)
        for name in ("overhead_seconds", "first_use_seconds"):
            require_nonnegative(name, getattr(self, name))
        for name in ("speeds", "cores"):
            for value in getattr(self, name):
                require_positive(name, value)
        lists = [name for name in ("speeds", "cores", "profiles") if getattr(self, name)]
        if len(lists) > 1:
            raise ValueError(
                f"{' and '.join(lists)} exclude each other: each gives the speeds of all workers; "
                "keep one"
            )
        if self.steps * self.size > _MOST_ITERATIONS:
            raise ValueError(
                f"steps times workers must be at most {_MOST_ITERATIONS:,}, got {self.steps:,} "
                f"times {self.size:,}: lower one of them"
            )
        if self.serial_share and not self.cores:
            raise ValueError("serial_share needs cores, and none are given: add cores = [...]")

    @property
    def size(self) -> int:
        """Number of workers, N."""
        return self.workers or len(self.speeds or self.cores or self.profiles) or 4

    @property
    def total(self) -> int:
        """Global batch size X, in samples."""
        return self.global_batch_size or 64 * self.size

    def curves(self) -> list[Cost]:
        """Returns the undisturbed cost curves by rank."""
        if self.profiles:
            return _repeat(self._loaded, self.size)
        counts, speed = self.cores or self.speeds or (1.0,), self.samples_per_second
        return _repeat(cores(counts, speed, self.overhead_seconds, self.serial_share), self.size)

    def limits(self) -> list[Limits] | None:
        """Returns the limits that the memory of profiled GPUs sets; None without profiles."""
        if not self.profiles:
            return None
        return _repeat([profile.limits() for profile in self._loaded], self.size)

    def cluster(self) -> SyntheticCluster:
        """Draws the cluster."""
        return synthetic_cluster(self.curves(), self.steps, noise=self.noise, seed=self.seed)

    def sized(self, workers: int) -> Scenario:
        """Returns the scenario for another number of workers, with as many samples per worker."""
        total = self.global_batch_size and max(1, self.global_batch_size * workers // self.size)
        return replace(self, workers=workers, global_batch_size=total)

    def kinds(self) -> list[Scenario]:
        """Returns the scenario, or two of them that cut steps by count and by work."""
        if self.work is None or self.work.known is not None:
            return [self]
        cuts = {"count": replace(self.work, known=False), "work": replace(self.work, known=True)}
        return [replace(self, name=f"{self.name} by {cut}", work=cuts[cut]) for cut in cuts]

    @cached_property
    def _loaded(self) -> list[Profile]:
        try:
            return [Profile.load(path) for path in self.profiles]
        except OSError as error:
            raise ValueError(f"profiles must be files that can be read: {error}") from None


_LARGEST = 1e15
"""Smaller integers are exact as floats, and so are sums of them."""

_MOST_ITERATIONS = 500_000_000
"""The times of all iterations of all workers are drawn at once, 8 bytes each."""

_MINIMUM = {"workers": 0, "steps": 1, "seed": 0, "global_batch_size": 0, "steps_per_epoch": 1}


def _repeat(values: Sequence[Any], size: int) -> list[Any]:
    return [values[rank % len(values)] for rank in range(size)]


_NOISE: Final = {"kind": "lognormal", "sigma": 0.1}

PRESETS: Final[Mapping[str, Mapping[str, object]]] = {
    "constant": {"speeds": [1, 1, 1, 0.5]},
    "lognormal": {"noise": {"kind": "lognormal", "sigma": 0.3, "memory": 0.9}},
    "pareto": {"noise": {"kind": "pareto", "alpha": 3.0}},
    "markov": {"noise": {"kind": "markov"}},
    "dbs": {"steps": 5000, "noise": {"kind": "dbs"}},
    **{
        name: {
            "cores": [int(count) for count in layout.split("/")],
            "samples_per_second": 64.0 / 12,
            "noise": _NOISE,
        }
        for name, layout in {
            "cores-9-12-18": "9/12/18",  # Tyagi and Sharma, 2020
            "cores-2-17-20": "2/17/20",
            **{f"omnilearn-{number}": layout for number, layout in enumerate(OMNILEARN, start=1)},
        }.items()
    },
    # Peaks of single-precision TFLOP/s in NVIDIA's data sheets; also Tyagi and Sharma
    "t4-p4": {"speeds": [1, 1, 5.5 / 8.1, 5.5 / 8.1], "noise": _NOISE},
    "half-speed": {"speeds": [1, 1, 0.5, 0.5], "noise": _NOISE},  # Chen et al., 2020
    "lengths": {"global_batch_size": 64, "work": {"kind": "lognormal", "sigma": 1.0}},
    "spot": {
        "speeds": [1, 1, 0.5, 0.5],
        "noise": _NOISE,
        "preemption": {"mean_up_seconds": 300.0, "mean_down_seconds": 60.0},
    },
}
"""Built-in scenarios, by name."""


def load_scenario(name_or_path: str) -> Scenario:
    """Loads a built-in scenario by its name, or a TOML file by its path.

    Raises:
        ValueError: There is no such scenario or file, a key is unknown (the message names the
            nearest known key), or a value is out of range.
    """
    if name_or_path in PRESETS:
        return read_scenario(PRESETS[name_or_path], name_or_path)
    path = Path(name_or_path)
    if not is_file_name(name_or_path, ".toml"):
        require_known("scenario", name_or_path, PRESETS)
    try:
        table = _toml(read_regular(path).decode())
        _check_values("", table)
        return read_scenario({"name": path.stem, **table}, path.stem, path.parent)
    except (OSError, ValueError) as error:  # TOMLDecodeError and UnicodeDecodeError are ValueErrors
        raise ValueError(f"{path}: {getattr(error, 'strerror', None) or error}") from None


def read_scenario(table: Mapping[str, object], name: str, folder: Path | None = None) -> Scenario:
    """Builds a scenario from a parsed TOML table.

    Args:
        table: Table with the arguments of `Scenario` as keys. `noise`, `communication` and `work`
            are tables with a `kind` and its options; `preemption` is a table with its options.
        name: Name of the scenario, if the table has none.
        folder: Folder to which the paths of profiles are relative.

    Raises:
        ValueError: As in `load_scenario`.

    Example:
        >>> read_scenario({"cores": [9, 12, 18], "noise": {"kind": "pareto"}}, "mine").noise
        Pareto(alpha=3.0)
    """
    keys = [option.name for option in fields(Scenario)]
    for key in table:
        require_known("key", key, keys)
    values: dict[str, Any] = {"name": name, **table}
    for key in ("speeds", "cores", "profiles"):
        if key in values:
            values[key] = _as_tuple(key, values[key])
    if folder is not None and "profiles" in values:
        values["profiles"] = tuple(str(folder / str(path)) for path in values["profiles"])
    for key in sorted(_TABLES.keys() & values.keys()):
        values[key] = _read_table(key, values[key])
    return _build("the scenario", Scenario, values)


def _as_tuple(key: str, value: object) -> tuple[object, ...]:
    """Reads a list such as ``[9, 12, 18]``, or ``"9/12/18"`` as papers write it."""
    if isinstance(value, str) and key != "profiles":
        with suppress(ValueError):
            return tuple(float(part) for part in value.split("/"))
    if not isinstance(value, list | tuple) or not value:
        raise ValueError(f"{key} must be a list with at least one entry, got {value!r}")
    return tuple(value)


def _read_table(key: str, table: object) -> object:
    """Builds what a table describes by its options, and by its kind if there are several."""
    if not isinstance(table, Mapping):
        raise ValueError(f"{key} must be a table, got {table!r}: write [{key}] above it")
    options, build = dict(table), _TABLES[key]
    if isinstance(build, dict):
        kind = options.pop("kind", None)
        if kind is None:
            raise ValueError(f"{key} must have a kind: one of {', '.join(build)}")
        build = build[require_known(f"{key}.kind", str(kind), build)]
    return _build(key, build, options)


def _build(where: str, build: Callable[..., T], options: Mapping[str, object]) -> T:
    keys = {option.name: option for option in fields(build) if option.init}  # type: ignore[arg-type]
    for name in options:
        require_known(f"key of {where}", name, [*keys] or ["kind"])
    needed = [name for name, key in keys.items() if key.default is key.default_factory is MISSING]
    if missing := " and ".join(name for name in needed if name not in options):
        raise ValueError(f"{where} has no {missing}: add what is missing")
    try:
        return build(**options)
    except TypeError as error:
        raise ValueError(f"{where}: a key is of a wrong type: {error}") from None


def _toml(text: str) -> dict[str, object]:
    if sys.version_info >= (3, 11):
        import tomllib
    else:
        try:
            import tomli as tomllib
        except ModuleNotFoundError:
            raise ValueError(
                f"a TOML file needs tomli with Python 3.10: pip install {extra('cli')}"
            ) from None
    try:
        table: dict[str, object] = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise ValueError(f"{error}: write key = value, and texts in quotes") from None
    except RecursionError:
        raise ValueError("the file is nested too deeply: it must be a scenario") from None
    return table


def _check_values(key: str, value: object) -> None:
    """Checks that a TOML value, with all that it contains, is one of which scenarios consist."""
    if isinstance(value, dict):
        for name, entry in value.items():
            _check_values(f"{key}.{name}" if key else name, entry)
    elif isinstance(value, list):
        for number, entry in enumerate(value):
            _check_values(f"{key}[{number}]", entry)
    elif isinstance(value, int | float):
        never = key == "preemption.mean_down_seconds" and value == math.inf
        if not (abs(value) < _LARGEST or never):
            raise ValueError(f"{key} must be a number below 1e15, got {shortened(value)}")
    elif not isinstance(value, str):
        raise ValueError(f"{key} must be a number, a text, a list or a table, got {value!r}")
