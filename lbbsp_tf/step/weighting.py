"""Weights with which the gradients of unequal batches sum to that of the whole batch.

A train step runs as in a single process: it sees one replica (`compat.one_replica_view`) and this
worker's samples. If its loss is a mean over samples, the gradient of the whole batch is
``sum_i (x_i / X) g_i``; if it is a sum, ``sum_i g_i``. Which of them holds is not assumed but
proven on a few samples, see `lbbsp_tf.exactness.proof`.
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
        targets: Whether the targets of the gradients that a step takes are sums over samples, in
            order; None for what is neither a sum nor a mean, as for further targets.
    """

    one_replica: bool = True
    sums: tuple[bool, ...] = (False,)
    by_tokens: bool = False
    summed: tuple[bool, ...] = ()
    logged: tuple[float | None, ...] = field(default=(), compare=False)
    targets: tuple[bool | None, ...] = field(default=(), compare=False)

    def is_sum(self, call: int) -> bool:
        """Returns whether the loss of the `call`-th `apply` of a step is a sum over samples."""
        return self.sums[min(call, len(self.sums) - 1)]

    def is_summed(self, call: int) -> bool:
        """Returns whether the `call`-th `apply`, after a `sum_gradients`, takes its sums."""
        return bool(self.summed) and self.summed[min(call, len(self.summed) - 1)]

    def is_sum_of_target(self, number: int, *, of_variables: bool) -> bool | None:
        """Returns whether the target of a gradient is a sum over samples, or None if unknown."""
        of_target = self.targets[number] if number < len(self.targets) else None
        of_losses = self.sums[0] if of_variables and len(set(self.sums)) == 1 else None
        return of_losses if of_target is None else of_target

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
