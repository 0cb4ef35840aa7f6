"""Report of a run as one HTML file.

``table`` holds the steps as arrays; ``figures``, ``plain`` and ``pushes`` compute from them, with
``changes`` for levels of speed; ``advice`` has the rules. ``charts`` and ``push_charts`` consist of
``traces`` with few points (``reduce``), tables of ``texts``. ``assets`` and ``page`` make the page,
and ``write`` puts all together.
"""

from lbbsp_core.report.html.write import write_report

__all__ = ["write_report"]
