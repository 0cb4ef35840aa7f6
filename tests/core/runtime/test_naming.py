"""Options by name, by file and as objects."""

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from teams import team

from lbbsp_core import (
    Affine,
    Balancer,
    CostShape,
    Ema,
    Even,
    FixedShares,
    Limits,
    LoadBalanced,
    Mixture,
    Narx,
    Policy,
    Profile,
    Proportional,
    SessionOptions,
    SingleWorker,
)
from lbbsp_core.runtime.exchange import handshake
from lbbsp_core.runtime.loop.start import agree
from lbbsp_core.runtime.options.naming import (
    described,
    limits_by_rank,
    read_cost,
    read_limits,
    read_policy,
    read_predictor,
)

READERS = {
    "policy": read_policy,
    "predictor": read_predictor,
    "cost": read_cost,
    "limits": read_limits,
}


@pytest.fixture
def profile(tmp_path: Path) -> Path:
    path = tmp_path / "gpu.json"
    points = [{"batch": 8, "seconds": 0.1}, {"batch": 16, "seconds": 0.2}]
    path.write_text(json.dumps({"schema": 1, "points": points, "out_of_memory_at": 20}))
    return path


@pytest.mark.parametrize(
    ("kind", "name", "value"),
    [
        ("policy", "lbbsp", LoadBalanced()),
        ("policy", "lbbsp:min_gain=0:interval=5", LoadBalanced(0.0, 5)),
        ("policy", "bsp", Even()),
        ("policy", "fixed:9/12/18", FixedShares((9.0, 12.0, 18.0))),
        ("policy", "lbbsp_core:LoadBalanced:interval=2", LoadBalanced(interval=2)),
        ("predictor", "ema0.5", Ema(0.5)),
        ("predictor", "narx:hidden=4", Narx(hidden=4)),
        ("cost", "proportional", Proportional()),
        ("cost", "affine:0.01:0.001", Affine(0.01, 0.001)),
        ("limits", 64, Limits(maximum=64)),
        ("limits", np.int64(64), Limits(maximum=64)),
        ("limits", (Limits(8, 16), 64, 32), (Limits(8, 16), Limits(1, 64), Limits(1, 32))),
    ],
)
def test_a_name_stands_for_its_object(kind: str, name: object, value: object) -> None:
    read = READERS[kind]
    assert read(name) == value
    assert read(value) is value or read(value) == value  # an object stays as it is


def test_a_predictor_by_name_is_trained_for_the_lag_and_an_object_keeps_its_horizon() -> None:
    assert read_predictor("narx", 3) == Narx(horizon=3)
    assert read_predictor(None, 3) == Mixture(horizon=3)
    assert read_predictor(Narx(), 3) == Narx()
    assert read_predictor("ema0.5", 3) == Ema(0.5)  # has no horizon
    balancer = Balancer(rank=0, workers=2, global_batch_size=8, predictor="mixture", lag=3)
    assert balancer.predictor == Mixture(horizon=3)


@pytest.mark.parametrize(
    ("name", "option"),
    [("lbbsp:min_gain=0", "min_gain"), ("lbbsp-every", "min_gain"), ("bsp", "interval")],
)
def test_options_fill_what_a_name_leaves_open(name: str, option: str) -> None:
    assert read_policy("lbbsp", min_gain=0.1, interval=3) == LoadBalanced(0.1, 3)
    assert read_policy("lbbsp:interval=2", min_gain=0.1) == LoadBalanced(0.1, 2)
    with pytest.raises(ValueError, match=rf"\['{option}'\] cannot be combined with policy="):
        read_policy(name, **{option: 1})


@pytest.mark.parametrize("kind", [str, Path])
def test_a_cost_may_be_the_file_of_a_profile(profile: Path, kind: type) -> None:
    assert read_cost(kind(profile)) == Profile.load(profile)
    assert SessionOptions(cost=kind(profile)).cost == Profile.load(profile)
    shape = CostShape(Affine(0.1, 0.1), 8)
    assert read_cost(shape) is shape
    assert read_cost(None) == Proportional()


