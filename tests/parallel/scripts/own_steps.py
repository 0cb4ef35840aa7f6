"""Models without call() in the manner of keras.io: their own steps train models that they hold."""

import keras
import tensorflow as tf

L = keras.layers


def dense(*sizes):
    return keras.Sequential([L.Input(sizes[:1]), *(L.Dense(size) for size in sizes[1:])])


def adam():
    return keras.optimizers.Adam(0.01)


class Variational(keras.Model):
    """A variational autoencoder with metrics of its own."""

    def __init__(self):
        super().__init__()
        self.encoder, self.decoder = dense(4, 4), dense(2, 4)
        self.total = keras.metrics.Mean(name="total")
        self.seed_generator = keras.random.SeedGenerator(1)
        self.compile(adam())

    @property
    def metrics(self):
        return [self.total]

    def train_step(self, data):
        with tf.GradientTape() as tape:
            mean, variance = tf.split(self.encoder(data), 2, axis=-1)
            noise = keras.random.normal(tf.shape(mean), seed=self.seed_generator)
            decoded = self.decoder(mean + tf.exp(0.5 * variance) * noise)
            divergence = tf.exp(variance) + mean**2 - 1 - variance
            total = tf.reduce_mean((data - decoded) ** 2) + tf.reduce_mean(divergence)
        gradients = tape.gradient(total, self.trainable_weights)
        self.optimizer.apply_gradients(zip(gradients, self.trainable_weights, strict=True))
        self.total.update_state(total)
        return {"loss": self.total.result()}


class Adversarial(keras.Model):
    """Two models with an optimizer each, compiled by a compile() of its own; logs tensors."""

    def __init__(self):
        super().__init__()
        self.critic, self.generator = dense(4, 1), dense(3, 4)
        self.compile(adam(), adam())

    def compile(self, critic_optimizer, generator_optimizer):
        super().compile()
        self.critic_optimizer, self.generator_optimizer = critic_optimizer, generator_optimizer

    def train_step(self, data):
        noise = tf.random.normal((tf.shape(data)[0], 3))
        with tf.GradientTape(persistent=True) as tape:
            made = self.critic(self.generator(noise))
            critic_loss = tf.reduce_mean(tf.nn.softplus(made) + tf.nn.softplus(-self.critic(data)))
            generator_loss = tf.reduce_mean(tf.nn.softplus(-made))
        for loss, model, optimizer in (
            (critic_loss, self.critic, self.critic_optimizer),
            (generator_loss, self.generator, self.generator_optimizer),
        ):
            gradients = tape.gradient(loss, model.trainable_weights)
            optimizer.apply_gradients(zip(gradients, model.trainable_weights, strict=True))
        return {"critic_loss": critic_loss, "generator_loss": generator_loss}


class Siamese(keras.Model):
    """One network that is applied to two inputs."""

    def __init__(self, network):
        super().__init__()
        self.network, self.tracker = network, keras.metrics.Mean(name="loss")
        self.compile(adam())

    @property
    def metrics(self):
        return [self.tracker]

    def train_step(self, data):
        x, _ = data
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean((self.network(x) - self.network(x[:, ::-1])) ** 2)
        gradients = tape.gradient(loss, self.network.trainable_weights)
        self.optimizer.apply_gradients(zip(gradients, self.network.trainable_weights, strict=True))
        self.tracker.update_state(loss)
        return {"loss": self.tracker.result()}


class Distiller(keras.Model):
    """A student that learns from a teacher, with compiled metrics, logged in a dictionary."""

    def __init__(self):
        super().__init__()
        self.student, self.teacher = dense(4, 1), dense(4, 3, 1)
        self.compile(adam(), metrics=["mae"])

    def train_step(self, data):
        x, y = data
        with tf.GradientTape() as tape:
            y_pred = self.student(x, training=True)
            loss = tf.reduce_mean((y_pred - y) ** 2 + (y_pred - self.teacher(x)) ** 2)
        gradients = tape.gradient(loss, self.student.trainable_weights)
        self.optimizer.apply_gradients(zip(gradients, self.student.trainable_weights, strict=True))
        self.compute_metrics(x, y, y_pred)
        return {metric.name: metric.result() for metric in self.metrics} | {"student": loss}


def only_x(x, y):
    return (x,)


def both(x, y):
    return x, y


MODELS = {
    "vae": (Variational, only_x),
    "gan": (Adversarial, only_x),
    "siamese": (lambda: Siamese(dense(4, 2)), both),
    "distiller": (Distiller, both),
    "built_in_the_step": (lambda: Siamese(keras.Sequential([L.Dense(2)])), both),
}
