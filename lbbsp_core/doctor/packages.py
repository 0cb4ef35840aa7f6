"""Versions of packages, compared with lbbsp's own metadata, and the import of the frameworks.

An import may crash or never end: each framework is imported in a process of its own, by the checks
of its plugin.
"""

from __future__ import annotations

import json
import platform
import signal
import subprocess
import sys
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path
from typing import Final, NamedTuple

from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.version import InvalidVersion, Version

from lbbsp_core import installation
from lbbsp_core.doctor.finding import Finding, note, ok, problem, read_findings
from lbbsp_core.files import require_writable
from lbbsp_core.runtime.options.env import AUTO_JIT_REMEDY, DMLC_NAMES, auto_jit
from lbbsp_core.validate import shortened

DISTRIBUTION: Final = "lbbsp"

PURPOSES: Final[Mapping[str, str]] = {
    "report": "`lbbsp report`, `lbbsp demo` and --plot",
    "arima": "the predictor arima",
    "demo": "the data of `lbbsp demo`",
}
"""Extras whose packages may be missing, and what needs them."""

Installed = Callable[[str], str | None]


def installed_version(name: str) -> str | None:
    """Returns the version of an installed distribution, or None."""
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def framework_version(name: str) -> str | None:
    """Returns the version of a package without importing it; None if it is not installed.

    A framework may be in a distribution of another name, such as tensorflow-cpu.
    """
    for distribution in (name, f"{name}-cpu"):
        if version := installed_version(distribution):
            return version
    if find_spec(name) is None:
        return None
    names = metadata.packages_distributions().get(name)  # reads the lists of all files: slow
    return installed_version(names[0]) if names else "unknown"


def check_versions(frameworks: Collection[str]) -> list[Finding]:
    """Checks Python and all packages that the installed parts of lbbsp require."""
    try:
        own_metadata = metadata.metadata(DISTRIBUTION)
    except metadata.PackageNotFoundError:
        remedy = "pip install --editable . in its folder, or pip install lbbsp"
        return [note("lbbsp", "is not installed, so that no versions can be compared", remedy)]
    requirements = metadata.requires(DISTRIBUTION) or []
    extras = ["", "cli"]
    if "tensorflow" in frameworks:
        extras += ["keras", "tf-cpu" if installed_version("tensorflow-cpu") else "tf"]
    if "mxnet" in frameworks:
        extras += ["mx"]
    findings = [
        ok("lbbsp", own_metadata["Version"]),
        check_python(platform.python_version(), own_metadata["Requires-Python"] or ""),
        *check_packages(requirements, extras, framework_version),
        *check_optional(requirements, installed_version),
    ]
    return list(dict.fromkeys(findings))  # several extras may require the same package


def check_python(version: str, supported: str) -> Finding:
    """Compares the version of Python with those that are supported."""
    if SpecifierSet(supported).contains(version, prereleases=True):
        return ok("Python", f"{version} ({sys.executable})")
    remedy = "make a virtual environment with a supported Python"
    return problem("Python", f"{version} is not supported, which needs {supported}", remedy)


def check_packages(
    requirements: Collection[str], extras: Iterable[str], version: Installed
) -> Iterator[Finding]:
    """Compares installed packages with the requirements of some extras."""
    for extra in extras:
        needed = list(of_extra(requirements, extra))
        bounded = {requirement.name for requirement in needed if requirement.specifier}
        for requirement in needed:
            # An extra of it may be listed again.
            if requirement.specifier or requirement.name not in bounded:
                yield _compared(requirement, extra, version(requirement.name))


def check_optional(requirements: Collection[str], version: Installed) -> Iterator[Finding]:
    """Compares the packages of the extras of `PURPOSES`, which may be missing."""
    for extra, purpose in PURPOSES.items():
        for requirement in of_extra(requirements, extra):
            if (current_version := version(requirement.name)) is None:
                remedy = f"pip install {installation.extra(extra)}"
                yield note(requirement.name, f"is not installed, but needed for {purpose}", remedy)
            else:
                yield _compared(requirement, extra, current_version)


def of_extra(requirements: Iterable[str], extra: str) -> Iterator[Requirement]:
    """Yields the requirements that an extra adds in this Python, without those on lbbsp itself."""

    def applies(package: Requirement, name: str) -> bool:
        return package.marker is None or package.marker.evaluate({"extra": name})

    for spec in map(Requirement, requirements):
        if spec.name != DISTRIBUTION and applies(spec, extra) and not (extra and applies(spec, "")):
            yield spec


def _compared(requirement: Requirement, extra: str, version: str | None) -> Finding:
    name, package = requirement.name, f"lbbsp[{extra}]" if extra else DISTRIBUTION
    needs = f"{package} needs {name}{requirement.specifier}"
    try:
        if version and requirement.specifier.contains(Version(version), prereleases=True):
            return ok(name, version)
    except InvalidVersion:
        return note(name, f"its version is unknown ({version}), {needs}")
    message = f"{f'{version} is' if version else 'is not'} installed, but {needs}"
    return problem(name, message, f"pip install --upgrade {installation.extra(extra)}")


