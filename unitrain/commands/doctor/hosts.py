"""The probes of other hosts, over ssh: can a job be started there, and would its ranks find one another and agree.

This module is also the program that runs on each host, with the addresses and a port of the host that asks and the
names of the other hosts, as JSON.
"""

from __future__ import annotations

import json
import shlex
import socket
import subprocess
import sys
import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

from unitrain.commands.doctor.finding import Finding, guarded
from unitrain.commands.toolchain import find_program, installed_version
from unitrain.launch.network.addresses import addresses_of, is_here, is_loopback, own_addresses

_CONNECT_S, _PROBE_S, _MOST_S = 5, 3.0, 60.0
_MOST_AT_ONCE = 32
_SSH_PORT = 22
_CLOCK_S = 5.0
# Words in what ssh says when it can't open a session, and the commands that help.
_SSH_FIXES = {
    "could not resolve": "echo 'ITS_ADDRESS {host}' | sudo tee -a /etc/hosts",
    "identification has changed": "ssh-keygen -R {host}",
    "host key verification failed": "ssh-keyscan -H {host} >> ~/.ssh/known_hosts",
    "permission denied": "test -f ~/.ssh/id_ed25519 || ssh-keygen -t ed25519 -N '' -f ~/.ssh/id_ed25519\n"
    "ssh-copy-id {host}",
    "no route": "ip route get {address}",
    "unreachable": "ip route get {address}",
    "timed out": "ping -c 3 {host}",
    "refused": "sudo apt-get install openssh-server  # on {host}",
}


def examine_hosts(hosts: Sequence[str]) -> dict[str, Finding]:
    """Return a finding for each host of a job that this host would start, by its name."""
    with _listener() as listener, ThreadPoolExecutor(_MOST_AT_ONCE) as threads:
        # Rank 0's host, to which all ranks connect, is taken for this one: any port of it stands for rank 0's.
        port = listener.getsockname()[1]
        asked = [json.dumps([own_addresses(), port, [one for one in hosts if one != host]]) for host in hosts]
        answers = dict(zip(hosts, threads.map(_ask, hosts, asked), strict=True))
    answering = {host for host, answer in answers.items() if not isinstance(answer, Finding)}
    return {
        host: answer if isinstance(answer, Finding) else guarded(partial(_finding, host, answer, answering))
        for host, answer in answers.items()
    }


def _listener() -> socket.socket:
    dual = socket.has_dualstack_ipv6()
    family = socket.AF_INET6 if dual else socket.AF_INET
    return socket.create_server(("", 0), family=family, backlog=socket.SOMAXCONN, dualstack_ipv6=dual)


def _ask(host: str, asked: str) -> dict[str, Any] | Finding:
    """Run the program on a host, and return its report, or why there is none."""
    ssh = find_program("ssh")
    if ssh is None:
        text = "ssh is not installed here, with which mpirun and horovodrun start processes on other hosts"
        return Finding("error", text, "sudo apt-get install openssh-client")
    command = [sys.executable, "-m", "unitrain.commands.doctor.hosts", asked]
    if not is_here(host):
        options = ["-T", "-o", "BatchMode=yes", "-o", f"ConnectTimeout={_CONNECT_S}", "--", host]
        command = [str(ssh), *options, shlex.join(command)]
    began = time.time()
    try:
        done = subprocess.run(
            command, stdin=subprocess.DEVNULL, capture_output=True, text=True, errors="replace", timeout=_MOST_S,
            check=False,
        )  # fmt: skip
    except subprocess.TimeoutExpired:
        return Finding("error", f"ssh connects, but runs nothing within {_MOST_S:.0f} s", f"ssh {host} true")
    try:
        report: dict[str, Any] = json.loads(done.stdout.strip().splitlines()[-1])
    except (LookupError, ValueError):
        return _failure(host, done.returncode, done.stderr.strip())
    return {**report, "clock_ahead_s": min(report["time"] - began, 0.0) + max(report["time"] - time.time(), 0.0)}


