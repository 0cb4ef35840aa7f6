"""Functions of samples and of batches, as `tf.data` maps them."""

from __future__ import annotations

from collections.abc import Callable

import tensorflow as tf

from lbbsp_tf.compat import Nest
from lbbsp_tf.rows import count_rows, first_leaf

SampleMap = Callable[..., Nest]


def over_samples(function: SampleMap, readers: int, padded: bool | None) -> SampleMap:
    """Returns a function of a batch that applies `function` to each of its samples."""

    def over_batch(*batch: Nest) -> Nest:
        samples = tf.data.Dataset.from_tensor_slices(batch)
        parallel = {"num_parallel_calls": readers, "deterministic": True} if readers > 1 else {}
        results = samples.map(function, **parallel)
        return _batched(results, samples.cardinality(), padded)

    return over_batch


def keeping_rows(batch_map: SampleMap) -> SampleMap:
    """Wraps a function of a batch, to raise an error if it changes the number of rows.

    Workers are weighted by the samples that they were given.
    """

    def mapped(*batch: Nest) -> Nest:
        result = batch_map(*batch)
        check = tf.debugging.assert_equal(
            count_rows(first_leaf(result)),
            count_rows(first_leaf(batch)),
            "batch_map must return as many samples as it is given: let map= augment single samples",
        )
        with tf.control_dependencies([check]):
            return tf.nest.map_structure(tf.identity, result, expand_composites=True)

    return mapped


def composed(first: SampleMap | None, then: SampleMap | None) -> SampleMap | None:
    """Returns a function of a sample that applies both functions; None stands for no function."""
    if first is None or then is None:
        return first or then

    def both(*sample: Nest) -> Nest:
        restored = first(*sample)
        return then(*restored) if isinstance(restored, tuple) else then(restored)

    return both


def unpacked(spec: Nest) -> SampleMap:
    """Returns the function that returns its arguments in the structure of an element.

    A data set calls functions with the parts of a tuple, also of a tuple of one part such as
    ``((a, b),)``, or with the element itself if that is no tuple.
    """
    return lambda *parts: parts if isinstance(spec, tuple) else parts[0]


def _batched(results: tf.data.Dataset, size: tf.Tensor, padded: bool | None) -> Nest:
    """Returns all elements of a data set as one batch, `padded` as in `LoadBalancer.dataset`."""
    spec = results.element_spec
    if not any(map(_varies, tf.nest.flatten(spec))):
        return results.batch(size).get_single_element()
    if padded is True:
        return results.padded_batch(size).get_single_element()
    if padded is False:
        return results.ragged_batch(size).get_single_element()

    def with_shapes(*sample: Nest) -> tuple[Nest, tuple[tf.Tensor, ...]]:
        leaves = tf.nest.flatten(sample)
        shapes = tuple(tf.shape(leaf) for leaf in leaves if _varies(tf.type_spec_from_value(leaf)))
        return unpacked(spec)(*sample), shapes

    batch, shapes = results.map(with_shapes).padded_batch(size).get_single_element()
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


def _varies(spec: tf.TypeSpec) -> bool:
    """Returns whether tensors of this specification may have different shapes."""
    if not isinstance(spec, tf.TensorSpec):
        return False
    return spec.shape.rank is not None and not spec.shape.is_fully_defined()
