"""Environment variables with which training fails or is not what it seems."""

from __future__ import annotations

import json
import os
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path

from lbbsp_core.doctor.finding import Finding, note, ok, problem
from lbbsp_core.runtime.options.env import AUTO_JIT_REMEDY, auto_jit
from lbbsp_core.validate import shortened


def check_settings(
    environment: Mapping[str, str], frameworks: Collection[str] = ()
) -> list[Finding]:
    """Checks the environment variables of Keras, of XLA and of lbbsp."""
    found = [] if set(frameworks) == {"mxnet"} else [*_keras(environment), *_xla(environment)]
    found += _run_dir(environment)
    return found or [ok("environment variables", "none of them disturbs")]


def _keras(environment: Mapping[str, str]) -> Iterator[Finding]:
    if environment.get("TF_USE_LEGACY_KERAS", "") in ("1", "true", "True"):
        text = "makes tf.keras that of Keras 2, whose models lbbsp_tf does not know"
        remedy = "unset TF_USE_LEGACY_KERAS, and use models of Keras 3 (import keras)"
        yield problem("TF_USE_LEGACY_KERAS", text, remedy)
    # Keras ignores an empty variable, and then reads its file.
    given = environment.get("KERAS_BACKEND")
    check, backend = ("KERAS_BACKEND", given) if given else _keras_file(environment)
    if backend != "tensorflow":
        text = f"says {shortened(backend)}, but lbbsp_tf trains with tensorflow"
        yield problem(check, text, "export KERAS_BACKEND=tensorflow")


def _keras_file(environment: Mapping[str, str]) -> tuple[str, object]:
    """Returns the path of Keras's file of settings, and the backend that it names."""
    folder = environment.get("KERAS_HOME") or "~/.keras"
    file = Path(folder).expanduser() / "keras.json"
    try:
        values = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError):  # Keras ignores such a file, too
        values = {}
    return str(file), values.get("backend", "tensorflow") if isinstance(values, dict) else values


def _xla(environment: Mapping[str, str]) -> Iterator[Finding]:
    if flag := auto_jit(environment.get("TF_XLA_FLAGS", "")):
        text = f"has {flag}: on GPUs, XLA compiles the step anew for each new batch size"
        yield note("TF_XLA_FLAGS", text, AUTO_JIT_REMEDY)


def _run_dir(environment: Mapping[str, str]) -> Iterator[Finding]:
    folder = environment.get("LBBSP_RUN_DIR", "")
    if not folder:
        return
    path = Path(folder).absolute()
    existing = next(each for each in (path, *path.parents) if each.exists())
    if not existing.is_dir() or not os.access(existing, os.W_OK | os.X_OK):
        text = (
            f"the run record cannot be written to {folder}: this user may not write to {existing}"
        )
        yield problem("LBBSP_RUN_DIR", text, "name another folder, or change its rights")
