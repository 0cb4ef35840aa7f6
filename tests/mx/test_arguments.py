"""Arguments of the trainers and of `balance` that are left out, exchanged, or given by name."""

from contextlib import nullcontext
from functools import partial
from types import SimpleNamespace

import mxnet as mx
import pytest
from helpers import DATA, FEATURES, LABELS, SAMPLES, X, assert_close, backward, network
from mxnet import gluon, nd

import lbbsp_mx
from lbbsp_core import DSSP, Ema, Even, FixedShares, Limits, LoadBalanced
from lbbsp_mx.data.sampler import Draws
from lbbsp_mx.store.native import runtime
from lbbsp_mx.trainer.steps import Steps


def trainer(net=None, **options):
    params = (net or network()).collect_params()
    return lbbsp_mx.Trainer(params, "sgd", **{"global_batch_size": X, **options})


def session_of_two(policy=None, **more):
    """What a session tells of a plan of eight samples for each of two workers."""
    known = {"workers": 2, "rank": 0, "step": 0, "order": None, "sizes": (8, 8)}
    return SimpleNamespace(**known | more, balancer=SimpleNamespace(policy=policy or Even()))


def sizes(loader, step=len, **options):
    """Trains an epoch on what `loader` makes of the trainer, and returns the batch sizes."""
    net = network()
    it, seen = trainer(net, **options), []
    for x, y in loader(it):
        backward(net, x, y)
        it.step(step(x))
        seen.append(len(x))
    return seen


@pytest.mark.parametrize("cls", [lbbsp_mx.Trainer, partial(lbbsp_mx.AsyncTrainer, sync="asp")])
@pytest.mark.parametrize(
    "listed",
    [lambda own: own + own[1:], lambda own: dict(zip("abcdefgh", own + own, strict=True))],
)
def test_a_parameter_that_is_listed_twice_learns_once(cls, listed):
    net, once = network(), network()
    params = listed(list(net.collect_params().values()))
    it = cls(params, "sgd", {"momentum": 0.9}, global_batch_size=X)
    stock = gluon.Trainer(once.collect_params(), "sgd", {"momentum": 0.9}, kvstore=None)
    for samples in it.batch_sampler(SAMPLES):
        if len(samples) < X:
            break
        for each, trains in (net, it), (once, stock):
            backward(each, nd.array(FEATURES[samples]), nd.array(LABELS[samples]))
            trains.step(X)
    assert_close(net, once, atol=2e-6)


