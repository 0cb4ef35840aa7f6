"""Trains on handwritten digits under Slurm, whose variables a resolver of TensorFlow reads.

    srun --nodes 3 --ntasks-per-node 1 python keras_slurm.py

Only the strategy differs from examples/keras_digits_balanced.py. No TF_CONFIG is needed.
"""

import os
import subprocess
import sys

import keras
import tensorflow as tf
from sklearn.datasets import load_digits

import lbbsp_tf

if "SLURM_STEP_NODELIST" not in os.environ:
    sys.exit("this is no task of Slurm: start it with srun")
slurm = tf.distribute.cluster_resolver.SlurmClusterResolver(
    port_base=20000 + int(os.environ["SLURM_JOB_ID"]) % 750 * 16,  # jobs may share a node
    gpus_per_node=64,  # here, places for tasks; its own count fails on nodes without GPUs
    gpus_per_task=1,
    auto_set_gpu=False,  # Slurm has given each task its GPUs: --gpus-per-task
)
cluster = slurm.cluster_spec()
kind, rank = slurm.get_task_info()
hosts = [address.rpartition(":")[0] for address in cluster.job_tasks("worker")]
nodes = os.environ["SLURM_STEP_NODELIST"]
names = subprocess.check_output(["scontrol", "show", "hostnames", nodes], text=True).split()
if list(dict.fromkeys(hosts)) != names or hosts[rank] != os.environ["SLURMD_NODENAME"]:
    sys.exit(
        f"TensorFlow takes {', '.join(hosts)} for the hosts of tasks 0 to {len(hosts) - 1}, sorted "
        f"as text; Slurm's order is {', '.join(names)}, and task {rank} is on "
        f"{os.environ['SLURMD_NODENAME']}: use slurm.sbatch, which does not depend on names"
    )
gpus = {"GPU": len(tf.config.list_physical_devices("GPU"))}
resolver = tf.distribute.cluster_resolver.SimpleClusterResolver(
    cluster, task_type=kind, task_id=rank, num_accelerators=gpus, rpc_layer="grpc"
)
strategy = tf.distribute.MultiWorkerMirroredStrategy(cluster_resolver=resolver)
balancer = lbbsp_tf.LoadBalancer(strategy, global_batch_size=192)
images, labels = load_digits(return_X_y=True)
images = images.reshape(-1, 8, 8, 1).astype("float32") / 16

with strategy.scope():
    keras.utils.set_random_seed(0)
    model = keras.Sequential(
        [
            keras.layers.Input((8, 8, 1)),
            keras.layers.Conv2D(32, 3, activation="relu"),
            keras.layers.Flatten(),
            keras.layers.Dense(10, activation="softmax"),
        ]
    )
    optimizer = keras.optimizers.Adam(2e-3)
    model.compile(optimizer, "sparse_categorical_crossentropy", metrics=["accuracy"])

model.fit(
    balancer.dataset(images[:1536], labels[:1536], seed=0),
    steps_per_epoch=balancer.steps_per_epoch,
    callbacks=[balancer],
    epochs=8,
    validation_data=(images[1536:], labels[1536:]),
    verbose=2 if rank == 0 else 0,
)
