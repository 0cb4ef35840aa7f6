"""Virtual time: recorded or invented iteration times as a stand-in for a cluster."""

from lbbsp_core.registry import SCHEMES, synchroniser
from lbbsp_core.sim.asynchronous import RelaxedRun, run_relaxed
from lbbsp_core.sim.cluster import ReplayedCluster, SimulatedCluster, replayed
from lbbsp_core.sim.communication import Communication, FixedTime, ParameterServer, RingAllReduce
from lbbsp_core.sim.engine import Setting, Timeline, run_bsp, run_oracle
from lbbsp_core.sim.events import Change, Iteration, Schedule, play, schedule
from lbbsp_core.sim.from_run import Recorded, recorded
from lbbsp_core.sim.learning import (
    MODELS,
    Curve,
    Data,
    Mlp,
    Softmax,
    Task,
    digits,
    learn,
    learn_schedule,
    learned_in_step,
    lockstep,
)
from lbbsp_core.sim.scenario import PRESETS, Scenario, load_scenario, read_scenario
from lbbsp_core.sim.slowdowns import (
    Constant,
    Disturbance,
    Lognormal,
    Markov,
    Noise,
    Pareto,
    Weather,
)
from lbbsp_core.sim.synthetic import OMNILEARN, InventedCluster, Preemption, cores, invented
from lbbsp_core.sim.traces import Series, Trace, TraceError, names_of, read_trace
from lbbsp_core.sim.vectorised import ELEMENTWISE, fits_arrays, run_arrays

__all__ = [
    "ELEMENTWISE",
    "MODELS",
    "OMNILEARN",
    "PRESETS",
    "SCHEMES",
    "Change",
    "Communication",
    "Constant",
    "Curve",
    "Data",
    "Disturbance",
    "FixedTime",
    "InventedCluster",
    "Iteration",
    "Lognormal",
    "Markov",
    "Mlp",
    "Noise",
    "ParameterServer",
    "Pareto",
    "Preemption",
    "Recorded",
    "RelaxedRun",
    "ReplayedCluster",
    "RingAllReduce",
    "Scenario",
    "Schedule",
    "Series",
    "Setting",
    "SimulatedCluster",
    "Softmax",
    "Task",
    "Timeline",
    "Trace",
    "TraceError",
    "Weather",
    "cores",
    "digits",
    "fits_arrays",
    "invented",
    "learn",
    "learn_schedule",
    "learned_in_step",
    "load_scenario",
    "lockstep",
    "names_of",
    "play",
    "read_scenario",
    "read_trace",
    "recorded",
    "replayed",
    "run_arrays",
    "run_bsp",
    "run_oracle",
    "run_relaxed",
    "schedule",
    "synchroniser",
]
