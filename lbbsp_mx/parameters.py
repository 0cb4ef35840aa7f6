"""What every gluon Trainer of ours asks of the parameters that it is given."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TypeAlias

from mxnet import gluon

Parameters: TypeAlias = "gluon.ParameterDict | dict[str, gluon.Parameter] | list[gluon.Parameter]"


def as_created(params: Parameters) -> Iterable[gluon.Parameter]:
    """Returns the parameters in the order in which the network made them, alike on all workers.

    Gluon sorts a dictionary by names, and "conv10" comes before "conv9": a worker that has made
    one network more than its peers, to evaluate say, would sum its gradients with those of others.
    """
    return list(params.values()) if hasattr(params, "values") else params


def require_dense(param: gluon.Parameter) -> None:
    """Refuses a parameter that is sparse, or whose gradient is.

    Raises:
        ValueError: It is.
    """
    if param._stype != "default" or param._grad_stype != "default":
        raise ValueError(
            f"parameter {param.name} must be dense, with dense gradients, got "
            f"{param._stype!r} with {param._grad_stype!r}: MXNet's servers only sum "
            "dense ones; use sparse_grad=False"
        )
