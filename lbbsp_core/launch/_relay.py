"""Program that stands for a process on another host: it starts it by ssh, and ends as it does.

The launcher runs a relay in place of each process that is to run elsewhere. So it watches, signals
and restarts processes of other hosts as those of its own. ssh runs ``agent`` on the other host.
Both tell each other every second that they are there: each ends if the other has gone.

    relay ──ssh── agent:  the description of the process, "beat", "end" (SIGTERM), "failed end"
    agent ──ssh── relay:  lines of JSON: its output, its marks, "beat", and how it has ended

It is started by its path, and imports only the standard library.
"""

import json
import os
import select
import shlex
import signal
import subprocess
import sys
import threading
import time
from contextlib import suppress
from typing import Any

BEAT_SECONDS = 1.0
SILENCE_SECONDS = 10.0  # after which the other side counts as lost
ERRORS_SECONDS = 2.0  # for what ssh says at its end
END_SECONDS = 3.0  # for the end of ssh, once the agent has ended: the network may have failed
START_SECONDS = 60.0  # for the connection, and the start of Python there
ATTEMPTS = 5  # to connect to a host that is busy with other connections
SSH = ["ssh", "-T", "-o", "BatchMode=yes", "-o", "ConnectTimeout=10", "-o", "ControlMaster=no"]
HELLO = "lbbsp agent "  # and its version
MARKS = "LBBSP_MARKS"  # as in lbbsp_core/runtime/options/env.py
FAILED = "failed"  # mark of the launcher, see `note_failed`