def _failure(host: str, code: int, output: str) -> Finding:
    """Return why ssh, or the program, has failed."""
    last = output.splitlines()[-1].strip() if output else f"exit code {code}"
    if code == 255:
        fix = next((fix for words, fix in _SSH_FIXES.items() if words in output.lower()), "ssh -v {host} true")
        address = next(iter(addresses_of(host)), host)
        return Finding("error", f"ssh fails: {last}", fix.format(host=host, address=address))
    version = installed_version("unitrain")
    again = f"ssh {host} 'python3 -m venv {sys.prefix} && {sys.prefix}/bin/pip install unitrain=={version}'"
    return Finding("error", f"{sys.executable}, the Python of this host, fails there: {last}", again)


def _finding(host: str, report: Mapping[str, Any], answering: Collection[str]) -> Finding:
    problems = list(_problems(host, report, answering))
    if not problems:
        there = "this host" if is_here(host) else "reached by ssh, and has the versions and the time of this host"
        return Finding("ok", f"{report['host']}: {there}")
    return Finding(
        "error" if any(one.status == "error" for one in problems) else "warning",
        "; ".join(one.summary for one in problems),
        "\n".join(dict.fromkeys(str(one.fix) for one in problems)),
    )


def _problems(host: str, report: Mapping[str, Any], answering: Collection[str]) -> Iterator[Finding]:
    """Yield what is wrong with a host, but for what is wrong with another one, which does not answer."""
    python = f"ssh {host} {sys.executable}"
    for package, own in _versions().items():
        its = report["versions"].get(package)
        if its != own:
            fix = f"-m pip install {package}=={own}" if own else f"-m pip uninstall -y {package}"
            if package == "horovod" and own:
                fix = f"-m unitrain.commands.cli install-horovod --force --version {own.partition('+')[0]}"
            elif package == "python":
                fix = "--version"
            text = f"{package} is {its or 'not installed'}, but {own or 'not installed'} here"
            yield Finding("warning" if package == "python" else "error", text, f"{python} {fix}")
    if not report["reaches_back"]:
        text = "it can't connect to this host, at none of its addresses: a firewall, or no route back"
        yield Finding("error", text, f"ssh {host} ip route get {own_addresses()[0]}")
    for other, why in report["unreached"].items():
        if other in answering:
            yield Finding("error", f"it can't reach {other}: {why}", f"ssh {host} ping -c 3 {other}")
    if report["name_is_loopback"] and not is_here(host):
        text = f"its own name, {report['host']}, is a loopback address there, or none"
        yield Finding("warning", text, f"{python} -m unitrain.commands.cli doctor")
    ahead_s = report["clock_ahead_s"]
    if abs(ahead_s) >= _CLOCK_S:
        text = f"its clock is {abs(ahead_s):,.0f} s {'ahead of' if ahead_s > 0 else 'behind'} this host's"
        yield Finding("warning", text, f"ssh -t {host} sudo timedatectl set-ntp true")


# ------------------------------------------------------------------------------------------------ on each host


def _versions() -> dict[str, str | None]:
    """Return the versions of what must be the same on all hosts; None if it is not installed."""
    python = f"{sys.version_info.major}.{sys.version_info.minor}"
    return {"python": python, **{package: installed_version(package) for package in ("unitrain", "torch", "horovod")}}


def _unreached(address: tuple[str, int]) -> str:
    """Return why this host can't connect to an address and port, or an empty string."""
    try:
        socket.create_connection(address, _PROBE_S).close()
    except ConnectionRefusedError as error:
        return "" if address[1] == _SSH_PORT else str(error)  # there is a route to a host that refuses
    except OSError as error:
        return error.strerror or str(error)
    return ""


def _report(addresses: Sequence[str], port: int, others: Sequence[str]) -> dict[str, Any]:
    with ThreadPoolExecutor(_MOST_AT_ONCE) as threads:
        why = threads.map(_unreached, [(host, _SSH_PORT) for host in others])
        back = threads.map(_unreached, [(address, port) for address in addresses])
        return {
            "host": socket.gethostname(),
            "versions": _versions(),
            "name_is_loopback": is_loopback(socket.gethostname()),
            "unreached": {host: reason for host, reason in zip(others, why, strict=True) if reason},
            "reaches_back": "" in set(back),
            "time": time.time(),
        }


if __name__ == "__main__":
    print(json.dumps(_report(*json.loads(sys.argv[1]))))
