"""``unitrain.testing`` judges each duty separately, although the same processes run many; here, with failing ones."""

from __future__ import annotations

import atexit
import os
import signal
import time
from collections.abc import Callable, Sequence
from typing import Any

import pytest

from unitrain import ConfigError, LaunchError
from unitrain.launch.detect import detect
from unitrain.testing.attempts import Outcomes, try_duties
from unitrain.testing.duty import Duty, everywhere
from unitrain.testing.worlds import World, find_worlds

NOBODY = World("nobody", 2)  # these duties start no backend


def rank() -> int:
    return detect(os.environ).rank


def duty(
    function: Callable[..., Any], *arguments: Any, judge: Callable[..., None] | None = None, ending: str | None = None
) -> Duty:
    name = f"{function.__name__}{list(arguments) if arguments else ''}"
    return Duty(name, f"demand of {name}", "module", function, arguments, everywhere, judge, ending)


def outcomes_of(*duties: Duty, limit_s: float = 30.0) -> dict[str, str]:
    """Start ranks once, and return why duties failed that were tried, or an empty string."""
    outcomes: Outcomes = {}
    try_duties(NOBODY, duties, outcomes, limit_s)
    return {name: why for (_, name), why in outcomes.items()}


def fine(world: World, where: str = "") -> str:
    print("fine, says rank", rank())
    return f"{where}{rank()}"


def fail_on_rank_1(world: World) -> None:
    print("python says", rank())
    os.write(2, b"a library says something\n")
    if rank() == 1:
        raise ZeroDivisionError("on purpose")
    time.sleep(60)


def test_what_follows_a_failed_duty_is_left_for_another_start() -> None:
    outcomes = outcomes_of(duty(fine), duty(fail_on_rank_1), duty(fine, "later"))
    assert list(outcomes) == ["fine", "fail_on_rank_1"]
    assert outcomes["fine"] == ""
    why = outcomes["fail_on_rank_1"]
    assert why.startswith('nobody-x2 fails the duty: demand of fail_on_rank_1\n"""\nrank 1: Traceback')
    assert "in fail_on_rank_1" in why
    assert "ZeroDivisionError: on purpose\n---- rank 0 ----\n---- fine\n" in why
    assert "---- fail_on_rank_1\npython says 0\na library says something\n" in why


def hang_on_rank_0(world: World) -> None:
    if rank() == 0:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        time.sleep(600)


def test_a_duty_that_hangs_fails_itself_and_says_where() -> None:
    outcomes = outcomes_of(duty(fine), duty(hang_on_rank_0), duty(fine, "later"), limit_s=2)
    assert outcomes["fine"] == ""
    assert "later" not in outcomes
    assert "rank 0" in outcomes["hang_on_rank_0"]
    assert "Timeout (0:00:02)" in outcomes["hang_on_rank_0"]
    assert "in hang_on_rank_0" in outcomes["hang_on_rank_0"]


def end_badly(world: World) -> None:
    atexit.register(os._exit, 3)


def test_processes_that_do_not_end_well_fail_the_last_duty() -> None:
    outcomes = outcomes_of(duty(end_badly), duty(fine))
    assert outcomes["end_badly"] == ""
    assert "all duties passed, but then the processes failed: " in outcomes["fine"]
    assert "exited with code 3" in outcomes["fine"]


def disagree(world: World, where: str, ranks: Sequence[str]) -> None:
    assert ranks == ["here0", "here1"], f"{world} says {ranks}"


def test_what_ranks_return_is_judged_outside_of_them_and_ends_nothing() -> None:
    duties = [duty(fine, "there", judge=disagree), duty(fine, "here", judge=disagree)]
    outcomes = outcomes_of(*duties)
    assert outcomes["fine['here']"] == ""
    assert "demand of fine['there']\nnobody-x2 says ['there0', 'there1']" in outcomes["fine['there']"]


def raise_error(world: World, text: str) -> None:
    if text:
        raise ZeroDivisionError(text)


@pytest.mark.parametrize(
    ("text", "failure"), [("on purpose", ""), ("by chance", "without a message that "), ("", "The job did not end")]
)
def test_a_duty_that_is_to_end_the_job_is_done_where_the_ranks_say_why(text: str, failure: str) -> None:
    [why] = outcomes_of(duty(raise_error, text, ending="ZeroDivisionError: on purpose")).values()
    assert (failure in why) if failure else (why == "")


def test_worlds_are_those_that_a_backend_would_see() -> None:
    assert find_worlds("single", [1, 2, 3]) == [World("single", 1, "python")]
    assert find_worlds("ddp", [1, 2]) == [World("ddp", 1, "python"), World("ddp", 2, "spawn")]
    assert World("ddp", 2).averages_gradients
    assert not World("ddp", 1).averages_gradients
    assert World("ddp", 2).for_unused_parameters == {"ddp": {"find_unused_parameters": True}}
    assert World("single", 1).for_unused_parameters == {}
    with pytest.raises(LaunchError, match=r"backend 'single' can't run on 2, 3 processes .* under: python"):
        find_worlds("single", [2, 3])
    with pytest.raises(ConfigError, match="Did you mean 'ddp'"):
        find_worlds("dpp", [1])
