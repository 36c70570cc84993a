"""Batch jobs that train in a SLURM of their own, and what they have said and done."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import psutil
import pytest
from harness import COPIED, PROGRAM, assert_same_training, notes, train_alone
from page_blocks import blocks
from places import ROOT
from slurm import Slurm, local_slurm, slurm_missing

PAGE = ROOT / "docs" / "launchers" / "slurm.md"
PATH = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
STEPS = 70
PAUSE_S = 0.3
ENDS_S = 300.0


@pytest.fixture
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Slurm]:
    """A SLURM of its own, whose nodes a test may lose."""
    reason = slurm_missing()
    if reason is not None:
        pytest.skip(reason)
    with local_slurm(tmp_path_factory.mktemp("slurm")) as running:
        yield running


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of an undisturbed run on one process."""
    return train_alone(tmp_path_factory, STEPS)


def training(folder: Path | str) -> str:
    """Return the command that trains in a folder."""
    return f"{sys.executable} {PROGRAM} {folder} {STEPS} none:0:0"


def from_page(fragment: str) -> str:
    """Return the block of the page on SLURM that has a fragment, with fewer processes, and the tests' script.

    The script trains in the folder ``one``, or in that of its ``--output``.
    """
    [text] = [block.text for block in blocks(PAGE) if block.language == "bash" and fragment in block.text]
    for processes, fewer in (("8", "2"), ("4", "1")):
        text = re.sub(rf"(?<=[ =]){processes}\b", fewer, text)
    return re.sub(
        r"\btrain\.py(?: --output ([^\s']+))?", lambda found: f"{PROGRAM} {found[1] or 'one'} {STEPS} none:0:0", text
    )


def slow_at_first(folder: Path) -> dict[str, str]:
    """Return a variable that makes the first start of a batch script slow enough for its time limit."""
    (folder / "pause.sh").write_text("export TESTS_PAUSE=1.2\n[ -z $SLURM_RESTART_COUNT ] || export TESTS_PAUSE=0\n")
    return {"BASH_ENV": str(folder / "pause.sh")}


def environ(slurm: Slurm) -> dict[str, str]:
    """Return the variables of jobs whose training takes as long as a test needs to disturb it."""
    return {
        **slurm.env,
        "UNITRAIN_HEARTBEAT_TIMEOUT_S": "15",  # the machine may have much else to do
        "PATH": PATH,
        "TESTS_PAUSE": str(PAUSE_S),
        "UNITRAIN_TIMEOUT_S": "120",
        "UNITRAIN_BACKEND": "ddp",
        **COPIED,
    }


@dataclass(frozen=True)
class Job:
    """A batch job, or a task of a job array, that trains in a folder."""

    slurm: Slurm
    number: str
    folder: Path
    log: Path

    @classmethod
    def submit(
        cls,
        slurm: Slurm,
        folder: Path,
        *options: str,
        script: str,
        more: Mapping[str, str] | None = None,
        trains_in: str = "",
    ) -> Job:
        """Submit a script from a folder, in which TRAIN is the command that trains.

        Args:
            slurm: where to.
            folder: the folder.
            options: of sbatch.
            script: the script; its first line may be left out.
            more: variables of the job.
            trains_in: in which folder below that one it trains.
        """
        text = re.sub(r"\bTRAIN\b", training(folder / trains_in), script)
        (folder / "job.sh").write_text(text if text.startswith("#!") else f"#!/bin/bash\n{text}")
        log = folder / "job.log"
        made = subprocess.run(
            ["sbatch", "--parsable", "--open-mode=append", f"--output={log}", *options, "job.sh"],
            env={**environ(slurm), **(more or {})}, cwd=folder, capture_output=True, text=True, timeout=60,
        )  # fmt: skip
        assert made.returncode == 0, made.stderr
        return cls(slurm, made.stdout.strip(), folder / trains_in, log)

    @property
    def said(self) -> str:
        return self.log.read_text() if self.log.exists() else ""

    def shown(self) -> str:
        return self.slurm.call("scontrol", "show", "job", self.number)

    def wait(self, condition: Callable[[], object], what: str) -> None:
        deadline = time.monotonic() + ENDS_S
        while not condition():
            assert time.monotonic() < deadline, f"{what}\n{self.shown()}\n{self.said}"
            time.sleep(0.2)

    def makes_step(self, step: int) -> None:
        self.wait(lambda: any(note["step"] >= step for note in notes(self.folder)), f"it did not come to step {step}")

    def signal_ranks(self, number: int) -> None:
        """Send a signal to all ranks at once."""
        for process in psutil.process_iter():
            with suppress(psutil.Error):
                environ = process.environ()
                name = f"{environ.get('SLURM_ARRAY_JOB_ID')}_{environ.get('SLURM_ARRAY_TASK_ID')}"
                is_own = environ.get("SLURM_CONF") == self.slurm.env["SLURM_CONF"] and self.number in (
                    environ.get("SLURM_JOB_ID"),
                    name,
                )
                if is_own and str(PROGRAM) in process.cmdline()[1:2]:
                    process.send_signal(number)

    def is_requeued(self, times: int) -> None:
        """Wait until SLURM has queued the job that often again, and have it started soon and not two minutes later.

        It gets more time than before, so that it is not stopped again. Started within the second in which it ended, a
        node would take it for the one before ("Job credential revoked").
        """
        self.wait(
            lambda: re.search(rf"JobState=PENDING.*\bRestarts={times}\b", self.shown(), re.DOTALL), "not requeued"
        )
        self.slurm.call("scontrol", "update", f"JobId={self.number}", "StartTime=now+5", "TimeLimit=60")

    def ends(self) -> None:
        self.wait(lambda: re.search("JobState=(COMPLETED|FAILED)", self.shown()), "it did not end")

    def ends_well(self, alone: Path) -> None:
        self.wait(lambda: "JobState=COMPLETED" in self.shown(), "it did not end well")
        assert_same_training(self.folder, alone)

    @property
    def starts(self) -> list[int]:
        """After which steps it has begun."""
        return [int(step) for step in re.findall(r"began after step (\d+)", self.said)]

    @property
    def sizes(self) -> list[int]:
        """With how many ranks it has begun, in order."""
        files = [file.name.split(".") for file in self.folder.glob("*.notes")]
        return [sum(int(name[0]) == began for name in files) for began in self.starts]


def assert_requeued_itself(job: Job) -> None:
    """Assert that a job of two starts was stopped by SIGUSR1, and that rank 0 has requeued it."""
    said = rf"stopped by SIGUSR1 after step (\d+) and saved in \S+ SLURM has requeued job {job.number}\."
    [step] = re.findall(said, job.said)
    assert job.starts == [0, int(step)]
    assert 0 < int(step) < STEPS
