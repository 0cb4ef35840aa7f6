"""Trains without each extension of the session: ``without_extensions.py FRAMEWORK FOLDER``."""

import sys
from pathlib import Path

from report import result
from tiny import TRAIN

from lbbsp_core import WorkerSession
from lbbsp_core.runtime.extensions.every import EXTENSIONS

train, folder = TRAIN[sys.argv[1]], Path(sys.argv[2])
for deleted in (None, *EXTENSIONS):
    name = deleted.__name__ if deleted else "none"
    left = tuple(kind for kind in EXTENSIONS if kind is not deleted)
    WorkerSession.__init__.__kwdefaults__["extensions"] = left
    trained = train(record=folder / name, metrics_file=folder / f"{name}.prom")
    result(name, trained.tolist())
