"""States of patches in versions of Keras that differ from those installed."""

import pytest

from lbbsp_tf.compat.inventory import state_of
from lbbsp_tf.compat.values import patch, patch_broken, replaced


class Owner:
    """Class of another version of Keras."""

    def build(self):
        """Does nothing."""


def apply(name, sign):
    return lambda: patch_broken(Owner, name, sign, lambda original, self: None)


@pytest.mark.parametrize(
    ("apply", "is_right", "text"),
    [
        (lambda: patch(Owner, "build", lambda original, self: None), True, "needed, and in place"),
        (apply("build", "def build"), True, "needed, and in place"),
        (apply("build", "Keras 2"), True, "not in place: this version does not need it"),
        (apply("gone", "def gone"), False, "not in place: there is no Owner.gone any more"),
        (lambda: patch(Owner, "gone", print), False, "cannot be applied: AttributeError"),
        (lambda: replaced(Owner, "build", None), True, "needed; applied while a fit is prepared"),
    ],
)
def test_the_state_of_a_patch_is_explained(monkeypatch, apply, is_right, text):
    monkeypatch.setattr(Owner, "build", Owner.build)
    state = state_of("x", apply)
    assert state.is_right == is_right
    assert text in state.text


def test_parts_that_are_not_needed_are_named(monkeypatch):
    monkeypatch.setattr(Owner, "build", Owner.build)
    both = lambda: (apply("__str__", "Keras 2")(), apply("build", "def build")())  # noqa: E731
    monkeypatch.setattr(Owner, "__str__", lambda self: "owner", raising=False)
    assert state_of("x", both).text == "needed, and in place; but not Owner.__str__"
