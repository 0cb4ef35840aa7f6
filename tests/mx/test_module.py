"""`KVStore.balance` in one process: Module trains as with MXNet's own stores."""

from functools import partial
from types import SimpleNamespace

import mxnet as mx
import numpy as np
import pytest
from helpers import DATA, FEATURES, LABELS, SAMPLES, X

import lbbsp_mx
from lbbsp_core import GlobalOrder, read_run
from lbbsp_core.runtime.loop.pipelined import PipelinedSession
from lbbsp_mx.module.pushes import ModuleSteps

WHOLE = SAMPLES // X * X  # samples without those of a short last step


def network():
    data = mx.sym.FullyConnected(mx.sym.var("data"), num_hidden=2, name="output")
    return mx.sym.SoftmaxOutput(data, name="softmax")


def arrays(samples=SAMPLES, shuffle=False, last="pad"):
    return mx.io.NDArrayIter(FEATURES[:samples], LABELS[:samples], X, shuffle, last)


def fit(train, kvstore="local", epochs=2, batch_end_callback=None, **options):
    module = mx.mod.Module(network(), **options)
    mx.random.seed(0)
    params = {"learning_rate": 0.1, "momentum": 0.9}
    more = {"num_epoch": epochs, "batch_end_callback": batch_end_callback}
    module.fit(train, kvstore=kvstore, optimizer_params=params, **more)
    return {name: value.asnumpy() for name, value in module.get_params()[0].items()}


def assert_equal(ours, others):
    assert ours.keys() == others.keys()
    for name, value in ours.items():
        np.testing.assert_allclose(value, others[name], rtol=2e-6, atol=1e-7)


@pytest.fixture
def store():
    return lbbsp_mx.KVStore("local")


@pytest.mark.parametrize("devices", [1, 2])
@pytest.mark.parametrize("name", ["lbbsp", "lbbsp_local", "lbbsp_device"])
def test_it_trains_as_the_stock_store_does(name, devices):
    store = mx.kv.create(name)
    context = [mx.cpu(number) for number in range(devices)]
    train = store.balance(arrays(WHOLE), devices=devices)
    assert_equal(fit(train, store, context=context), fit(arrays(WHOLE), context=context))


def test_a_short_last_step_is_a_mean_over_its_samples(store):
    rest = SAMPLES - WHOLE
    last = np.arange(WHOLE, SAMPLES)
    times = X // rest  # so that the whole batch has the mean of the short one
    padded = np.concatenate([np.arange(WHOLE), np.tile(last, times)])
    assert len(padded) % X == 0
    whole = mx.io.NDArrayIter(FEATURES[padded], LABELS[padded], X)
    assert_equal(fit(store.balance(arrays()), store), fit(whole))


def assert_order(train, order, epochs=2):
    """Checks that the batches of some epochs are those of an order."""
    for epoch in range(epochs):
        steps = range(epoch * order.steps_per_epoch, (epoch + 1) * order.steps_per_epoch)
        for step, batch in zip(steps, train, strict=True):
            index = order.indices(step)
            np.testing.assert_array_equal(batch.data[0].asnumpy(), FEATURES[index])
            np.testing.assert_array_equal(batch.label[0].asnumpy(), LABELS[index])
        train.reset()


@pytest.mark.parametrize("shuffle", [False, True])
def test_a_short_last_batch_is_left_out_if_the_iterator_discards_it(store, shuffle):
    train = store.balance(arrays(shuffle=shuffle, last="discard"), seed=4)
    assert_order(train, GlobalOrder(SAMPLES, X, seed=4, shuffle=shuffle, drop_last=True))


def test_an_iterator_that_discards_trains_as_with_the_stock_store(store):
    train = store.balance(arrays(last="discard"))
    assert_equal(fit(train, store), fit(arrays(last="discard")))


def test_without_its_store_the_iterator_only_reads(store):
    assert_order(store.balance(arrays(), shuffle=True, seed=4), GlobalOrder(SAMPLES, X, seed=4))


def test_an_iterator_that_shuffles_is_shuffled_by_the_seed(store):
    np.random.seed(9)
    shuffling = arrays(shuffle=True)
    assert not np.array_equal(shuffling.data[0][1].asnumpy(), FEATURES)
    assert_order(store.balance(shuffling, seed=4), GlobalOrder(SAMPLES, X, seed=4), epochs=1)


