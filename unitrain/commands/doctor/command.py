"""Runs the probes, and prints their findings."""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Mapping
from dataclasses import asdict

from rich.console import Console
from rich.table import Table
from rich.text import Text

from unitrain.commands.doctor.probes import PROBES, Finding, Status

_STYLES: dict[Status, str] = {"ok": "green", "absent": "dim", "warning": "yellow", "error": "red"}


def doctor(*, as_json: bool = False, as_report: bool = False) -> int:
    """Print the findings as a table, as a JSON object with a key per probe, or as Markdown for a bug report.

    Args:
        as_json: print JSON, for scripts.
        as_report: print Markdown, with settings and without personal details.

    Returns:
        The exit code, 0 whatever is found.
    """
    if as_report:
        from unitrain.commands.doctor.report import as_markdown, probes_of_report  # and all settings

        print(as_markdown(examine({**PROBES, **probes_of_report()})))
    elif as_json:
        print(json.dumps({name: asdict(finding) for name, finding in examine(PROBES).items()}, indent=2))
    else:
        _print_table(examine(PROBES))
    return 0


def examine(probes: Mapping[str, Callable[[], Finding | str]]) -> dict[str, Finding]:
    """Return the findings of probes by name, in their order.

    A probe that raises an error has found one, and the others still run.
    """
    findings = {}
    for name, probe in probes.items():
        try:
            answer = probe()
            findings[name] = answer if isinstance(answer, Finding) else Finding("ok", answer)
        # A broken library may raise anything, which is what this command is to find out.
        except Exception as error:
            findings[name] = Finding("error", f"{type(error).__name__}: {error}")
    return findings


def _print_table(findings: dict[str, Finding]) -> None:
    """Print a line per probe, and below the table the commands that install or fix a component."""
    table = Table("component", "", "found", box=None, pad_edge=False)
    for name, finding in findings.items():
        # As Text: rich would take [brackets] in a finding for markup.
        table.add_row(name.replace("_", " "), Text(finding.status, _STYLES[finding.status]), Text(finding.summary))
    console = Console()
    console.print(table)
    # Several probes may name one command. It is shown once.
    fixes = {line: name for name, finding in findings.items() for line in (finding.fix or "").splitlines()}
    if fixes:
        console.print("\nTo install or fix:")
        for fix, name in fixes.items():
            console.print(Text(f"  {name.replace('_', ' ')}: {fix}"), soft_wrap=True)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of the command to its parser."""
    form = parser.add_mutually_exclusive_group()
    form.add_argument("--json", dest="as_json", action="store_true", help="print a JSON object")
    form.add_argument("--report", dest="as_report", action="store_true", help="print Markdown for a bug report")
    parser.set_defaults(run=doctor)
