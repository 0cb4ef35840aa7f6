"""Proof of how gradients are weighted, in a single process with few samples."""

from types import MethodType

import keras
import numpy as np
import pytest
import tensorflow as tf

from lbbsp_tf import compat
from lbbsp_tf.compat.probing import same_noise
from lbbsp_tf.exactness.proof import SAMPLES, Refusal, prove
from lbbsp_tf.exactness.verification import uneven_sizes
from lbbsp_tf.step.train_step import TrainStep, Weighting

L = keras.layers
ROWS = 9


def model(loss, *layers, regularizer=None, dtype=None):
    keras.utils.set_random_seed(0)
    options = {"use_bias": False, "dtype": dtype}  # each variable makes the trace longer
    hidden = L.Dense(8, kernel_regularizer=regularizer, **options)
    built = keras.Sequential([L.Input((5,)), hidden, *layers, L.Dense(2, **options)])
    built.compile("sgd", loss)
    return built


def samples(dtype="float32", rows=ROWS):
    rng = np.random.default_rng(0)
    x, y = rng.normal(size=(rows, 5)), rng.uniform(size=(rows, 2))
    return tf.constant(x, dtype), tf.constant(y, dtype)


def found(built, batch=None):
    return prove(TrainStep.of_model(built), tf.distribute.get_strategy(), batch or samples())


def refused(built, batch=None):
    """Returns why a model is refused."""
    refusal = found(built, batch)
    assert isinstance(refusal, Refusal)
    return refusal.problem


def scalar(y, y_pred):
    return tf.reduce_mean(tf.abs(y - y_pred))


def summed(y, y_pred):
    return tf.reduce_sum(tf.abs(y - y_pred))


@pytest.mark.parametrize(
    ("loss", "regularizer", "weighting"),
    [
        (scalar, "l2", Weighting()),
        (keras.losses.MeanAbsoluteError(), "l2", Weighting()),
        (summed, None, Weighting(sums=(True,))),
    ],
)
def test_means_and_sums_with_and_without_regularisers(loss, regularizer, weighting):
    assert found(model(loss, regularizer=regularizer)) == weighting


def test_logged_sums_are_told_from_means():
    built = model("mse")
    built.compile("sgd", keras.losses.MeanAbsoluteError(reduction="sum"), metrics=[scalar])
    weighting = found(built)
    assert weighting == Weighting(sums=(True,))
    assert weighting.logged == (1.0, None)


def test_each_application_of_gradients_has_its_loss_and_further_ones_that_of_the_last():
    assert [Weighting(sums=(False, True)).is_sum(k) for k in range(3)] == [False, True, True]


@pytest.mark.parametrize(
    "strategy", [tf.distribute.get_strategy, lambda: tf.distribute.MirroredStrategy(["CPU:0"])]
)
def test_layers_that_are_built_in_the_step_get_their_own_initial_weights(strategy):
    strategy = strategy()

    def network():
        keras.utils.set_random_seed(0)
        initializers = "glorot_uniform", "truncated_normal", "orthogonal"
        return keras.Sequential(
            [L.Dense(3, use_bias=False, kernel_initializer=each) for each in initializers]
        )

    class Built(keras.Model):
        def __init__(self):
            super().__init__()
            self.network, self.scale = network(), None
            self.compile("sgd")

        def train_step(self, data):
            if self.scale is None:
                self.scale = tf.Variable(lambda: tf.random.normal((4, 1)), trainable=False)
            with tf.GradientTape() as tape:
                loss = tf.reduce_mean(self.network(data) ** 2)
            gradients = tape.gradient(loss, self.network.trainable_weights)
            self.optimizer.apply(gradients, self.network.trainable_weights)
            return {"loss": loss}

    with strategy.scope():
        built = Built()
    batch = tf.constant(np.random.default_rng(0).normal(size=(ROWS, 5)), "float32")
    assert prove(TrainStep.of_model(built), strategy, batch) == Weighting()
    expected = network()
    expected.build((None, 5))
    for weight, own in zip(built.network.get_weights(), expected.get_weights(), strict=True):
        np.testing.assert_array_equal(weight, own)
    assert len(np.unique(built.scale.numpy())) == 4


