"""States that gluon's own trainer has saved: read without executing anything, in its order."""

import pickle
import pickletools
from pathlib import Path

import pytest

lbbsp_mx = pytest.importorskip("lbbsp_mx", reason="needs mxnet: pip install 'lbbsp[mx]'")

import mxnet as mx  # noqa: E402
import numpy as np  # noqa: E402
from helpers import weights  # noqa: E402
from mxnet import autograd, gluon, nd  # noqa: E402

from lbbsp_mx.reliability.gluon_states import gluon_order  # noqa: E402

X = 8
LAYERS = 12
"""Same-shape neighbours, whose names are sorted otherwise than they are created: 10 before 9."""

rng = np.random.default_rng(0)
BATCHES = [nd.array(rng.normal(size=(X, 4))) for _ in range(8)]


class Scale(gluon.nn.HybridBlock):
    """A layer that MXNet computes in half precision without a GPU."""

    def __init__(self, units):
        super().__init__()
        with self.name_scope():
            self.weight = self.params.get("weight", shape=(units,), init="ones")

    def hybrid_forward(self, F, x, weight):
        return F.broadcast_mul(x, weight)


def network(layers=LAYERS, units=4, dtype="float32"):
    mx.random.seed(0)
    np.random.seed(0)
    net = gluon.nn.HybridSequential(prefix="net_")
    with net.name_scope():
        for _ in range(layers):
            half = dtype == "float16"
            net.add(Scale(units) if half else gluon.nn.Dense(units, in_units=units, flatten=False))
    net.initialize(mx.init.Xavier(magnitude=2))
    net.cast(dtype)
    net[1].weight.grad_req = "null"  # has neither a state nor a number of updates
    return net


def train(net, trainer, batches):
    for x in batches:
        with autograd.record():
            loss = (net(x.astype(net[0].weight.dtype)) - 1) ** 2
        loss.backward()
        trainer.step(X)


def stock(net, optimizer, **options):
    return gluon.Trainer(net.collect_params(), optimizer, dict(options), kvstore=None)


def ours(net, optimizer, **options):
    return lbbsp_mx.Trainer(net.collect_params(), optimizer, dict(options), global_batch_size=X)


def scheduled():
    inner = mx.lr_scheduler.CosineScheduler(20, base_lr=0.05, warmup_steps=6)
    return {"lr_scheduler": inner}


CASES = {
    "adam": ("adam", dict, "float32"),
    "momentum": ("sgd", lambda: {"momentum": 0.9, "learning_rate": np.float32(0.1)}, "float32"),
    "plain": ("sgd", dict, "float32"),
    "centered": ("rmsprop", lambda: {"centered": True}, "float32"),
    "schedule": ("adam", scheduled, "float32"),
    "half": ("sgd", lambda: {"momentum": 0.9, "multi_precision": True}, "float16"),
}


@pytest.mark.parametrize("case", CASES)
def test_training_continues_as_stock_gluon_would(tmp_path, case):
    optimizer, options, dtype = CASES[case]
    net = network(dtype=dtype)
    first = stock(net, optimizer, **options())
    train(net, first, BATCHES[:4])
    first.save_states(str(tmp_path / "states"))
    net.save_parameters(str(tmp_path / "weights"))
    train(net, first, BATCHES[4:])

    other = network(dtype=dtype)
    other.load_parameters(str(tmp_path / "weights"))
    second = ours(other, optimizer, **options())
    assert [p.name for p in second._params] != [p.name for p in first._params], "no trap"
    second.load_states(str(tmp_path / "states"))
    train(other, second, BATCHES[4:])
    for mine, theirs in zip(weights(other), weights(net), strict=True):
        np.testing.assert_allclose(mine, theirs, atol=1e-6 if dtype == "float32" else 0)
    assert second.optimizer.num_update == first.optimizer.num_update == len(BATCHES)
    assert second.learning_rate == pytest.approx(first.learning_rate)


def test_a_file_without_the_optimizer_holds_the_states_alone(tmp_path):
    net, other = network(), network()
    first, second = stock(net, "sgd", momentum=0.9), ours(other, "sgd", momentum=0.9)
    train(net, first, BATCHES[:2])
    (tmp_path / "states").write_bytes(first._updaters[0].get_states(dump_optimizer=False))
    second.load_states(tmp_path / "states")
    saved, loaded = first._updaters[0].states, second._updaters[0].states
    assert len(saved) == len(loaded) == 2 * LAYERS - 1
    order = gluon_order(other.collect_params())
    for number, place in ((number, order[number]) for number in saved):
        np.testing.assert_array_equal(saved[number].asnumpy(), loaded[place].asnumpy())


def test_the_order_is_that_of_what_the_user_passes():
    params = network().collect_params()
    created = list(params.values())
    order = gluon_order(params)
    assert [created[place].name for place in order] == sorted(params.keys())
    assert order != list(range(len(created)))
    assert gluon_order(created) == list(range(len(created)))
    assert gluon_order({"b": created[0], "a": created[1]}) == [1, 0]


