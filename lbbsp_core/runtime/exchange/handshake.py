"""Comparison of facts that must be the same on all workers."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence

from lbbsp_core.runtime.exchange.collectives import Collectives, gather_bytes
from lbbsp_core.runtime.exchange.protocol import DisagreementError, fingerprint

Facts = Mapping[str, "int | str"]
"""Facts by name: integers, or texts of any length."""

_LONGEST = 10_000
_BEFORE, _AFTER = 60, 150
"""Characters of a text that are shown before and after the place where it differs from another."""

_REMEDIES = {
    "number of samples": "pass the whole data set to all workers, without shard(...) or x[rank::n]"
}


def compare(collectives: Collectives, facts: Facts) -> None:
    """Raises if workers do not agree on facts; a collective."""
    numbers = {n: fingerprint(x) if isinstance(x, str) else int(x) for n, x in facts.items()}
    rows = _gathered(collectives, numbers)
    if any(row != rows[0] for row in rows):  # seen by all workers, which now tell their texts
        rows = _gathered(collectives, {name: _shortened(fact) for name, fact in facts.items()})
        names = list(dict.fromkeys(name for row in rows for name in row))
        compare_facts(names, [[row.get(name) for name in names] for row in rows])


def _gathered(collectives: Collectives, told: Facts) -> list[dict[str, int | str]]:
    return [json.loads(row) for row in gather_bytes(collectives, json.dumps(told).encode())]


def compare_facts(names: Sequence[str], rows: Sequence[Sequence[int | str | None]]) -> None:
    """Raises if the workers' facts, in rows by rank, are not the same.

    Raises:
        DisagreementError: A fact differs; names the fact, the ranks and their values.
    """
    for name, values in zip(names, zip(*rows, strict=True), strict=True):
        for rank, value in enumerate(values):
            if value != values[0]:
                first, other = _excerpts(str(values[0]), str(value))
                remedy = _REMEDIES.get(name, f"start all workers with the same {name}")
                raise DisagreementError(
                    f"workers disagree on {name}: worker 0 has {first}, worker {rank} has {other}; "
                    f"{remedy}"
                )


def _shortened(fact: int | str) -> int | str:
    """Returns what is told of a fact: of a very long text its start, and a fingerprint."""
    if not isinstance(fact, str):
        return int(fact)
    return fact if len(fact) <= _LONGEST else f"{fact[:_LONGEST]} ({fingerprint(fact):x})"


def _excerpts(*texts: str) -> list[str]:
    """Returns two texts around their first difference."""
    common = next((i for i, (a, b) in enumerate(zip(*texts, strict=False)) if a != b), 0)
    start = max(0, common - _BEFORE) if max(map(len, texts)) > _AFTER else 0
    end = start + _BEFORE + _AFTER
    return ["..." * (start > 0) + each[start:end] + "..." * (len(each) > end) for each in texts]