def test_noise_batch_normalisation_and_metrics_neither_disturb_the_proof_nor_are_changed():
    built = model("mse", L.BatchNormalization(), L.Dropout(0.5), L.GaussianNoise(1.0))
    built.compile("sgd", "mse", metrics=["mae", keras.metrics.AUC()])
    before = [v.numpy().copy() for v in built.variables]
    assert found(built) == Weighting()
    for old, variable in zip(before, built.variables, strict=True):
        np.testing.assert_array_equal(old, variable.numpy())
    assert int(built.optimizer.iterations) == 0


class OwnStep(keras.Model):
    """A train step of the user's own, whose parts the cases replace."""

    loss_of = staticmethod(lambda errors: tf.reduce_mean(errors))

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.tracker = keras.metrics.Mean(name="tracker")
        self.state = tf.Variable(1.0, trainable=False, name="state")
        self.kept = [tf.Variable(v.value, name="kept") for v in self.trainable_variables]

    def train_step(self, data):
        x, y = data
        with tf.GradientTape() as tape:
            loss = self.loss_of(tf.square(y - self(x, training=True)))
        self.tracker.update_state(loss)
        self.update(loss, tape.gradient(loss, self.trainable_variables))
        return {"loss": loss}

    def update(self, loss, gradients):
        self.optimizer.apply(gradients, self.trainable_variables)


def own(step, **options):
    keras.utils.set_random_seed(0)
    inputs = L.Input((5,))
    built = step(inputs, L.Dense(2)(inputs), **options)
    built.compile("sgd")
    return built


class Accumulates(OwnStep):
    """Applies nothing but zeros in most steps."""

    def update(self, loss, gradients):
        self.state.assign_add(1.0)
        for kept, gradient in zip(self.kept, gradients, strict=True):
            kept.assign_add(gradient)
        applied = tf.cast(self.state % 4 == 0, tf.float32)
        super().update(loss, [applied * kept for kept in self.kept])


class OwnUpdate(OwnStep):
    def update(self, loss, gradients):
        self.optimizer.apply(gradients[1:], self.trainable_variables[1:])
        self.trainable_variables[0].assign_sub(1e-3 * gradients[0])


class CountsAndAverages(OwnStep):
    """Keeps state that is the same for all samples: a counter, and averages of the weights."""

    def update(self, loss, gradients):
        self.state.assign_add(1.0)
        super().update(loss, gradients)
        for kept, variable in zip(self.kept, self.trainable_variables, strict=True):
            kept.assign(0.9 * kept + 0.1 * variable)


class KeepsSmallest(OwnStep):
    """Keeps the smallest loss, which is compared with infinity at first."""

    def update(self, loss, gradients):
        self.state.assign(tf.minimum(self.state, loss))
        super().update(loss, gradients)


def keeping_the_smallest():
    built = own(KeepsSmallest)
    built.state.assign(np.inf)
    return built


class KeepsLater(OwnStep):
    """Keeps something of its gradients from a later step on, as the cases choose."""

    def update(self, loss, gradients):
        self.state.assign_add(1.0)
        self.kept[0].assign(self.chosen(self.state, self.kept[0].read_value(), gradients[0]))
        super().update(loss, gradients)


def keeping(chosen):
    return lambda: own(type("Keeps", (KeepsLater,), {"chosen": staticmethod(chosen)}))


@pytest.mark.parametrize(
    ("built", "variable"),
    [
        (lambda: own(Accumulates), "kept"),
        (lambda: own(OwnUpdate), "dense/kernel"),
        (keeping_the_smallest, "state"),
        (keeping(lambda steps, old, new: tf.where(steps % 4 == 0, new, old)), "kept"),
        (keeping(lambda steps, old, new: tf.cond(steps > 9, lambda: new, lambda: old)), "kept"),
        (keeping(lambda steps, old, new: old + tf.cast(steps > 9, tf.float32) * new), "kept"),
    ],
)
def test_variables_that_are_assigned_from_samples_are_refused(built, variable):
    keras.utils.clear_session()
    assert f"assigns {variable} a value that depends on the samples" in refused(built())


