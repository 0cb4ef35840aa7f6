"""Report of a run as one HTML file.

``table`` holds the steps as arrays; ``figures`` and ``plain`` compute from them, the latter also
levels of speed; ``advice`` has the rules, and ``step_charts`` the charts, made of
`lbbsp_core.report.charts`. ``pushes`` has all of this for asynchronous runs. ``write`` puts it into
the page of `lbbsp_core.report.page`.
"""

from lbbsp_core.report.html.write import write_report

__all__ = ["write_report"]
