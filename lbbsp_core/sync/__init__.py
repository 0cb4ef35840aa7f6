"""Synchronisers: when a push enters the model, and which workers may proceed."""

from lbbsp_core.sync.asp import ASP
from lbbsp_core.sync.base import SyncDecision, Synchroniser
from lbbsp_core.sync.bsp import BSP
from lbbsp_core.sync.dssp import DSSP, DSSPState
from lbbsp_core.sync.elastic import ElasticBSP, ElasticState
from lbbsp_core.sync.ssp import SSP, SSPState
from lbbsp_core.sync.zipline import ZipLineResult, zipline

__all__ = ["ASP", "BSP", "DSSP", "SSP", "DSSPState", "ElasticBSP", "ElasticState", "SSPState",
           "SyncDecision", "Synchroniser", "ZipLineResult", "zipline"]  # fmt: skip
