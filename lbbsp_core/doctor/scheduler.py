"""Whether the processes of a cluster of MXNet reach the address of its scheduler."""

from __future__ import annotations

import os
import platform
from collections.abc import Mapping

from lbbsp_core.doctor import addresses
from lbbsp_core.doctor.addresses import Address
from lbbsp_core.doctor.base import Finding, ok, problem
from lbbsp_core.doctor.cluster import Resolve, Task
from lbbsp_core.doctor.exchange import Contact, Exchange
from lbbsp_core.doctor.messages import Hello, digest
from lbbsp_core.doctor.peers import describe, numbers_of, own_versions


def check_scheduler(
    environment: Mapping[str, str],
    seconds: float,
    *,
    versions: Mapping[str, str] | None = None,
    resolve: Resolve = addresses.resolve,
) -> list[Finding]:
    """Meets the doctors of a cluster of MXNet at the address of its scheduler.

    Only this address is known before a job starts: the scheduler listens there, and the others
    connect to it.
    """
    host, role, *rest = (environment[name] for name in (
        "DMLC_PS_ROOT_URI", "DMLC_ROLE", "DMLC_PS_ROOT_PORT", "DMLC_NUM_WORKER", "DMLC_NUM_SERVER"
    ))  # fmt: skip
    port, workers, servers = map(int, rest)
    root = Task("scheduler", Address(host, port))
    name = root.name if role == root.name else f"{role} {platform.node()[:40]}:{os.getpid()}"
    mine = own_versions() if versions is None else versions
    own = Hello(name, digest([str(root.address), f"{workers} {servers}"]), mine)
    numbers = numbers_of(resolve([host])[host])
    if not numbers:
        return []  # reported with the address
    if name != root.name:
        scheduler = Contact(root.name, numbers, port, comes=False)
        Exchange(own, [], 0, [scheduler], seconds).run()
        return list(describe(scheduler, own, root, seconds))
    listened = [number for number in numbers if addresses.is_own(number)]
    return _wait(Exchange(own, listened, port, [], seconds, visitors=workers + servers), root)


def _wait(exchange: Exchange, root: Task) -> list[Finding]:
    """Waits for all others as the scheduler."""
    if not exchange.numbers:
        return []  # reported with the address
    try:
        exchange.run()
    except OSError as error:
        remedy = "see above: free the port, or choose another one"
        return [problem("peers", f"cannot listen on {root.address}: {error.strerror}", remedy)]
    return [_visitors(exchange, root)]


def _visitors(exchange: Exchange, root: Task) -> Finding:
    """Returns who has come to the scheduler."""
    came = ", ".join(sorted(exchange.came)) or "none"
    text = f"{len(exchange.came)} of {exchange.visitors} processes have reached {root.address}"
    check = f"others to scheduler ({root.address})"
    if len(exchange.came) == exchange.visitors:
        return ok(check, f"{text}: {came}")
    return problem(
        check,
        f"{text} within {exchange.seconds:g} s: {came}",
        "start `lbbsp doctor --peers` for each worker and server at the same time, and admit them "
        f"to port {root.address.port} of this machine",
    )
