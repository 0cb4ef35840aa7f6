r"""Cost: the curve Gamma_i of the papers, from batch size to busy seconds.

Every cost is ``seconds(x) = shape(x) / speed`` (rule 5 of the design). The *shape* depends on
the model and the machine and hardly changes; the *speed*, in samples per second, is forecast by
a predictor for each plan. Predictors learn from ``shape(x) / busy_seconds``, so their
series does not jump when the batch size does.

==============  =========================  =======================================
form            shape(x)                   source
==============  =========================  =======================================
`Proportional`  x                          Chen et al., arXiv 1806.02508, CPU form
`Affine`        x + kappa                  ours: fits measured GPUs within 1.5 %
`Saturating`    max(x_0, x + kappa)        Chen et al., arXiv 1806.02508, GPU form
`Profile`       linear between points      ours: measured, without a formula
==============  =========================  =======================================
"""

from lbbsp_core.cost.affine import Affine, AffineArray, least_slowest, slowest, slowest_instead
from lbbsp_core.cost.base import Cost, Segment
from lbbsp_core.cost.piecewise import PiecewiseCost
from lbbsp_core.cost.profile import Profile
from lbbsp_core.cost.proportional import Proportional
from lbbsp_core.cost.saturating import Saturating

__all__ = [
    "Affine",
    "AffineArray",
    "Cost",
    "PiecewiseCost",
    "Profile",
    "Proportional",
    "Saturating",
    "Segment",
    "least_slowest",
    "slowest",
    "slowest_instead",
]
