"""Trains on each kind of input by changing plans, then in one process on whole batches."""

import gc
import logging
import sys
import weakref
from pathlib import Path

import fits
import h5py
import keras
import numpy as np
import tensorflow as tf
from keras.src.legacy.preprocessing.image import ImageDataGenerator
from report import answer_all, largest_difference, result

import lbbsp_tf
from lbbsp_core import GlobalOrder
from lbbsp_core.testing import ChangingPlans
from lbbsp_tf.compat import replaced
from lbbsp_tf.data import feed

shared, *chosen = sys.argv[1:]
X, EPOCHS = 32, 2
SAMPLES = 4 * X + 11  # a short last batch
PLANS = {2: ((24, 8), (20, 12), (3, 29)), 3: ((20, 8, 4), (15, 16, 1), (1, 10, 21))}
rng = np.random.default_rng(0)
FEATURES = rng.normal(size=(SAMPLES, 6))
LABELS = rng.integers(0, 3, SAMPLES)
WORDS = [rng.integers(1, 20, 1 + i % 5).tolist() for i in range(SAMPLES)]
WORK = rng.lognormal(size=SAMPLES)
PADDED = keras.utils.pad_sequences(WORDS, padding="post")
strategy = tf.distribute.MultiWorkerMirroredStrategy()
workers, rank = strategy.num_replicas_in_sync, strategy.cluster_resolver.task_id


def dense():
    return keras.Sequential([keras.layers.Input((6,)), keras.layers.Dense(3)])


def embedding():
    words = keras.layers.Input((None,), dtype="int64")
    vectors = keras.layers.Embedding(20, 4, mask_zero=True)(words)
    pooled = keras.layers.GlobalAveragePooling1D()(vectors)
    return keras.Model(words, keras.layers.Dense(3)(pooled))


def compiled(build=dense):
    keras.utils.set_random_seed(1)
    model = build()
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(keras.optimizers.SGD(0.1, momentum=0.9), loss)
    return model


def balancer(**options):
    return lbbsp_tf.LoadBalancer(strategy, X, policy=ChangingPlans(PLANS[workers]), **options)


def fit(it, data, model=None, *callbacks, **options):
    with strategy.scope():
        model = model or compiled()
    fits.fit(it, model, data, *callbacks, **{"epochs": EPOCHS} | options)
    return model


# Kinds of input: what to pass to `dataset`, and the whole batches that one process trains on


def in_order(x=FEATURES, y=LABELS, steps=None, **options):
    """Whole batches of a `GlobalOrder`."""
    order = GlobalOrder(len(y), X, steps_per_epoch=steps, **options)
    return [
        (x[order.indices(k)], y[order.indices(k)]) for k in range(EPOCHS * order.steps_per_epoch)
    ]


def in_sequence(dataset):
    """Whole batches of a stream."""
    return [tuple(part.numpy() for part in b) for _ in range(EPOCHS) for b in dataset.batch(X)]


class Items:
    def __len__(self):
        return SAMPLES

    def __getitem__(self, index):
        return FEATURES[index], LABELS[index]


