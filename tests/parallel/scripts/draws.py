"""Notes when TensorFlow's distributed iterators draw a batch, for which all workers meet."""

from tensorflow.python.distribute.input_lib import DistributedIteratorBase

collective_draws: list[str] = []


def _noting(draw):
    def noted(*args, **options):
        collective_draws.append(draw.__name__)
        return draw(*args, **options)

    return noted


for name in ("get_next", "get_next_as_optional"):
    setattr(DistributedIteratorBase, name, _noting(getattr(DistributedIteratorBase, name)))
