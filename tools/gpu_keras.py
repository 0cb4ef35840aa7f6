"""Checks of Keras with lbbsp, for `tools/gpu_checks.py`.

Two workers share the GPU, and exchange gradients by TensorFlow's ring instead of NCCL, which
refuses two workers on a GPU. A worker that must compute undisturbed has a partner that waits first.
On a CPU, two logical CPUs stand for two devices of a process.
"""

from __future__ import annotations

import functools
import itertools
import json
import os
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import numpy as np
from gpu_table import Check, Given, print_profile, print_row

from lbbsp_core.testing import ChangingPlans


class Scale(NamedTuple):
    """Sizes of the checks; batches are in samples."""

    image: int  # height and width
    width: int  # channels of the first convolutions
    features: int  # of a token
    tokens: int  # of a sequence
    even: int  # batch of a worker with even shares
    new: tuple[int, ...]  # other batches, for their first uses
    steps: tuple[int, int]  # with even shares, and balanced
    blocks: int  # of fits that are compared
    short: tuple[int, ...]  # channels of nets with short steps


FULL = Scale(128, 32, 256, 64, 128, (*range(32, 128, 12), *range(132, 224, 12)), (25, 250), 7,
             (32, 192))  # fmt: skip
QUICK = Scale(16, 4, 16, 4, 16, (12, 20), (5, 25), 1, (4,))


def ring(bytes_per_pack: int = 0) -> Any:
    """Returns the strategy of a worker that shares its GPU with others."""
    import tensorflow as tf

    options = tf.distribute.experimental.CommunicationOptions(
        bytes_per_pack, None, tf.distribute.experimental.CommunicationImplementation.RING
    )
    return tf.distribute.MultiWorkerMirroredStrategy(communication_options=options)


def halves(memory_megabytes: int) -> Any:
    """Returns a strategy with two logical devices of this process."""
    import tensorflow as tf

    kind = "GPU" if tf.config.list_physical_devices("GPU") else "CPU"
    options = {"memory_limit": memory_megabytes} if kind == "GPU" else {}
    device = tf.config.list_physical_devices(kind)[0]
    half = tf.config.LogicalDeviceConfiguration(**options)
    tf.config.set_logical_device_configuration(device, [half, half])
    cross = tf.distribute.ReductionToOneDevice()
    return tf.distribute.MirroredStrategy([f"{kind}:0", f"{kind}:1"], cross_device_ops=cross)


def convnet(scale: Scale) -> Any:
    """Returns a residual net of 21 convolutions for images of integers."""
    import keras

    layers = keras.layers
    inputs = layers.Input((scale.image, scale.image, 3), dtype="uint8")
    x = layers.Rescaling(1 / 128, -1)(inputs)
    x = layers.Conv2D(scale.width, 3, 2, "same", activation="relu")(x)
    for stage in range(4):
        channels = scale.width * 2**stage
        x = layers.Conv2D(channels, 3, min(stage, 1) + 1, "same", activation="relu")(x)
        for _ in range(2):
            y = layers.Conv2D(channels, 3, padding="same", activation="relu")(x)
            x = layers.Add()([x, layers.Conv2D(channels, 3, padding="same")(y)])
    outputs = layers.Dense(10, dtype="float32")(layers.GlobalAveragePooling2D()(x))
    return keras.Model(inputs, outputs)