def changing(change, loss_of=OwnStep.loss_of):
    """Builds models that change their gradients, `sums` after they have summed them."""

    class Changes(OwnStep):
        def update(self, loss, gradients):
            gradients = compat.sum_gradients(gradients) if self.name == "sums" else gradients
            super().update(loss, change(gradients, self.trainable_variables))

    Changes.loss_of = staticmethod(loss_of)
    return lambda name: own(Changes, name=name)


def global_norm(gradients, variables):
    return tf.clip_by_global_norm(gradients, 1e3)[0]  # which the first samples do not reach


CHANGES = {
    "signs": changing(lambda gradients, variables: [tf.sign(each) for each in gradients]),
    "sum of losses": changing(global_norm, tf.reduce_sum),
}


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_changes_of_gradients_that_are_not_linear_are_named_and_exact_after_a_sum(change):
    assert "clips gradients (or changes or uses them" in refused(change("plain"))
    weighting = found(change("sums"))
    assert weighting.is_sum(0) is (change is CHANGES["sum of losses"])
    assert weighting.summed == (False, True)


def test_a_train_step_that_a_model_has_itself_is_examined_as_one_of_its_class():
    def step(self, data):
        x, y = data
        with tf.GradientTape() as tape:
            loss = self.compute_loss(x=x, y=y, y_pred=self(x, training=True))
        gradients = global_norm(tape.gradient(loss, self.trainable_variables), ())
        self.optimizer.apply_gradients(zip(gradients, self.trainable_variables, strict=True))
        return {"loss": loss}

    built = own(keras.Model)
    built.compile("sgd", "mse")
    built.train_step = MethodType(step, built)
    assert "clips gradients (or changes or uses them" in refused(built)


@pytest.mark.parametrize("name", ["plain", "sums"])
def test_the_loss_is_to_blame_if_sums_of_gradients_would_not_do(name):
    built = changing(global_norm, tf.math.reduce_variance)(name)
    assert "neither a mean nor a sum" in refused(built)


def test_linear_changes_need_no_sum():
    def centred(gradients, variables):
        return [each - tf.reduce_mean(each) for each in gradients]

    assert isinstance(found(changing(centred)("plain")), Weighting)


def test_what_sums_are_assigned_to_is_the_same_on_all_workers():
    class Keeps(OwnStep):
        def update(self, loss, gradients):
            gradients = compat.sum_gradients(gradients)
            for kept, gradient in zip(self.kept, gradients, strict=True):
                kept.assign(0.9 * kept + gradient)
            super().update(loss, [kept.read_value() for kept in self.kept])

    assert found(own(Keeps)).summed == (False, True)


@pytest.mark.parametrize(
    "built",
    [
        lambda: model("mse", L.SpectralNormalization(L.Dense(8)), L.Dropout(0.5)),
        lambda: own(CountsAndAverages),
    ],
)
def test_variables_that_do_not_depend_on_samples_may_be_assigned(built):
    assert found(built()) == Weighting()


def dice(y, y_pred):
    return 1 - (tf.reduce_sum(y * y_pred) + 1) / (tf.reduce_sum(y) + tf.reduce_sum(y_pred) + 1)


def test_a_small_loss_is_refused_beside_a_large_one():
    keras.utils.set_random_seed(0)
    inputs = L.Input((5,))
    built = keras.Model(inputs, [L.Dense(2)(inputs), L.Dense(2, "sigmoid")(inputs)])

    def large(y, y_pred):
        return tf.reduce_mean(tf.square(1e4 * y - y_pred))

    built.compile("sgd", [large, dice])
    x, y = samples()
    assert "neither a mean nor a sum" in found(built, (x, (y, tf.round(y)))).problem


