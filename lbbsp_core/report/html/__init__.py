"""Report of a run as one HTML file.

``table`` holds the steps as arrays; ``figures``, ``plain`` and ``pushes`` compute from them, with
``changes`` for levels of speed; ``advice`` has the rules. ``step_charts`` and ``push_charts`` are
made of `lbbsp_core.report.charts`; ``write`` puts all into the page of `lbbsp_core.report.page`.
"""

from lbbsp_core.report.html.write import write_report

__all__ = ["write_report"]