# --- files of other networks, and what is no such file --------------------------------------------


@pytest.mark.parametrize(
    ("saved", "optimizer", "message"),
    [
        (network(units=3), "adam", r"state of parameter 1 \(net_dense0_bias\) is "
         r"\(\(3,\) float32, .* needs \(\(4,\) float32"),
        (network(layers=13), "adam", "state of parameter 24, and the trainer has 24 parameters"),
        (network(), "sgd", r"is none, and the trainer needs \(\(4,\) float32, "),
    ],
)  # fmt: skip
def test_states_of_another_network_are_refused_and_nothing_changes(
    tmp_path, saved, optimizer, message
):
    first = stock(saved, optimizer)
    train(saved, first, [nd.ones((X, saved[0].weight.shape[0]))])
    first.save_states(str(tmp_path / "states"))
    net = network()
    second = ours(net, "adam", learning_rate=0.3)
    with pytest.raises(ValueError, match=message):
        second.load_states(tmp_path / "states")
    assert second._updaters[0].states == {}
    assert second.optimizer.num_update == 0
    assert second.learning_rate == 0.3


class Bomb:
    def __init__(self, function, *args):
        self.call = function, args

    def __reduce__(self):
        return self.call


class Nested:
    """A bomb in the state of an attribute."""

    def __setstate__(self, state):
        raise AssertionError("must not be called")

    def __getstate__(self):
        return {"x": Bomb(Path.touch, Path("exploded"))}


def optimizer_with(value):
    optimizer = mx.optimizer.Adam(param_dict={})
    optimizer.extra = value
    return ({}, optimizer)


@pytest.mark.parametrize("protocol", [2, 4, 5])
@pytest.mark.parametrize(
    "content",
    [
        lambda: Bomb(Path.touch, Path("exploded")),
        lambda: Bomb(eval, "open('exploded', 'w')"),
        lambda: Bomb(exec, "open('exploded', 'w')"),
        lambda: optimizer_with(Bomb(eval, "open('exploded', 'w')")),
        lambda: optimizer_with(Nested()),
        lambda: {0: Nested()},
        lambda: {0: np.array([Bomb(eval, "open('exploded', 'w')")], object)},
    ],
)
def test_malicious_pickles_are_refused_and_not_executed(tmp_path, monkeypatch, content, protocol):
    monkeypatch.chdir(tmp_path)
    Path("states").write_bytes(pickle.dumps(content(), protocol))
    with pytest.raises(ValueError, match="nothing of it was executed"):
        ours(network(), "adam").load_states("states")
    assert not Path("exploded").exists()


def opcodes(text):
    """Assembles a pickle by hand."""
    return b"\x80\x02" + text + b"."


@pytest.mark.parametrize(
    "data",
    [
        opcodes(b"cmxnet.optimizer.optimizer\nregister\n(cos\nsystem\ntR"),
        opcodes(b"cmxnet.optimizer.optimizer\nos.system\n(X\x0e\x00\x00\x00touch explodedtR"),
        opcodes(b"cmxnet.optimizer.optimizer\npickle\n(X\x01\x00\x00\x00xtR"),
        opcodes(b"cbuiltins\nbytearray\n}X\x01\x00\x00\x00xNsb"),
        opcodes(b"cmxnet.ndarray.ndarray\nNDArray\n(NtR}b"),
        opcodes(b"P1\n"),
        b"\x80\x04" + b"\x95" + b"\xff" * 8 + b".",
    ],
)
def test_pickles_by_hand_do_not_reach_anything(tmp_path, monkeypatch, data):
    monkeypatch.chdir(tmp_path)
    Path("states").write_bytes(data)
    with pytest.raises(ValueError, match=r"states is (damaged|a pickle that names)"):
        ours(network(), "adam").load_states("states")
    assert not Path("exploded").exists()
    assert mx.optimizer.optimizer.pickle is pickle


def test_damaged_files_raise_value_errors_only(tmp_path):
    net = network(layers=2)
    first = stock(net, "adam", **scheduled())
    train(net, first, BATCHES[:1])
    whole = first._updaters[0].get_states(dump_optimizer=True)
    assert "NEWOBJ" in {op.name for op, _, _ in pickletools.genops(whole)}
    second = ours(network(layers=2), "adam", **scheduled())
    file = tmp_path / "states"
    chance = np.random.default_rng(1)
    refused = 0
    for cut in [whole[:n] for n in range(2, len(whole), 97)] + [
        bytes(damaged(whole, chance)) for _ in range(150)
    ]:
        file.write_bytes(cut)
        try:
            second.load_states(file)  # a number may have changed
        except ValueError:
            refused += 1
    assert refused > 40


def damaged(whole, chance):
    data = bytearray(whole)
    for place in chance.integers(2, len(data), 3):
        data[place] = chance.integers(256)
    return data
