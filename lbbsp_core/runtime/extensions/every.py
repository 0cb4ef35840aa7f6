"""The extensions of a session."""

from __future__ import annotations

from typing import Final

from lbbsp_core.runtime.extensions.base import StepExtension
from lbbsp_core.runtime.extensions.bounds_notice import BoundsNotice
from lbbsp_core.runtime.extensions.metrics_file import Metrics
from lbbsp_core.runtime.extensions.record_file import Recording
from lbbsp_core.runtime.extensions.settings import SettingsComparison
from lbbsp_core.runtime.extensions.step_figures import StepFigures
from lbbsp_core.runtime.extensions.stopping import Stopping
from lbbsp_core.runtime.extensions.weights import WeightComparison
from lbbsp_core.runtime.extensions.work_sharing import WorkSharing

EXTENSIONS: Final[tuple[type[StepExtension], ...]] = (
    WeightComparison,
    SettingsComparison,
    Stopping,
    BoundsNotice,
    WorkSharing,
    StepFigures,
    Recording,
    Metrics,
)
"""In the order of their integers in the message, and in which they get the line of a step."""
