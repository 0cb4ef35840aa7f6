"""Contracts that every predictor keeps, then the properties of each one."""

from __future__ import annotations

import functools
import importlib.util
import math
import re
from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from lbbsp_core import Arima, Ema, LastValue, Measurement, Mixture, Narx, Predictor, Recurrent
from lbbsp_core.installation import extra
from lbbsp_core.testing import check_predictor

needs_statsmodels = pytest.mark.skipif(
    importlib.util.find_spec("statsmodels") is None, reason="statsmodels is not installed"
)

PREDICTORS: dict[str, Predictor] = {
    "last": LastValue(),
    "ema": Ema(0.3),
    "lstm": Recurrent("lstm", hidden=2, sequence_length=5, batch=2, window=40),
    "narx": Narx(window=40),
    "narx-ahead": Narx(horizon=3, window=40),
    "mixture": Mixture((Narx(hidden=0, window=40), Ema(0.5), LastValue())),
}
FURTHER: dict[str, Predictor] = {
    "rnn": Recurrent("rnn", hidden=2, sequence_length=5, batch=2, window=40),
    "narx-linear": Narx(hidden=0, window=40),
    "narx-without-drivers": Narx(use_exogenous=False, window=40),
    "mixture-ahead": Mixture((Narx(horizon=2, window=40), Ema(0.5)), horizon=2),
}
every_predictor = pytest.mark.parametrize(
    "predictor",
    [
        *(pytest.param(value, id=name) for name, value in PREDICTORS.items()),
        *(
            pytest.param(value, id=name, marks=pytest.mark.campaign)
            for name, value in FURTHER.items()
        ),
        pytest.param(
            Arima((1, 1, 1), refit_every=150, first_fit=40, window=40),
            id="arima",
            marks=needs_statsmodels,
        ),
    ],
)


def noisy(count: int, seed: int = 0, drivers: int = 2) -> list[Measurement]:
    """Returns speeds of about 100 that fall in irregular bursts, while the first driver is 1."""
    random = np.random.default_rng(seed)
    busy, found = 0.0, []
    for _ in range(count):
        if random.random() < 0.3:
            busy = float(random.random() < 0.5)
        speed = 100 * (1 - 0.4 * busy) * math.exp(random.normal(0, 0.05))
        others = tuple(random.normal(size=max(drivers - 1, 0)))
        found.append(Measurement(32, 32 / speed, (busy, *others)[:drivers]))
    return found


def learn(predictor: Predictor, measurements: Iterable[Measurement], state: Any = None) -> Any:
    state = predictor.init() if state is None else state
    for measurement in measurements:
        state = predictor.update(state, measurement)
    return state


@functools.cache
def learned(predictor: Predictor, count: int) -> Any:
    """Returns the state after `noisy(count)`, computed once for all contracts that start from it.

    Sharing is safe because no predictor changes a state, which
    `test_contract` proves on a state of its own.
    """
    return learn(predictor, noisy(count))


