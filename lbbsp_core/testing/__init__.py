"""Contracts that every predictor, policy and synchroniser keeps, and fakes: ours, and yours."""

from lbbsp_core.testing.contracts import *  # noqa: F403
