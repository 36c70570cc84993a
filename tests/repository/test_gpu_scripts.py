"""What is run first on a GPU (``.ci/gpu``) runs on the simulated device, so it is true when there is a GPU."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest
from jobs import run_job
from needs import HOROVOD
from on_device import NEEDS_COMPILER
from places import ROOT, TESTS

LATER = pytest.mark.all("scripts of processes that import torch")
SCRIPTS = ROOT / ".ci" / "gpu"
HANGS = """
import sys
sys.path.insert(0, sys.argv.pop(1))
from steps import Script, Step
script = Script()
sleep = [sys.executable, "-c", "import time; print('begun', flush=True); time.sleep(600)"]
script.run(Step("hangs", 2, sleep), Step("beside it", 20, [sys.executable, "-c", "print('done')"]))
script.run(Step("after it", 20, sleep, needs="hangs"))
script.end()
"""


@pytest.mark.check
def test_without_a_gpu_a_script_says_how_to_run_it(tmp_path: Path) -> None:
    command = [sys.executable, str(SCRIPTS / "two_ranks.py")]
    environ = {"OUT": str(tmp_path), "PATH": str(tmp_path)}
    job = run_job([*command, "--help"], tmp_path, environ=environ, deadline=30)
    assert (job.code, "--dry-run" in job.stdout, "The second script" in job.stdout) == (0, True, True), job.output
    job = run_job(command, tmp_path, environ=environ, deadline=30)
    assert (job.code, "--dry-run runs the steps without" in job.output, "Traceback" in job.output) == (1, True, False)


@LATER
@NEEDS_COMPILER
@pytest.mark.parametrize("script", ["one_process", pytest.param("two_ranks", marks=HOROVOD), "images_per_second"])
def test_a_dry_run(script: str, tmp_path: Path) -> None:
    command = [sys.executable, str(SCRIPTS / f"{script}.py"), "--dry-run"]
    job = run_job(command, tmp_path, environ={"OUT": str(tmp_path)}, deadline=290)
    assert job.code == 0, job.output
    assert not job.left
    ends = re.findall(r"^## (.+): (.+?),", (tmp_path / f"{script}.md").read_text(), re.M)
    assert ends
    assert {end for _, end in ends} == {"exit code 0"}, ends


@LATER
@NEEDS_COMPILER
def test_a_step_that_hangs_costs_its_limit_and_what_needs_it(tmp_path: Path) -> None:
    command = [sys.executable, "-c", HANGS, str(SCRIPTS), "--dry-run"]
    job = run_job(command, tmp_path, environ={"OUT": str(tmp_path)}, deadline=60)
    assert (job.code, job.left) == (1, ())
    said = ("## hangs: not ended after 6 s", "begun", "## beside it: exit code 0", "needs: hangs", "failed: hangs")
    assert [line for line in said if line not in job.stdout] == []


def test_the_tests_that_its_page_names_are_there() -> None:
    named = re.findall(r"`(\w+\.py)::(\w+)`", (SCRIPTS / "README.md").read_text())
    assert len(named) > 10
    for file, name in named:
        assert any(f"def {name}(" in path.read_text() for path in TESTS.rglob(file)), f"{file} has no {name}"
