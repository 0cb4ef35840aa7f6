"""Figures and pictures of runs, of profiles and of simulations."""

from lbbsp_core.report.pictures import draw_comparison
from lbbsp_core.report.summary import Comparison, Outcome, RunSummary, summarise

__all__ = ["Comparison", "Outcome", "RunSummary", "draw_comparison", "summarise"]