def test_a_shuffling_iterator_keeps_data_and_labels_together_after_several_epochs(store):
    numbered = mx.io.NDArrayIter(np.arange(50), np.arange(50), 10, shuffle=True)
    numbered.reset()
    for batch in store.balance(numbered):
        np.testing.assert_array_equal(batch.data[0].asnumpy(), batch.label[0].asnumpy())


def test_a_gluon_data_set_is_read_by_a_loader(store):
    loading = {"num_workers": 2, "thread_pool": True}
    train = store.balance(DATA, global_batch_size=X, shuffle=False, iter_params=loading)
    other = lbbsp_mx.KVStore("local")
    assert_equal(fit(train, store), fit(other.balance(arrays()), other))


def test_gradients_of_the_script_are_not_scaled_in_place(store):
    train = store.balance(arrays())
    store.init("w", mx.nd.zeros(4))
    for batch in train:
        gradient, out = mx.nd.ones(4), mx.nd.zeros(4)
        store.push("w", gradient)
        store.pull("w", out=out)
        size = batch.data[0].shape[0]
        assert gradient.asnumpy().tolist() == [1] * 4
        assert out.asnumpy().tolist() == [X / size] * 4


def test_the_record_has_the_steps(store, tmp_path):
    fit(store.balance(arrays(), record=tmp_path / "run.jsonl"), store, epochs=3)
    steps = read_run(tmp_path / "run.jsonl").steps
    assert [line.sizes for line in steps] == 3 * [(16,), (16,), (16,), (2,)]


# --- steps of several workers ---------------------------------------------------------------------


class Session:
    """Session of the second of three workers, with the plan (5, 2, 1) in each step."""

    def __init__(self):
        self.workers, self.step, self.sizes, self.ended = 3, 0, (5, 2, 1), 0
        self.balancer = SimpleNamespace(constraints=SimpleNamespace(global_batch_size=16))

    def end_step(self, computed, summed):
        computed()
        summed()
        self.ended += 1

    def finish_barrier(self):
        self.step = self.ended


def steps_of(session, mean_loss=False, scheduled=18):
    return ModuleSteps(session, scheduled, mean_loss=mean_loss, most_devices=1, in_servers=False)


def drawn(session, **options):
    steps = steps_of(session, **options)
    steps.begin_draw()
    steps.drawn(2)
    return steps


@pytest.mark.parametrize(
    ("mean_loss", "rescale_grad", "factor"),
    [
        (False, 0.1, 16 / 8),  # of the script, for 16 samples
        (False, 1 / 18, 18 / 8),  # of Module, for three even batches
        (True, 0.1, 2 / 8),
        (True, 1 / 18, 2 / 8 * 18 / 16),
    ],
)
def test_pushes_are_scaled_to_the_update_of_one_process(mean_loss, rescale_grad, factor):
    steps = drawn(Session(), mean_loss=mean_loss)
    value = [[mx.nd.ones(2)], [mx.nd.full(2, 3.0)]]
    optimizer = mx.optimizer.SGD(rescale_grad=rescale_grad)
    (first,), (second,) = steps.scaled(["a", "b"], value, optimizer)
    assert first.asnumpy().tolist() == pytest.approx([factor] * 2)
    assert second.asnumpy().tolist() == pytest.approx([3 * factor] * 2)


def pushes(steps, *keys):
    for key in keys:
        steps.scaled(key, mx.nd.ones(2), None)
        steps.exchanged(key)


def pulls(steps, *keys):
    for key in keys:
        steps.exchanged(key, mx.nd.ones(2))


def next_step(steps):
    steps.begin_draw()
    steps.drawn(2)


@pytest.mark.parametrize(
    "events",
    [
        "aba0|1aa1b2|2aa2b3|3aa3b4",
        "abA0B|1abA1B|2",
        "AABaAAb0B0|AABaAAb1B2|AABaAAb2B3|3",
        "a|ab|a2b3|a|4",
    ],
    ids=["last push", "pull of its last weights", "pulls of a callback do not count",
         "new keys count from the next step on"],
)  # fmt: skip
def test_a_step_ends_with_what_its_first_ones_ended_with_or_when_a_batch_is_drawn(events):
    """Letters are pushes, capitals pulls, a bar draws a batch, and a number of steps has ended."""
    session = Session()
    steps = drawn(session)
    for event in events:
        if event == "|":
            next_step(steps)
        elif event.isdigit():
            assert session.ended == int(event)
        else:
            (pushes if event.islower() else pulls)(steps, event.lower())


