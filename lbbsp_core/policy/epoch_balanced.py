"""DBS: re-balances once per epoch, by the time that each worker took for the last one."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, NamedTuple

from lbbsp_core.cost import Proportional
from lbbsp_core.policy.base import Observation, Policy
from lbbsp_core.policy.constraints import BatchConstraints, Sizes
from lbbsp_core.policy.even import Even


class EpochBalancedState(NamedTuple):
    """Plan in force, and the measurements since its decision.

    Args:
        sizes: Plan in force.
        samples: Samples that each worker computed in the measured steps, by rank.
        seconds: Busy time in those steps by rank, in seconds.
    """

    sizes: Sizes
    samples: tuple[int, ...]
    seconds: tuple[float, ...]


@dataclass(frozen=True, slots=True)
class EpochBalanced(Policy[EpochBalancedState]):
    r"""DBS, dynamic batch size (Ye et al., arXiv 2007.11831): re-balances at epoch ends.

    .. math:: p_i' = \frac{p_i / t_i}{\sum_j p_j / t_j}, \qquad x_i = p_i' X

    with p the shares of the last epoch (1/N at first) and t its busy seconds, without the wait
    for other workers. Paper: the data set is re-partitioned by the same p'. On a fixed global
    order a plan that applies for an epoch *is* that partition (rule 1).

    Ours: p / t is samples over seconds of the measured steps. This equals the paper's p / t where
    all steps are measured, and is also right where some are excluded (the first of an epoch),
    short, or run with an older plan (a lag). The public code's rounding loses or duplicates
    samples; `lbbsp_core.allocate` does not. An epoch in which a worker was never measured changes
    nothing; its measurements count for the next epoch.

    Example:
        >>> from lbbsp_core import Limits
        >>> policy, constraints = EpochBalanced(), BatchConstraints(12, (Limits(), Limits()))
        >>> state = policy.init(constraints)
        >>> ran = Observation(9, (6, 6), (1.0, 2.0), (), (None, None), last_of_epoch=True)
        >>> policy.update(state, constraints, ran).sizes
        (8, 4)
    """

    needs_common_steps: ClassVar[bool] = True

    def init(self, constraints: BatchConstraints) -> EpochBalancedState:
        """Returns the even plan for the first epoch."""
        return _start(Even().init(constraints).sizes)

    def update(
        self, state: EpochBalancedState, constraints: BatchConstraints, observation: Observation
    ) -> EpochBalancedState:
        """Adds the step's measurements; decides a new plan at the end of an epoch."""
        state = EpochBalancedState(
            state.sizes,
            observation.added(state.samples, observation.sizes),
            observation.added(state.seconds, observation.busy_seconds),
        )
        if not observation.last_of_epoch or not all(state.samples):
            return state
        pairs = zip(state.samples, state.seconds, strict=True)
        return _start(constraints.plan([Proportional(done / spent) for done, spent in pairs]))


def _start(sizes: Sizes) -> EpochBalancedState:
    return EpochBalancedState(sizes, (0,) * len(sizes), (0.0,) * len(sizes))
