"""What is concluded from the trials of a train step, whose results are written down here."""

from contextlib import nullcontext

import keras
import numpy as np
import pytest
import tensorflow as tf

from lbbsp_tf.exactness.effects import factors_of_logged
from lbbsp_tf.exactness.probe import Probe
from lbbsp_tf.exactness.rounding import SINGLE, Comparison
from lbbsp_tf.exactness.trial import Split, Trial


def split_of(whole, first, second, name="scalars", rotated=None):
    """A split of four samples into two of two."""
    none = Trial([], [], [], [])
    trials = [none._replace(**{name: values}) for values in (whole, first, second)]
    last = trials[0] if rotated is None else none._replace(**{name: rotated})
    return Split(4, 2, *trials, last)


def comparison_of(whole, part, rotated):
    """Whether two equal parts have the whole as their mean, and how much they differ from it."""
    whole, part, rotated = ([np.array(each)] for each in (whole, part, rotated))
    split = split_of(whole, part, part, "sketches", rotated)
    comparison = Comparison(SINGLE, [split], 0)
    arguments = whole[0], split.mean(0)
    return comparison.agree(*arguments), comparison.difference(*arguments)


COUNTED, READ = (tf.Variable(1.0, name=name) for name in ("counted", "read"))
RECURRENT = keras.layers.LSTM(2)


def gradient_of_a_recurrence():
    with tf.GradientTape() as tape:
        total = tf.reduce_sum(RECURRENT(tf.ones((2, 3, 2))))
    return tape.gradient(total, RECURRENT.trainable_variables)[0]


def loop():
    def body(step):
        COUNTED.assign_add(READ)
        return [step + 1]

    return tf.while_loop(lambda step: step < 3, body, [0])[0]


def branch():
    return tf.cond(READ > 0, lambda: COUNTED.assign_add(READ), lambda: tf.identity(READ))


@pytest.mark.parametrize(
    ("function", "written"),
    [(gradient_of_a_recurrence, []), (loop, ["counted"]), (branch, ["counted"])],
)
def test_variables_that_loops_and_branches_only_read_are_not_written(function, written):
    RECURRENT.build((None, 3, 2))
    _, found = Probe(tf.distribute.get_strategy(), function, nullcontext).run()
    assert [each.name for each in found] == written
    assert COUNTED.numpy() == 1, "restored"


ONES = [1.0, 1.0, 1.0]


@pytest.mark.parametrize(
    ("whole", "part", "rotated", "difference"),
    [
        # Projections of a large gradient may be almost zero by chance.
        ([[1e-6, 0, 1], ONES], [[1e-6 + 5e-4, 0, 1], ONES], None, 0),
        ([[1e-6, 0, 1], ONES], [[1e-6 + 2e-3, 0, 1], ONES], None, 2e-3),
        # Small gradients that consist of rounding are compared with large ones.
        ([ONES, [1e-7] * 3], [ONES, [6e-7, 1e-7, 1e-7]], [ONES, [1e-7 + 1e-9, 1e-7, 1e-7]], 0),
        ([ONES, [1e-7] * 3], [ONES, [6e-7, 1e-7, 1e-7]], [ONES, [1e-7 + 1e-12, 1e-7, 1e-7]], 5e-3),
        # Coarsely rounded gradients are compared as coarsely, and others beside them are not.
        ([ONES, ONES], [ONES, [1.005, 1, 1]], [ONES, [1.0001, 1, 1]], 0),
        ([ONES, ONES], [ONES, [1.005, 1, 1]], [ONES, [1.000001, 1, 1]], 5e-3),
        ([ONES, ONES], [ONES, [1.4, 1, 1]], [ONES, [1.1, 1, 1]], 0.4),  # at most by 30 %
        ([ONES, ONES], [[1.005, 1, 1]] * 2, [ONES, [1.0001, 1, 1]], 5e-3),
    ],
)
def test_differences_that_rounding_explains_are_none(whole, part, rotated, difference):
    agree, found = comparison_of(whole, part, whole if rotated is None else rotated)
    assert agree is (difference == 0)
    assert found == pytest.approx(difference)


def test_parts_that_are_not_finite_disagree():
    assert not comparison_of([ONES], [[np.inf, 1.0, np.inf]], [ONES])[0]


def test_a_logged_scalar_is_a_sum_only_if_it_is_one_in_every_split():
    """In one split, a number may be the sum of its parts by chance, or zero and also their mean."""
    one = split_of([6.0, 0.0, 5.0], [3.0, 0.0, 5.0], [3.0, 0.0, 5.0])
    other = split_of([4.0, 6.0, 3.0], [4.0, 2.0, 4.0], [1.0, 4.0, 2.0])
    by_chance, a_sum, a_mean = factors_of_logged([one, other], [one, other], 1, tolerance=1e-6)
    assert (by_chance, a_sum, a_mean) == (None, 1.0, None)


@pytest.mark.parametrize(
    ("seen", "factor"),
    [
        ((12.0, 4.0, 8.0), None),  # no regulariser that three replicas divide
        ((12.0 + 0.6 / 3, 4.0 + 0.6 / 3, 8.0 + 0.6 / 3), 1.0),
        ((36.0 + 0.6, 12.0 + 0.6, 24.0 + 0.6), 1 / 3),  # Keras multiplies it by their number
        ((float("nan"),) * 3, None),
    ],
)
def test_regularisers_in_a_logged_sum_count_once(seen, factor):
    alone = split_of([12.6], [4.6], [8.6])
    seen = split_of(*([value] for value in seen))
    assert factors_of_logged([alone], [seen], replicas=3, tolerance=1e-6) == (factor,)
