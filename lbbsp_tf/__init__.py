"""LB-BSP for Keras: one callback balances `model.fit` over unequal workers.

For comparison, `fit_asynchronously` trains by ASP, through parameter servers.

Importing this package checks ``TF_CONFIG``, because TensorFlow's own strategy raises an unrelated
error or hangs if it is wrong.
"""

from lbbsp_tf import compat
from lbbsp_tf.batchnorm import synchronize_batch_norm
from lbbsp_tf.callback import LoadBalancer
from lbbsp_tf.cluster import check_tf_config
from lbbsp_tf.parameter_server import fit_asynchronously, parameter_server_strategy

check_tf_config()
compat.compare_variables()

__all__ = [
    "LoadBalancer",
    "check_tf_config",
    "fit_asynchronously",
    "parameter_server_strategy",
    "synchronize_batch_norm",
]
