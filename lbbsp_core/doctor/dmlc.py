"""What the ``DMLC_*`` variables of MXNet say, and whether its addresses fit here."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import psutil

from lbbsp_core.doctor import addresses
from lbbsp_core.doctor.addresses import Address, is_local
from lbbsp_core.doctor.base import Finding, note, ok, problem
from lbbsp_core.doctor.cluster import Resolve, Task, check_route
from lbbsp_core.doctor.ports import check_port
from lbbsp_core.runtime.options.cluster_variables import DMLC_NAMES, DMLC_REMEDY, dmlc_problem


def dmlc_variables(environment: Mapping[str, str]) -> dict[str, str]:
    """Returns the variables of MXNet's transport that are set and not empty."""
    return {name: environment[name] for name in DMLC_NAMES if environment.get(name, "").strip()}


def check_dmlc(
    environment: Mapping[str, str], resolve: Resolve = addresses.resolve
) -> Iterator[Finding]:
    """Checks the variables of MXNet's transport."""
    given = dmlc_variables(environment)
    if found := dmlc_problem(given):
        yield problem("DMLC_*", found, DMLC_REMEDY)
        return
    if not given:
        yield ok("DMLC_*", "are not set: one worker, without balancing")
        return
    host, port = given["DMLC_PS_ROOT_URI"], int(given["DMLC_PS_ROOT_PORT"])
    role, workers, servers = (
        given[name] for name in ("DMLC_ROLE", "DMLC_NUM_WORKER", "DMLC_NUM_SERVER")
    )
    yield ok("DMLC_*", f"this is a {role} of {workers} workers and {servers} servers; the "
             f"scheduler listens at {host}:{port}")  # fmt: skip
    yield from _check_root(role, Address(host, port), resolve)
    yield from _check_node_host(environment, resolve)


def _check_root(role: str, root: Address, resolve: Resolve) -> Iterator[Finding]:
    """Checks the address of the scheduler, from the scheduler itself or from another process."""
    check, numbers = f"scheduler ({root})", resolve([root.host])[root.host]
    if isinstance(numbers, str):
        remedy = "correct DMLC_PS_ROOT_URI: the scheduler's IP number is best"
        yield problem(check, f"{root.host!r} has no address: {numbers}", remedy)
        return
    shown, listens = ", ".join(numbers), role == "scheduler"
    own = [number for number in numbers if addresses.is_own(number)]
    if listens and not own:
        remedy = "start the scheduler on that machine, or correct DMLC_PS_ROOT_URI everywhere"
        yield problem(check, f"{shown} is not an address of this machine", remedy)
        return
    where = "DMLC_PS_ROOT_PORT everywhere"
    busy = list(check_port(check, root.port, where, own)) if listens else []
    if is_local(numbers):
        remedy = "on several machines, set DMLC_PS_ROOT_URI to an address that all of them reach"
        yield note(check, f"{shown} is this machine itself: all processes must run here", remedy)
    elif not listens:
        yield check_route(Task("scheduler", root), numbers)
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
    known = sorted(psutil.net_if_addrs())
    if interface and interface not in known:
        remedy = "correct it, or leave it out"
        yield problem("DMLC_INTERFACE", f"must be one of {', '.join(known)}, got {interface!r}",
                      remedy)  # fmt: skip
