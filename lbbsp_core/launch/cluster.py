"""Cluster descriptions of the frameworks: addresses, roles and the environment of each process."""

from __future__ import annotations

import json
import os
import socket
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from types import MappingProxyType
from typing import Final, NamedTuple

from lbbsp_core.launch.devices import NO_GPU
from lbbsp_core.launch.hosts import Hosts, bracketed, require_free_port
from lbbsp_core.resources.gpu import hides_gpus
from lbbsp_core.validate import require_integer, require_known

HOST: Final = "127.0.0.1"

KEEP_FREED_MEMORY: Final[Mapping[str, str]] = MappingProxyType(
    {
        "MALLOC_MMAP_MAX_": "0",  # nothing is mapped singly: unlike a threshold, without a limit
        "MALLOC_TRIM_THRESHOLD_": str(1 << 40),
        # More than the 64 MiB of a heap of a thread: then glibc never unmaps an empty one.
        "MALLOC_TOP_PAD_": str(1 << 28),
    }
)
"""Variables of mallopt(3) with which glibc keeps freed memory for the next allocation."""

_PORT: Final = "LBBSP_PORT"  # which a process opens, for the check that it is free

GPU_DEVICES: Final = tuple(map(Path, ("/dev/nvidiactl", "/dev/dxg")))  # the latter under WSL


class Helper(NamedTuple):
    """Process that a framework needs beside its workers, such as a parameter server."""

    name: str  # in messages
    command: tuple[str, ...]  # arguments of Python
    environment: Mapping[str, str]  # by `cluster_variables`: only what describes the cluster
    beside: int = 0  # rank of a worker on the same host


class JobSpec(NamedTuple):
    """Environments of a job's processes, and what they run.

    All workers run the script.
    """

    workers: list[dict[str, str]]  # environment of each worker, by rank
    helpers: list[Helper]  # not slowed down by emulated speeds


def free_ports(count: int) -> list[int]:
    """Returns different free ports; all sockets stay open until the last port is known."""
    with ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
        for bound in sockets:
            bound.bind((HOST, 0))
        return [int(bound.getsockname()[1]) for bound in sockets]


def job_spec(
    framework: str,
    workers: int,
    *,
    emulated: bool,
    run_dir: Path | None,
    servers: int | None = None,
    restart: int = 0,
    workers_at_first: int | None = None,
    devices: Sequence[Mapping[str, str]] | None = None,
    hosts: Hosts | None = None,
) -> JobSpec:
    """Returns the environments of the workers and of the processes beside them.

    Variables that the user has set are kept, except for those that describe the cluster. `devices`
    are variables of each worker's GPUs, which no other process then uses; None leaves the GPUs to
    the user's environment. `workers_at_first` is None if it is the same number. Servers default to
    the framework's number of them. Without `hosts` all run on this machine; processes that this
    launcher starts on other machines get what depends on the machine there.
    """
    job = cluster_variables(framework, workers, servers, hosts)
    shared = {}
    if hosts is None or hosts.rank is None:  # else the scheduler restarts jobs, and tells the user
        shared["LBBSP_RESTART"] = str(restart)
        shared["LBBSP_ELASTIC"] = f"{workers_at_first or workers}/{workers}"
    if run_dir is not None:
        shared["LBBSP_RUN_DIR"] = str(run_dir.absolute())
    variables = [{}] * workers if devices is None else devices
    beside = {} if devices is None else NO_GPU

    def complete(role: Mapping[str, str], gpus: Mapping[str, str]) -> dict[str, str]:
        environment = {**os.environ, **gpus, **shared, **role}
        if hosts is not None and hosts.remote:
            return environment
        return with_defaults(environment, emulated=emulated)

    return job._replace(
        workers=[complete(role, gpus) for role, gpus in zip(job.workers, variables, strict=True)],
        helpers=[h._replace(environment=complete(h.environment, beside)) for h in job.helpers],
    )


def with_defaults(environment: Mapping[str, str], *, emulated: bool = False) -> dict[str, str]:
    """Returns an environment with the launcher's own settings, where the user has set nothing."""
    emulation = emulation_defaults() if emulated else {}
    common = {**quiet_defaults(), **emulation, **environment}
    return {**allocator_defaults(common), **common}


def cluster_variables(
    framework: str, workers: int, servers: int | None = None, hosts: Hosts | None = None
) -> JobSpec:
    """Returns the variables by which the framework tells each process its role and its peers."""
    kind = FRAMEWORKS[require_known("framework", framework, FRAMEWORKS)]
    return kind(workers, servers, hosts)


def tensorflow_cluster(workers: int, servers: int | None, hosts: Hosts | None) -> JobSpec:
    """Returns one TF_CONFIG per worker, as MultiWorkerMirroredStrategy reads it."""
    _refuse_servers("tensorflow", servers)
    addresses = _addresses(hosts.addresses if hosts else [HOST] * workers, hosts)
    cluster = {"worker": [f"{bracketed(host)}:{port}" for host, port in addresses]}
    tasks = [{"type": "worker", "index": index} for index in range(workers)]
    configs = [json.dumps({"cluster": cluster, "task": task}) for task in tasks]
    pairs = zip(configs, addresses, strict=True)
    return JobSpec([{"TF_CONFIG": config, _PORT: str(port)} for config, (_, port) in pairs], [])


