"""Simulation in virtual time, on recorded or synthetic iteration times instead of a cluster."""

from lbbsp_core.registry import synchroniser
from lbbsp_core.sim.asynchronous import AsyncRun, run_async
from lbbsp_core.sim.cluster import ReplayedCluster, SimulatedCluster, replay_trace
from lbbsp_core.sim.communication import Communication, FixedTime, ParameterServer, RingAllReduce
from lbbsp_core.sim.config import SimConfig
from lbbsp_core.sim.engine import Timeline, run_bsp, run_oracle
from lbbsp_core.sim.events import Change, Iteration, Schedule, play, schedule
from lbbsp_core.sim.from_run import RecordedRun, cluster_from_run, trace_from_run
from lbbsp_core.sim.links import LinkQueue, ServerLinks
from lbbsp_core.sim.scenario import PRESETS, Scenario, load_scenario, read_scenario
from lbbsp_core.sim.slowdowns import (
    Constant,
    Disturbance,
    Lognormal,
    Markov,
    Noise,
    Pareto,
    Slowdowns,
)
from lbbsp_core.sim.synthetic import (
    OMNILEARN,
    Preemption,
    SyntheticCluster,
    cores,
    synthetic_cluster,
)
from lbbsp_core.sim.traces import Series, Trace, TraceError, names_of, read_trace, write_trace
from lbbsp_core.sim.work import LognormalWork, SimulatedSamples

__all__ = [
    "OMNILEARN",
    "PRESETS",
    "AsyncRun",
    "Change",
    "Communication",
    "Constant",
    "Disturbance",
    "FixedTime",
    "Iteration",
    "LinkQueue",
    "Lognormal",
    "LognormalWork",
    "Markov",
    "Noise",
    "ParameterServer",
    "Pareto",
    "Preemption",
    "RecordedRun",
    "ReplayedCluster",
    "RingAllReduce",
    "Scenario",
    "Schedule",
    "Series",
    "ServerLinks",
    "SimConfig",
    "SimulatedCluster",
    "SimulatedSamples",
    "Slowdowns",
    "SyntheticCluster",
    "Timeline",
    "Trace",
    "TraceError",
    "cluster_from_run",
    "cores",
    "load_scenario",
    "names_of",
    "play",
    "read_scenario",
    "read_trace",
    "replay_trace",
    "run_async",
    "run_bsp",
    "run_oracle",
    "schedule",
    "synchroniser",
    "synthetic_cluster",
    "trace_from_run",
    "write_trace",
]
