"""Leaves out what Keras and MXNet import if it is there: a third of the start of a process."""

import functools
import sys
import typing

sys.modules.update(dict.fromkeys(("PIL", "matplotlib", "pandas", "scipy.stats", "sklearn")))
# TensorFlow names the same types of its operations in thousands of type variables.
typing.compile = functools.cache(compile)
