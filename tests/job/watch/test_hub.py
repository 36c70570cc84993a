"""What rank 0's hub decides from the messages of the ranks, without processes and without a clock."""

from __future__ import annotations

import time

import pytest

import unitrain
from unitrain.job.watch import messages
from unitrain.job.watch.boundaries import Boundaries
from unitrain.job.watch.hub import Hub, Member
from unitrain.job.watch.messages import BoundaryRequest, Message
from unitrain.job.watch.stopping import Stopping
from unitrain.pulse import CLOSING, ITERATION, USER_CODE, Pulse

TIMEOUT_S, HEARTBEAT_S = 60.0, 10.0


class Job:
    """A hub of three ranks, and the messages that it has sent."""

    def __init__(self, timeout_s: float = TIMEOUT_S) -> None:
        self.sent: list[tuple[int | None, Message]] = []
        self.now = 100.0
        members = [Member(rank, f"host{rank}", 1000 + rank, 0) for rank in range(3)]
        self.hub = Hub(
            members,
            timeout_s=timeout_s,
            heartbeat_timeout_s=HEARTBEAT_S,
            send=lambda rank, message: self.sent.append((rank, message)),
            now=self.now,
        )

    def hear(self, rank: int, message: Message) -> None:
        self.hub.receive(rank, message, self.now)

    def beat(self, rank: int, phase: str = USER_CODE, seconds: float = 0.0, step: int = 5) -> None:
        self.hear(rank, messages.Heartbeat(phase, step, seconds))

    def pass_time(self, seconds: float, *silent: int) -> None:
        """Let time pass, in which all ranks but ``silent`` beat once a second."""
        for _ in range(round(seconds)):
            self.now += 1
            for rank in range(3):
                if rank not in silent:
                    self.beat(rank)
            self.hub.check(self.now)

    @property
    def verdict(self) -> str:
        return "" if self.hub.verdict is None else self.hub.verdict.text


@pytest.fixture
def job() -> Job:
    return Job()


def test_silence_is_judged_after_its_time_and_not_before(job: Job) -> None:
    job.beat(1, "step", 0.4, step=7)
    job.pass_time(HEARTBEAT_S, 1)
    assert job.verdict == ""
    job.pass_time(1, 1)
    assert job.verdict == (
        "rank 1 on host1 (pid 1001) sent no heartbeat for 11 s; it was in step after step 7, for 0 s"
    )
    assert job.hub.verdict == job.sent[-1][1]
    assert job.hub.verdict is not None
    assert job.hub.verdict.stalled


def test_a_hub_that_was_asleep_blames_nobody(job: Job) -> None:
    """The whole job was suspended, and continued: everybody was silent, and nobody's fault."""
    job.now += 1000
    job.hub.check(job.now)
    job.pass_time(HEARTBEAT_S)
    assert job.verdict == ""


def test_a_connection_that_ends_is_a_death_unless_the_rank_had_left(job: Job) -> None:
    job.hear(2, messages.Leave())
    job.hub.disconnected(2)
    assert job.verdict == ""
    job.hub.disconnected(1)
    assert job.verdict.startswith("rank 1 on host1 (pid 1001) ended without reporting an error")


def test_the_first_failure_is_the_verdict_and_there_is_no_second(job: Job) -> None:
    job.hear(2, messages.Failed("ValueError: mine", secondary=False))
    job.hear(0, messages.Failed("CheckpointError: also", secondary=False))
    job.hub.disconnected(2)
    assert job.verdict == "rank 2 on host2 (pid 1002): ValueError: mine"
    assert [rank for rank, message in job.sent if isinstance(message, messages.Verdict)] == [None]


def test_a_library_s_error_is_the_fault_of_the_rank_that_did_not_come(job: Job) -> None:
    job.beat(0, "step", 9.0)
    job.beat(1, "step", 9.0)
    job.beat(2, USER_CODE, 30.0, step=4)
    job.hear(0, messages.Failed("RuntimeError: gloo", secondary=True))
    assert job.verdict == (
        "rank 2 on host2 (pid 1002) did not reach the call that rank 0 waited in: rank 2 on host2 (pid 1002) is in "
        "user code after step 4, for 30 s. Rank 0: RuntimeError: gloo"
    )


