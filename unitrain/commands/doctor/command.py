"""Runs the probes, and prints their findings."""

from __future__ import annotations

import argparse
import json
from dataclasses import asdict

from rich.console import Console
from rich.table import Table
from rich.text import Text

from unitrain.commands.doctor.probes import PROBES, Finding, Status

_STYLES: dict[Status, str] = {"ok": "green", "absent": "dim", "warning": "yellow", "error": "red"}


def doctor(*, as_json: bool = False) -> int:
    """Print the findings as a table, or as a JSON object with a key per probe.

    Args:
        as_json: print JSON, for scripts.

    Returns:
        The exit code, 0 whatever is found.
    """
    findings = examine()
    if as_json:
        print(json.dumps({name: asdict(finding) for name, finding in findings.items()}, indent=2))
    else:
        _print_table(findings)
    return 0


def examine() -> dict[str, Finding]:
    """Return the findings of all probes of this host, by name, in the order of the table.

    A probe that raises an error has found one, and the others still run.
    """
    findings = {}
    for name, probe in PROBES.items():
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
    parser.add_argument("--json", dest="as_json", action="store_true", help="print a JSON object")
    parser.set_defaults(run=doctor)
