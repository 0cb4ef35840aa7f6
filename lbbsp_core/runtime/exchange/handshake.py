"""Handshake before the first step: all workers compare their static facts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from lbbsp_core._version import __version__
from lbbsp_core.order import Order
from lbbsp_core.runtime.exchange.collectives import Collectives, gather_bytes
from lbbsp_core.runtime.exchange.protocol import DisagreementError, compare_facts, fingerprint
from lbbsp_core.runtime.loop.balancer import Balancer
from lbbsp_core.runtime.options.naming import described
from lbbsp_core.work import require_work

Facts = Mapping[str, "int | str"]
"""Facts by name: integers in [0, 2^48), or texts of any length."""

_LONGEST = 40_000
_BEFORE, _AFTER = 60, 150
"""Bytes of a text that are shown before and after the place where it differs from another one."""


def agree(
    balancer: Balancer,
    order: Order | None,
    collectives: Collectives,
    facts: Facts,
    names: Sequence[int] = (),
    *,
    are_drawn: bool = False,
) -> list[list[int]]:
    """Checks that all workers agree on the static facts, and exchanges their cost shapes.

    Every worker must call this at the same time, before the first step. `names` are those of
    `Identity.pack`, on all workers or on none; for `are_drawn`, see `Balancer.set_peers`. Returns
    `Balancer.static_info` of each worker, by rank, for another balancer of the same cost; then its
    names.
    """
    policy = balancer.policy
    constraints = balancer.constraints
    work = order.work if order else None
    require_work(work, constraints.limits, constraints.global_batch_size)
    texts = {
        **{name: value for name, value in facts.items() if isinstance(value, str)},
        "lbbsp version": __version__,
        "limits, granularity and policy": (
            f"{constraints} {described(policy)}, "
            f"default maximum {balancer.default_maximum}, short steps below "
            f"{balancer.short_steps.threshold_seconds!r} s"
        ),
        "sample order": order.description if order else "none",
        "work of each sample (work=)": order.work_description if order else "none",
    }
    compared: dict[str, int | str] = {
        "workers": balancer.workers,
        "global_batch_size": constraints.global_batch_size,
        "lag (1 + batches drawn ahead, or without a step)": balancer.lag,
        "number of samples": order.num_samples if order else 0,
        "seed": order.seed if order else 0,
        "steps_per_epoch": order.steps_per_epoch if order else 0,
        **{name: value for name, value in facts.items() if not isinstance(value, str)},
        "number of completed steps": balancer.step,
        **texts,
    }
    compare(collectives, compared)
    peers = _gather_rows(collectives, [*balancer.static_info(), *names])
    balancer.set_peers(peers, are_drawn=are_drawn)
    return peers


def compare(collectives: Collectives, facts: Facts) -> None:
    """Raises if workers do not agree on facts, whose names are the same on all; a collective."""
    numbers = [fingerprint(fact) if isinstance(fact, str) else fact for fact in facts.values()]
    rows = collectives.all_gather(numbers)
    for column, (name, fact) in enumerate(facts.items()):
        values = [int(row[column]) for row in rows]
        rank = next((rank for rank, value in enumerate(values) if value != values[0]), 0)
        if not isinstance(fact, str):
            compare_facts([name], [[value] for value in values])
        elif rank:  # on all workers, so that all of them gather the texts
            first, other = _excerpts(gather_texts(collectives, fact), rank)
            raise DisagreementError(
                f"workers disagree on {name}: worker 0 has {first}, worker {rank} has {other}; "
                f"start all workers with the same {name}"
            )


def gather_texts(collectives: Collectives, text: str) -> list[bytes]:
    """Gathers a text of each worker, in UTF-8, cut off after some ten thousand bytes."""
    return gather_bytes(collectives, text.encode()[:_LONGEST])


def _excerpts(texts: Sequence[bytes], rank: int) -> list[str]:
    """Returns the text of worker 0 and that of another worker, around the first difference."""
    pair = [texts[0], texts[rank]]
    common = next((i for i, (a, b) in enumerate(zip(*pair, strict=False)) if a != b), 0)
    start = max(0, common - _BEFORE)
    start = start if max(map(len, pair)) > _AFTER else 0
    end = start + _BEFORE + _AFTER
    return [
        "..." * (start > 0) + text[start:end].decode(errors="replace") + "..." * (len(text) > end)
        for text in pair
    ]


def _gather_rows(collectives: Collectives, mine: Sequence[int]) -> list[list[int]]:
    """Gathers rows of different lengths, padded to the longest."""
    longest = max(row[0] for row in collectives.all_gather([len(mine)]))
    return collectives.all_gather([*mine, *[0] * (longest - len(mine))])
