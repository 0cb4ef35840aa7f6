"""Scenarios: an invented cluster in a few lines of TOML."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final, TypeVar

from lbbsp_core.cost import Affine, Cost, Profile
from lbbsp_core.sim.communication import (
    Communication,
    FixedTime,
    ParameterServer,
    RingAllReduce,
)
from lbbsp_core.sim.slowdowns import Constant, Disturbance, Lognormal, Markov, Noise, Pareto
from lbbsp_core.sim.synthetic import (
    OMNILEARN,
    Preemption,
    SyntheticCluster,
    cores,
    synthetic_cluster,
)
from lbbsp_core.types import Limits
from lbbsp_core.validate import require_known, require_nonnegative, require_positive

T = TypeVar("T")

NOISES: Final[Mapping[str, Callable[..., Noise]]] = MappingProxyType(
    {
        "constant": Constant,
        "lognormal": Lognormal,
        "pareto": Pareto,
        "markov": Markov,
        "dbs": Disturbance,
    }
)
COMMUNICATIONS: Final[Mapping[str, Callable[..., Communication]]] = MappingProxyType(
    {"fixed": FixedTime, "ring": RingAllReduce, "parameter-server": ParameterServer}
)


@dataclass(frozen=True)
class Scenario:
    """An invented cluster, and how long it runs.

    At most one of `speeds`, `cores` and `profiles` is given; it is repeated until there are
    enough workers.

    Args:
        name: For tables.
        workers: N; 0: as many as are listed, or 4.
        steps: Global batches, >= 1.
        seed: Of all chance, >= 0.
        global_batch_size: X; 0: 64 samples a worker.
        samples_per_second: Of a worker of speed 1, or of one core.
        overhead_seconds: Of every iteration, whatever its batch.
        speeds: Relative speeds, > 0.
        cores: Cores of CPU workers.
        serial_share: Of a sample's work that one core does alone, see `lbbsp_core.sim.cores`.
        profiles: Files from ``lbbsp profile``: curves of GPUs.
        steps_per_epoch: For policies that plan once an epoch.
        noise: What disturbs the workers.
        communication: What an exchange of gradients costs.
        preemption: Who leaves and comes back; None: nobody.

    Raises:
        ValueError: An option out of range, or several that exclude each other.
    """

    name: str
    workers: int = 0
    steps: int = 500
    seed: int = 0
    global_batch_size: int = 0
    samples_per_second: float = 64.0
    overhead_seconds: float = 0.0
    speeds: tuple[float, ...] = ()
    cores: tuple[float, ...] = ()
    serial_share: float = 0.0
    profiles: tuple[str, ...] = ()
    steps_per_epoch: int = 50
    noise: Noise = field(default_factory=Constant)
    communication: Communication = field(default_factory=FixedTime)
    preemption: Preemption | None = None

    def __post_init__(self) -> None:
        for name, least in _LEAST.items():
            value = getattr(self, name)
            if isinstance(value, bool) or value != int(value) or value < least:
                raise ValueError(f"{name} must be a whole number >= {least}, got {value!r}")
        require_positive("samples_per_second", self.samples_per_second)
        require_nonnegative("overhead_seconds", self.overhead_seconds)
        for name in ("speeds", "cores"):
            for value in getattr(self, name):
                require_positive(name, value)
        lists = [name for name in ("speeds", "cores", "profiles") if getattr(self, name)]
        if len(lists) > 1:
            raise ValueError(
                f"{' and '.join(lists)} exclude each other: each says how fast all workers are; "
                "keep one"
            )
        if self.serial_share and not self.cores:
            raise ValueError("serial_share is about cores, and none are given: add cores = [...]")

    @property
    def size(self) -> int:
        """N."""
        return self.workers or len(self.speeds or self.cores or self.profiles) or 4

    @property
    def total(self) -> int:
        """X."""
        return self.global_batch_size or 64 * self.size

    def curves(self) -> list[Cost]:
        """Undisturbed curves by rank."""
        listed: Sequence[Cost]
        if self.profiles:
            listed = self._profiles()
        elif self.cores:
            listed = cores(
                self.cores, self.samples_per_second, self.overhead_seconds, self.serial_share
            )
        else:
            listed = [
                Affine(self.overhead_seconds, 1.0 / (speed * self.samples_per_second))
                for speed in self.speeds or (1.0,)
            ]
        return _repeated(listed, self.size)

    def limits(self) -> list[Limits] | None:
        """What the memory of profiled GPUs allows; None where there is no such end."""
        if not self.profiles:
            return None
        return _repeated([profile.limits() for profile in self._profiles()], self.size)

    def cluster(self) -> SyntheticCluster:
        """Draws it."""
        return synthetic_cluster(self.curves(), self.steps, noise=self.noise, seed=self.seed)

    def sized(self, workers: int) -> Scenario:
        """The same for another number of workers, with as many samples each."""
        total = self.global_batch_size and max(1, self.global_batch_size * workers // self.size)
        return replace(self, workers=workers, global_batch_size=total)

    def _profiles(self) -> list[Profile]:
        return [Profile.load(path) for path in self.profiles]


_LEAST = {"workers": 0, "steps": 1, "seed": 0, "global_batch_size": 0, "steps_per_epoch": 1}


def _repeated(listed: Sequence[T], size: int) -> list[T]:
    return [listed[rank % len(listed)] for rank in range(size)]


PRESETS: Final[Mapping[str, Mapping[str, Any]]] = MappingProxyType(
    {
        "constant": {"speeds": [1, 1, 1, 0.5]},
        "lognormal": {"noise": {"kind": "lognormal", "sigma": 0.3, "memory": 0.9}},
        "pareto": {"noise": {"kind": "pareto", "alpha": 3.0}},
        "markov": {"noise": {"kind": "markov"}},
        "dbs": {"steps": 5000, "noise": {"kind": "dbs"}},
        **{
            f"omnilearn-{number}": {
                "cores": [int(count) for count in layout.split("/")],
                "samples_per_second": 64.0 / 12,
                "noise": {"kind": "lognormal", "sigma": 0.1},
            }
            for number, layout in enumerate(OMNILEARN, start=1)
        },
        "spot": {
            "noise": {"kind": "lognormal", "sigma": 0.1},
            "preemption": {"mean_up_seconds": 300.0, "mean_down_seconds": 60.0},
        },
    }
)
"""Scenarios that need no file."""


def load_scenario(name_or_path: str) -> Scenario:
    """A preset by its name, or a TOML file.

    Raises:
        ValueError: Neither, or unknown keys (names the nearest), or values out of range.
    """
    if name_or_path in PRESETS:
        return read_scenario(PRESETS[name_or_path], name_or_path)
    path = Path(name_or_path)
    if path.suffix != ".toml" and not path.exists():
        require_known("scenario", name_or_path, PRESETS)
    try:
        table = _toml(path.read_text(encoding="utf-8"))
        return read_scenario({"name": path.stem, **table}, path.stem, path.parent)
    except (OSError, ValueError) as error:  # a TOMLDecodeError or UnicodeDecodeError is one
        raise ValueError(f"{path}: {error}") from None


def read_scenario(table: Mapping[str, Any], name: str, folder: Path | None = None) -> Scenario:
    """A scenario from what TOML gives.

    Args:
        table: Keys are the arguments of `Scenario`; `noise` and `communication` are tables with
            a `kind` and its options, `preemption` one with its options.
        name: Where the table has none.
        folder: What paths of profiles are relative to.

    Raises:
        ValueError: As in `load_scenario`.

    Example:
        >>> read_scenario({"cores": [9, 12, 18], "noise": {"kind": "pareto"}}, "mine").noise
        Pareto(alpha=3.0)
    """
    known = [one.name for one in fields(Scenario)]
    for key in table:
        require_known("key", key, known)
    values: dict[str, Any] = {"name": name, **table}
    for key in ("speeds", "cores", "profiles"):
        if key in values:
            values[key] = _listed(key, values[key])
    if folder is not None and "profiles" in values:
        values["profiles"] = tuple(str(folder / path) for path in values["profiles"])
    if "noise" in values:
        values["noise"] = _of_kind("noise", values["noise"], NOISES)
    if "communication" in values:
        values["communication"] = _of_kind("communication", values["communication"], COMMUNICATIONS)
    if "preemption" in values:
        values["preemption"] = _made("preemption", Preemption, _table("preemption", values))
    return _made("the scenario", Scenario, values)


def _listed(key: str, value: Any) -> tuple[Any, ...]:
    """``[9, 12, 18]``, or ``"9/12/18"`` as papers write it."""
    if isinstance(value, str) and key != "profiles":
        try:
            return tuple(float(part) for part in value.split("/"))
        except ValueError:
            value = None
    if not isinstance(value, list | tuple) or not value:
        raise ValueError(f"{key} must be a list with at least one entry, got {value!r}")
    return tuple(value)


def _table(key: str, values: Mapping[str, Any]) -> Mapping[str, Any]:
    if not isinstance(values[key], Mapping):
        raise ValueError(f"{key} must be a table, got {values[key]!r}: write [{key}] above it")
    own: Mapping[str, Any] = values[key]
    return own


def _of_kind(key: str, value: Any, kinds: Mapping[str, Callable[..., T]]) -> T:
    options = dict(_table(key, {key: value}))
    kind = options.pop("kind", None)
    if kind is None:
        raise ValueError(f"{key} must say its kind: one of {', '.join(kinds)}")
    return _made(key, kinds[require_known(f"{key}.kind", str(kind), kinds)], options)


def _made(where: str, build: Callable[..., T], options: Mapping[str, Any]) -> T:
    known = [one.name for one in fields(build) if one.init]  # type: ignore[arg-type]
    for name in options:
        require_known(f"key of {where}", name, known or ["kind"])
    try:
        return build(**options)
    except TypeError as error:  # a key is missing, or text stands where a number belongs
        raise ValueError(f"{where}: {error}") from None


def _toml(text: str) -> dict[str, Any]:
    if sys.version_info >= (3, 11):
        import tomllib
    else:
        try:
            import tomli as tomllib
        except ModuleNotFoundError:
            raise ValueError(
                "a TOML file needs tomli with Python 3.10: pip install 'lbbsp[cli]'"
            ) from None
    table: dict[str, Any] = tomllib.loads(text)
    return table
