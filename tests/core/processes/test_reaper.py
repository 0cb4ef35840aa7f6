"""How the processes of a job are found."""

import os
import subprocess
import sys

import pytest

from lbbsp_core.processes import _reaper

FOLDER = "/tmp/lbbsp-job"
ENVIRONMENT = f"HOME=/root\0{_reaper.JOB}={FOLDER}\0".encode()


@pytest.fixture
def proc(tmp_path, monkeypatch):
    """Returns a function that adds a process to a ``/proc`` of our own."""
    monkeypatch.setattr(_reaper, "PROC", str(tmp_path))

    def add(pid, environment, env_end="140731483828205", user_space=True):
        folder = tmp_path / str(pid)
        folder.mkdir()
        (folder / "environ").write_bytes(environment)
        (folder / "stat").write_text(f"{pid} (a) b) S {'1 ' * 47}{env_end} 0")
        if user_space:
            (folder / "exe").symlink_to(sys.executable)
        return folder

    return add


def test_a_process_that_is_just_executed_is_found_as_soon_as_it_has_its_environment(
    proc, monkeypatch
):
    late = proc(5, b"", env_end="0")
    proc(6, ENVIRONMENT)
    monkeypatch.setattr(
        _reaper.time, "sleep", lambda seconds: (late / "environ").write_bytes(ENVIRONMENT)
    )
    assert sorted(_reaper.processes_of(FOLDER)) == [5, 6]


def test_one_that_never_gets_its_environment_ends_the_search(proc, monkeypatch):
    proc(5, b"", env_end="0")
    proc(6, ENVIRONMENT)
    waits = []
    monkeypatch.setattr(_reaper.time, "sleep", waits.append)
    assert _reaper.processes_of(FOLDER) == [6]
    assert sum(waits) == pytest.approx(1)


def test_nothing_waits_for_empty_environments_and_threads_of_the_kernel(proc, monkeypatch):
    proc(5, b"")
    proc(6, b"", env_end="0", user_space=False)
    proc(7, ENVIRONMENT + b"X=\0")
    proc(8, ENVIRONMENT.replace(b"lbbsp-job", b"lbbsp-job-2"))
    monkeypatch.setattr(_reaper.time, "sleep", lambda seconds: pytest.fail("it waits"))
    assert _reaper.processes_of(FOLDER) == [7]


@pytest.mark.skipif(not os.path.isdir("/proc"), reason="there is no /proc")
def test_processes_that_execute_programs_without_end_are_always_found(tmp_path):
    script = tmp_path / "again.sh"
    script.write_text('exec /bin/sh "$0"\n')
    environment = {**os.environ, _reaper.JOB: FOLDER}
    processes = [
        subprocess.Popen(["/bin/sh", str(script)], env=environment, start_new_session=True)
        for _ in range(2)
    ]
    try:
        expected = {process.pid for process in processes}
        for _ in range(300):
            assert expected <= set(_reaper.processes_of(FOLDER))
    finally:
        for process in processes:
            process.kill()
            process.wait()
