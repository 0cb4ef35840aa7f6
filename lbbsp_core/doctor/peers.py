"""Whether the tasks of a cluster reach each other, in both directions, and how they differ."""

from __future__ import annotations

import platform
from collections.abc import Iterator, Mapping, Sequence
from typing import Final

from lbbsp_core._version import __version__
from lbbsp_core.doctor import addresses
from lbbsp_core.doctor.base import Finding, note, ok, problem
from lbbsp_core.doctor.cluster import Cluster, Resolve, Task
from lbbsp_core.doctor.exchange import Contact, Exchange
from lbbsp_core.doctor.messages import Hello, digest
from lbbsp_core.doctor.versions import DISTRIBUTION, framework_version, installed_version
from lbbsp_core.resources.gpu import count_gpus, driver_version, hides_gpus
from lbbsp_core.resources.host import Host
from lbbsp_core.runtime.options.cluster_variables import DEVICES_REMEDY

MAX_OFFSET_SECONDS: Final = 1.0
"""Difference of clocks that is reported."""

MINOR_MATTERS: Final = ("Python",)
"""Packages whose versions are compared without their last part."""

DEVICE: Final = "device"
DRIVER: Final = "NVIDIA driver"


def own_device() -> str:
    """Returns on what TensorFlow trains here, "GPU" or "CPU", as far as is known without it."""
    cpu_build = installed_version("tensorflow-cpu") is not None
    return "CPU" if cpu_build or hides_gpus(Host().environ) or not count_gpus() else "GPU"


def own_versions() -> dict[str, str]:
    """Returns the versions that peers compare."""
    found = {name: framework_version(name) for name in ("tensorflow", "keras", "mxnet")}
    found[DRIVER] = driver_version()
    own = {DISTRIBUTION: __version__, "Python": platform.python_version()}
    return {**own, **{name: version for name, version in found.items() if version}}


def check_peers(
    cluster: Cluster,
    seconds: float,
    *,
    versions: Mapping[str, str] | None = None,
    resolve: Resolve = addresses.resolve,
) -> list[Finding]:
    """Meets the doctors of all other tasks, which must run at the same time."""
    task = cluster.own
    if task is None:
        return [note("peers", "an evaluator is no part of the cluster: it connects to no task")]
    if not cluster.peers:
        return [note("peers", "the cluster has no other task")]
    numbers = resolve([each.address.host for each in cluster.tasks])
    mine = numbers_of(numbers[task.address.host])
    if versions is None:
        versions = own_versions()
        if not any(each.name.startswith("ps ") for each in cluster.tasks):  # else no collectives
            versions[DEVICE] = own_device()
    job = digest(f"{each.name} {each.address}" for each in cluster.tasks)
    own = Hello(task.name, job, versions)
    contacts = [
        Contact(each.name, found, each.address.port)
        for each in cluster.peers
        if (found := numbers_of(numbers[each.address.host]))
    ]
    alone = all(addresses.is_local(found) for found in numbers.values() if numbers_of(found))
    if not (listened := _listened(mine, alone=alone)):
        remedy = "correct this task's address, see above"
        return [problem("peers", f"cannot listen: {task.address} is not on this machine", remedy)]
    try:
        Exchange(own, listened, task.address.port, contacts, seconds).run()
    except OSError as error:
        remedy = "see above: free the port, or choose another one"
        return [problem("peers", f"cannot listen on {task.address}: {error.strerror}", remedy)]
    return [finding for each in contacts for finding in describe(each, own, task, seconds)]


def _listened(numbers: Sequence[str], *, alone: bool) -> list[str]:
    """Returns the IP numbers to listen on: those of the own task that are on this machine.

    Debian lets a machine's own name resolve to 127.0.1.1 there. The other machines know another
    number, under which they reach TensorFlow, because it listens on all interfaces: so do we.
    """
    own = [number for number in numbers if addresses.is_own(number)]
    if alone or not addresses.is_local(own):
        return own
    return list(dict.fromkeys("::" if ":" in number else "0.0.0.0" for number in own))


def describe(contact: Contact, own: Hello, task: Task, seconds: float) -> Iterator[Finding]:
    """Yields what was learned of a peer: each direction, its clock and its versions."""
    peer = f"{contact.name} ({contact.numbers[0]}:{contact.port})"
    there, back = f"this task to {peer}", f"{peer} to this task"
    if contact.error:
        yield problem(there, f"{contact.name} does not answer: {contact.error} (for {seconds:g} s)",
                      _remedy(contact))  # fmt: skip
    else:
        ahead = "ahead" if contact.offset_seconds >= 0 else "behind"
        yield ok(there, f"answers in {contact.rtt_seconds * 1e3:.2f} ms; its clock is "
                 f"{abs(contact.offset_seconds):.3f} s {ahead}")  # fmt: skip
    if not contact.comes:
        pass
    elif contact.has_come:
        yield ok(back, f"{contact.name} has reached {task.address}")
    else:
        yield problem(
            back, f"{contact.name} has not reached {task.address} within {seconds:g} s",
            "see what its own report says; if it runs, admit its host to port "
            f"{task.address.port} of this machine, in all firewalls between them",
        )  # fmt: skip
    if contact.hello is not None:
        yield from _differences(contact, contact.hello, own)


def _remedy(contact: Contact) -> str:
    here = f"port {contact.port} of {contact.numbers[0]}"
    start = f"start `lbbsp doctor --peers` as {contact.name} at the same time"
    if "refused" in contact.error:
        return f"{start}; if it runs, a firewall rejects connections to {here}"
    if "timed out" in contact.error:
        return f"start that host, and admit this one to {here} in all firewalls between them"
    if "route" in contact.error or "unreachable" in contact.error:
        return "connect the two machines, or correct the address"
    return f"end what runs at {here}, and {start}"


def _differences(contact: Contact, hello: Hello, own: Hello) -> Iterator[Finding]:
    name = contact.name
    if abs(contact.offset_seconds) > MAX_OFFSET_SECONDS:
        yield note(
            f"clock of {name}", f"differs by {contact.offset_seconds:+.1f} s: training does not "
            "depend on it, but times of run records and logs do", "synchronise the clocks by NTP",
        )  # fmt: skip
    if hello.cluster != own.cluster:
        yield problem(
            f"cluster of {name}", "is another one than that of this task",
            "give all tasks the same addresses in the same order (TF_CONFIG, DMLC_*)",
        )  # fmt: skip
        return
    for package in sorted({*hello.versions, *own.versions}):
        theirs, mine = (_compared(package, each.versions) for each in (hello, own))
        if theirs == mine or (package in (DEVICE, DRIVER) and not (theirs and mine)):
            continue
        if package == DEVICE:
            yield problem(
                f"device of {name}", f"is a {theirs}, here it is a {mine}: TensorFlow's "
                "collectives need the same type on all workers", DEVICES_REMEDY,
            )  # fmt: skip
            continue
        text = f"{package} {hello.versions.get(package, 'is not installed')}, here "
        text += own.versions.get(package, "not")
        remedy = "install the same versions on all machines"
        if package == DISTRIBUTION:
            yield problem(f"versions of {name}", f"{text}: workers refuse to start", remedy)
        else:
            yield note(f"versions of {name}", f"{text}: results may differ a little", remedy)


def _compared(package: str, versions: Mapping[str, str]) -> str:
    version = versions.get(package, "")
    return version.rpartition(".")[0] if package in MINOR_MATTERS else version


def numbers_of(found: Sequence[str] | str) -> list[str]:
    """Returns the IP numbers that `resolve` has found of a host; none if it says why not."""
    return [] if isinstance(found, str) else list(found)