def rmse(predictor: Predictor, measurements: list[Measurement], ahead: int = 1) -> float:
    """Returns the error of forecasts made `ahead` steps before, over the second half."""
    state, forecasts, errors = predictor.init(), [], []
    for k, measurement in enumerate(measurements):
        forecasts.append(predictor.predict(state, measurement.drivers, ahead))
        if k >= max(ahead, len(measurements) // 2):
            errors.append(forecasts[k - ahead + 1] - measurement.samples_per_second)
        state = predictor.update(state, measurement)
    return float(np.sqrt(np.mean(np.square(errors))))


# Contracts


@every_predictor
def test_contract(predictor: Predictor) -> None:
    assert isinstance(predictor, Predictor)
    check_predictor(predictor, drivers=2, updates=100)
    state = predictor.update(predictor.init(), Measurement(32, 0.5, (1.0, 2.0)))
    assert predictor.predict(state, (1.0, 2.0)) == pytest.approx(64)


@every_predictor
def test_draws_nothing_from_the_global_generators(predictor: Predictor) -> None:
    first = predictor.predict(learned(predictor, 60), (0.0, 0.0))
    np.random.seed(2)
    assert predictor.predict(learn(predictor, noisy(60)), (0.0, 0.0)) == first


@every_predictor
def test_forecasts_any_horizon_within_what_was_seen(predictor: Predictor) -> None:
    speeds = [measurement.samples_per_second for measurement in noisy(60)]
    for horizon in range(1, 13):
        forecast = predictor.predict(learned(predictor, 60), (1.0, 0.0), horizon)
        assert min(speeds) * 0.99 <= forecast <= max(speeds) * 1.01


@every_predictor
def test_a_steady_worker_is_forecast_to_stay_as_it_is(predictor: Predictor) -> None:
    state = learn(predictor, [Measurement(32, 0.5, (0.2, 3.0))] * 70)
    assert predictor.predict(state, (0.2, 3.0)) == pytest.approx(64, rel=1e-3)


@every_predictor
@pytest.mark.parametrize("scale", [1e-9, 1e9])
def test_is_independent_of_the_unit_of_work(predictor: Predictor, scale: float) -> None:
    series = noisy(60)
    scaled = [Measurement(m.samples * scale, m.busy_seconds, m.drivers) for m in series]
    expected = predictor.predict(learned(predictor, 60), (1.0, 0.0)) * scale
    assert predictor.predict(learn(predictor, scaled), (1.0, 0.0)) == pytest.approx(
        expected, rel=1e-4
    )


BAD = (math.nan, math.inf, 0.0, -1.0)


@every_predictor
def test_unusable_measurements_change_nothing(predictor: Predictor) -> None:
    if isinstance(predictor, LastValue | Ema):
        pytest.skip("relies on its caller for it: `SpeedEstimator` filters measurements")
    state = learned(predictor, 60)
    forecast = predictor.predict(state, (0.0, 0.0))
    for samples, seconds in [*((32, bad) for bad in BAD), *((bad, 0.3) for bad in BAD)]:
        spoilt = predictor.update(state, Measurement(samples, seconds, (0.0, 0.0)))
        assert predictor.predict(spoilt, (0.0, 0.0)) == forecast
        spoilt = predictor.update(predictor.init(), Measurement(samples, seconds, (0.0, 0.0)))
        assert math.isnan(predictor.predict(spoilt))


@every_predictor
@pytest.mark.parametrize("factor", [1e-6, 1e3])
def test_recovers_from_an_outlier_or_a_step_of_the_clock(
    predictor: Predictor, factor: float
) -> None:
    state = learned(predictor, 60)
    state = predictor.update(state, Measurement(32, 0.32 * factor, (0.0, 0.0)))
    assert 0 < predictor.predict(state, (0.0, 0.0)) < math.inf
    state = learn(predictor, noisy(40, seed=1), state)
    assert 20 < predictor.predict(state, (0.0, 0.0)) < 500


@every_predictor
def test_missing_or_broken_drivers_do_not_break_it(predictor: Predictor) -> None:
    for drivers in ((), (math.nan, 0.0), (math.inf, -math.inf), (0.0, 1.0, 2.0)):
        state = learned(predictor, 60)
        for _ in range(12):
            state = predictor.update(state, Measurement(32, 0.4, drivers))
            assert 40 < predictor.predict(state, drivers) < 140, drivers


@pytest.mark.parametrize(
    "build",
    [
        lambda: Ema(0.0),
        lambda: Arima((1, 2, 1)),
        lambda: Arima((-1, 0, 1)),
        lambda: Arima(window=5),
        lambda: Arima(refit_every=0),
        lambda: Recurrent("gru"),
        lambda: Recurrent(hidden=0),
        lambda: Recurrent(learning_rate=math.nan),
        lambda: Recurrent(window=10),
        lambda: Narx(horizon=0),
        lambda: Narx(window=3),
        lambda: Narx(forgetting_factor=1.5),
        lambda: Narx(decay=0),
        lambda: Narx(hidden_decay=math.nan),
        lambda: Mixture(horizon=0),
        lambda: Mixture((Ema(),), prior=(1, 2)),
        lambda: Mixture((Ema(),), prior=(0,)),
        lambda: Mixture(eta=0),
        lambda: Mixture(share=1),
    ],
)
def test_refuses_options_out_of_range(build: Callable[[], object]) -> None:
    with pytest.raises(ValueError, match=r"must be"):
        build()


# Derivatives


def slopes(function: Callable[[np.ndarray], Any], at: np.ndarray) -> np.ndarray:
    step = 1e-6 * np.eye(len(at))
    return np.stack([(function(at + d) - function(at - d)) / 2e-6 for d in step], axis=-1)


def test_jacobian_of_narx_is_the_derivative() -> None:
    narx, random = Narx(hidden=3), np.random.default_rng(0)
    z, weights = random.normal(size=(5, 8)), random.normal(size=8 + 3 * 10)
    _, tanh, tanh0 = narx._forward(weights, z)
    expected = slopes(lambda w: narx._forward(w, z)[0], weights)
    np.testing.assert_allclose(narx._jacobian(weights, z, tanh, tanh0), expected, atol=1e-7)


@pytest.mark.parametrize("kind", ["rnn", "lstm"])
def test_back_propagation_is_the_derivative(kind: str) -> None:
    recurrent, random = Recurrent(kind, hidden=3, sequence_length=6), np.random.default_rng(0)
    start = recurrent._initial(random)
    weights = start + random.normal(0, 0.4, len(start))
    x, targets = random.normal(size=(4, 6, 2)), random.normal(size=(4, 6))

    def loss(weights: np.ndarray) -> float:
        size = np.abs(recurrent._forward(weights, x)[0] - targets)[:, 3:]
        return float(np.where(size < 2, size**2 / 2, 2 * size - 2).mean())

    np.testing.assert_allclose(
        recurrent._gradient(weights, x, targets), slopes(loss, weights), atol=1e-7
    )


# Properties of each


def test_narx_learns_the_effect_of_a_driver() -> None:
    series = noisy(300)
    assert rmse(Narx(), series) < 0.6 * rmse(Narx(use_exogenous=False), series)
    assert rmse(Narx(use_exogenous=False), series) < rmse(LastValue(), series)


@pytest.mark.parametrize("predictor", [Narx(horizon=3), Mixture()], ids=["narx", "mixture"])
def test_forecasts_do_not_depend_on_the_order_of_drivers(predictor: Predictor) -> None:
    """Sums over drivers are rounded in another order, hence the tolerance."""
    series, state, permuted = noisy(90, drivers=4), predictor.init(), predictor.init()
    for measurement in series:
        drivers = tuple(measurement.drivers[place] for place in (3, 1, 0, 2))
        forecasts = (
            predictor.predict(state, measurement.drivers),
            predictor.predict(permuted, drivers),
        )
        np.testing.assert_allclose(*forecasts, rtol=1e-9)
        state = predictor.update(state, measurement)
        permuted = predictor.update(permuted, replace(measurement, drivers=drivers))


def test_narx_learns_a_bend_that_no_line_has() -> None:
    random, series = np.random.default_rng(0), []
    for _ in range(300):
        driver = random.uniform(-1, 1)
        series.append(Measurement(100 + 40 * abs(driver), 1.0, (driver,)))
    loose = {"hidden_decay": 0.1, "train_interval": 1, "decay": 1.0}
    assert rmse(Narx(hidden=6, **loose), series) < 0.5 * rmse(Narx(hidden=0, **loose), series)


def test_narx_learns_the_delayed_effect_of_a_driver() -> None:
    """Sets the speed of step k + 2 by the driver known before step k."""
    random = np.random.default_rng(0)
    drivers = (random.random(400) < 0.5).astype(float)
    series = [Measurement(100 - 40 * drivers[k - 2], 1.0, (float(drivers[k]),)) for k in range(400)]
    assert rmse(Narx(horizon=3), series, ahead=3) < 0.3 * rmse(Narx(), series, ahead=3)


def test_narx_trains_at_most_once_in_so_many_busy_seconds() -> None:
    narx = Narx(train_seconds=0.1)
    state, trained = narx.init(), []
    for _ in range(200):
        state = narx.update(state, Measurement(8, 0.03))
        trained.append(state.is_due)
    assert sum(trained[10:90]) == 20, "four steps make 0.12 s"
    assert sum(trained[120:]) == 20


def test_a_linear_narx_is_the_weighted_ridge_regression() -> None:
    """Solves (Z'WZ + D) s = Z'W t, with forgetting W and decay D, in one training step."""
    narx = Narx(hidden=0, huber=1e9, forgetting_factor=0.9, train_interval=1, window=40)
    state = narx.train(learn(narx, noisy(200)))
    z = (state.inputs - state.center) / state.scale
    z[:, 6:] = z[:, 6:].clip(-2, 2)
    weight = 0.9 ** np.arange(39, -1, -1)[:, None]
    decay = np.diag([20.0] * 6 + [3.0] * 2 + [20.0] * 2)
    target = np.diff(state.speeds) / state.unit
    expected = np.linalg.solve(z.T @ (weight * z) + decay, (weight * z).T @ target)
    np.testing.assert_allclose(state.weights, expected, atol=1e-3)


def test_narx_trusts_a_driver_no_further_than_it_has_seen() -> None:
    random, series = np.random.default_rng(0), []
    for _ in range(300):
        driver = random.normal()
        speed = 100 * math.exp(0.01 * driver + random.normal(0, 0.05))
        series.append(Measurement(speed, 1.0, (driver,)))
    state = learn(Narx(), series)
    at = {x: Narx().predict(state, (x,)) for x in (0.0, 4.0, 10.0)}
    assert at[10.0] == at[4.0]
    assert at[0.0] < at[4.0] < state.max_speed


def test_narx_bounds_what_an_unseen_driver_can_do() -> None:
    series = noisy(200)
    state = learn(Narx(), series)
    speeds = [m.samples_per_second for m in series]
    for extreme in (1e12, -1e12):
        assert min(speeds) <= Narx().predict(state, (extreme, extreme)) <= max(speeds)


@pytest.mark.parametrize("kind", ["rnn", "lstm"])
def test_recurrent_networks_learn_an_alternation(kind: str) -> None:
    series = [Measurement(100 + 20 * (-1) ** k, 1.0) for k in range(150)]
    assert rmse(Recurrent(kind, learning_rate=0.01, decay=0.0), series) < 10
    assert rmse(LastValue(), series) == pytest.approx(40)


def test_recurrent_networks_forecast_no_speed_that_was_not_seen() -> None:
    series = noisy(60)
    speeds = [measurement.samples_per_second for measurement in series]
    state = learn(Recurrent(), series)
    for weights in (30 * state.weights, -30 * state.weights):
        wild = Recurrent().update(state._replace(weights=weights), series[-1])
        assert min(speeds) * 0.999 <= Recurrent().predict(wild) <= max(speeds) * 1.001


def test_recurrent_forecasts_depend_on_the_seed_only() -> None:
    series = noisy(60)
    one, two = (Recurrent(seed=seed) for seed in (0, 1))
    assert one.predict(learn(one, series)) != two.predict(learn(two, series))


@needs_statsmodels
def test_arima_finds_an_autoregression() -> None:
    random, log, series = np.random.default_rng(0), 0.0, []
    for _ in range(400):
        log = -0.8 * log + random.normal(0, 0.1)
        series.append(Measurement(100 * math.exp(log), 1.0))
    arima = Arima((1, 0, 0), refit_every=150)
    assert learn(arima, series).phi[0] == pytest.approx(-0.8, abs=0.1)
    assert rmse(arima, series) < 0.6 * rmse(LastValue(), series)


@needs_statsmodels
def test_arima_is_an_ema_before_its_first_fit() -> None:
    """ARIMA(0, 1, 1) with theta = -1/2 is the EMA of log speed with alpha = 1/2."""
    series, smooth = noisy(30), 0.0
    for k, measurement in enumerate(series):
        log = math.log(measurement.samples_per_second)
        smooth = log if k == 0 else smooth + 0.5 * (log - smooth)
    arima = Arima((0, 1, 1))
    assert arima.predict(learn(arima, series)) == pytest.approx(math.exp(smooth))


@needs_statsmodels
def test_arima_iterates_to_its_horizon() -> None:
    arima = Arima((1, 0, 0), first_fit=1000)
    state = learn(arima, [Measurement(math.exp(x), 1.0) for x in (-1.0, 2.0, -1.0, 1.0)])
    state = state._replace(phi=(0.5,))
    mean = 0.25
    for horizon in (1, 2, 3):
        expected = math.exp(mean + 0.75 * 0.5**horizon)
        assert arima.predict(state, horizon=horizon) == pytest.approx(expected)


def test_arima_names_the_package_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ModuleNotFoundError, match=re.escape(f"pip install {extra('arima')}")):
        Arima().init()


