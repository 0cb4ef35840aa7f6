"""Predict: forecasts of a worker's speed before its iteration runs."""

from lbbsp_core.predict.arima import Arima, ArimaState
from lbbsp_core.predict.base import Predictor
from lbbsp_core.predict.ema import Ema, EmaState
from lbbsp_core.predict.last import LastValue, LastValueState
from lbbsp_core.predict.mixture import Mixture, MixtureState
from lbbsp_core.predict.narx import Narx, NarxState
from lbbsp_core.predict.recurrent import Recurrent, RecurrentState

__all__ = [
    "Arima",
    "ArimaState",
    "Ema",
    "EmaState",
    "LastValue",
    "LastValueState",
    "Mixture",
    "MixtureState",
    "Narx",
    "NarxState",
    "Predictor",
    "Recurrent",
    "RecurrentState",
]