def test_ranks_that_wait_for_different_things(job: Job) -> None:
    for rank, phase in enumerate(["step", "barrier", "step"]):
        job.beat(rank, phase, 9.0)
    job.hear(0, messages.Failed("RuntimeError: gloo", secondary=True))
    assert job.verdict.startswith("rank 0 on host0 (pid 1000): RuntimeError: gloo; rank 1 on host1 (pid 1001) is in ")
    assert "in barrier after step 5, for 9 s" in job.verdict


def test_a_wait_longer_than_timeout_s(job: Job) -> None:
    """Libraries have the same timeout, and come first."""
    job.beat(0, "all_gather", TIMEOUT_S + 1)
    job.hub.check(job.now)
    assert job.verdict == ""
    job.beat(0, "all_gather", TIMEOUT_S + 6)
    job.beat(1, USER_CODE, 99.0)
    job.beat(2, "all_gather", 3.0)
    job.hub.check(job.now)
    assert job.verdict.startswith("rank 1 on host1 (pid 1001) did not reach the call that rank 0 waited in")
    assert job.verdict.endswith("timed out (timeout_s is 60), in all_gather after step 5, for 66 s")


def test_a_wait_longer_than_a_short_timeout_s() -> None:
    """Shorter than what is told of a long wait."""
    job = Job(timeout_s=3.0)
    job.beat(0, "all_gather", 8.5)
    job.hub.check(job.now)
    assert job.verdict.endswith("timed out (timeout_s is 3), in all_gather after step 5, for 8 s")


def test_one_s_own_code_may_last(job: Job) -> None:
    job.beat(0, USER_CODE, 10 * TIMEOUT_S)
    job.hub.check(job.now)
    assert job.verdict == ""


def test_a_rank_at_its_end_and_one_that_waits_for_it(job: Job) -> None:
    job.beat(1, CLOSING, 2.0)
    job.beat(0, "step", 5.0)
    job.hub.check(job.now)
    assert job.verdict == "", "the news of the last step may be late"
    job.beat(1, CLOSING, 4.0)
    job.hub.check(job.now)
    assert job.verdict.startswith("rank 1 on host1 (pid 1001) finished after step 5, but rank 0 still waits")


def test_a_rank_at_its_end_waits_for_one_that_still_works(job: Job) -> None:
    job.beat(1, CLOSING, 30.0)
    job.beat(0, USER_CODE, 30.0)
    job.hub.check(job.now)
    assert job.verdict == ""


def test_a_rank_asks_where_the_others_are(job: Job) -> None:
    job.beat(1, "step", 3.0)
    job.hear(0, messages.Ask())
    assert job.sent == [(0, messages.Answer("rank 2 on host2 (pid 1002) is starting"))]


def test_all_stop_at_the_furthest_boundary_that_a_rank_has_yet_to_pass(job: Job) -> None:
    job.hear(1, messages.RequestStop(BoundaryRequest("signal", 15)))
    job.hear(2, messages.RequestStop(BoundaryRequest("signal", 15)))  # every rank got it
    assert job.sent == [(None, messages.Hold())]
    for rank, boundary in enumerate([8, 7, 8]):
        job.hear(rank, messages.NextBoundary(boundary))
    assert job.sent[1:] == [(None, messages.Stop(8, BoundaryRequest("signal", 15)))]


def test_one_stop_after_another(job: Job) -> None:
    """A checkpoint failed, was told, and the run goes on; meanwhile somebody asks it to end."""
    job.hear(0, messages.RequestStop(BoundaryRequest("raise_error")))
    for rank in range(3):
        job.hear(rank, messages.NextBoundary(3))
    job.hear(1, messages.RequestStop(BoundaryRequest("signal", 15)))
    assert [type(message) for _, message in job.sent] == [messages.Hold, messages.Stop], (
        "not before all have come to the first"
    )
    for rank in range(3):
        job.hear(rank, messages.Settled())
    assert job.sent[2:] == [(None, messages.Hold())]
    for rank in range(3):
        job.hear(rank, messages.NextBoundary(5))
    assert job.sent[3:] == [(None, messages.Stop(5, BoundaryRequest("signal", 15)))]


