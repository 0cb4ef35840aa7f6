"""Public scripts of the corpus: their names, and the few changes that each needs.

The texts are those of github.com/keras-team/keras-io at commit ac7f64c and of
github.com/tensorflow/docs at commit 7c36502; none is kept here.
"""

from __future__ import annotations

from dataclasses import dataclass

SYNCHRONIZED = ("BatchNormalization(", "BatchNormalization(synchronized=True, ")


@dataclass(frozen=True)
class Script:
    """A public script.

    Args:
        path: Path below the folder of the scripts.
        global_batch_size: X, the batch size of the script or a smaller one.
        scopes: First and last statement, by patterns, of what is put under `strategy.scope`.
        edits: Further changes for lbbsp, which count.
        cuts: Parts of the text, from one pattern up to another, that are left out: they need other
            frameworks, or only show errors.
        small: Replacements that make the data or the model small, which do not count.
        fits: Expressions whose `fit` is balanced; by default all calls with `epochs`.
        data: Recipe of `corpus_data` for the files that the script reads.
        words: Remark for the table.
    """

    path: str
    global_batch_size: int
    scopes: tuple[tuple[str, str | None], ...] = ()
    edits: tuple[tuple[str, str], ...] = ()
    cuts: tuple[tuple[str, str], ...] = ()
    small: tuple[tuple[str, str], ...] = ()
    fits: tuple[str, ...] = ()
    data: str = ""
    words: str = ""

    @property
    def name(self) -> str:
        """Name of the file without its suffix."""
        return self.path.rpartition("/")[2].partition(".")[0]

    @property
    def batch_norm(self) -> bool:
        """Whether the script synchronises batch normalisation."""
        return any("synchroni" in after for _, after in self.edits)


