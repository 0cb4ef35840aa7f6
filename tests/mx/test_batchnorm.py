"""Batch normalisation over the global batch: what the workers send each other."""

import numpy as np
import pytest
from helpers import network

from lbbsp_mx import SyncBatchNorm


class TwoWorkers:
    """Gathers float32, as stores do; both workers send the same row."""

    def gather(self, use, row):
        return np.stack([row, row]).astype(np.float32)


@pytest.mark.parametrize(("dtype", "tolerance"), [("float32", 1e-6), ("float64", 1e-13)])
def test_moments_are_gathered_in_the_precision_of_the_network(dtype, tolerance):
    peers = network(norm=SyncBatchNorm)[1].running_mean.lbbsp_synchronised
    peers._turns = {"moments": TwoWorkers()}
    row = np.array([48.0, np.pi, -1e-3 / 3, 1e5 / 3], dtype)
    gathered = peers.gather("moments", 0, row)
    assert gathered.shape == (2, 4)
    np.testing.assert_allclose(gathered, [row, row], rtol=tolerance)
