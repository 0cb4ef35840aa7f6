"""What is concluded from the trials of a train step, whose results are written down here."""

import numpy as np

from lbbsp_tf.exactness.effects import factors_of_logged
from lbbsp_tf.exactness.rounding import SINGLE, Comparison
from lbbsp_tf.exactness.trial import Split, Trial


def split_of(whole, first, second, name="scalars", rotated=None):
    """A split of four samples into two of two."""
    none = Trial([], [], [], [])
    trials = [none._replace(**{name: values}) for values in (whole, first, second)]
    last = trials[0] if rotated is None else none._replace(**{name: rotated})
    return Split(4, 2, *trials, last)


def test_a_difference_is_small_relative_to_the_gradient_not_to_its_projections():
    """Projections of a large gradient may be almost zero by chance."""
    sketch = np.array([[1e-6, -1e-6, 1.0], [0.3, 0.4, 0.5]])
    comparison = Comparison(SINGLE, [split_of(*[[sketch]] * 3, "sketches")], 0)
    near, far = (sketch + np.array([[shift, 0, 0], [0, 0, 0]]) for shift in (5e-4, 2e-3))
    assert comparison.agree(near, sketch)
    assert comparison.difference(near, sketch) == 0
    assert not comparison.agree(far, sketch)
    assert comparison.difference(far, sketch) == np.float64(2e-3)


def test_a_logged_scalar_is_a_sum_only_if_it_is_one_in_every_split():
    """In one split, a number may be the sum of its parts by chance, or zero and also their mean."""
    one = split_of([6.0, 0.0, 5.0], [3.0, 0.0, 5.0], [3.0, 0.0, 5.0])
    other = split_of([4.0, 6.0, 3.0], [4.0, 2.0, 4.0], [1.0, 4.0, 2.0])
    by_chance, a_sum, a_mean = factors_of_logged([one, other], [one, other], 1, tolerance=1e-6)
    assert (by_chance, a_sum, a_mean) == (None, 1.0, None)
