"""Ranks that share a secret, ranks that share none, and a stranger that has taken a rank's place."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from needs import HOROVOD
from torch.utils.data import TensorDataset

import unitrain
from unitrain import CommunicationError, ConfigError, UsageError
from unitrain.communication.objects import ObjectTransport, _Pickled
from unitrain.communication.plain_data import encode
from unitrain.features.throughput import Throughput
from unitrain.job.joining import authentication
from unitrain.job.joining.authentication import SECRET
from unitrain.job.starting.spawn import spawn_environments
from unitrain.testing.ranks import run_ranks

LONG = "0123456789abcdef"
TORCHRUN = {"UNITRAIN_LAUNCHER": "torchrun", "TORCHELASTIC_RESTART_COUNT": "0"}


def hosts(*variables: dict[str, str]) -> Callable[[int], Any]:
    """Return the environments of ranks that believe each to be on a host of its own, and these variables of each."""

    @contextmanager
    def environments(nprocs: int) -> Iterator[list[dict[str, str]]]:
        with spawn_environments(nprocs) as places:
            yield [
                {**place, "LOCAL_WORLD_SIZE": "1", "LOCAL_RANK": "0", "GROUP_RANK": place["RANK"], **own}
                for place, own in zip(places, variables, strict=True)
            ]

    return environments


class Greeting:
    """No plain data."""


def greet(backend: str = "auto") -> str:
    with unitrain.init(backend=backend, device="cpu", timeout_s=20) as strategy:
        assert strategy.communicator.all_gather_object((1, {"a": torch.ones(2)}))[1][0] == 1
        try:
            everyone = strategy.communicator.all_gather_object(Greeting())
            assert {type(one) for one in [*everyone, strategy.communicator.broadcast_object(Greeting())]} == {Greeting}
        except UsageError as refused:
            return str(refused)
        return "greeted"


@pytest.mark.parametrize(
    "launcher",
    ["spawn", hosts({SECRET: LONG}, {SECRET: LONG}), hosts(TORCHRUN, TORCHRUN)],
    ids=["file", "variable", "torchrun"],
)
def test_ranks_that_share_a_secret_exchange_any_object(launcher: Any) -> None:
    before = set(os.listdir("/dev/shm"))
    assert run_ranks(greet, launcher=launcher) == ["greeted"] * 2
    # Copies of other tests' runs have a user's number in their names.
    assert not [name for name in set(os.listdir("/dev/shm")) - before if re.fullmatch("unitrain-[0-9a-f]+", name)]


def greet_as_if_on_two_hosts() -> list[str]:
    import mpi4py.MPI  # noqa: F401  (or MPI ends with the first backend, and can't be started again)

    os.environ.update({"OMPI_COMM_WORLD_LOCAL_SIZE": "1", "OMPI_COMM_WORLD_LOCAL_RANK": "0"})
    return [greet("ddp"), greet("horovod")]


@pytest.mark.soak
@pytest.mark.launcher
@HOROVOD
def test_mpi_brings_a_secret_to_ranks_on_several_hosts() -> None:
    """By mpi4py for the rendezvous of DDP, and by Horovod's own collectives."""
    assert run_ranks(greet_as_if_on_two_hosts, launcher="mpirun") == [["greeted"] * 2] * 2


def test_ranks_that_share_no_secret_exchange_plain_data_only() -> None:
    for said in run_ranks(greet, launcher=hosts({}, {})):
        assert said.startswith("test_authentication.Greeting is not plain data, so it must be pickled.")
        assert "set UNITRAIN_JOB_SECRET to the same random string on every host" in said


