"""Sessions of the replicas of this process, each with a batch size and a predictor of its own.

The unit of allocation is the replica: a device. A process with several devices runs one session
for each, and only the first of them, the leader, communicates with other processes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from lbbsp_core.runtime.checkpoint.serialization import Arrays, Json
from lbbsp_core.runtime.exchange.collectives import Collectives
from lbbsp_core.runtime.exchange.handshake import Devices, Facts
from lbbsp_core.runtime.loop.session import WorkerSession
from lbbsp_core.runtime.options.options import SessionOptions
from lbbsp_core.runtime.reliability.activity import CurrentActivity


class LocalReplicas:
    """Collectives of replicas that all belong to one process."""

    rank = 0

    def __init__(self, replicas: int) -> None:
        self.workers = replicas

    def all_gather(self, values: Sequence[int]) -> list[list[int]]:
        """Returns the values of this process for each of its replicas."""
        return [list(values) for _ in range(self.workers)]


class ReplicaSessions(list[WorkerSession]):
    """Sessions of the replicas of this process, in the order of their ranks.

    Methods act on all of them. `collectives` have the rank of this process's first replica.
    """

    def __init__(
        self,
        collectives: Collectives,
        count: int,
        global_batch_size: int,
        options: SessionOptions,
        versions: Mapping[str, str],
        activity: CurrentActivity | None = None,
        devices: Devices | None = None,
    ) -> None:
        followers = [_Follower(collectives.rank + i, collectives.workers) for i in range(1, count)]
        super().__init__(
            WorkerSession(
                each,
                global_batch_size,
                options,
                framework="tensorflow",
                versions=versions,
                activity=activity if each is collectives else None,
                devices=devices,
            )
            for each in (collectives, *followers)
        )
        self.leader = self[0]  # through which the process communicates

    def start(self, facts: Facts) -> None:
        """Starts all sessions with one handshake of the leader; see `WorkerSession.start`."""
        self.leader.start(facts)
        for session in self[1:]:
            session.start(facts, self.leader.peers)

    def exclude_step(self) -> None:
        """Excludes the running step from learning, because it contains other work."""
        for session in self:
            session.exclude_step()

    def save_state(self) -> tuple[Json, Arrays]:
        """Returns the state of all replicas of the job; see `WorkerSession.save_state`."""
        return self.leader.save_state(self[1:])

    def load_state(self, state: Json, arrays: Arrays) -> None:
        """Continues from a saved state; see `WorkerSession.load_state`."""
        for session in self:
            session.load_state(state, arrays)

    def close(self) -> None:
        """Ends a fit; see `WorkerSession.close`."""
        for session in self:
            session.close()


class _Follower(NamedTuple):
    """Collectives of another replica of the same process, whose leader communicates."""

    rank: int
    workers: int

    def all_gather(self, values: Sequence[int]) -> list[list[int]]:
        raise NotImplementedError("only the first replica of a process communicates")
