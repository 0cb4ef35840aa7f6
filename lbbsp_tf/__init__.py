"""LB-BSP for Keras: one callback balances `model.fit` over unequal workers.

Importing this package checks ``TF_CONFIG``, because TensorFlow's own strategy raises an unrelated
error or hangs if it is wrong. In a worker of several, a script that fails anywhere after the
import ends at once.
"""

from lbbsp_tf.cluster import check_tf_config
from lbbsp_tf.imports import import_keras
from lbbsp_tf.reliability.liveness import watch_from_import

check_tf_config()
watch_from_import()
import_keras()

from lbbsp_tf import compat  # noqa: E402
from lbbsp_tf.callback import LoadBalancer  # noqa: E402
from lbbsp_tf.step.batchnorm import synchronize_batch_norm  # noqa: E402

compat.compare_variables()

__all__ = ["LoadBalancer", "check_tf_config", "synchronize_batch_norm"]
