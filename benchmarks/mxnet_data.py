"""Synthetic data in the shapes, types and files of the data that the MXNet scripts download."""

from __future__ import annotations

import gzip
import struct
from pathlib import Path

import mxnet as mx
import numpy as np
import pandas as pd
from mxnet import gluon
from mxnet.gluon.data import vision
from PIL import Image

TRAIN, TEST = 75, 20


def prepare(recipe: str) -> None:
    """Replaces gluon's data sets; creates the files that a script downloads.

    Args:
        recipe: Name of a function of this module, or "" for none.
    """
    rng = np.random.default_rng(3)
    for kind, shape in (
        (vision.MNIST, (28, 28, 1)),
        (vision.CIFAR10, (32, 32, 3)),
    ):
        kind._get_data = _images(rng, shape)
    if recipe:
        globals()[recipe](rng)


def _images(rng, shape):
    def get_data(self):
        count = TRAIN if self._train else TEST
        pixels = rng.integers(0, 256, (count, *shape), dtype="uint8")
        self._data = mx.nd.array(pixels, dtype="uint8")
        self._label = (np.arange(count) % 10).astype("int32")

    return get_data


def house_prices(rng):
    """Creates the tables of houses."""
    for name, count in (("train", TRAIN), ("test", TEST)):
        table = {
            "Id": np.arange(count),
            "MSSubClass": rng.integers(20, 190, count),
            "Street": rng.choice(["Pave", "Grvl"], count),
            "LotArea": rng.normal(10000, 3000, count),
            "SaleCondition": rng.choice(["Normal", "Abnorml"], count),
            "SalePrice": rng.normal(180000, 40000, count),
        }
        pd.DataFrame(table).to_csv(f"{name}.csv", index=False)
    pd.options.future.infer_string = False  # columns of texts are objects, as the script expects


def wikitext(rng):
    """Replaces gluon's WikiText2 by random words in rows of the given length."""

    def create(root, segment="train", vocab=None, seq_len=35):
        words = rng.integers(0, 50, ((8 * 9 if segment == "train" else 8 * 3), seq_len + 1))
        data = gluon.data.ArrayDataset(words[:, :-1].astype("f4"), words[:, 1:].astype("f4"))
        data.vocabulary = range(50)
        return data

    gluon.contrib.data.text.WikiText2 = create


def wikitext_of_gluonnlp(rng):
    """Replaces gluonnlp's WikiText2 by random words."""
    import gluonnlp

    gluonnlp.data.WikiText2 = lambda segment, **options: [
        f"word{n}" for n in rng.integers(0, 40, 8 * 70 if segment == "train" else 200)
    ]


def sentences(rng, count, words=12):
    """Returns sentences of different lengths, of 60 words."""
    vocabulary = [f"word{n}" for n in range(60)]
    return [" ".join(rng.choice(vocabulary, rng.integers(4, words))) for _ in range(count)]


def trec(rng):
    """Replaces gluonnlp's TREC."""
    import gluonnlp

    def create(segment="train", root=None):
        count = TRAIN if segment == "train" else TEST
        pairs = zip(sentences(rng, count), rng.integers(0, 6, count).tolist(), strict=True)
        return gluon.data.SimpleDataset(list(map(list, pairs)))

    gluonnlp.data.TREC = create


def minc(rng):
    """Creates folders of photographs."""
    for part, count in (("train", 9), ("val", 2), ("test", 2)):
        for kind in ("brick", "carpet", "wood", "water"):
            folder = Path("minc", part, kind)
            folder.mkdir(parents=True)
            for n in range(count):
                pixels = rng.integers(0, 256, (36, 40, 3), dtype="uint8")
                Image.fromarray(pixels).save(folder / f"{n}.png")


def sick(rng):
    """Creates pairs of sentences with their dependency trees, and vectors of words."""
    vectors = (" ".join([f"word{n}", *map(str, rng.normal(size=8))]) for n in range(60))
    Path("glove.txt").write_text("\n".join(vectors) + "\n")
    for part, count in (("train", 27), ("dev", 6), ("test", 6)):
        folder = Path("sick", part)
        folder.mkdir(parents=True)
        for side in ("a", "b"):
            texts = sentences(rng, count, 7)
            parents = [range(len(text.split())) for text in texts]  # chains
            (folder / f"{side}.toks").write_text("\n".join(texts) + "\n")
            lines = (" ".join(map(str, each)) for each in parents)
            (folder / f"{side}.parents").write_text("\n".join(lines) + "\n")
        scores = map(str, rng.uniform(1, 5, count).round(1))
        (folder / "sim.txt").write_text("\n".join(scores) + "\n")


