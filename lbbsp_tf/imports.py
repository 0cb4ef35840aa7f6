"""Import of TensorFlow and Keras, whose errors name what to install."""

from __future__ import annotations

from typing import Final

from lbbsp_core.installation import extra

_INSTALL: Final = f" is not installed: pip install {extra('tf')}, or with tf-cpu in place of tf"
_CHANGE_BACKEND: Final = (
    ", which was chosen as the backend of Keras, is not installed: lbbsp_tf trains with "
    "TensorFlow, so set KERAS_BACKEND=tensorflow, or change ~/.keras/keras.json"
)
_REMEDIES: Final = {
    **dict.fromkeys(("tensorflow", "keras"), _INSTALL),
    **dict.fromkeys(("jax", "torch", "openvino"), _CHANGE_BACKEND),
}


def import_keras() -> None:
    """Imports TensorFlow and Keras; an error names what to install."""
    try:
        import keras  # noqa: F401
        import tensorflow  # noqa: F401
    except ModuleNotFoundError as error:
        name = (error.name or "").partition(".")[0]
        if name in _REMEDIES:
            raise ModuleNotFoundError(name + _REMEDIES[name], name=name) from None
        raise
