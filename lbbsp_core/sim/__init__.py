"""Simulation in virtual time, on recorded or synthetic iteration times instead of a cluster."""

from lbbsp_core.sim.asynchronous import AsyncRun, run_async
from lbbsp_core.sim.cluster import ReplayedCluster, SimulatedCluster, replay_trace
from lbbsp_core.sim.communication import FixedTime, ParameterServer, RingAllReduce, ServerLinks
from lbbsp_core.sim.config import LognormalWork, SimConfig
from lbbsp_core.sim.engine import Timeline, run_bsp, run_oracle
from lbbsp_core.sim.events import Change, Schedule, schedule
from lbbsp_core.sim.from_run import cluster_from_run, trace_from_run
from lbbsp_core.sim.scenario import PRESETS, Scenario, load_scenario
from lbbsp_core.sim.slowdowns import Constant, Disturbance, Lognormal, Markov, Pareto
from lbbsp_core.sim.synthetic import Preemption, SyntheticCluster, cores, synthetic_cluster
from lbbsp_core.sim.traces import Series, Trace, TraceError, read_trace, write_trace

__all__ = [
    "PRESETS",
    "AsyncRun",
    "Change",
    "Constant",
    "Disturbance",
    "FixedTime",
    "Lognormal",
    "LognormalWork",
    "Markov",
    "ParameterServer",
    "Pareto",
    "Preemption",
    "ReplayedCluster",
    "RingAllReduce",
    "Scenario",
    "Schedule",
    "Series",
    "ServerLinks",
    "SimConfig",
    "SimulatedCluster",
    "SyntheticCluster",
    "Timeline",
    "Trace",
    "TraceError",
    "cluster_from_run",
    "cores",
    "load_scenario",
    "read_trace",
    "replay_trace",
    "run_async",
    "run_bsp",
    "run_oracle",
    "schedule",
    "synthetic_cluster",
    "trace_from_run",
    "write_trace",
]
