"""Program that runs a worker or a parameter server for a chief: ``python -m lbbsp_tf.server``.

``TF_CONFIG`` selects the role. The process serves until it is killed, because TensorFlow does not
notify its servers of the end of the job; ``lbbsp launch`` kills them.
"""

from __future__ import annotations

import os
import sys

import tensorflow as tf


def main() -> int:
    """Serves until the process is killed; returns an exit status only if it cannot serve."""
    resolver = tf.distribute.cluster_resolver.TFConfigClusterResolver()
    if resolver.task_type not in ("worker", "ps"):
        print(
            f"TF_CONFIG must have the task type worker or ps, got {resolver.task_type!r}: "
            "the chief runs the training script",
            file=sys.stderr,
        )
        return 2
    cluster = resolver.cluster_spec()
    config = tf.compat.v1.ConfigProto()
    # An iteration blocks a thread of the server while it waits for its peer. With fewer threads
    # than workers, a parameter server may have none left to answer (TensorFlow's own advice).
    config.inter_op_parallelism_threads = max(
        cluster.num_tasks("worker") + 1, len(os.sched_getaffinity(0))
    )
    server = tf.distribute.Server(
        cluster, job_name=resolver.task_type, task_index=resolver.task_id, config=config
    )
    server.join()
    return 0


if __name__ == "__main__":
    sys.exit(main())
