"""The corpus of public MXNet scripts: what is edited and counted, and how a script of our own does.

The tool itself runs for minutes on checkouts of public scripts.
"""

import dataclasses
from importlib.util import find_spec

import corpus_runs as runs
import mxnet_corpus as corpus
import pytest
from mxnet_scripts import SCRIPTS, Script
from waits import HANG_SECONDS

HELPER = """import numpy as np

rng = np.random.default_rng(0)
FEATURES = rng.normal(size=(41, 4)).astype(np.float32)
"""
TEXT = """import sys

import mxnet as mx
from mxnet import autograd, gluon
from helper import FEATURES

DATA = gluon.data.ArrayDataset(FEATURES, FEATURES.sum(axis=1) ** 2)
BATCH = int(sys.argv[1])
for centred in (False, True):
    net = gluon.nn.Dense(1)
    net.initialize()
    trainer = gluon.Trainer(net.collect_params(), "adam")
    loader = gluon.data.DataLoader(DATA, BATCH, shuffle=True)
    for epoch in range(1000):
        for x, y in loader:
            with autograd.record():
                if centred:  # depends on how the global batch is split
                    x = x - x.mean(axis=0)
                loss = gluon.loss.L2Loss()(net(x), y)
            loss.backward()
            trainer.step(x.shape[0])
"""
SCRIPT = Script(
    "here/own.py",
    edits=(
        ("import mxnet as mx\n", "import lbbsp_mx\nimport mxnet as mx\n"),
        (
            'gluon.Trainer(net.collect_params(), "adam")',
            'lbbsp_mx.Trainer(net.collect_params(), "adam", global_batch_size=BATCH)',
        ),
        (
            "DataLoader(DATA, BATCH, shuffle=True)",
            "DataLoader(DATA, batch_sampler=trainer.batch_sampler(DATA, seed=0))",
        ),
    ),
    small=(("range(1000)", "range(2)"),),
    arguments="{each}",
)


@pytest.fixture
def checkout(tmp_path):
    folder = tmp_path / "checkout" / "here"
    folder.mkdir(parents=True)
    (folder / "own.py").write_text(TEXT)
    (folder / "helper.py").write_text(HELPER)
    return folder


def test_only_changes_for_lbbsp_count(checkout):
    assert corpus.edited(SCRIPT, checkout) == 3
    text = (checkout / "own.py").read_text()
    assert "range(2)" in text
    assert "global_batch_size=BATCH" in text


def test_modules_of_a_script_are_edited_too(checkout):
    modules = (("helper.py", (), (("rng.normal", "rng.random"),)),)
    assert corpus.edited(dataclasses.replace(SCRIPT, modules=modules), checkout) == 4
    assert "rng.random" in (checkout / "helper.py").read_text()


def test_what_cannot_be_edited_is_an_error(checkout, tmp_path):
    changed = dataclasses.replace(SCRIPT, edits=(("absent", ""),))
    row = corpus.examine(changed, [checkout.parent], tmp_path / "out", 2, HANG_SECONDS)
    assert (row.outcome, row.lines_changed) == ("FAILED", 0)
    assert "the script has changed" in row.words
    row = corpus.examine(SCRIPT, [tmp_path / "none"], tmp_path / "other", 2, HANG_SECONDS)
    assert row.outcome == "FAILED"
    assert "in none of the folders of --scripts" in row.words


@pytest.mark.campaign
@pytest.mark.skipif(find_spec("mxnet") is None, reason="needs mxnet: pip install 'lbbsp[mx]'")
def test_each_trainer_of_a_script_is_compared_with_one_process(checkout, tmp_path):
    folder = tmp_path / "out"
    script = dataclasses.replace(SCRIPT, arguments="16")
    row = corpus.examine(script, [checkout.parent], folder, workers=2, timeout=HANG_SECONDS)
    exact, centred = row.differences
    assert exact <= runs.TOLERANCE
    assert centred > 1e-3
    assert row.outcome == "DIFFERENT"
    assert "2 trainers" in row.words


def test_the_list_names_each_script_once():
    paths = [script.path for script in SCRIPTS]
    assert len(paths) == len(set(paths)) >= 14
    assert {path.split("/")[0] for path in paths} == {"example", "scripts"}
