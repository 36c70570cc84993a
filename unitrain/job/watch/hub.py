"""The hub on rank 0: decides which rank failed first, which is stalled, and where all ranks stop."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from heapq import nsmallest
from itertools import islice, pairwise
from typing import NamedTuple

from unitrain.job.watch import messages
from unitrain.job.watch.messages import BoundaryRequest, Message, Verdict
from unitrain.pulse import CLOSING, ITERATION

# How long one rank is in close() and another waits in another call before this is a deadlock, and not a late heartbeat.
_DEADLOCK_S = 3.0
# How long a rank waits before a line says for whom.
_NOTICE_S = 30.0
# Libraries time out after ``timeout_s`` as well, and raise an error that the script can catch. They come first.
_AFTER_LIBRARIES_S = 5.0
# How many ranks a message names.
_MOST_NAMED = 4
# Heartbeats that the hub receives each second: the ranks of a larger job send fewer.
_MOST_HEARTBEATS = 125
SILENT_END = "ended without reporting an error: it was killed, crashed, or called os._exit()"


def _position(beat: messages.Heartbeat) -> str:
    """Return how far a rank has come in its data, for a message."""
    steps, position = beat.trained
    iterations, samples = divmod(position, ITERATION)
    return f"sample {samples} and epoch {iterations} of its training after {steps} steps"


class Member(NamedTuple):
    """One process of the job."""

    rank: int
    host: str
    pid: int
    started: int
    """Its ``start_time``: a pid may be reused."""

    def __str__(self) -> str:
        return f"rank {self.rank} on {self.host} (pid {self.pid})"


def heartbeat_interval_s(heartbeat_timeout_s: float, world_size: int) -> float:
    """Return the seconds between two heartbeats of a rank: 1, or more in a job of more than 125 ranks.

    At least three heartbeats fit into the time after which a rank counts as stalled, in smaller jobs five.

    Args:
        heartbeat_timeout_s: seconds without a heartbeat after which a rank counts as stalled.
        world_size: the number of ranks, all of which send to one hub.
    """
    return max(min(1.0, heartbeat_timeout_s / 5), min(world_size / _MOST_HEARTBEATS, heartbeat_timeout_s / 3))


class Hub:
    """Decides from the messages of the ranks why the job ends. Uses no sockets and no clock, for easy testing.

    The first decision is the verdict of the job; later failures don't change it. The work for one message does not
    grow with the number of ranks; ``check`` looks at each rank.

    Args:
        members: all processes, by rank.
        timeout_s: seconds that a rank may wait for other ranks.
        heartbeat_timeout_s: seconds without a heartbeat after which a rank counts as stalled.
        send: sends a message to a rank, or to all (None).
        now: the current time in seconds, as in all calls.
    """

    def __init__(
        self,
        members: Sequence[Member],
        *,
        timeout_s: float,
        heartbeat_timeout_s: float,
        send: Callable[[int | None, Message], None],
        now: float,
    ) -> None:
        self._members = members
        self._timeout_s, self._heartbeat_timeout_s = timeout_s, heartbeat_timeout_s
        self._send = send
        self._heard_at = dict.fromkeys(range(len(members)), now)
        self._checked_at = now
        self._heartbeats: dict[int, messages.Heartbeat] = {}
        self._present = dict.fromkeys(self._heard_at)  # a set, in the order of the ranks
        self._busy = set(self._present)  # the ranks that do not wait for others
        self._requests: list[BoundaryRequest] = []  # the first is being agreed on, or acted on
        self._boundaries: dict[int, int] = {}
        self._settled: set[int] = set()
        self._ends: dict[int, str] = {}  # what ranks that are about to exit have said
        self._noticed = False  # a wait that still lasts
        self._calls: dict[int, messages.Call] = {}  # of the ranks that have reached their next call
        self.verdict: Verdict | None = None

    @property
    def finished(self) -> bool:
        """Whether all ranks have left."""
        return not self._present

    def receive(self, rank: int, message: Message, now: float) -> None:
        """Process a message from a rank.

        Args:
            rank: the rank that has sent it.
            message: the message.
            now: the current time in seconds.
        """
        self._heard_at[rank] = now
        match message:
            case messages.Heartbeat():
                self._take_heartbeat(rank, message)
            case messages.Failed(text=text, secondary=True):
                self._decide_on_wait(rank, text)
            case messages.Failed(text=text, on_all_ranks=on_all_ranks):
                self._decide(rank, f": {text}", on_all_ranks=on_all_ranks)
            case messages.Exits(text=text):
                self._ends[rank] = text
            case messages.Ask():
                self._send(rank, messages.Answer(self._describe_others(rank)))
            case messages.Call():
                self._compare_calls(rank, message)
            case messages.RequestStop(request=request) if request not in self._requests:
                self._requests.append(request)
                if len(self._requests) == 1:
                    self._hold()
            case messages.NextBoundary(boundary=boundary):
                self._boundaries[rank] = boundary
                if len(self._boundaries) == len(self._members):
                    # No rank has passed the boundary that it reported, so all can still stop at the furthest of them.
                    self._send(None, messages.Stop(max(self._boundaries.values()), self._requests[0]))
            case messages.Settled():
                self._settle(rank)
            case messages.Leave():
                self._remove(rank)

    def _settle(self, rank: int) -> None:
        """Record that a rank has acted on a request."""
        self._settled.add(rank)
        if len(self._settled) == len(self._members):
            self._requests.pop(0)
            # Another request, such as a second signal, may have come meanwhile.
            if self._requests:
                self._hold()

    def _take_heartbeat(self, rank: int, heartbeat: messages.Heartbeat) -> None:
        """Record a heartbeat, and whether its rank waits for others."""
        self._heartbeats[rank] = heartbeat
        if rank in self._present and not heartbeat.waits:
            self._busy.add(rank)
        else:
            self._busy.discard(rank)

    def _remove(self, rank: int) -> None:
        """Forget a rank that has left, or has gone: nothing is expected of it any more."""
        self._present.pop(rank, None)
        self._busy.discard(rank)

    def _hold(self) -> None:
        """Begin to agree on a boundary: ask every rank to pass none, and to say which is its next."""
        if len(self._present) == len(self._members):  # otherwise the run is ending
            self._boundaries, self._settled = {}, set()
            self._send(None, messages.Hold())

    def _compare_calls(self, rank: int, call: messages.Call) -> None:
        """Compare a rank's call with the others' next call, and let all continue once every rank has made it."""
        # The first stands for all so far: had they differed, the job would have ended.
        other, first = next(iter(self._calls.items()), (rank, call))
        if first.call != call.call:
            self._decide(
                rank,
                f" called {call.call} at {call.place}, where rank {other} called {first.call} at {first.place}: "
                "all ranks must make the same calls, in the same order",
            )
        self._calls[rank] = call
        # Until then the first ones wait: what is compared is one call of each rank.
        if len(self._calls) == len(self._members):
            self._calls = {}
            self._send(None, messages.CallsAgree())

    def disconnected(self, rank: int) -> None:
        """Process the end of a rank's connection."""
        if rank in self._present:
            self._remove(rank)
            self._decide(rank, f" {self._ends.get(rank, SILENT_END)}")

    def check(self, now: float) -> None:
        """Check for stalled ranks, and for waits that exceed the timeout."""
        asleep, self._checked_at = now - self._checked_at, now
        if asleep > self._heartbeat_timeout_s / 2:  # this process was suspended itself, and perhaps the whole job
            self._heard_at = dict.fromkeys(self._heard_at, now)
        for rank in self._present:
            silence = now - self._heard_at[rank]
            if silence > self._heartbeat_timeout_s:
                self._decide(
                    rank, f" sent no heartbeat for {silence:.0f} s; it was {self._activity(rank)}", stalled=True
                )
        beats = {rank: beat for rank, beat in self._heartbeats.items() if rank in self._present}
        waits = {rank: beat for rank, beat in beats.items() if beat.waits}
        self._check_positions(beats)
        self._check_for_deadlock(waits)
        longest = max(waits, key=lambda rank: waits[rank].seconds, default=None)
        waited = 0.0 if longest is None else waits[longest].seconds
        if longest is not None and waited > self._timeout_s + _AFTER_LIBRARIES_S:
            self._decide_on_wait(longest, f"timed out (timeout_s is {self._timeout_s:g}), {waits[longest]}")
        elif longest is not None and waited > _NOTICE_S and not self._noticed:
            waiting = f"{self._members[longest]} waits {waits[longest]}; {self._describe_others(longest)}"
            self._send(0, messages.Notice(f"{waiting}. The job ends after {self._timeout_s:g} s (timeout_s)."))
        self._noticed = waited > _NOTICE_S  # one line for each wait, however long it lasts

    def _decide_on_wait(self, rank: int, text: str) -> None:
        """Decide which rank is to blame for a wait that failed: one that does not wait, if there is one."""
        if self.verdict is not None:
            return
        # A rank that waits itself is not to blame for the wait, while another computes or has ended.
        culprit = min(self._busy - {rank}, default=None)
        others = self._describe_others(rank)
        if culprit is not None:
            self._decide(culprit, f" did not reach the call that rank {rank} waited in: {others}. Rank {rank}: {text}")
        else:
            self._decide(rank, f": {text}; {others}")

    def _check_positions(self, beats: Mapping[int, messages.Heartbeat]) -> None:
        """Check that the ranks make their steps on the same batches.

        A heartbeat may be older than another. But a rank that has made more steps must have come further in the data.
        """
        ordered = sorted((*beat.trained, rank) for rank, beat in beats.items())
        # Neighbours in this order are enough: positions that are sorted have no pair in the wrong order.
        for (steps, position, rank), (more_steps, other_position, other) in pairwise(ordered):
            if position > other_position or (steps == more_steps and position != other_position):
                ahead, behind = (rank, other) if position > other_position else (other, rank)
                self._decide(
                    ahead,
                    f" has left out a batch, or has left an epoch early: it had come to {_position(beats[ahead])}, but "
                    f"rank {behind} to {_position(beats[behind])}. All ranks must call step() for the same batches. To "
                    "leave out a batch on one rank, multiply its loss by 0",
                )

    def _check_for_deadlock(self, waits: Mapping[int, messages.Heartbeat]) -> None:
        """Check for a rank that is in ``close`` while another waits for it in another call."""
        lasting = {rank: beat for rank, beat in waits.items() if beat.seconds > _DEADLOCK_S}
        closing = [rank for rank, beat in lasting.items() if beat.phase == CLOSING]
        waiting = [rank for rank, beat in lasting.items() if beat.phase != CLOSING]
        if closing and waiting:
            rank, other = closing[0], waiting[0]
            self._decide(
                rank,
                f" {self._ends.get(rank, 'finished')} after step {lasting[rank].step}, but rank {other} still waits "
                f"for it, {lasting[other]}",
            )
        # A rank that computes or reads will wake up by itself, so all must be blocked.
        if len(waits) == len(self._present) and all(beat.blocked_s > _DEADLOCK_S for beat in waits.values()):
            self._decide_on_calls(waits)

    def _decide_on_calls(self, waits: Mapping[int, messages.Heartbeat]) -> None:
        """End the job if all ranks are blocked, and not all in the same call."""
        by_call: dict[tuple[str, int], list[int]] = {}
        for rank, beat in sorted(waits.items()):
            by_call.setdefault((beat.phase, beat.step), []).append(rank)
        if len(by_call) > 1:
            (rank, *_), (other, *_) = sorted(by_call.values(), key=len)[:2]
            self._decide(
                rank,
                f" is {waits[rank]}, and rank {other} is {waits[other]}: all ranks must make the same calls, in the "
                "same order",
            )

    def _decide(self, rank: int, text: str, *, stalled: bool = False, on_all_ranks: bool = False) -> None:
        """End the job with a verdict, and tell all ranks. Only the first decision counts.

        Args:
            rank: the rank to blame.
            text: how it failed, in words that follow its name.
            stalled: as in ``messages.Verdict``.
            on_all_ranks: as in ``messages.Verdict``.
        """
        if self.verdict is None:
            self.verdict = Verdict(rank, f"{self._members[rank]}{text}", stalled, on_all_ranks)
            # Rank 0's own watch gets it last: it ends the process that this hub runs in.
            self._send(None, self.verdict)

    def _activity(self, rank: int) -> str:
        """Return the activity of a rank at its last heartbeat, for a message."""
        return str(self._heartbeats[rank]) if rank in self._heartbeats else "starting"

    def _describe_others(self, asking: int) -> str:
        """Return a description of the ranks that are not waiting, or, if all are, of the call that each waits in."""
        # Of thousands of ranks, the message names a few.
        others = nsmallest(_MOST_NAMED, self._busy - {asking})
        if not others:
            others = list(islice((rank for rank in self._present if rank != asking), _MOST_NAMED))
        return "; ".join(f"{self._members[rank]} is {self._activity(rank)}" for rank in others)