def mxnet_cluster(workers: int, servers: int | None, hosts: Hosts | None) -> JobSpec:
    """Returns the DMLC_* variables of a scheduler, of parameter servers and of workers.

    The scheduler runs beside worker 0, and the servers on each host in turn, by default one on
    each. MXNet's scheduler numbers the workers of a host in the order of their ports; ascending
    values of PORT make these ranks ours.
    """
    if servers is not None:
        require_integer("servers", servers, 1)
    places = hosts.addresses if hosts else (HOST,) * workers
    firsts = [places.index(host) for host in dict.fromkeys(places)]  # a worker of each host
    beside = [firsts[i % len(firsts)] for i in range(servers or len(firsts))]
    ranks = [0, *range(workers), *beside]
    (root, *other_addresses) = _addresses([places[rank] for rank in ranks], hosts)
    common = {
        "DMLC_PS_ROOT_URI": root[0],
        "DMLC_PS_ROOT_PORT": str(root[1]),
        "DMLC_NUM_WORKER": str(workers),
        "DMLC_NUM_SERVER": str(len(beside)),
        "PS_HEARTBEAT_INTERVAL": "1",  # also for scripts without lbbsp_mx
    }
    roles = ["scheduler", *["worker"] * workers, *["server"] * len(beside)]
    environments = [
        {**common, "DMLC_ROLE": role, "DMLC_NODE_HOST": host, "PORT": str(port), _PORT: str(port)}
        for role, (host, port) in zip(roles, (root, *other_addresses), strict=True)
    ]
    del environments[0]["PORT"]  # the scheduler listens on the root port
    names = ["scheduler", *(f"server {i}" for i in range(len(beside)))]
    command = ("-m", "lbbsp_mx.server")
    helpers = zip(names, [environments[0], *environments[1 + workers :]], [0, *beside], strict=True)
    return JobSpec(
        environments[1 : 1 + workers],
        [Helper(name, command, environment, rank) for name, environment, rank in helpers],
    )


def torch_cluster(workers: int, servers: int | None, hosts: Hosts | None) -> JobSpec:
    """Returns the variables of each worker that torchrun sets, as ``env://`` reads them.

    Worker 0 serves the store at which they meet.
    """
    _refuse_servers("torch", servers)
    places = hosts.addresses if hosts else (HOST,) * workers
    ((address, port),) = _addresses(places[:1], hosts)
    common = {"MASTER_ADDR": address, "MASTER_PORT": str(port), "WORLD_SIZE": str(workers)}
    environments = [
        {
            **common,
            "RANK": str(rank),
            "LOCAL_RANK": str(places[:rank].count(place)),
            "LOCAL_WORLD_SIZE": str(places.count(place)),
            _PORT: "" if rank else str(port),
        }
        for rank, place in enumerate(places)
    ]
    return JobSpec(environments, [])


def _refuse_servers(framework: str, servers: int | None) -> None:
    if servers is not None:
        raise ValueError(
            f"servers must be omitted for {framework}, got {servers!r}: its workers train "
            "synchronously without servers; asynchronous training needs --framework mxnet"
        )


def _addresses(places: Sequence[str], hosts: Hosts | None) -> list[tuple[str, int]]:
    """Returns a port for each process, by its host: free ones here, on others from the first on."""
    ports = sorted(free_ports(len(places))) if hosts is None else hosts.ports(places)
    return list(zip(places, ports, strict=True))


def listening_port(environment: Mapping[str, str]) -> int | None:
    """Returns the port on which a process of a job listens, by its variables; None: on none."""
    port = environment[_PORT]
    return int(port) if port else None


def require_free_ports(job: JobSpec, rank: int) -> None:
    """Checks the ports of a worker and of the processes beside it, on this machine."""
    beside = [helper.environment for helper in job.helpers if helper.beside == rank]
    for environment in (*beside, job.workers[rank]):
        if port := listening_port(environment):
            require_free_port(port)


FRAMEWORKS: Final[Mapping[str, Callable[[int, int | None, Hosts | None], JobSpec]]] = (
    MappingProxyType(
        {"tensorflow": tensorflow_cluster, "mxnet": mxnet_cluster, "torch": torch_cluster}
    )
)


def quiet_defaults() -> dict[str, str]:
    """Returns variables that keep the frameworks' start-up messages out of the output."""
    return {"TF_CPP_MIN_LOG_LEVEL": "2", "GRPC_VERBOSITY": "ERROR"}


def emulation_defaults() -> dict[str, str]:
    """Returns variables that give a worker one compute thread and no GPU.

    A CPU quota slows down nothing else. There are two inter-op threads, since with a single one a
    waiting collective could block the operation that its peer waits for. The few threads share one
    arena of the allocator, in which tensors of any size fit where those of others were freed.
    """
    one_thread = ("TF_NUM_INTRAOP_THREADS", "OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS")
    threads = {name: "1" for name in (*one_thread, "MKL_NUM_THREADS", "MXNET_CPU_WORKER_NTHREADS")}
    one_arena = {"MALLOC_ARENA_MAX": "1"}
    return {**threads, **one_arena, "TF_NUM_INTEROP_THREADS": "2", "CUDA_VISIBLE_DEVICES": "-1"}


def allocator_defaults(environment: Mapping[str, str]) -> Mapping[str, str]:
    """Returns variables that save a process without a GPU most of its page faults.

    The frameworks allocate the tensors of each step again. By default glibc returns large ones to
    the kernel when they are freed, which then clears every page of the next ones. A batch of a new
    size can cost most, since its tensors do not fit where the previous ones were. It sets nothing
    where the user has tuned the allocator, or the process may use a GPU, whose tensors glibc does
    not allocate.
    """
    tuned = KEEP_FREED_MEMORY.keys() | {"MALLOC_MMAP_THRESHOLD_"}
    if tuned & environment.keys() or "glibc.malloc." in environment.get("GLIBC_TUNABLES", ""):
        return {}
    has_gpu = not hides_gpus(environment) and any(device.exists() for device in GPU_DEVICES)
    return {} if has_gpu else KEEP_FREED_MEMORY
