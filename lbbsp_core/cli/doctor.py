"""Command ``lbbsp doctor``: what will not work here, why, and what to do about it."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from typing import Final

import typer
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from lbbsp_core.cli import options
from lbbsp_core.doctor import CHOICES, Diagnosis, Finding, count, diagnose, figures
from lbbsp_core.validate import require_known

_PATCH: Final = "patch: "
"""Start of the names of checks that are shown as one while they find nothing."""

_STYLES: Final = {"ok": "green", "note": "yellow", "problem": "bold red"}


@options.one_line_errors
def doctor(
    framework: str = typer.Option(
        CHOICES[0], metavar="|".join(CHOICES), help="Frameworks to check."
    ),
    json_file: options.JsonFile = None,
) -> None:
    """Check this machine and the cluster, and name what will not work.

    Each problem comes with its reason and its remedy. Run it with the environment of the job, on
    each of its hosts. The exit status is 0 if nothing will fail, 1 if there is a problem, and 2
    for a wrong usage.
    """
    require_known("framework", framework, CHOICES)
    diagnosis = diagnose(os.environ, framework=framework)
    _print(options.consoles(json_file)[0], diagnosis)
    options.write_figures(json_file, figures(diagnosis))
    raise typer.Exit(1 if count(diagnosis, "problem") else 0)


def _print(out: Console, diagnosis: Diagnosis) -> None:
    """Prints what was found first, and then what is right.

    A remedy is on one line, whatever the width, so that its commands can be pasted.
    """
    problems, notes = count(diagnosis, "problem"), count(diagnosis, "note")
    worst = "problem" if problems else "note" if notes else "ok"
    out.print(Text(f"problems: {problems}, notes: {notes}", _STYLES[worst]))
    for status in ("problem", "note"):
        for topic, findings in diagnosis.items():
            for finding in findings:
                if finding.status == status:
                    title = Text(f"\n{status} ", _STYLES[status])
                    out.print(title.append(f"{topic}: {finding.check}", "bold"))
                    out.print(Padding(Text(finding.message), (0, 0, 0, 2), expand=False))
                    if finding.remedy:
                        options.show(out, f"  Remedy: {finding.remedy}", "bold")
    out.print()
    for topic, findings in diagnosis.items():
        table = Table(title=topic, title_justify="left", title_style="bold", box=SIMPLE_HEAD,
                      show_header=False)  # fmt: skip
        table.add_column("status", no_wrap=True)
        table.add_column("check", ratio=1, overflow="fold")
        table.add_column("message", ratio=3, overflow="fold")
        for check, message in _right(findings):
            table.add_row(Text("ok", _STYLES["ok"]), Text(check), Text(message))
        if table.row_count:
            out.print(table)


def _right(findings: Sequence[Finding]) -> Iterator[tuple[str, str]]:
    """Yields checks that found nothing, and what they say; all patches as one."""
    right = [finding for finding in findings if finding.status == "ok"]
    patches = [finding for finding in right if finding.check.startswith(_PATCH)]
    yield from ((finding.check, finding.message) for finding in right if finding not in patches)
    if patches:
        yield "patches", f"{len(patches)} in place where this version needs them, see --json"
