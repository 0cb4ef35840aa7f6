"""Double precision for scripts of float32: only errors of the mathematics remain."""

from __future__ import annotations

import functools
import inspect
import sys
from importlib.machinery import SourceFileLoader
from types import FunctionType, SimpleNamespace

import lbbsp_mx  # noqa: F401  before mxnet

import mxnet as mx  # isort: skip
import numpy as np


def use_double_precision(folders: tuple[str, ...]) -> None:
    """Makes float64 the type of what a script creates without a type, or as float32.

    Args:
        folders: Folders of the script and of its packages.
    """
    _keep_messages()
    for name, module in list(sys.modules.items()):
        if f"{name}.".startswith("mxnet.") and not name.startswith("mxnet.optimizer"):
            _double_defaults(module)
    _double_data()
    _replace_operators()
    _read_double(folders)


def _keep_messages() -> None:
    """Keeps float32 in lbbsp's own messages."""
    single_nd = SimpleNamespace(**vars(mx.nd))
    single_nd.zeros = functools.partial(_typed, mx.nd.zeros)
    single_nd.ones = functools.partial(_typed, mx.nd.ones)
    single_nd.array = functools.partial(_typed, mx.nd.array)
    single = SimpleNamespace(**{**vars(mx), "nd": single_nd})
    for name, module in list(sys.modules.items()):
        if name.startswith("lbbsp_mx.") and hasattr(module, "mx"):
            module.mx = single


def _double_data() -> None:
    """Converts what is cast to float32, and what a loader reads."""
    cast = mx.nd.NDArray.astype
    mx.nd.NDArray.astype = lambda self, dtype, *rest, **options: cast(
        self, _double(dtype), *rest, **options
    )
    iterate = mx.gluon.data.DataLoader.__iter__
    mx.gluon.data.DataLoader.__iter__ = lambda self: map(_doubled, iterate(self))


def _typed(create, source, ctx=None, dtype="float32", **options):
    if isinstance(source, mx.nd.NDArray):
        dtype = source.dtype
    return create(source, ctx=ctx, dtype=dtype, **options)


def _double_defaults(module) -> None:
    if getattr(module, "mx_real_t", None) is np.float32:
        module.mx_real_t = np.float64
    for function in _functions(module):
        if function.__defaults__:
            function.__defaults__ = tuple(map(_double, function.__defaults__))


def _functions(module):
    for each in list(vars(module).values()):
        if isinstance(each, FunctionType):
            yield each
        elif inspect.isclass(each) and f"{each.__module__}.".startswith("mxnet."):
            yield from (m for m in vars(each).values() if isinstance(m, FunctionType))


def _double(dtype):
    single = isinstance(dtype, (str, type)) and dtype in (np.float32, "float32")
    return np.float64 if single else dtype


def _doubled(batch):
    if isinstance(batch, (list, tuple)):
        return [_doubled(each) for each in batch]
    return batch.astype("float64") if batch.dtype == np.float32 else batch


def _read_double(folders: tuple[str, ...]) -> None:
    """Lets modules of these folders say float64 where they say float32."""
    read = SourceFileLoader.get_data

    def get_data(self, path):
        if not path.startswith(folders):
            return read(self, path)
        if path.endswith(".pyc"):
            raise OSError("compiled without the replacement")
        return read(self, path).replace(b"float32", b"float64")

    SourceFileLoader.get_data = get_data
    sys.dont_write_bytecode = True


def _replace_operators():
    """Replaces operators of MXNet that know no float64 by those that define them."""

    def part(F, projected, heads, number):
        split = F.reshape(projected, shape=(0, 0, heads, 3, -1))
        one = F.squeeze(F.slice_axis(split, axis=3, begin=number, end=number + 1), axis=3)
        return F.reshape(F.transpose(one, axes=(1, 2, 0, 3)), shape=(-1, 0, 0), reverse=True)

    def scores(F, projected, heads):
        queries = F.contrib.div_sqrt_dim(part(F, projected, heads, 0))
        return F.batch_dot(queries, part(F, projected, heads, 1), transpose_b=True)

    def values(F, projected, attention, heads):
        output = F.batch_dot(attention, part(F, projected, heads, 2))
        output = F.reshape(output, shape=(-1, heads, 0, 0), reverse=True)
        return F.reshape(F.transpose(output, axes=(2, 0, 1, 3)), shape=(0, 0, -1))

    mx.nd.multi_sum_sq = lambda *arrays, num_arrays: [(a * a).sum() for a in arrays]
    for F in (mx.nd, mx.sym):
        F.contrib.interleaved_matmul_selfatt_qk = lambda x, heads, F=F: scores(F, x, heads)
        F.contrib.interleaved_matmul_selfatt_valatt = lambda x, a, heads, F=F: values(
            F, x, a, heads
        )
