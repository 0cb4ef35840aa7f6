"""While a loss is proven, all samples get the same noise, and the step prints nothing."""

import keras
import numpy as np
import pytest
import tensorflow as tf

from lbbsp_tf import compat
from lbbsp_tf.compat.random import Noise, noise_of
from lbbsp_tf.exactness.proof import Refusal, prove
from lbbsp_tf.step.train_step import TrainStep, Weighting

RANDOM, SEED, COLUMNS = tf.random, (1, 2), 3
KINDS = 7
CATEGORIES = lambda rows: tf.zeros((rows, KINDS))  # noqa: E731

# Draws of `rows` samples, by the names under which Keras and TensorFlow have the functions.
DRAWS = {
    "keras.beta": lambda rows: keras.random.beta((rows, COLUMNS), 2.0, 1.5),
    "keras.binomial": lambda rows: keras.random.binomial((rows, COLUMNS), 1, 0.4),
    "keras.categorical": lambda rows: keras.random.categorical(CATEGORIES(rows), COLUMNS),
    "keras.dropout": lambda rows: keras.random.dropout(tf.ones((rows, COLUMNS)), 0.5),
    "keras.gamma": lambda rows: keras.random.gamma((rows, COLUMNS), 2.0),
    "keras.normal": lambda rows: keras.random.normal((rows, COLUMNS)),
    "keras.randint": lambda rows: keras.random.randint((rows, COLUMNS), 0, 50),
    "keras.truncated_normal": lambda rows: keras.random.truncated_normal((rows, COLUMNS)),
    "keras.uniform": lambda rows: keras.random.uniform((rows, COLUMNS)),
    "tf.categorical": lambda rows: RANDOM.categorical(CATEGORIES(rows), COLUMNS),
    "tf.gamma": lambda rows: RANDOM.gamma((rows,), [2.0, 1.0, 3.0]),
    "tf.normal": lambda rows: RANDOM.normal((rows, COLUMNS)),
    "tf.poisson": lambda rows: RANDOM.poisson((rows, COLUMNS), 1.4),
    "tf.truncated_normal": lambda rows: RANDOM.truncated_normal((rows, COLUMNS)),
    "tf.uniform": lambda rows: RANDOM.uniform((rows, COLUMNS), 0, 50, tf.int32),
    "tf.stateless_binomial": lambda rows: RANDOM.stateless_binomial((rows, COLUMNS), SEED, 1, 0.4),
    "tf.stateless_categorical": (
        lambda rows: RANDOM.stateless_categorical(CATEGORIES(rows), COLUMNS, SEED)
    ),
    "tf.stateless_gamma": lambda rows: RANDOM.stateless_gamma((rows, COLUMNS), SEED, 2.0),
    "tf.stateless_normal": lambda rows: RANDOM.stateless_normal((rows, COLUMNS), SEED),
    "tf.stateless_parameterized_truncated_normal": (
        lambda rows: RANDOM.stateless_parameterized_truncated_normal(
            (rows, COLUMNS), SEED, 0.0, 1.0, -0.2, 2.0
        )
    ),
    "tf.stateless_poisson": lambda rows: RANDOM.stateless_poisson((rows, COLUMNS), SEED, 1.4),
    "tf.stateless_truncated_normal": (
        lambda rows: RANDOM.stateless_truncated_normal((rows, COLUMNS), SEED)
    ),
    "tf.stateless_uniform": lambda rows: RANDOM.stateless_uniform((rows, COLUMNS), SEED),
}
NOT_DRAWN_BY_SAMPLE = {
    *("keras.Generator", "keras.RandomSeedGenerator", "keras.SeedGenerator", "keras.shuffle"),
    *("tf.shuffle", "tf.set_seed", "tf.get_global_generator", "tf.set_global_generator"),
    *("tf.create_rng_state", "tf.fold_in", "tf.split", "tf.Generator", "tf.Algorithm"),
    # Candidates of a sampled softmax are those of a batch.
    *("tf.all_candidate_sampler", "tf.fixed_unigram_candidate_sampler"),
    *("tf.learned_unigram_candidate_sampler", "tf.log_uniform_candidate_sampler"),
    "tf.uniform_candidate_sampler",
}


