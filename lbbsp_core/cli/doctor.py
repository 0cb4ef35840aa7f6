"""Command ``lbbsp doctor``: what will not work here, why, and what to do about it."""

from __future__ import annotations

import os
from typing import Final

import typer
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table
from rich.text import Text

from lbbsp_core.cli import options
from lbbsp_core.doctor import CHOICES, Diagnosis, count, diagnose, figures
from lbbsp_core.validate import require_known

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
    for topic, findings in diagnosis.items():
        table = Table(title=topic, title_justify="left", title_style="bold", box=SIMPLE_HEAD,
                      show_header=False)  # fmt: skip
        table.add_column("status", no_wrap=True)
        table.add_column("check", ratio=1, overflow="fold")
        table.add_column("message", ratio=3, overflow="fold")
        for finding in findings:
            message = Text(finding.message)
            if finding.remedy:
                message.append(f"\nRemedy: {finding.remedy}", "bold")
            status = Text(finding.status, _STYLES[finding.status])
            table.add_row(status, Text(finding.check), message)
        out.print(table)
    problems, notes = count(diagnosis, "problem"), count(diagnosis, "note")
    style = _STYLES["problem" if problems else "ok"]
    out.print(Text(f"problems: {problems}, notes: {notes}", style))
