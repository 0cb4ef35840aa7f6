"""The examples come in pairs: little differs between them, and both run on a cluster."""

import difflib
from importlib.util import find_spec
from pathlib import Path

import pytest

from lbbsp_core.launch import launch

EXAMPLES = Path(__file__).parents[2] / "examples"


@pytest.mark.parametrize(
    "example", ["keras_digits", "gluon_digits", "keras_loop", "keras_sequences"]
)
def test_balancing_costs_a_user_at_most_ten_lines(example):
    plain, balanced = (
        (EXAMPLES / f"{example}_{kind}.py").read_text().splitlines()
        for kind in ("plain", "balanced")
    )
    changes = [
        line
        for line in difflib.unified_diff(plain, balanced, n=0, lineterm="")
        if line.startswith("+") and not line.startswith("+++")
    ]
    assert 0 < len(changes) <= 10


@pytest.mark.campaign
@pytest.mark.parametrize("kind", ["plain", "balanced"])
def test_an_example_learns_the_digits_on_two_workers(kind):
    lines = []
    status = launch(
        [str(EXAMPLES / f"keras_digits_{kind}.py")],
        workers=2,
        timeout=200,
        output=lambda rank, line: lines.append(line),
    )
    print("\n".join(lines))
    assert status == 0
    last = [line for line in lines if "val_accuracy" in line][-1]
    assert float(last.split("val_accuracy: ")[1].split()[0]) > 0.8


@pytest.mark.campaign
def test_sequences_of_different_lengths_are_learned_on_two_workers():
    lines = []
    status = launch(
        [str(EXAMPLES / "keras_sequences_balanced.py")],
        workers=2,
        timeout=200,
        output=lambda rank, line: lines.append(line),
    )
    print("\n".join(lines))
    assert status == 0
    last = [line for line in lines if "val_accuracy" in line][-1]
    assert float(last.split(" accuracy: ")[1].split()[0]) > 0.6


@pytest.mark.campaign
@pytest.mark.parametrize("kind", ["plain", "balanced"])
def test_a_custom_loop_learns_the_digits_on_two_workers(kind):
    lines = []
    status = launch(
        [str(EXAMPLES / f"keras_loop_{kind}.py")],
        workers=2,
        timeout=200,
        output=lambda rank, line: lines.append(line),
    )
    print("\n".join(lines))
    assert status == 0
    last = [line for line in lines if line.startswith("epoch 7: ")][-1]
    assert float(last.split()[-1]) > 0.8


@pytest.mark.campaign
@pytest.mark.skipif(find_spec("mxnet") is None, reason="needs mxnet: pip install 'lbbsp[mx]'")
@pytest.mark.parametrize("kind", ["plain", "balanced"])
def test_a_gluon_example_learns_the_digits_on_two_workers(kind):
    lines = []
    status = launch(
        [str(EXAMPLES / f"gluon_digits_{kind}.py")],
        workers=2,
        timeout=200,
        framework="mxnet",
        output=lambda rank, line: lines.append(line),
    )
    print("\n".join(lines))
    assert status == 0
    (accuracy,) = [line for line in lines if line.startswith("accuracy: ")]
    assert float(accuracy.split()[1]) > 0.8
