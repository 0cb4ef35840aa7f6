"""Program that reports workers that have not started, while its parent waits for them.

The constructor of the strategy waits without a word, and no thread of Python can run meanwhile. But
it first listens on the port of its worker. So the parent waits as long as its own port accepts
connections and that of another worker does not. The program ends when there is something on its
standard input, or its end, or when the parent has died. It imports only the standard library.
"""

from __future__ import annotations

import json
import os
import select
import socket
import sys
import time

PROBE_SECONDS = 1.0
CONNECT_SECONDS = 2.0


def main(arguments: list[str]) -> None:
    """Reports until the standard input ends.

    Args:
        arguments: ``rank addresses_as_json seconds_between_reports path_of_mark_or_empty``; the
            mark exists while the parent waits.
    """
    rank, addresses, seconds, mark = (
        int(arguments[0]),
        json.loads(arguments[1]),
        float(arguments[2]),
        arguments[3],
    )
    waits_since, reports, parent = None, 0, os.getppid()
    try:
        # A fork of the parent may hold the other end of the standard input open.
        while not select.select([sys.stdin], [], [], PROBE_SECONDS)[0] and os.getppid() == parent:
            missing = missing_workers(rank, addresses)
            if missing and waits_since is None:
                waits_since = time.monotonic()
                if mark:
                    open(mark, "w", encoding="utf-8").close()
            if missing and time.monotonic() - waits_since >= seconds * (reports + 1):
                reports += 1
                print(report(rank, addresses, missing), file=sys.stderr, flush=True)
    finally:
        if mark and os.path.exists(mark):
            os.remove(mark)


def missing_workers(rank: int, addresses: list[str]) -> list[int]:
    """Returns the workers for which this one waits."""
    if not accepts(f"localhost:{addresses[rank].rpartition(':')[2]}"):
        return []
    return [each for each, address in enumerate(addresses) if not accepts(address)]


def accepts(address: str) -> bool:
    """Returns whether something accepts connections at an address."""
    host, _, port = address.rpartition(":")
    try:
        socket.create_connection((host.strip("[]"), int(port)), CONNECT_SECONDS).close()
    except OSError:
        return False
    return True


def report(rank: int, addresses: list[str], missing: list[int]) -> str:
    """Returns a line that names the workers for which this one waits."""
    names = ", ".join(f"worker {each} ({addresses[each]})" for each in missing)
    have = "has" if len(missing) == 1 else "have"
    return (
        f"lbbsp: worker {rank} ({addresses[rank]}) is waiting for {names}, which {have} not "
        "started, or cannot be reached"
    )


if __name__ == "__main__":
    main(sys.argv[1:])