def test_a_file_in_the_current_directory_may_have_any_name(
    profile: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(profile.parent)
    profile.rename("gpu:0.json")
    assert read_cost("gpu:0.json") == Profile.load("gpu:0.json")


@pytest.mark.parametrize(
    ("kind", "value", "problem"),
    [
        # names: all choices, and the nearest one only if it is near
        ("policy", "lbsp", r"no policy 'lbsp': did you mean 'lbbsp'\? Known names: bsp, fixed"),
        ("policy", "foo", r"no policy 'foo'\. Known names: bsp, fixed, .*, lbbsp-every, observe$"),
        ("predictor", "ema", r"did you mean 'ema0\.\d'\? Known names: last, "),
        ("predictor", "foo", r"no predictor 'foo'\. Known names: last, .*, mixture$"),
        ("cost", "afine:1:2", r"no cost 'afine': did you mean 'affine'\? Known names: prop"),
        ("policy", "lbbsp:mingain=0", "no option of lbbsp 'mingain': did you mean 'min_gain'"),
        ("policy", "lbbsp:foo=0", r"no option of lbbsp 'foo'\. Known names: min_gain, interval"),
        ("policy", "fixed", "fixed needs shares: write fixed:SHARES"),
        ("policy", "ssp:3", r"there is no policy 'ssp': did you mean 'bsp'\? Known names: bsp"),
        # files
        ("cost", "nowhere.json", r"cost='nowhere.json' names no profile .*No such file.* Measure"),
        ("cost", "nowhere.json", "with lbbsp profile SCRIPT.py -o nowhere.json, or choose from pr"),
        ("cost", "propotional", "did you mean 'proportional'"),
        ("cost", ".", r"cost='\.' names no profile that can be read.*Is a directory"),
        # limits
        ("limits", 0, "limits must be >= 1, the largest batch in samples, got 0"),
        ("limits", (64, 8), r"two workers: write \[Limits\(1, 64\), Limits\(1, 8\)\]"),
        ("limits", (8, 64), r"limits=\(8, 64\) may mean .* write Limits\(8, 64\) or \[Limits\(1, "),
    ],
)
def test_a_wrong_value_is_named_with_its_remedy(kind: str, value: object, problem: str) -> None:
    with pytest.raises(ValueError, match=problem):
        READERS[kind](value)
    with pytest.raises(ValueError, match=problem):
        SessionOptions(**{kind: value})
    with pytest.raises(ValueError, match=problem):
        Balancer(rank=0, workers=2, global_batch_size=8, **{kind: value})


@pytest.mark.parametrize(
    ("kind", "value", "problem"),
    [
        ("policy", LoadBalanced, r"got the class LoadBalanced: create an object, as in policy=Loa"),
        ("policy", Ema, r"got <class .*Ema'>, which lacks .*is_static, .*: choose from bsp, fixed"),
        ("policy", Ema(0.5), r"got Ema\(alpha=0.5\), which lacks .*is_static, .*: choose from bsp"),
        ("policy", 3, r"policy must be a policy or its name, got 3: choose from bsp, .*, observe"),
        ("predictor", Even(), r"got Even\(\), which lacks predict: choose from last, "),
        ("predictor", int, "predictor must be a predictor or its name, got <class 'int'>: choose"),
        ("cost", 0.1, "cost must be a cost or its name, got 0.1: choose from proportional"),
        ("limits", "64", "a whole number of samples, .* got '64': write limits=64 or limits=L"),
        ("limits", True, "a whole number of samples, .* got True"),
        ("limits", (Limits(), None), "a list with one of these per worker, got None"),
        ("limits", Limits, "got <class 'lbbsp_core.types.Limits'>"),
    ],
)
def test_a_value_of_a_wrong_type_is_named_with_what_to_write(
    kind: str, value: object, problem: str
) -> None:
    with pytest.raises(TypeError, match=problem):
        READERS[kind](value)


def test_a_policy_that_lacks_a_part_of_the_contract_is_refused_with_its_name() -> None:
    class Half:
        uses_costs = is_static = False

        def init(self, constraints: object) -> None: ...

    with pytest.raises(
        TypeError,
        match=r"got <.*, which lacks accepts_narrower_limits, needs_common_steps, update: choose",
    ):
        read_policy(Half())
    assert isinstance(LoadBalanced(), Policy)


def test_limits_are_one_for_each_worker() -> None:
    assert limits_by_rank(64, 2) == (Limits(1, 64),) * 2
    assert limits_by_rank(None, 2) == (Limits(),) * 2
    with pytest.raises(ValueError, match="one for each of the 2 workers, got 3"):
        limits_by_rank([64, 64, 32], 2)


def test_workers_with_names_and_with_objects_agree_and_plan_alike(monkeypatch: Any) -> None:
    names = "lbbsp:min_gain=0", "ema0.2", "affine:0.1:0.01", 60
    values = LoadBalanced(min_gain=0.0), Ema(0.2), Affine(0.1, 0.01), Limits(1, 60)
    keys = "policy", "predictor", "cost", "limits"
    named, objects = (
        team(2, 64, **dict(zip(keys, given, strict=True)))[rank]
        for rank, given in enumerate([names, values])
    )
    for _ in range(3):
        messages = [named.report(0.4), objects.report(0.1)]
        for balancer in (named, objects):
            balancer.receive(messages, 0.4)
    assert named.sizes(named.step) == objects.sizes(objects.step) != (32, 32)
    assert described(named.policy) == described(objects.policy)  # 0 and 0.0
    told: list[bytes] = []
    monkeypatch.setattr(handshake, "gather_bytes", lambda _, data: told.append(data) or [data])
    for balancer in (named, objects):
        alone = Balancer(rank=0, workers=1, global_batch_size=64, policy=balancer.policy)
        agree(alone, None, SingleWorker(), {})
    assert told[0] == told[1]


@dataclass(frozen=True)
class Scheduled:
    """Policy of a user, one of whose options is a function."""

    rate: Callable[[int], float]
    start: float = 0.0


def test_functions_are_described_alike_in_all_processes() -> None:
    def make() -> Callable[[int], float]:
        def rate(step: int) -> float:
            return 1.0 / (step + 1)

        return rate

    def other(step: int) -> float:
        return 0.0

    one, two = make(), make()
    assert repr(one) != repr(two), "addresses differ, as they do in another process"
    assert described(Scheduled(one)) == described(Scheduled(two, 0))
    assert described(Scheduled(one)) != described(Scheduled(other))
    assert described(Scheduled(one)) == described(Scheduled(two))
