"""The rendezvous under launchers that don't provide one."""

from __future__ import annotations

import http.server
import os
import shutil
import socket
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import free_ports
import psutil
import pytest
from hosts import two_hosts
from needs import HOROVOD
from slurm import Slurm

from unitrain.errors import CommunicationError, LaunchError
from unitrain.launch.detect import Launch
from unitrain.launch.network.addresses import own_addresses, reach
from unitrain.launch.rendezvous import rendezvous

__all__ = ["two_hosts"]  # the fixture
BIN = Path(sys.executable).parent
AS_ROOT = {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
MPIRUN = [str(BIN / "mpirun"), "--oversubscribe", "-np", "2"]

MEET = """
import hashlib, os, sys, time
from unitrain.errors import BackendError
from unitrain.launch.detect import detect
from unitrain.launch.rendezvous import rendezvous, shared_secret

def meet(launch):
    store = rendezvous(launch, 30)
    if launch.rendezvous == "mpi" and sys.modules.get("mpi4py", "there") is not None:
        secret = shared_secret(launch, 30)
        store.set(f"digest {launch.rank}", hashlib.sha256(secret).hexdigest())
        assert len(secret) == 32
        assert store.get("digest 0") == store.get("digest 1"), "MPI has brought rank 0's secret to all"
    assert not store.check(["rank 0"]) or launch.rank != 0
    store.set(f"rank {launch.rank}", "here")
    store.wait([f"rank {rank}" for rank in range(launch.world_size)])
    # Whoever opened the store is the last to leave it.
    store.add("leaving", 1)
    while launch.rank == 0 and store.add("leaving", 0) < launch.world_size:
        time.sleep(0.01)

def meet_twice(environ):
    launch = detect(environ)
    meet(launch)
    meet(launch)
    print(f"rank {launch.rank} met {launch.world_size} by {launch.rendezvous}\\n", end="", flush=True)
    return launch

def refused():
    try:
        meet_twice(os.environ)
    except BackendError as error:
        print(f"refused: {error}\\n", end="", flush=True)
"""
SCRIPT = f"{MEET}\nmeet_twice(os.environ)\n"
# What ranks of mpirun do one after another in one start.
SCRIPT_OF_MPIRUN = f"""{MEET}
sys.modules["mpi4py"] = None
refused()
meet_twice({{**os.environ, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": sys.argv[1]}})
del sys.modules["mpi4py"]
launch = meet_twice(os.environ)
meet(launch)  # so that both have printed
if launch.rank == 1:
    sys.exit(7)
time.sleep(600)
"""
SCRIPT_OF_MPICH = f"""{MEET}
import unitrain
refused()
unitrain.init()
"""


@pytest.fixture
def script(tmp_path: Path) -> list[str]:
    (tmp_path / "script.py").write_text(SCRIPT)
    return [sys.executable, str(tmp_path / "script.py")]


def run(command: list[str], env: dict[str, str] | None = None) -> subprocess.CompletedProcess[str]:
    environ = {**os.environ, **AS_ROOT, **(env or {})}
    return subprocess.run(command, env=environ, capture_output=True, text=True, timeout=60, check=False)


def assert_met(done: subprocess.CompletedProcess[str], by: str, world_size: int = 2) -> None:
    assert done.returncode == 0, done.stderr
    assert sorted(done.stdout.splitlines()) == [f"rank {rank} met {world_size} by {by}" for rank in range(world_size)]


@pytest.fixture(scope="module")
def of_mpirun(tmp_path_factory: pytest.TempPathFactory) -> subprocess.CompletedProcess[str]:
    """Start two ranks with mpirun, once for all tests."""
    script = tmp_path_factory.mktemp("mpirun") / "script.py"
    script.write_text(SCRIPT_OF_MPIRUN)
    return run([*MPIRUN, sys.executable, str(script), str(free_ports.free_port())])


@pytest.mark.launcher
def test_mpirun(of_mpirun: subprocess.CompletedProcess[str]) -> None:
    assert {"rank 0 met 2 by mpi", "rank 1 met 2 by mpi"} <= set(of_mpirun.stdout.splitlines()), of_mpirun.stderr


@pytest.mark.launcher
def test_mpirun_with_a_master_needs_no_mpi4py(of_mpirun: subprocess.CompletedProcess[str]) -> None:
    assert {"rank 0 met 2 by tcp", "rank 1 met 2 by tcp"} <= set(of_mpirun.stdout.splitlines()), of_mpirun.stderr


@pytest.mark.launcher
def test_mpirun_without_mpi4py(of_mpirun: subprocess.CompletedProcess[str]) -> None:
    refused = [line for line in of_mpirun.stdout.splitlines() if line.startswith("refused: ")]
    assert len(refused) == 2, of_mpirun.stderr
    for line in refused:
        assert "mpirun started 2 processes, which without Horovod need mpi4py to meet" in line
        assert "pip install 'unitrain[mpi]'" in line


@pytest.mark.launcher
def test_a_failing_rank_ends_the_job_of_mpirun(of_mpirun: subprocess.CompletedProcess[str]) -> None:
    assert of_mpirun.returncode == 7, of_mpirun.stderr  # MPI_Finalize would wait for it without end


@pytest.mark.soak
@pytest.mark.launcher
@pytest.mark.skipif(shutil.which("mpiexec.mpich") is None, reason="MPICH is not installed: apt-get install mpich")
def test_another_mpi_than_that_of_mpi4py_and_horovod(tmp_path: Path) -> None:
    """Horovod's MPI would abort in MPI_Init."""
    (tmp_path / "script.py").write_text(SCRIPT_OF_MPICH)
    done = run(["mpiexec.mpich", "-n", "2", sys.executable, str(tmp_path / "script.py")])
    assert done.returncode != 0
    refused = [
        line for line in done.stdout.splitlines() if line.startswith("refused: the MPI of mpi4py is 'Open MPI v")
    ]
    assert len(refused) == 2, done.stderr
    assert all("started by the mpirun of MPICH" in line for line in refused)
    assert done.stderr.count("unitrain: ") == 1, done.stderr
    assert "started by the mpirun of MPICH" in done.stderr


@pytest.mark.launcher
@pytest.mark.xdist_group("slurm")
def test_srun_on_two_nodes(script: list[str], slurm: Slurm) -> None:
    """On one, ``test_launchers.py`` trains."""
    assert_met(run([*slurm.srun, "-N", "2", "-n", "3", *script], slurm.env), "tcp", 3)


KEY_VALUE_SERVER = """
from horovod.runner.http.http_server import RendezvousHandler, RendezvousHTTPServer
server = RendezvousHTTPServer(("10.99.0.1", 10000), RendezvousHandler, 0)
print("ready", flush=True)
server.serve_forever()
"""


@pytest.mark.launcher
@HOROVOD
def test_horovodrun_on_two_hosts(script: list[str], two_hosts: tuple[str, str]) -> None:
    """horovodrun needs ssh to start the second host's process, but what it tells the two is known."""
    on = [["ip", "netns", "exec", host] for host in two_hosts]
    server = subprocess.Popen([*on[0], sys.executable, "-c", KEY_VALUE_SERVER], stdout=subprocess.PIPE, text=True)
    try:
        assert server.stdout is not None
        assert server.stdout.readline() == "ready\n"
        ranks = []
        for rank in range(2):
            env = {
                "HOROVOD_RANK": str(rank),
                "HOROVOD_SIZE": "2",
                "HOROVOD_LOCAL_RANK": "0",
                "HOROVOD_LOCAL_SIZE": "1",
                "HOROVOD_CROSS_RANK": str(rank),
                "HOROVOD_CROSS_SIZE": "2",
                "HOROVOD_GLOO_RENDEZVOUS_ADDR": "10.99.0.1",
                "HOROVOD_GLOO_RENDEZVOUS_PORT": "10000",
            }
            ranks.append(
                subprocess.Popen([*on[rank], *script], env={**os.environ, **env}, stdout=subprocess.PIPE, text=True)
            )
        said = [rank.communicate(timeout=60)[0] for rank in ranks]
        assert said == ["rank 0 met 2 by horovod\n", "rank 1 met 2 by horovod\n"]
    finally:
        server.kill()
        server.communicate()


# --------------------------------------------------------------------------------------------------- one process


@pytest.fixture
def free_port() -> int:
    return free_ports.free_port()


def test_alone_each_call_gives_an_empty_store() -> None:
    first, second = rendezvous(Launch("python"), 5), rendezvous(Launch("python"), 5)
    first.set("key", "value")
    assert first.check(["key"])
    assert not second.check(["key"])


def rank_0_of_2(address: str) -> Launch:
    return Launch("env", rank=0, world_size=2, local_world_size=2, rendezvous="tcp", address=address)


def test_port_is_taken() -> None:
    with socket.create_server(("::", 0), family=socket.AF_INET6, dualstack_ipv6=True) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(LaunchError, match=rf"address of env is .*, but port {port} is in use .* MASTER_PORT"):
            rendezvous(rank_0_of_2(f"127.0.0.1:{port}"), 5)


def test_port_is_taken_by_one_that_says_nothing() -> None:
    """The others find it out too; torch's client would wait for ever."""
    with socket.create_server(("127.0.0.1", 0)) as taken:
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        with pytest.raises(LaunchError, match=rf"address of env is {address}, but another program than rank 0"):
            rendezvous(replace(rank_0_of_2(address), rank=1), 1)


def test_host_is_unknown() -> None:
    with pytest.raises(
        LaunchError, match=r"is nowhere\.invalid:29500, but host 'nowhere\.invalid' can't be resolved.*MASTER_ADDR"
    ):
        rendezvous(rank_0_of_2("nowhere.invalid:29500"), 5)


def test_others_do_not_come(free_port: int) -> None:
    said = rf"rank 0 of 3 waited 1 s at 127\.0\.0\.1:{free_port}, but rank 1, 2 did not connect\."
    with pytest.raises(CommunicationError, match=said):
        rendezvous(replace(rank_0_of_2(f"127.0.0.1:{free_port}"), world_size=3), 1)


def test_rank_0_does_not_come(free_port: int, capfd: pytest.CaptureFixture[str]) -> None:
    launch = Launch("env", rank=1, world_size=2, rendezvous="tcp", address=f"127.0.0.1:{free_port}")
    said = rf"rank 1 of 2 waited 1 s for rank 0 at 127\.0\.0\.1:{free_port}, but nothing listens there: check that"
    with pytest.raises(CommunicationError, match=said):
        rendezvous(launch, 1)
    assert capfd.readouterr() == ("", ""), "torch's client would have much to say"


@pytest.mark.parametrize("local_world_size", [2, 1])
def test_the_store_listens_no_wider_than_the_hosts_need(free_port: int, local_world_size: int) -> None:
    launch = replace(rank_0_of_2(f"127.0.0.1:{free_port}"), local_world_size=local_world_size)
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(rendezvous, launch, 1.0)
        while not (found := {address.ip for address in listening() if address.port == free_port}):
            assert not waiting.done()
        with pytest.raises(CommunicationError, match="rank 1 did not connect"):
            waiting.result()
    assert (found == {"127.0.0.1"}) == (local_world_size == 2)


def listening() -> list[Any]:
    return [one.laddr for one in psutil.Process().net_connections("tcp") if one.status == psutil.CONN_LISTEN]


class Answers(http.server.BaseHTTPRequestHandler):
    """A server of keys and values where a stranger has been."""

    value = b""

    def do_GET(self) -> None:
        self.send_response(200)
        self.end_headers()
        self.wfile.write(self.value)

    def log_message(self, *_: object) -> None:
        pass


@pytest.mark.parametrize(
    "value",
    [b"", b"\xff\xfe", b"[" * 100_000, b"[[], 80]]", b'[["host"], "80"]', b"[[1], 80]", b'[["host"], 99999]', b"{}"],
)
def test_what_strangers_write_into_horovodruns_server(value: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Answers, "value", value)
    with http.server.HTTPServer(("127.0.0.1", 0), Answers) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        address = f"127.0.0.1:{server.server_port}"
        try:
            with pytest.raises(CommunicationError, match=f"can't read the address of rank 0 at {address}: .*SECURITY"):
                rendezvous(Launch("horovodrun", rank=1, world_size=2, rendezvous="horovod", address=address), 5)
        finally:
            server.shutdown()
            thread.join()


def test_horovodrun_is_gone(free_port: int) -> None:
    launch = Launch("horovodrun", rank=1, world_size=2, rendezvous="horovod", address=f"127.0.0.1:{free_port}")
    with pytest.raises(
        CommunicationError, match=rf"horovodrun does not answer at 127\.0\.0\.1:{free_port}, the address in "
    ):
        rendezvous(launch, 1)


def test_own_addresses_are_for_others() -> None:
    *addresses, name = own_addresses()
    assert name == socket.gethostname()
    assert not any(address.startswith("127.") for address in addresses)


def test_first_address_that_can_be_reached(free_port: int) -> None:
    with (
        socket.create_server(("127.0.0.1", 0)) as server,
        reach(["nowhere.invalid", "127.0.0.1"], server.getsockname()[1]) as connection,
    ):
        assert connection.getpeername() == server.getsockname()
    with pytest.raises(CommunicationError, match=rf"tried nowhere\.invalid, 127\.0\.0\.1, port {free_port}"):
        reach(["nowhere.invalid", "127.0.0.1"], free_port)


def test_a_rank_that_comes_twice_is_named_at_once(free_port: int) -> None:
    """Rank 2 is missing, and nobody waits for it."""
    launch = replace(rank_0_of_2(f"127.0.0.1:{free_port}"), world_size=3)
    with ThreadPoolExecutor(3) as pool:
        waiting = [pool.submit(rendezvous, replace(launch, rank=rank), 30.0) for rank in (0, 1, 1)]
        error = waiting[0].exception(20.0)
    assert f"two processes have come to 127.0.0.1:{free_port} as rank 1 of 3: give every" in str(error)


@pytest.mark.parametrize("all_come", [True, False])
def test_the_store_does_the_same_for_each_rank_however_many_there_are(free_port: int, all_come: bool) -> None:
    """The last to come lets all go on; if some don't, one of those that wait finds out which, and tells the others."""
    world_size = 12
    launch = replace(rank_0_of_2(f"127.0.0.1:{free_port}"), world_size=world_size)
    ranks = range(world_size) if all_come else range(3)
    with ThreadPoolExecutor(world_size) as pool:
        waiting = [pool.submit(rendezvous, replace(launch, rank=rank), 20.0 if all_come else 2.0) for rank in ranks]
        errors = [one.exception() for one in waiting]
    if all_come:
        assert errors == [None] * world_size
        store = waiting[0].result().underlying_store  # type: ignore[attr-defined]
        assert store.num_keys() == world_size + 2
    else:
        said = "rank 3, 4, 5, 6, 7, 8, 9, 10 ... did not connect. Check that all 12 processes"
        assert all(said in str(error) for error in errors), errors
