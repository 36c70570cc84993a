"""Wrong backends fail when the ranks meet, or before, with a message that names the mistake."""

from __future__ import annotations

import re
from collections.abc import Iterator

import pytest
import torch
from places import TESTS

import unitrain
from unitrain import BackendError, LaunchError, UnitrainError
from unitrain.testing.duties import collectives
from unitrain.testing.worlds import World

PLUGIN = TESTS / "plugin"
PATH = (str(PLUGIN), str(PLUGIN / "wrong"))
# Two ranks' sums are rounded alike in any order.
RANKS = 3
SAID_BY_EVERY_RANK = {
    "sums_twice": r"all_reduce with op 'sum' gave \[5\.6\d+, .* instead of \[1\.8\d+, ",
    "max_is_sum": r"all_reduce with op 'max' gave \[1\.8\d+, .* instead of \[0\.7\d+, ",
    "drops_a_rank_of_reductions": r"all_reduce with op 'sum' gave .* instead of",
    "rounds_apart": r"all_reduce with op 'sum' gave different bits on different ranks",
    "reduces_a_copy": r"all_reduce with op 'sum' gave \[0\..* instead of",
    "drops_a_rank_of_gathers": r"all_gather returned \(2, 64\), but must return a tensor of \(3, 64\)",
    "called_otherwise": r"unitrain_wrong:CalledOtherwise, which is not a subclass of .*with this `name`",
    "no_backend": r"unitrain_wrong:NoBackend, which is not a subclass of unitrain\.Backend",
    "lacks_a_module": r"can't be imported: No module named 'unitrain_absent'",
}


def why_none_starts(backends: list[str]) -> list[str]:
    """Return what each backend's start is refused for."""
    said = []
    for backend in backends:
        with pytest.raises(BackendError) as refused:
            unitrain.init(backend=backend, device="cpu", timeout_s=10)
        said.append(str(refused.value))
    return said


@pytest.fixture(scope="module", autouse=True)
def wrong_on_path() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        for folder in PATH:
            patch.syspath_prepend(folder)
        yield


@pytest.fixture(scope="module")
def said() -> dict[str, list[str]]:
    """For each wrong backend, what the ranks say."""
    by_rank = World("", RANKS).run(why_none_starts, list(SAID_BY_EVERY_RANK))
    return dict(zip(SAID_BY_EVERY_RANK, map(list, zip(*by_rank, strict=True)), strict=True))


@pytest.mark.xdist_group("test_wrong_backends")
@pytest.mark.parametrize("backend", SAID_BY_EVERY_RANK)
def test_every_rank_names_the_mistake(said: dict[str, list[str]], backend: str) -> None:
    for message in said[backend]:
        assert f"{backend!r}" in message
        assert re.search(SAID_BY_EVERY_RANK[backend], message)


def test_the_contract_finds_what_a_start_does_not_try() -> None:
    world = World("lacks_half_types", 2)
    with pytest.raises(KeyError, match=r"torch\.float16"):
        world.run(collectives.reductions, world)


def start(backend: str) -> None:
    unitrain.init(backend=backend, device="cpu", timeout_s=10)


@pytest.mark.parametrize(
    ("backend", "error", "message"),
    [
        ("gathers_in_any_order", BackendError, r"all_gather gave \[.* on rank [12] of 3"),
        ("broadcasts_from_rank_0", BackendError, r"broadcast from rank 2 gave \[.* on rank \d of 3"),
        ("starts_the_other_way_round", LaunchError, r"this process is rank \d of 3, but .* returned \(3, \d\) as its"),
    ],
)
def test_a_mistake_that_some_ranks_see_is_the_one_reported(
    backend: str, error: type[UnitrainError], message: str
) -> None:
    with pytest.raises(error, match=message):
        World(backend, RANKS).run(start, backend)


def lose_a_cable() -> None:
    with unitrain.init(backend="loses_its_cable", device="cpu", timeout_s=10) as strategy:
        strategy.all_reduce(torch.ones(1), "max")


def test_an_error_of_the_backend_itself_is_reported_as_it_is() -> None:
    with pytest.raises(RuntimeError, match=r"^the cable is loose$"):
        World("loses_its_cable", 2).run(lose_a_cable)
