"""State of a session for a checkpoint: the same on every worker, written by one of them.

What all workers share (step, position in the order, plans, policy) is kept once. The estimates of
a worker's speed are its own, and are gathered. The order of the samples does not depend on the
number of workers, so that a job may continue with another number of them.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from typing import Any

import numpy as np
import numpy.typing as npt

from lbbsp_core.cost import Affine
from lbbsp_core.order import Order
from lbbsp_core.policy import Observation
from lbbsp_core.runtime.checkpoint.checkpoint import (
    Arrays,
    Json,
    from_bytes,
    from_json,
    records_of,
    to_bytes,
    to_json,
)
from lbbsp_core.runtime.exchange.collectives import Collectives, gather_bytes
from lbbsp_core.runtime.options.naming import described
from lbbsp_core.runtime.planning.balancer import Balancer, BalancerState

logger = logging.getLogger("lbbsp.checkpoint")

_ESTIMATES = "estimates of worker"  # of the first replica in a process, whose number follows


def order_facts(order: Order | None, global_batch_size: int) -> dict[str, Json]:
    """Returns what must be the same for a job to continue at a step of an order, by name."""
    if order is None:
        return {"global_batch_size": global_batch_size}
    return {
        "number of samples": order.num_samples,
        "global_batch_size": global_batch_size,
        "seed": order.seed,
        "shuffle": order.shuffle,
        "steps per epoch": order.steps_per_epoch,
        "order by batches": order.by_batch,
        # Depends on the number of workers; see `make_order`.
        "dropped short last step": order.drop_last,
    }


def check_same_job(where: object, saved: Mapping[str, Json], here: Mapping[str, Json]) -> None:
    """Raises an error if a checkpoint belongs to another job."""
    for name in dict.fromkeys((*here, *saved)):
        old, new = saved.get(name), here.get(name)
        if old != new:
            raise ValueError(
                f"the checkpoint in {where} is of another job: {name} was {old}, and is {new} "
                "now; start with the same data, model and options, or choose another folder"
            )


def settings_of(owners: Mapping[str, Mapping[str, object]]) -> dict[str, str]:
    """Returns the settings among the attributes of objects: numbers, texts, flags and None.

    Those of nested dictionaries are included, with the path to each.
    """
    return {
        f"{name} of {owner}": repr(value)
        for owner, attributes in owners.items()
        for name, value in _flat(attributes)
        if value is None or isinstance(value, bool | int | float | str)
    }


def _flat(attributes: Mapping[str, object], path: str = "") -> Iterator[tuple[str, object]]:
    for name, value in attributes.items():
        if isinstance(value, Mapping):
            yield from _flat(value, f"{path}{name}.")
        else:
            yield f"{path}{name}", value


def warn_of_changes(
    saved: Mapping[str, object], here: Mapping[str, str], which: Callable[[str], str]
) -> None:
    """Warns of each setting with which a training now begins otherwise than in a checkpoint.

    `which` is called with the name of a setting, and says which of both counts, and the remedy.
    """
    for name, value in here.items():
        if (old := saved.get(name, value)) != value:
            text = f"{name} is {value} in the script now, and was {old} when the training began"
            logger.warning("%s: %s", text, which(name))


def gather_state(balancers: Sequence[Balancer], collectives: Collectives) -> tuple[Json, Arrays]:
    """Returns the state of all workers' balancers after a step; a collective.

    `balancers` are those of this process, one for each of its replicas, by rank. The state is the
    same on every worker.
    """
    rows = gather_bytes(collectives, _estimates(balancers))
    return _state(balancers[0], rows[:: len(balancers)], len(balancers))


def own_state(balancer: Balancer) -> tuple[Json, Arrays]:
    """Returns the state of one worker, which holds no estimates of the others' speeds."""
    rows = [to_bytes([("", _array(b""))])] * balancer.workers
    rows[balancer.rank] = _estimates([balancer])
    return _state(balancer, rows, 1)


def _estimates(balancers: Sequence[Balancer]) -> bytes:
    """Returns the estimates of the speeds of this process's replicas."""
    states = ((_predictor_text(balancer), balancer.state()) for balancer in balancers)
    return to_bytes(
        [(text, _array(to_bytes((state.estimate, state.drivers)))) for text, state in states]
    )


