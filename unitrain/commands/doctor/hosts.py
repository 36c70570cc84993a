"""The probes of other hosts, over ssh: can a job be started there, and would its ranks find one another and agree."""

from __future__ import annotations

import json
import shlex
import socket
import subprocess
import sys
import time
from collections.abc import Collection, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from ipaddress import ip_address
from pathlib import Path
from typing import Any, NamedTuple

from unitrain.commands.doctor import report
from unitrain.commands.doctor.finding import Finding, Status, guarded
from unitrain.commands.toolchain import find_program
from unitrain.launch.network.addresses import addresses_of, own_addresses

_CONNECT_S = 5
_MOST_S = 30.0
_MOST_AT_ONCE = 32
_CLOCK_S = 5.0
# Words in what ssh says when it can't open a session, what they mean, and the commands that help.
_SSH_ERRORS = (
    ("could not resolve", "{host} can't be resolved here", "echo 'ITS_ADDRESS {host}' | sudo tee -a /etc/hosts"),
    ("identification has changed", "its ssh key is another than the one that is known here", "ssh-keygen -R {host}"),
    (
        "host key verification failed",
        "its ssh key is not known here yet",
        "ssh-keyscan -H {host} >> ~/.ssh/known_hosts",
    ),
    (
        "permission denied",
        "ssh asks for a password, which launchers can't give",
        "test -f ~/.ssh/id_ed25519 || ssh-keygen -t ed25519 -N '' -f ~/.ssh/id_ed25519\nssh-copy-id {host}",
    ),
    ("no route to host", "there is no route to it from here", "ip route get {address}"),
    ("unreachable", "there is no route to it from here", "ip route get {address}"),
    (
        "timed out",
        f"it does not answer within {_CONNECT_S} s: it is down, or behind a firewall",
        "ping -c 3 {host}",
    ),
    ("refused", "it runs no ssh server", "sudo apt-get install openssh-server  # on {host}"),
)


class _Answer(NamedTuple):
    """What the program has found on a host."""

    report: dict[str, Any]
    clock_ahead_s: float


def examine_hosts(hosts: Sequence[str]) -> dict[str, Finding]:
    """Return a finding for each host of a job that this host would start, by its name."""
    with _listener() as listener, ThreadPoolExecutor(_MOST_AT_ONCE) as threads:
        # Rank 0's host, to which all ranks connect, is taken for this one: any port of it stands for rank 0's.
        here = (own_addresses(), listener.getsockname()[1])
        what = [{"here": here, "others": [other for other in hosts if other != host]} for host in hosts]
        answers = dict(zip(hosts, threads.map(_ask, hosts, what), strict=True))
    answering = {host for host, answer in answers.items() if isinstance(answer, _Answer)}
    return {host: guarded(partial(_finding, host, answer, answering)) for host, answer in answers.items()}


def _listener() -> socket.socket:
    if socket.has_dualstack_ipv6():
        return socket.create_server(("", 0), family=socket.AF_INET6, backlog=socket.SOMAXCONN, dualstack_ipv6=True)
    return socket.create_server(("", 0), backlog=socket.SOMAXCONN)


def _finding(host: str, answer: _Answer | Finding, answering: Collection[str]) -> Finding:
    """Return the finding on a host. What is wrong with another one, which does not answer, is not said again here."""
    if isinstance(answer, Finding):
        return answer
    found, ahead_s = answer
    unreached = {other: why for other, why in found["unreached"].items() if other in answering}
    problems = [*_versions(host, found["versions"]), *_network(host, found, unreached), *_clock(host, ahead_s)]
    details = {**found, "clock_ahead_s": ahead_s}
    if not problems:
        there = "this host" if _is_here(host) else "reached by ssh, and has the versions and the time of this host"
        summary = f"{found['host']}: {there}"
        return Finding("ok", summary, details=details)
    worst: Status = "error" if any(one.status == "error" for one in problems) else "warning"
    fixes = "\n".join(dict.fromkeys(str(one.fix) for one in problems))
    return Finding(worst, "; ".join(one.summary for one in problems), fixes, details)


