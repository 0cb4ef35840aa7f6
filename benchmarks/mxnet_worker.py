"""Runs one edited MXNet script of the corpus in one process: fake data, recorded weights.

What is random for each sample is left out: no dropout, no augmentation. Numbers are float64 by
default, so that differences are those of the mathematics.
"""

from __future__ import annotations

import importlib.util
import json
import os
import random
import runpy
import sys
from pathlib import Path

os.environ |= {"MPLBACKEND": "Agg", "OMP_NUM_THREADS": "1"}

import lbbsp_mx  # noqa: F401  before mxnet

import mxnet as mx  # isort: skip
import mxnet_data
import mxnet_precision
import numpy as np
from corpus_process import report, stand_in
from mxnet_recorder import Recorder

ABSENT = ("cv2", "tqdm", "mxboard", "portalocker", "yaml", "sentencepiece", "regex",
          "bottleneck", "seqeval", "seqeval.metrics", "gluonnlp.data.fast_bert_tokenizer",
          "sacremoses", "imageio", "gym", "librosa", "autocfg", "decord")  # fmt: skip


def without_randomness() -> None:
    """Leaves out dropout and random transforms."""
    mx.gluon.nn.Dropout.hybrid_forward = lambda self, F, x: F.identity(x)
    create = mx.gluon.rnn.rnn_layer._RNNLayer.__init__

    def undropped(self, *arguments, **options):
        create(self, *arguments, **options)
        self._dropout = 0

    mx.gluon.rnn.rnn_layer._RNNLayer.__init__ = undropped
    transforms = mx.gluon.data.vision.transforms
    if _is_installed("gluoncv"):
        from gluoncv.data.transforms import RandomCrop

        RandomCrop.forward = lambda self, x: x
    for name, kind in vars(transforms).items():
        if name.startswith("Random") and "Resized" not in name and "Crop" not in name:
            kind.forward = lambda self, x: x


def main(script: Path, folder: Path, settings: dict) -> None:
    """Runs a script in a folder of its own."""
    stand_in(name for name in ABSENT if not _is_installed(name))
    sys.path[:0] = [str(script.parent), *settings["paths"]]
    without_randomness()
    if settings["double"]:
        mxnet_precision.use_double_precision((*settings["paths"], str(script.parent)))
    recorder = Recorder()
    recorder.watch()
    place = folder / f"process{os.getpid()}"
    place.mkdir(parents=True)
    os.chdir(place)
    sys.argv = [str(script), *settings["arguments"]]
    try:
        mxnet_data.prepare(settings["data"])
        random.seed(0)
        np.random.seed(0)
        mx.random.seed(0)
        runpy.run_path(str(script), run_name="__main__")
        recorder.save(folder)
    except BaseException as error:
        report(error)
        raise
    report(None)


def _is_installed(name: str) -> bool:
    try:
        return importlib.util.find_spec(name) is not None
    except ModuleNotFoundError:
        return False


if __name__ == "__main__":
    main(Path(sys.argv[1]).resolve(), Path(sys.argv[2]).resolve(), json.loads(sys.argv[3]))
