"""Each kind of input: two workers draw the rows that one worker draws, each sample once."""

from __future__ import annotations

import gc
import itertools
import threading
import weakref
from collections import UserDict, namedtuple
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import Mock

import h5py
import keras
import numpy as np
import pandas as pd
import pytest
import scipy.sparse
import tensorflow as tf
from keras.src.legacy.preprocessing.image import ImageDataGenerator
from waits import HANG_SECONDS

from lbbsp_core import GlobalOrder
from lbbsp_core.runtime.exchange.protocol import DisagreementError
from lbbsp_tf.data.arrays import Arrays
from lbbsp_tf.data.dataset import Pipeline, PlaceholderDataset
from lbbsp_tf.data.feed import InputWait, TrainingInput, _of_training
from lbbsp_tf.data.items import Items
from lbbsp_tf.data.options import InputOptions
from lbbsp_tf.data.source import Fingerprints, SharedReads
from lbbsp_tf.data.stream import is_batched

X, SAMPLES = 8, 27
NUMBERS = np.arange(SAMPLES)
ROWS = np.repeat(NUMBERS[:, None], 3, 1)
LENGTHS = [[i + 1] * (1 + i % 3) for i in range(SAMPLES)]
MATRIX = np.diag(NUMBERS + 1.0)[:, :5] + np.eye(SAMPLES, 5, -9)
STEPS = 4


class StubSession:
    """A session with a fixed plan for two workers, seen by one of them; None sees whole batches."""

    workers = 1  # so that `dataset` returns the batches themselves
    collectives = None
    balancer = SimpleNamespace(constraints=SimpleNamespace(global_batch_size=X))

    def __init__(self, rank=None, step=0):
        self.rank, self.step, self.order = rank, step, None

    @property
    def leader(self):
        return self

    def make_order(self, num_samples, seed, work=None, **options):
        order = GlobalOrder(num_samples, X, seed=seed or 0, **options)
        order.work = work
        return order

    def use_order(self, order):
        self.order = order

    def step_of_order(self, step):
        return step

    def local_indices(self, step):
        index = self.order.indices(step)
        cut = len(index) * 5 // X
        return index if self.rank is None else (index[:cut], index[cut:])[self.rank]


def open_data(x, y=None, sample_weight=None, *, rank=None, step=0, **options):
    feed = TrainingInput(StubSession(rank, step), None)
    return feed.dataset(InputOptions(x, y, sample_weight, **options))


class MapStyle:
    """A data set as PyTorch's: an item is a sample."""

    def __init__(self, items, before_read=lambda: None):
        self.items, self.before_read = items, before_read

    def __len__(self):
        return len(self.items)

    def __getitem__(self, index):
        assert isinstance(index, int)
        self.before_read()
        return self.items[index]


class InGroups(MapStyle):
    """A data set as those of Hugging Face, which read several samples at once."""

    def __getitems__(self, indices):
        assert isinstance(indices, list)
        self.before_read()
        return [self.items[i] for i in indices]


