"""Hosts on this machine, as a cluster has them: network namespaces on a switch, with names, addresses and sshd.

The hosts are called node0, node1, ...; each knows the others' names, and a user may go from each to each with ssh.
They share this machine's files, but for /dev/shm, and its processes.
"""

from __future__ import annotations

import itertools
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext, suppress
from dataclasses import dataclass, field
from pathlib import Path

import pytest

_clusters = itertools.count()
_MISSING = "needs root, ip, sshd and ssh: apt-get install iproute2 openssh-server openssh-client"
_PATH = f"{Path(sys.executable).parent}:/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
_SSHD = """
Port 22
HostKey {folder}/host_key
AuthorizedKeysFile {folder}/user_key.pub
PidFile none
StrictModes no
UsePAM no
PermitRootLogin yes
PasswordAuthentication no
MaxStartups 100
SetEnv PATH={path}
"""
_SSH = """
Host *
    IdentityFile {folder}/user_key
    IdentitiesOnly yes
    StrictHostKeyChecking no
    UserKnownHostsFile /dev/null
    LogLevel ERROR
    ConnectTimeout 10
    BatchMode yes
"""


@dataclass(frozen=True)
class Cluster:
    """Running hosts.

    Attributes:
        names: their names, by which they find one another.
        addresses: their addresses.
        ssh: folder of a program ``ssh`` that opens a session on a host without a password.
    """

    names: tuple[str, ...]
    addresses: tuple[str, ...]
    ssh: Path
    _namespaces: tuple[str, ...]
    _switch: str
    _sshds: dict[int, subprocess.Popen[str]] = field(default_factory=dict)

    def start(
        self,
        host: int,
        command: Sequence[str],
        *,
        environ: Mapping[str, str] | None = None,
        cwd: Path | None = None,
        output: Path | None = None,
    ) -> subprocess.Popen[str]:
        """Start a command on a host, with its name and addresses. Its output goes to a pipe, or is added to a file."""
        given = {**os.environ, "PATH": f"{self.ssh}:{_PATH}", **(environ or {})}
        with output.open("a") if output else nullcontext(subprocess.PIPE) as stdout:
            return subprocess.Popen(
                [*self._enter(host), *command],
                env=given, cwd=cwd, stdout=stdout, stderr=subprocess.STDOUT, text=True, start_new_session=True,
            )  # fmt: skip

    def start_sshd(self, host: int) -> None:
        """Start sshd on a host, and return when it can be reached."""
        self._sshds[host] = self.start(host, ["/usr/sbin/sshd", "-D", "-e", "-f", str(self.ssh.parent / "sshd_config")])
        deadline = time.monotonic() + 20
        while True:
            attempt = self.start(0, ["ssh", self.names[host], "hostname"])
            said = attempt.communicate(timeout=30)[0]
            if attempt.returncode == 0 and said.strip() == self.names[host]:
                return
            assert time.monotonic() < deadline, said
            time.sleep(0.1)

    def end_sshds(self) -> None:
        """End sshd on all hosts."""
        for daemon in self._sshds.values():
            daemon.terminate()
            daemon.communicate(timeout=20)

    def cut_power(self, host: int) -> None:
        """End everything on a host in the midst of what it does, without a word to the others."""
        self.pull_cable(host)
        self.kill_all(host)
        for one in self._memory(host).iterdir():
            shutil.rmtree(one) if one.is_dir() else one.unlink()

    def kill_all(self, host: int) -> None:
        """Kill everything on a host, its sshd too. The others see its connections close."""
        listed = ["ip", "netns", "pids", self._namespaces[host]]
        while pids := subprocess.run(listed, capture_output=True, text=True, check=True).stdout.split():
            for pid in pids:
                with suppress(ProcessLookupError):
                    os.kill(int(pid), signal.SIGKILL)
            time.sleep(0.05)
        if host in self._sshds:
            self._sshds.pop(host).communicate()

    def pull_cable(self, host: int) -> None:
        """Take a host off the network, without a word to anybody."""
        self._set_cable(host, "down")

    def plug_cable(self, host: int) -> None:
        """Put it back."""
        self._set_cable(host, "up")

    def _set_cable(self, host: int, state: str) -> None:
        subprocess.run(["ip", "-n", self._switch, "link", "set", f"port{host}", state], check=True)

    def _memory(self, host: int) -> Path:
        """Return what a host has as /dev/shm."""
        folder = self.ssh.parent / "memory" / self.names[host]
        folder.mkdir(parents=True, exist_ok=True)
        return folder

    def _enter(self, host: int) -> list[str]:
        # ip netns exec also puts the namespace's own /etc/hosts in the place of this machine's.
        given = f"hostname {self.names[host]}; mount --bind {self._memory(host)} /dev/shm"
        named = ["unshare", "--uts", "sh", "-c", f'{given}; exec "$@"', "sh"]
        return ["ip", "netns", "exec", self._namespaces[host], *named]