def test_nobody_stops_once_one_has_left(job: Job) -> None:
    job.hear(0, messages.Leave())
    job.hear(1, messages.RequestStop(BoundaryRequest("signal", 15)))
    assert job.sent == []


# ------------------------------------------------------------------------------------------------- of one process


def test_boundaries_are_passed_until_the_one_agreed_on() -> None:
    pulse = Pulse()
    boundaries = Boundaries(pulse)
    stopping = Stopping(boundaries, pulse, None, is_main=True)
    for _ in range(3):
        stopping.pass_boundary()
    assert boundaries.hold() == 4
    boundaries.agree(5, BoundaryRequest("signal", 15))
    stopping.pass_boundary()
    with pytest.raises(unitrain.Stopped) as stopped:
        stopping.pass_boundary()
    assert stopped.value.code == 143
    stopping.pass_boundary()


def test_the_outermost_wait_says_in_what() -> None:
    pulse = Pulse()
    with pulse.within("checkpoint.save"), pulse.within("broadcast"):
        assert pulse.phase == "checkpoint.save"
    assert (pulse.phase, pulse.calls) == (USER_CODE, 2)


def test_a_wait_that_failed_stays_noted_until_the_next() -> None:
    pulse = Pulse()
    with pytest.raises(RuntimeError), pulse.within("barrier"):
        raise RuntimeError
    assert pulse.phase == "barrier"
    with pulse.within("all_reduce"):
        assert pulse.phase == "all_reduce"
    assert pulse.phase == USER_CODE


def call(job: Job, rank: int, what: str, line: int) -> None:
    job.hear(rank, messages.Call(what, f"train.py:{line}"))


def test_calls_that_agree_let_all_ranks_go_on_once_all_have_come(job: Job) -> None:
    for what in ("barrier()", "all_reduce(sum) of float32[3]"):
        job.sent.clear()
        for rank in (2, 0):
            call(job, rank, what, 10 + rank)
        assert job.sent == []
        call(job, 1, what, 11)
        assert job.sent == [(None, messages.CallsAgree())]


def test_calls_that_differ_are_the_verdict_with_both_lines(job: Job) -> None:
    call(job, 0, "barrier()", 10)
    call(job, 2, "all_gather() of int64[]", 30)
    assert job.verdict == (
        "rank 2 on host2 (pid 1002) called all_gather() of int64[] at train.py:30, where rank 0 called barrier() at "
        "train.py:10: all ranks must make the same calls, in the same order"
    )


def seconds_per_message(ranks: int) -> float:
    """Return what a hub needs for a message, with each kind from each rank."""
    members = [Member(rank, "host", rank, 0) for rank in range(ranks)]
    hub = Hub(members, timeout_s=60.0, heartbeat_timeout_s=30.0, send=lambda rank, message: None, now=0.0)
    made: list[Message] = [messages.Heartbeat("step", 1, 0.0), messages.Ask(), messages.Call("barrier()", "train.py:1")]
    made += [messages.RequestStop(BoundaryRequest("signal", 15)), messages.NextBoundary(1), messages.Settled()]
    made += [messages.Heartbeat(USER_CODE, 1, 0.0), messages.Failed("RuntimeError: gloo", secondary=True)]
    begin = time.thread_time()
    for message in made:
        for rank in range(ranks):
            hub.receive(rank, message, 1.0)
    for rank in range(ranks):
        hub.disconnected(rank)
    return (time.thread_time() - begin) / (ranks * (len(made) + 1))


def test_work_for_a_message_does_not_grow_with_the_number_of_ranks() -> None:
    small = min(seconds_per_message(300) for _ in range(5))
    assert seconds_per_message(6000) < 5 * small, "with work for each rank, it would be 20 times as much"


