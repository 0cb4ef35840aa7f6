"""What ``TF_CONFIG``, ``DMLC_*`` and Slurm say of a cluster, and whether its addresses fit here."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Final, NamedTuple

import psutil

from lbbsp_core.doctor import addresses
from lbbsp_core.doctor.addresses import Resolve, Task, check_port, is_local
from lbbsp_core.doctor.finding import Finding, note, ok, problem
from lbbsp_core.runtime.options import env as variables

_SLURM: Final = ("SLURM_PROCID", "SLURM_STEP_NUM_TASKS", "SLURM_STEP_NODELIST",
                 "SLURM_STEP_TASKS_PER_NODE")  # fmt: skip


class Cluster(NamedTuple):
    """Cluster of ``TF_CONFIG``."""

    tasks: tuple[Task, ...]  # chief, workers, then others
    own: Task | None  # None for an evaluator, which is no part of the cluster


def check_cluster(environment: Mapping[str, str]) -> Iterator[Finding]:
    """Yields what the variables say, and whether the addresses of a cluster fit this machine."""
    text = environment.get("TF_CONFIG", "")
    yield from check_tf_config(text)
    yield from check_dmlc(environment)
    yield from check_slurm(environment)
    cluster = tf_cluster(text)
    if cluster is not None and not any(check_ports(cluster)):  # sockets refuse such ports
        yield from check_addresses(cluster)


def tf_cluster(text: str) -> Cluster | None:
    """Returns the cluster of a value of ``TF_CONFIG``; None if it is wrong or names no task."""
    if not text.strip() or variables.tf_config_problem(text):
        return None
    config = json.loads(text)
    kinds, task = config.get("cluster", {}), config.get("task", {})
    tasks = {
        (kind, index): _task(f"{kind} {index}", address)
        for kind in sorted(kinds, key=lambda kind: ("chief", "worker", kind).index(kind))
        for index, address in enumerate(kinds[kind])
    }
    own_task = tasks.get((task.get("type"), task.get("index")))
    return Cluster(tuple(tasks.values()), own_task) if tasks else None


def _task(name: str, address: str) -> Task:
    """Returns a task; a host may be an IPv6 number in brackets."""
    host, _, port = address.rpartition(":")
    return Task(name, host.removeprefix("[").removesuffix("]"), int(port))


def check_tf_config(text: str) -> Iterator[Finding]:
    """Checks the value of ``TF_CONFIG`` itself."""
    if fault := variables.tf_config_problem(text):
        shown = text if len(text) <= 300 else f"{text[:300]}..."
        yield problem("TF_CONFIG", f"{fault}: {shown}", variables.TF_CONFIG_REMEDY)
        return
    cluster = tf_cluster(text)
    if cluster is None:
        yield ok("TF_CONFIG", "is not set, or names no cluster: one worker, without balancing")
        return
    names = [task.name for task in cluster.tasks]
    own_name = cluster.own.name if cluster.own else "an evaluator, which takes no part in training"
    yield ok("TF_CONFIG", f"{len(names)} tasks ({', '.join(names)}); this is {own_name}")
    yield from check_ports(cluster)
    if any(name.startswith("ps ") for name in names):
        text = "names parameter servers, on which lbbsp does not train with TensorFlow"
        yield problem("TF_CONFIG", text, "leave out ps; asynchronous training needs MXNet")
    elif len(names) == 1:
        yield note("TF_CONFIG", "names a single worker: nothing is balanced", "name all workers")


def check_ports(cluster: Cluster) -> Iterator[Finding]:
    """Yields the tasks of a cluster whose port is none."""
    for task in cluster.tasks:
        if not 1 <= task.port <= 65_535:
            text = f"{task.name} has the port {task.port}, but a port must be in [1, 65535]"
            yield problem("TF_CONFIG", text, "choose a port that is free on that host")


def check_addresses(cluster: Cluster, resolve: Resolve = addresses.resolve) -> Iterator[Finding]:
    """Checks that the names of a cluster resolve, and that the own address is here and free."""
    numbers = resolve([task.host for task in cluster.tasks])
    own_numbers = numbers[cluster.own.host] if cluster.own else ""
    alone = all(is_local(numbers[task.host]) for task in cluster.tasks)
    for task in cluster.tasks:
        answer = numbers[task.host]
        if isinstance(answer, str):
            remedy = "correct the name, enter it in DNS or /etc/hosts, or use an IP number"
            yield problem(str(task), f"{task.host!r} has no address: {answer}", remedy)
        elif task == cluster.own:
            yield from _check_own(task, answer, alone=alone)
        elif is_local(answer) and not alone and answer == own_numbers:
            yield _only_here(str(task), answer)
        elif is_local(answer) and not alone:
            text = f"{', '.join(answer)} is this machine itself, but others are on other machines"
            yield problem(str(task), text, "use an address under which all hosts reach it")
        else:
            yield _check_route(task, answer)


def _check_own(task: Task, numbers: Sequence[str], *, alone: bool) -> Iterator[Finding]:
    """Checks the address of this process's own task."""
    check = f"{task}, this task"
    matches = [number for number in numbers if addresses.is_own(number)]
    if not matches:
        text = f"{', '.join(numbers)} is not an address of this machine: others look elsewhere"
        remedy = "correct the task's index here, or its address (unless something forwards it here)"
        yield problem(check, text, remedy)
        return
    busy = list(check_port(check, task.port, "all TF_CONFIGs"))
    if is_local(matches) and not alone:
        yield _only_here(check, matches)
    elif not busy:
        yield ok(check, f"is {', '.join(matches)} on this machine, and port {task.port} is free")
    yield from busy


