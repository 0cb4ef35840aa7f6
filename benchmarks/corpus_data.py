"""Synthetic data in the shapes, types and files of the data sets that the scripts download."""

from __future__ import annotations

import sys
import zipfile
from pathlib import Path
from types import ModuleType

import keras
import numpy as np
import pandas as pd
from PIL import Image

TRAIN, TEST = 75, 20


def prepare(recipe: str) -> None:
    """Replaces Keras's data sets; creates the files that a script downloads.

    Args:
        recipe: Name of a function of this module, or "" for none.
    """
    rng = np.random.default_rng(3)
    for name, shape, classes in (
        ("mnist", (28, 28), 10),
        ("fashion_mnist", (28, 28), 10),
        ("cifar10", (32, 32, 3), 10),
        ("cifar100", (32, 32, 3), 100),
    ):
        _patch_images(getattr(keras.datasets, name), rng, shape, classes)
    keras.datasets.imdb.load_data = lambda num_words=500, **options: _texts(rng, num_words, 2)
    keras.utils.get_file = _downloaded
    Path("data").mkdir(exist_ok=True)
    if recipe:
        globals()[recipe](rng)


def _patch_images(module, rng, shape, classes):
    def load_data(*args, **options):
        return images(TRAIN), images(TEST)

    def images(count):
        labels = (np.arange(count) % classes).astype("uint8")
        if len(shape) == 3:
            labels = labels[:, None]
        return rng.integers(0, 256, (count, *shape), dtype="uint8"), labels

    module.load_data = load_data


def _texts(rng, words, classes):
    def texts(count):
        lengths = rng.integers(5, 40, count)
        ragged = np.empty(count, object)
        ragged[:] = [rng.integers(1, words, length).tolist() for length in lengths]
        return ragged, rng.integers(0, classes, count)

    return texts(TRAIN), texts(TEST)


def _downloaded(fname=None, origin=None, **options):
    return str(Path("data", fname or str(origin).rpartition("/")[2]).absolute())


def _write_images(folder, rng, count, size, names="{}.jpg", mode="RGB"):
    Path(folder).mkdir(parents=True, exist_ok=True)
    shape = size if mode == "L" else (*size, 3)
    for n in range(count):
        pixels = rng.integers(0, 256, shape, dtype="uint8")
        Image.fromarray(pixels, mode).save(Path(folder, names.format(n)))


def _sentences(rng, count, words=12):
    vocabulary = [f"word{n}" for n in range(60)]
    return [" ".join(rng.choice(vocabulary, rng.integers(4, words))) for _ in range(count)]


def celeba(rng):
    """Creates a module `gdown` whose download is an archive of portraits."""

    def download(url, output, quiet=False):
        _write_images("faces", rng, TRAIN, (64, 64))
        with zipfile.ZipFile(output, "w") as archive:
            for file in sorted(Path("faces").iterdir()):
                archive.write(file, f"img_align_celeba/{file.name}")

    sys.modules["gdown"] = ModuleType("gdown")
    sys.modules["gdown"].download = download


def captchas(rng):
    """Creates images whose names are their labels."""
    Path("captcha_images_v2").mkdir(exist_ok=True)
    for _ in range(TRAIN):
        label = "".join(rng.choice(list("abcde23456"), 5))
        pixels = rng.integers(0, 256, (50, 200), dtype="uint8")
        Image.fromarray(pixels).save(f"captcha_images_v2/{label}.png")


def pets(rng):
    """Creates two folders of photographs."""
    for kind in ("Cat", "Dog"):
        _write_images(f"PetImages/{kind}", rng, 45, (60, 50))
        Image.fromarray(np.zeros((50, 60, 3), "uint8")).save(f"PetImages/{kind}/6779.jpg")


def moving_mnist(rng):
    """Creates videos of 20 frames."""
    with Path("data/moving_mnist.npy").open("wb") as file:
        np.save(file, rng.integers(0, 256, (20, 30, 16, 16), dtype="uint8"))


def ford_a(rng):
    """Makes `np.loadtxt` return labelled series."""

    def loadtxt(filename, **options):
        count = TRAIN if "TRAIN" in str(filename) else TEST
        labels = np.where(np.arange(count) % 2, 1, -1)[:, None]
        return np.concatenate([labels, rng.normal(size=(count, 60))], axis=1)

    np.loadtxt = loadtxt


def _tables(frames):
    """Makes pandas read tables by the end of their address."""
    read = pd.read_csv

    def read_csv(source, *args, **options):
        for name, frame in frames.items():
            if str(source).endswith(name):
                index = options.get("index_col")
                return frame.set_index(index) if index else frame.copy()
        return read(source, *args, **options)

    pd.read_csv = read_csv


def nab(rng):
    """Provides two tables of a signal over time."""
    times = pd.date_range("2014-04-01", periods=360, freq="5min")
    frame = pd.DataFrame({"timestamp": times, "value": rng.normal(20, 5, 360)})
    _tables({"small_noise.csv": frame, "jumpsup.csv": frame})


def jena(rng):
    """Provides an archive and a table of weather."""
    columns = ["p (mbar)", "T (degC)", "Tpot (K)", "Tdew (degC)", "rh (%)", "VPmax (mbar)",
               "VPact (mbar)", "VPdef (mbar)", "sh (g/kg)", "H2OC (mmol/mol)", "rho (g/m**3)",
               "wv (m/s)", "max. wv (m/s)", "wd (deg)"]  # fmt: skip
    times = pd.date_range("2009-01-01", periods=1000, freq="10min").strftime("%d.%m.%Y %H:%M:%S")
    frame = pd.DataFrame(rng.normal(size=(1000, len(columns))), columns=columns)
    frame.insert(0, "Date Time", times)
    with zipfile.ZipFile("data/jena_climate_2009_2016.csv.zip", "w") as archive:
        archive.writestr("readme.txt", "")
    _tables({"jena_climate_2009_2016.csv": frame})


