"""Installs each extra with its newest and its lowest versions, and tests what it installed.

Each *cell* is an extra, a Python and a resolution: a fresh virtual environment, the packages that
uv resolves from pyproject.toml (wheels only, nothing is compiled), the wheel of this checkout, and
the tests that fit the extra. The table of all cells is printed as Markdown, for docs/install.md::

    python tools/installs.py --python python3.10 --python python3.13
    python tools/installs.py --only tf-cpu --resolution lowest --python python3.12

uv is taken from PATH, or installed into a virtual environment of the work folder.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
RESOLUTIONS = {"newest": "highest", "lowest": "lowest-direct"}
LIMIT_SECONDS = 1800
TEST_PACKAGES = ("pytest>=8", "pytest-timeout>=2.3", "hypothesis>=6.100")

CORE = (
    "tests/core/test_allocation.py",
    "tests/core/test_measure.py",
    "tests/core/test_order.py",
    "tests/core/test_types.py",
    "tests/core/test_work.py",
    "tests/core/cost",
    "tests/core/policy",
    "tests/core/sync",
)
TF = tuple(f"tests/tf/test_{name}.py" for name in ("single_worker", "checks", "evaluation"))
MX = tuple(f"tests/mx/test_{name}.py" for name in ("missing", "data", "agreement", "script_keys"))
HELP = ("lbbsp", "--help")
SIMULATE = ("lbbsp", "simulate", "--trace", str(ROOT / "traces" / "pai_job_1.csv"))
PAGES = ("python", str(ROOT / "tools" / "site_pages.py"), str(ROOT / "build" / "pages"))
SITE = ("zensical", "build", "--config-file", str(ROOT / "mkdocs.yml"))
JOB = ("lbbsp", "launch", "-n", "2", "--timeout", "600")
KERAS_JOB = (*JOB, str(ROOT / "examples" / "keras_digits_balanced.py"))
GLUON_JOB = (*JOB, "--framework", "mxnet", str(ROOT / "examples" / "gluon_digits_balanced.py"))


@dataclass(frozen=True)
class Extra:
    """How one extra is tested.

    Args:
        packages: Distributions whose versions the table shows.
        tests: Files and folders for pytest.
        module: Module without which the extra is not available.
        commands: Command lines of the environment's programs, each of which must succeed.
        needs: Further distributions that the tests or commands import.
    """

    packages: tuple[str, ...]
    tests: tuple[str, ...]
    module: str
    commands: tuple[tuple[str, ...], ...] = ()
    needs: tuple[str, ...] = ()


EXTRAS = {
    "none": Extra(("numpy", "scipy", "psutil"), CORE, "lbbsp_core"),
    "cli": Extra(("typer", "click", "rich"), ("tests/core/cli",), "typer", (HELP, SIMULATE)),
    "report": Extra(("jinja2", "plotly"), ("tests/core/report",), "plotly"),
    "arima": Extra(("statsmodels", "pandas"), ("tests/core/predict",), "statsmodels"),
    "gpu": Extra(("nvidia-ml-py",), ("tests/core/resources",), "pynvml"),
    "demo": Extra(("scikit-learn",), ("tests/core/sim/test_time_to_accuracy.py",), "sklearn"),
    "dev": Extra(("pytest", "hypothesis"), CORE, "pytest"),
    "docs": Extra(
        ("zensical", "mkdocstrings"),
        ("tests/test_site.py",),
        "zensical",
        (PAGES, SITE),
        needs=("markdown-it-py",),
    ),
    "tf-cpu": Extra(
        ("tensorflow-cpu", "keras", "numpy"), TF, "lbbsp_tf", (KERAS_JOB,), needs=("scikit-learn",)
    ),
    "tf": Extra(
        ("tensorflow", "nvidia-cudnn-cu12", "nvidia-ml-py", "keras", "numpy"),
        TF,
        "lbbsp_tf",
        (KERAS_JOB,),
        needs=("scikit-learn",),
    ),
    "mx": Extra(("mxnet", "numpy"), MX, "lbbsp_mx", (GLUON_JOB,), needs=("scikit-learn",)),
}


@dataclass(frozen=True)
class Outcome:
    """Row of the table.

    Args:
        extra: Name of the extra; "none" for the package without one.
        python: Version of the Python.
        resolution: A key of `RESOLUTIONS`.
        versions: Versions of the packages of the extra.
        result: What the tests said, or why there are none.
    """

    extra: str
    python: str
    resolution: str
    versions: str
    result: str

    def __str__(self) -> str:
        cells = (f"`{self.extra}`", self.python, self.resolution, self.versions, self.result)
        return f"| {' | '.join(cells)} |"


class NotAvailableError(Exception):
    """A cell that cannot be installed, with the reason."""


class Installer:
    """Virtual environments of one work folder.

    Args:
        folder: Work folder.
        keep: Whether environments stay after their cell.
    """

    def __init__(self, folder: Path, keep: bool) -> None:
        self._folder, self._keep = folder, keep
        self._environ = _environment()
        self._uv = shutil.which("uv") or self._own_uv()
        self._run(self._uv, "build", "--quiet", "--out-dir", folder, ROOT)  # by way of the sdist
        self._wheel = next(folder.glob("lbbsp-*.whl"))

    def measure(self, name: str, python: str, resolution: str) -> Outcome:
        """Installs and tests one cell."""
        version = self._run(python, "-c", "import platform; print(platform.python_version())")
        target = self._folder / f"{name}-{version.strip()}-{resolution}"
        versions = ""
        try:
            self._install(name, python, resolution, target)
            versions = self._versions(target, EXTRAS[name].packages)
            self._require(target, EXTRAS[name].module)
            result = ", ".join(self._tests(target, EXTRAS[name]))
        except NotAvailableError as error:
            result = f"not available: {error}"
        finally:
            if not self._keep:
                shutil.rmtree(target, ignore_errors=True)
        return Outcome(name, version.strip(), resolution, versions, result)

    def _install(self, name: str, python: str, resolution: str, target: Path) -> None:
        extra = () if name == "none" else ("--extra", name)
        pins = self._folder / f"{target.name}.txt"
        pins.unlink(missing_ok=True)  # uv would prefer the versions of an earlier run
        # fmt: off
        resolve = (self._uv, "pip", "compile", "--quiet", "--python", python, "--no-build",
                   "--resolution", RESOLUTIONS[resolution], *extra, "--output-file", pins,
                   ROOT / "pyproject.toml")
        # fmt: on
        self._run(*resolve)
        self._run(self._uv, "venv", "--quiet", "--clear", "--python", python, target)
        install = (self._uv, "pip", "install", "--quiet", "--no-build", "--python", target)
        self._run(*install, "--requirements", pins)
        self._run(*install, "--no-deps", self._wheel)
        self._run(*install, "--constraints", pins, *TEST_PACKAGES, *EXTRAS[name].needs)

    def _versions(self, target: Path, packages: Sequence[str]) -> str:
        listed = self._run(self._uv, "pip", "list", "--format", "json", "--python", target)
        installed = {each["name"].lower(): each["version"] for each in json.loads(listed)}
        return ", ".join(f"{name} {installed[name]}" for name in packages if name in installed)

    def _require(self, target: Path, module: str) -> None:
        """Raises `NotAvailableError` with the error of an import."""
        self._run(target / "bin" / "python", "-c", f"import {module}", cwd=self._folder)

    def _tests(self, target: Path, extra: Extra) -> Iterator[str]:
        """Yields the outcome of each program that a cell runs."""
        for program, *arguments in extra.commands:
            done = self._start(target / "bin" / program, *arguments, cwd=self._folder)
            name = Path(arguments[0]).name
            (self._folder / f"{target.name}-{name}.log").write_text(done.stdout + done.stderr)
            yield f"`{program} {name}` {'passed' if done.returncode == 0 else 'failed'}"
        pytest = (target / "bin" / "pytest", "-q", "-p", "no:cacheprovider", "-m", "not alone")
        done = self._start(*pytest, *extra.tests, cwd=ROOT)
        (self._folder / f"{target.name}.log").write_text(done.stdout + done.stderr)
        yield _counts(done)

    def _own_uv(self) -> str:
        self._run(sys.executable, "-m", "venv", self._folder / "uv")
        self._run(self._folder / "uv" / "bin" / "pip", "install", "--quiet", "uv")
        return str(self._folder / "uv" / "bin" / "uv")

    def _start(self, *command: object, cwd: Path = ROOT) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [str(part) for part in command],
            cwd=cwd,
            env=self._environ,
            capture_output=True,
            text=True,
            timeout=LIMIT_SECONDS,
            check=False,
        )

    def _run(self, *command: object, cwd: Path = ROOT) -> str:
        """Returns the output of a command.

        Raises:
            NotAvailableError: It failed; holds the reason in one line.
        """
        done = self._start(*command, cwd=cwd)
        if done.returncode != 0:
            raise NotAvailableError(_reason(done.stderr))
        return done.stdout


def _environment() -> dict[str, str]:
    """Returns the environment of all programs: pip's index and certificate serve uv as well."""
    environ = {**os.environ, "UV_PYTHON_DOWNLOADS": "never", "UV_NO_PROGRESS": "1"}
    for name, of_pip in (("SSL_CERT_FILE", "PIP_CERT"), ("UV_DEFAULT_INDEX", "PIP_INDEX_URL")):
        if of_pip in environ:
            environ.setdefault(name, environ[of_pip])
    environ.pop("PYTHONPATH", None)  # the wheel is tested, not the checkout
    return environ