def test_the_table_has_all_random_functions():
    public = {
        f"{prefix}.{name}"
        for prefix, module in (("keras", keras.random), ("tf", tf.random))
        for name in dir(module)
        if name[0] != "_" and callable(getattr(module, name))
    }
    assert public - DRAWS.keys() - NOT_DRAWN_BY_SAMPLE == set()


@pytest.mark.parametrize("name", DRAWS)
def test_all_samples_of_batches_of_any_size_get_the_same_noise(name):
    keras.utils.set_random_seed(0)

    @tf.function(autograph=False)
    def draw(rows):
        with compat.same_noise():
            return DRAWS[name](rows)

    def drawn(rows):
        state = compat.global_random_state()
        before = tf.identity(state.value)
        found = draw(tf.constant(rows)).numpy()
        state.assign(before)  # as the proof does
        return found

    keras.random.uniform((1,))  # creates the state
    few = drawn(4)
    assert (few == few[0]).all()
    assert (drawn(6)[:4] == few).all()


class Noisy(keras.Model):
    """A step with noise, and the mean of its losses by their weights, or by their number."""

    def __init__(self, draw, is_mean):
        super().__init__()
        self.dense = keras.layers.Dense(1, use_bias=False)
        self.draw, self.is_mean = draw, is_mean

    def call(self, x):
        return self.dense(x)

    def learn(self, tape, loss):
        variables = self.trainable_variables
        self.optimizer.apply(tape.gradient(loss, variables), variables)
        return {"loss": loss}

    def train_step(self, data):
        x, y, weight = data
        noise = tf.cast(self.draw(tf.shape(x)[0]), x.dtype)
        with tf.GradientTape() as tape:
            errors = (self(x * (1 + noise)) - y)[:, 0] ** 2
            total = tf.cast(tf.size(weight), x.dtype) if self.is_mean else tf.reduce_sum(weight)
            loss = tf.reduce_sum(errors * weight) / total
        return self.learn(tape, loss)


class Masked(Noisy):
    """A mean over all tokens, or over those that noise has chosen."""

    def train_step(self, data):
        x, y, _ = data
        shape = tf.stack([tf.shape(x)[0], COLUMNS])
        chosen = tf.cast(self.draw(shape) < 0.4, x.dtype)
        with tf.GradientTape() as tape:
            errors = (self(x) - y) ** 2 * chosen
            count = tf.size(errors) if self.is_mean else tf.reduce_sum(chosen)
            loss = tf.reduce_sum(errors) / tf.cast(count, x.dtype)
        return self.learn(tape, loss)


class Paired(Noisy):
    """Compares each sample with one that noise has chosen, or with itself."""

    def train_step(self, data):
        x, y, _ = data
        rows = tf.shape(x)[0]
        chosen = self.draw([rows], 0, rows, tf.int32)
        with tf.GradientTape() as tape:
            other = y if self.is_mean else tf.gather(y, chosen)
            loss = tf.reduce_mean((self(x) - other) ** 2)
        return self.learn(tape, loss)


@pytest.mark.parametrize("is_mean", [True, False])
def test_samples_that_are_paired_by_noise_are_noticed(is_mean):
    check(Paired(tf.random.uniform, is_mean))


def flat(shape):
    """Draws a number for each token, in one axis."""
    return tf.reshape(tf.random.uniform([tf.reduce_prod(shape)]), shape)


@pytest.mark.parametrize("is_mean", [True, False])
@pytest.mark.parametrize("draw", [keras.random.uniform, tf.random.uniform, flat])
def test_noise_that_chooses_what_counts_is_noticed(draw, is_mean):
    check(Masked(draw, is_mean))


@pytest.mark.parametrize("is_mean", [True, False])
@pytest.mark.parametrize(
    "name", ["keras.beta", "keras.binomial", "tf.categorical", "tf.poisson", "tf.uniform"]
)
def test_noise_hides_no_loss_that_is_no_mean(name, is_mean):
    check(Noisy(DRAWS[name], is_mean))


def proven(model):
    keras.utils.set_random_seed(0)
    rng = np.random.default_rng(0)
    x, y, weight = (tf.constant(rng.uniform(size=(9, k)), tf.float32) for k in (COLUMNS, 1, 1))
    model(x)
    model.compile("sgd")
    step = TrainStep.of_model(model)
    return prove(step, tf.distribute.get_strategy(), (x, y, weight[:, 0]))