class Relay:
    """Connection to the agent of one process."""

    def __init__(self, description: dict[str, Any]) -> None:
        self._description, self._host = description, description["host"]
        path = map(os.path.abspath, filter(None, os.environ.get("PYTHONPATH", "").split(":")))
        python = [description["python"], "-u", "-m", "lbbsp_core.launch.agent"]
        self._python = shlex.join(["env", f"PYTHONPATH={':'.join(path)}", *python])
        self._begun, self._silence, self._attempts = False, START_SECONDS, 0
        self._connect()
        signal.signal(signal.SIGTERM, lambda *_: self._ask_to_end())

    def _connect(self) -> None:
        """Starts ssh, and the agent by it."""
        self._attempts += 1
        # The signals are for this process: with it, the connection ends.
        ignoring = ["sh", "-c", "trap '' HUP INT TERM; exec \"$@\"", "ssh"]
        self._ssh = subprocess.Popen(
            [*ignoring, *SSH, self._host, f"exec {self._python}"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,  # ssh would make ours non-blocking, and with it our output
        )
        assert self._ssh.stdin is not None
        assert self._ssh.stdout is not None
        self._to_agent = self._ssh.stdin
        self._input, self._output = self._to_agent.fileno(), self._ssh.stdout.fileno()
        self._refused = False  # by a server to which too many connect at once (MaxStartups)
        self._errors = threading.Thread(target=self._print_errors, daemon=True)
        self._errors.start()

    def run(self) -> int:
        """Relays until the process has ended; returns its status, or minus its signal."""
        partial_line, heard = b"", time.monotonic()
        while True:
            if not select.select([self._output], [], [], BEAT_SECONDS)[0]:
                if time.monotonic() > heard + self._silence:
                    self._end_ssh(0.0)
                    silent = f"has given no sign of life for {self._silence:g} s"
                    return self._lost(f"{self._host} {silent}")
                continue
            data = os.read(self._output, 1 << 16)
            if not data:
                lost = self._disconnected(self._end_ssh())
                if lost is not None:
                    return lost
                partial_line, heard = b"", time.monotonic()
                continue
            *lines, partial_line = (partial_line + data).split(b"\n")
            for line in lines:
                status = self._take(line.decode(errors="replace"))
                if status is not None:
                    return status
            heard = time.monotonic()  # to print may have taken long

    def _take(self, line: str) -> int | None:
        """Handles a line of the agent; returns the status with which the process has ended."""
        if not self._begun:
            greeting, hello, release = line.partition(HELLO)
            if greeting or not hello:
                print(greeting, flush=True)  # of the host
            if not hello:
                return None
            self._begun, version = True, self._description["version"]
            if release != version:
                return self._lost(
                    f"{self._host} has lbbsp {release}, and this host {version}: install the same "
                    "version on all hosts"
                )
            with suppress(OSError):
                environment = {name: os.environ[name] for name in self._description["names"]}
                message = {**self._description, "environment": environment}
                self._to_agent.write(json.dumps(message).encode() + b"\n")
                self._to_agent.flush()
            os.set_blocking(self._input, False)
            threading.Thread(target=self._beat, daemon=True).start()
            return None
        self._silence = SILENCE_SECONDS  # its output may come before its first "beat"
        kind, *values = json.loads(line)
        if kind == "line":
            print(values[0], flush=True)
        elif kind == "marks":
            set_marks(values[0])
        elif kind == "refused":
            return self._lost(f"{self._host}: {values[0]}", 2)
        elif kind == "end":
            self._to_agent.close()
            self._end_ssh()
            return int(values[0])
        return None

    def _print_errors(self) -> None:
        """Prints what ssh says, and the agent's traceback if it fails."""
        assert self._ssh.stderr is not None
        for line in self._ssh.stderr:
            self._refused |= b"exchange_identification: " in line
            print(line.decode(errors="replace").rstrip("\n"), flush=True)

    def _end_ssh(self, seconds: float = END_SECONDS) -> int:
        """Returns the status of ssh, which gets some time to end by itself."""
        with suppress(subprocess.TimeoutExpired):
            return self._ssh.wait(seconds)
        self._ssh.kill()
        return self._ssh.wait()

    def _disconnected(self, status: int) -> int | None:
        """Returns a status after the end of ssh, and notes why; None if it has begun again."""
        self._errors.join(ERRORS_SECONDS)
        if self._begun:
            return self._lost(f"the connection to {self._host} was lost")
        if self._refused and self._attempts < ATTEMPTS:
            time.sleep(self._attempts + os.getpid() % 8 / 8)  # apart from others
            self._connect()
            return None
        if status == 255:  # of ssh itself
            return self._lost(
                f"{self._host} cannot be reached by ssh: `ssh -o BatchMode=yes {self._host} true` "
                "must work without a question; what ssh says is above"
            )
        return self._lost(
            f"lbbsp cannot be started on {self._host} (exit status {status} of {self._python}, "
            "which says why above): install this Python and lbbsp at the same paths on all hosts"
        )

    def _lost(self, why: str, status: int = 1) -> int:
        """Leaves the mark by which the launcher learns why the job ends."""
        set_marks({"lost": f"{self._description['worker']} {why}"})
        return status

    def _beat(self) -> None:
        """Tells the agent that this side is there, also while nobody reads what it prints."""
        while True:
            self._send(b"beat\n")
            time.sleep(BEAT_SECONDS)

    def _ask_to_end(self) -> None:
        if not self._begun:
            os._exit(128 + signal.SIGTERM)  # with the connection
        failed = os.path.exists(os.path.join(os.environ[MARKS], FAILED))
        self._send(b"failed end\n" if failed else b"end\n")

    def _send(self, message: bytes) -> None:
        with suppress(OSError, ValueError):  # ssh has ended, or nothing leaves this host any more
            os.write(self._input, message)


def set_marks(marks: dict[str, str]) -> None:
    """Makes the marks of this process those of the process for which it stands."""
    folder = os.environ[MARKS]
    for name in set(os.listdir(folder)) - {*marks, FAILED}:
        os.unlink(os.path.join(folder, name))
    for name, text in marks.items():
        partial = os.path.join(folder, f".{name}")
        with open(partial, "w", encoding="utf-8") as stream:
            stream.write(text)
        os.replace(partial, os.path.join(folder, name))


def main() -> None:
    """Runs the relay of the process that the first argument describes, and ends as it does."""
    status = Relay(json.loads(sys.argv[1])).run()
    if status < 0:
        import resource  # not on all systems

        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))  # that of the process itself is there
        with suppress(OSError):  # SIGKILL has no handler
            signal.signal(-status, signal.SIG_DFL)
        os.kill(os.getpid(), -status)
    os._exit(status)  # the threads of Python that wait for ssh need not end


if __name__ == "__main__":
    main()
