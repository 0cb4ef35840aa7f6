"""Defaults of options that the modules behind them need as well."""

from __future__ import annotations

from typing import Final

SHORT_STEP_SECONDS: Final = 0.025
"""Busy seconds of a step below which batches stay near even shares.

Some time slices of other processes, of 2 to 10 ms.
"""

SILENCE_SECONDS: Final = 10.0
"""Seconds without a sign of life after which a worker is lost."""