def test_mixture_follows_the_expert_that_is_right() -> None:
    mixture = Mixture((LastValue(), Ema(0.05)))
    random = np.random.default_rng(0)
    noise = [Measurement(100 * math.exp(random.normal(0, 0.1)), 1.0) for _ in range(150)]
    climb = [Measurement(100 * 1.05**k, 1.0) for k in range(60)]
    state = learn(mixture, noise)
    assert mixture.leader(state) == Ema(0.05)
    state = learn(mixture, climb, state)
    assert mixture.leader(state) == LastValue()
    assert sum(state.weights) == pytest.approx(1)
    assert min(state.weights) >= mixture.share * min(mixture.prior) * 0.999


@pytest.mark.parametrize(
    "seed", [0, *(pytest.param(s, marks=pytest.mark.campaign) for s in (1, 2))]
)
def test_mixture_is_never_much_worse_than_its_best_member(seed: int) -> None:
    experts = (LastValue(), Ema(0.5), Ema(0.05))
    for series in (
        noisy(400, seed),
        [
            Measurement(100 * math.exp(x), 1.0)
            for x in np.random.default_rng(seed).normal(0, 0.1, 400)
        ],
        [Measurement(100 * 1.02 ** abs(k % 100 - 50), 1.0) for k in range(400)],
    ):
        assert rmse(Mixture(experts), series) < 1.05 * min(rmse(e, series) for e in experts)