def transformer(scale: Scale) -> Any:
    """Returns an encoder of four layers for sequences of words."""
    import keras

    layers = keras.layers
    inputs = layers.Input((scale.tokens,), dtype="int32")
    x = layers.Embedding(1000, scale.features)(inputs)
    for _ in range(4):
        attended = layers.MultiHeadAttention(4, scale.features // 4)(x, x)
        x = layers.LayerNormalization()(layers.Add()([x, attended]))
        hidden = layers.Dense(scale.features)(layers.Dense(4 * scale.features, "gelu")(x))
        x = layers.LayerNormalization()(layers.Add()([x, hidden]))
    outputs = layers.Dense(10, dtype="float32")(layers.GlobalAveragePooling1D()(x))
    return keras.Model(inputs, outputs)


def scale_of(given: Given) -> Scale:
    """Returns the sizes of the checks."""
    return QUICK if given.quick else FULL


NETS = {"convnet": convnet, "transformer": transformer}


def compiled(
    net: str, scale: Scale, *, jit: bool = False, rest: Callable[[int, int], float] | None = None
) -> Any:
    """Returns a net that is ready to train, with seeded weights.

    Args:
        net: Name of the net.
        scale: Sizes.
        jit: Whether XLA compiles the step.
        rest: Seconds for which a step waits before it computes, by replica of the process and
            samples.
    """
    import keras
    import tensorflow as tf

    class Resting(keras.Model):
        def train_step(self, data: Any) -> Any:
            inputs, labels = data
            context = tf.distribute.get_replica_context()
            local = tf.get_static_value(context.replica_id_in_sync_group) if context else 0

            def sleep(x: np.ndarray) -> np.ndarray:
                time.sleep(rest(local or 0, len(x)))
                return x

            late = tf.numpy_function(sleep, [inputs], inputs.dtype)
            return super().train_step((tf.ensure_shape(late, inputs.shape), labels))

    keras.utils.set_random_seed(0)
    model = NETS[net](scale)
    if rest:
        model = Resting(model.inputs, model.outputs)
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(keras.optimizers.SGD(0.01, momentum=0.9), loss, jit_compile=jit)
    return model


def samples(net: str, scale: Scale, count: int) -> tuple[np.ndarray, np.ndarray]:
    """Returns seeded inputs and labels."""
    random = np.random.default_rng(0)
    shape, top, kind = {
        "convnet": ((scale.image, scale.image, 3), 256, "uint8"),
        "transformer": ((scale.tokens,), 1000, "int32"),
    }[net]
    return random.integers(top, size=(count, *shape)).astype(kind), random.integers(10, size=count)


def trained_alone(model: Any, data: tuple[np.ndarray, np.ndarray], sizes: list[int]) -> list[float]:
    """Trains on batches of these sizes in this process; returns the seconds of each step.

    A step ends when the device has finished everything: the last update is read.
    """
    import keras
    import tensorflow as tf

    x, y = map(tf.constant, data)
    seconds: list[float] = []

    class Clock(keras.callbacks.Callback):
        def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
            self.start = time.perf_counter()

        def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
            self.model.trainable_variables[-1].numpy()
            seconds.append(time.perf_counter() - self.start)

    def of_size(size: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
        return x[:size], y[:size]

    batches = tf.data.Dataset.from_tensor_slices(np.array(sizes)).map(of_size)
    model.fit(batches.prefetch(2), callbacks=[Clock()], verbose=0)
    return seconds


def versions(given: Given) -> None:
    """Prints what was measured on."""
    import keras
    import tensorflow as tf

    gpus = tf.config.list_physical_devices("GPU")
    names = [tf.config.experimental.get_device_details(g).get("device_name", g.name) for g in gpus]
    build = tf.sysconfig.get_build_info()
    print_row("versions", "TensorFlow, Keras", f"{tf.__version__}, {keras.__version__}")
    print_row("versions", "built for CUDA", str(build.get("cuda_version", "none")))
    print_row("versions", "GPUs", ", ".join(names) or "none")


# Exactness: two workers with uneven, changing batches, against one process with whole batches


def small(normalised: bool = False) -> Any:
    """Returns a small convolutional net."""
    import keras

    layers = keras.layers
    keras.utils.set_random_seed(1)
    norm = [layers.BatchNormalization(synchronized=True)] if normalised else []
    model = keras.Sequential(
        [layers.Input((12, 12, 3)), layers.Conv2D(16, 3), *norm, layers.ReLU(),
         layers.Conv2D(32, 3, activation="relu"), layers.GlobalAveragePooling2D(),
         layers.Dense(64, "tanh"), layers.Dense(1, dtype="float32")]
    )  # fmt: skip
    model.compile(keras.optimizers.SGD(0.05, momentum=0.9, global_clipnorm=0.5), "mse")
    return model


TOTAL, EPOCHS, STEPS = 64, 2, 6
PLANS = ((48, 16), (40, 24), (7, 57))


def noise() -> tuple[np.ndarray, np.ndarray]:
    """Returns samples for the small net; the last batch of an epoch is short."""
    random = np.random.default_rng(0)
    count = (STEPS - 1) * TOTAL + 21
    return random.normal(size=(count, 12, 12, 3)).astype("f4"), random.normal(size=(count, 1))


def uneven(
    strategy: Any, *callbacks: Any, normalised: bool = False, prefetch: int = 0, **options: Any
) -> Any:
    """Trains the small net on changing plans; returns the balancer and the weights."""
    import lbbsp_tf

    balancer = lbbsp_tf.LoadBalancer(strategy, TOTAL, policy=ChangingPlans(PLANS), **options)
    with strategy.scope():
        model = small(normalised)
    feed = balancer.dataset(*noise(), seed=0, prefetch=prefetch)
    model.fit(feed, steps_per_epoch=STEPS, epochs=EPOCHS, callbacks=[balancer, *callbacks],
              verbose=0)  # fmt: skip
    return balancer, model.get_weights()


def whole(normalised: bool = False) -> Any:
    """Trains the small net on whole batches in this process; returns its first and last weights."""
    model, (x, y) = small(normalised), noise()
    start = model.get_weights()
    for epoch in range(EPOCHS):
        order = np.random.default_rng((0, epoch)).permutation(len(x))
        model.fit(x[order], y[order], batch_size=TOTAL, shuffle=False, verbose=0)
    return start, model.get_weights()


def print_difference(check: str, figure: str, found: Any, start: Any, other: Any) -> None:
    """Prints the largest difference of weights, relative to the farthest that one has moved."""
    far, apart = (
        max(float(np.abs(a - b).max()) for a, b in zip(weights, other, strict=True))
        for weights in (start, found)
    )
    print_row(check, figure, apart / far, "of the way")


def check_exact(given: Given) -> None:
    """Compares the weights of two workers on uneven batches with those of one process."""
    import keras
    import tensorflow as tf

    strategy = ring()

    def compare(name: str, normalised: bool = False, **options: Any) -> None:
        balancer, found = uneven(strategy, normalised=normalised, **options)
        if balancer.rank == 0:
            start, reference = whole(normalised)
            print_difference("exact", name, found, start, reference)

    tf.config.experimental.enable_tensor_float_32_execution(False)
    compare("float32")
    compare("float32, prefetch", prefetch=1)
    compare("float32, half of each step shared", share_work=0.5)
    compare("float32, synchronised batch normalisation", normalised=True)
    tf.config.experimental.enable_tensor_float_32_execution(True)
    compare("TF32")
    for kind in ("mixed_float16", "mixed_bfloat16"):
        keras.mixed_precision.set_global_policy(kind)
        compare(kind)
    if strategy.cluster_resolver.task_id == 0:
        start, first = whole()
        print_difference("exact", f"{kind}, one process twice", whole()[1], start, first)


def check_exact_buckets(given: Given) -> None:
    """Compares the weights if gradients travel in buckets of a few kilobytes."""
    import tensorflow as tf

    tf.config.experimental.enable_tensor_float_32_execution(False)
    balancer, found = uneven(ring(bytes_per_pack=4096), record=given.record("buckets"))
    if balancer.rank == 0:
        start, reference = whole()
        print_difference("exact-buckets", "float32, buckets of 4 KiB", found, start, reference)
        print_hidden("exact-buckets", "float32, buckets of 4 KiB", given.record("buckets"))


def check_exact_mirrored(given: Given) -> None:
    """Compares the weights of two logical devices of this process with those of one."""
    import tensorflow as tf

    tf.config.experimental.enable_tensor_float_32_execution(False)
    strategy = halves(8000)
    for name, normalised in (("float32", False), ("float32, synchronised normalisation", True)):
        _, found = uneven(strategy, normalised=normalised)
        start, reference = whole(normalised)
        print_difference("exact-mirrored", name, found, start, reference)


def check_restart(given: Given) -> None:
    """Kills worker 1 in the second epoch; compares the weights with those of one process."""
    import keras
    import tensorflow as tf

    tf.config.experimental.enable_tensor_float_32_execution(False)
    restarted = os.environ["LBBSP_RESTART"] != "0"
    strategy = ring()
    rank = strategy.cluster_resolver.task_id

    class Dies(keras.callbacks.Callback):
        count = 0

        def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
            self.count += 1
            if self.count == STEPS + 2 and rank and not restarted:
                os._exit(1)

    folder = given.out / "checkpoint"
    steps = Dies()
    _, found = uneven(strategy, steps, checkpoint=folder, every=2)
    if rank == 0 and restarted:
        start, reference = whole()
        print_row("restart", "steps after the restart", steps.count)
        print_difference("restart", "float32", found, start, reference)


# Times


def print_hidden(check: str, figure: str, record: Path) -> None:
    """Prints in how many steps gradients were sent while others were computed, and how long."""
    from lbbsp_core import read_run

    hidden = [step.hidden_seconds for step in read_run(record).steps]
    print_row(check, f"{figure}: steps that hide", f"{sum(map(bool, hidden))} of {len(hidden)}")
    print_row(check, f"{figure}: hidden, median", 1e3 * median(hidden), "ms")


def check_sharing(given: Given) -> None:
    """Compares steps with and without work sharing if worker 1 rests at random."""
    import lbbsp_tf

    scale = scale_of(given)
    strategy = ring()
    rank = strategy.cluster_resolver.task_id
    net, size, steps = "convnet", scale.even, 4 * scale.steps[0]
    data = samples(net, scale, 2 * size)
    usual = median(trained_alone(compiled(net, scale), data, [size] * 12)[6:])
    for name, share in (("alone", False), ("auto", "auto"), ("half", 0.5)):
        random = np.random.default_rng(0)

        def rest(_: int, count: int, random: Any = random) -> float:
            return rank * 4 * usual * count / size * float(random.random() < 0.3)

        record = given.record(name)
        balancer = lbbsp_tf.LoadBalancer(
            strategy, 2 * size, record=record, share_work=share, granularity=size // 4
        )
        with strategy.scope():
            model = compiled(net, scale, rest=rest)
        model.fit(balancer.dataset(*data, steps_per_epoch=steps), steps_per_epoch=steps,
                  callbacks=[balancer], verbose=0)  # fmt: skip
        if rank == 0:
            from lbbsp_core import read_run

            late = read_run(record).steps[steps // 2 :]
            mean = float(np.mean([s.wall_seconds for s in late]))
            print_row("sharing", f"{name}: step in the second half, mean", 1e3 * mean, "ms")
            print_row("sharing", f"{name}: plans", sorted({s.sizes for s in late})[:4], "samples")
            print_hidden("sharing", name, record)


def check_busy_time(given: Given) -> None:
    """Compares busy seconds with those of the same batches in one process."""
    import lbbsp_tf

    scale = scale_of(given)
    strategy = ring()
    size, steps = scale.even, scale.steps[0] * 2
    rank = strategy.cluster_resolver.task_id
    with tempfile.TemporaryDirectory() as folder:
        for net in NETS:
            x, y = samples(net, scale, 2 * size)
            alone = trained_alone(compiled(net, scale), (x, y), [size] * steps) if not rank else []
            total = size + 1

            record = Path(folder, f"{net}.jsonl")
            policy = ChangingPlans(((size, 1),))
            balancer = lbbsp_tf.LoadBalancer(strategy, total, policy=policy, record=record)
            with strategy.scope():
                model = compiled(net, scale, rest=(lambda *_: 0.1) if rank else None)
            repeated = np.resize(np.arange(len(x)), steps * total)
            feed = balancer.dataset(x[repeated], y[repeated], prefetch=1)
            model.fit(feed, steps_per_epoch=steps, callbacks=[balancer], verbose=0)
            if rank == 0:
                from lbbsp_core import read_run

                busy = [s.busy_seconds[0] for s in read_run(record).steps][steps // 2 :]
                usual = median(alone[steps // 2 :])
                print_row("busy-time", f"{net}: step alone with {size}", 1e3 * usual, "ms")
                print_row("busy-time", f"{net}: busy time", 1e3 * median(busy), "ms")
                print_row("busy-time", f"{net}: ratio", median(busy) / usual)


def check_first_uses(given: Given, jit: bool = False, kind: str = "float32") -> None:
    """Prints how much longer the first step with a size takes than the next five."""
    import keras

    scale = scale_of(given)
    keras.mixed_precision.set_global_policy(kind)
    tuned = "off" if os.environ.get("TF_CUDNN_USE_AUTOTUNE") == "0" else "on"
    for net in NETS:
        name = f"{net}, {kind}, autotuning {tuned}{', jit_compile' * jit}"
        new = scale.new[:: 4 if jit else 1]
        sizes = [n for size in (scale.even, *new) for n in 6 * [size]]
        data = samples(net, scale, max(sizes))
        seconds = trained_alone(compiled(net, scale, jit=jit), data, sizes)
        uses = [(seconds[i], median(seconds[i + 1 : i + 6])) for i in range(0, len(seconds), 6)]
        extra = [1e3 * (first - usual) for first, usual in uses[1:]]
        print_row("first-uses", f"{name}: very first step", 1e3 * seconds[0], "ms")
        print_row("first-uses", f"{name}: extra time, median of {len(extra)}", median(extra), "ms")
        print_row("first-uses", f"{name}: extra time, largest", max(extra), "ms")
        print_row("first-uses", f"{name}: step with {scale.even}", 1e3 * uses[0][1], "ms")


def check_balance(given: Given) -> None:
    """Compares even with balanced batches if worker 1 rests twice as long as it computes."""
    import lbbsp_core
    import lbbsp_tf

    scale = scale_of(given)
    strategy = ring()
    rank = strategy.cluster_resolver.task_id
    tuned = "off" if os.environ.get("TF_CUDNN_USE_AUTOTUNE") == "0" else "on"
    net, size = "convnet", scale.even
    data = samples(net, scale, 2 * size)
    usual = median(trained_alone(compiled(net, scale), data, [size] * 12)[6:])
    per_sample = rank * 2 * usual / size

    for name, steps in zip(("even", "balanced"), scale.steps, strict=True):
        record = given.record(f"{name}_{tuned}")
        options = {"policy": lbbsp_core.Even()} if name == "even" else {}
        balancer = lbbsp_tf.LoadBalancer(strategy, 2 * size, record=record, **options)
        with strategy.scope():
            model = compiled(net, scale, rest=lambda _, size: per_sample * size)
        x, y = data
        model.fit(balancer.dataset(x, y, steps_per_epoch=steps), steps_per_epoch=steps,
                  callbacks=[balancer], verbose=0)  # fmt: skip
        if rank == 0:
            from lbbsp_core import read_run

            found = read_run(record).steps
            late = found[min(20, steps // 2) :]
            plans = [s.sizes for s in found]
            changes = [i for i, (a, b) in enumerate(itertools.pairwise(plans), 1) if a != b]
            label = f"{name}, autotuning {tuned}"
            print_hidden("balance", label, record)
            print_row("balance", f"{label}: last plan", plans[-1], "samples")
            print_row("balance", f"{label}: step after step 20, mean",
                      1e3 * float(np.mean([s.wall_seconds for s in late])), "ms")  # fmt: skip
            print_row("balance", f"{label}: step after step 20, median",
                      1e3 * median(s.wall_seconds for s in late), "ms")  # fmt: skip
            print_row("balance", f"{label}: busy, last 20",
                      [round(1e3 * median(s.busy_seconds[r] for s in found[-20:]), 1)
                       for r in (0, 1)], "ms")  # fmt: skip
            print_row(
                "balance",
                f"{label}: changes",
                f"{len(changes)}: {[(i, plans[i]) for i in changes][:12]}",
            )


def check_own_time(given: Given) -> None:
    """Compares stock Keras with lbbsp in short steps, in interleaved blocks."""
    import tensorflow as tf
    from keras_blocks import Side, step_seconds
    from networks import SAMPLES, convolutional, data

    scale = scale_of(given)
    import lbbsp_core
    import lbbsp_tf

    strategy = ring()
    for total, channels in itertools.product((64, 384) if scale is FULL else (64,), scale.short):
        even = lbbsp_tf.LoadBalancer(strategy, total, policy=lbbsp_core.Even())
        default = lbbsp_tf.LoadBalancer(strategy, total)
        x, y = data()
        order = lbbsp_core.GlobalOrder(SAMPLES, total)
        constants = tf.constant(x), tf.constant(y)

        def slices(order: Any = order, rank: int = even.rank, half: int = total // 2) -> Any:
            for step in range(10**9):
                yield order.slice(step, rank, (half, half))

        def stock(context: Any, slices: Any = slices, constants: Any = constants) -> Any:
            spec = tf.TensorSpec([None], tf.int64)
            indices = tf.data.Dataset.from_generator(slices, output_signature=spec)
            batches = indices.map(lambda i: tuple(tf.gather(c, i) for c in constants))
            endless = tf.data.experimental.assert_cardinality(tf.data.INFINITE_CARDINALITY)
            return batches.apply(endless).prefetch(1)

        def side(data: Any, *callbacks: Any) -> Any:
            return Side(convolutional(strategy, channels), data, callbacks)  # noqa: B023

        sides = {
            "stock": side(strategy.distribute_datasets_from_function(stock)),
            "bsp": side(even.dataset(x, y), even),
            "default": side(default.dataset(x, y), default),
        }
        epoch = even.steps_per_epoch
        steps = -(-(48 if scale is FULL else 6) // epoch) * epoch
        times = step_seconds(sides, scale.blocks, steps=steps, steps_per_epoch=epoch)
        if even.rank == 0:
            for name, found in times.items():
                label = f"{channels} channels, X = {total}, {name}"
                print_row("own-time", label, 1e3 * median(found), "ms")
            for name in ("bsp", "default"):
                ratio = median(b / a for a, b in zip(times["stock"], times[name], strict=True))
                print_row("own-time", f"{channels} channels, X = {total}: {name} / stock", ratio)


# Memory and devices


def check_memory(given: Given) -> None:
    """Prints the memory in use by NVML as the batch grows."""
    from lbbsp_core import ResourceSampler
    from lbbsp_core.resources.gpu import count_gpus

    scale = scale_of(given)

    def used() -> float:
        with ResourceSampler(["gpu_memory_percent"]) as sampler:
            return float(sampler.sample()[0])

    if not count_gpus():
        print_row("memory", "not available", "there is no GPU")
        return
    print_row("memory", "before", used(), "%")
    model = compiled("convnet", scale)
    for size in (scale.even, 2 * scale.even, 4 * scale.even, 8 * scale.even, scale.even):
        trained_alone(model, samples("convnet", scale, size), [size] * 3)
        print_row("memory", f"after steps with {size}", used(), "%")


def check_memory_bound(given: Given) -> None:
    """Trains beside memory that is taken, while worker 1 rests, so that worker 0 should get more.

    The bound is for a GPU of its own; here both workers fill the same one.
    """
    import tensorflow as tf

    scale = scale_of(given)
    import lbbsp_tf
    from lbbsp_core import read_run

    strategy = ring()
    rank = strategy.cluster_resolver.task_id
    if tf.config.list_physical_devices("GPU") and rank:
        with tf.device("/GPU:0"):
            taken = [tf.zeros(2**30, tf.uint8) for _ in range(100)]
        print_row("memory-bound", "taken by worker 1", len(taken), "GiB")
    steps, record = 2 * scale.steps[0], given.record("bound")
    data = samples("convnet", scale, 8 * scale.even)
    balancer = lbbsp_tf.LoadBalancer(strategy, 8 * scale.even, record=record)
    with strategy.scope():
        model = compiled("convnet", scale, rest=lambda _, size: 0.001 * rank * size)
    model.fit(balancer.dataset(*data, steps_per_epoch=steps), steps_per_epoch=steps,
              callbacks=[balancer], verbose=0)  # fmt: skip
    if rank == 0:
        found = read_run(record).steps
        used = [line.drivers.get("gpu_memory_percent", (None,))[0] for line in found]
        print_row("memory-bound", "memory in use, first and last", (used[0], used[-1]), "%")
        plans = [step.sizes for step in found]
        changes = [i for i, (a, b) in enumerate(itertools.pairwise(plans), 1) if a != b]
        print_row("memory-bound", "plans", [plans[0], *(plans[i] for i in changes)][:12])


def profiled_step(batch: int) -> None:
    """Trains a step of the convolutional net, in the process of lbbsp's profiler."""
    scale = QUICK if "--quick" in sys.argv else FULL
    profiled_net(scale).train_on_batch(*samples("convnet", scale, batch))


@functools.cache
def profiled_net(scale: Scale) -> Any:
    """Returns the net of a profiled step."""
    return compiled("convnet", scale)


def check_profile(given: Given) -> None:
    """Profiles a step of Keras, as ``lbbsp profile`` does."""
    from lbbsp_core.profiler import BatchSweep, profile_step

    scale = scale_of(given)
    sweep = BatchSweep(max_batch=8 * scale.even, rounds=1)
    found = profile_step(
        f"{__file__}:{profiled_step.__name__}",
        sweep=sweep,
        timeout=120.0,
        arguments=["--quick"] * given.quick,
    )
    print_profile("profile", found)


def check_too_large(given: Given) -> None:
    """Trains with a batch that does not fit into the GPU of worker 1."""
    import tensorflow as tf

    scale = scale_of(given)
    import lbbsp_tf

    rank = json.loads(os.environ["TF_CONFIG"])["task"]["index"]
    gpus = tf.config.list_physical_devices("GPU")
    if gpus and rank:
        limit = tf.config.LogicalDeviceConfiguration(memory_limit=1024)
        tf.config.set_logical_device_configuration(gpus[0], [limit])
    strategy = ring()
    size = 1024 if scale is FULL else 16
    x, y = samples("convnet", scale, 2 * size)
    balancer = lbbsp_tf.LoadBalancer(strategy, 2 * size)
    with strategy.scope():
        model = compiled("convnet", scale)
    model.fit(balancer.dataset(x, y), steps_per_epoch=1, callbacks=[balancer], verbose=0)


def check_mirrored(given: Given) -> None:
    """Trains on two unequal logical devices of this process."""
    import lbbsp_tf

    scale = scale_of(given)
    strategy = halves(16000)
    size, steps = scale.even, scale.steps[0] * 3
    x, y = samples("convnet", scale, 2 * size)

    record = given.record("mirrored")
    balancer = lbbsp_tf.LoadBalancer(strategy, 2 * size, record=record)
    with strategy.scope():
        model = compiled("convnet", scale, rest=lambda local, size: 0.001 * local * size)
    model.fit(balancer.dataset(x, y, steps_per_epoch=steps), steps_per_epoch=steps,
              callbacks=[balancer], verbose=0)  # fmt: skip
    from lbbsp_core import read_run

    found = read_run(record).steps
    print_row("mirrored", "first and last plan", (found[0].sizes, found[-1].sizes), "samples")
    for name, part in (("second", found[1:2]), ("last", found[-10:])):
        print_row("mirrored", f"{name} steps", 1e3 * median(s.wall_seconds for s in part), "ms")
        busy = [round(1e3 * median(s.busy_seconds[r] for s in part), 1) for r in (0, 1)]
        print_row("mirrored", f"{name} steps, busy", busy, "ms")


OFF = {"TF_CUDNN_USE_AUTOTUNE": "0"}


def check(run: Callable[[Given], None], workers: int = 1, **processes: Any) -> Check:
    """Returns a check of Keras."""
    return Check(run, "tensorflow", workers, **processes)


CHECKS = {
    "versions": check(versions),
    "exact": check(check_exact, 2),
    "exact-buckets": check(check_exact_buckets, 2),
    "exact-mirrored": check(check_exact_mirrored),
    "restart": check(check_restart, 2, restarts=1),
    "busy-time": check(check_busy_time, 2),
    "first-uses-off": check(check_first_uses, env=OFF),
    "first-uses": check(check_first_uses),
    "balance": check(check_balance, 2),
    "balance-off": check(check_balance, 2, env=OFF),
    "own-time": check(check_own_time, 2),
    "sharing": check(check_sharing, 2),
    "memory": check(check_memory),
    "memory-bound": check(check_memory_bound, 2),
    "too-large": check(check_too_large, 2, fails=True),
    "mirrored": check(check_mirrored),
    "profile": check(check_profile),
    "first-uses-half": check(lambda given: check_first_uses(given, kind="mixed_float16")),
    "first-uses-jit": check(lambda given: check_first_uses(given, jit=True)),
}
"""By name; those that matter least are the last, so that a lack of time costs the others nothing.
"""
