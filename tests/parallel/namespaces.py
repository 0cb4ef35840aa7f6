"""Network namespaces that stand for machines."""

import contextlib
import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

LINK = "lbbsp0"
"""Name of the link in each namespace."""


def ip(*arguments: str, check: bool = True) -> bool:
    done = subprocess.run(["ip", *arguments], check=check, capture_output=True)
    return done.returncode == 0


@contextlib.contextmanager
def namespaces(*addresses: str) -> Iterator[list[str]]:
    """Yields the names of namespaces that a switch connects, in each of which they resolve.

    Skips the test where this is not permitted.
    """
    names = [f"lbbsp-{os.getpid()}-{number}" for number in range(len(addresses))]
    if shutil.which("ip") is None or not ip("netns", "add", names[0], check=False):
        pytest.skip("this machine allows no network namespaces")
    switch = f"{names[0]}-switch"
    known = "".join(f"{a} {name}\n" for a, name in zip(addresses, names, strict=True))
    files = [Path("/etc/netns", name, "hosts") for name in names]  # `ip` mounts it in /etc
    try:
        for name in (*names[1:], switch):
            ip("netns", "add", name)
        ip("-n", switch, "link", "add", LINK, "type", "bridge")
        ip("-n", switch, "link", "set", LINK, "up")
        for number, name in enumerate(names):
            port = f"port{number}"
            ip("link", "add", port, "netns", switch, "type", "veth", "peer", LINK, "netns", name)
            ip("-n", switch, "link", "set", port, "master", LINK, "up")
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