def labelled_texts(rng):
    """Creates two files of texts, each after its label."""
    for name, count in (("train", TRAIN), ("test", TEST)):
        lines = (f"{n % 4},{text}" for n, text in enumerate(sentences(rng, count)))
        Path(f"{name}.txt").write_text("\n".join(lines) + "\n")


def snli(rng):
    """Creates pairs of sentences, and vectors of words."""
    import gluonnlp

    for name, count in (("train", TRAIN), ("test", 21)):
        pairs = zip(sentences(rng, count), sentences(rng, count), strict=True)
        labels = ("entailment", "neutral", "contradiction")
        lines = ("\t".join([*pair, labels[n // 3 % 3]]) for n, pair in enumerate(pairs))
        Path(f"{name}.txt").write_text("\n".join(lines) + "\n")
    words = [f"word{n}" for n in range(60)]
    vectors = mx.nd.array(rng.normal(size=(61, 20)))
    gluonnlp.embedding.create = lambda *args, **options: gluonnlp.embedding.TokenEmbedding(
        idx_to_token=["<unk>", *words], idx_to_vec=vectors, unknown_token="<unk>"
    )


def iwslt(rng):
    """Replaces gluonnlp's IWSLT2015."""
    import gluonnlp

    def create(segment="train", src_lang="en", tgt_lang="vi", root=None):
        count = TRAIN if segment == "train" else 8
        pairs = zip(sentences(rng, count), sentences(rng, count), strict=True)
        data = gluon.data.SimpleDataset(list(pairs))
        words = gluonnlp.data.count_tokens([f"word{n}" for n in range(60)])
        data.src_vocab = data.tgt_vocab = gluonnlp.Vocab(words)
        return data

    gluonnlp.data.IWSLT2015 = create


def mnist_iterators(rng):
    """Makes MXNet's iterators of MNIST read arrays."""

    def create(batch_size, input_shape, num_parts=1, part_index=0):
        return tuple(
            mx.io.NDArrayIter(rng.random((count, *input_shape)), np.arange(count) % 10, batch_size)
            for count in (40, TEST)
        )

    mx.test_utils.get_mnist_iterator = create


def glue(rng):
    """Replaces a pretrained BERT, its tokenizer, and the pairs of sentences of MRPC."""
    import gluonnlp

    words = gluonnlp.data.count_tokens([f"word{n}" for n in range(60)])
    vocabulary = gluonnlp.vocab.BERTVocab(words)

    def get_model(name, ctx=None, **options):
        encoder = gluonnlp.model.BERTEncoder(
            num_layers=2, units=16, hidden_size=24, num_heads=2, max_length=32
        )
        bert = gluonnlp.model.BERTModel(
            encoder, len(vocabulary), 2, 16, 16, use_pooler=True, use_decoder=False,
            use_classifier=False,
        )  # fmt: skip
        bert.initialize(mx.init.Normal(0.1), ctx=ctx)
        return bert, vocabulary

    def pairs(segment):
        count = TRAIN if segment == "train" else 8
        both = zip(sentences(rng, count), sentences(rng, count), strict=True)
        labels = () if segment == "test" else ("0", "1")
        rows = [[*pair, *labels[n % 2 : n % 2 + 1]] for n, pair in enumerate(both)]
        return gluon.data.SimpleDataset(rows)

    gluonnlp.model.get_model = get_model
    gluonnlp.data.BERTTokenizer = lambda *args, **options: str.split
    gluonnlp.data.classification.GlueMRPC = pairs


def mnist_files(rng):
    """Creates the compressed files of MNIST."""
    Path("data").mkdir()
    for name, count in (("train", TRAIN), ("t10k", TEST)):
        labels = (np.arange(count) % 10).astype("uint8").tobytes()
        pixels = rng.integers(0, 256, (count, 28, 28), dtype="uint8").tobytes()
        for kind, header, content in (
            ("labels-idx1", struct.pack(">II", 2049, count), labels),
            ("images-idx3", struct.pack(">IIII", 2051, count, 28, 28), pixels),
        ):
            with gzip.open(f"data/{name}-{kind}-ubyte.gz", "wb") as file:
                file.write(header + content)
