"""How an uncaught error ends a real process: its message, its exit code, and without waiting for other ranks."""

from __future__ import annotations

import json
import os
import re
import subprocess
import textwrap
from contextlib import nullcontext
from pathlib import Path
from typing import NamedTuple

import forked_python
import pytest
from places import TESTS

from unitrain.job.starting.spawn import spawn_environments


class End(NamedTuple):
    code: int
    out: str
    err: str


def run(
    folder: Path,
    script: str,
    *,
    world_size: int = 1,
    environ: dict[str, str] | None = None,
    wait_for: int | None = None,
) -> list[End]:
    """Run a script as each rank; with ``wait_for``, kill the others once that rank has ended, as a launcher would."""
    path = folder / "script.py"
    path.write_text("import unitrain\n" + textwrap.dedent(script))
    with spawn_environments(world_size) if world_size > 1 else nullcontext([{**os.environ, **(environ or {})}]) as made:
        return _run(forked_python.command(str(path)), made, wait_for)


def _run(command: list[str], environments: list[dict[str, str]], wait_for: int | None) -> list[End]:
    processes = [
        subprocess.Popen(command, env=environ, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        for environ in environments
    ]
    try:
        if wait_for is not None:
            processes[wait_for].wait(60)
            for rank, process in enumerate(processes):
                if rank != wait_for:
                    process.kill()
        said = [process.communicate(timeout=60) for process in processes]
        return [End(process.returncode, *texts) for process, texts in zip(processes, said, strict=True)]
    finally:
        for process in processes:
            process.kill()
            process.communicate()


@pytest.mark.parametrize(
    ("raised", "code"),
    [("UsageError", 1), ("ConfigError", 2), ("NonFiniteError", 3)],
)
def test_our_errors_are_one_message_and_a_code(tmp_path: Path, raised: str, code: int) -> None:
    script = f"""
        strategy = unitrain.init(backend="single")
        try:
            1 / 0
        except ZeroDivisionError as error:
            raise unitrain.{raised}("the value is 7; use 8.") from error
    """
    [end] = run(tmp_path, script)
    assert end.code == code
    lines = end.err.strip().splitlines()
    assert lines[0] == "unitrain: error: the value is 7; use 8."
    if code != 2:  # a setting is named in the message
        assert re.fullmatch(rf"  at {tmp_path}/script.py:7: raise unitrain\.{raised}.*", lines[1])
    assert len(lines) == (1 if code == 2 else 2)


@pytest.mark.parametrize(
    ("script", "error", "line"),
    [
        (
            """
            class Data:
                def __len__(self): return 3
                def __getitem__(self, index): return strategy.all_reduce(index)
            for _ in strategy.dataloader(Data(), batch_size=1): pass
            """,
            "all_reduce takes a tensor, not int",
            ":6: def __getitem__(self, index): return strategy.all_reduce(index)",
        ),
        (
            """
            def mine(): return strategy.step(torch.ones(2, requires_grad=True), torch.optim.SGD([torch.ones(1)], 0.1))
            mine()
            """,
            "a loss must be a scalar, but has shape (2,)",
            ":4: def mine(): return strategy.step",
        ),
    ],
)
def test_the_line_named_is_the_user_s_whatever_lies_between(tmp_path: Path, script: str, error: str, line: str) -> None:
    begin = 'import torch\nstrategy = unitrain.init(backend="single")'
    [end] = run(tmp_path, f"{begin}{textwrap.dedent(script)}")
    assert f"error: {error}" in end.err
    assert line in end.err
    assert "Traceback" not in end.err


def test_a_backend_s_line_is_not_the_user_s(tmp_path: Path) -> None:
    script = """
        import torch
        strategy = unitrain.init(backend="ddp")
        net = torch.nn.Module()
        net.used, net.unused = torch.nn.Linear(2, 2), torch.nn.Linear(2, 2)
        net.forward = lambda x: net.used(x)
        model, optimizer = strategy.prepare(net, torch.optim.SGD(net.parameters(), lr=0.1))
        strategy.step(model(torch.ones(1, 2)).sum(), optimizer)
    """
    ends = run(tmp_path, script, world_size=2)
    assert [end.code for end in ends] == [1, 1]
    first, other = sorted((end.err for end in ends), key=len, reverse=True)
    assert "error: 2 parameters were not used in computing this step's loss (unused.weight, unused.bias, ...)" in first
    assert "script.py:9: strategy.step(model(torch.ones(1, 2)).sum(), optimizer)" in first
    assert re.fullmatch(r"unitrain: rank \d on .*: stopped because rank \d on .*: UsageError: 2 parameters.*\n", other)


def test_other_errors_keep_their_traceback(tmp_path: Path) -> None:
    [end] = run(tmp_path, 'unitrain.init(backend="single")\nraise ZeroDivisionError("mine")')
    assert end.code == 1
    assert end.err.startswith("Traceback (most recent call last):")
    assert end.err.endswith("ZeroDivisionError: mine\n")


def test_a_hook_of_the_user_s_still_gets_other_errors(tmp_path: Path) -> None:
    script = """
        import sys
        sys.excepthook = lambda kind, error, trace: print("mine:", error)
        unitrain.init(backend="single")
        raise ValueError("wrong")
    """
    [end] = run(tmp_path, script)
    assert (end.code, end.out, end.err) == (1, "mine: wrong\n", "")


def test_a_failing_rank_says_so_and_waits_for_nobody(tmp_path: Path) -> None:
    script = """
        import time
        with unitrain.init(backend="ddp") as strategy:
            strategy.barrier()
            if strategy.rank == 1:
                raise RuntimeError("the disk is on fire")
            time.sleep(600)
    """
    ends = run(tmp_path, script, world_size=2, wait_for=1)
    assert ends[1].code == 1
    assert "RuntimeError: the disk is on fire\n" in ends[1].err
    last = ends[1].err.splitlines()[-1]
    assert re.fullmatch(r"unitrain: rank 1 of 2 on \S+ \(pid \d+\) failed: RuntimeError: the disk is on fire", last)
    assert ends[1].err.count("Traceback") == 1


def test_a_failing_rank_keeps_its_verdict_when_rank_0_has_ended(tmp_path: Path) -> None:
    script = """
        import time, psutil, unitrain.job.job
        strategy = unitrain.init(backend="ddp", device="cpu")
        watch = unitrain.job.job.current().watch
        if strategy.rank == 1:
            first = watch.fail("the disk is on fire")
            while psutil.pid_exists(watch.members[0].pid) and psutil.Process(watch.members[0].pid).status() != "zombie":
                time.sleep(0.05)
            time.sleep(0.3)
            print(first == watch.fail("again"), first.text, flush=True)
        else:
            time.sleep(60)
    """
    _, end = run(tmp_path, script, world_size=2)
    assert re.fullmatch(r"True rank 1 on .*: the disk is on fire\n", end.out), end


@pytest.mark.parametrize("mistake", ["continue", "break"])
def test_a_rank_that_trains_on_other_batches_ends_the_job(tmp_path: Path, mistake: str) -> None:
    script = f"""
        import time, torch
        strategy = unitrain.init(backend="ddp", device="cpu")
        model = torch.nn.Linear(1, 1)
        model, optimizer = strategy.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
        loader = strategy.dataloader(torch.utils.data.TensorDataset(torch.ones(40_000, 1)), global_batch_size=4)
        if strategy.is_main:
            next(iter(loader))  # a look at a batch is no mistake
        for epoch in loader.epochs(3):
            for i, (x,) in enumerate(loader):
                if strategy.rank == 1 and i == 30 and epoch == 0:
                    {mistake}
                strategy.step(model(x).mean(), optimizer)
                time.sleep(0.005)
    """
    ends = run(tmp_path, script, world_size=2)
    assert all(end.code == 1 for end in ends)
    said = "".join(end.err for end in ends)
    assert re.search(
        r"rank 1 on \S+ \(pid \d+\) has left out a batch, or has left an epoch early: .*, but rank 0", said
    )


def test_an_error_while_closing_at_exit_is_no_success(tmp_path: Path) -> None:
    script = """
        class Fails(unitrain.Feature):
            def plug_in(self, sockets):
                sockets.hooks.at_close.append(lambda: 1 / 0)

        unitrain.init().add(Fails())
    """
    [end] = run(tmp_path, script)
    assert end.code == 1
    assert "ZeroDivisionError" in end.err
    assert "atexit" not in end.err


def test_the_end_of_a_rank_is_not_matched_by_another_s_call(tmp_path: Path) -> None:
    """gloo would abort the process (SIGABRT): the numbers of elements differ."""
    script = """
        import time, torch
        from unitrain.job.watch import watch
        watch.print_stacks = lambda _: time.sleep(1)  # it takes so long on a busy machine
        strategy = unitrain.init(backend="ddp")
        try:
            strategy.all_reduce(torch.ones(1000), "sum" if strategy.rank == 0 else "product")
        except unitrain.UsageError:
            pass
    """
    ends = run(tmp_path, script, world_size=2)
    assert [end.code for end in ends] == [1, 1]
    assert re.search(r"rank 1 on \S+ \(pid \d+\) finished after step 0, but rank 0 still waits", ends[0].err)


@pytest.mark.parametrize("with_block", [True, False])
def test_the_code_of_a_rank_that_exits_is_named(with_block: bool, tmp_path: Path) -> None:
    script = f"""
        import sys
        from contextlib import nullcontext
        strategy = unitrain.init(backend="ddp")
        with strategy if {with_block} else nullcontext():
            if strategy.rank == 1:
                sys.exit(3)
            strategy.barrier()
    """
    ends = run(tmp_path, script, world_size=2)
    assert ends[1].code == (3 if with_block else 1)
    assert re.search(r"stopped because rank 1 on \S+ \(pid \d+\) called sys\.exit\(3\)", ends[0].err)


def test_a_wrong_setting_is_told_by_rank_0(tmp_path: Path) -> None:
    ends = run(tmp_path, 'unitrain.init(backend="dpp")', world_size=2, wait_for=0)
    assert ends[0].code == 2
    assert ends[0].err.startswith("unitrain: error: backend 'dpp' is not installed. Did you mean 'ddp'?")
    assert len(ends[0].err.splitlines()) == 1
    assert ends[1].err == ""


@pytest.mark.parametrize(("rank", "messages"), [(1, 0), (2, 1)])
def test_what_only_some_hosts_can_t_do_is_told_by_one_rank_of_each(tmp_path: Path, rank: int, messages: int) -> None:
    """Ranks 0 and 1 are on the first host, rank 2 is on the second. srun does not end the others."""
    recorded = json.loads(TESTS.joinpath("launch_environments", "srun-two-nodes.json").read_text())
    environ = {**recorded["environments"][rank], "MASTER_ADDR": "nowhere.invalid", "MASTER_PORT": "29500"}
    [end] = run(tmp_path, "unitrain.init()", environ=environ)
    assert end.code == 2
    assert end.err.count("unitrain: error: the rendezvous address of srun is nowhere.invalid:29500, but") == messages


def test_nonfinite_loss_ends_every_rank_with_3(tmp_path: Path) -> None:
    script = """
        import torch
        strategy = unitrain.init(backend="ddp")
        model = torch.nn.Linear(2, 1)
        model, optimizer = strategy.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
        strategy.step(model(torch.full((1, 2), float("nan") if strategy.rank else 1.0)).sum(), optimizer)
    """
    ends = run(tmp_path, script, world_size=2)
    assert [end.code for end in ends] == [3, 3]
    assert "stopped: not finite at step 1: the loss of rank 1" in ends[0].out
    assert [end.err for end in ends] == ["", ""]
    assert ends[1].out == ""