class Gate(L.Layer):
    """A gate of experts with the balance loss of a Switch Transformer."""

    def __init__(self, weight):
        super().__init__()
        self.weight, self.gate = weight, L.Dense(8, "softmax")

    def build(self, shape):
        self.gate.build(shape)

    def call(self, x):
        shares = self.gate(x)
        chosen = tf.one_hot(tf.argmax(shares, -1), 8, dtype=shares.dtype)
        used = [tf.reduce_mean(tf.cast(each, tf.float32), 0) for each in (chosen, shares)]
        self.add_loss(self.weight * 8 * tf.reduce_sum(used[0] * used[1]))
        return x * shares * chosen


@pytest.mark.parametrize(
    ("policy", "weight"),
    [
        ("float32", 1e-6),
        ("mixed_float16", 1e-4),
        pytest.param("mixed_bfloat16", 1e-4, marks=pytest.mark.campaign),
    ],
)
def test_a_balance_loss_of_experts_is_refused_though_its_weight_is_small(policy, weight):
    keras.config.set_dtype_policy(policy)
    try:
        problem = refused(model("mse", Gate(weight)))
    finally:
        keras.config.set_dtype_policy("float32")
    assert "neither a mean nor a sum" in problem


class Terms(OwnStep):
    """A loss of the sample, of which the cases make more."""

    def __init__(self, *args, total, **kwargs):
        super().__init__(*args, **kwargs)
        self.total = total
        self.later = tf.Variable(0.0, trainable=False)
        self.counted = tf.Variable(0, dtype=tf.int64, trainable=False)
        self.flag = tf.Variable(False, trainable=False)

    def train_step(self, data):
        x, y = data
        with tf.GradientTape() as tape:
            y_pred = self(x, training=True)
            self.labelled, self.signs = tf.reduce_sum(tf.abs(x)), tf.sign(y)
            loss = self.total(self, tf.reduce_mean(tf.square(y - y_pred), -1), y_pred)
        self.update(loss, tape.gradient(loss, self.trainable_variables))
        return {"loss": loss}


mean = tf.reduce_mean
variance = tf.math.reduce_variance


def below_50(number):
    tf.debugging.assert_less(number, 50.0)  # which a large weight is not
    return number


def with_terms(total):
    return own(lambda *parts: Terms(*parts, total=total))


@pytest.mark.parametrize(
    "total",
    [
        lambda m, losses, y: mean(losses) + m.later * variance(y),
        lambda m, losses, y: mean(losses) + tf.where(m.counted > 10, variance(y), 0.0),
        lambda m, losses, y: mean(losses) + tf.cond(m.flag, lambda: variance(y), lambda: 0.0),
        lambda m, losses, y: mean(losses) + tf.cast(m.flag, tf.float32) * variance(y),
        lambda m, losses, y: tf.function(lambda: mean(losses) + m.later * variance(y))(),
        lambda m, losses, y: mean(losses + m.later * mean((y - mean(y, 0)) ** 2, -1)),
        lambda m, losses, y: tf.cond(
            tf.random.uniform([], seed=3) < -1.0, lambda: variance(y), lambda: mean(losses)
        ),
        lambda m, losses, y: keras.ops.switch(
            tf.cast(m.counted, tf.int32), [lambda: mean(losses), lambda: mean(losses) + variance(y)]
        ),
        *(
            pytest.param(each, marks=pytest.mark.campaign)
            for each in (
                lambda m, losses, y: below_50(mean(losses) + m.later * variance(y)),
                lambda m, losses, y: mean(losses + m.later * (y[:, 0] - mean(y[:, 0])) ** 2),
                lambda m, losses, y: mean(losses + m.later * tf.abs(y[:, 0] - mean(y[:, 0]))),
                lambda m, losses, y: mean(losses) + m.later * tf.reduce_sum(y**2),
            )
        ),
    ],
)
def test_a_term_that_begins_later_is_refused_at_once(total):
    problem = refused(with_terms(total))
    assert "a term or branch of the loss of Terms.train_step" in problem


