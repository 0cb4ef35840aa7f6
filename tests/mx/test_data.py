"""Input in one process: samplers, data iterators, several loaders in a step, fixed rows."""

import struct
from itertools import chain

import mxnet as mx
import numpy as np
import pytest
from helpers import DATA, FEATURES, LABELS, SAMPLES, X, backward, network, weights
from mxnet import gluon

import lbbsp_mx
from lbbsp_core.policy import Even

LOADERS = [{}, {"num_workers": 2, "thread_pool": True}, {"num_workers": 1}]


def trainer_of(net, total=X, **options):
    return lbbsp_mx.Trainer(net.collect_params(), "adam", global_batch_size=total, **options)


def batches(sampler, trainer, net, epochs=1):
    """Trains, and returns the batches of each epoch."""
    found = []
    for _ in range(epochs):
        found.append([])
        for batch in sampler:
            found[-1].append(batch)
            backward(net, mx.nd.array(FEATURES[batch]), mx.nd.array(LABELS[batch]))
            trainer.step(len(batch))
    return found


def cut(indices, size=X):
    return [indices[i : i + size] for i in range(0, len(indices), size)]


# --- samplers -------------------------------------------------------------------------------------


def test_without_shuffle_the_order_of_the_data_set_is_kept():
    net = network()
    trainer = trainer_of(net)
    sampler = trainer.batch_sampler(DATA, shuffle=False)
    assert batches(sampler, trainer, net, 2) == 2 * [cut(list(range(SAMPLES)))]


def test_one_worker_draws_whole_batches_whatever_their_work_is():
    lengths = 1.0 + np.arange(SAMPLES)
    found = []
    for work in (None, lengths):
        net = network()
        trainer = trainer_of(net)
        found.append(batches(trainer.batch_sampler(DATA, seed=3, work=work), trainer, net, 2))
    assert found[0] == found[1]


@pytest.mark.parametrize("sampler", [None, range(SAMPLES)])
def test_wrong_work_is_refused_with_the_remedy(sampler):
    trainer = trainer_of(network())
    with pytest.raises(ValueError, match=r"work must have the shape .* pass the work of the whole"):
        trainer.batch_sampler(DATA, sampler=sampler, work=np.ones(SAMPLES - 1))
    with pytest.raises(ValueError, match=r"work must be finite, > 0.*got nan for sample 2"):
        trainer.batch_sampler(DATA, sampler=sampler, work=[1, 2, np.nan] + [1] * (SAMPLES - 3))


def test_a_sampler_gives_the_order_of_each_epoch():
    net = network()
    trainer = trainer_of(net)
    np.random.seed(3)
    given = gluon.data.RandomSampler(SAMPLES)
    sampler = trainer.batch_sampler(SAMPLES, sampler=given)
    found = batches(sampler, trainer, net, 3)
    assert len(sampler) == 4
    np.random.seed(3)
    assert found == [cut(list(given)) for _ in range(3)]


def test_batches_of_a_sampler_are_global_batches():
    """Bucketing: some batches are short, and none is mixed with another."""
    buckets = [list(range(0, 16)), list(range(16, 23)), list(range(23, 39)), [40, 39]]
    net = network()
    trainer = trainer_of(net)
    sampler = trainer.batch_sampler(DATA, sampler=buckets)
    assert batches(sampler, trainer, net, 2) == [buckets, buckets]


@pytest.mark.parametrize("every_step", [False, True])
def test_an_epoch_of_a_sampler_continues_after_a_restart(tmp_path, every_step):
    """Its order cannot be drawn again, so that the checkpoint holds it."""

    def start(seed):
        np.random.seed(seed)
        net = network()
        trainer = trainer_of(net)
        np.random.seed(seed)
        return net, trainer, trainer.batch_sampler(DATA, sampler=gluon.data.RandomSampler(SAMPLES))

    net, trainer, sampler = start(1)
    seen = []
    for step, batch in enumerate(sampler):
        seen += batch
        backward(net, mx.nd.array(FEATURES[batch]), mx.nd.array(LABELS[batch]))
        trainer.step(len(batch))
        if step == 1:
            trainer.save(tmp_path)
            break
    saved = weights(net)
    net, trainer, sampler = start(2)
    if every_step:  # an epoch of its own has been drawn before
        batches(sampler, trainer, net)
    assert trainer.load(tmp_path)
    np.testing.assert_equal(weights(net), saved)
    rest, following = batches(sampler, trainer, net, 2)
    assert sorted([*seen, *chain(*rest)]) == list(range(SAMPLES))
    assert sorted(chain(*following)) == list(range(SAMPLES))


