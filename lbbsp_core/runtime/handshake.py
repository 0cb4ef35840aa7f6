"""Handshake before the first step: all workers compare their static facts."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

from lbbsp_core.order import GlobalOrder
from lbbsp_core.policy import Policy
from lbbsp_core.runtime.balancer import Balancer
from lbbsp_core.runtime.collectives import Collectives
from lbbsp_core.runtime.protocol import compare_facts, fingerprint
from lbbsp_core.runtime.record import lbbsp_version


def agree(
    balancer: Balancer,
    order: GlobalOrder | None,
    collectives: Collectives,
    facts: Mapping[str, int],
) -> list[list[int]]:
    """Checks that all workers agree on the static facts, and exchanges their cost shapes.

    Every worker must call this at the same time, before the first step.

    Args:
        balancer: Balancer of this worker.
        order: Samples of each step, if known.
        collectives: Collectives of the framework.
        facts: Further facts of the plugin, by name.

    Returns:
        `Balancer.static_info` of each worker, by rank, for another balancer of the same cost.

    Raises:
        DisagreementError: A fact differs; names the fact, the ranks and their values.
    """
    policy = balancer.policy
    texts = {
        "lbbsp version": lbbsp_version(),
        "limits, granularity and policy": (
            f"{balancer.constraints} {type(policy).__name__} {_options_of(policy)}"
        ),
        "sample order": f"{order.key} {order.indices(0).tolist()}" if order else "none",
    }
    compared = {
        "workers": balancer.workers,
        "global_batch_size": balancer.constraints.global_batch_size,
        "lag (1 + batches drawn ahead)": balancer.lag,
        "number of samples": order.num_samples if order else 0,
        "seed": order.seed if order else 0,
        "steps_per_epoch": order.steps_per_epoch if order else 0,
        **facts,
        "number of completed steps": balancer.step,
        **{name: fingerprint(text) for name, text in texts.items()},
    }
    shown = {name: text[:200] for name, text in texts.items()}
    compare_facts(list(compared), collectives.all_gather(list(compared.values())), shown)
    peers = _gather_static_info(balancer, collectives)
    balancer.set_peers(peers)
    return peers


def _gather_static_info(balancer: Balancer, collectives: Collectives) -> list[list[int]]:
    """Gathers rows of different lengths, padded to the longest."""
    mine = balancer.static_info()
    longest = max(row[0] for row in collectives.all_gather([len(mine)]))
    return collectives.all_gather([*mine, *[0] * (longest - len(mine))])


def _options_of(policy: Policy) -> str:
    """Returns the repr of a dataclass; other reprs contain an address, which differs by worker."""
    return repr(policy) if dataclasses.is_dataclass(policy) else ""
