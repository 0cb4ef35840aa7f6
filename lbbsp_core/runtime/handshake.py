"""What the plugin of every framework does around the loop: options, agreement, the record."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from lbbsp_core.order import GlobalOrder
from lbbsp_core.policy import LoadBalanced, Policy
from lbbsp_core.runtime.balancer import Balancer
from lbbsp_core.runtime.protocol import compare_facts, fingerprint
from lbbsp_core.runtime.record import RunHeader, run_header
from lbbsp_core.runtime.record import all_versions as all_versions
from lbbsp_core.runtime.record import open_record as open_record

Gather = Callable[[Sequence[int]], list[list[int]]]
"""A collective: this worker's integers in, those of all workers by rank out."""


def choose_policy(policy: Policy | None, interval: int | None, min_gain: float | None) -> Policy:
    """The given policy, or LB-BSP with the given options.

    Raises:
        ValueError: Options of the default policy beside another.
    """
    given = {"interval": interval, "min_gain": min_gain}
    options: dict[str, Any] = {name: value for name, value in given.items() if value is not None}
    if policy is None:
        return LoadBalanced(**options)
    if options:
        raise ValueError(f"{sorted(options)} belong to the default policy: set them on {policy!r}")
    return policy


def agree(
    balancer: Balancer, order: GlobalOrder | None, gather: Gather, more: Mapping[str, int]
) -> list[list[int]]:
    """Before the first step: compares what never changes, and introduces the workers' costs.

    Args:
        balancer: This worker's.
        order: Which samples each step holds, if that is known.
        gather: The framework's all-gather; every worker must call this at the same time.
        more: Facts of the plugin's own.

    Returns:
        The introductions, for another balancer of the same cost.

    Raises:
        DisagreementError: Naming the fact, the ranks and their values.
    """
    chosen = balancer.policy
    texts = {
        "lbbsp version": _version(),
        "limits, granularity and policy": (
            f"{balancer.constraints} {type(chosen).__name__} {_options_of(chosen)}"
        ),
        "sample order": str(order.indices(0).tolist()) if order else "none",
    }
    facts = {
        "workers": balancer.workers,
        "global_batch_size": balancer.constraints.global_batch_size,
        "lag (batches drawn ahead, and one)": balancer.lag,
        "number of samples": order.num_samples if order else 0,
        "seed": order.seed if order else 0,
        **more,
        "steps run so far": balancer.step,
        **{name: fingerprint(text) for name, text in texts.items()},
    }
    shown = {name: text[:200] for name, text in texts.items()}
    compare_facts(list(facts), gather(list(facts.values())), shown)
    peer_info = _introductions(balancer, gather)
    balancer.set_peers(peer_info)
    return peer_info


def header(
    balancer: Balancer,
    order: GlobalOrder | None,
    framework: str,
    versions: Mapping[str, str],
    drivers: Sequence[str] = (),
) -> RunHeader:
    """Builds the header of the run record from a worker's balancer.

    Args:
        balancer: Balancer of this worker.
        order: Samples of each step, if known.
        framework: Name of the framework.
        versions: Versions of the framework's packages.
        drivers: Names of the sampled resources.
    """
    return run_header(
        framework,
        workers=balancer.workers,
        global_batch_size=balancer.constraints.global_batch_size,
        num_samples=order.num_samples if order else None,
        seed=order.seed if order else None,
        lag=balancer.lag,
        policy=balancer.policy,
        predictor=balancer.predictor,
        cost=balancer.shape.prior,
        drivers=drivers,
        versions=versions,
    )


def _introductions(balancer: Balancer, gather: Gather) -> list[list[int]]:
    mine = balancer.static_info()
    longest = max(row[0] for row in gather([len(mine)]))
    return gather([*mine, *[0] * (longest - len(mine))])


def _options_of(policy: Policy) -> str:
    """A dataclass's fields: not the default repr, whose address differs between workers."""
    return repr(policy) if dataclasses.is_dataclass(policy) else ""


def _version() -> str:
    from lbbsp_core import __version__  # defined once all of the core is imported

    return __version__
