"""Synchronise: when a push enters the model, and who goes on."""

from lbbsp_core.sync.asp import ASP
from lbbsp_core.sync.base import Decision, Synchroniser
from lbbsp_core.sync.bsp import BSP
from lbbsp_core.sync.dssp import DSSP, DSSPState
from lbbsp_core.sync.elastic import ElasticBSP, ElasticState
from lbbsp_core.sync.ssp import SSP, SSPState
from lbbsp_core.sync.zipline import Alignment, zipline

__all__ = [
    "ASP",
    "BSP",
    "DSSP",
    "SSP",
    "Alignment",
    "DSSPState",
    "Decision",
    "ElasticBSP",
    "ElasticState",
    "SSPState",
    "Synchroniser",
    "zipline",
]