class InBatches(keras.utils.PyDataset):
    """A data set of global batches."""

    def __init__(self, size=X, samples=SAMPLES):
        super().__init__()
        self.size, self.samples, self.epochs = size, samples, 0

    def __len__(self):
        return -(-self.samples // self.size)

    def __getitem__(self, index):
        x = NUMBERS[index * self.size : (index + 1) * self.size][: self.samples]
        return x[:, None] + 100 * self.epochs, x

    def on_epoch_end(self):
        self.epochs += 1


class InMappings(InBatches):
    """A data set of global batches, which are no dicts."""

    def __getitem__(self, index):
        return UserDict(zip("xy", super().__getitem__(index), strict=True))


def slices():
    return tf.data.Dataset.from_tensor_slices((ROWS, NUMBERS))


def with_mirrored(x, y):
    return tf.concat([x, -x], 0), tf.concat([y, y], 0)


def generated():
    spec = tf.TensorSpec([None], tf.int64), tf.TensorSpec([], tf.int64)
    return tf.data.Dataset.from_generator(lambda: zip(LENGTHS, NUMBERS, strict=True),
                                          output_signature=spec)  # fmt: skip


class Kind:
    """A data set in one form; `number` finds the sample's number in a sample."""

    def __init__(self, *data, number=lambda sample: sample[1], options=None):
        self.data, self.number, self.options = data, number, options or {}

    def open(self, **options):
        data = [each() if isinstance(each, type) else each for each in self.data]
        return open_data(*data, **self.options | options)


Pair = namedtuple("Pair", "a b")
TUPLES = [(ROWS[i], i) for i in range(SAMPLES)]
ARRAYS = UserDict(
    big_endian=ROWS.astype(">f4"),
    lists=NUMBERS.tolist(),
    strings=[f"é{i}" for i in NUMBERS],
    string_arrays=np.array([[f"{i}", "b"] for i in NUMBERS]),
    paths=[Path(f"/data/{i}.png") for i in NUMBERS],
    tensor=tf.constant(ROWS),
    ragged=tf.ragged.constant(LENGTHS),
    sparse=tf.sparse.from_dense(MATRIX),
    scipy=scipy.sparse.csr_matrix(MATRIX),
    nested=Pair([ROWS, ROWS * 2], dict(pd.DataFrame({"a": NUMBERS, "b": map(str, NUMBERS)}))),
)
LISTS = MapStyle([(LENGTHS[i], i) for i in range(SAMPLES)])
MAPPINGS = MapStyle([UserDict(x=[i, i], text=str(i), nested=[{"i": i}]) for i in range(SAMPLES)])
FRAME = pd.DataFrame({"a": NUMBERS, "b": 0.5}), pd.Series(NUMBERS + 1)
SHUFFLED = slices().shuffle(9, seed=3, reshuffle_each_iteration=False)
OF_ALL = {
    "ragged": tf.ragged.constant(LENGTHS),
    "sparse": tf.sparse.from_dense(MATRIX),
    "y": NUMBERS,
}
KINDS = {
    "numpy": Kind(ROWS, NUMBERS, NUMBERS * 0.5),
    "arrays": Kind(ARRAYS, {"a": (ROWS, ROWS), "b": NUMBERS}, number=lambda s: s[1]["b"]),
    "frame": Kind(*FRAME, number=lambda s: s[1][0] - 1),
    "items": Kind(MapStyle(TUPLES)),
    "items_of_mappings": Kind(MAPPINGS, number=lambda s: s["nested"][0]["i"]),
    "items_in_groups": Kind(InGroups(TUPLES)),
    "items_padded": Kind(LISTS, options={"padded": True}),
    "items_on_threads": Kind(
        InGroups(LISTS.items), options={"padded": False, "readers": 3}
    ),
    "py_dataset": Kind(InMappings, number=lambda s: s["y"]),
    "stream_in_batches": Kind(slices().batch(5).prefetch(2)),
    "stream_in_whole_batches": Kind(SHUFFLED.batch(X)),
    "stream_of_all": Kind(
        tf.data.Dataset.from_tensor_slices(OF_ALL).batch(6), number=lambda s: s["y"]
    ),
    "stream_of_padded_batches": Kind(
        generated().padded_batch(4), options={"num_samples": SAMPLES, "padded": True}
    ),
    "mapped_on_threads_and_in_batches": Kind(ROWS, NUMBERS, options={
        "map": lambda x, y: (x * 2, y), "batch_map": lambda x, y: (x + 1, y), "readers": 3}),
    "mapped_to_any_length": Kind(
        *[NUMBERS.tolist()] * 2, options={"map": lambda x, y: (tf.range(x), y), "padded": True}
    ),
    "mapped_stream": Kind(slices(), options={"map": lambda x, y: (tf.strings.as_string(x), y)}),
}  # fmt: skip


def samples(batch):
    """The samples of a batch as nested lists, without the zeros at their ends."""
    leaves = [list(map(_trimmed, _as_list(leaf))) for leaf in tf.nest.flatten(batch)]
    return [tf.nest.pack_sequence_as(batch, list(row)) for row in zip(*leaves, strict=True)]


def _as_list(leaf):
    if isinstance(leaf, tf.RaggedTensor):
        return leaf.to_list()
    dense = tf.sparse.to_dense(leaf) if isinstance(leaf, tf.SparseTensor) else leaf
    return dense.numpy().tolist()


def _trimmed(values):
    while isinstance(values, list) and values and not values[-1]:
        values.pop()
    return values


@pytest.mark.parametrize("name", KINDS)
def test_two_workers_draw_what_one_draws_and_each_sample_once(name):
    kind = KINDS[name]
    data = kind.open()
    whole = list(data)
    parts = [list(kind.open(rank=rank)) for rank in (0, 1)]
    assert [len(batches) for batches in (whole, *parts)] == [STEPS] * 3
    for batch, *of_ranks in zip(whole, *parts, strict=True):
        together = [sample for part in of_ranks for sample in samples(part)]
        assert together == samples(batch), "rank by rank"
        assert all(samples(part) for part in of_ranks)
    drawn = [int(kind.number(sample)) for batch in whole for sample in samples(batch)]
    assert sorted(drawn) == NUMBERS.tolist()
    leaves = tf.nest.flatten(data.element_spec)
    assert all(leaf.shape[0] is None for leaf in leaves), "one trace for all sizes"


@pytest.mark.parametrize("name", ["numpy", "items", "py_dataset"])
def test_random_access_is_shuffled_by_the_seed_in_each_epoch(name):
    kind = KINDS[name]
    epochs = {
        (seed, epoch): [samples(b) for b in kind.open(seed=seed, step=epoch * STEPS)]
        for seed in (1, 2)
        for epoch in (0, 1)
    }
    assert len({str(epoch) for epoch in epochs.values()}) == 4
    again = [samples(batch) for batch in kind.open(seed=1, step=STEPS)]
    assert again == epochs[1, 1]
    ordered = kind.open(shuffle=False, step=STEPS)
    numbers = [int(kind.number(sample)) for batch in ordered for sample in samples(batch)]
    assert numbers == NUMBERS.tolist()


def test_values_keep_their_types():
    weights = np.ones(SAMPLES, np.float64)
    x, y, w = next(iter(open_data(ROWS.astype("u1"), NUMBERS.astype("f2"), weights)))
    assert (x.dtype, y.dtype, w.dtype) == (tf.uint8, tf.float16, tf.float64)
    x, _ = next(iter(KINDS["arrays"].open(shuffle=False)))
    assert x["strings"][1].numpy().decode() == "é1"
    x, y = next(iter(KINDS["frame"].open(shuffle=False)))
    assert (x.shape, y.shape, x.dtype) == ((X, 2), (X, 1), tf.float64)


@pytest.mark.parametrize(
    ("records", "step"), [(slices(), 7), (slices().batch(X), 4), (slices().batch(5), 2)]
)
def test_a_stream_starts_at_the_running_step_of_its_pass(records, step):
    expected = [list(range(i, min(i + X, SAMPLES))) for i in range(0, SAMPLES, X)]
    batches = open_data(records, steps_per_epoch=6, step=step)
    drawn = [y.numpy().tolist() for _, y in batches]
    assert drawn == [expected[(step + k) % STEPS] for k in range(6)]


def epochs_of(feed, batches, epochs):
    """Labels of each batch of a fit."""
    feed.begin_alone()
    drawn = []
    for _ in range(epochs):
        for _, y in batches:
            drawn.append(y.numpy().tolist())
            feed._session.step += 1
    feed.end_fit()
    return drawn


RESHUFFLED = {
    "shuffle": lambda: slices().shuffle(SAMPLES, seed=5),
    "batch_shuffle": lambda: slices().batch(3).shuffle(9, seed=5),
    "cache_shuffle": lambda: slices().shuffle(27, seed=5).cache().shuffle(27, seed=6),
    "shuffle_repeat": lambda: slices().shuffle(27, seed=5).repeat(2).take(SAMPLES + 9),
    "same_order": lambda: slices().shuffle(27, seed=5, reshuffle_each_iteration=False),
    "zipped": lambda: tf.data.Dataset.zip(tuple(
        tf.data.Dataset.from_tensor_slices(each).shuffle(27, seed=5) for each in (ROWS, NUMBERS))),
}  # fmt: skip


def further(name):
    """Marks streams whose shuffles are one in another."""
    is_further = name in ("batch_shuffle", "cache_shuffle")
    return pytest.param(name, 2, marks=[pytest.mark.campaign] * is_further)


@pytest.mark.parametrize(("name", "prefetch"), [("shuffle", 0), *map(further, RESHUFFLED)])
def test_a_reshuffled_stream_has_the_order_of_epochs_in_one_process(name, prefetch):
    plain, whole = RESHUFFLED[name](), RESHUFFLED[name]()
    plain = (plain.unbatch() if "batch" in name else plain).batch(X)
    expected = [y.numpy().tolist() for _ in range(5) for _, y in plain]
    feed = TrainingInput(StubSession(), None)
    options = InputOptions(whole, prefetch=prefetch)
    batches = feed.dataset(options)
    assert feed.latest.first_samples(4)[1].numpy().tolist() == expected[0][:4]
    assert feed.latest.example[1].numpy().tolist() == expected[0][:1]
    drawn = epochs_of(feed, batches, 2) + epochs_of(feed, batches, 1)
    drawn += epochs_of(feed, feed.dataset(options), 2)
    assert drawn == expected


def test_stock_fit_has_the_same_orders_with_its_number_of_steps():
    """Without it, Keras opens each pass twice; see docs/input.md."""
    orders = {}
    for steps in (None, STEPS):
        seen = []

        class Model(keras.Model):
            def train_step(self, data, seen=seen):
                seen.append(data[1].numpy().tolist())
                return {"loss": 0.0}

        model = Model()
        model.compile(run_eagerly=True)
        stream = slices().shuffle(SAMPLES, seed=5).batch(X)
        model.fit(stream, epochs=4, steps_per_epoch=steps, verbose=0)
        orders[steps] = [seen[first : first + STEPS] for first in range(0, len(seen), STEPS)]
    feed = TrainingInput(StubSession(), None)
    whole = InputOptions(slices().shuffle(SAMPLES, seed=5))
    drawn = epochs_of(feed, feed.dataset(whole), 4)
    assert drawn == [*itertools.chain(*orders[STEPS])]
    assert orders[None][:2] == orders[STEPS][::2]


@pytest.mark.parametrize(("steps", "is_endless"), [(3, True), (5, False)])
def test_epochs_of_own_length_continue_the_pass_of_a_reshuffled_stream(steps, is_endless):
    def make():
        stream = slices().shuffle(SAMPLES, seed=5)
        return stream.repeat() if is_endless else stream

    passes = make().batch(X) if is_endless else make().batch(X).repeat()
    expected = [y.numpy().tolist() for _, y in passes.take(3 * steps)]
    feed = TrainingInput(StubSession(), None)
    batches = feed.dataset(InputOptions(make(), steps_per_epoch=steps))
    assert epochs_of(feed, batches, 3) == expected


def test_an_endless_stream_needs_only_the_steps_of_an_epoch():
    batches = open_data(slices().repeat().batch(3), steps_per_epoch=5, rank=1)
    assert [y.numpy().tolist() for _, y in batches][:4] == [
        [5, 6, 7], [13, 14, 15], [21, 22, 23], [2, 3, 4]]  # fmt: skip
    for options in ({}, {"num_samples": 27, "steps_per_epoch": 5}):
        with pytest.raises(ValueError, match=r"is endless: pass steps_per_epoch="):
            open_data(slices().repeat(), **options)


@pytest.mark.parametrize(
    ("records", "samples"),
    [
        (lambda: slices(), SAMPLES),
        (lambda: slices().batch(4, drop_remainder=True), 24),
        (lambda: slices().shuffle(5, seed=1).batch(4).map(lambda x, y: (x, y)).prefetch(1), 27),
        (lambda: slices().batch(9, drop_remainder=True).map(with_mirrored), 54),
        (lambda: tf.data.Dataset.zip(slices().batch(4), slices().batch(4)).map(
            lambda a, b: a), 27),
        (lambda: tf.data.Dataset.zip(slices().batch(4), slices().take(26).batch(4)), None),
        (lambda: slices().batch(2).unbatch().apply(
            tf.data.experimental.assert_cardinality(20)), 20),
        (lambda: slices().repeat(2).batch(4), 54),
        (lambda: slices().filter(lambda x, y: y > 3), None),
        (lambda: slices().batch(4).repeat(2), None),
    ],
)  # fmt: skip
def test_the_number_of_samples_is_found_or_asked_for(records, samples):
    if samples is None:
        with pytest.raises(ValueError, match=r"unknown: pass num_samples= to balancer\.dataset"):
            open_data(records())
        return
    assert len(open_data(records())) == -(-samples // X)


def test_single_scalars_that_are_said_to_be_batches_are_named():
    scalars = tf.data.Dataset.range(10).filter(lambda each: True)
    with pytest.raises(ValueError, match="scalar elements"):
        InputOptions(scalars, batched=True, num_samples=10).open(2)


def test_a_stream_that_is_collected_while_a_step_is_traced_adds_nothing_to_the_step():
    """The collector runs within the lock of the graph, for which an operation would wait."""
    streams = [InputOptions(tf.data.Dataset.range(8), batched=False).open(4)]

    @tf.function
    def step():
        streams.clear()
        gc.collect()

    assert not step.get_concrete_function().graph.get_operations()


def test_a_stream_with_more_samples_than_promised_says_so_in_its_first_pass():
    unknown = slices().filter(lambda x, y: True)
    for records, promised in (
        (unknown, 26), (unknown, 24), (unknown.batch(5), 20), (unknown.batch(X), 24), (slices(), 20)
    ):  # fmt: skip
        batches = open_data(records, num_samples=promised)
        with pytest.raises(tf.errors.OpError, match=f"has more than {promised} samples: pass"):
            list(batches)
    assert len(list(open_data(unknown.take(24), num_samples=24))) == 3


def test_a_function_that_adds_samples_to_batches_is_noticed():
    with pytest.raises(tf.errors.OpError, match=r"has more than 27 samples: pass the right num_sa"):
        list(open_data(slices().batch(9).map(with_mirrored)))
    assert len(list(open_data(slices().batch(9).map(with_mirrored), num_samples=54))) == 7


@pytest.mark.parametrize(
    ("records", "count", "step"),
    [
        (slices().filter(lambda x, y: y > 9), 17, 0),
        (slices().take(16).filter(lambda x, y: True), 16, 0),  # ends with a whole batch
        (slices().take(16).filter(lambda x, y: True), 16, 2),
    ],
)
def test_a_stream_with_fewer_samples_than_promised_says_so(records, count, step):
    batches = open_data(records, num_samples=27, step=step)
    with pytest.raises(tf.errors.OpError, match=rf"after {count} of 27 samples: pass the right"):
        list(batches)


def test_a_cache_is_filled_in_the_first_pass(tmp_path):
    read = []

    def spy(x, y):
        tf.numpy_function(lambda y: read.append(int(y)), [y], [])
        return x, y

    for cache in ("", str(tmp_path / "cache")):
        read.clear()
        records = slices().take(24).map(spy).cache(cache)
        assert len(list(open_data(records, steps_per_epoch=9))) == 9
        assert read == NUMBERS[:24].tolist()


def batched(count=2):
    return [slices().take(9).batch(3) for _ in range(count)]


@pytest.mark.parametrize(
    ("records", "expected"),
    [
        (lambda: tf.data.Dataset.sample_from_datasets([slices(), slices()], seed=1), False),
        (lambda: tf.data.Dataset.sample_from_datasets(batched(), seed=1), True),
        (lambda: tf.data.Dataset.choose_from_datasets(batched(), tf.data.Dataset.range(2)), True),
        (lambda: tf.data.Dataset.zip(*batched()).map(lambda a, b: a), True),
        (lambda: batched()[0].concatenate(batched()[1]), True),
        (lambda: slices().map(lambda x, y: x).group_by_window(
            lambda x: x[0] % 2, lambda key, window: window.batch(4), window_size=4), None),
        (lambda: slices().map(lambda x, y: x).bucket_by_sequence_length(
            lambda x: 1, [2], [4, 4]), None),
        (lambda: slices().map(lambda x, y: x).window(3).flat_map(lambda x: x.batch(3)), None),
        (lambda: slices().batch(3).map(lambda x, y: (x, tf.reduce_sum(y))), None),
        (lambda: slices().batch(3).unbatch(), False),
    ],
)  # fmt: skip
def test_combined_data_sets_tell_whether_they_are_batched_or_are_asked(records, expected):
    if expected is None:
        with pytest.raises(ValueError, match="pass batched=False or batched=True"):
            is_batched(records())
        return
    assert is_batched(records()) is expected


def test_elements_of_unclear_kind_need_a_word():
    spec = tf.TensorSpec([None], tf.int64), tf.TensorSpec([None], tf.int64)
    unclear = tf.data.Dataset.from_generator(
        lambda: ((row, row) for row in LENGTHS), output_signature=spec
    )
    with pytest.raises(ValueError, match="pass batched=False or batched=True"):
        open_data(unclear, num_samples=9)
    as_samples = open_data(unclear, num_samples=SAMPLES, batched=False, padded=True)
    assert next(iter(as_samples))[0].shape == (X, 3)
    as_batches = open_data(unclear, num_samples=53, batched=True)
    assert next(iter(as_batches))[0].shape == (X,)


def test_memory_maps_and_hdf5_are_read_by_batch(tmp_path):
    stored = np.lib.format.open_memmap(tmp_path / "x.npy", "w+", "f4", (SAMPLES, 3))
    stored[:] = ROWS
    with h5py.File(tmp_path / "x.h5", "w") as file:
        file["x"] = ROWS
        file["text"] = [f"t{i}" for i in NUMBERS]
        expected = [samples(batch) for batch in open_data(ROWS.astype("f4"), NUMBERS, seed=1)]
        mapped = open_data(np.load(tmp_path / "x.npy", mmap_mode="r"), NUMBERS, seed=1)
        assert [samples(batch) for batch in mapped] == expected
        for shuffle in (True, False):
            hdf5 = open_data({"x": file["x"], "t": file["text"]}, NUMBERS, shuffle=shuffle)
            for x, y in hdf5:
                np.testing.assert_array_equal(x["x"][:, 0], y)
                assert [int(text.numpy()[1:]) for text in x["t"]] == y.numpy().tolist()


def test_readers_are_threads():
    for kind in (MapStyle, InGroups):
        threads, meeting = set(), threading.Barrier(2, timeout=HANG_SECONDS)
        lock = threading.Lock()

        def meet(threads=threads, meeting=meeting, lock=lock):
            with lock:
                before = len(threads)
                threads.add(threading.get_ident())
                is_new = len(threads) > before
            if is_new and before < 2:
                meeting.wait()

        list(open_data(kind(TUPLES, meet), readers=3))
    barrier = threading.Barrier(3, timeout=HANG_SECONDS)
    together = lambda x, y: (tf.numpy_function(lambda x: (barrier.wait(), x)[1], [x], tf.int64), y)  # noqa: E731
    assert len(open_data(NUMBERS[:24], NUMBERS[:24], map=together, readers=3)) == 3
    batches = iter(open_data(NUMBERS[:24], NUMBERS[:24], map=together, readers=3, rank=1))
    assert len(next(batches)[1]) == 3, "three samples were mapped at the same time"
    barrier.abort()  # the end of the iterator waits for the readers of later samples


def test_results_of_different_length_are_refused_padded_or_ragged():
    to_range = lambda x: tf.range(x % 3)  # noqa: E731
    with pytest.raises(tf.errors.InvalidArgumentError, match="pass padded=True to"):
        list(open_data(NUMBERS, map=to_range))
    padded = next(iter(open_data(NUMBERS, map=to_range, shuffle=False, padded=True)))
    assert padded[:3].numpy().tolist() == [[0, 0], [0, 0], [0, 1]]
    ragged = next(iter(open_data(NUMBERS, map=to_range, shuffle=False, padded=False)))
    assert ragged[:3].to_list() == [[], [0], [0, 1]]
    equal = lambda x: tf.range(x - x + 2)  # noqa: E731
    assert next(iter(open_data(NUMBERS, map=equal))).shape == (X, 2)
    with pytest.raises(tf.errors.InvalidArgumentError, match="pass padded=True to"):
        list(open_data(MapStyle(LENGTHS)))
    rarely = MapStyle([[1, 2]] * 20 + [[1, 2, 3]] + [[1, 2]] * 6)
    with pytest.raises(tf.errors.OpError, match=r"sample 20 has shape \(3,\), others have \(2,\)"):
        list(open_data(rarely))
    assert [batch.shape[1] for batch in open_data(rarely, padded=True, shuffle=False)][2:] == [3, 2]


def test_the_functions_see_what_keras_passes():
    def of_sample(x, y, w):
        return x + 1, y, w

    def of_batch(x, y, w):
        return tf.reduce_sum(x, 1, keepdims=True), y, w

    weights = NUMBERS * 0.5
    for x, y, w in open_data(ROWS, NUMBERS, weights, map=of_sample, batch_map=of_batch):
        np.testing.assert_array_equal(x[:, 0], 3 * y + 3)
        np.testing.assert_array_equal(w, y.numpy() * 0.5)
    assert next(iter(open_data(MapStyle(TUPLES), map=lambda x, y: x))).shape == (X, 3)


@pytest.mark.parametrize("padded", [None, True])
def test_several_inputs_without_targets_stay_one_argument(padded):
    def of_inputs(inputs):
        a, b = inputs
        return ((2 * a, tf.range(b % 3 if padded else 2)),)

    streams = tf.data.Dataset.from_tensor_slices(((ROWS, NUMBERS),))
    lengths = tf.TensorSpec([None], tf.int64), tf.TensorSpec([], tf.int64)
    varying = tf.data.Dataset.from_generator(
        lambda: (((row, i),) for row, i in zip(LENGTHS, NUMBERS, strict=True)),
        output_signature=(lengths,),
    )
    data = (ROWS, NUMBERS) if padded else streams
    batch = next(iter(open_data(data, map=of_inputs, shuffle=None, padded=padded)))
    assert isinstance(batch, tuple)
    ((a, b),) = batch
    assert a.shape == (X, 3)
    assert b.shape == (X, 2)
    if not padded:
        return
    of_sum = lambda inputs: tf.reduce_sum(inputs[0]) + inputs[1]  # noqa: E731
    sums = next(iter(open_data(varying, num_samples=SAMPLES, padded=True, map=of_sum)))
    assert sums.numpy().tolist() == [sum(LENGTHS[i]) + i for i in range(X)]


def test_elements_without_values_are_read():
    nothing = tf.data.Dataset.from_tensor_slices((np.zeros([SAMPLES, 0]), NUMBERS))
    cut = slices().map(lambda x, y: (x[y + 5 :], y))
    items = type("Empty", (InBatches,), {"__getitem__": lambda self, i: (
        np.zeros([min(X, SAMPLES - X * i), 0]), np.ones(min(X, SAMPLES - X * i)))})()  # fmt: skip
    for data in (nothing.batch(4).map(lambda x, y: x), cut, items):
        batches = [tf.nest.flatten(batch)[0] for batch in open_data(data, padded=True)]
        assert [batch.shape for batch in batches] == [(8, 0)] * 3 + [(3, 0)]


class Noting(InBatches):
    """A data set that notes what is called."""

    calls = ()

    def __getitem__(self, index):
        self.calls += (index,)
        return super().__getitem__(index)

    def on_epoch_begin(self):
        self.calls += ("begin",)

    def on_epoch_end(self):
        self.calls += ("end",)

    def take_hooks(self):
        hooks, self.calls = self.calls[self.calls.index("end") :], ()
        return hooks


@pytest.fixture(scope="module")
def hooks_of_keras():
    """What Keras calls in the second of two epochs, and at the end, by fit."""
    plain, model = Noting(), keras.Sequential([keras.layers.Input((1,)), keras.layers.Dense(1)])
    model.compile("sgd", "mse", run_eagerly=True)
    fits = [model.fit(plain, epochs=2, shuffle=False, verbose=0) and plain.take_hooks()
            for _ in range(2)]  # fmt: skip
    assert [fit.count("end") for fit in fits] == [3, 3]
    return fits


@pytest.mark.parametrize(("prefetch", "is_new"), [(0, True), (2, True), (2, False)])
def test_the_hooks_of_a_py_dataset_are_called_as_in_a_fit_of_keras(
    hooks_of_keras, prefetch, is_new
):
    items, feed = Noting(), TrainingInput(StubSession(), None)
    options = InputOptions(items, shuffle=False, prefetch=prefetch)
    for fit, expected in enumerate(hooks_of_keras):
        if not fit or is_new:
            batches = feed.dataset(options)
        epochs_of(feed, batches, 2)
        assert items.take_hooks() == expected


def test_a_fit_closes_the_source_that_it_has_drawn_from():
    feed, drawn, created_by_a_callback = (
        TrainingInput(StubSession(), None),
        InBatches(),
        InBatches(),
    )
    feed.dataset(InputOptions(drawn))
    feed.begin_alone()
    feed.dataset(InputOptions(created_by_a_callback))
    feed.end_fit()
    assert (drawn.epochs, created_by_a_callback.epochs) == (1, 0)


def test_changing_items_cannot_be_read_again_after_a_later_pass():
    batches = open_data(InBatches(samples=24), steps_per_epoch=4)
    assert len(list(batches)) == 4
    with pytest.raises(tf.errors.OpError, match=r"pass 0 over InBatches continues.*prefetch=0"):
        list(batches)
    hook = {"on_epoch_end": keras.utils.PyDataset.on_epoch_end}
    unchanged = type("Unchanged", (InBatches,), hook)
    batches = open_data(unchanged(samples=24), steps_per_epoch=4)
    assert [len(list(batches)) for _ in range(2)] == [4, 4]


@pytest.mark.parametrize("changes", [True, False])
def test_samples_that_rarely_change_are_not_compared(changes, monkeypatch):
    class Rare(MapStyle):
        reads = 0

        def __getitem__(self, index):
            self.reads += index == 40  # not one of those that are read twice
            return np.full(3, index + changes * self.reads, "f4")

    feed = TrainingInput(StubSession(None, 0), None)
    disagrees = DisagreementError("workers disagree on samples")
    compares = Mock(side_effect=disagrees)
    monkeypatch.setattr("lbbsp_tf.data.feed.check_samples", compares)
    feed._session.any_worker = bool
    feed.latest = SimpleNamespace(source=Items(Rare(range(64))))
    feed.begin_alone()
    with nullcontext() if changes else pytest.raises(DisagreementError):
        feed.compare_samples()
    compares.assert_called_once()


@pytest.mark.parametrize("make", [lambda: ROWS, slices])
def test_a_dropped_data_set_is_gone_at_once(make):
    gc.disable()  # it would wait for the threads of iterators while it holds the GIL
    try:
        feed = TrainingInput(StubSession(), None)
        list(feed.dataset(InputOptions(make())))
        gone = weakref.ref(feed.latest), weakref.ref(feed.latest.source)
        del feed
        assert [each() for each in gone] == [None, None]
    finally:
        gc.enable()


@pytest.mark.parametrize(
    "data",
    [
        InBatches(samples=24),
        slices().take(24).shuffle(24, seed=3),
        slices().take(24).shuffle(24, seed=3).batch(5).prefetch(2),
    ],
    ids=["py_dataset", "stream", "stream_in_batches"],
)
def test_replicas_of_a_process_share_each_read(data):
    source = InputOptions(data).open(X)
    sessions = StubSession(0), StubSession(1)
    order = sessions[0].make_order(
        24, seed=0, shuffle=not source.is_sequential, by_batch=True, steps_per_epoch=6
    )
    pipelines = Pipeline(sessions[0], order, source, InputOptions()).of_replicas(sessions)
    ahead, behind = (iter(pipeline.batches) for pipeline in pipelines)
    drawn = {step: [] for step in range(6)}
    for replica, steps in ((ahead, range(4)), (behind, range(6)), (ahead, range(4, 6))):
        for step in steps:
            drawn[step].append(next(replica))
    for first in (0, 3):
        batches = [batch for step in range(first, first + 3) for batch in drawn[step]]
        numbers = [int(number) for _, y in batches for number in y]
        assert sorted(numbers) == NUMBERS[:24].tolist()
        if isinstance(data, InBatches):
            assert {int(row[0]) // 100 for x, _ in batches for row in x} == {1 + first // 3}


def test_an_error_of_a_shared_read_reaches_all_replicas():
    reads = SharedReads(2)
    with pytest.raises(ZeroDivisionError):
        reads.get(0, lambda: 1 // 0)
    with pytest.raises(ZeroDivisionError):
        reads.get(0, lambda: 1)
    assert reads.get(0, lambda: 1) == 1, "all replicas have had the error"


def labels(odd, number=20):
    """Samples of which one has an odd label."""
    return MapStyle([(ROWS[i], odd if i == number else i) for i in range(SAMPLES)])


class OddBatch(InBatches):
    """A data set of which one batch has another data type."""

    def __getitem__(self, index):
        x, y = super().__getitem__(index)
        return x, y + 0.5 if index == 1 else y


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (labels(0.5), "sample 20 has another data type than sample 0: let __getitem__"),
        (labels(None), "sample 20 of MapStyle cannot be read: .*got None: fill it in"),
        (labels((1, 2)), "sample 20 of MapStyle cannot be read: "),
        (OddBatch(), "item 1 of OddBatch has another data type than item 0: convert"),
    ],
)
def test_values_of_another_kind_are_named_with_the_remedy(data, message):
    with pytest.raises(tf.errors.OpError, match=message):
        list(open_data(data))


def test_an_array_that_changes_is_named_with_the_remedy():
    texts = np.array([str(i) for i in NUMBERS], dtype=object)
    batches = open_data({"text": texts}, NUMBERS)
    texts[20] = 1.5
    with pytest.raises(tf.errors.OpError, match=r"x\['text'\] cannot be read as string at samples"):
        list(batches)


@pytest.mark.parametrize(
    "x",
    [
        np.array([[b"a"], [b"b"]] * 4),
        pd.DataFrame({"x": ["a", "b"] * 4}),
    ],
    ids=["bytes", "frame"],
)
def test_keras_takes_validation_data_of_strings(x):
    tail, y = Arrays(x, np.arange(8), None, 0.25).validation_data
    lookup = keras.layers.StringLookup(vocabulary=["a", "b"])
    model = keras.Sequential([keras.layers.Input((1,), dtype="string"), lookup])
    assert model.predict(tail, verbose=0).tolist() == [[1], [2]]
    assert y.tolist() == [6, 7]


@pytest.mark.parametrize(("split", "kept"), [(0.0, 27), (0.2, 21)])
def test_work_is_that_of_the_samples_to_train_on(split, kept):
    source = Arrays(ROWS, NUMBERS, None, split)
    assert list(_of_training(NUMBERS + 1, source)) == list(range(1, kept + 1))
    assert len(_of_training(NUMBERS[:5], source)) == 5, "refused with the others of a wrong length"
    assert _of_training(None, source) is None
    assert len(_of_training(NUMBERS, Items(MapStyle(TUPLES)))) == 27


LOADER = type("DataLoader", (), {"__module__": "torch.utils.data.dataloader"})()


@pytest.mark.parametrize(
    ("arguments", "options", "message"),
    [
        (((i for i in range(9)),), {}, r"must not be a generator.*from_generator\(function"),
        ((LOADER,), {}, r"pass its data set, loader\.dataset, and readers="),
        ((object(),), {}, r"x must be arrays, a tf\.data\.Dataset.*got object"),
        ((np.float32(3),), {}, "pass one array per input"),
        (([[1, 2], [3]],), {}, r"list of lists: pass np\.asarray\(x\), or tf\.ragged\.constant"),
        ((slices().window(3),), {}, r"must be tensors, got .*call flat_map\(\.\.\.\) after window"),
        (([ROWS, ROWS[:3]],), {}, r"shapes \[\(27, 3\), \(3, 3\)\].*tf\.ragged\.constant"),
        ((np.array([[1], [1, 2]], object),), {}, r"got values of the type object.*tf\.ragged"),
        ((np.array(["2020-01-01"], "M8[D]"),), {}, "got values of the type datetime64"),
        ((ROWS, NUMBERS[:5]), {}, r"same number of samples, got shapes \[\(27, 3\), \(5,\)\]"),
        ((MapStyle(TUPLES), NUMBERS), {}, r"y and sample_weight must be None if x is a MapStyle"),
        ((MapStyle([]),), {}, "MapStyle has no samples"),
        ((labels(0.5, number=26),), {}, "sample 26 has another data type than sample 0"),
        ((pd.DataFrame({"a": pd.array([1, None], "Int64")}),), {}, r"x\['a'\] has missing values"),
        ((ROWS[:2], pd.Series(["a", None])), {}, r"y\[0\] has missing values: fill them in"),
        ((np.array(["a", None]),), {}, r"x has missing values: fill them in first"),
        (
            (ImageDataGenerator().flow(np.ones((27, 4, 4, 1)), NUMBERS, 5),),
            {},
            "item 0 of NumpyArrayIterator must be a global batch of 8 samples, got .5.",
        ),
        ((slices(), NUMBERS), {}, r"y must not be given for a tf\.data\.Dataset: let its elements"),
        ((slices(),), {"shuffle": True}, r"shuffle must not be given.*shuffle\(buffer_size, seed"),
        ((slices(),), {"seed": 3}, r"seed must not be given for a tf\.data\.Dataset"),
        ((slices(),), {"validation_split": 0.2}, r"split it with take\(\) and skip\(\)"),
        ((slices(),), {"work": NUMBERS + 1}, r"work must not be given.*samples have no numbers"),
        ((MapStyle(TUPLES),), {"validation_split": 0.2}, "validation_split needs arrays"),
        ((ROWS,), {"validation_split": 1.0}, r"validation_split must be in \[0, 1\), got 1\.0"),
        ((ROWS,), {"num_samples": 5}, r"options for a tf\.data\.Dataset only"),
        ((ROWS,), {"readers": 0}, "readers must be an integer >= 1, got 0"),
        ((ROWS,), {"readers": True}, "readers must be an integer >= 1, got True"),
        ((ROWS,), {"prefetch": -1}, "prefetch must be an integer >= 0, got -1"),
        ((ROWS,), {"prefetch": False}, "prefetch must be an integer >= 0, got False"),
        ((ROWS,), {"shuffle": "no"}, "shuffle must be True or False, got 'no'"),
        ((ROWS,), {"padded": 1}, "padded must be True or False, got 1"),
    ],
)
def test_what_cannot_be_read_is_refused_with_the_remedy(arguments, options, message):
    with pytest.raises((TypeError, ValueError), match=message):
        open_data(*arguments, **options)


@pytest.mark.parametrize(
    ("waited", "warns"), [([0.0, 0.9, 1.0, 1.1], True), ([0.0, 0.9, 0.9, 0.9], False)]
)
def test_long_waits_are_named_once(waited, warns, caplog):
    wait = InputWait()
    for total, busy in zip(waited, [0.0, 0.0, 0.3, 0.6], strict=True):
        wait.add(total, busy)  # the second step is excluded
    wait.warn(3, InputOptions(prefetch=0))
    wait.warn(3, InputOptions(prefetch=0))
    found = [record.message for record in caplog.records]
    assert len(found) == warns
    if warns:
        assert "worker 3 waits for input in 33 % of its busy time (100.0 of 300.0 ms" in found[0]


def test_fingerprints_forget_what_was_read_ahead():
    ahead, behind = Fingerprints(), Fingerprints()
    for records, last in ((ahead, 5), (behind, 3)):
        for step in range(last):
            records.add(step, b"%d" % step)
        records.forget_from(3)
        records.add(3, b"reshuffled")
        records.add(3, b"read by another replica")
    assert ahead.at(3) == behind.at(3) != 0
    assert ahead.at(2) == behind.at(2) != ahead.at(3)


def test_placeholders_have_no_thread_that_can_hold_up_the_end_of_a_fit():
    session, source = StubSession(), Arrays(np.zeros((24, 2)), np.zeros(24))
    pipeline = Pipeline(session, session.make_order(24, seed=0), source, InputOptions())
    strategy = tf.distribute.MirroredStrategy(["CPU:0"])
    placeholders = PlaceholderDataset(pipeline, strategy, Mock(), Mock())
    assert isinstance(iter(placeholders), itertools.repeat)
    assert [leaf.shape for leaf in next(iter(placeholders))] == [(1, 2), (1,)]
