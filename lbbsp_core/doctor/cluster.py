"""What ``TF_CONFIG`` says, and whether its addresses fit here."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import NamedTuple

from lbbsp_core.doctor import addresses
from lbbsp_core.doctor.addresses import Address, is_local, parse_address
from lbbsp_core.doctor.base import Finding, note, ok, problem
from lbbsp_core.doctor.ports import check_port
from lbbsp_core.runtime.options.cluster_variables import TF_CONFIG_REMEDY, tf_config_problem

Resolve = Callable[[Sequence[str]], Mapping[str, "list[str] | str"]]


class Task(NamedTuple):
    """Task of a cluster of TensorFlow.

    Args:
        name: Its kind and number, such as "worker 1".
        address: Where it listens.
    """

    name: str
    address: Address


class Cluster(NamedTuple):
    """Cluster of ``TF_CONFIG``.

    Args:
        tasks: All tasks: chief, workers, then others.
        own: This process's task; None for an evaluator, which is no part of the cluster.
    """

    tasks: tuple[Task, ...]
    own: Task | None

    @property
    def peers(self) -> list[Task]:
        """All other tasks."""
        return [task for task in self.tasks if task != self.own]


def tf_cluster(text: str) -> Cluster | None:
    """Returns the cluster of a value of ``TF_CONFIG``; None if it is wrong or names no task."""
    if not text.strip() or tf_config_problem(text):
        return None
    config = json.loads(text)
    kinds = config.get("cluster", {})
    order = sorted(kinds, key=lambda kind: ("chief", "worker", kind).index(kind))
    tasks = {
        (kind, index): Task(f"{kind} {index}", parse_address(address))
        for kind in order
        for index, address in enumerate(kinds[kind])
    }
    task = config.get("task", {})
    return Cluster(tuple(tasks.values()), tasks.get((task.get("type"), task.get("index"))))


def check_tf_config(text: str) -> Iterator[Finding]:
    """Checks the value of ``TF_CONFIG`` itself."""
    if found := tf_config_problem(text):
        shown = text if len(text) <= 300 else f"{text[:300]}..."
        yield problem("TF_CONFIG", f"{found}: {shown}", TF_CONFIG_REMEDY)
        return
    cluster = tf_cluster(text)
    if cluster is None or not cluster.tasks:
        yield ok("TF_CONFIG", "is not set, or names no cluster: one worker, without balancing")
        return
    names = [task.name for task in cluster.tasks]
    own = cluster.own.name if cluster.own else "an evaluator, which takes no part in training"
    yield ok("TF_CONFIG", f"{len(names)} tasks ({', '.join(names)}); this is {own}")
    yield from check_ports(cluster)
    yield from _check_kinds({name.split()[0] for name in names}, len(names))


def check_ports(cluster: Cluster) -> Iterator[Finding]:
    """Checks that all ports of a cluster are in the range of ports."""
    for task in cluster.tasks:
        if not 1 <= task.address.port <= 65_535:
            remedy = "choose a port that is free on that host"
            yield problem("TF_CONFIG", f"{task.name} has the port {task.address.port}, but a port "
                          "must be in [1, 65535]", remedy)  # fmt: skip


def _check_kinds(kinds: set[str], count: int) -> Iterator[Finding]:
    if "ps" in kinds and not {"chief", "worker"} <= kinds:
        yield problem(
            "TF_CONFIG", f"parameter servers need a chief and workers, but there are only "
            f"{', '.join(sorted(kinds))}", "add them, or leave out ps to train synchronously"
        )  # fmt: skip
    elif count == 1:
        yield note("TF_CONFIG", "names a single worker: nothing is balanced", "name all workers")


def check_addresses(cluster: Cluster, resolve: Resolve = addresses.resolve) -> Iterator[Finding]:
    """Checks that the names of a cluster resolve, and that the own address is here and free."""
    numbers = resolve([task.address.host for task in cluster.tasks])
    own = numbers[cluster.own.address.host] if cluster.own else ""
    alone = all(is_local(numbers[task.address.host]) for task in cluster.tasks)
    for task in cluster.tasks:
        found = numbers[task.address.host]
        if isinstance(found, str):
            yield problem(
                f"{task.name} ({task.address})", f"{task.address.host!r} has no address: {found}",
                "correct the name, enter it in DNS or /etc/hosts, or use an IP number",
            )  # fmt: skip
        elif task == cluster.own:
            yield from check_own(task, found, alone=alone)
        elif is_local(found) and not alone and found == own:
            yield _only_here(f"{task.name} ({task.address})", found)
        elif is_local(found) and not alone:
            yield problem(
                f"{task.name} ({task.address})", f"{', '.join(found)} is this machine itself, but "
                "other tasks are on other machines",
                "use an address under which all hosts reach it",
            )  # fmt: skip
        else:
            yield check_route(task, found)


def check_own(task: Task, numbers: Sequence[str], *, alone: bool) -> Iterator[Finding]:
    """Checks the address of this process's own task."""
    check, port = f"{task.name} ({task.address}), this task", task.address.port
    own = [number for number in numbers if addresses.is_own(number)]
    if not own:
        yield problem(
            check, f"{', '.join(numbers)} is not an address of this machine, so that the others "
            "look for this task elsewhere",
            "correct the task's index on this machine, or its address (unless something forwards "
            "its connections here)",
        )  # fmt: skip
        return
    busy = list(check_port(check, port, "all TF_CONFIGs"))
    if is_local(own) and not alone:
        yield _only_here(check, own)
    elif not busy:
        yield ok(check, f"is {', '.join(own)} on this machine, and port {port} is free")
    yield from busy


def _only_here(check: str, numbers: Sequence[str]) -> Finding:
    """Returns that a task of this machine has a number under which no other reaches it."""
    text = f"is {', '.join(numbers)} on this machine, which the others cannot reach under this "
    remedy = "let the name resolve to the same number everywhere, see /etc/hosts"
    return note(check, f"{text}number", remedy)


def check_route(task: Task, numbers: Sequence[str]) -> Finding:
    """Checks that there is a route to a task on another machine."""
    check, shown = f"{task.name} ({task.address})", ", ".join(numbers)
    reasons = [reason for number in numbers if (reason := addresses.no_route(number))]
    if len(reasons) == len(numbers):
        remedy = "connect this machine to that network, or correct the address"
        return problem(check, f"there is no route to {shown}: {reasons[0]}", remedy)
    return ok(check, f"is {shown}, to which there is a route")
