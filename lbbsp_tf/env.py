"""Environment variables that this package reads, one function each."""

from __future__ import annotations

import os


def tf_config() -> str:
    """Returns ``TF_CONFIG``, the cluster and this process's task as JSON; empty if it is unset."""
    return os.environ.get("TF_CONFIG", "").strip()


def shows_all_progress() -> bool:
    """Returns whether ``LBBSP_PROGRESS`` is "all": all workers print Keras' lines of progress."""
    return os.environ.get("LBBSP_PROGRESS") == "all"


def in_slurm_step() -> bool:
    """Returns whether this process is a task of ``srun``, which sets ``SLURM_STEP_NUM_TASKS``."""
    return "SLURM_STEP_NUM_TASKS" in os.environ


def slurm_node() -> str:
    """Returns ``SLURMD_NODENAME``, the node on which Slurm runs this task; empty if it is unset."""
    return os.environ.get("SLURMD_NODENAME", "")


def xla_flags() -> str:
    """Returns ``TF_XLA_FLAGS``; empty if it is unset."""
    return os.environ.get("TF_XLA_FLAGS", "")


def uses_legacy_keras() -> bool:
    """Returns whether ``TF_USE_LEGACY_KERAS`` makes `tf.keras` Keras 2, as TensorFlow reads it."""
    return os.environ.get("TF_USE_LEGACY_KERAS") in ("true", "True", "1")