@pytest.mark.parametrize(
    ("total", "is_sum"),
    [
        (
            lambda m, losses, y: tf.cond(
                m.counted > 10,
                lambda: mean(losses) + mean(y),
                lambda: mean(losses) + m.later * mean(y**2) + tf.where(m.flag, mean(y), 0.0),
            ),
            False,
        ),
        (lambda m, losses, y: tf.reduce_sum(losses) + m.later * tf.reduce_sum(y**2), True),
        (
            lambda m, losses, y: (
                (tf.reduce_sum(losses) + m.later * tf.reduce_sum(y**2))
                / tf.cast(2 * tf.shape(y)[0], tf.float32)
            ),
            False,
        ),
    ],
)
def test_means_and_sums_may_begin_later(total, is_sum):
    assert found(with_terms(total)) == Weighting(sums=(is_sum,))


@tf.function
def flooded(loss):
    return tf.abs(loss - 0.01) + 0.01


@tf.function
def with_absolutes(weights, loss):
    return 0.01 * tf.reduce_sum(tf.abs(weights)) + loss


def largest(*numbers):
    return tf.stack(numbers)[tf.argmax(tf.stack(numbers))]


def hardest_of(losses, most):
    return keras.ops.top_k(losses, keras.ops.minimum(keras.ops.shape(losses)[0], most))[0]


def unless_nan(number):
    return tf.where(number != number, 0.0, number)


@pytest.mark.parametrize(
    ("total", "comparison"),
    [
        (lambda m, losses, y: tf.abs(mean(losses) - 0.1) + 0.1, "Abs"),
        (lambda m, losses, y: tf.maximum(0.1, mean(losses)), "Maximum"),
        (lambda m, losses, y: mean(losses) + tf.reduce_sum(tf.nn.relu(mean(y, 0) + 9)), "Relu"),
        (lambda m, losses, y: tf.reduce_max(tf.stack([mean(losses), mean(y) + 9])), "Max"),
        (lambda m, losses, y: mean(losses) * tf.cast(mean(losses) < 40, tf.float32), "Less"),
        (lambda m, losses, y: tf.where((mean(y) > 9) & m.flag, 0.0, mean(losses)), "Greater"),
        (
            lambda m, losses, y: tf.cond(mean(y) < 9, lambda: mean(losses), lambda: mean(y)),
            "Less",
        ),
        (lambda m, losses, y: flooded(mean(losses)), "Abs"),
        (lambda m, losses, y: tf.recompute_grad(lambda x: flooded(mean(x)))(losses), "Abs"),
        (
            lambda m, losses, y: tf.cond(
                m.flag, lambda: flooded(mean(losses)), lambda: mean(losses)
            ),
            "Abs",
        ),
        (lambda m, losses, y: mean(losses) + m.later * tf.maximum(mean(y), 9.0), "Maximum"),
        (lambda m, losses, y: tf.where(tf.reduce_any(losses < 0), 0.0, mean(losses)), "Less"),
        (lambda m, losses, y: mean(tf.minimum(losses, 300 * mean(losses))), "Minimum"),
        (lambda m, losses, y: largest(mean(losses), mean(y) - 9), "ArgMax"),
        (lambda m, losses, y: mean(hardest_of(losses, 24)), "Minimum"),
        (
            lambda m, losses, y: tf.where(tf.size(losses) > 24, 2 * mean(losses), mean(losses)),
            "Greater",
        ),
        (lambda m, losses, y: mean(losses) + tf.nn.softplus(99 * (mean(y) + 9)), "Softplus"),
        *(
            pytest.param(total, comparison, marks=pytest.mark.campaign)
            for total, comparison in (
                (lambda m, losses, y: keras.ops.clip(mean(losses), 0.0, 40.0), "Minimum"),
                (lambda m, losses, y: tf.function(lambda: tf.minimum(mean(y), 9.0))(), "Minimum"),
                (lambda m, losses, y: mean(losses) * tf.sign(mean(losses)), "Sign"),
                (
                    lambda m, losses, y: mean(
                        tf.cast(losses < 300 * mean(losses), tf.float32) * losses
                    ),
                    "Less",
                ),
                (
                    lambda m, losses, y: tf.compat.v1.where(mean(y) > 9, 0.0, mean(losses)),
                    "Greater",
                ),
            )
        ),
    ],
)
def test_a_number_of_the_whole_batch_that_is_compared_is_refused(total, comparison):
    assert f"a number of the whole batch is compared ({comparison};" in refused(with_terms(total))


