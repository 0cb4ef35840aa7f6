"""Environment variables with which training fails or is not what it seems."""

from __future__ import annotations

import os
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path

from lbbsp_core.doctor.base import Finding, ok, problem


def check_settings(
    environment: Mapping[str, str], frameworks: Collection[str] = ()
) -> list[Finding]:
    """Checks the environment variables of Keras and of lbbsp.

    Args:
        environment: Environment variables.
        frameworks: Frameworks to check; variables of Keras do not matter for MXNet alone.
    """
    found = [] if set(frameworks) == {"mxnet"} else list(_keras(environment))
    found += _run_dir(environment)
    return found or [ok("environment variables", "none of them disturbs")]


def _keras(environment: Mapping[str, str]) -> Iterator[Finding]:
    if environment.get("TF_USE_LEGACY_KERAS", "") in ("1", "true", "True"):
        yield problem(
            "TF_USE_LEGACY_KERAS", "makes tf.keras that of Keras 2, whose models lbbsp_tf does not "
            "know", "unset TF_USE_LEGACY_KERAS, and use models of Keras 3 (import keras)",
        )  # fmt: skip
    backend = environment.get("KERAS_BACKEND") or "tensorflow"  # Keras ignores an empty value
    if backend != "tensorflow":
        yield problem(
            "KERAS_BACKEND", f"is {backend!r}, but lbbsp_tf trains with tensorflow",
            "unset KERAS_BACKEND, or export KERAS_BACKEND=tensorflow",
        )  # fmt: skip


def _run_dir(environment: Mapping[str, str]) -> Iterator[Finding]:
    folder = environment.get("LBBSP_RUN_DIR", "")
    if not folder:
        return
    existing = Path(folder).absolute()
    while not existing.exists() and existing != existing.parent:
        existing = existing.parent
    if not existing.is_dir() or not os.access(existing, os.W_OK | os.X_OK):
        yield problem(
            "LBBSP_RUN_DIR", f"the run record cannot be written to {folder}: {existing} is no "
            "folder that this user may write to", "name another folder, or change its rights",
        )  # fmt: skip