SCRIPTS = (
    Script(
        "examples/vision/mnist_convnet.py",
        32,
        scopes=(("model = keras.Sequential(", "model.compile("),),
    ),
    Script(
        "examples/vision/autoencoder.py",
        32,
        scopes=(("input = layers.Input", "autoencoder.compile("),),
    ),
    Script(
        "examples/vision/knowledge_distillation.py",
        32,
        scopes=(
            ("teacher = keras.Sequential(", "student_scratch = "),
            ("teacher.compile(", None),
            ("distiller = Distiller(", "distiller.compile("),
            ("student_scratch.compile(", None),
        ),
        small=(("Conv2D(256,", "Conv2D(16,"), ("Conv2D(512,", "Conv2D(32,")),
    ),
    Script(
        "examples/vision/siamese_contrastive.py",
        16,
        scopes=(
            ("input = keras.layers.Input", "output_layer ="),
            ("siamese = ", None),
            ("siamese.compile(", None),
        ),
        edits=(SYNCHRONIZED,),
        small=(("30000", "50"),),
    ),
    Script(
        "examples/generative/vae.py",
        32,
        scopes=(
            ("encoder_inputs = ", "encoder = "),
            ("latent_inputs = ", "decoder = "),
            ("vae = VAE(", "vae.compile("),
        ),
        small=(("n=30", "n=2"),),
    ),
    Script(
        "examples/generative/dcgan_overriding_train_step.py",
        16,
        scopes=(
            ("discriminator = keras.Sequential(", None),
            ("generator = keras.Sequential(", None),
            ("gan = GAN(", "gan.compile("),
        ),
        small=(("Transpose(256,", "Transpose(32,"), ("Transpose(512,", "Transpose(32,")),
        data="celeba",
    ),
    Script(
        "examples/generative/wgan_gp.py",
        32,
        scopes=(
            ("d_model = get_", None),
            ("g_model = get_", None),
            ("generator_optimizer = ", None),
            ("discriminator_optimizer = ", None),
            ("wgan = WGAN(", "wgan.compile("),
        ),
        edits=(SYNCHRONIZED,),
        small=(
            ("        512,", "        32,"),
            ("        256,", "        32,"),
            ('"float32"', '"float64"'),
            ("4 * 256", "4 * 32"),
            ("4, 256", "4, 32"),
        ),
    ),
    Script(
        "examples/generative/conditional_gan.py",
        32,
        scopes=(
            ("discriminator = keras.Sequential(", None),
            ("generator = keras.Sequential(", None),
            ("cond_gan = ", "cond_gan.compile("),
        ),
    ),
    Script(
        "examples/vision/captcha_ocr.py",
        16,
        scopes=(("model = build_model()", None),),
        data="captchas",
    ),
    Script(
        "examples/vision/mixup.py",
        32,
        scopes=(("model = get_training_model()", "model.compile("),),
        small=(("val_samples = 2000", "val_samples = 20"), ('"float32"', '"float64"')),
    ),
    Script(
        "examples/vision/image_classification_from_scratch.py",
        16,
        scopes=(("model = make_model(", None), ("model.compile(", None)),
        edits=(SYNCHRONIZED,),
        small=(
            ("(180, 180)", "(48, 48)"),
            ("[256, 512, 728]", "[16, 24]"),
            ("1024", "32"),
            ("Conv2D(128", "Conv2D(16"),
            ("batch_size = 128", "batch_size = 16"),
        ),
        data="pets",
    ),
    Script(
        "examples/vision/attention_mil_classification.py",
        8,
        scopes=(("models = [create_model", None), ("model.compile(", None)),
        small=(("= 1000", "= 30"), ("= 300", "= 20")),
        words="batches of 8 bags instead of one",
    ),
    Script(
        "examples/vision/conv_lstm.py",
        5,
        scopes=(("inp = layers.Input", "model.compile("),),
        edits=(SYNCHRONIZED,),
        small=(("filters=64", "filters=4"),),
        data="moving_mnist",
    ),
    Script(
        "examples/vision/mlp_image_classification.py",
        32,
        scopes=(
            ("data_augmentation = ", None),
            ("mlpmixer_blocks = ", "mlpmixer_classifier ="),
            ("fnet_blocks = ", "fnet_classifier ="),
            ("gmlp_blocks = ", "gmlp_classifier ="),
            ("optimizer = ", "model.compile("),
        ),
        small=(
            ("embedding_dim = 256", "embedding_dim = 16"),
            ("num_blocks = 4", "num_blocks = 1"),
            ("image_size = 64", "image_size = 32"),
        ),
        fits=("model",),
    ),
    Script(
        "examples/vision/metric_learning.py",
        10,
        scopes=(("inputs = layers.Input", "model.compile("),),
        small=(
            ("50000", "75"),
            ("num_batches=1000", "num_batches=6"),
            ("self.num_batches", "self.batches"),
        ),
    ),
    Script(
        "examples/vision/oxford_pets_image_segmentation.py",
        16,
        scopes=(("model = get_model(", None), ("model.compile(", None)),
        edits=(SYNCHRONIZED,),
        small=(
            ("(160, 160)", "(32, 32)"),
            ("val_samples = 1000", "val_samples = 12"),
            ("batch_size = 32", "batch_size = 16"),
            ("[64, 128, 256]", "[16, 24]"),
            ("[256, 128, 64, 32]", "[24, 16, 8]"),
        ),
        data="oxford_pets",
    ),
    Script(
        "examples/vision/semisupervised_simclr.py",
        20,
        scopes=(
            ("baseline_model = ", "baseline_model.compile("),
            ("pretraining_model = ", "pretraining_model.compile("),
            ("finetuning_model = ", "finetuning_model.compile("),
        ),
        small=(
            ("= 100000", "= 60"),
            ("= 5000", "= 60"),
            ("= 525", "= 40"),
            ("width = 128", "width = 8"),
            ("batch_shape=[batch_size, 1]", "batch_shape=[batch_size, 1], dtype=tf.float64"),
        ),
        data="stl10",
    ),
    Script(
        "examples/timeseries/timeseries_classification_transformer.py",
        32,
        scopes=(("model = build_model(", "model.compile("),),
        small=(
            ("num_transformer_blocks=4", "num_transformer_blocks=1"),
            ("head_size=256", "head_size=16"),
        ),
        data="ford_a",
    ),
    Script(
        "examples/timeseries/timeseries_weather_forecasting.py",
        32,
        scopes=(("inputs = keras.layers.Input", "model.compile("),),
        small=(
            ("batch_size = 256", "batch_size = 32"),
            ("past = 720", "past = 60"),
            ("future = 72", "future = 6"),
        ),
        data="jena",
    ),
    Script(
        "examples/nlp/bidirectional_lstm_imdb.py",
        32,
        scopes=(("inputs = keras.Input", "model = keras.Model("), ("model.compile(", None)),
        small=(
            ("maxlen = 200", "maxlen = 30"),
            ("max_features = 20000", "max_features = 500"),
            ("64", "16"),
            ("128", "16"),
        ),
    ),
    Script(
        "examples/nlp/addition_rnn.py",
        32,
        scopes=(("model = keras.Sequential(", "model.compile("),),
        small=(
            ("TRAINING_SIZE = 50000", "TRAINING_SIZE = 120"),
            ("epochs = 30", "epochs = 4"),
            ("LSTM(128", "LSTM(16"),
        ),
    ),
    Script(
        "examples/nlp/lstm_seq2seq.py",
        32,
        scopes=(("encoder_inputs = keras.Input", "model = keras.Model("), ("model.compile(", None)),
        small=(("latent_dim = 256", "latent_dim = 16"), ("range(20)", "range(2)")),
        data="french",
    ),
    Script(
        "examples/nlp/text_classification_from_scratch.py",
        16,
        scopes=(("inputs = keras.Input(shape=(None,)", "model.compile("),),
        small=(
            ("sequence_length = 500", "sequence_length = 60"),
            ("(128", "(16"),
            ("embedding_dim = 128", "embedding_dim = 16"),
            ("batch_size = 32", "batch_size = 16"),
        ),
        data="reviews",
    ),
    Script(
        "examples/structured_data/imbalanced_classification.py",
        64,
        scopes=(
            ("model = keras.Sequential(", None),
            ("metrics = [", None),
            ("model.compile(", None),
        ),
        small=(("/Users/fchollet/Downloads/", "data/"),),
        data="credit_cards",
    ),
    Script(
        "examples/structured_data/collaborative_filtering_movielens.py",
        32,
        scopes=(("model = RecommenderNet(", "model.compile("),),
        data="movielens",
    ),
    Script(
        "examples/structured_data/structured_data_classification_from_scratch.py",
        32,
        scopes=(("sex = keras.Input", "model.compile("),),
        data="heart",
    ),
    Script(
        "examples/keras_recipes/antirectifier.py",
        32,
        scopes=(("model = keras.Sequential(", "model.compile("),),
    ),
    Script(
        "examples/keras_recipes/endpoint_layer_pattern.py",
        32,
        scopes=(
            ("logits = keras.layers.Dense", None),
            ("targets = keras.Input", "model = keras.Model("),
            ("model = LogReg()", None),
            ("model.compile(", None),
        ),
        small=(("1000,", "75,"),),
    ),
    Script(
        "examples/keras_recipes/trainer_pattern.py",
        32,
        scopes=(
            ("model_a = ", "trainer_2 = "),
            ("trainer_1.compile(", None),
            ("trainer_2.compile(", None),
        ),
    ),
    Script(
        "examples/keras_recipes/subclassing_conv_layers.py",
        32,
        scopes=(("model = keras.Sequential(", None), ("model.compile(", None)),
    ),
    Script(
        "guides/custom_train_step_in_tensorflow.py",
        32,
        scopes=(
            ("inputs = keras.Input", "model.compile("),
            ("discriminator = keras.Seq", None),
            ("generator = keras.Seq", None),
            ("gan = GAN(", "gan.compile("),
        ),
        small=(
            ("(1000,", "(75,"),
            ("batch_size = 64", "batch_size = 32"),
            ('"float32"', '"float64"'),
            ("(batch_size, 1))", "(batch_size, 1), tf.float64)"),
        ),
    ),
    Script(
        "guides/writing_your_own_callbacks.py",
        32,
        scopes=(("model = get_model()", None),),
    ),
    Script(
        "guides/training_with_built_in_methods.py",
        32,
        scopes=(
            ("inputs = keras.Input", "model = keras.Model("),
            ("model = get_compiled_model()", None),
            ("model = get_uncompiled_model()", None),
            ("model.compile(", None),
        ),
        cuts=(
            ("import torch", "import tensorflow"),
            ("### Handling losses and", "### Automatically"),
            ("## Training & evaluation using PyTorch", "## Using sample weighting"),
            ("## Passing data to multi-input", "## Using callbacks"),
            ("## Using learning rate schedules", "## Visualizing loss"),
        ),
        small=(("60000", "75"), ("10000", "20")),
    ),
    Script(
        "guides/functional_api.py",
        32,
        scopes=(
            ("inputs = keras.Input(shape=(784,))", "model = "),
            ("model.compile(", None),
            ("title_input = keras.Input", "model = keras.Model("),
            ("inputs = keras.Input(shape=(32, 32, 3)", "model = keras.Model("),
        ),
        small=(("60000", "75"), ("10000", "20"), ("1280", "75")),
    ),
    Script(
        "guides/making_new_layers_and_models_via_subclassing.py",
        32,
        scopes=(("vae = VariationalAutoEncoder(", "vae.compile("),),
        small=(("60000", "75"),),
    ),
    Script(
        "guides/transfer_learning.py",
        16,
        scopes=(
            ("base_model = keras.applications", "model = keras.Model("),
            ("model.compile(", None),
        ),
        cuts=(("## Freezing layers", "## An end-to-end example"),),
        edits=(
            (
                "\nbase_model.trainable = True",
                "\nbase_model.trainable = True\nlbbsp_tf.synchronize_batch_norm(model)",
            ),
        ),
        small=(("150, 150", "72, 72"), ("batch_size = 64", "batch_size = 16")),
        data="cats_vs_dogs",
        words="Xception with random weights, synchronised batch normalisation",
    ),
    Script(
        "site/en/tutorials/quickstart/beginner.ipynb",
        32,
        scopes=(("model = tf.keras.models.Sequential(", None), ("model.compile(", None)),
    ),
    Script(
        "site/en/tutorials/keras/classification.ipynb",
        32,
        scopes=(("model = tf.keras.Sequential(", None), ("model.compile(", None)),
    ),
    Script(
        "site/en/tutorials/images/cnn.ipynb",
        32,
        scopes=(("model = models.Sequential(", "model.compile("),),
    ),
    Script(
        "site/en/tutorials/keras/regression.ipynb",
        32,
        scopes=(
            ("horsepower_normalizer = layers", None),
            ("normalizer = tf.keras.layers", None),
            ("horsepower_model = tf.keras", None),
            ("horsepower_model.compile(", None),
            ("linear_model = tf.keras", None),
            ("linear_model.compile(", None),
            ("dnn_horsepower_model = ", None),
            ("dnn_model = build", None),
        ),
        data="auto_mpg",
    ),
)