def test_mixture_judges_at_its_own_horizon() -> None:
    """Uses a period of two: the last value is wrong at horizon 1 and right at horizon 2."""
    series = [Measurement(100 + 20 * (-1) ** k, 1.0) for k in range(100)]
    for ahead, leader in ((1, Ema(0.05)), (2, LastValue())):
        mixture = Mixture((LastValue(), Ema(0.05)), horizon=ahead)
        assert mixture.leader(learn(mixture, series)) == leader


def test_mixture_survives_weights_that_have_all_vanished() -> None:
    mixture = Mixture((Ema(1.0), Ema(0.01)), eta=60.0, share=0.0)
    state = mixture.init()
    for k in range(300):
        speed = 100.0 if k % 60 < 50 else 1000.0
        state = mixture.update(state, Measurement(speed, 1.0))
    assert 0 < mixture.predict(state) < 2000


def test_mixture_leaves_out_experts_without_a_forecast() -> None:
    mixture = Mixture((Ema(0.5), Never()))
    state = learn(mixture, noisy(30))
    assert mixture.predict(state) == pytest.approx(Ema(0.5).predict(state.experts[0]))


class Never:
    """Returns no forecast."""

    def init(self) -> None:
        return None

    def update(self, state: None, measurement: Measurement) -> None:
        return None

    def predict(self, state: None, drivers: tuple[float, ...] = (), horizon: int = 1) -> float:
        return math.nan
