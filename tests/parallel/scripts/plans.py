"""A policy for tests of exactness, whose plan changes every step."""

from dataclasses import dataclass

from lbbsp_core.policy import FixedState


@dataclass(frozen=True)
class Cycle:
    """A policy whose plan changes every step, whatever is measured."""

    plans: tuple[tuple[int, ...], ...]
    uses_costs = False
    is_static = False

    def init(self, cluster):
        return FixedState(self.plans[0])

    def update(self, state, cluster, observation):
        return FixedState(self.plans[(observation.step + 1) % len(self.plans)])
