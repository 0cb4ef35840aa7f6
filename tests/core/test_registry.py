"""The registry, and schemes of a user's own: contract, simulator, command line."""

from __future__ import annotations

import json
import math
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Literal

import pytest

from lbbsp_core import (
    ASP,
    BSP,
    DSSP,
    SSP,
    ElasticBSP,
    Ema,
    Even,
    FixedShares,
    LoadBalanced,
    Mixture,
    Narx,
    Policy,
    Predictor,
    ProportionalControl,
    Recurrent,
)
from lbbsp_core.registry import POLICIES, PREDICTORS, SYNCHRONISERS, Component
from lbbsp_core.sim import SimConfig, cores, run_async, run_bsp, synthetic_cluster
from lbbsp_core.sim.backtest import contenders
from lbbsp_core.testing import check_policy, check_synchroniser

SCRIPTS = Path(__file__).parents[1] / "parallel" / "scripts"


@pytest.fixture
def schemes(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Imports the module of a user with a policy and a synchroniser."""
    monkeypatch.syspath_prepend(str(SCRIPTS))
    import custom_schemes

    return custom_schemes


# Names and options


def test_the_names_that_stay() -> None:
    assert list(POLICIES) == [
        "bsp", "fixed", "dbs", "proportional", "leader-straggler", "lbbsp", "lbbsp-every",
        "observe",
    ]  # fmt: skip
    assert list(PREDICTORS) == [
        "last", "ema0.2", "ema0.5", "arima", "rnn", "lstm", "narx", "narx-without-drivers",
        "mixture",
    ]  # fmt: skip
    assert list(SYNCHRONISERS) == ["bsp", "ssp", "asp", "dssp", "elasticbsp"]


@pytest.mark.parametrize("name", POLICIES)
def test_every_policy_can_be_built(name: str) -> None:
    made = POLICIES.build(name, shares=(2.0, 1.0))
    assert isinstance(made, Policy)
    assert type(made) is POLICIES[name].cls


@pytest.mark.parametrize("name", contenders())
def test_every_predictor_can_be_built(name: str) -> None:
    made = PREDICTORS.build(name, horizon=2)
    assert isinstance(made, Predictor)
    assert getattr(made, "horizon", 2) == 2


@pytest.mark.parametrize(
    ("family", "text", "made"),
    [
        (POLICIES, "bsp", Even()),
        (POLICIES, "lbbsp", LoadBalanced()),
        (POLICIES, "lbbsp-every", LoadBalanced(min_gain=0.0)),
        (POLICIES, "lbbsp:min_gain=0", LoadBalanced(min_gain=0)),
        (POLICIES, "lbbsp:0.1", LoadBalanced(min_gain=0.1)),
        (POLICIES, "lbbsp:0.1:interval=4", LoadBalanced(min_gain=0.1, interval=4)),
        (POLICIES, "lbbsp-every:3", LoadBalanced(min_gain=0.0, interval=3)),
        (POLICIES, "lbbsp_core.policy:LoadBalanced:interval=2", LoadBalanced(interval=2)),
        (PREDICTORS, "ema0.2", Ema(0.2)),
        (PREDICTORS, "lbbsp_core:Ema:0.3", Ema(0.3)),
        (PREDICTORS, "rnn", Recurrent("rnn", horizon=3)),
        (PREDICTORS, "rnn:hidden=4", Recurrent("rnn", horizon=3, hidden=4)),
        (PREDICTORS, "narx", Narx(horizon=3)),
        (PREDICTORS, "narx:horizon=1", Narx(horizon=1)),
        (PREDICTORS, "narx:use_exogenous=False", Narx(horizon=3, use_exogenous=False)),
        (PREDICTORS, "narx-without-drivers", Narx(horizon=3, use_exogenous=False)),
        (PREDICTORS, "mixture:eta=0.5", Mixture(horizon=3, eta=0.5)),
        (SYNCHRONISERS, "bsp", BSP()),
        (SYNCHRONISERS, "ssp:3", SSP(3)),
        (SYNCHRONISERS, "ssp:staleness=3", SSP(3)),
        (SYNCHRONISERS, "ssp:inf", SSP(math.inf)),
        (SYNCHRONISERS, "asp", ASP()),
        (SYNCHRONISERS, "dssp:3:15", DSSP(3, 15)),
        (SYNCHRONISERS, "dssp:upper=15:lower=3", DSSP(3, 15)),
        (SYNCHRONISERS, "elasticbsp:15", ElasticBSP(15)),
        (SYNCHRONISERS, "elasticbsp:4:warmup=1", ElasticBSP(4, warmup=1)),
    ],
)
def test_components_by_name(family: Any, text: str, made: Any) -> None:
    assert family.build(text, horizon=3) == made


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("elastic:3", "there is no sync 'elastic': did you mean 'elasticbsp'"),
        ("", "there is no sync ''"),
        ("ssp", "ssp needs staleness: write ssp:STALENESS"),
        ("dssp:3", "dssp:3 needs upper: write dssp:3:UPPER"),
        ("asp:1", "asp takes no options, got 'asp:1': write asp"),
        ("dssp:3:x", "dssp: upper must be an integer, got 'x'"),
        ("dssp:0:inf", "dssp: upper must be an integer, got 'inf'"),
        ("ssp:many", "ssp: staleness must be a number, got 'many'"),
        ("ssp:1.5", r"SSP\.staleness must be an integer >= 0, got 1\.5"),
        ("dssp:1:2:3", r"dssp takes at most 2 options \(lower, upper\), got .*: leave out '3'"),
        ("dssp:3:lower=4", "'dssp:3:lower=4' gives the option lower twice"),
        ("ssp:stalenes=3", "there is no option of ssp 'stalenes': did you mean 'staleness'"),
        ("ssp:-1", "SSP.staleness must be an integer >= 0"),
        ("dssp:5:3", "DSSP.upper must be >= lower = 5"),
        ("nowhere_at_all:Mine", "no sync 'nowhere_at_all', and no module of that name to import"),
        ("lbbsp_core.sync:SPP", "module lbbsp_core.sync has no class 'SPP'"),
        ("lbbsp_core.sync:zipline", "module lbbsp_core.sync has no class 'zipline'"),
        ("lbbsp_core:Even", "lbbsp_core:Even is not a sync, since it lacks finish, join, keeps_pu"),
        (".sync:BSP", "there is no sync '.sync'"),
    ],
)
def test_texts_that_name_no_synchroniser(text: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        SYNCHRONISERS.build(text)


def test_a_module_that_cannot_be_imported_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "failing.py").write_text("{}[1]")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ValueError, match=r"module failing of a sync cannot be im.*: KeyError: 1"):
        SYNCHRONISERS.build("failing:Mine")


def test_fixed_takes_its_shares_from_the_caller() -> None:
    made = FixedShares((2.0, 1.0))
    assert POLICIES.build("fixed", shares=(2.0, 1.0)) == made
    assert POLICIES.build("lbbsp", shares=(2.0, 1.0)) == LoadBalanced(), (
        "a policy without that field"
    )
    with pytest.raises(ValueError, match="fixed needs shares"):
        POLICIES.build("fixed")
    assert (
        POLICIES.build("fixed:2/1") == POLICIES.build("fixed:shares=2/1", shares=(5.0, 5.0)) == made
    )
    with pytest.raises(ValueError, match="fixed: shares must be numbers such as 2/1/1, got '2;1'"):
        POLICIES.build("fixed:2;1")
    with pytest.raises(ValueError, match=r"FixedShares.shares must be .*got -1"):
        POLICIES.build("fixed:2/-1")


def test_proportional_control_starts_from_ratings() -> None:
    assert POLICIES.build("proportional:ratings=9/12.5") == ProportionalControl(ratings=(9.0, 12.5))
    assert POLICIES.build("proportional:ratings=none") == POLICIES.build(
        "proportional", shares=(2.0, 1.0)
    )
    with pytest.raises(ValueError, match=r"proportional: ratings must be numbers .* or none"):
        POLICIES.build("proportional:ratings=fast")


@dataclass(frozen=True)
class Options:
    """One option of each type."""

    kind: ClassVar[str] = "constant"

    count: int | None = None
    flag: bool = False
    name: str = ""
    level: Literal["low", "high"] = "low"
    step: Literal[1, 2] = 1


@pytest.mark.parametrize(
    ("options", "made"),
    [
        ("count=3", Options(count=3)),
        ("none:true", Options(flag=True)),
        ("flag=False:name=a.b", Options(name="a.b")),
        ("level=high", Options(level="high")),
    ],
)
def test_options_are_read_by_their_types(options: str, made: Options) -> None:
    component = Component("options", Options)
    assert component.with_options("options", options.split(":")).build() == made


@pytest.mark.parametrize(
    ("option", "message"),
    [
        ("count=1.5", "count must be an integer or none, got '1.5'"),
        ("flag=1", "flag must be true or false, got '1'"),
        ("level=middle", "level must be low or high, got 'middle'"),
        ("step=2", "step cannot be written as text"),
        ("kind=x", "there is no option of options 'kind'"),
    ],
)
def test_options_of_other_types(option: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Component("options", Options).with_options("options", [option])


def test_a_module_that_fails_to_import_another_one_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "broken_schemes.py").write_text("import a_module_that_is_missing\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.raises(ModuleNotFoundError, match="a_module_that_is_missing"):
        POLICIES.build("broken_schemes:Mine")


# Schemes of a user's own


def test_own_schemes_satisfy_the_contracts(schemes: Any) -> None:
    check_policy(schemes.Ranked())
    for period in (1, 5):
        check_synchroniser(schemes.PeriodicBarrier(period), max_lead=period - 1)


def test_own_schemes_by_name(schemes: Any) -> None:
    assert POLICIES.build("custom_schemes:Ranked:ratio=0.25") == schemes.Ranked(0.25)
    assert SYNCHRONISERS.build("custom_schemes:PeriodicBarrier:3") == schemes.PeriodicBarrier(3)
    with pytest.raises(ValueError, match=r"ratio must be in \(0, 1\], got 2"):
        POLICIES.build("custom_schemes:Ranked:ratio=2")
    with pytest.raises(ValueError, match="custom_schemes:Ranked is not a sync"):
        SYNCHRONISERS.build("custom_schemes:Ranked")


def test_own_policy_in_the_simulator(schemes: Any) -> None:
    """Speeds 1, 4, 2 samples a second of core: shares 1/4, 1, 1/2 once all are measured."""
    cluster = synthetic_cluster(cores([1, 4, 2], samples_per_second=10.0), steps=6)
    setting, own = SimConfig(28), schemes.Ranked()
    for predictor in (Ema(0.5), Mixture()):  # in arrays, and by balancers
        line = run_bsp(cluster, setting, own, predictor)
        assert line.sizes.tolist() == [[10, 9, 9], *[[4, 16, 8]] * 5]
        assert line.wall_seconds.tolist() == pytest.approx([1.0, *[0.4] * 5])


def test_own_synchroniser_in_the_simulator(schemes: Any) -> None:
    """Three iterations of 1 s and of 2 s from barrier to barrier: the fast one waits 3 of 6 s."""
    cluster = synthetic_cluster(cores([2, 1], samples_per_second=8.0), steps=6)
    run = run_async(cluster, SimConfig(32), schemes.PeriodicBarrier(3))
    assert run.total_seconds == 12.0
    assert run.waiting_share == 0.25
    fast = run.schedule.worker == 0
    assert run.schedule.push[fast].tolist() == [1.0, 2.0, 3.0, 7.0, 8.0, 9.0]
    assert run.schedule.release[fast].tolist()[:5] == [1.0, 2.0, 6.0, 7.0, 8.0]
    barriers = run.schedule.update[run.schedule.iteration % 3 == 2]
    assert len(set(barriers)) == 2, "two workers, one update a barrier"


def test_own_schemes_together_in_the_simulator(schemes: Any) -> None:
    cluster = synthetic_cluster(cores([4, 1, 2], samples_per_second=10.0), steps=8)
    run = run_async(cluster, SimConfig(28), schemes.PeriodicBarrier(2), schemes.Ranked(), Ema(0.5))
    drawn = set(zip(run.schedule.worker.tolist(), run.sizes.tolist(), strict=True))
    assert drawn == {(0, 10), (1, 9), (2, 9), (0, 16), (1, 4), (2, 8)}


def test_own_schemes_on_the_command_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """They are found in the current directory, which is not on the search path yet."""
    pytest.importorskip("typer")
    pytest.importorskip("rich")
    from typer.testing import CliRunner

    from lbbsp_core.cli.app import application

    monkeypatch.setattr(sys, "path", [path for path in sys.path if path != str(SCRIPTS)])
    monkeypatch.delitem(sys.modules, "custom_schemes", raising=False)
    monkeypatch.chdir(SCRIPTS)
    arguments = [
        "--scenario", "markov", "--workers", "3", "--steps", "20",
        "--policies", "bsp,custom_schemes:Ranked,custom_schemes:Ranked:ratio=0.9",
        "--sync", "bsp,custom_schemes:PeriodicBarrier:period=4",
        "--json", str(tmp_path / "out.json"),
    ]  # fmt: skip
    result = CliRunner().invoke(application(), ["simulate", *arguments])
    assert result.exit_code == 0, result.output
    rows = json.loads((tmp_path / "out.json").read_text())["rows"]
    named = ("bsp", None), ("custom_schemes:Ranked", "ema0.5"), (
        "custom_schemes:Ranked:ratio=0.9", "ema0.5",
    )  # fmt: skip
    assert [(row["sync"], row["policy"], row["predictor"]) for row in rows] == [
        (sync, *pair)
        for sync in ("bsp", "custom_schemes:PeriodicBarrier:period=4")
        for pair in named
    ]
    assert len({row["total_seconds"] for row in rows}) == 6
    assert all(row["efficiency"] > 0 for row in rows)
