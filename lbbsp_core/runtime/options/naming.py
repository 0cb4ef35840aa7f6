"""Options by name or as objects: the one place where plugins and the simulator read them.

Names are those of the command line, see `lbbsp_core.registry`; a cost may also be the file of a
profile, and limits a number.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Sequence
from numbers import Integral
from pathlib import Path
from typing import Final

from lbbsp_core.cost import Cost, Profile, Proportional
from lbbsp_core.cost.online import CostShape
from lbbsp_core.files import is_file_name
from lbbsp_core.policy import Policy
from lbbsp_core.predict import Mixture, Predictor
from lbbsp_core.registry import COSTS, POLICIES, PREDICTORS
from lbbsp_core.types import Limits, training_limits
from lbbsp_core.validate import nearest, shortened

_ADDRESS: Final = re.compile(r" at 0x[0-9a-fA-F]+")

LimitsOrMaximum = Limits | int
"""Bounds of a batch, or its maximum alone, in samples."""

AnyCost = Cost | CostShape | str | Path
"""A cost, its name, or the file of a profile."""


def read_policy(value: Policy | str, **options: object) -> Policy:
    """Returns a policy that is given as an object or by its name.

    Example:
        >>> read_policy("lbbsp", interval=5)
        LoadBalanced(min_gain=0.02, interval=5)
    """
    if not options:
        return POLICIES.resolve(value)
    if not isinstance(value, str):
        raise ValueError(
            f"{sorted(options)} are options of the default policy and cannot be combined with "
            f"policy={value!r}: set them on the policy itself"
        )
    component = POLICIES.parse(value)
    if refused := sorted(name for name in options if not component.accepts(name)):
        raise ValueError(
            f"{refused} cannot be combined with policy={value!r}, which sets them already or has "
            "no such options: leave them out, or write policy='lbbsp'"
        )
    return component.build(**options)


def read_predictor(value: Predictor | str | None, horizon: int = 1) -> Predictor:
    """Returns a predictor that is given as an object or by its name; None: the default one.

    One that is made here forecasts `horizon` steps.
    """
    return Mixture(horizon=horizon) if value is None else PREDICTORS.resolve(value, horizon=horizon)


def read_cost(value: AnyCost | None) -> Cost | CostShape:
    """Returns a cost that is given as an object, by its name, or by the file of its profile.

    None stands for `Proportional`.
    """
    if value is None:
        return Proportional()
    if isinstance(value, CostShape):
        return value
    text = str(value) if isinstance(value, str | Path) else ""
    is_path = is_file_name(text, ".json")
    if not isinstance(value, str | Path) or ((":" in text or text in COSTS) and not is_path):
        return COSTS.resolve(value)  # type: ignore[arg-type]
    path = Path(value)
    try:
        return Profile.load(path)
    except (OSError, ValueError) as error:
        if not isinstance(error, OSError) and path.exists():
            raise  # the message names the file and what is wrong in it
        near = nearest(text, COSTS)
        raise ValueError(
            f"cost={text!r} names no profile that can be read, at {path.absolute()} "
            f"({getattr(error, 'strerror', error)}): "
            f"{'' if near is None else f'did you mean {near!r}? '}"
            f"Measure one with lbbsp profile SCRIPT.py -o {path}, or choose from {', '.join(COSTS)}"
        ) from None


def read_limits(value: LimitsOrMaximum | Sequence[LimitsOrMaximum]) -> Limits | tuple[Limits, ...]:
    """Returns limits in which a number stands for a maximum.

    Two numbers for two workers are refused: they could be a minimum and a maximum.

    Example:
        >>> read_limits(64) == Limits(maximum=64)
        True
        >>> read_limits([Limits(8), 64, 32]) == (Limits(8), Limits(maximum=64), Limits(maximum=32))
        True
    """
    if isinstance(value, str) or not isinstance(value, Sequence):
        return _one_limit(value)
    read = tuple(map(_one_limit, value))
    if len(value) == 2 and all(isinstance(limit, Integral) for limit in value):
        low, high = (limits.maximum or 0 for limits in read)
        both = f"Limits({low}, {high}) or " if low <= high else ""
        raise ValueError(
            f"limits={shortened(value)} may mean a minimum and a maximum, or a maximum for each of "
            f"two workers: write {both}[Limits(1, {low}), Limits(1, {high})]"
        )
    return read


def limits_by_rank(
    value: LimitsOrMaximum | Sequence[LimitsOrMaximum] | None, workers: int
) -> tuple[Limits, ...]:
    """Returns one `Limits` per worker; see `read_limits` and `lbbsp_core.types.training_limits`."""
    return training_limits(None if value is None else read_limits(value), workers)


def described(value: object) -> str:
    """Returns the repr of options that workers compare; 0 and 0.0 are written alike.

    A name and an object thus give the same text. Addresses, which differ by worker, are left out:
    of a class that is no dataclass only the name is compared, and so it is of a function.
    """
    if isinstance(value, type) or not dataclasses.is_dataclass(value):
        return type(value).__name__
    shown = [field.name for field in dataclasses.fields(value) if field.repr]
    texts = ", ".join(f"{name}={_plain(getattr(value, name))!r}" for name in shown)
    return _ADDRESS.sub("", f"{type(value).__name__}({texts})")


def _plain(value: object) -> object:
    if isinstance(value, float) and value.is_integer():
        return int(value)
    return tuple(map(_plain, value)) if isinstance(value, tuple | list) else value


def _one_limit(value: object) -> Limits:
    if isinstance(value, Limits):
        return value
    if not isinstance(value, Integral) or isinstance(value, bool):
        raise TypeError(
            "limits must be the largest batch, as a whole number of samples, or an "
            "lbbsp_core.Limits, or a list with one of these per worker, got "
            f"{shortened(value)}: write limits=64 or limits=Limits(8, 64)"
        )
    if value < 1:
        raise ValueError(
            f"limits must be >= 1, the largest batch in samples, got {value}: raise it, or leave "
            "limits out"
        )
    return Limits(maximum=int(value))
