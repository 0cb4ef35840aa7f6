"""Versions of Python and of packages, compared with those that lbbsp's own metadata require."""

from __future__ import annotations

import platform
import sys
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from importlib import metadata
from importlib.util import find_spec
from typing import Final

from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.version import InvalidVersion, Version

from lbbsp_core.doctor.base import Finding, note, ok, problem

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


def framework_version(module: str) -> str | None:
    """Returns the version of a framework without importing it; None if it is not installed.

    Some are in a distribution of another name, such as tensorflow-cpu.
    """
    if find_spec(module) is None:
        return None
    for name in (module, f"{module}-cpu"):
        if (version := installed_version(name)) is not None:
            return version
    names = metadata.packages_distributions().get(module)  # reads the lists of all files: slow
    return installed_version(names[0]) if names else "unknown"


def own_requirements() -> tuple[str, list[str]] | None:
    """Returns the versions of Python and the requirements in lbbsp's metadata; None without any."""
    try:
        own = metadata.metadata(DISTRIBUTION)
    except metadata.PackageNotFoundError:
        return None
    pythons = own.get_all("Requires-Python") or [""]
    return pythons[0], metadata.requires(DISTRIBUTION) or []


def check_versions(frameworks: Collection[str]) -> list[Finding]:
    """Checks Python and all packages that the installed parts of lbbsp require."""
    own = own_requirements()
    if own is None:
        remedy = "pip install --editable . in its folder, or pip install lbbsp"
        return [note("lbbsp", "is not installed, so that no versions can be compared", remedy)]
    pythons, requirements = own
    extras = ["", "cli"]
    if "tensorflow" in frameworks:
        has_cpu_build = installed_version("tensorflow-cpu") is not None
        extras += ["keras", "tf-cpu" if has_cpu_build else "tf"]
    if "mxnet" in frameworks:
        extras += ["mx"]
    found = [
        ok("lbbsp", f"{installed_version(DISTRIBUTION)}"),
        check_python(platform.python_version(), pythons),
        *check_packages(requirements, extras, _version),
        *check_optional(requirements, installed_version),
    ]
    return list(dict.fromkeys(found))  # several extras may require the same package


def check_python(version: str, supported: str) -> Finding:
    """Compares the version of Python with those that are supported."""
    if SpecifierSet(supported).contains(version, prereleases=True):
        return ok("Python", f"{version} ({sys.executable})")
    remedy = "make a virtual environment with a supported Python"
    return problem("Python", f"{version} is not supported, which needs {supported}", remedy)


def check_packages(
    requirements: Iterable[str], extras: Iterable[str], version: Installed
) -> Iterator[Finding]:
    """Compares installed packages with the requirements of some extras."""
    requirements = list(requirements)
    for extra in extras:
        needed = list(of_extra(requirements, extra))
        bounded = {each.name for each in needed if each.specifier}
        for each in needed:
            if each.specifier or each.name not in bounded:  # an extra of it may be listed again
                yield _compared(each, extra, version(each.name))


def check_optional(requirements: Iterable[str], version: Installed) -> Iterator[Finding]:
    """Compares the packages of the extras of `PURPOSES`, which may be missing."""
    requirements = list(requirements)
    for extra, purpose in PURPOSES.items():
        for each in of_extra(requirements, extra):
            if (found := version(each.name)) is None:
                remedy = f"pip install 'lbbsp[{extra}]'"
                yield note(each.name, f"is not installed, but needed for {purpose}", remedy)
            else:
                yield _compared(each, extra, found)


def of_extra(requirements: Iterable[str], extra: str) -> Iterator[Requirement]:
    """Yields the requirements that an extra adds in this Python, without those on lbbsp itself."""
    for text in requirements:
        each = Requirement(text)
        if each.name == DISTRIBUTION:
            continue
        always = each.marker is None or each.marker.evaluate({"extra": ""})
        if always if extra == "" else not always and _applies(each, extra):
            yield each


def _applies(requirement: Requirement, extra: str) -> bool:
    return requirement.marker is not None and requirement.marker.evaluate({"extra": extra})


def _compared(requirement: Requirement, extra: str, version: str | None) -> Finding:
    name, needed = requirement.name, str(requirement.specifier)
    package = f"lbbsp[{extra}]" if extra else DISTRIBUTION
    remedy = f"pip install --upgrade '{package}'"
    if version is None:
        return problem(name, f"is not installed, but {package} needs {name}{needed}", remedy)
    try:
        fits = requirement.specifier.contains(Version(version), prereleases=True)
    except InvalidVersion:
        return note(name, f"its version is unknown ({version}), {package} needs {name}{needed}")
    if fits:
        return ok(name, version)
    return problem(name, f"{version} is installed, but {package} needs {name}{needed}", remedy)


def _version(name: str) -> str | None:
    """Returns the version of a package; frameworks may be in distributions of other names."""
    return framework_version(name) if name in ("tensorflow", "keras") else installed_version(name)