def _ask(host: str, what: Mapping[str, Any]) -> _Answer | Finding:
    """Run the program on a host, and return its answer, or why it could not be run."""
    program, python = find_program("ssh"), [sys.executable, "-", json.dumps(what)]
    if program is None:
        text = "ssh is not installed here, with which mpirun and horovodrun start processes on other hosts"
        return Finding("error", text, "sudo apt-get install openssh-client")
    ssh = [str(program), "-T", "-o", "BatchMode=yes", "-o", f"ConnectTimeout={_CONNECT_S}", "--", host]
    command = python if _is_here(host) else [*ssh, shlex.join(python)]
    began = time.time()
    try:
        done = subprocess.run(
            command, input=Path(report.__file__).read_text(), capture_output=True, text=True, errors="replace",
            timeout=_MOST_S, check=False,
        )  # fmt: skip
    except subprocess.TimeoutExpired:
        text = f"ssh connects, but runs nothing within {_MOST_S:.0f} s"
        return Finding("error", text, f"ssh {host} true")
    ended = time.time()
    try:
        found: dict[str, Any] = json.loads(done.stdout.strip().splitlines()[-1])
        there = float(found["time"])
    except (LookupError, ValueError):
        return _failure(host, done.returncode, done.stderr)
    return _Answer(found, min(there - began, 0.0) + max(there - ended, 0.0))


def _is_here(host: str) -> bool:
    own = own_addresses()
    if host in (own[-1], "localhost"):
        return True
    return any(address in own or ip_address(address).is_loopback for address in addresses_of(host))


def _failure(host: str, code: int, output: str) -> Finding:
    """Return why ssh, or the program, has failed."""
    last = output.strip().splitlines()[-1].strip() if output.strip() else f"exit code {code}"
    if code == 255:
        for words, problem, fix in _SSH_ERRORS:
            if words in output.lower():
                address = next(iter(addresses_of(host)), host)
                return Finding("error", problem.format(host=host), fix.format(host=host, address=address))
        return Finding("error", f"ssh fails: {last}", f"ssh -v {host} true")
    if code in (126, 127):
        unitrain = f"unitrain=={report.versions()['unitrain']}"
        again = f"ssh {host} 'python3 -m venv {sys.prefix} && {sys.prefix}/bin/pip install {unitrain}'"
        return Finding("error", f"there is no {sys.executable}, the Python of this host", again)
    return Finding("error", f"{sys.executable} fails there: {last}", f"ssh {host} {sys.executable} --version")


def _versions(host: str, there: Mapping[str, str | None]) -> list[Finding]:
    problems = []
    python = f"ssh {host} {sys.executable}"
    for package, own in report.versions().items():
        its = there.get(package)
        if package == "python":
            if str(its).split(".")[:2] != str(own).split(".")[:2]:
                problems.append(Finding("warning", f"Python is {its}, but {own} here", f"{python} --version"))
            continue
        if its == own:
            continue
        if own is None:
            fix = f"{python} -m pip uninstall -y {package}"
        elif package == "horovod":
            version = own.partition("+")[0]
            fix = f"{python} -m unitrain.commands.cli install-horovod --force --version {version}"
        else:
            fix = f"{python} -m pip install {package}=={own}"
        problems.append(
            Finding("error", f"{package} is {its or 'not installed'}, but {own or 'not installed'} here", fix)
        )
    return problems


def _network(host: str, found: Mapping[str, Any], unreached: Mapping[str, str]) -> list[Finding]:
    problems = []
    if not found["reaches_back"]:
        text = "it can't connect to this host, at none of its addresses: a firewall, or no route back"
        problems.append(Finding("error", text, f"ssh {host} ip route get {own_addresses()[0]}"))
    for other, why in unreached.items():
        problems.append(Finding("error", f"it can't reach {other}: {why}", f"ssh {host} ping -c 3 {other}"))
    if found["name_is_loopback"] and not _is_here(host):
        text = f"its own name, {found['host']}, is a loopback address there, or none"
        problems.append(Finding("warning", text, f"ssh {host} {sys.executable} -m unitrain.commands.cli doctor"))
    return problems


def _clock(host: str, ahead_s: float) -> list[Finding]:
    if abs(ahead_s) < _CLOCK_S:
        return []
    text = f"its clock is {abs(ahead_s):,.0f} s {'ahead of' if ahead_s > 0 else 'behind'} this host's"
    return [Finding("warning", text, f"ssh -t {host} sudo timedatectl set-ntp true")]
