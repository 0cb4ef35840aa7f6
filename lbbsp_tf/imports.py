"""Import of TensorFlow and Keras, whose errors name what to install."""

from __future__ import annotations

from typing import Final

_BACKENDS: Final = frozenset({"jax", "torch", "openvino"})


def import_keras() -> None:
    """Imports TensorFlow and Keras; an error names what to install."""
    try:
        import keras  # noqa: F401
        import tensorflow  # noqa: F401
    except ModuleNotFoundError as error:
        name = (error.name or "").partition(".")[0]
        if name in ("tensorflow", "keras"):
            raise ModuleNotFoundError(
                f"{name} is not installed: pip install 'lbbsp[tf]' (NVIDIA GPUs), or "
                "'lbbsp[tf-cpu]'",
                name=name,
            ) from None
        if name in _BACKENDS:
            raise ModuleNotFoundError(
                f"{name}, which was chosen as the backend of Keras, is not installed: "
                "lbbsp_tf trains with TensorFlow, so set KERAS_BACKEND=tensorflow, or change "
                "~/.keras/keras.json",
                name=name,
            ) from None
        raise
