"""``unitrain doctor --report``: a description of the job for a bug report, without personal details."""

from __future__ import annotations

import getpass
import os
import platform
import re
import socket
from collections.abc import Callable, Mapping
from contextlib import suppress
from functools import reduce
from operator import getitem
from typing import Any

from unitrain.commands.doctor.probes import Finding
from unitrain.job import last_error
from unitrain.launch.detect import detect
from unitrain.settings.resolution import resolve_strategy
from unitrain.settings.schema import as_string, dotted, groups_of
from unitrain.settings.strategy_config import StrategyConfig

_VARIABLES = ("CUDA_", "FI_", "GLOO_", "HOROVOD_", "NCCL_", "OMP_", "TORCH_", "UCX_", "UNITRAIN_")
_PERSONAL = {
    # IPv4, IPv6 and MAC addresses, and those that names of interfaces end in.
    r"\b\d{1,3}(\.\d{1,3}){3}\b|(?<![\w:])([\da-fA-F]{0,4}:){2,}[\da-fA-F.]*(%\w+)?|(?<=[x-])[\da-f]{12}\b": "ADDRESS",
    r"(?<![\w.…])~?/[^\s'\"]*/": "…/",
    r"(?<!\w)'[^']+'(?!\w)": "'…'",
}


def probes_of_report() -> dict[str, Callable[[], Finding | str]]:
    """Return the probes that only a report has: system, place in the job, settings, variables and the last error."""
    return {
        "system": lambda: f"{platform.platform()}, {platform.freedesktop_os_release()['PRETTY_NAME']}",
        "place": _place,
        "settings_of_the_environment": lambda: _changed(resolve_strategy(None, {}, os.environ)),
        "variables": lambda: ", ".join(sorted(name for name in os.environ if name.startswith(_VARIABLES))) or "none",
        "last_error": _last_error,
    }


def _last_error() -> Finding:
    """Return the last error that ended a job."""
    text = last_error.kept()
    return Finding("error", text) if text else Finding("ok", "none")


def as_markdown(findings: Mapping[str, Finding]) -> str:
    """Return the findings as a list without personal details."""
    lines = [
        f"- {name.replace('_', ' ')}, {finding.status}: `{_without_details(finding).replace('`', '')}`"
        for name, finding in findings.items()
    ]
    return "\n".join(["### `unitrain doctor --report`", "", *lines])


def _place() -> str:
    """Return where the launcher has put this process."""
    launch = detect(os.environ)
    return f"local rank {launch.local_rank} of {launch.local_world_size}, node {launch.node_rank}, {launch.rendezvous}"


def _changed(config: StrategyConfig) -> str:
    """Return the settings that differ from their defaults. Of those that may be any string, only the name is told."""
    values: Any = config.model_dump(mode="json")
    settings = [setting for group in groups_of(StrategyConfig) for setting in group.settings]
    changed = [
        f"{dotted(setting.path)}={'…' if 'a string' in setting.allowed else value}"
        for setting in settings
        if (value := as_string(reduce(getitem, setting.path, values))) != setting.default
    ]
    return ", ".join(changed) or "none"


def _without_details(finding: Finding) -> str:
    """Return the summary of a finding with names of the user and the host, addresses and folders replaced."""
    text = " ".join(finding.summary.split())
    if finding.status == "error":  # it may quote variables; where all is well, some have the same version as a package
        for name in sorted(os.environ, key=lambda name: -len(os.environ[name])):
            text = text.replace(os.environ[name], f"${name}") if len(os.environ[name]) > 3 else text
    text, host = text.replace(os.path.expanduser("~"), "~"), socket.gethostname()
    words = {host: "HOST", host.partition(".")[0]: "HOST"}
    with suppress(OSError, KeyError):  # Python before 3.13 raises KeyError for a user without a name
        words[getpass.getuser()] = "USER"
    patterns = {rf"(?<![\w.-]){re.escape(word)}(?!\w)": label for word, label in words.items() if word} | _PERSONAL
    return reduce(lambda text, pattern: re.sub(pattern, patterns[pattern], text), patterns, text)
