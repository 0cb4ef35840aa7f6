"""What the scripts for MXNet share."""

import logging
from dataclasses import dataclass

import numpy as np

from lbbsp_core.policy import FixedState


@dataclass(frozen=True)
class Cycle:
    """A policy whose plan changes every step, whatever is measured and forecast."""

    plans: tuple[tuple[int, ...], ...]
    uses_costs = True
    is_static = False
    needs_common_steps = True
    accepts_narrower_limits = False

    def init(self, cluster):
        return FixedState(self.plans[0])

    def update(self, state, cluster, observation):
        return FixedState(self.plans[(observation.step + 1) % len(self.plans)])


def weights(net):
    """All parameters, moving statistics included."""
    return [p.data(p.list_ctx()[0]).asnumpy() for p in net.collect_params().values()]


def largest(ours, others):
    """Largest absolute difference of all weights."""
    return max(float(np.abs(a - b).max()) for a, b in zip(ours, others, strict=True))


def let_gathers_take(seconds, computed, collectives):
    """Lets virtual time pass in each wait for the messages of the other workers."""
    begin = collectives.begin_gather

    def begin_slow(*args, **options):
        rows = begin(*args, **options)
        return lambda: (computed.compute(seconds), rows())[1]

    collectives.begin_gather = begin_slow


class Warnings(logging.Handler):
    """Collects the warnings of this package."""

    def __init__(self):
        super().__init__(logging.WARNING)
        self.texts = []
        logging.getLogger("lbbsp.mx").addHandler(self)

    def emit(self, record):
        self.texts.append(record.getMessage())