IMPORT_SECONDS: Final = 180.0
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
    """Framework that a plugin checks."""

    title: str
    plugin: str  # its module
    extra: str  # of lbbsp, which installs it


FRAMEWORKS: Final[Mapping[str, Framework]] = {
    "tensorflow": Framework("TensorFlow", "lbbsp_tf", "tf"),
    "mxnet": Framework("MXNet", "lbbsp_mx", "mx"),
}


def check_framework(
    framework: Framework,
    environment: Mapping[str, str],
    *,
    seconds: float = IMPORT_SECONDS,
    command: Sequence[str] | None = None,
) -> list[Finding]:
    """Runs the checks of a plugin in a process of its own.

    The process gets no description of a cluster, so that it neither connects nor listens.
    """
    plugin, check = framework.plugin, f"import {framework.plugin}"
    hidden = {"TF_CONFIG", "LBBSP_MARKS", *DMLC_NAMES}
    variables = {name: value for name, value in environment.items() if name not in hidden}
    try:
        done = subprocess.run(
            command or [sys.executable, "-m", f"{plugin}.doctor"],
            # With another backend, which is a finding of its own, nothing could be imported.
            env={"TF_CPP_MIN_LOG_LEVEL": "2", **variables, "KERAS_BACKEND": "tensorflow"},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=seconds,
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
    again = f"pip install --force-reinstall {installation.extra(framework.extra)}"
    try_it = f"see `python -c 'import {framework.plugin}'`, or {again}"
    if status < 0:
        reason, remedy = _SIGNALS.get(-status, (f"signal {-status}", try_it))
        return problem(check, f"ended by {reason}", remedy)
    lines = [line.strip() for line in stderr.splitlines() if line.strip()]
    last = lines[-1] if lines else f"status {status} without a message"
    if last.startswith("ImportError: mxnet "):  # names its own remedy
        message, _, own_remedy = last.removeprefix("ImportError: ").rpartition(": ")
        return problem(check, message, own_remedy)
    remedies = [remedy for sign, remedy in _STDERR_REMEDIES.items() if sign in last]
    return problem(check, f"fails: {last}", (remedies or [try_it])[0])


def check_settings(
    environment: Mapping[str, str], frameworks: Collection[str] = ()
) -> list[Finding]:
    """Checks the environment variables of Keras, of XLA and of lbbsp."""
    findings = [] if set(frameworks) == {"mxnet"} else [*_keras(environment), *_xla(environment)]
    findings += [*_run_dir(environment), *_policy(environment)]
    return findings or [ok("environment variables", "none of them disturbs")]


def _keras(environment: Mapping[str, str]) -> Iterator[Finding]:
    if environment.get("TF_USE_LEGACY_KERAS", "") in ("1", "true", "True"):
        text = "makes tf.keras that of Keras 2, whose models lbbsp_tf does not know"
        remedy = "unset TF_USE_LEGACY_KERAS, and use models of Keras 3 (import keras)"
        yield problem("TF_USE_LEGACY_KERAS", text, remedy)
    # Keras ignores an empty variable, and then reads its file.
    setting = environment.get("KERAS_BACKEND")
    check, backend = ("KERAS_BACKEND", setting) if setting else _keras_file(environment)
    if backend != "tensorflow":
        text = f"says {shortened(backend)}, but lbbsp_tf trains with tensorflow"
        yield problem(check, text, "export KERAS_BACKEND=tensorflow")


def _keras_file(environment: Mapping[str, str]) -> tuple[str, object]:
    """Returns the path of Keras's file of settings, and the backend that it names."""
    folder = environment.get("KERAS_HOME") or "~/.keras"
    file = Path(folder).expanduser() / "keras.json"
    try:
        values = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError):  # Keras ignores such a file, too
        values = {}
    return str(file), values.get("backend", "tensorflow") if isinstance(values, dict) else values


def _xla(environment: Mapping[str, str]) -> Iterator[Finding]:
    if flag := auto_jit(environment.get("TF_XLA_FLAGS", "")):
        text = f"has {flag}: on GPUs, XLA compiles the step anew for each new batch size"
        yield note("TF_XLA_FLAGS", text, AUTO_JIT_REMEDY)


def _run_dir(environment: Mapping[str, str]) -> Iterator[Finding]:
    folder = environment.get("LBBSP_RUN_DIR", "")
    if not folder:
        return
    try:
        require_writable("the run record", Path(folder, "run.jsonl"))
    except ValueError as error:
        text = str(error).rpartition(": ")[0]
        yield problem("LBBSP_RUN_DIR", text, "name another folder, or change its rights")


def _policy(environment: Mapping[str, str]) -> Iterator[Finding]:
    text = environment.get("LBBSP_POLICY", "").strip()
    name, colon, _ = text.partition(":")
    with suppress(ImportError):  # of NumPy, which has a finding of its own
        from lbbsp_core.registry import POLICIES

        if text and (name in POLICIES or not colon):  # not module:Name, which only the job imports
            try:
                POLICIES.build(text)
            except ValueError as error:
                yield problem("LBBSP_POLICY", str(error), "correct or unset LBBSP_POLICY")