def check(model, said="neither a mean nor a sum over samples"):
    """Checks that the model's loss is accepted as a mean, or else refused with what is said."""
    found = proven(model)
    if model.is_mean:
        assert found == Weighting()
    else:
        assert isinstance(found, Refusal)
        assert said in found.problem


class Speaking(Noisy):
    """Prints the loss, and writes it as a summary."""

    def train_step(self, data):
        logs = super().train_step(data)
        tf.print("the loss:", logs["loss"])
        tf.summary.write("loss", logs["loss"], step=self.optimizer.iterations.value)
        return logs


def test_the_proof_prints_nothing_and_writes_no_summary(tmp_path, capfd):
    model = Speaking(DRAWS["keras.uniform"], True)
    with tf.summary.create_file_writer(str(tmp_path)).as_default():
        check(model)
    assert "the loss" not in capfd.readouterr().err
    (file,) = tmp_path.iterdir()
    assert len(list(tf.compat.v1.train.summary_iterator(str(file)))) == 1, "its version"


GENERATOR = tf.random.Generator.from_seed(1)


def test_a_generator_that_goes_on_by_samples_is_named():
    model = Noisy(lambda rows: GENERATOR.normal((rows, COLUMNS)), False)
    check(model, "Noisy.train_step draws from a tf.random.Generator, which goes on by the samples")


BY_ROWS = {name: draw for name, draw in DRAWS.items() if name.startswith("keras.")} | {
    "keras.shuffle": lambda rows: keras.random.shuffle(tf.range(rows)),
    "keras.normal of a tensor": lambda rows: keras.random.normal(tf.stack([rows, COLUMNS])),
    "keras.dropout of a shape": lambda rows: keras.random.dropout(
        tf.ones((COLUMNS, rows)), 0.5, (1, None)
    ),
}
OF_A_SHAPE = {
    "shuffled columns": lambda rows: keras.random.shuffle(tf.ones((rows, 1)) * tf.range(40.0), 1),
    "dropout": lambda rows: keras.random.dropout(tf.ones((rows, 40)), 0.5, (1, 40)),
}


def drawn_by_replicas(draw, *args):
    """Returns what two replicas draw in a graph."""

    @tf.function(autograph=False)
    def in_replica(rank, *args):
        with noise_of(Noise(rank)):
            return draw(*args)

    keras.utils.set_random_seed(0)
    state = compat.global_random_state()
    before, found = tf.identity(state.value), []
    for rank in range(2):
        state.assign(before)
        found.append(in_replica(rank, *args).numpy())
    return found


@pytest.mark.parametrize("kind", [tf.int32, tf.int64])
@pytest.mark.parametrize("name", BY_ROWS | OF_A_SHAPE)
def test_noise_without_samples_is_the_same_on_all_replicas(name, kind):
    draw = (BY_ROWS | OF_A_SHAPE)[name]
    fixed, of_other = drawn_by_replicas(lambda: draw(40))
    np.testing.assert_array_equal(fixed, of_other)
    assert len(np.unique(fixed)) > 1, "it is no noise"
    by_sample, of_other = drawn_by_replicas(draw, tf.constant(40, kind))
    differs = by_sample != of_other
    assert differs.any() == (name not in OF_A_SHAPE)
    assert differs.all() or "normal" not in name


def candidates(rows):
    """Draws as a sampled softmax does."""
    labels = tf.zeros((rows, 1), tf.int64)
    found, _, _ = tf.random.uniform_candidate_sampler(labels, 1, COLUMNS, True, 1000)
    return found[None, :] / 1000


def by_numpy(rows):
    noise = tf.numpy_function(lambda rows: np.random.rand(rows, 1), [rows], tf.float64)
    return tf.ensure_shape(noise, (None, 1))


@pytest.mark.parametrize("draw", [candidates, by_numpy, DRAWS["keras.normal"]])
def test_noise_that_cannot_be_held_still_is_told(draw, caplog):
    proven(Noisy(draw, True))
    is_told = "draws random numbers in another way than by keras.random or tf.random" in caplog.text
    assert is_told == (draw is not DRAWS["keras.normal"])