def test_in_fit_a_step_ends_after_all_gradients_also_with_a_callback_that_pulls(store, monkeypatch):
    pushed, at_end, out = [], [], mx.nd.zeros(2)
    train = store.balance(arrays())
    pushpull, end_step = store.pushpull, PipelinedSession.end_step

    def seen(key, *args, **more):
        pushed.append(key)
        pushpull(key, *args, **more)

    def ended(*args):
        at_end.append(len(pushed))
        end_step(*args)

    monkeypatch.setattr(store, "pushpull", seen)
    monkeypatch.setattr(PipelinedSession, "end_step", ended)
    fit(train, store, batch_end_callback=lambda _: store.pull("output_bias", out=out))
    assert at_end == list(range(2, 17, 2))


@pytest.mark.parametrize("key", ["a", "b", "new"])
def test_pushes_after_the_step_are_refused(key):
    steps = drawn(Session())
    pushes(steps, "a", "b")
    next_step(steps)
    pushes(steps, "a", "b")
    with pytest.raises(ValueError, match="draw a batch before each update, or call"):
        pushes(steps, key, key)


def test_a_loop_that_is_left_early_does_not_scale_other_batches(store):
    train, out = store.balance(arrays()), mx.nd.zeros(4)
    store.init("w", out)
    for batch in train:
        store.push("w", mx.nd.ones(4))
        if batch.data[0].shape[0] < X:
            break
    with pytest.raises(ValueError, match=r"call train.reset\(\) before updates with other batches"):
        store.push("w", mx.nd.ones(4))
    train.reset()
    store.push("w", mx.nd.ones(4))
    store.pull("w", out=out)
    assert out.asnumpy().tolist() == [1] * 4


def test_values_that_are_sent_again_are_not_scaled(store):
    train, out = store.balance(arrays()), mx.nd.zeros(4)
    store.broadcast("w", mx.nd.zeros(4), out)
    for _ in train:
        store.push("w", mx.nd.ones(4))
        store.broadcast("w", mx.nd.full(4, 5), out)
        assert out.asnumpy().tolist() == [5] * 4


def test_the_arrays_of_a_first_step_without_an_end_are_not_kept():
    steps = drawn(Session())
    for _ in range(9):
        pushes(steps, "a", "b")
        pulls(steps, "a", "b")
    assert sum(map(len, steps._computed.values())) == 2
    assert sum(map(len, steps._pulled.values())) == 2


def gluon_normalisation(data, **options):
    return mx.gluon.nn.BatchNorm(in_channels=2, **options)(data)


FIXED = [partial(each, use_global_stats=True) for each in (mx.sym.BatchNorm, gluon_normalisation)]


@pytest.mark.parametrize("normalise", [mx.sym.BatchNorm, gluon_normalisation, *FIXED, None])
def test_batch_normalisation_is_warned_of_once(caplog, normalise):
    symbol = network()
    if normalise is not None:
        symbol = mx.sym.SoftmaxOutput(normalise(mx.sym.var("data")), name="softmax")
    optimizer = mx.optimizer.SGD(sym=symbol, param_idx2name={})
    steps = drawn(Session())
    for _ in range(2):
        steps.scaled("key", mx.nd.ones(2), optimizer)
    expected = normalise not in (*FIXED, None)
    assert caplog.text.count("BatchNorm normalises each worker's batch") == expected


def test_a_batch_without_pushes_is_refused():
    steps = drawn(Session())
    with pytest.raises(ValueError, match="pass kvstore=store to Module"):
        steps.begin_draw()


def test_a_batch_may_stay_unused_before_a_reset():
    session = Session()
    steps = drawn(session)
    steps.end()
    assert session.ended == 0
    value = mx.nd.ones(2)
    assert steps.scaled("key", value, None) is value, "outside of a step"
    steps.begin_draw()