@pytest.mark.parametrize(
    "total",
    [
        lambda m, losses, y: tf.where(tf.math.is_finite(mean(losses)), mean(losses), 0.0),
        lambda m, losses, y: (
            tf.reduce_sum(losses) / tf.maximum(1.0, tf.cast(tf.size(losses), tf.float32))
        ),
        lambda m, losses, y: mean(tf.vectorized_map(lambda loss: tf.abs(loss - 1), losses)),
        lambda m, losses, y: mean(tf.map_fn(lambda loss: tf.abs(loss - 1), losses)),
        lambda m, losses, y: mean(losses) + tf.stop_gradient(tf.abs(mean(losses) - 9)),
        lambda m, losses, y: with_absolutes(m.trainable_variables[0].value, mean(losses)),
        lambda m, losses, y: (
            tf.reduce_sum(losses) / tf.maximum(tf.reduce_sum(tf.ones_like(losses)), 1e-8)
        ),
        lambda m, losses, y: unless_nan(mean(losses)),
        lambda m, losses, y: tf.cond(m.labelled > 0, lambda: mean(losses), lambda: 0.0),
        lambda m, losses, y: keras.losses.Hinge()(m.signs, y),
    ],
    ids=[
        "finite",
        "size",
        "vectorized_map",
        "map_fn",
        "no gradient",
        "of weights",
        "ones",
        "NaN",
        "empty",
        "hinge",
    ],
)
def test_comparisons_of_samples_sizes_and_weights_are_accepted(total):
    assert found(with_terms(total)) == Weighting()


def test_a_term_without_a_gradient_at_the_first_weights_is_refused():
    built = with_terms(lambda m, losses, y: mean(losses) + 3 * mean(y[:, 0] * y[:, 1]) ** 2)
    kernel = built.layers[-1].kernel
    kernel.assign(tf.zeros_like(kernel))
    assert refused(built).startswith("the loss, with other weights, of Terms.train_step")
    np.testing.assert_array_equal(kernel, np.zeros_like(kernel))


def with_gradient(change):
    """Returns a layer that leaves what it gets, but changes its gradient."""
    return L.Lambda(tf.custom_gradient(lambda x: (tf.identity(x), change)))


def test_gradients_inside_a_function_must_change_by_the_same_factor_whatever_their_size():
    clipping = with_gradient(lambda upstream: tf.clip_by_value(upstream, -1.0, 1.0))
    assert "with a gradient of its own (tf.custom_gradient)" in refused(model("mse", clipping))
    reversing = with_gradient(lambda upstream: -upstream)
    assert found(model("mse", reversing, L.Activation("silu"))) == Weighting()


def test_gradients_of_samples_may_be_clipped_inside_a_function_if_losses_are_summed():
    clipping = with_gradient(lambda upstream: tf.clip_by_value(upstream, -1.0, 1.0))
    assert found(model(summed, clipping)) == Weighting(sums=(True,))


def test_metrics_in_the_tape_keep_their_values():
    counts = keras.metrics.AUC()
    total = lambda m, losses, y: (counts.update_state(tf.round(tf.sigmoid(y)), tf.sigmoid(y)),  # noqa: E731
                                  mean(losses))[1]  # fmt: skip
    assert found(with_terms(total)) == Weighting()


