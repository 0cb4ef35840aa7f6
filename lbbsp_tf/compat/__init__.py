"""All patches of Keras: idempotent, applied only where Keras needs them, each with its reason."""

from lbbsp_tf.compat.asynchronous import atomic_iterations, without_metrics
from lbbsp_tf.compat.evaluation import (
    last_rows,
    patch_evaluation,
    set_last_rows,
)
from lbbsp_tf.compat.fitting import patch_keras
from lbbsp_tf.compat.outputs import write_once_per_job
from lbbsp_tf.compat.values import Nest, local, replaced

__all__ = [
    "Nest",
    "atomic_iterations",
    "last_rows",
    "local",
    "patch_evaluation",
    "patch_keras",
    "replaced",
    "set_last_rows",
    "without_metrics",
    "write_once_per_job",
]
