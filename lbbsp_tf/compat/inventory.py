"""Inventory of the patches of Keras and TensorFlow: which ones these versions need.

A patch is applied where its feature is found. So the inventory applies each of them, and notes
what it has replaced.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import NamedTuple

import tensorflow as tf

from lbbsp_tf import compat
from lbbsp_tf.compat.random import Noise, noise_of
from lbbsp_tf.compat.values import GONE, IN_CONTEXT, IN_PLACE, NOT_NEEDED, noted


class State(NamedTuple):
    """State of a patch in this process."""

    purpose: str
    is_right: bool  # in place, or not needed
    text: str


def inventory() -> Iterator[State]:
    """Applies all patches to this process, which must not train, and returns their states."""
    one = tf.ones(())
    patches: dict[str, Callable[[], object]] = {
        "fit under a strategy": compat.patch_keras,
        "conditional updates of optimizers": compat.allow_conditional_updates,
        "moments of synchronised batch normalisation": compat.synchronize_moments,
        "batch normalisation of a replica": lambda: compat.plain_batch_norm_noticed(lambda: None),
        "evaluation on any number of rows": lambda: compat.patch_evaluation(
            lambda *_: {}, lambda _: None, lambda _: None, lambda *_: ()
        ),
        "files written once per job": lambda: compat.write_once_per_job(1),
        "gradients before `apply`": lambda: compat.intercepted_apply(lambda grads, _: grads),
        "optimizers that are applied": compat.note_optimizers,
        "one replica in the user's code": compat.replicas_view,
        "means over tokens": lambda: compat.token_means_scaled(lambda tokens, _: tokens),
        "vectors of `add_loss`": lambda: compat.added_vectors_scaled(one, tf.zeros((1, 1))),
        "scalars of metrics": lambda: compat.intercepted_scalars(lambda *both: both),
        "gradients of tapes": lambda: compat.intercepted_gradients(lambda *_: None),
        "noise of each replica": lambda: noise_of(Noise(0)),
        "traces of each step": compat.fresh_traces,
        "proof of the loss: noise": compat.same_noise,
        "proof of the loss: outputs": compat.without_outputs,
        "proof of the loss: batch normalisation": compat.batch_norm_in_inference,
        "proof of the loss: own gradients": lambda: compat.own_gradients_scaled(
            lambda: tf.ones(())
        ),
        "proof of the loss: switches": lambda: compat.Switches(
            tf.zeros(()), tf.constant(False)
        ).installed(),
        "patience with silent workers": compat.extend_heartbeat_timeout,
        "variables compared by name": compat.compare_variables,
    }
    return (state_of(purpose, apply) for purpose, apply in patches.items())


def state_of(purpose: str, apply: Callable[[], object]) -> State:
    """Applies a patch to this process, or in the context that it returns; returns its state."""
    places: list[tuple[str, str]] = []
    try:
        with noted(places):
            applied = apply()
            if isinstance(applied, AbstractContextManager):
                with applied:
                    pass
    except Exception as error:  # what it changes is not there, or different
        return State(purpose, False, f"cannot be applied: {type(error).__name__}: {error}")
    by_state: dict[str, list[str]] = {}
    for place, state in places:
        by_state.setdefault(state, []).append(place)
    if GONE in by_state:
        return State(purpose, False, f"not in place: there is no {by_state[GONE][0]} any more")
    if IN_PLACE in by_state:
        unneeded = by_state.get(NOT_NEEDED)
        text = "needed, and in place" + (f"; but not {', '.join(unneeded)}" if unneeded else "")
    elif IN_CONTEXT in by_state:
        text = "needed; applied while a fit is prepared"
    else:
        text = "not in place: this version does not need it, or has no means for it"
    return State(purpose, True, text)
