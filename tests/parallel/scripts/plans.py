"""Policies of the tests."""

from dataclasses import dataclass

from lbbsp_core.policy import FixedState


@dataclass(frozen=True)
class Cycle:
    """A policy whose plan changes every step, whatever is measured."""

    uses_costs = False
    is_static = False

    plans: tuple[tuple[int, ...], ...]

    def init(self, cluster):
        return FixedState(self.plans[0])

    def update(self, state, cluster, observation):
        return FixedState(self.plans[(observation.step + 1) % len(self.plans)])
