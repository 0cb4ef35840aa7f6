"""Program beside a worker while it starts: names those that have not started, or have failed.

The constructor of the strategy waits without a word, and no thread of Python can run meanwhile. But
it first listens on the port of its worker. So the parent waits as long as its own port accepts
connections and that of another worker does not. A line on the standard input ends the program: all
have started, and give signs of life of their own. If the parent ends before, or stays suspended,
the program listens on its port, to tell the programs of the other workers, which then end their
parents. A launcher ends them itself, and is told by a mark who waits. It imports only the standard
library.
"""

from __future__ import annotations

import json
import os
import select
import signal
import socket
import sys
import time
from collections.abc import Sequence
from contextlib import suppress

PROBE_SECONDS = 1.0
CONNECT_SECONDS = 2.0
ANSWER_SECONDS = 0.2  # TensorFlow's servers speak first, too
TELL_SECONDS = 600.0  # in which other workers may start
SUSPENDED_LOOKS = 10  # after which a worker that is suspended counts as failed
SAY_SECONDS = 5  # after which a full pipe ends this program
FAILED = b"lbbsp: failed"


def main(arguments: list[str]) -> None:
    """Reports until the standard input has a line or ends.

    Args:
        arguments: ``rank addresses_as_json seconds_between_reports path_of_mark_or_empty``; the
            mark exists while the parent waits. With a mark, failures are left to the launcher.
    """
    rank, addresses, seconds = map(json.loads, arguments[:3])
    mark = arguments[3]
    own_address = f"localhost:{addresses[rank].rpartition(':')[2]}"
    report_at, parent, suspended = 0.0, os.getppid(), 0  # 0: workers were not missing yet
    if not mark:
        probe(own_address, rank)  # the program of a failed attempt before this one then ends
    try:
        # A fork of the parent may hold the other end of the standard input open.
        while not select.select([sys.stdin], [], [], PROBE_SECONDS)[0] and os.getppid() == parent:
            suspended = suspended + 1 if is_suspended(parent) else 0
            if suspended == SUSPENDED_LOOKS:
                print_message(f"{named(addresses, [rank])} was suspended, and is ended")
                os.kill(parent, signal.SIGKILL)
            if suspended or probe(own_address, rank) is None:
                continue  # the parent has not got so far
            peers = {peer: address for peer, address in enumerate(addresses) if peer != rank}
            answers = {peer: probe(address, rank) for peer, address in peers.items()}
            failed = [peer for peer, answer in answers.items() if answer == FAILED]
            if failed and not mark and os.getppid() == parent:
                os.kill(parent, signal.SIGKILL)  # TensorFlow ignores SIGTERM meanwhile
                signal.alarm(SAY_SECONDS)
                print_message(
                    f"{named(addresses, failed)} ended before all workers had started: see its "
                    "output; this worker ends, too"
                )
                return
            missing = [peer for peer, answer in answers.items() if answer is None]
            if missing and not report_at:
                report_at = time.monotonic() + seconds
                if mark:
                    open(mark, "w", encoding="utf-8").close()
            if missing and time.monotonic() >= report_at:
                report_at += seconds
                have = "has" if len(missing) == 1 else "have"
                print_message(
                    f"{named(addresses, [rank])} is waiting for {named(addresses, missing)}, "
                    f"which {have} not started, or cannot be reached"
                )
        has_line = select.select([sys.stdin], [], [], 0)[0] and os.read(sys.stdin.fileno(), 1)
        if not mark and not has_line:  # the parent has ended
            report_failure(rank, addresses)
    finally:
        if mark and os.path.exists(mark):
            os.remove(mark)


def is_suspended(process: int) -> bool:
    """Returns whether a process is stopped by a signal; False where the system does not tell."""
    with suppress(OSError), open(f"/proc/{process}/stat", "rb") as file:
        return file.read().rpartition(b")")[2].split()[0] == b"T"
    return False


def probe(address: str, rank: int) -> bytes | None:
    """Returns what a worker's port says at once, or None if nothing accepts a connection there.

    Args:
        address: Address of the worker.
        rank: Number of the worker that asks: one that has failed need not tell it again.
    """
    host, _, port = address.rpartition(":")
    try:
        with socket.create_connection((host.strip("[]"), int(port)), CONNECT_SECONDS) as connection:
            connection.settimeout(ANSWER_SECONDS)
            answer = b""
            with suppress(OSError):
                answer = connection.recv(len(FAILED))
                if answer == FAILED:
                    connection.sendall(b"%d\n" % rank)
            return answer
    except OSError:
        return None


def print_message(text: str) -> None:
    """Prints a message, where that is possible."""
    with suppress(OSError, ValueError):
        print(f"lbbsp: {text}", file=sys.stderr, flush=True)


def report_failure(rank: int, addresses: Sequence[str]) -> None:
    """Tells the other workers that this one has failed, until they know or have failed, too."""
    with open(os.devnull, "w", encoding="utf-8") as nowhere:
        os.dup2(nowhere.fileno(), 2)  # whoever reads the parent's output waits for its end
    untold, until = set(range(len(addresses))) - {rank}, time.monotonic() + TELL_SECONDS
    port = int(addresses[rank].rpartition(":")[2])
    with suppress(OSError), listening(port) as server:  # or the port belongs to another worker
        server.settimeout(PROBE_SECONDS)
        while untold and time.monotonic() < until:
            with suppress(OSError, ValueError), server.accept()[0] as connection:
                connection.settimeout(CONNECT_SECONDS)
                connection.sendall(FAILED)
                caller = int(connection.makefile("rb").readline(20))
                if caller == rank:  # it has been started again
                    return
                untold.discard(caller)
            untold -= {peer for peer in untold if probe(addresses[peer], rank) == FAILED}


def listening(port: int) -> socket.socket:
    """Returns a socket that listens as a worker of TensorFlow does: on all interfaces."""
    if socket.has_dualstack_ipv6():
        return socket.create_server(("", port), family=socket.AF_INET6, dualstack_ipv6=True)
    return socket.create_server(("", port))


def named(addresses: Sequence[str], ranks: Sequence[int]) -> str:
    """Returns workers with their addresses."""
    return ", ".join(f"worker {rank} ({addresses[rank]})" for rank in ranks)


if __name__ == "__main__":
    main(sys.argv[1:])
