"""Runs a worker script as a real cluster of processes and collects what every rank says."""

from __future__ import annotations

import json
import shutil
import sys
import tempfile
import threading
import time
from collections import defaultdict
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from queue import Empty, SimpleQueue

import psutil
import pytest
from waits import HANG_SECONDS

from lbbsp_core.launch import launch
from lbbsp_core.runtime.record.record import Run

SCRIPTS = Path(__file__).parent / "scripts"
RESULT = "RESULT "
LAUNCHER = -1
"""Stands for a rank, at the end of a cluster."""

SECONDS = 1800.0
"""Limit of a script: several times what the longest takes on a slow and busy machine."""


needs_mxnet = pytest.mark.skipif(
    find_spec("mxnet") is None, reason="needs mxnet: pip install 'lbbsp[mx]'"
)
"""Mark of tests that need MXNet."""


def campaign(*cases: object) -> list[object]:
    """Leaves cases of a parametrised test to `make test-all`."""
    return [
        pytest.param(*(case if isinstance(case, tuple) else [case]), marks=pytest.mark.campaign)
        for case in cases
    ]


def on(kind: object, *cases: str, campaign: Sequence[str] = ()) -> list[object]:
    """Pairs of a kind of job, such as its number of workers, and each of its cases."""
    later = [pytest.param(kind, case, marks=pytest.mark.campaign) for case in campaign]
    return [pytest.param(kind, case) for case in cases] + later


def chosen(request: pytest.FixtureRequest, name: str, **others: object) -> list[object]:
    """Values of a parameter in those tests of the module that are to run.

    Args:
        request: That of a fixture of the module.
        name: Name of the parameter.
        others: Values of other parameters of these tests.
    """
    calls = [getattr(item, "callspec", None) for item in request.session.items
             if item.path == request.path]  # fmt: skip
    found = [call.params for call in calls if call and name in call.params]
    return list(dict.fromkeys(p[name] for p in found if others.items() <= p.items()))


@dataclass
class Job:
    """What came of a launch."""

    status: int = -1
    lines: dict[int, list[str]] = field(default_factory=lambda: defaultdict(list))

    @property
    def text(self) -> str:
        """Everything said, by rank."""
        return "\n".join(f"[{rank}] {line}" for rank in self.lines for line in self.lines[rank])

    def results(self, rank: int) -> dict[str, object]:
        """What `rank` printed as ``RESULT name json``, by name."""
        found = {}
        for line in self.lines[rank]:
            if line.startswith(RESULT):
                name, _, value = line[len(RESULT) :].partition(" ")
                found[name] = json.loads(value)
        return found


def run(script: str, *args: str, workers: int, timeout: float = SECONDS, **options: object) -> Job:
    """Launches ``scripts/SCRIPT.py``; no process of it is left when this returns."""
    job = Job()
    job.status = launch(
        [str(SCRIPTS / f"{script}.py"), *args],
        workers=workers,
        timeout=timeout,
        grace=HANG_SECONDS,
        output=lambda rank, line: job.lines[rank].append(line),
        **options,
    )
    sys.stdout.write(job.text)
    left = [p for p in psutil.Process().children(recursive=True) if _runs(p, f"{script}.py")]
    assert not left, f"processes left behind: {left}"
    return job


class Clusters:
    """Clusters by their sizes, each of which starts when a script first needs it."""

    def __init__(self) -> None:
        self._clusters: dict[tuple[object, ...], Cluster] = {}

    def run(
        self, script: str, *args: str, workers: int, framework: str = "tensorflow",
        servers: int | None = None, devices: int = 1, timeout: float = SECONDS,
    ) -> Job:  # fmt: skip
        """Runs a script as `run` does, in the processes that have run others.

        Args:
            script: Name of the script.
            args: Its arguments.
            workers: Number of workers.
            framework: Framework of the cluster.
            servers: Number of parameter servers.
            devices: Number of devices that the script makes of the processor of a worker.
            timeout: Seconds that the script may take.
        """
        key = workers, framework, servers, devices
        cluster = self._clusters.get(key)
        if cluster is None or not cluster.runs:
            cluster = self._clusters[key] = Cluster(workers, framework, servers)
        return cluster.run(script, *args, timeout=timeout)

    def run_chosen(
        self, request: pytest.FixtureRequest, script: str, kind: str = "workers", **options: object
    ) -> dict[int, Job]:
        """Runs the cases that are to run, by their values of an option, such as the workers."""
        found = {}
        for value in chosen(request, kind):
            cases = chosen(request, "case", **{kind: value})
            found[value] = self.run(script, *cases, **{kind: value}, **options)
            assert found[value].status == 0
        return found

    def close(self) -> None:
        """Ends all clusters in order."""
        for cluster in self._clusters.values():
            cluster.end()
        for cluster in self._clusters.values():
            cluster.close()


