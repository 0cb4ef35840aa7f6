"""Order and checks of parameters, for all trainers of this package."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TypeAlias

from mxnet import gluon

Parameters: TypeAlias = "gluon.ParameterDict | dict[str, gluon.Parameter] | list[gluon.Parameter]"


def as_created(params: Parameters) -> Iterable[gluon.Parameter]:
    """Returns the parameters in the order of their creation, which is the same on all workers.

    Gluon sorts a dictionary by name, and names are numbered per process: "conv10" comes before
    "conv9". On a worker that has created one more network than its peers, for example for
    evaluation, the order could differ, and gradients of different parameters would be summed.
    """
    return list(params.values()) if hasattr(params, "values") else params


def require_dense(param: gluon.Parameter) -> None:
    """Raises an error if a parameter or its gradient is sparse.

    Raises:
        ValueError: The parameter or its gradient is sparse.
    """
    if param._stype != "default" or param._grad_stype != "default":
        raise ValueError(
            f"parameter {param.name} must be dense, with dense gradients, got "
            f"{param._stype!r} with {param._grad_stype!r}: use sparse_grad=False, because MXNet's "
            "servers sum only dense gradients"
        )
