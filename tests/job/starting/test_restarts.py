"""``unitrain run``: which failures are restarted, which processes get signals, and that none is left."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import psutil
import pytest
from jobs import Job, run_job
from needs import HOROVOD

from unitrain.launch.local.toolchain import find_mpi

RUN = [sys.executable, "-m", "unitrain.commands.cli", "run"]
MPIRUN = pytest.mark.skipif(find_mpi() is None, reason="there is no mpirun")
# Takes its time over a signal, then ends as a rank does that was stopped.
STOPPABLE = """
    import os, signal, sys, time
    def stop(number, frame):
        started.write(b"told %d\\n" % number)
        time.sleep(float(sys.argv[1]))
        started.write(b"saved\\n")
        os._exit(128 + number)
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1):
        signal.signal(number, stop)
    rank = os.environ.get("OMPI_COMM_WORLD_RANK", os.environ.get("HOROVOD_RANK", os.environ.get("RANK", "0")))
    # A named pipe that the test has made: opened when the test opens it too, and written to at once.
    started = open(f"rank {rank}", "wb", buffering=0)
    started.write(b"started\\n")
    while True:
        signal.pause()
"""


def write(folder: Path, program: str) -> list[str]:
    (folder / "program.py").write_text(textwrap.dedent(program))
    return [sys.executable, "program.py"]


def counting(folder: Path, program: str) -> list[str]:
    """Return a command that runs a program which knows how often it was started ``before``."""
    head = """
        import os, signal, sys
        with open("starts", "a+") as starts:
            starts.seek(0)
            before = len(starts.read())
            starts.write("x")
    """
    return write(folder, textwrap.dedent(head) + textwrap.dedent(program))


def starts(folder: Path) -> int:
    return len((folder / "starts").read_text())


def run_and_stop(
    folder: Path,
    command: Sequence[str],
    *numbers: int,
    ranks: int = 1,
    environ: dict[str, str] | None = None,
    first: Callable[[subprocess.Popen[bytes]], object] = lambda process: None,
) -> tuple[Job, list[list[str]]]:
    """Run a command, and stop it when all ranks have started: by ``first``, and signals, each when the last was heard.

    Return how it ended, and what each rank has said from then on.
    """
    said: list[list[str]] = [[] for _ in range(ranks)]
    for rank in range(ranks):
        os.mkfifo(folder / f"rank {rank}")

    def meanwhile(process: subprocess.Popen[bytes]) -> None:
        pipes = [(folder / f"rank {rank}").open() for rank in range(ranks)]
        for pipe in pipes:
            assert pipe.readline() == "started\n"
        first(process)
        for position, number in enumerate(numbers):
            for rank, pipe in enumerate(pipes if position else ()):
                said[rank].append(pipe.readline())
            process.send_signal(number)
        for rank, pipe in enumerate(pipes):
            with pipe:
                said[rank] += pipe.readlines()

    return run_job(command, folder, environ=environ, meanwhile=meanwhile), said


def messages(job: Job) -> list[str]:
    return [line for line in job.stderr.splitlines() if line.startswith("unitrain run: ")]


def test_a_command_that_fails_is_started_again_until_it_succeeds(tmp_path: Path) -> None:
    command = counting(tmp_path, "sys.exit([1, 77, 0][before])")
    job = run_job([*RUN, "--max-restarts", "5", "--", *command], tmp_path)
    assert (job.code, starts(tmp_path), job.left) == (0, 3, ())
    first, second = messages(job)
    python = re.escape(sys.executable)
    assert re.fullmatch(rf"unitrain run: {python} ended with exit code 1 after \d\.\d s; restart 1 of 5 in 1 s.", first)
    assert re.fullmatch(rf"unitrain run: {python} ended with exit code 77 .*; restart 2 of 5 in 2 s.", second)


@pytest.mark.parametrize("code", [0, 2, 3, 130, 138, 143])
def test_what_ended_on_purpose_is_not_started_again(tmp_path: Path, code: int) -> None:
    job = run_job([*RUN, "--max-restarts", "2", "--", *counting(tmp_path, f"sys.exit({code})")], tmp_path)
    assert (job.code, starts(tmp_path), messages(job)) == (code, 1, [])


def test_the_last_failure_s_code_is_its_own(tmp_path: Path) -> None:
    command = counting(tmp_path, "os.kill(os.getpid(), signal.SIGKILL)")
    job = run_job([*RUN, "--max-restarts", "1", "--", *command], tmp_path)
    assert (job.code, starts(tmp_path)) == (128 + signal.SIGKILL, 2)
    assert re.search(r"was killed by SIGKILL after .* s; restart 1 of 1 in 1 s\.$", messages(job)[0])
    assert re.search(r"was killed by SIGKILL after .* s; no restarts left \(--max-restarts 1\)\.$", messages(job)[1])


def test_without_restarts_a_command_is_as_it_is(tmp_path: Path) -> None:
    command = counting(tmp_path, "print(sys.argv[1:], os.environ['MINE']); sys.exit(9)")
    job = run_job([*RUN, *command, "--", "--max-restarts", "3"], tmp_path, environ={"MINE": "passed on"})
    assert (job.code, job.stdout, job.stderr) == (9, "['--', '--max-restarts', '3'] passed on\n", "")


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--max-restarts", "-1", "--", "true"], "--max-restarts is -1, but must be an integer >= 0"),
        (["--max-restarts", "many", "--", "true"], "'many'"),
        ([], "no command was given"),
        (["--"], "no command was given"),
        (["--", "mpiruns", "-np", "2"], "'mpiruns' can't be started (No such file or directory)"),
        (["--", "."], "'.' can't be started (Permission denied)"),
    ],
)
def test_a_wrong_command_line_ends_with_2(tmp_path: Path, arguments: list[str], said: str) -> None:
    job = run_job([*RUN, *arguments], tmp_path)
    assert job.code == 2
    assert said in job.stderr
    assert "Traceback" not in job.stderr


STOPPED = [sys.executable, "program.py", "0.5"]
BY_A_SHELL = ["sh", "-c", f"{sys.executable} program.py 0.5; exit $?"]
OF_A_RANK = {"RANK": "0", "WORLD_SIZE": "1"}


@pytest.mark.parametrize(
    ("number", "told", "code", "command", "environ"),
    [
        pytest.param(signal.SIGTERM, 15, 143, STOPPED, {}, id="SIGTERM"),
        pytest.param(signal.SIGINT, 2, 130, STOPPED, {}, id="SIGINT"),
        pytest.param(signal.SIGUSR1, 10, 138, STOPPED, {}, id="SIGUSR1"),
        pytest.param(signal.SIGTERM, 15, 143, BY_A_SHELL, {}, id="a shell in between"),
        pytest.param(signal.SIGTERM, 15, 143, BY_A_SHELL, OF_A_RANK, id="a shell that inherited a rank's variables"),
        pytest.param(signal.SIGKILL, 15, -9, STOPPED, {}, id="the run is killed"),
        pytest.param(signal.SIGHUP, 15, 143, STOPPED, {}, id="its terminal is closed"),
    ],
)
def test_a_stop_is_passed_on_and_ranks_may_save(
    tmp_path: Path, number: int, told: int, code: int, command: list[str], environ: dict[str, str]
) -> None:
    write(tmp_path, STOPPABLE)
    job, said = run_and_stop(tmp_path, [*RUN, "--max-restarts", "3", "--", *command], number, environ=environ)
    assert (job.code, messages(job), job.left) == (code, [], ())
    assert said == [[f"told {told}\n", "saved\n"]]


def test_a_stop_ends_a_command_that_does_not_handle_it(tmp_path: Path) -> None:
    program = "open('rank 0', 'w').write('started\\n')\nimport signal\nwhile True: signal.pause()"
    command = [*RUN, "--max-restarts", "3", "--", *write(tmp_path, program)]
    job, _ = run_and_stop(tmp_path, command, signal.SIGUSR1)
    assert (job.code, job.stderr, job.left) == (128 + signal.SIGUSR1, "", ())


@pytest.mark.parametrize(
    ("numbers", "code"),
    [([signal.SIGTERM, signal.SIGTERM], 143), ([signal.SIGUSR1, signal.SIGTERM, signal.SIGINT], 130)],
)
def test_a_second_stop_kills(tmp_path: Path, numbers: list[int], code: int) -> None:
    # The program answers once to each signal and never ends, and neither does a child in a session of its own.
    program = """
        import os, signal, subprocess, sys, time
        def stop(number, frame):
            started.write(b"told\\n")
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1):
            signal.signal(number, stop)
        subprocess.Popen(["sleep", "600"], start_new_session=True)
        started = open("rank 0", "wb", buffering=0)
        started.write(b"started\\n")
        while True:
            signal.pause()
    """
    job, _ = run_and_stop(tmp_path, [*RUN, "--max-restarts", "3", "--", *write(tmp_path, program)], *numbers)
    assert (job.code, job.stderr, job.left) == (code, "", ())


def test_a_stop_between_two_starts_ends_at_once(tmp_path: Path) -> None:
    def stop_when_it_waits(process: subprocess.Popen[bytes]) -> None:
        [said] = tmp_path.glob("*.stderr")
        with said.open() as lines:
            while "restart 2 of 9 in 2 s" not in lines.readline():
                time.sleep(0.01)
        process.send_signal(signal.SIGTERM)

    command = [*RUN, "--max-restarts", "9", "--", *counting(tmp_path, "sys.exit(1)")]
    job = run_job(command, tmp_path, meanwhile=stop_when_it_waits)
    assert (job.code, starts(tmp_path)) == (143, 2)


def test_orphans_end_with_the_command(tmp_path: Path) -> None:
    program = """
        import subprocess, sys
        subprocess.run("setsid sleep 600 & setsid sh -c 'trap : TERM; sleep 600; sleep 600' &", shell=True)
        sys.exit(1)
    """
    job = run_job([*RUN, "--max-restarts", "1", "--", *write(tmp_path, program)], tmp_path)
    assert (job.code, len(messages(job)), job.left) == (1, 2, ())


# The command dies of a SIGTERM, and leaves two behind that don't, one of them in a session of its own.
LEAVING = """
    import subprocess
    ignores = "trap '' TERM HUP; echo started > 'rank 0'; sleep 600"
    subprocess.Popen(["sh", "-c", ignores.replace("echo started > 'rank 0'; ", "")], start_new_session=True)
    subprocess.run(["sh", "-c", ignores])
