"""Report of a run as one HTML file.

``figures`` and ``speeds`` compute from the steps as arrays; ``advice`` has the rules, and
``step_charts`` the charts, made of `lbbsp_core.report.charts`. ``pushes`` has all of this for
asynchronous runs. ``write`` puts it into the page of `lbbsp_core.report.page`.
"""

from lbbsp_core.report.html.write import write_comparison, write_report

__all__ = ["write_comparison", "write_report"]