# --- refusals -------------------------------------------------------------------------------------


def test_another_thread_reads_an_error_and_does_not_wait(store):
    with pytest.raises(ValueError, match="leave PrefetchingIter"):
        fit(mx.io.PrefetchingIter(store.balance(arrays())), store)


def feed_forward(train, store):
    model = mx.model.FeedForward(network(), num_epoch=2, learning_rate=0.1, numpy_batch_size=X)
    model.fit(train, kvstore=store)
    return model.arg_params


def in_sequence(train, store):
    first = mx.sym.FullyConnected(mx.sym.var("data"), num_hidden=4, name="first")
    module = mx.mod.SequentialModule().add(mx.mod.Module(first, label_names=[]))
    module.add(mx.mod.Module(network()), take_labels=True, auto_wiring=True)
    module.fit(train_data=train, kvstore=store, num_epoch=2)
    return module.get_params()[0]


@pytest.mark.parametrize("train", [feed_forward, in_sequence])
def test_what_keeps_one_batch_size_trains_as_with_mxnets_store_and_is_not_balanced(store, train):
    def learned(kvstore):
        mx.random.seed(0)
        np.random.seed(0)
        return train(arrays(WHOLE), kvstore)

    expected = learned("local")
    assert expected
    for name, value in learned(lbbsp_mx.KVStore("local")).items():
        np.testing.assert_array_equal(value.asnumpy(), expected[name].asnumpy())
    with pytest.raises(ValueError, match="its batches keep one size: use mx"):
        train(store.balance(arrays()), store)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({}, "global_batch_size must be given"),
        ({"global_batch_size": X, "mean_loss": True, "devices": 2}, "needs one device per worker"),
        ({"global_batch_size": SAMPLES + 1}, "at least one global batch"),
        ({"global_batch_size": X, "devices": 0}, "devices must be an integer >= 1"),
    ],
)
def test_options_that_cannot_be_are_named(store, options, message):
    with pytest.raises(ValueError, match=message):
        store.balance(FEATURES, LABELS, **options)


def test_more_devices_than_samples_of_the_last_step_are_refused(store):
    context = [mx.cpu(number) for number in range(3)]
    with pytest.raises(ValueError, match="pass devices=3 to balance"):
        fit(store.balance(arrays()), store, context=context)
    other = lbbsp_mx.KVStore("local")
    fit(other.balance(arrays(), devices=3), other, context=context)
    enough = lbbsp_mx.KVStore("local")
    fit(enough.balance(arrays(WHOLE)), enough, context=context)


def test_an_iterator_that_keeps_samples_for_the_next_epoch_is_refused(store):
    with pytest.raises(ValueError, match=r"must be 'pad' or 'discard' .*, got 'roll_over'"):
        store.balance(arrays(last="roll_over"))


@pytest.mark.parametrize(
    ("data", "arguments", "message"),
    [
        (arrays(), {"label": LABELS}, "label must be left out with an NDArrayIter"),
        (DATA, {"label": LABELS, "global_batch_size": X}, "label must .* gluon data set"),
        (arrays(), {"iter_params": {"data_name": "x"}}, "leave out data_name with an NDArrayIter"),
        (arrays(shuffle=True), {"iter_params": {"layout": "N"}}, "leave out layout with an"),
        (arrays(), {"iter_params": {"num_workers": 2}}, "only a gluon data set takes"),
    ],
)
def test_arguments_without_effect_are_refused(store, data, arguments, message):
    with pytest.raises(TypeError, match=message):
        store.balance(data, **arguments)


def test_an_unknown_option_is_named(store):
    with pytest.raises(TypeError, match="policy"):
        store.balance(arrays(), polic=None)


def test_an_iterator_without_samples_by_number_is_refused(store):
    words = mx.rnn.BucketSentenceIter([[1, 2], [3, 4]], 1, buckets=[2])
    with pytest.raises(TypeError, match="BucketSentenceIter gives batches of a constant size"):
        store.balance(words, global_batch_size=2)


def test_the_iterator_of_an_earlier_call_is_refused(store):
    earlier = store.balance(arrays())
    store.balance(arrays())
    with pytest.raises(RuntimeError, match="balanced over other data now"):
        next(earlier)
