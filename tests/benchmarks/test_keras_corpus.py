"""The corpus of public scripts: what is edited and counted, and how outcomes are told apart.

The script here is our own. The tool itself runs for minutes on a checkout of public scripts.
"""

import ast
import json

import corpus_edits as edits
import corpus_runs as runs
import keras_corpus as corpus
import numpy as np
import pytest
from corpus_scripts import SCRIPTS, Script

TEXT = '''"""A script.

from nowhere import nothing
"""
import keras
import numpy as np

x, y = np.zeros((75, 4)), np.zeros((75, 1))
model = keras.Sequential(
    [keras.layers.Dense(4), keras.layers.Dense(1)]
)
model.compile(
    "sgd",
    "mse",
)
for _ in range(2):
    history = model.fit(
        x, y, batch_size=16, epochs=1, validation_split=0.2,
        callbacks=[keras.callbacks.TerminateOnNaN()],
    )
'''
SCRIPT = Script("here/own.py", 32, scopes=(("model = ", "model.compile("),))


def test_a_script_gets_the_changes_of_the_readme():
    text, lines = corpus.edited(SCRIPT, TEXT)
    ast.parse(text)
    assert text.index("import lbbsp_tf") < text.index("import keras\n")
    assert "LoadBalancer(strategy, global_batch_size=32)" in text
    scope = text.index("with strategy.scope():\n    model = ")
    assert scope < text.index('    model.compile(\n        "sgd",') < text.index("for _ in")
    assert "balancer.dataset(x, y, validation_split=0.2)," in text
    assert "callbacks=[balancer, keras.callbacks.TerminateOnNaN()]" in text
    assert "validation_data=balancer.validation_data" in text
    assert "batch_size=16" not in text
    assert "epochs=1" in text
    # five of the header, the scope, and in the call: data, steps, validation, callbacks
    assert 10 <= lines <= 12


@pytest.mark.parametrize(
    ("call", "expected"),
    [
        (
            "m.fit(a, epochs=2)",
            "m.fit(balancer.dataset(a), steps_per_epoch=balancer.steps_per_epoch, epochs=2, "
            "callbacks=[balancer])",
        ),
        (
            "m.fit(x=a, y=b, epochs=2, callbacks=mine, shuffle=True)",
            "m.fit(balancer.dataset(a, b), steps_per_epoch=balancer.steps_per_epoch, epochs=2, "
            "callbacks=[balancer, *mine])",
        ),
        (
            "m.fit(a, sample_weight=w, epochs=2)",
            "m.fit(balancer.dataset(a, sample_weight=w), "
            "steps_per_epoch=balancer.steps_per_epoch, epochs=2, callbacks=[balancer])",
        ),
        ("scaler.fit(a)", "scaler.fit(a)"),
    ],
)
def test_arguments_of_fit(call, expected):
    assert edits.rewrite_fits(call) == expected
    assert edits.rewrite_fits(call, ["chosen"]) == call


def test_every_occurrence_enters_the_scope_but_no_text_moves():
    text = 'if True:\n    m = """\ntext"""\nm = 2\n'
    scoped = edits.enter_scope(text, "m = ")
    assert scoped.count("with strategy.scope():") == 2
    assert "\ntext" in scoped
    ast.parse(scoped)


def test_shuffles_of_data_sets_are_seeded():
    text = "a.shuffle(3)\nb.shuffle(4, seed=1)\nrandom.shuffle(c)\nd.shuffle(len(d),)\n"
    assert edits.seed_shuffles(text) == (
        "a.shuffle(3, seed=0)\nb.shuffle(4, seed=1)\nrandom.shuffle(c)\nd.shuffle(len(d), seed=0)\n"
    )


@pytest.mark.parametrize(
    ("edit", "pattern"),
    [(edits.replace, [("b", "c")]), (edits.enter_scope, "b = "), (edits.cut, [("a", "b")])],
)
def test_a_pattern_that_does_not_occur_is_an_error(edit, pattern):
    with pytest.raises(ValueError, match="the script has changed"):
        edit("a = 1", pattern)


def test_indentation_does_not_count_as_a_change():
    assert edits.changed_lines("a\nb", "with c:\n    a\n    b") == 1
    assert edits.changed_lines("a\nb\nc", "a\nd\ne\nc") == 2


def test_code_cells_of_a_notebook(tmp_path):
    cells = [
        {"cell_type": "markdown", "source": ["words"]},
        {"cell_type": "code", "source": ["!pip install x\n", "a = 1\n", "  %time b\n"]},
    ]
    path = tmp_path / "own.ipynb"
    path.write_text(json.dumps({"cells": cells}))
    assert edits.read_script(path).split() == ["a", "=", "1"]


def saved(*ends):
    """Weights that moved by 1 from 0, and by as much more as given."""
    arrays = {}
    for fit, end in enumerate(ends):
        arrays |= {f"{fit}_start_0": np.zeros(3), f"{fit}_end_0": np.array([0, 0, 1 + end])}
    return arrays


def run(status=0, error=None, fits=()):
    return runs.Run(status, error, list(fits), "")


OWN = {"error": "ValueError", "message": "the remedy is this", "own": True, "frames": []}
OTHER = {"error": "TypeError", "message": "no", "own": False, "frames": ["a.py:1"]}


@pytest.mark.parametrize(
    ("reference", "balanced", "outcome"),
    [
        (run(fits=[saved(0.0)]), run(fits=[saved(1e-7), saved(1e-7)]), "exact"),
        (run(fits=[saved(0.0)]), run(fits=[saved(0.0), saved(1e-3)]), "DIFFERENT"),
        (run(fits=[saved(0.0, 0.0)]), run(fits=[saved(0.0, 1e-3)]), "DIFFERENT"),
        (run(fits=[saved(0.0)]), run(fits=[saved(float("nan"))]), "DIFFERENT"),
        (run(fits=[saved(0.0)]), run(1, OWN), "refused"),
        (run(fits=[saved(0.0)]), run(1, OTHER), "FAILED"),
        (run(fits=[saved(0.0)]), run(124), "FAILED"),
        (run(fits=[saved(0.0, 0.0)]), run(fits=[saved(0.0)]), "FAILED"),
        (run(), run(), "FAILED"),
    ],
)
def test_outcomes(reference, balanced, outcome):
    row = runs.classify(SCRIPT, 10, reference, balanced)
    assert row.outcome == outcome
    assert row.script in runs.table([row])


def test_differences_are_relative_to_the_way_of_each_weight():
    reference = saved(0.0) | {"0_start_1": np.zeros(1), "0_end_1": np.array([0.1])}
    found = saved(0.25) | {"0_start_1": np.zeros(1), "0_end_1": np.array([0.1])}
    assert runs.differences(reference, found) == pytest.approx([0.25])
    found = saved(0.0) | {"0_start_1": np.zeros(1), "0_end_1": np.array([0.15])}
    assert runs.differences(reference, found) == pytest.approx([0.5])


def test_logs_that_differ_are_named():
    reference, found = (
        run(fits=[saved(0.0) | {"0_log_loss": np.array([2.0])}]),
        run(fits=[saved(0.0) | {"0_log_loss": np.array([2.5])}]),
    )
    row = runs.classify(SCRIPT, 10, reference, found)
    assert "the logged loss differs by 2.5e-01" in row.words


def test_the_list_names_each_script_once():
    paths = [script.path for script in SCRIPTS]
    assert len(paths) == len(set(paths)) >= 20