class Cluster:
    """Workers that run scripts in turn; a script that fails on one of them ends all.

    Args:
        workers: Number of workers.
        framework: Framework of the cluster.
        servers: Number of parameter servers.
    """

    def __init__(self, workers: int, framework: str, servers: int | None) -> None:
        self._workers, self._count = workers, 0
        self._folder = tempfile.mkdtemp(prefix="in-turn-")
        self._said: SimpleQueue[tuple[int, str]] = SimpleQueue()
        self._status: Future[int] = Future()
        options = {"workers": workers, "framework": framework, "servers": servers}
        threading.Thread(target=self._launch, args=[options], daemon=True).start()

    @property
    def runs(self) -> bool:
        """Whether the workers can run a script."""
        return not self._status.done()

    def run(self, script: str, *args: str, timeout: float) -> Job:
        """Runs a script on all workers; the status is that of the cluster if the script ends it."""
        job, number, ended = Job(0), self._count, set()
        self._command([script, args])
        deadline = time.monotonic() + timeout
        while len(ended) < self._workers:
            try:
                rank, line = self._said.get(timeout=max(0.0, deadline - time.monotonic()))
            except Empty:
                self._kill()
                deadline = time.monotonic() + SECONDS  # the launcher tells of the end
                continue
            if rank == LAUNCHER:
                job.status = self._status.result()
                break
            if line == f"END {number}":
                ended.add(rank)
            else:
                job.lines[rank].append(line)
        sys.stdout.write(job.text)
        return job

    def end(self) -> None:
        """Asks the workers to end."""
        if self.runs:
            self._command(None)

    def close(self) -> None:
        """Waits for the end of the workers; no process of them is left when this returns."""
        try:
            self._status.result(timeout=SECONDS)
        finally:
            left = self._kill()
            shutil.rmtree(self._folder)
        assert not left, f"processes left behind: {left}"

    def _launch(self, options: dict[str, object]) -> None:
        status = launch(
            [str(SCRIPTS / "in_turn.py"), options["framework"], self._folder],
            output=lambda rank, line: self._said.put((rank, line)),
            **options,
        )
        self._status.set_result(status)
        self._said.put((LAUNCHER, ""))

    def _command(self, command: object) -> None:
        file = Path(self._folder, f"{self._count}.json")
        file.with_suffix(".part").write_text(json.dumps(command))
        file.with_suffix(".part").rename(file)
        self._count += 1

    def _kill(self) -> list[psutil.Process]:
        left = [p for p in psutil.Process().children(recursive=True) if _runs(p, self._folder)]
        for process in left:
            process.kill()
        return left


def _runs(process: psutil.Process, name: str) -> bool:
    try:
        return any(name in part for part in process.cmdline())
    except psutil.Error:
        return False


def check_unequal(runs: dict[str, Run]) -> None:
    """Checks runs with 48 samples a step, of which the third worker needs 5 ms each, others 2 ms.

    Even batches are recorded with forecasts and driving factors, and show what to gain. The first
    plan that knows the times of all workers lets them finish together.
    """
    even, balanced = (
        [s for s in runs[k].steps if sum(s.sizes) == 48] for k in ("even", "balanced")
    )
    for step in even:
        assert step.sizes == (16, 16, 16)
        assert step.busy_seconds == pytest.approx((0.032, 0.032, 0.08))
        assert step.wall_seconds == pytest.approx(0.08)
    for step in even[2:]:
        assert step.predicted_seconds == pytest.approx(step.busy_seconds)
        assert "cpu_other_percent" in step.drivers
    assert [step.sizes for step in balanced[:2]] == 2 * [(16, 16, 16)]
    for step in balanced[2:]:
        assert step.sizes == (20, 20, 8)
        assert step.busy_seconds == pytest.approx(3 * [0.04])
