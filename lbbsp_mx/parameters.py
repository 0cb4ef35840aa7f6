"""Order and checks of parameters, for all trainers of this package."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from typing import Any, TypeAlias

import mxnet as mx
import numpy as np
import numpy.typing as npt
from mxnet import gluon

from lbbsp_core.runtime.exchange.handshake import Devices, cpu, gpu

Arrays: TypeAlias = "list[mx.nd.NDArray]"
Parameters: TypeAlias = "gluon.ParameterDict | dict[str, gluon.Parameter] | list[gluon.Parameter]"

_STATISTICS = ("running_mean", "running_var", "moving_mean", "moving_var")
_COUNTERS = ("begin_num_update", "num_update", "rescale_grad", "count", "_index_update_count")


def as_created(params: Parameters) -> Iterable[gluon.Parameter]:
    """Returns each parameter once, in the order of creation, which is the same on all workers.

    Gluon sorts a dictionary by name, and names are numbered per process: "conv10" comes before
    "conv9". On a worker that has created one more network than its peers, for example for
    evaluation, the order could differ, and gradients of different parameters would be summed.
    """
    listed = params.values() if hasattr(params, "values") else params
    return list({id(param): param for param in listed}.values())


def network_of(params: Iterable[gluon.Parameter]) -> list[gluon.Parameter]:
    """Returns all parameters of the largest network that has any of these."""
    ids = set(map(id, params))
    networks = ([*block.collect_params().values()] for block in _living(gluon.Block))
    return max((n for n in networks if not ids.isdisjoint(map(id, n))), key=len, default=[])


def normalises_batches(params: Iterable[gluon.Parameter]) -> bool:
    """Returns whether a layer normalises each worker's batch separately."""
    plain = (param for param in params if not hasattr(param, "lbbsp_synchronised"))
    means = {id(param) for param in plain if param.name.endswith("running_mean")}
    layers = _living(gluon.nn.basic_layers._BatchNorm) if means else ()  # also BatchNormReLU
    return bool(means - {id(x.running_mean) for x in layers if x._kwargs["use_global_stats"]})


def is_statistic(param: gluon.Parameter) -> bool:
    """Returns whether a parameter is a moving average of batches, which differs between workers."""
    return bool(param.name.endswith(_STATISTICS))


def learning(params: Iterable[gluon.Parameter]) -> list[int]:
    """Returns the numbers of the parameters that learn."""
    return [number for number, param in enumerate(params) if param.grad_req != "null"]


def settings_of(params: Sequence[gluon.Parameter], learned: Sequence[int]) -> dict[str, str]:
    """Returns how parameters learn, by name; at the start those with the numbers `learned` did."""
    changed = sorted({*learned} ^ {*learning(params)})
    return {
        "lr_mult of parameters": _factors(param.lr_mult for param in params),
        "wd_mult of parameters": _factors(param.wd_mult for param in params),
        "grad_req of parameters": ", ".join(f"{n}: {params[n].grad_req}" for n in changed)
        or "as at the start",
    }


def _factors(values: Iterable[float]) -> str:
    """Returns the factors that are not 1, with the numbers of their parameters."""
    factors = (f"{number}: {value:g}" for number, value in enumerate(values) if value != 1)
    return ", ".join(factors) or "all 1"


def require_dense(param: gluon.Parameter) -> None:
    """Raises an error if a parameter or its gradient is sparse."""
    if param._stype != "default" or param._grad_stype != "default":
        raise ValueError(
            f"parameter {param.name} must be dense, with dense gradients, got "
            f"{param._stype!r} with {param._grad_stype!r}: MXNet's servers sum no others; use "
            "sparse_grad=False"
        )


def require_unique_names(params: Sequence[gluon.Parameter]) -> None:
    """Raises an error if two parameters have one name, by which gluon finds their keys."""
    named: dict[str, gluon.Parameter] = {}
    for param in params:
        if named.setdefault(param.name, param) is not param:
            raise ValueError(
                f"names of parameters must be unique, and two parameters are called {param.name}: "
                "give the networks different prefixes, or a trainer each"
            )