"""


def test_a_run_that_is_hung_up_leaves_nothing_behind(tmp_path: Path) -> None:
    job, _ = run_and_stop(tmp_path, [*RUN, "--", *write(tmp_path, LEAVING)], signal.SIGHUP)
    assert (job.code, job.left) == (143, ())


def test_nohup_keeps_a_run_alive(tmp_path: Path) -> None:
    def hang_up(process: subprocess.Popen[bytes]) -> None:
        process.send_signal(signal.SIGHUP)
        time.sleep(2)  # it looks for signals every second

    write(tmp_path, STOPPABLE)
    command = ["sh", "-c", 'trap "" HUP; exec "$@"', "sh", *RUN, "--", *STOPPED]
    job, said = run_and_stop(tmp_path, command, signal.SIGTERM, first=hang_up)
    assert (job.code, job.left) == (143, ())
    assert said == [["told 15\n", "saved\n"]]


def test_a_run_ends_nothing_that_it_has_not_started(tmp_path: Path) -> None:
    """After exec, the shell's earlier background jobs are children of the run."""
    script = 'sleep 600 & echo $! > before; setsid sleep 600 & echo $! >> before; exec "$@"'
    command = ["sh", "-c", script, "sh", *RUN, "--", "sh", "-c", "setsid sleep 600 & exit 7"]
    alive: list[psutil.Process] = []

    def note(process: subprocess.Popen[bytes]) -> None:
        process.wait(60)
        alive.extend(psutil.Process(int(pid)) for pid in (tmp_path / "before").read_text().split())

    job = run_job(command, tmp_path, meanwhile=note)
    assert job.code == 7
    assert [re.findall(r"sleep 600", one) for one in job.left] == [["sleep 600"]] * 2
    assert {int(one.split(":")[0]) for one in job.left} == {process.pid for process in alive}


