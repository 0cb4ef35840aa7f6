"""Network namespaces that stand for machines, in benchmarks and tests."""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import unittest
from collections.abc import Iterator
from pathlib import Path

LINK = "lbbsp0"
"""Name of the link in each namespace."""


def ip(*arguments: str, check: bool = True) -> bool:
    done = subprocess.run(["ip", *arguments], check=check, capture_output=True)
    return done.returncode == 0


def limit(namespace: str, link: str, mbits: float) -> None:
    """Limits what leaves a link to some Mbit/s; a packet waits for 0.3 s at most."""
    burst = max(round(mbits * 1e6 / 8 / 250), 1 << 16)  # bytes of a tick of the kernel, or a packet
    rate = ["rate", f"{mbits}mbit", "burst", str(burst), "latency", "300ms"]
    command = ["tc", "-n", namespace, "qdisc", "add", "dev", link, "root", "tbf", *rate]
    subprocess.run(command, check=True)  # prints what is wrong


@contextlib.contextmanager
def namespaces(*addresses: str, mbits: float | None = None) -> Iterator[list[str]]:
    """Yields the names of namespaces that a switch connects, in each of which they resolve.

    Args:
        *addresses: Addresses of the namespaces, in one network of 254.
        mbits: Mbit/s of each link in each direction. None sets no limit.

    Raises:
        unittest.SkipTest: This machine allows no namespaces, or lacks a program. pytest then skips
            the test.
    """
    names = [f"lbbsp-{os.getpid()}-{number}" for number in range(len(addresses))]
    for program in ("ip", "tc"):
        if shutil.which(program) is None:
            raise unittest.SkipTest(f"{program} is not on PATH: install iproute2")
    switch = f"{names[0]}-switch"
    known = "".join(f"{a} {name}\n" for a, name in zip(addresses, names, strict=True))
    files = [Path("/etc/netns", name, "hosts") for name in names]  # `ip` mounts it in /etc
    try:
        if not ip("netns", "add", names[0], check=False):
            raise unittest.SkipTest("this machine allows no network namespaces: start as root")
        for name in (*names[1:], switch):
            ip("netns", "add", name)
        ip("-n", switch, "link", "add", LINK, "type", "bridge")
        ip("-n", switch, "link", "set", LINK, "up")
        for number, name in enumerate(names):
            port = f"port{number}"
            ip("link", "add", port, "netns", switch, "type", "veth", "peer", LINK, "netns", name)
            ip("-n", switch, "link", "set", port, "master", LINK, "up")
            if mbits is not None:
                limit(name, LINK, mbits)
                limit(switch, port, mbits)
        for name, address, file in zip(names, addresses, files, strict=True):
            ip("-n", name, "address", "add", f"{address}/24", "dev", LINK)
            ip("-n", name, "link", "set", LINK, "up")
            ip("-n", name, "link", "set", "lo", "up")
            file.parent.mkdir(parents=True)
            file.write_text(f"127.0.0.1 localhost\n{known}")
        yield names
    finally:
        ip("netns", "delete", switch, check=False)
        for name, file in zip(names, files, strict=True):
            ip("netns", "delete", name, check=False)
            shutil.rmtree(file.parent, ignore_errors=True)