def _only_here(check: str, numbers: Sequence[str]) -> Finding:
    """Returns that a task of this machine has a number under which no other reaches it."""
    text = f"is {', '.join(numbers)} on this machine, which others cannot reach under this number"
    return note(check, text, "let the name resolve to the same number everywhere, see /etc/hosts")


def _check_route(task: Task, numbers: Sequence[str]) -> Finding:
    """Checks that there is a route to a task on another machine."""
    shown = ", ".join(numbers)
    reasons = [reason for number in numbers if (reason := addresses.no_route(number))]
    if len(reasons) == len(numbers):
        remedy = "connect this machine to that network, or correct the address"
        return problem(str(task), f"there is no route to {shown}: {reasons[0]}", remedy)
    return ok(str(task), f"is {shown}, to which there is a route")


def check_dmlc(
    environment: Mapping[str, str], resolve: Resolve = addresses.resolve
) -> Iterator[Finding]:
    """Checks the variables of MXNet's transport."""
    settings = {
        name: environment[name]
        for name in variables.DMLC_NAMES
        if environment.get(name, "").strip()
    }
    if fault := variables.dmlc_problem(settings):
        yield problem("DMLC_*", fault, variables.DMLC_REMEDY)
        return
    if not settings:
        yield ok("DMLC_*", "are not set: one worker, without balancing")
        return
    role, host, port, servers, workers = (settings[name] for name in variables.DMLC_NAMES)
    text = f"this is a {role} of {workers} workers and {servers} servers"
    yield ok("DMLC_*", f"{text}; the scheduler listens at {host}:{port}")
    yield from _check_root(role, Task("scheduler", host, int(port)), resolve)
    yield from _check_node_host(environment, resolve)


