"""Predict: forecasts of a worker's speed before its iteration runs."""

from lbbsp_core.predict.arima import Arima
from lbbsp_core.predict.base import Predictor, trained
from lbbsp_core.predict.ema import Ema
from lbbsp_core.predict.last import LastValue
from lbbsp_core.predict.mixture import Mixture
from lbbsp_core.predict.narx import Narx
from lbbsp_core.predict.recurrent import Recurrent

__all__ = ["Arima", "Ema", "LastValue", "Mixture", "Narx", "Predictor", "Recurrent", "trained"]
