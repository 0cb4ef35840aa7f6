"""LB-BSP for MXNet: a KVStore and a gluon Trainer that balance unequal workers.

Import it before `mxnet`: the import restores a name that MXNet needs in NumPy, and checks the
``DMLC_*`` variables, because MXNet aborts or waits indefinitely if they are wrong. If these make
the process a server or the scheduler, it serves within the import, and exits when the job ends.
"""

from lbbsp_core.runtime.reliability import marks
from lbbsp_core.runtime.reliability.exit import fail_fast
from lbbsp_core.runtime.reliability.preemption import keep_forks
from lbbsp_mx import env
from lbbsp_mx.cluster import check_cluster, in_cluster
from lbbsp_mx.compat import import_mxnet

check_cluster()
env.enable_heartbeats()
import_mxnet()

if env.role() != "worker":
    from lbbsp_mx.server import serve

    serve()

if in_cluster():
    fail_fast()
    marks.begin()
    keep_forks()

from lbbsp_mx.asynchronous.async_trainer import AsyncTrainer  # noqa: E402
from lbbsp_mx.data.data_iter import PlannedIter  # noqa: E402
from lbbsp_mx.data.sampler import BatchSampler  # noqa: E402
from lbbsp_mx.estimator.estimator import LoadBalancingHandler  # noqa: E402
from lbbsp_mx.layers.batchnorm import SyncBatchNorm  # noqa: E402
from lbbsp_mx.module.kvstore import KVStore, register  # noqa: E402
from lbbsp_mx.trainer.trainer import Trainer  # noqa: E402

register()

__all__ = [
    "AsyncTrainer",
    "BatchSampler",
    "KVStore",
    "LoadBalancingHandler",
    "PlannedIter",
    "SyncBatchNorm",
    "Trainer",
    "check_cluster",
]