def test_a_later_epoch_of_a_sampler_follows_a_restart(tmp_path):
    for resumed in (False, True):
        net = network()
        trainer = trainer_of(net)
        given = gluon.data.RandomSampler(SAMPLES)
        if resumed:  # before there is an order
            assert trainer.load(tmp_path)
        sampler = trainer.batch_sampler(DATA, sampler=given)
        assert trainer.epoch == 3 * resumed
        for epoch in batches(sampler, trainer, net, 3):
            assert sorted(chain(*epoch)) == list(range(SAMPLES))
        trainer.save(tmp_path)


class Endless:
    def __len__(self):
        return SAMPLES

    def __iter__(self):
        while True:
            yield 0


def rollover(samples):
    return gluon.data.BatchSampler(gluon.data.RandomSampler(samples), X, "rollover")


def test_batches_that_leave_no_rest_may_roll_over():
    sampler = trainer_of(network()).batch_sampler(SAMPLES, sampler=rollover(2 * X))
    assert [sorted(chain(*sampler)) for _ in range(2)] == [[*range(2 * X)]] * 2


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"sampler": iter(range(50))}, TypeError, "must have a length"),
        ({"sampler": Endless()}, ValueError, "as many items as its length 50, got more"),
        ({"sampler": range(51)}, ValueError, "indices below 50, the number of samples, got 50"),
        ({"sampler": cut(range(50), 8)}, ValueError, "global batches, got at most 8 samples"),
        ({"sampler": cut(range(50), 17)}, ValueError, "has 17 samples, more than global_batch"),
        ({"sampler": rollover(50)}, ValueError, "'rollover' moves 2 samples into the next one"),
        ({"sampler": range(50), "seed": 1}, ValueError, "decides the order itself, got seed=1"),
        ({"beside": 3}, ValueError, "beside must be a sampler of trainer.batch_sampler"),
    ],
)
def test_what_is_no_sampler_of_the_data_set_is_named(arguments, error, message):
    with pytest.raises(error, match=message):
        trainer_of(network()).batch_sampler(SAMPLES, **arguments)


def test_data_without_a_length_are_named():
    with pytest.raises(TypeError, match="must be a data set with a length"):
        trainer_of(network()).batch_sampler(iter(DATA))


# --- several loaders in a step --------------------------------------------------------------------

OTHERS = gluon.data.SimpleDataset(list(range(30)))
POSITIONS = gluon.data.SimpleDataset(list(range(SAMPLES)))


@pytest.mark.parametrize("loading", LOADERS)
def test_another_data_set_is_drawn_beside(loading):
    """30 samples beside 50: each pass over them is complete, whatever the epochs are."""
    net = network()
    trainer = trainer_of(net)
    sampler = trainer.batch_sampler(SAMPLES, seed=0)
    beside = trainer.batch_sampler(OTHERS, seed=0, beside=sampler)
    pair = [
        gluon.data.DataLoader(data, batch_sampler=each, **loading)
        for data, each in ((POSITIONS, sampler), (OTHERS, beside))
    ]
    assert len(beside) == len(sampler)
    first, second = [], []
    for _ in range(3):
        for a, b in zip(*pair, strict=True):
            index = a.asnumpy().astype(int)
            first += index.tolist()
            second += b.asnumpy().tolist()
            assert len(a) == len(b)
            backward(net, mx.nd.array(FEATURES[index]), mx.nd.array(LABELS[index]))
            trainer.step(len(a))
    for samples, size in ((first, SAMPLES), (second, 30)):
        assert len(samples) == 150
        for each in cut(samples, size):
            assert sorted(each) == list(range(size))