WHOLE = [X] * (SAMPLES // X) + [SAMPLES % X]


@pytest.mark.parametrize("data", [SAMPLES, DATA])
def test_a_number_of_samples_or_the_data_set_will_do_and_a_seed_can_be_left_out(data):
    assert sizes(lambda it: gluon.data.DataLoader(DATA, batch_sampler=it.batch_sampler(data))) == (
        WHOLE
    )


@pytest.mark.parametrize(
    ("wrong", "step", "got"),
    [
        (lambda it: {"batch_size": it.batch_sampler(SAMPLES)}, len, SAMPLES),
        (lambda it: {"batch_sampler": it.batch_sampler(DATA)}, lambda x: 1, 1),
    ],
)
def test_a_step_of_another_number_of_samples_is_refused(wrong, step, got):
    with pytest.raises(ValueError, match=f"the {X} samples that the plan gives .*, got {got}"):
        sizes(lambda it: gluon.data.DataLoader(DATA, **wrong(it)), step=step)


@pytest.mark.parametrize(
    ("policy", "known", "outcome"),
    [
        (Even(), {}, "warns"),
        (FixedShares((1, 1)), {}, "warns"),
        (LoadBalanced(), {}, "refuses"),
        (Even(), {"shows_sizes": True}, "nothing"),
        (LoadBalanced(), {"shows_sizes": True}, "nothing"),
        (LoadBalanced(), {"has_rows": True}, "nothing"),
    ],
)
def test_several_workers_that_draw_without_the_plan(policy, known, outcome, caplog):
    steps = Steps(session_of_two(policy), Draws())
    vars(steps).update(known)
    expected = nullcontext()
    if outcome == "refuses":
        expected = pytest.raises(ValueError, match="pass DataLoader")
    with expected:
        steps.begin(8, [])
    steps.begin(8, [])
    assert len(caplog.records) == (outcome == "warns")


def test_a_batch_of_another_trainer_is_refused_and_explained(monkeypatch, caplog):
    session = session_of_two(in_epoch=True)
    other = Steps(session, Draws())
    monkeypatch.setattr(runtime(), "drawn_for", lambda: other)
    steps = Steps(session, Draws())
    for _ in range(2):
        with pytest.raises(ValueError, match="step must be called with the 8 samples"):
            steps.begin(6, [])
    assert ["pass beside=trainer" in each.message for each in caplog.records] == [True]


@pytest.mark.parametrize(
    ("draws", "refused"),
    [
        ([1, 1, 2], 9),  # a step is left out, as where a loss is NaN
        ([4, 1, 2], 9),  # with a loader that reads three batches ahead
        ([1, 5, 1], 8),  # a search of the learning rate within the epoch
        ([3, 1, 1, 0, 0], None),
        ([4, 0, 0, 0], None),  # the whole epoch at first
    ],
)
@pytest.mark.parametrize("in_own_thread", [True, False])
def test_a_batch_without_a_step_is_named_where_there_are_several_workers(
    draws, refused, in_own_thread
):
    session = session_of_two(step=7, order=object())
    steps = Steps(session, Draws())
    steps.draws.begin(session.step)
    outcome = nullcontext()
    if refused and in_own_thread:  # batches of other threads may be ahead of any step
        outcome = pytest.raises(ValueError, match=f"the batch of step {refused} was drawn, and no")
    with outcome:
        for drawn in draws:
            for _ in range(drawn):
                steps.draws.count()
            steps.draws._thread *= in_own_thread
            steps.begin(8, [])
            session.step += 1


def test_an_ndarrayiter_without_batch_size_would_train_on_single_samples():
    store = lbbsp_mx.KVStore("local")
    forgotten = mx.io.NDArrayIter(FEATURES, LABELS)
    with pytest.raises(ValueError, match=r"batch_size of the NDArrayIter is 1, its default, so"):
        store.balance(forgotten)
    assert store.balance(forgotten, global_batch_size=X).batch_size == X
    assert store.balance(forgotten, global_batch_size=1).batch_size == 1  # meant so


def test_a_store_has_the_states_of_its_own_optimizer_only(tmp_path):
    store, file = lbbsp_mx.KVStore("local"), str(tmp_path / "states")
    for call in store.save_optimizer_states, store.load_optimizer_states:
        with pytest.raises(NotImplementedError, match="no optimizer in this process, whose"):
            call(file)
    store.set_optimizer(mx.optimizer.SGD(momentum=0.9))
    store.init(3, nd.ones(2))
    store.push(3, nd.ones(2))
    store.save_optimizer_states(file)
    store.load_optimizer_states(file)
    assert len(store._updater.states) == 1


def test_arrays_need_a_global_batch_size():
    store = lbbsp_mx.KVStore("local")
    with pytest.raises(ValueError, match="global_batch_size must be given, because only an NDA"):
        store.balance(FEATURES, LABELS)
    with pytest.raises(TypeError, match="batch_size is no option: pass global_batch_size"):
        store.balance(FEATURES, LABELS, batch_size=X)


def test_options_are_taken_by_name():
    made = trainer(policy="lbbsp:min_gain=0", predictor="ema0.5", limits=X)
    used = made._session.balancer
    assert (used.policy, used.predictor) == (LoadBalanced(min_gain=0), Ema(0.5))
    assert used.constraints.limits == (Limits(),), "a single worker has all samples"
    with pytest.raises(TypeError, match="sync is an option of asynchronous training"):
        trainer(sync="ssp:3")


def test_a_synchroniser_is_taken_by_name():
    def asynchronous(sync):
        return lbbsp_mx.AsyncTrainer(
            network().collect_params(), "sgd", sync=sync, global_batch_size=X, policy="lbbsp"
        )

    made = asynchronous("dssp:3:15")
    assert made._session.sync == DSSP(3, 15)
    assert made._session.policy == LoadBalanced()
    made.finish()
    with pytest.raises(ValueError, match="no sync 'sspp': did you mean 'ssp'"):
        asynchronous("sspp:3")
    with pytest.raises(TypeError, match=r"got the class DSSP: create an object, as in sync=DSSP\("):
        asynchronous(DSSP)


def asynchronous(**options):
    params = network().collect_params()
    return lbbsp_mx.AsyncTrainer(params, "sgd", sync="asp", global_batch_size=X, **options)


@pytest.mark.parametrize(
    ("make", "problem"),
    [
        (
            lambda: trainer(global_batch_size=16.0),
            "global_batch_size must be an integer >= 0, got 1",
        ),
        (
            lambda: trainer(global_batch_size="16", accumulate=2),
            "global_batch_size must be an integer >= 0, got '16'",
        ),
        (lambda: trainer(mean_loss="no"), "mean_loss must be True or False, got 'no'"),
        (lambda: trainer().batch_sampler(SAMPLES, shuffle="no"), "shuffle must be True or False"),
        (
            lambda: lbbsp_mx.KVStore("local").balance(FEATURES, global_batch_size=X, shuffle="no"),
            "shuffle must be True or False, got 'no'",
        ),
        (lambda: trainer(compare_weights=True), "compare_weights must be an integer >= 1, got T"),
        (lambda: asynchronous(wait_seconds=0), "wait_seconds must be finite and > 0, got 0"),
        (lambda: asynchronous().batch_sampler(64.0), "data must be a data set with a length, or i"),
        (lambda: asynchronous().batch_sampler(64, epochs=0), "epochs must be an integer >= 1"),
        (lambda: lbbsp_mx.LoadBalancingHandler(checkpoint=5), "checkpoint must be a path, got 5"),
        (lambda: lbbsp_mx.LoadBalancingHandler(checkpoint="a", every=True), "every must be 'epoc"),
    ],
)
def test_values_of_a_wrong_type_or_range_are_named(make, problem):
    with pytest.raises((TypeError, ValueError), match=problem):
        make()
