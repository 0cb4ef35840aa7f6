"""Start of a session: its balancer, and the handshake in which workers compare static facts."""

from __future__ import annotations

import json
from collections.abc import Sequence

from lbbsp_core._version import __version__
from lbbsp_core.order import Order
from lbbsp_core.policy import Policy
from lbbsp_core.resources.sampler import MEMORY_OF_GPU
from lbbsp_core.runtime.exchange import handshake
from lbbsp_core.runtime.exchange.collectives import Collectives, gather_bytes
from lbbsp_core.runtime.exchange.handshake import Devices, Facts, Identity, Peer
from lbbsp_core.runtime.exchange.protocol import FORMAT
from lbbsp_core.runtime.options.naming import described
from lbbsp_core.runtime.options.options import SessionOptions
from lbbsp_core.runtime.planning.balancer import Balancer
from lbbsp_core.work import require_work


def agree(
    balancer: Balancer,
    order: Order | None,
    collectives: Collectives,
    facts: Facts,
    identity: Identity | None = None,
) -> list[Peer]:
    """Checks that all workers agree on the static facts, and returns them by rank.

    Every worker must call this at the same time, before the first step.
    """
    constraints = balancer.constraints
    work = order.work if order else None
    require_work(work, constraints.limits, constraints.global_batch_size)
    compared: dict[str, int | str] = {
        "workers": balancer.workers,
        "global_batch_size": constraints.global_batch_size,
        "lag (1 + batches drawn ahead, or without a step)": balancer.schedule.lag,
        "number of samples": order.num_samples if order else 0,
        "seed": order.seed if order else 0,
        "steps_per_epoch": order.steps_per_epoch if order else 0,
        **{name: value for name, value in facts.items() if not isinstance(value, str)},
        "number of completed steps": balancer.step,
        **{name: value for name, value in facts.items() if isinstance(value, str)},
        "lbbsp version": __version__,
        "format of messages": FORMAT,
        "limits, granularity and policy": (
            f"{constraints} {described(balancer.policy)}, "
            f"default maximum {balancer.bounds.default_maximum}, short steps below "
            f"{balancer.bounds.short_steps.threshold_seconds!r} s"
        ),
        "sample order": order.description if order else "none",
        "work of each sample (work=)": order.work_description if order else "none",
    }
    handshake.compare(collectives, compared)
    names = identity or Identity()
    text = json.dumps([balancer.static_info(), names.host, names.devices])
    peers = map(json.loads, gather_bytes(collectives, text.encode()))
    return [Peer(info, Identity(host, tuple(devices))) for info, host, devices in peers]


def drivers_of(options: SessionOptions, policy: Policy, devices: Devices) -> Sequence[str] | None:
    """Returns the driving factors to sample: also the memory in use, if batches depend on it."""
    if devices.show_memory and not (policy.uses_costs or policy.is_static):
        return (MEMORY_OF_GPU,)
    return options.choose_drivers(policy)