def cluster_missing() -> str | None:
    """Return why there can be no cluster here, or None."""
    programs = ("ip", "ssh", "ssh-keygen", "/usr/sbin/sshd")
    return _MISSING if os.geteuid() != 0 or not all(map(shutil.which, programs)) else None


@contextmanager
def cluster(folder: Path, count: int, *, own_names_are_loopback: bool = False) -> Iterator[Cluster]:
    """Run a cluster until the block ends.

    Args:
        folder: for keys and configuration.
        count: number of hosts.
        own_names_are_loopback: let each host find its own name at 127.0.1.1, as Debian's installer has it.
    """
    reason = cluster_missing()
    if reason is not None:
        pytest.skip(reason)
    prefix = f"unitrain-{os.getpid()}-{next(_clusters)}"
    switch, namespaces = f"{prefix}-switch", tuple(f"{prefix}-{host}" for host in range(count))
    names, addresses = tuple(f"node{i}" for i in range(count)), tuple(f"10.98.0.{i + 1}" for i in range(count))
    with ExitStack() as stack:
        _add_namespace(stack, switch)
        _ip("-n", switch, "link", "add", "switch", "type", "bridge")
        _ip("-n", switch, "link", "set", "switch", "up")
        for host, namespace in enumerate(namespaces):
            _add_namespace(stack, namespace)
            port = f"eth0 netns {namespace} type veth peer name port{host} netns {switch}"
            _ip("link", "add", *port.split())
            _ip("-n", switch, "link", "set", f"port{host}", "master", "switch", "up")
            _ip("-n", namespace, "addr", "add", f"{addresses[host]}/24", "dev", "eth0")
            _ip("-n", namespace, "link", "set", "eth0", "up")
            known = dict(zip(names, addresses, strict=True))
            if own_names_are_loopback:
                known[names[host]] = "127.0.1.1"
            lines = ["127.0.0.1 localhost", *(f"{address} {name}" for name, address in known.items())]
            etc = Path("/etc/netns", namespace)
            stack.callback(shutil.rmtree, etc, ignore_errors=True)
            etc.mkdir(parents=True)
            (etc / "hosts").write_text("\n".join([*lines, ""]))
        ssh = _write_ssh_files(folder)
        made = Cluster(names, addresses, ssh, namespaces, switch)
        stack.callback(made.end_sshds)
        for host in range(count):
            made.start_sshd(host)
        yield made


def _ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True)


def _add_namespace(stack: ExitStack, name: str) -> None:
    _ip("netns", "add", name)
    stack.callback(subprocess.run, ["ip", "netns", "delete", name], check=False)
    _ip("-n", name, "link", "set", "lo", "up")


def _write_ssh_files(folder: Path) -> Path:
    """Write keys and configuration, and return the folder of an ``ssh`` that uses them."""
    for key in ("host_key", "user_key"):
        subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(folder / key)], check=True)
    (folder / "sshd_config").write_text(_SSHD.format(folder=folder, path=f"{folder}/bin:{_PATH}"))
    (folder / "ssh_config").write_text(_SSH.format(folder=folder))
    Path("/run/sshd").mkdir(exist_ok=True)  # sshd wants it
    program = folder / "bin" / "ssh"
    program.parent.mkdir()
    program.write_text(f'#!/bin/sh\nexec {shutil.which("ssh")} -F {folder}/ssh_config "$@"\n')
    program.chmod(0o755)
    return program.parent
