"""Contracts of policies and of their plans."""

from __future__ import annotations

import dataclasses
import json
import random
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any, NamedTuple

from lbbsp_core.cost import Affine, Cost
from lbbsp_core.policy import BatchConstraints, Even, Observation, Policy, Sizes
from lbbsp_core.testing._contract import SLACK, check_flags, check_value, copied, pickled, unchanged
from lbbsp_core.types import Limits

_CHANGES = (0, 0, 1, 4, 16, 1000)  # samples by which limits differ from the even plan

_CLUSTERS = (
    BatchConstraints(64, (Limits(),) * 4),
    BatchConstraints(10, (Limits(1, 6), Limits(2), Limits(1))),
    BatchConstraints(100, (Limits(8, 64), Limits(8), Limits(16, 48)), granularity=8),
    # one plan only
    BatchConstraints(96, (Limits(1, 48), Limits(1, 32), Limits(1, 16)), granularity=16),
    BatchConstraints(3, (Limits(),) * 3),
    BatchConstraints(7, (Limits(),)),
)


def check_policy(policy: Policy, *clusters: BatchConstraints, steps: int = 80) -> None:
    """Checks the contract of `Policy`.

    The policy must be a frozen value that compares, hashes, pickles and prints its parameters;
    `init` and `update` must give plans of the global batch size, within limits and granularity,
    whatever is observed: unknown costs, excluded ranks, plans of earlier and of short steps;
    neither may change the policy or a state; the same observations must give the same plans, also
    from a state that was stored as JSON; a state must not grow. `is_static` must be False if the
    sizes ever change, and `uses_costs` must be True if they depend on predicted costs. If
    `accepts_narrower_limits` is True, each plan must be within limits that become narrower and
    wider during the run, also while costs are unknown.

    Args:
        policy: Policy to check.
        clusters: Constraints to plan for; by default several, of 1 to 4 workers.
        steps: Observations for each cluster.

    Raises:
        AssertionError: The contract is broken; names the rule and the plan.

    Example:
        >>> from lbbsp_core import LoadBalanced
        >>> check_policy(LoadBalanced(min_gain=0.0))
    """
    check_value(policy)
    check_flags(policy, "uses_costs", "is_static", "needs_common_steps", "accepts_narrower_limits")
    for seed, cluster in enumerate(clusters or _CLUSTERS):
        _check_policy_run(policy, random.Random(seed), [cluster] * (steps + 1))
        if policy.accepts_narrower_limits:
            _check_policy_run(policy, random.Random(seed), _narrowed(cluster, seed, steps))


def check_plan(sizes: Sizes, cluster: BatchConstraints) -> None:
    """Checks that `sizes` is a plan for `cluster`: its sum, limits and granularity.

    Args:
        sizes: Samples of each worker, by rank.
        cluster: Constraints of the plan.

    Raises:
        AssertionError: A constraint is violated; names the constraint and the plan.

    Example:
        >>> check_plan((8, 16), BatchConstraints(24, (Limits(), Limits()), granularity=8))
    """
    shown = f"the plan {sizes!r}"
    are_integers = isinstance(sizes, tuple) and all(type(size) is int for size in sizes)
    assert are_integers, (
        f"{shown} must be a tuple of Python's int: it is compared by its text, and recorded"
    )
    assert len(sizes) == cluster.workers, f"{shown} must have {cluster.workers} sizes"
    assert sum(sizes) == cluster.global_batch_size, (
        f"{shown} must sum to {cluster.global_batch_size}"
    )
    for size, bounds in zip(sizes, cluster.limits, strict=True):
        assert bounds.allow(size), f"{shown} must keep {bounds}"
    remainders = sum(size % cluster.granularity != 0 for size in sizes)
    assert remainders <= (cluster.global_batch_size % cluster.granularity != 0), (
        f"{shown} must be in multiples of {cluster.granularity}, but for one worker's remainder"
    )


def _narrowed(cluster: BatchConstraints, seed: int, steps: int) -> list[BatchConstraints]:
    """Returns constraints of `init` and of each step, with limits around the even plan."""
    source, even, constraints = random.Random(seed), Even().init(cluster).sizes, [cluster]
    for _ in range(steps):
        if source.random() < 0.3:
            limits = map(partial(_around, source), even, cluster.limits)
            constraints.append(dataclasses.replace(cluster, limits=tuple(limits)))
        else:
            constraints.append(constraints[-1])
    return constraints


def _around(source: random.Random, size: int, bounds: Limits) -> Limits:
    """Returns limits within others that allow a size, and none or some other sizes."""
    low, high = size - source.choice(_CHANGES), size + source.choice(_CHANGES)
    high = high if bounds.maximum is None else min(high, bounds.maximum)
    return Limits(max(low, bounds.minimum), high)


