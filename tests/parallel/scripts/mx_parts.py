"""What the scripts for MXNet share."""

import logging

import numpy as np


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
