"""Runs the probes, and prints their findings."""

from __future__ import annotations

import argparse
import json
from dataclasses import asdict

from rich.console import Console
from rich.table import Table
from rich.text import Text

from unitrain.commands.doctor.finding import Finding, Status, guarded
from unitrain.commands.doctor.hosts import examine_hosts
from unitrain.commands.doctor.probes import PROBES
from unitrain.commands.launch import parse_hosts

_STYLES: dict[Status, str] = {"ok": "green", "absent": "dim", "warning": "yellow", "error": "red"}


def doctor(hosts: str | None = None, *, as_json: bool = False) -> int:
    """Print the findings as a table, or as a JSON object with a key per probe. Return the exit code.

    It is 1 if one of ``hosts``, a list as ``unitrain launch`` takes it, can't take part.
    """
    others = [] if hosts is None else [host.name for host in parse_hosts(hosts)]
    findings = examine()
    found = examine_hosts(others)
    findings.update({f"host {name}": finding for name, finding in found.items()})
    if as_json:
        print(json.dumps({name: asdict(finding) for name, finding in findings.items()}, indent=2))
    else:
        _print_table(findings)
    return int(any(finding.status == "error" for finding in found.values()))


def examine() -> dict[str, Finding]:
    """Return the findings of all probes of this host, by name, in the order of the table."""
    return {name: guarded(probe) for name, probe in PROBES.items()}


def _print_table(findings: dict[str, Finding]) -> None:
    table = Table("component", "", "found", box=None, pad_edge=False)
    for name, finding in findings.items():
        table.add_row(name.replace("_", " "), Text(finding.status, _STYLES[finding.status]), Text(finding.summary))
    console = Console()
    console.print(table)
    fixes = {line: name for name, finding in findings.items() for line in (finding.fix or "").splitlines()}
    if fixes:
        console.print("\nTo install or fix:")
        for fix, name in fixes.items():
            console.print(Text(f"  {name.replace('_', ' ')}: {fix}"), soft_wrap=True)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of the command to its parser."""
    parser.add_argument(
        "--hosts",
        "-H",
        metavar="LIST",
        help="hosts of a job to look at over ssh: node1,node2 (or node1:8,node2:8); exit code 1 if one can't take part",
    )
    parser.add_argument("--json", dest="as_json", action="store_true", help="print a JSON object")
    parser.set_defaults(run=doctor)