def french(rng):
    """Creates pairs of sentences."""
    lines = [f"word{n % 9} a{n}\tmot{n % 9} b{n}\tby" for n in range(90)]
    Path("data/fra.txt").write_text("\n".join(lines))


def reviews(rng):
    """Creates folders of reviews, one file each."""
    for part in ("train", "test"):
        for kind in ("pos", "neg"):
            folder = Path("aclImdb", part, kind)
            folder.mkdir(parents=True, exist_ok=True)
            for n, text in enumerate(_sentences(rng, 45)):
                (folder / f"{n}.txt").write_text(text)


def credit_cards(rng):
    """Creates a table of transactions."""
    names = ["Time", *[f"V{n}" for n in range(1, 29)], "Amount"]
    lines = [",".join([f'"{name}"' for name in [*names, "Class"]])]
    for n in range(230):
        values = [f"{value:.4f}" for value in rng.normal(size=len(names))]
        lines.append(",".join([*values, f'"{int(n % 5 == 0)}"']))
    Path("data/creditcard.csv").write_text("\n".join(lines) + "\n")


def movielens(rng):
    """Creates ratings and titles of films."""
    folder = Path("data/ml-latest-small")
    folder.mkdir(exist_ok=True)
    users, films = rng.integers(1, 12, 150), rng.integers(1, 30, 150)
    ratings = pd.DataFrame({"userId": users, "movieId": films,
                            "rating": rng.integers(1, 11, 150) / 2, "timestamp": 0})  # fmt: skip
    ratings.to_csv(folder / "ratings.csv", index=False)
    ids = np.arange(1, 31)
    pd.DataFrame({"movieId": ids, "title": ids.astype(str), "genres": "none"}).to_csv(
        folder / "movies.csv", index=False
    )


def heart(rng):
    """Provides a table of patients."""
    count, choose = 100, lambda *values: rng.choice(values, 100)
    frame = pd.DataFrame({
        "age": rng.integers(30, 70, count), "sex": choose(0, 1), "cp": choose(0, 1, 2, 3, 4),
        "trestbps": rng.integers(100, 180, count), "chol": rng.integers(150, 350, count),
        "fbs": choose(0, 1), "restecg": choose(0, 1, 2), "thalach": rng.integers(90, 190, count),
        "exang": choose(0, 1), "oldpeak": rng.uniform(0, 4, count), "slope": choose(1, 2, 3),
        "ca": choose(0, 1, 2, 3), "thal": choose("fixed", "normal", "reversible"),
        "target": choose(0, 1),
    })  # fmt: skip
    _tables({"heart.csv": frame})


def cats_vs_dogs(rng):
    """Makes `tensorflow_datasets.load` return photographs of several sizes."""
    import tensorflow as tf

    def split(count):
        photographs = [
            (rng.integers(0, 256, (70 + n % 9, 80, 3), dtype="uint8"), n % 2) for n in range(count)
        ]
        shape = (tf.TensorSpec((None, None, 3), tf.uint8), tf.TensorSpec((), tf.int64))
        data = tf.data.Dataset.from_generator(lambda: iter(photographs), output_signature=shape)
        return data.apply(tf.data.experimental.assert_cardinality(count))

    tfds = ModuleType("tensorflow_datasets")
    tfds.disable_progress_bar = lambda: None
    tfds.load = lambda *args, **options: (split(40), split(TEST), split(TEST))
    sys.modules["tensorflow_datasets"] = tfds


def auto_mpg(rng):
    """Provides a table of cars."""
    names = ["MPG", "Cylinders", "Displacement", "Horsepower", "Weight", "Acceleration",
             "Model Year"]  # fmt: skip
    frame = pd.DataFrame(rng.uniform(10, 40, (100, len(names))), columns=names)
    frame["Origin"] = np.arange(100) % 3 + 1
    _tables({"auto-mpg.data": frame})


def oxford_pets(rng):
    """Creates photographs and the segmentation of each."""
    _write_images("images", rng, 60, (40, 40), names="{:03}.jpg")
    Path("annotations/trimaps").mkdir(parents=True)
    for n in range(60):
        pixels = rng.integers(1, 4, (40, 40), dtype="uint8")
        Image.fromarray(pixels).save(f"annotations/trimaps/{n:03}.png")


def stl10(rng):
    """Makes `tensorflow_datasets.load` return photographs of one size."""
    import tensorflow as tf

    def load(*args, **options):
        images = rng.integers(0, 256, (60, 96, 96, 3), dtype="uint8")
        return tf.data.Dataset.from_tensor_slices((images, np.arange(60) % 10))

    tfds = ModuleType("tensorflow_datasets")
    tfds.load = load
    sys.modules["tensorflow_datasets"] = tfds


def spanish(rng):
    """Creates pairs of sentences."""
    Path("data/spa-eng").mkdir()
    pairs = zip(_sentences(rng, 100), _sentences(rng, 100), strict=True)
    lines = ["\t".join(pair) for pair in pairs]
    Path("data/spa-eng/spa.txt").write_text("\n".join(lines) + "\n")
