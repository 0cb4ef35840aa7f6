"""Checks of the frameworks, each in a process of its own.

An import may crash or never end. The checks themselves are in the plugins.
"""

from __future__ import annotations

import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from typing import Final, NamedTuple

from lbbsp_core.doctor.base import Finding, problem
from lbbsp_core.doctor.finding import read_findings
from lbbsp_core.runtime.options.cluster_variables import DMLC_NAMES

SECONDS: Final = 180.0
"""Longest time that the import of a framework may take."""

_MEMORY_REMEDY = "give the process more memory (its cgroup, `ulimit -v`), or end others"
_SIGNALS: Final[Mapping[int, tuple[str, str]]] = {
    signal.SIGILL: (
        "an illegal instruction: the package is built for newer processors than this one",
        "install a build for this processor",
    ),
    signal.SIGKILL: ("SIGKILL, probably because memory was exhausted", _MEMORY_REMEDY),
}
_STDERR_REMEDIES: Final[Mapping[str, str]] = {
    "libgomp": "install libgomp1 (apt-get install libgomp1)",
    "libquadmath": "install libquadmath0 (apt-get install libquadmath0)",
    "libstdc++": "install libstdc++6 (apt-get install libstdc++6)",
    "MemoryError": _MEMORY_REMEDY,
}


class Framework(NamedTuple):
    """Framework that a plugin checks.

    Args:
        title: Name for messages.
        module: Its module.
        plugin: Module of the plugin.
        extra: Extra of lbbsp that installs it.
    """

    title: str
    module: str
    plugin: str
    extra: str


FRAMEWORKS: Final[Mapping[str, Framework]] = {
    "tensorflow": Framework("TensorFlow", "tensorflow", "lbbsp_tf", "tf"),
    "mxnet": Framework("MXNet", "mxnet", "lbbsp_mx", "mx"),
}


def check_framework(
    framework: Framework,
    environment: Mapping[str, str],
    *,
    seconds: float = SECONDS,
    command: Sequence[str] | None = None,
) -> list[Finding]:
    """Runs the checks of a plugin in a process of its own.

    The process gets no description of a cluster, so that it neither connects nor listens.
    """
    plugin = framework.plugin
    if command is None:
        command = [sys.executable, "-m", f"{plugin}.doctor"]
    hidden = {"TF_CONFIG", "LBBSP_MARKS", *DMLC_NAMES}
    given = {name: value for name, value in environment.items() if name not in hidden}
    check = f"import {plugin}"
    try:
        done = subprocess.run(
            command,
            # With another backend, which is a finding of its own, nothing could be imported.
            env={"TF_CPP_MIN_LOG_LEVEL": "2", **given, "KERAS_BACKEND": "tensorflow"},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=seconds,
            check=False,
        )
    except subprocess.TimeoutExpired:
        remedy = f"try `python -X importtime -c 'import {plugin}'`, and look for slow file systems"
        return [problem(check, f"did not end within {seconds:g} s", remedy)]
    if done.returncode:
        return [_failure(framework, check, done.returncode, done.stderr)]
    findings = read_findings(done.stdout)
    if findings is None:
        return [problem(check, "printed no findings", "reinstall lbbsp: its parts do not match")]
    return findings


def _failure(framework: Framework, check: str, status: int, stderr: str) -> Finding:
    """Returns why the import has failed, by the signal or the last line of its error output."""
    try_it = f"see `python -c 'import {framework.plugin}'`, or reinstall 'lbbsp[{framework.extra}]'"
    if status < 0:
        name = f"signal {-status}"
        reason, remedy = _SIGNALS.get(-status, (name, try_it))
        return problem(check, f"ended by {reason}", remedy)
    lines = [line.strip() for line in stderr.splitlines() if line.strip()]
    last = lines[-1] if lines else f"status {status} without a message"
    if last.startswith("ImportError: mxnet "):  # names its own remedy
        message, _, own = last.removeprefix("ImportError: ").rpartition(": ")
        return problem(check, message, own)
    remedies = [remedy for sign, remedy in _STDERR_REMEDIES.items() if sign in last]
    return problem(check, f"fails: {last}", (remedies or [try_it])[0])