def _reason(stderr: str) -> str:
    """Returns the line of an error that says why: uv's cause, or a traceback's last line."""
    lines = [line.strip() for line in stderr.splitlines() if line.strip()] or ["no message"]
    causes = [line for line in lines if "Because" in line or line.startswith("cause:")]
    return re.sub(r"^\w+Error: ", "", (causes or lines)[-1]).partition(";")[0].replace("|", "/")


def _counts(done: subprocess.CompletedProcess[str]) -> str:
    """Returns the numbers of pytest's last line."""
    counts = re.findall(r"\d+ (?:passed|failed|skipped|errors?)", done.stdout.rpartition("\n=")[2])
    counts = counts or re.findall(r"\d+ (?:passed|failed|skipped|errors?)", done.stdout[-200:])
    return ", ".join(counts) or f"pytest failed with status {done.returncode}"


def table(outcomes: Sequence[Outcome]) -> str:
    """Returns outcomes as a Markdown table."""
    head = "| extra | Python | versions | main packages | result |\n|---|---|---|---|---|"
    return "\n".join([head, *map(str, outcomes)])


def arguments() -> argparse.Namespace:
    """Reads the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--python", action="append", help="interpreter; may be repeated")
    parser.add_argument("--only", action="append", choices=EXTRAS, help="extra; may be repeated")
    parser.add_argument("--resolution", action="append", choices=RESOLUTIONS)
    parser.add_argument("--keep", action="store_true", help="keep the environments")
    parser.add_argument("--folder", type=Path, help="work folder; a temporary one by default")
    parser.add_argument("--results", type=Path, help="file to which outcomes are appended as JSON")
    return parser.parse_args()


def main() -> None:
    """Measures the chosen cells and prints the table."""
    given = arguments()
    with tempfile.TemporaryDirectory() as temporary:
        installer = Installer((given.folder or Path(temporary)).resolve(), given.keep)
        outcomes = []
        for name in given.only or EXTRAS:
            for python in given.python or [sys.executable]:
                for resolution in given.resolution or RESOLUTIONS:
                    outcomes.append(installer.measure(name, python, resolution))
                    print(outcomes[-1], file=sys.stderr, flush=True)
                    if given.results:
                        with given.results.open("a") as file:
                            file.write(json.dumps(asdict(outcomes[-1])) + "\n")
    print(table(outcomes))


if __name__ == "__main__":
    main()
