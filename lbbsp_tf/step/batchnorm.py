"""Batch normalisation over the global batch."""

from __future__ import annotations

from typing import TypeVar

import keras
from keras.layers import BatchNormalization

LayerOrModel = TypeVar("LayerOrModel", bound=keras.layers.Layer)


def synchronize_batch_norm(model: LayerOrModel) -> LayerOrModel:
    """Makes all batch normalisation of a model normalise over the batches of all workers.

    A plain `keras.layers.BatchNormalization` normalises each worker's batch separately, so that
    the result depends on how the global batch is split. This function sets ``synchronized=True``
    on each such layer, at any depth: in nested models, in wrappers, in attributes, lists and
    dictionaries of subclassed models. Weights, optimizer and compiled state stay as they are, and
    the saved model is synchronised as well. Under a single worker nothing changes.

    Layers that do not use statistics of the batch, such as `GroupNormalization`, need no change.

    Args:
        model: Model or layer, built from code or loaded from a file. A subclassed model that
            creates layers in `build` must be built before.

    Returns:
        The same model.

    Raises:
        ValueError: A subclass of `BatchNormalization` computes the statistics itself, or a layer
            is called in a loop of the graph, in which workers cannot communicate.

    Example:
        >>> model = keras.Sequential([keras.layers.Dense(4), keras.layers.BatchNormalization()])
        >>> synchronize_batch_norm(model).layers[1].synchronized
        True
    """
    layers = list(model._flatten_layers())
    batch_norms = [layer for layer in layers if isinstance(layer, BatchNormalization)]
    loops = [layer for layer in layers if isinstance(layer, keras.layers.RNN) and not layer.unroll]
    in_loops = {id(part) for layer in loops for part in layer._flatten_layers()}
    for layer in batch_norms:
        if any(
            getattr(type(layer), name, None) is not getattr(BatchNormalization, name, None)
            for name in ("_moments", "_calculate_mean_and_var")
        ):
            raise ValueError(
                f"layer {layer.name!r} cannot be synchronised, because its class "
                f"{type(layer).__name__} overrides how BatchNormalization computes statistics: "
                "use keras.layers.BatchNormalization"
            )
        if id(layer) in in_loops:
            raise ValueError(
                f"layer {layer.name!r} cannot be synchronised inside a recurrent layer, because "
                "workers cannot communicate in a loop of the graph: pass unroll=True to the "
                "recurrent layer, or use LayerNormalization"
            )
    if any(not layer.synchronized for layer in batch_norms):
        for layer in batch_norms:
            layer.synchronized = True
        if isinstance(model, keras.Model):
            model.train_function = None  # it was traced with the statistics of one batch
    return model


def synchronized_layers(model: keras.Model) -> list[BatchNormalization]:
    """Returns the layers of a model that normalise over the batches of all workers."""
    layers = model._flatten_layers()
    return [norm for norm in layers if isinstance(norm, BatchNormalization) and norm.synchronized]
