"""Weights with which the gradients of unequal batches sum to that of the whole batch.

A train step runs as in a single process: it sees one replica (`compat.one_replica_view`) and this
worker's samples. If its loss is a mean over samples, the gradient of the whole batch is
``sum_i (x_i / X) g_i``; if it is a sum, ``sum_i g_i``. Which of them holds is not assumed but
proven on a few samples, see `lbbsp_tf.proof`.
"""

from __future__ import annotations

from dataclasses import dataclass, field

WAYS = ("auto", "samples", "mask", "sum")


@dataclass(frozen=True)
class Weighting:
    """How the gradients of a train step are weighted.

    Args:
        one_replica: Whether the train step sees a single replica. Otherwise it sees all of them,
            and divides by their number what is not a sum over samples, such as regularisers.
        sums: Whether the loss is a sum over samples, for each `apply` and `sum_gradients` of the
            step in order; the last one stands for further ones.
        summed: Whether each of these calls takes sums that `sum_gradients` has returned; the last
            one stands for further ones.
        by_tokens: Whether losses that are means over valid tokens are weighted by these.
        logged: What the scalars that a step passes to `Mean` metrics are, in order. The value of
            all samples is the sum of those of workers, times this factor, or their mean if it is
            None, as for further scalars.
    """

    one_replica: bool = True
    sums: tuple[bool, ...] = (False,)
    by_tokens: bool = False
    summed: tuple[bool, ...] = ()
    logged: tuple[float | None, ...] = field(default=(), compare=False)

    @property
    def all_means(self) -> bool:
        """True if the losses of all `apply` calls are means."""
        return not any(self.sums)

    @property
    def all_sums(self) -> bool:
        """True if the losses of all `apply` calls are sums."""
        return all(self.sums)

    def is_sum(self, call: int) -> bool:
        """Returns whether the loss of the `call`-th `apply` of a step is a sum over samples."""
        return self.sums[min(call, len(self.sums) - 1)]

    def is_summed(self, call: int) -> bool:
        """Returns whether the `call`-th `apply`, after a `sum_gradients`, takes its sums."""
        return bool(self.summed) and self.summed[min(call, len(self.summed) - 1)]

    def factor_of_logged(self, number: int) -> float | None:
        """Returns the factor of the sum of a logged scalar over workers, or None for a mean."""
        return self.logged[number] if number < len(self.logged) else None

    @classmethod
    def chosen(cls, weight_by: str) -> Weighting | None:
        """Returns the weighting that a user has asked for, or None if it has to be proven."""
        return {
            "samples": cls(summed=(True,)),
            "sum": cls(one_replica=False, sums=(True,), summed=(True,)),
        }.get(weight_by)