def _state(balancer: Balancer, rows: Sequence[bytes], replicas: int) -> tuple[Json, Arrays]:
    """Returns the state of a job; `rows` are the estimates of its processes."""
    shared = balancer.state()
    arrays = {f"{_ESTIMATES} {i * replicas}": _array(row) for i, row in enumerate(rows)}
    state: dict[str, Json] = {"workers": balancer.workers, "policy": _policy_text(balancer)}
    for name in ("step", "order", "order_start", "plans", "policy_state", "short_steps"):
        state[name] = to_json(getattr(shared, name), arrays)
    return state, arrays


def restored_state(
    balancer: Balancer, state: Json, arrays: Mapping[str, npt.NDArray[Any]]
) -> BalancerState:
    """Returns the state from which a worker continues, for `Balancer.restore`.

    Plans are kept for the same number of workers under the same policy, estimates of a worker's
    speed for the same predictor and driving factors, and the time of steps for the same number of
    workers. Otherwise they start as in a new job; also, with a warning, those of another version of
    lbbsp that cannot be read: they change the sizes of batches, but not what is learned.
    """
    try:
        return _restored(balancer, state, arrays)  # type: ignore[arg-type]
    except (KeyError, TypeError, AttributeError, IndexError) as error:
        raise ValueError(f"the state of a session cannot be read: {error!r}") from None


def _restored(
    balancer: Balancer, state: Mapping[str, Any], arrays: Mapping[str, npt.NDArray[Any]]
) -> BalancerState:
    restored = balancer.state()
    examples = *_example_states(balancer), restored.short_steps
    records = records_of(*examples, balancer.policy, balancer.predictor)

    def read(name: str) -> Any:
        return from_json(state[name], arrays, records)

    restored = restored._replace(
        step=int(state["step"]), order=read("order"), order_start=int(state["order_start"])
    )
    if state["workers"] != balancer.workers:
        return restored._replace(plans=restored.plans[:1])
    restored = restored._replace(short_steps=read("short_steps").checked(balancer.workers))
    if state["policy"] == _policy_text(balancer):
        plans = tuple(tuple(map(int, plan)) for plan in state["plans"])
        with _started_anew_if_unreadable("plans"):
            restored = restored._replace(plans=plans, policy_state=read("policy_state"))
    rows = (arrays.get(f"{_ESTIMATES} {rank}") for rank in range(balancer.workers))
    packed = [row for row in rows if row is not None]
    estimates = [pair for row in packed for pair in from_bytes(row.tobytes(), {})]
    text, learned = estimates[balancer.rank]
    if text == _predictor_text(balancer):
        with _started_anew_if_unreadable("estimates of this worker's speed"):
            estimate, drivers = from_bytes(learned.tobytes(), records)
            restored = restored._replace(estimate=estimate, drivers=drivers)
    return restored


@contextmanager
def _started_anew_if_unreadable(part: str) -> Iterator[None]:
    """Reports that a part of a state cannot be read, which lets the job continue without it."""
    try:
        yield
    except ValueError as error:
        logger.warning(
            "%s in the checkpoint are left out, and start as in a new job: %s", part, error
        )


def check_states(balancer: Balancer) -> None:
    """Raises an error if a state of the predictor or the policy cannot be written."""
    states = _example_states(balancer)
    records = records_of(*states, balancer.policy, balancer.predictor)
    for state in states:
        from_bytes(to_bytes(state), records)


def _example_states(balancer: Balancer) -> list[object]:
    """Returns states of the estimator and the policy before the first step and after one."""
    estimator, policy = balancer.estimator, balancer.policy
    first, planned = estimator.init(), policy.init(balancer.constraints)
    states: list[object] = [first, planned]
    sizes = planned.sizes
    # What an update with invented figures raises would not occur in a training.
    with suppress(Exception):
        learned, _ = estimator.learn(first, sizes[balancer.rank], 0.1)
        states += [learned, estimator.train(learned)]
    with suppress(Exception):
        costs = (Affine(0.01, 0.001),) * balancer.workers
        seconds = (0.1,) * balancer.workers
        observation = Observation(0, sizes, seconds, (), costs, last_of_epoch=True)
        states.append(policy.update(planned, balancer.constraints, observation))
    return states


def _array(data: bytes) -> npt.NDArray[np.uint8]:
    return np.frombuffer(data, np.uint8)


def _policy_text(balancer: Balancer) -> str:
    return f"{balancer.bounds.initial} {described(balancer.policy)}"


def _predictor_text(balancer: Balancer) -> str:
    names = ", ".join(balancer.driver_names)
    text = f"{described(balancer.estimator.predictor)} {balancer.cost_shape!r}"
    return f"{text} of {names}" if names else text
