"""States of patches in versions of Keras that differ from those installed."""

from types import SimpleNamespace

import pytest

from lbbsp_tf.compat.inventory import Patch, state_of
from lbbsp_tf.compat.values import patched


class Owner:
    """Class of another version of Keras."""

    def build(self):
        """Does nothing."""


def replace():
    """Applies a patch."""
    Owner.build = patched(lambda self: None)


def test_a_patch_that_is_applied_is_needed():
    before = Owner.build
    try:
        assert state_of(Patch("x", replace, Owner, ("build",))).text == "needed, and in place"
    finally:
        Owner.build = before


@pytest.mark.parametrize(
    ("patch", "is_right", "text"),
    [
        (Patch("x", lambda: None, Owner, ("build",)), False, "needed, but not in place"),
        (Patch("x", lambda: None, Owner, ("build",), "it works"), True, "not in place: it works"),
        (Patch("x", lambda: None, Owner, ("gone",), "it works"), False, "there is no Owner.gone"),
        (Patch("x", lambda: Owner.gone), False, "cannot be applied: AttributeError"),
        (Patch("x", lambda: SimpleNamespace()), True, "needed; applied while a fit is prepared"),
    ],
)
def test_a_patch_that_is_not_in_place_is_explained(patch, is_right, text):
    state = state_of(patch)
    assert state.is_right == is_right
    assert text in state.text