class _Run(NamedTuple):
    """Run of a policy under the constraints of `init` and of each step."""

    policy: Policy
    given: Sequence[BatchConstraints]
    states: list[Any]  # the first one included
    observations: list[Observation]

    def again(
        self, policy: Policy, state: Any, first: int = 0, *, with_costs: bool = True
    ) -> Iterator[tuple[Sizes, Sizes]]:
        """Yields the plans of the run from step `first` on, and those of a replay."""
        expected, constraints = self.states[first + 1 :], self.given[first + 1 :]
        for old, cluster, observation in zip(
            expected, constraints, self.observations[first:], strict=True
        ):
            if not with_costs:
                observation = dataclasses.replace(observation, costs=(None,) * cluster.workers)
            state = policy.update(state, cluster, observation)
            yield old.sizes, state.sizes


def _check_policy_run(
    policy: Policy, source: random.Random, constraints: Sequence[BatchConstraints]
) -> None:
    """Checks a run under the constraints of `init` and of each step."""
    before = pickled(policy)
    run = _run_policy(policy, constraints, source)
    assert pickled(policy) == before, f"init or update changed {policy!r} itself"
    _check_policy_replay(run)
    _check_policy_flags(run)
    sizes = [len(pickled(state)) for state in run.states]
    half, late = max(sizes[: len(sizes) // 2]), max(sizes)
    assert late <= half + SLACK * constraints[0].workers, (
        f"the state of {policy!r} must stay small: {half}, {late} bytes"
    )


def _run_policy(policy: Policy, inputs: Sequence[BatchConstraints], source: random.Random) -> _Run:
    """Runs a policy in a loop."""
    first, *later = inputs
    run = _Run(policy, inputs, [policy.init(first)], [])
    check_plan(run.states[0].sizes, first)
    speeds = [source.uniform(10.0, 100.0) for _ in first.limits]
    for step, cluster in enumerate(later):
        speeds = [v * source.choice((0.4, 2.5)) if source.random() < 0.1 else v for v in speeds]
        used = run.states[max(0, len(run.states) - source.randint(1, 3))].sizes
        observation = _observe(source, step, used, speeds)
        state = run.states[-1]
        after = unchanged("update", state, partial(policy.update, state, cluster, observation))
        check_plan(after.sizes, cluster)
        run.states.append(after)
        run.observations.append(observation)
    return run


def _observe(
    source: random.Random, step: int, sizes: Sizes, speeds: Sequence[float]
) -> Observation:
    """Observes a step of `sizes`, or a short one, with some or all workers unmeasured."""
    if source.random() < 0.1:
        sizes = tuple(max(1, size // 2) for size in sizes)
    chance = source.choice((0.0, 0.0, 0.0, 0.3, 1.0)) if step else 1.0
    curves = [Affine(4.0 / v, 1.0 / v) for v in speeds]
    excluded = tuple(rank for rank in range(len(speeds)) if source.random() < chance)
    costs: tuple[Cost | None, ...] = tuple(
        None if rank in excluded and source.random() < 0.5 else curve
        for rank, curve in enumerate(curves)
    )
    if chance == 1.0:
        costs = (None,) * len(speeds)
    busy = tuple(
        0.0
        if rank in excluded and source.random() < 0.5
        else curve(size) * source.uniform(0.9, 1.1)
        for rank, (curve, size) in enumerate(zip(curves, sizes, strict=True))
    )
    return Observation(step, sizes, busy, excluded, costs, last_of_epoch=source.random() < 0.2)


def _check_policy_flags(run: _Run) -> None:
    """Checks `is_static` and `uses_costs` against what the policy did."""
    policy, first = run.policy, run.states[0]
    changed = [state.sizes for state in run.states if state.sizes != first.sizes]
    assert not (policy.is_static and changed), (
        f"{policy!r} changes its sizes from {first.sizes} to {changed[:1]}: is_static must be False"
    )
    if not policy.uses_costs:
        for step, (sizes, without) in enumerate(run.again(policy, first, with_costs=False)):
            assert sizes == without, (
                f"{policy!r} plans {sizes} with predicted costs and {without} without at step "
                f"{step}: uses_costs must be True"
            )


def _check_policy_replay(run: _Run) -> None:
    """Replays a run from its start, and from a state that was stored as JSON."""
    twin = copied(run.policy)
    for first in (0, len(run.observations) // 2):
        state = _restored(run.states[first]) if first else twin.init(run.given[0])
        for expected, got in run.again(twin, state, first):
            assert got == expected, (
                f"{run.policy!r} must decide the same from the same observations, got {got} after "
                f"{expected} in a replay"
            )


def _restored(state: Any) -> Any:
    """Returns the state after a round trip through JSON, as a checkpoint stores it."""
    return type(state)(*_to_tuples(json.loads(json.dumps(state))))


def _to_tuples(value: Any) -> Any:
    """Returns `value` with all lists, which JSON makes of tuples, as tuples again."""
    return tuple(map(_to_tuples, value)) if isinstance(value, list) else value