ORDERS = {
    "shuffle": lambda n: tf.random.shuffle(tf.range(n)),
    "of_keras": lambda n: keras.random.shuffle(tf.range(n)),
    "uniform": lambda n: tf.argsort(tf.random.uniform([n])),
    "descending": lambda n: tf.argsort(tf.random.uniform([n]), direction="DESCENDING"),
    "normal": lambda n: tf.argsort(tf.random.normal([n, 1]), axis=0)[:, 0],
    "top_k": lambda n: tf.math.top_k(keras.random.uniform((n,)), n).indices,
    "categorical": lambda n: tf.random.categorical(tf.zeros((1, n)), n)[0],
}


def test_a_random_order_mixes_samples_while_noise_is_alike():
    @tf.function
    def drawn(n):
        with same_noise():
            return {name: order(n) for name, order in ORDERS.items()}

    for name, order in drawn(tf.constant(ROWS)).items():
        steps = np.diff(order.numpy())
        assert steps.min() < 0 < steps.max(), name


def test_samples_that_are_mixed_by_a_random_order_are_refused():
    def total(m, losses, y):
        other = tf.gather(y, tf.random.shuffle(tf.range(tf.shape(y)[0])))
        return mean(losses) + mean(y[:, 0] * other[:, 1])

    assert "neither a mean nor a sum" in refused(with_terms(total), samples(rows=SAMPLES))


def test_samples_may_change_places_and_features_may_be_mixed():
    def total(m, losses, y):
        return mean(tf.random.shuffle(losses)) + mean(tf.gather(y, [1, 0], axis=1) ** 2)

    assert found(with_terms(total)) == Weighting()


def test_a_model_without_trainable_weights_is_named():
    built = model("mse")
    built.trainable = False
    with pytest.raises(ValueError, match="has no trainable weights"):
        TrainStep.of_model(built)


@pytest.mark.parametrize(("dtype", "exact"), [("float32", True), ("float64", False)])
def test_double_precision_shows_small_differences(dtype, exact):
    def nearly_a_mean(y, y_pred):
        return tf.reduce_mean(tf.square(y - y_pred)) + tf.math.reduce_variance(0.01 * y_pred)

    floatx = keras.config.floatx()
    keras.config.set_floatx(dtype)
    try:
        built = model(nearly_a_mean, regularizer="l2", dtype=dtype)
        weighting = found(built, samples(dtype))
    finally:
        keras.config.set_floatx(floatx)
    assert (weighting == Weighting()) is exact


def test_gradients_of_samples_may_cancel_each_other():
    built = model("mse")
    rng = np.random.default_rng(0)
    x = np.repeat(rng.normal(size=(8, 5)), 2, axis=0).astype("f4")
    errors = rng.normal(size=(8, 1, 2)) * [[[1.0], [-1.0]]]
    batch = tf.constant(x), tf.constant(built(x).numpy() + errors.reshape(16, 2).astype("f4"))
    assert found(built, batch) == Weighting()


def with_variance(y, y_pred):
    return tf.reduce_mean(tf.square(y - y_pred)) + tf.math.reduce_variance(y_pred)


@pytest.mark.parametrize(("loss", "is_mean"), [("mse", True), (with_variance, False)])
def test_biases_of_convolutions_may_be_summed_over_many_positions(loss, is_mean):
    keras.utils.set_random_seed(0)
    layers = [L.Conv2D(8, 3), L.GlobalAveragePooling2D()]
    built = keras.Sequential([L.Input((224, 224, 1)), *layers])
    built.compile("sgd", loss)
    rng = np.random.default_rng(0)
    images = rng.normal(size=(SAMPLES, 224, 224, 1)) + rng.normal(size=(SAMPLES, 1, 1, 1))
    batch = tf.constant(images, "float32"), tf.constant(rng.normal(size=(SAMPLES, 8)), "float32")
    weighting = found(built, batch)
    assert (weighting == Weighting()) is is_mean