@pytest.mark.parametrize(
    ("variables", "said"),
    [
        (({SECRET: LONG}, {}), f"{SECRET} is set on some ranks, but not on rank 1: .*openssl rand"),
        (
            ({SECRET: LONG}, {SECRET: LONG[::-1]}),
            r"rank \d did not prove to rank \d that it knows the secret of this job",
        ),
        (({SECRET: "short"}, {SECRET: "short"}), f"{SECRET} has 5 characters, but needs 16"),
    ],
)
def test_other_secrets(variables: tuple[dict[str, str], ...], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        run_ranks(greet, launcher=hosts(*variables))


class Harm:
    """Makes a file where it is unpickled."""

    def __init__(self, file: str) -> None:
        self.file = file

    def __reduce__(self) -> Any:
        return Path.touch, (Path(self.file),)


def take_place(file: str) -> None:
    """Be rank 0; as rank 1, be a program that sends pickles wherever it is asked for data."""
    if os.environ["RANK"] == "1":
        import pickle

        def pickled(self: ObjectTransport, value: Any, *, pickles: bool) -> Any:
            data = torch.frombuffer(bytearray(pickle.dumps(Harm(file))), dtype=torch.uint8)
            return encode(_Pickled(bytes(32), data))

        ObjectTransport.encode = pickled  # type: ignore[method-assign]
        ObjectTransport.decode = lambda *_: ("host", 1, 1)  # type: ignore[method-assign]
    try:
        unitrain.init(device="cpu", timeout_s=5).close()
    except (CommunicationError, ConfigError) as error:
        if os.environ["RANK"] == "0":
            raise CommunicationError(str(error)) from None


def test_a_stranger_in_a_rank_s_place_runs_no_code(tmp_path: Path) -> None:
    """In a job without a secret nobody keeps it out, but what it sends is never unpickled."""
    with pytest.raises(
        CommunicationError, match="rank 1 sent a pickled object to rank 0 without the signature of this job"
    ):
        run_ranks(take_place, str(tmp_path / "harm"), launcher=hosts({}, {}))
    assert not (tmp_path / "harm").exists()


@pytest.mark.parametrize("variables", [{}, {SECRET: LONG[::-1]}])
def test_a_stranger_does_not_get_into_a_job_with_a_secret(tmp_path: Path, variables: dict[str, str]) -> None:
    said = r"rank 1( did not prove to rank 0|: ranks share their secret| sent a pickled object)"
    with pytest.raises(CommunicationError, match=said):
        run_ranks(take_place, str(tmp_path / "harm"), launcher=hosts({SECRET: LONG}, variables))
    assert not (tmp_path / "harm").exists()


def train(folder: str) -> float:
    """Use whatever has ranks exchange more than tensors."""
    with unitrain.init(device="cpu", timeout_s=20, seed=3) as strategy:
        model = torch.nn.Sequential(torch.nn.Linear(2, 4), torch.nn.BatchNorm1d(4), torch.nn.Linear(4, 1))
        optimizer = torch.optim.AdamW(model.parameters())
        schedule = torch.optim.lr_scheduler.StepLR(optimizer, 2)
        loss = model(torch.ones(3, 2)).sum()
        loss.backward()
        optimizer.step()  # so that prepare copies a state
        model, optimizer, schedule = strategy.prepare(model, optimizer, schedule)
        loader = strategy.dataloader(TensorDataset(torch.arange(32.0).view(16, 2) / 32), batch_size=4)
        state: dict[str, Any] = {"model": model, "optimizer": optimizer, "schedule": schedule, "loader": loader}
        checkpoint = strategy.checkpoint(Path(folder) / "checkpoints", **state)
        assert not checkpoint.resume()
        meter = strategy.meter()
        throughput = strategy.add(Throughput())
        for (batch,) in loader:
            loss = model(batch).square().mean()
            strategy.step(loss, optimizer)
            meter.add(mean=loss, count=len(batch))
        checkpoint.save()
        assert checkpoint.resume()
        checkpoint.close()
        strategy.save(model, Path(folder) / "model.pt")
        strategy.load(Path(folder) / "model.pt")
        with pytest.raises(unitrain.CheckpointError, match="does not exist"):
            strategy.load(Path(folder) / "missing.pt")
        throughput.read()
        return meter.value()


def test_a_job_without_a_secret_trains_and_resumes(tmp_path: Path) -> None:
    """The library itself exchanges tensors and plain data only: there, a pickle would be refused."""
    first, second = run_ranks(train, str(tmp_path), launcher=hosts({}, {}))
    assert first == second


def test_only_a_file_of_this_user_s_is_taken(tmp_path: Path) -> None:
    file = tmp_path / "secret"
    with authentication._written(file):
        assert len(authentication._read(file) or b"") == 32
        (tmp_path / "link").symlink_to(file)
        assert authentication._read(tmp_path / "link") is None
        file.chmod(0o644)
        assert authentication._read(file) is None, "others can read it"
        file.chmod(0o600)
        os.link(file, tmp_path / "second name")
        assert authentication._read(file) is None
        (tmp_path / "second name").unlink()
        os.truncate(file, 5)
        assert authentication._read(file) is None
    assert authentication._read(file) is None
    assert not file.exists()
