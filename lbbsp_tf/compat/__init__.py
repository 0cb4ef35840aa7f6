"""All patches of Keras: idempotent, applied only where Keras needs them, each with its reason."""

from lbbsp_tf.compat.asynchronous import atomic_iterations, without_metrics
from lbbsp_tf.compat.batch_norm import synchronize_moments
from lbbsp_tf.compat.checkpoint import checkpoint_on_chief_only
from lbbsp_tf.compat.conditional_updates import allow_conditional_updates
from lbbsp_tf.compat.fitting import patch_keras
from lbbsp_tf.compat.values import Nest, local, replaced

__all__ = [
    "Nest",
    "allow_conditional_updates",
    "atomic_iterations",
    "checkpoint_on_chief_only",
    "local",
    "patch_keras",
    "replaced",
    "synchronize_moments",
    "without_metrics",
]