LAUNCHERS = {
    "mpirun": ["mpirun", "--oversubscribe", "-np", "2", "python"],
    "horovodrun": ["horovodrun", "--gloo", "-np", "2", "python"],
    "torchrun": ["torchrun", "--nproc-per-node", "2", "--max-restarts", "3"],
}


@pytest.mark.launcher
@pytest.mark.parametrize(
    ("launcher", "number", "needs_s", "code"),
    [
        # Left to itself, mpirun kills after 1 s, and horovodrun after 5 s.
        pytest.param("mpirun", signal.SIGTERM, 5, 143, marks=MPIRUN),
        pytest.param("horovodrun", signal.SIGTERM, 6, 1, marks=[HOROVOD, pytest.mark.soak]),
        # Left to itself, torchrun dies of SIGUSR1 at once. It starts its ranks again when they stop, and is then ended.
        pytest.param("torchrun", signal.SIGUSR1, 1, 1, id="torchrun that restarts", marks=pytest.mark.soak),
    ],
)
def test_ranks_have_the_time_that_they_need_to_stop(
    tmp_path: Path, launcher: str, number: signal.Signals, needs_s: float, code: int
) -> None:
    write(tmp_path, STOPPABLE)
    command = [*RUN, "--max-restarts", "3", "--", *LAUNCHERS[launcher], "program.py", str(needs_s)]
    job, said = run_and_stop(tmp_path, command, number, ranks=2)
    assert (job.code, messages(job), job.left) == (code, [], ()), job.output
    assert said == [[f"told {number:d}\n", "saved\n"]] * 2


@pytest.mark.launcher
@MPIRUN
def test_a_job_of_mpirun_is_started_again_when_a_rank_is_killed(tmp_path: Path) -> None:
    program = """
        import os, pathlib, signal
        rank = int(os.environ["OMPI_COMM_WORLD_RANK"])
        if rank == 1 and not pathlib.Path("again").exists():
            pathlib.Path("again").touch()
            os.kill(os.getpid(), signal.SIGKILL)
        if rank == 0 and not pathlib.Path("again").exists():
            signal.pause()
        print(f"rank {rank} is done")
    """
    write(tmp_path, program)
    job = run_job([*RUN, "--max-restarts", "1", "--", *LAUNCHERS["mpirun"], "program.py"], tmp_path)
    assert (job.code, job.left) == (0, ()), job.output
    assert re.search(r"mpirun ended with exit code 137 after .* s; restart 1 of 1", messages(job)[0])
    assert all(f"rank {rank} is done" in job.stdout for rank in range(2))