def facts_of(
    params: Sequence[gluon.Parameter], optimizer: mx.optimizer.Optimizer
) -> dict[str, int | str]:
    """Returns what must be equal on all workers before parameters are exchanged, by name.

    Names of parameters are left out, which gluon numbers by process.
    """
    shapes = (
        f"{param.shape} {np.dtype(param.dtype).name}"
        + " fixed" * (param.grad_req == "null")
        + " row-sparse" * (param._stype != "default")
        + " with sparse gradients" * (param._grad_stype != "default")
        for param in params
    )
    return {"parameters": ", ".join(shapes), "optimizer": _described(optimizer)}


def _described(value: object) -> str:
    """Returns the class and the options of an optimizer or a scheduler, without its counters."""
    options = (
        f"{name}={option!r}"
        for name, option in sorted(vars(value).items())
        if isinstance(option, bool | int | float | str | tuple | list) and name not in _COUNTERS
    )
    scheduler = getattr(value, "lr_scheduler", None)
    scheduled = "" if scheduler is None else f" scheduled by {_described(scheduler)}"
    return f"{type(value).__name__}({', '.join(options)}){scheduled}"


def _living(kind: type[gluon.Block]) -> Iterator[Any]:
    """Yields the layers of a kind that exist, because parameters do not know their layers."""
    layers = (candidate for candidate in gc.get_objects() if issubclass(type(candidate), kind))
    # Without the attribute, their creation has failed.
    return (layer for layer in layers if hasattr(layer, "_children"))


# Row-sparse parameters, of which each worker has all rows


def is_sparse(param: gluon.Parameter) -> bool:
    """Returns whether the values of a parameter are row-sparse, and not its gradients alone."""
    return bool(param._stype != "default")


def allow_dense_reads(params: Iterable[gluon.Parameter]) -> None:
    """Lets row-sparse parameters be read like dense ones, since each worker has all rows of them.

    MXNet's servers would have to update them otherwise, and divide by a constant batch size.
    """
    for param in filter(is_sparse, params):
        param.list_data = partial(_whole_arrays, param)


def _whole_arrays(param: gluon.Parameter) -> Arrays:
    return list(param._check_and_get(param._data, list))


def exchange_whole(
    param: gluon.Parameter, exchange: Callable[[mx.nd.NDArray, Arrays], None]
) -> None:
    """Exchanges a row-sparse parameter as a dense copy, in which `exchange` puts its new values."""
    values = _whole_arrays(param)[0].tostype("default")
    exchange(values, [values])
    rows = np.arange(param.shape[0])  # also those that are zero: optimizers need them
    for array in _whole_arrays(param):
        set_rows(array, values.as_in_context(array.context), rows)


def set_rows(array: mx.nd.NDArray, values: Any, rows: npt.NDArray[Any]) -> None:
    """Replaces a row-sparse array by rows with these numbers."""
    like = {"shape": array.shape, "ctx": array.context, "dtype": array.dtype}
    mx.nd.sparse.row_sparse_array((values, rows), **like).copyto(array)


def copy_rows(param: gluon.Parameter, out: Arrays | mx.nd.NDArray) -> None:
    """Copies a whole row-sparse parameter, unless `out` are its own arrays."""
    own_arrays = _whole_arrays(param)
    for array in out if isinstance(out, list | tuple) else [out]:
        if not any(array is own_array for own_array in own_arrays):
            own_arrays[0].copyto(array)


def devices_of(contexts: Sequence[mx.Context]) -> Devices:
    """Returns the devices among which this worker splits its batch, such as "2 x cpu, 2 cores"."""
    names = [gpu(device.device_id) if device.device_type == "gpu" else cpu() for device in contexts]
    text = names[0] if len(names) == 1 else f"{len(names)} x {names[0]}"
    if len(set(names)) > 1:
        text = ", ".join(names)
    are_gpus = all(device.device_type == "gpu" for device in contexts)
    # Only the memory of the first GPU is sampled.
    return Devices((text,), are_gpus, are_gpus and [device.device_id for device in contexts] == [0])


def devices_of_module(count: int) -> Devices:
    """Returns the devices of a Module, which are unknown before it is bound if there are GPUs."""
    return Devices(("",)) if mx.context.num_gpus() else devices_of([mx.cpu()] * count)
