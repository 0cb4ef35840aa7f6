"""Leaves out what Keras and MXNet import if it is there: a third of the start of a process."""

import sys

sys.modules.update(dict.fromkeys(("PIL", "matplotlib", "pandas", "scipy.stats", "sklearn")))