class InCondition(OwnStep):
    def update(self, loss, gradients):
        tf.cond(loss > 0, lambda: self.optimizer.apply(gradients, self.trainable_variables),
                lambda: None)  # fmt: skip


def test_gradients_that_are_applied_in_an_inner_graph_are_refused():
    with pytest.raises(ValueError, match=r"called in a tf\.function, tf\.cond or tf\.while_loop"):
        found(own(InCondition))


def test_eager_steps_apply_in_no_inner_graph():
    variable = keras.Variable([1.0])
    optimizer = keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD(1.0))
    optimizer.build([variable])
    apply = lambda: optimizer.apply([tf.constant([2.0**15])], [variable])  # noqa: E731
    with compat.intercepted_apply(lambda gradients, proceed: proceed(gradients)):
        apply()
        np.testing.assert_allclose(variable.numpy(), [0.0])
        with pytest.raises(ValueError, match="inside the train step"):
            tf.function(apply)()


def test_gradients_that_are_zero_prove_nothing_but_are_accepted(caplog):
    built = model(lambda y, y_pred: tf.reduce_mean(tf.nn.relu(y_pred - 100.0)))
    assert found(built) == Weighting()
    assert "first samples are zero" in caplog.text


def test_gradients_that_are_not_finite_prove_nothing_but_are_accepted(caplog):
    built = model(lambda y, y_pred: tf.reduce_mean(y_pred) / 0.0)
    assert found(built) == Weighting()
    assert "not finite" in caplog.text


class Fixed(L.Layer):
    """A function of rows that works for batches of `ROWS` only."""

    def __init__(self, function, inner=None):
        super().__init__(name="fixed")
        self.function, self.inner = function, inner

    def call(self, x):
        return self.function(x) if self.inner is None else self.inner(self.function(x))


def adds_ones(x):
    return x + tf.ones((ROWS, 1))


def of_fixed_size(y, y_pred):
    return tf.reduce_mean(tf.abs(tf.reshape(y - y_pred, (ROWS, 2))))


@pytest.mark.parametrize(
    ("built", "where"),
    [
        (lambda: model("mse", Fixed(lambda x: keras.ops.reshape(x, (ROWS, 2, 4))), L.Flatten()),
         "layer 'fixed'"),
        (lambda: model("mse", Fixed(tf.identity, L.Lambda(adds_ones, name="one"))),
         "layer 'one' in layer 'fixed'"),
        (lambda: model(of_fixed_size), r"Sequential \(of_fixed_size\)"),
    ],
)  # fmt: skip
def test_what_fixes_the_size_of_a_batch_is_named(built, where):
    with pytest.raises(ValueError, match=rf"^{where} fixes the size of a batch, but the sizes of"):
        found(built())


def test_keras_does_not_enforce_the_batch_size_of_an_input():
    hidden = [L.Dense(8), L.Reshape((2, 4)), L.SimpleRNN(3), L.Dense(2)]
    built = keras.Sequential([L.Input((5,), batch_size=ROWS), *hidden])
    built.compile("sgd", "mse")
    assert found(built) == Weighting()


def hardest(y, y_pred):
    return tf.reduce_mean(tf.math.top_k(tf.reduce_mean(tf.abs(y - y_pred), -1), 8).values)


def test_a_loss_that_needs_many_samples_is_named():
    with pytest.raises(ValueError, match=r"^Sequential \(hardest\) works for 9 samples, but not"):
        found(model(hardest))


def test_an_error_that_has_to_do_with_no_size_stays_as_it_is():
    built = model("mse", Fixed(lambda x: tf.debugging.check_numerics(x / 0.0, "not a number")))
    with pytest.raises(tf.errors.InvalidArgumentError, match="not a number"):
        found(built)


@pytest.mark.parametrize(("total", "workers"), [(64, 3), (7, 3), (2, 2), (100, 7)])
def test_uneven_sizes_add_up(total, workers):
    sizes = uneven_sizes(total, workers)
    assert sum(sizes) == total
    assert len(sizes) == workers
    assert list(sizes) == sorted(sizes)
