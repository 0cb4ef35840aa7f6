"""Comparison of facts that must be the same on all workers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from lbbsp_core.runtime.exchange.collectives import Collectives, gather_bytes
from lbbsp_core.runtime.exchange.protocol import DisagreementError, compare_facts, fingerprint

Facts = Mapping[str, "int | str"]
"""Facts by name: integers in [0, 2^48), or texts of any length."""

_LONGEST = 40_000
_BEFORE, _AFTER = 60, 150
"""Bytes of a text that are shown before and after the place where it differs from another one."""


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


def gather_rows(collectives: Collectives, mine: Sequence[int]) -> list[list[int]]:
    """Gathers rows of different lengths, padded to the longest."""
    longest = max(row[0] for row in collectives.all_gather([len(mine)]))
    return collectives.all_gather([*mine, *[0] * (longest - len(mine))])