class Batches(keras.utils.PyDataset):
    def __len__(self):
        return -(-SAMPLES // X)

    def __getitem__(self, index):
        rows = slice(index * X, (index + 1) * X)
        return FEATURES[rows], LABELS[rows]


def slices():
    return tf.data.Dataset.from_tensor_slices((FEATURES, LABELS))


def hdf5():
    path = Path(shared) / f"{rank}.h5"
    with h5py.File(path, "w") as file:
        file["x"], file["y"] = FEATURES, LABELS
    file = h5py.File(path)
    return file["x"], file["y"]


def records():
    path = str(Path(shared) / f"{rank}.tfrecord")
    with tf.io.TFRecordWriter(path) as writer:
        for x, y in zip(FEATURES, LABELS, strict=True):
            features = {
                "x": tf.train.Feature(float_list=tf.train.FloatList(value=x)),
                "y": tf.train.Feature(int64_list=tf.train.Int64List(value=[y])),
            }
            example = tf.train.Example(features=tf.train.Features(feature=features))
            # Not deterministic otherwise: the files of the workers would differ.
            writer.write(example.SerializeToString(deterministic=True))
    return tf.data.TFRecordDataset(path)


def parse(record):
    spec = {"x": tf.io.FixedLenFeature([6], tf.float32), "y": tf.io.FixedLenFeature([], tf.int64)}
    example = tf.io.parse_single_example(record, spec)
    return example["x"], example["y"]


def shuffled():
    return slices().shuffle(50, seed=5)


def images(x, **options):
    return ImageDataGenerator().flow(x.reshape(-1, 2, 1, 3), LABELS, X, **options)


def of_images():
    """Whole batches of `images`, which draws its order from NumPy's global generator."""
    np.random.seed(1)  # as `compiled`
    data, batches = images(FEATURES), []
    data[0], data[len(data) - 1]  # read to find out their shapes; each sample draws numbers
    for _ in range(EPOCHS):
        data.on_epoch_end()
        batches += [(x.reshape(-1, 6), y) for x, y in (data[k] for k in range(len(data)))]
    return batches


def double(x, y):
    return 2.0 * x, y


def flat(x, y):
    return tf.reshape(x, [6]), y


KINDS = {
    "hdf5": lambda: (hdf5(), {}, in_order()),
    "items": lambda: ((Items(),), {"readers": 3, "prefetch": 2}, in_order()),
    "py_dataset": lambda: ((Batches(),), {}, in_order(by_batch=True)),
    "images": lambda: ((images(FEATURES),), {"shuffle": False, "map": flat}, of_images()),
    "tfrecords": lambda: ((records(),), {"map": parse, "num_samples": SAMPLES},
                          in_order(shuffle=False)),
    "shuffled_stream": lambda: ((shuffled(),), {}, in_sequence(shuffled())),
    "batched_stream": lambda: ((shuffled().batch(7).prefetch(3),), {"map": double, "readers": 2},
                               in_sequence(shuffled().map(double))),
    "in_order": lambda: ((FEATURES, LABELS), {"shuffle": False}, in_order(shuffle=False)),
    "own_steps": lambda: ((FEATURES, LABELS), {"steps_per_epoch": 8}, in_order(steps=8)),
    "validation_split": lambda: ((FEATURES, LABELS), {"validation_split": 0.2},
                                 in_order(FEATURES[:111], LABELS[:111])),
    "batch_map": lambda: ((FEATURES, LABELS), {"batch_map": double, "prefetch": 1},
                          in_order(2 * FEATURES)),
    "by_work": lambda: ((Items(),), {"work": WORK, "prefetch": 2}, in_order()),
    "padded": lambda: ((WORDS_AS_ITEMS,), {"padded": True}, in_order(PADDED)),
}  # fmt: skip
WORDS_AS_ITEMS = list(zip(map(np.array, WORDS), LABELS, strict=True))
WORDS_AS_ITEMS = type("Words", (), {
    "__len__": lambda self: SAMPLES,
    "__getitem__": lambda self, i, items=WORDS_AS_ITEMS: items[i],
})()  # fmt: skip


class Sizes(keras.callbacks.Callback):
    """Notes the batch sizes of each step."""

    def __init__(self, balancer):
        super().__init__()
        self.balancer, self.found = balancer, []

    def on_train_batch_begin(self, batch, logs=None):
        self.found.append(self.balancer.sizes)


def learn(name):
    """Compares the weights of a balanced fit with those of one process."""
    arguments, options, batches = KINDS[name]()
    build = embedding if name == "padded" else dense
    it = balancer(seed=0)
    with strategy.scope():
        model = compiled(build)
    start = [weights.copy() for weights in model.get_weights()]
    data = it.dataset(*arguments, **options)
    validation = {"validation_data": it.validation_data} if name == "validation_split" else {}
    sizes = Sizes(it)
    fit(it, data, model, sizes, **validation)
    lag = it._session.balancer.schedule.lag
    found = {"lag": lag, "steps": it._session.step, "sizes": sizes.found,
             "plans": PLANS[workers]}  # fmt: skip
    if rank == 0:
        reference = compiled(build)
        for batch in batches:
            reference.train_on_batch(*batch)
        found |= {
            "difference": largest_difference(model, reference),
            "moved": largest_difference(start, reference),
            "reference_steps": len(batches),
        }
    if validation:
        x, y = it.validation_data
        found["validation"] = [len(x), len(y), model.history.history["val_loss"][-1]]
    result(name, found)


# Misuse: each must raise alike on all workers, without a training step


class Steps(keras.callbacks.Callback):
    count = 0

    def on_train_batch_end(self, batch, logs=None):
        self.count += 1


def without_callback():
    it, steps = balancer(), Steps()
    data = it.dataset(FEATURES, LABELS)
    with strategy.scope():
        model = compiled()
    before = model.get_weights()
    try:
        model.fit(data, steps_per_epoch=it.steps_per_epoch, callbacks=[steps], verbose=0)
    finally:
        same = all(np.array_equal(*pair) for pair in zip(before, model.get_weights(), strict=True))
        fit(it, data, model, epochs=1)  # the data set can be used after the mistake
        result("after_the_mistake", [steps.count, same, it._session.step])


def outside_of_fit(use):
    it = balancer()
    with strategy.scope():
        model = compiled()
    use(model, it.dataset(FEATURES, LABELS))


def validation_of_itself():
    it = balancer()
    data = it.dataset(FEATURES, LABELS)
    fit(it, data, validation_data=data, validation_steps=1)


def other_arrays():
    it = balancer()
    data = it.dataset(FEATURES, LABELS)
    try:
        fit(it, data, None, Fails())
    except RuntimeError:
        fit(it, FEATURES, batch_size=16, y=LABELS)


class Fails(keras.callbacks.Callback):
    def on_train_begin(self, logs=None):
        raise RuntimeError("the disk is full")


def other_records():
    it, steps = balancer(), Steps()
    try:
        fit(it, it.dataset(slices().shuffle(50, seed=rank)), None, steps)
    finally:
        result("steps_with_other_records", steps.count)


def shards(*data, **options):
    it = balancer()
    fit(it, it.dataset(*data, **options))


def records_that_differ_late():
    it, steps = balancer(), Steps()
    changed = FEATURES.copy()
    changed[3 * X + 5] += rank
    stream = tf.data.Dataset.from_tensor_slices((changed, LABELS))
    try:
        fit(it, it.dataset(stream), None, steps)
    finally:
        result("steps_with_records_that_differ_late", steps.count)


def other_work(work):
    it = balancer()
    fit(it, it.dataset(FEATURES, LABELS, work=work))


MISUSES = {
    "other_work": lambda: other_work(np.roll(WORK, rank)),
    "work_on_one_worker": lambda: other_work(WORK if rank else None),
    "without_callback": without_callback,
    "evaluate": lambda: outside_of_fit(lambda model, data: model.evaluate(data, verbose=0)),
    "predict": lambda: outside_of_fit(lambda model, data: model.predict(data, verbose=0)),
    "validation_of_itself": validation_of_itself,
    "other_arrays": other_arrays,
    "other_records": other_records,
    "records_that_differ_late": records_that_differ_late,
    "shards": lambda: shards(slices().shard(workers, rank)),
    "shards_of_arrays": lambda: shards(FEATURES[rank::workers], LABELS[rank::workers]),
    "shards_in_batches": lambda: shards(slices().shard(workers, rank).batch(7)),
    "shards_of_one_length": lambda: shards(slices().take(138).shard(workers, rank)),
    "images_of_other_seeds": lambda: shards(images(FEATURES, seed=rank), map=flat),
}


# Properties of repeated fits


def repeated_fits():
    """Data sets of one structure share the trace of the step, and are released."""
    it, traces = balancer(), []

    class Traced(keras.layers.Layer):
        def call(self, x):
            traces.append(1)
            return x

    with strategy.scope():
        model = compiled(lambda: keras.Sequential([keras.layers.Input((6,)), Traced(),
                                                   keras.layers.Dense(3)]))  # fmt: skip
    alive, counts = [], []
    for _ in range(4):
        x = FEATURES.copy()
        alive.append(weakref.ref(x))
        fit(it, it.dataset(x, LABELS, prefetch=1), model, epochs=1)
        counts.append(len(traces))
    del x
    gc.collect()
    result("traces", counts)
    result("released", [ref() is None for ref in alive])


def slow_input():
    """Input that is waited for too long is named in one warning a fit."""
    said = []
    handler = logging.Handler()
    handler.emit = lambda record: said.append(record.getMessage())
    logging.getLogger("lbbsp.tf").addHandler(handler)
    it = balancer()
    with replaced(feed, "MAX_WAIT", 0.0), replaced(feed, "MIN_WAIT_SECONDS", 0.0):
        fit(it, it.dataset(FEATURES, LABELS, prefetch=1), epochs=3)
    result("slow", [text for text in said if "input" in text])
    logging.getLogger("lbbsp.tf").removeHandler(handler)


OTHERS = {"repeated_fits": repeated_fits, "slow_input": slow_input}
for name in chosen or [*KINDS, *MISUSES, *OTHERS]:
    if name in KINDS:
        learn(name)
    elif name in OTHERS:
        OTHERS[name]()
    else:
        answer_all({name: MISUSES[name]}, [name])