def test_ranks_that_are_blocked_in_different_calls(job: Job) -> None:
    """As when only rank 0 saves, or takes the value of a meter."""
    for rank, phase in enumerate(["checkpoint.save", "step", "step"]):
        job.hear(rank, messages.Heartbeat(phase, 5, 4.0, f"train.py:{rank}", 4.0))
    job.hub.check(job.now)
    assert job.verdict == (
        "rank 0 on host0 (pid 1000) is in checkpoint.save after step 5, for 4 s, at train.py:0, and rank 1 is in step "
        "after step 5, for 4 s, at train.py:1: all ranks must make the same calls, in the same order"
    )


@pytest.mark.parametrize(
    ("last", "why"),
    [
        (messages.Heartbeat("step", 5, 9.0, "", 2.0), "one computes, or has begun to wait a moment ago"),
        (messages.Heartbeat(USER_CODE, 5, 9.0, "", 9.0), "one sleeps, and will come"),
        (messages.Heartbeat("all_reduce", 5, 9.0, "", 9.0), "all are in the same call, which takes its time"),
    ],
)
def test_ranks_that_may_meet_are_left_alone(job: Job, last: messages.Heartbeat, why: str) -> None:
    for rank in (0, 1):
        job.hear(rank, messages.Heartbeat("all_reduce", 5, 9.0, "", 9.0))
    job.hear(2, last)
    job.hub.check(job.now)
    assert job.verdict == "", why


def test_ranks_in_steps_of_different_numbers_can_t_meet(job: Job) -> None:
    for rank in range(3):
        job.hear(rank, messages.Heartbeat("step", 5 + (rank == 2), 9.0, "", 9.0))
    job.hub.check(job.now)
    assert job.verdict.startswith("rank 2 on host2 (pid 1002) is in step after step 6, for 9 s, and rank 0 is in step")


def test_a_long_wait_is_told_once(job: Job) -> None:
    for seconds in (29.0, 31.0, 32.0):
        job.hear(0, messages.Heartbeat("all_reduce", 5, seconds, "train.py:7"))
        job.hear(1, messages.Heartbeat(USER_CODE, 5, seconds, "train.py:9"))
        job.hub.check(job.now)
    [(rank, notice)] = [(rank, one) for rank, one in job.sent if isinstance(one, messages.Notice)]
    assert rank == 0
    assert notice.text.startswith(
        "rank 0 on host0 (pid 1000) waits in all_reduce after step 5, for 31 s, at train.py:7; rank 1 on host1 "
        "(pid 1001) is in user code after step 5, for 31 s, at train.py:9"
    )
    assert notice.text.endswith("The job ends after 60 s (timeout_s).")


def position(epoch: int, sample: int) -> int:
    return epoch * ITERATION + sample


@pytest.mark.parametrize(
    ("one", "other", "ahead"),
    [
        ((7, position(1, 56)), (7, position(1, 64)), 2),
        ((7, position(1, 64)), (9, position(1, 72)), None),
        ((7, position(1, 64)), (9, position(1, 64)), None),
        ((7, position(1, 64)), (9, position(1, 56)), 1),
        ((40, position(2, 320)), (41, position(1, 328)), 1),
    ],
)
def test_ranks_that_train_on_other_batches_end_the_job(
    job: Job, one: tuple[int, int], other: tuple[int, int], ahead: int | None
) -> None:
    job.hear(0, messages.Heartbeat("step", 5, 0.0, trained=(3, position(1, 24))))
    job.hear(1, messages.Heartbeat("step", 7, 0.0, trained=one))
    job.hear(2, messages.Heartbeat("step", 7, 0.0, trained=other))
    job.hub.check(job.now)
    assert (job.hub.verdict and job.hub.verdict.rank) == ahead
    if ahead == 2:
        assert job.verdict.startswith(
            "rank 2 on host2 (pid 1002) has left out a batch, or has left an epoch early: it had come to sample 64 and "
            "epoch 1 of its training after 7 steps, but rank 1 to sample 56 and epoch 1 of its training after 7 steps."
        )