def test_data_sets_of_one_length_and_seed_give_pairs():
    net = network()
    trainer = trainer_of(net)
    sampler = trainer.batch_sampler(DATA, seed=4)
    same, other = (trainer.batch_sampler(DATA, seed=s, beside=sampler) for s in (4, 5))
    for _ in range(2):
        found = []
        for a, b, c in zip(sampler, same, other, strict=True):
            assert a == b != c
            found += c
            backward(net, mx.nd.array(FEATURES[a]), mx.nd.array(LABELS[a]))
            trainer.step(len(a))
        assert sorted(found) == list(range(SAMPLES))


def test_the_other_loader_is_iterated_first():
    trainer = trainer_of(network())
    sampler = trainer.batch_sampler(DATA)
    beside = trainer.batch_sampler(DATA, beside=sampler)
    with pytest.raises(RuntimeError, match="no new epoch has begun: iterate over the other loader"):
        next(iter(zip(beside, sampler, strict=True)))
    running, behind = iter(sampler), iter(beside)
    next(running), next(behind)
    with pytest.raises(RuntimeError, match="step 1 has not been drawn"):
        next(behind)
    with pytest.raises(RuntimeError, match="no new epoch"):
        next(iter(beside))


# --- data iterators -------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["iterator", "arrays", "dataset", "threads"])
def test_a_data_iterator_of_planned_batches(kind):
    net = network()
    trainer = trainer_of(net)
    sampler = trainer.batch_sampler(SAMPLES, seed=5)
    train = {
        "iterator": lambda: lbbsp_mx.PlannedIter(sampler, mx.io.NDArrayIter(FEATURES, LABELS, 8)),
        "arrays": lambda: lbbsp_mx.PlannedIter(sampler, FEATURES, LABELS),
        "dataset": lambda: lbbsp_mx.PlannedIter(sampler, DATA),
        "threads": lambda: lbbsp_mx.PlannedIter(sampler, DATA, num_workers=2, thread_pool=True),
    }[kind]()
    assert len(train) == 4
    assert [(each.name, each.shape) for each in train.provide_data] == [("data", (1, 4))]
    assert [(d.name, d.shape) for d in train.provide_label] == [("softmax_label", (1,))]
    for epoch in range(2):
        train.reset()
        order = np.random.default_rng((5, epoch)).permutation(SAMPLES)
        for batch, index in zip(train, cut(order), strict=True):
            (x,), (y,) = batch.data, batch.label
            np.testing.assert_array_equal(x.asnumpy(), FEATURES[index])
            np.testing.assert_array_equal(y.asnumpy(), LABELS[index])
            assert batch.pad == 0
            assert batch.provide_data[0].shape == x.shape == train.provide_data[0].shape
            assert train.batch_size == len(index)
            backward(net, x, y)
            trainer.step(x.shape[0])
        with pytest.raises(StopIteration):
            train.next()


def test_a_reset_within_an_epoch_begins_the_next_one():
    net = network()
    trainer = trainer_of(net)
    train = lbbsp_mx.PlannedIter(trainer.batch_sampler(SAMPLES, seed=5), FEATURES, LABELS)
    for batch in train:
        backward(net, *batch.data, *batch.label)
        trainer.step(X)
        break
    train.reset()
    order = np.random.default_rng((5, 1)).permutation(SAMPLES)
    np.testing.assert_array_equal(train.next().data[0].asnumpy(), FEATURES[order[:X]])


def test_several_named_arrays_and_another_axis_of_samples():
    data = {"b": np.arange(20).reshape(4, 5), "a": np.arange(10).reshape(2, 5)}
    train = lbbsp_mx.PlannedIter([[4, 0], [2]], data, {"l": np.arange(5)[None]}, layout="TN")
    assert [each.name for each in train.provide_data] == ["a", "b"]
    assert train.iter_next()
    assert [each.shape for each in train.getdata()] == [(2, 2), (4, 2)]
    assert train.getdata()[1].asnumpy().tolist() == data["b"][:, [4, 0]].tolist()
    assert train.getlabel()[0].asnumpy().tolist() == [[4, 0]]
    train.reset()
    assert [batch.data[0].shape for batch in train] == [(2, 2), (2, 1)]


