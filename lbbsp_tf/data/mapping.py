"""Per-sample functions: mapped over a batch, on several threads, with results of any length."""

from __future__ import annotations

from collections.abc import Callable

import tensorflow as tf

from lbbsp_tf.compat import Nest

SampleMap = Callable[..., Nest]


def over_samples(function: SampleMap, *, readers: int, padded: bool | None) -> SampleMap:
    """Returns a function of a batch that applies `function` to each of its samples."""

    def over_batch(*batch: Nest) -> Nest:
        samples = tf.data.Dataset.from_tensor_slices(batch)
        parallel = {"num_parallel_calls": readers, "deterministic": True} if readers > 1 else {}
        results = samples.map(function, **parallel)
        return _batched(results, samples.cardinality(), padded)

    return over_batch


def _batched(results: tf.data.Dataset, size: tf.Tensor, padded: bool | None) -> Nest:
    """Returns all elements of a data set as one batch, `padded` as in `LoadBalancer.dataset`."""
    spec = results.element_spec
    if not any(map(_varies, tf.nest.flatten(spec))):
        return results.batch(size).get_single_element()
    if padded is True:
        return results.padded_batch(size).get_single_element()
    if padded is False:
        return results.ragged_batch(size).get_single_element()
    as_given = unpacked(spec)
    with_shapes = results.map(lambda *sample: (as_given(*sample), _shapes(sample)))
    batch, shapes = with_shapes.padded_batch(size).get_single_element()
    checks = [
        tf.debugging.Assert(
            tf.reduce_all(shape == shape[:1]),
            [
                "samples of a batch have different shapes: pass padded=True to "
                "balancer.dataset(...) to pad them with zeros, or padded=False for ragged tensors",
                shape,
            ],
        )
        for shape in shapes
    ]
    with tf.control_dependencies(checks):
        return tf.nest.map_structure(tf.identity, batch)


def _shapes(sample: Nest) -> tuple[tf.Tensor, ...]:
    """Returns the shapes of the tensors that may differ between samples."""
    leaves = tf.nest.flatten(sample)
    return tuple(tf.shape(each) for each in leaves if _varies(tf.type_spec_from_value(each)))


def _varies(spec: tf.TypeSpec) -> bool:
    """Returns whether tensors of this specification may have different shapes."""
    if not isinstance(spec, tf.TensorSpec):
        return False
    return spec.shape.rank is not None and not spec.shape.is_fully_defined()


def unpacked(spec: Nest) -> SampleMap:
    """Returns the function that returns its arguments in the structure of an element.

    A data set calls functions with the parts of a tuple, also of a tuple of one part such as
    ``((a, b),)``, or with the element itself if that is no tuple.
    """
    return lambda *parts: parts if isinstance(spec, tuple) else parts[0]
