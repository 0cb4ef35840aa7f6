r"""Work sharing inside a step: samples that no plan assigns, claimed by workers done early.

No prediction can foresee noise. So of a step's X samples each worker starts with ``1 - f`` of its
planned share, its *main part*. The rest is a common *reserve* of the same step: whoever has
finished claims a part of it, until it is empty; then comes the one all-reduce of the step. Which
samples a step has is thus unchanged, and so is the update, because gradients are sums over samples.
(Relatives: FlexRR, Harlap et al., SoCC 2016, moves work between iterations' workers.)

*Claims* add a size to a counter that all workers share. What the counter was before says where the
part begins, so that each sample is computed once, however claims interleave.

*Sizes of parts* follow weighted factoring (Hummel et al., SPAA 1996): half of the worker's share,
by its speed, of what should be left now. No part is expected to take less than
``sqrt(2 o f T)`` seconds, where T is the step and o the overhead of a part. With parts of t seconds
a worker loses ``o f T / t`` to overheads, and waits about ``t / 2`` for the last part of another
worker; the sum is least for this t.

*The fraction f* is chosen by hindsight (ours): after a step all workers know its plan and the pace
of each worker, so what the step would have taken with any f. All of them compute the same from
exchanged integers, by scalar arithmetic (rule 3).
"""

from lbbsp_core.reserve.claims import AUTO, FRACTIONS, Claims, Split, mode_of, split
from lbbsp_core.reserve.hindsight import Hindsight, HindsightState, Seen, Shared, estimate, replay
from lbbsp_core.reserve.pace import CLAIM_SECONDS, SLOW_CLAIM_SECONDS, Pace, PartCosts