@pytest.mark.parametrize("layout", ["NC", "TN", "TCN"])
def test_files_of_hdf5_are_read_by_index(layout, tmp_path):
    h5py = pytest.importorskip("h5py")
    data = np.stack([FEATURES] * 2, axis=1) if len(layout) == 3 else FEATURES
    data = np.moveaxis(data, 0, axis := layout.find("N"))
    with h5py.File(tmp_path / "x.h5", "w") as file:
        source = file.create_dataset("x", data=data)
        train = lbbsp_mx.PlannedIter([[7, 3, 9], [3]], source, layout=layout)
        for batch, index in zip(train, [[7, 3, 9], [3]], strict=True):
            np.testing.assert_array_equal(batch.data[0].asnumpy(), data.take(index, axis))


def test_records_of_images_are_read_by_index(tmp_path):
    path = str(tmp_path / "images.rec")
    written = mx.recordio.MXIndexedRecordIO(path.replace(".rec", ".idx"), path, "w")
    for number in range(5):
        # A bitmap of 24 bits per pixel, whose rows are filled up to 20 bytes.
        head = struct.pack("<2sIII", b"BM", 54 + 80, 0, 54)
        head += struct.pack("<IiiHHIIiiII", 40, 6, 4, 1, 24, 0, 80, 0, 0, 0, 0)
        image = head + bytes([10 * number] * 80)
        label = mx.recordio.IRHeader(0, float(number), number, 0)
        written.write_idx(number, mx.recordio.pack(label, image))
    written.close()
    data = gluon.data.vision.ImageRecordDataset(path).transform_first(lambda x: x.astype("f4") + 1)
    train = lbbsp_mx.PlannedIter([[4, 0, 2], [3]], data, num_workers=1, thread_pool=True)
    for batch, index in zip(train, [[4, 0, 2], [3]], strict=True):
        assert batch.data[0].shape == (len(index), 4, 6, 3)
        assert batch.data[0].asnumpy()[:, 0, 0, 0].tolist() == [10 * each + 1 for each in index]
        assert batch.label[0].asnumpy().tolist() == index


def test_sources_that_cannot_be_planned_are_named(tmp_path):
    (tmp_path / "x.csv").write_text("1,2\n3,4\n")
    stream = mx.io.CSVIter(data_csv=str(tmp_path / "x.csv"), data_shape=(2,), batch_size=1)
    with pytest.raises(TypeError, match=r"MXDataIter gives batches of a constant.*ImageRecordData"):
        lbbsp_mx.PlannedIter([[0]], stream)
    shuffled = mx.io.NDArrayIter(FEATURES, LABELS, 8, shuffle=True)
    with pytest.raises(ValueError, match="shuffle must be False in the NDArrayIter"):
        lbbsp_mx.PlannedIter([[0]], shuffled)
    with pytest.raises(TypeError, match="only a gluon data set takes options of DataLoader"):
        lbbsp_mx.PlannedIter([[0]], FEATURES, num_workers=1)
    with pytest.raises(IndexError, match="draws sample 50 of arrays of 50 samples"):
        lbbsp_mx.PlannedIter([[50]], FEATURES).next()
    sparse = mx.nd.array(FEATURES).tostype("csr")
    with pytest.raises(TypeError, match="no sparse arrays"):
        lbbsp_mx.PlannedIter([[0]], sparse)


# --- rows -----------------------------------------------------------------------------------------


def test_a_single_worker_has_all_rows():
    assert trainer_of(network()).rows == slice(0, X)


def test_gradients_of_a_single_worker_with_rows_are_means_as_those_of_several():
    net = network()
    trainer = trainer_of(net, policy=Even())
    x, y = mx.nd.array(FEATURES[:X]), mx.nd.array(LABELS[:X])
    backward(net, x[trainer.rows], y[trainer.rows])
    sums = [param.grad().asnumpy() for param in net.collect_params().values()]
    trainer.allreduce_grads()
    for param, total in zip(net.collect_params().values(), sums, strict=True):
        np.testing.assert_allclose(param.grad().asnumpy(), total / X, rtol=1e-6)
    before = weights(net)
    trainer.update(1)
    assert all(np.any(a != b) for a, b in zip(before, weights(net), strict=True))