def _check_root(role: str, root: Task, resolve: Resolve) -> Iterator[Finding]:
    """Checks the address of the scheduler, from the scheduler itself or from another process."""
    check, numbers = str(root), resolve([root.host])[root.host]
    if isinstance(numbers, str):
        remedy = "correct DMLC_PS_ROOT_URI: the scheduler's IP number is best"
        yield problem(check, f"{root.host!r} has no address: {numbers}", remedy)
        return
    shown, listens = ", ".join(numbers), role == "scheduler"
    matches = [number for number in numbers if addresses.is_own(number)]
    if listens and not matches:
        remedy = "start the scheduler on that machine, or correct DMLC_PS_ROOT_URI everywhere"
        yield problem(check, f"{shown} is not an address of this machine", remedy)
        return
    where = "DMLC_PS_ROOT_PORT everywhere"
    busy = list(check_port(check, root.port, where, matches)) if listens else []
    if is_local(numbers):
        remedy = "on several machines, set DMLC_PS_ROOT_URI to an address that all of them reach"
        yield note(check, f"{shown} is this machine itself: all processes must run here", remedy)
    elif not listens:
        yield _check_route(root, numbers)
    elif not busy:
        yield ok(check, f"{shown} is on this machine, and the port is free")
    yield from busy


def _check_node_host(environment: Mapping[str, str], resolve: Resolve) -> Iterator[Finding]:
    """Checks the address and the interface that this process gives to the others."""
    host = environment.get("DMLC_NODE_HOST", "").strip()
    numbers = resolve([host])[host] if host else []
    remedy = "set it to an IP number of this machine, or leave it out"
    if isinstance(numbers, str):
        yield problem("DMLC_NODE_HOST", f"{host!r} has no address: {numbers}", remedy)
    elif host and not any(map(addresses.is_own, numbers)):
        yield problem("DMLC_NODE_HOST", f"{host!r} is not an address of this machine", remedy)
    interface = environment.get("DMLC_INTERFACE", "").strip()
    interfaces = sorted(psutil.net_if_addrs())
    if interface and interface not in interfaces:
        text = f"must be one of {', '.join(interfaces)}, got {interface!r}"
        yield problem("DMLC_INTERFACE", text, "correct it, or leave it out")


def check_slurm(environment: Mapping[str, str]) -> Iterator[Finding]:
    """Says what the variables of Slurm are good for; TensorFlow's resolver is asked by lbbsp_tf."""
    job = environment.get("SLURM_JOB_ID", "")
    if not job:
        yield ok("Slurm", "this process is in no job of Slurm")
        return
    step = {name: environment[name] for name in _SLURM if name in environment}
    if len(step) < len(_SLURM):
        text = f"job {job}, but {', '.join(sorted(set(_SLURM) - set(step)))} is not set: this "
        text += "process is no task of srun, and SlurmClusterResolver cannot describe the job"
        yield note("Slurm", text, "start the workers with srun, one task each, or set TF_CONFIG")
        return
    rank, tasks, nodes, per_node = (step[name] for name in _SLURM)
    numbers = [int(text) for text in (rank, tasks) if re.fullmatch("[0-9]{1,9}", text)]
    if len(numbers) < 2 or not numbers[0] < numbers[1] == _total(per_node):
        listing = ", ".join(f"{name}={value}" for name, value in step.items())
        remedy = "start the workers with srun, and set none of these variables yourself"
        yield problem("Slurm", f"job {job}: its variables contradict each other: {listing}", remedy)
        return
    yield ok("Slurm", f"job {job}, task {rank} of {tasks} on {nodes} ({per_node} a node)")
    if environment.get("TF_CONFIG", "").strip():
        text = "TF_CONFIG describes the cluster, unless a strategy is given a SlurmClusterResolver"
        yield ok("Slurm", text)


def _total(tasks_per_node: str) -> int | None:
    """Returns the number of tasks that a text such as "2(x3),1" means; None if it means none."""
    parts = [
        re.fullmatch(r"([0-9]{1,6})(?:\(x([0-9]{1,6})\))?", part)
        for part in tasks_per_node.split(",")
    ]
    numbers = [int(part[1]) * int(part[2] or 1) for part in parts if part]
    return sum(numbers) if len(numbers) == len(parts) else None
