"""What rank 0 knows of all ranks, and what it concludes: who failed, who is frozen, and where all of them stop."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from unitrain.job import messages
from unitrain.job.messages import Message, StopReason, Verdict
from unitrain.pulse import CLOSING

# A rank at its end and another that waits for it elsewhere: after this, neither is merely late in saying so.
_CROSSED_S = 3.0
# Engines have a timeout of their own, of ``timeout_s``, and raise where the user's script may see it. They come first.
_AFTER_ENGINES_S = 5.0
SILENT_END = "ended without a word: it was killed, or left by os._exit()"


@dataclass(frozen=True)
class Member:
    """One process of the job."""

    rank: int
    host: str
    pid: int
    created: float
    """When it was started, as psutil says: a pid may be used again."""

    def __str__(self) -> str:
        return f"rank {self.rank} on {self.host} (pid {self.pid})"


class Hub:
    """Draws conclusions from what the ranks say. It knows no sockets and no clock, so that it can be tested without.

    The first conclusion is the job's verdict, and there is no second.

    Args:
        members: all processes, by rank.
        timeout_s: how long a rank may wait for others that live.
        heartbeat_timeout_s: how long a rank may say nothing.
        say: sends a message to a rank, or to all (None).
        now: the time, in seconds, as in all calls.
    """

    def __init__(
        self,
        members: Sequence[Member],
        *,
        timeout_s: float,
        heartbeat_timeout_s: float,
        say: Callable[[int | None, Message], None],
        now: float,
    ) -> None:
        self._members = members
        self._timeout_s, self._heartbeat_timeout_s = timeout_s, heartbeat_timeout_s
        self._say = say
        self._heard_at = dict.fromkeys(range(len(members)), now)
        self._looked_at = now
        self._beats: dict[int, messages.Beat] = {}
        self._present = set(self._heard_at)
        self._reasons: list[StopReason] = []  # to stop for; the first is being agreed on, or acted on
        self._boundaries: dict[int, int] = {}
        self._settled: set[int] = set()
        self._calls: dict[int, messages.Call] = {}  # of the ranks that have come to their next one
        self.verdict: Verdict | None = None

    @property
    def finished(self) -> bool:
        """Whether all ranks have left."""
        return not self._present

    def hear(self, rank: int, message: Message, now: float) -> None:
        """Take note of what a rank says."""
        self._heard_at[rank] = now
        match message:
            case messages.Beat():
                self._beats[rank] = message
            case messages.Failed(text=text, follows=True):
                self._conclude_unanswered(rank, text)
            case messages.Failed(text=text, everywhere=everywhere):
                self._conclude(rank, f": {text}", everywhere=everywhere)
            case messages.Ask():
                self._say(rank, messages.Answer(self._where_the_others_are(rank)))
            case messages.Call():
                self._compare_calls(rank, message)
            case messages.RequestStop(reason=reason) if reason not in self._reasons:
                self._reasons.append(reason)
                if len(self._reasons) == 1:
                    self._hold()
            case messages.Held(boundary=boundary):
                self._boundaries[rank] = boundary
                if len(self._boundaries) == len(self._members):
                    # Nobody is beyond the boundary that it named, so all can still come to the furthest of them.
                    self._say(None, messages.Stop(max(self._boundaries.values()), self._reasons[0]))
            case messages.Settled():
                self._settled.add(rank)
                if len(self._settled) == len(self._members):
                    self._reasons.pop(0)
                    if self._reasons:
                        self._hold()
            case messages.Leave():
                self._present.discard(rank)

    def _hold(self) -> None:
        if len(self._present) == len(self._members):  # else the run is at its end
            self._boundaries, self._settled = {}, set()
            self._say(None, messages.Hold())

    def _compare_calls(self, rank: int, mine: messages.Call) -> None:
        for other, its in self._calls.items():
            if its.call != mine.call:
                self._conclude(
                    rank,
                    f" called {mine.call} at {mine.place}, where rank {other} called {its.call} at {its.place}: all "
                    "ranks must make the same calls, in the same order",
                )
        self._calls[rank] = mine
        if len(self._calls) == len(self._members):
            self._calls = {}
            self._say(None, messages.CallsAgree())

    def lost(self, rank: int) -> None:
        """Take note that a rank's connection has ended."""
        if rank in self._present:
            self._present.discard(rank)
            self._conclude(rank, f" {SILENT_END}")

    def look(self, now: float) -> None:
        """Look for ranks that say nothing, and for ranks that wait for longer than they may."""
        asleep, self._looked_at = now - self._looked_at, now
        if asleep > self._heartbeat_timeout_s / 2:  # this process was stopped itself, and perhaps the whole job
            self._heard_at = dict.fromkeys(self._heard_at, now)
        for rank in sorted(self._present):
            silence = now - self._heard_at[rank]
            if silence > self._heartbeat_timeout_s:
                self._conclude(
                    rank, f" gave no sign of life for {silence:.0f} s; it was {self._place(rank)}", frozen=True
                )
        self._look_for_crossing()
        waits = {rank: beat for rank, beat in self._beats.items() if rank in self._present and beat.waits}
        longest = max(waits, key=lambda rank: waits[rank].seconds, default=None)
        if longest is not None and waits[longest].seconds > self._timeout_s + _AFTER_ENGINES_S:
            self._conclude_unanswered(longest, f"timeout_s is over for it, {waits[longest]}")

    def _conclude_unanswered(self, rank: int, text: str) -> None:
        """Conclude that nobody came where a rank waited: another does not wait at all, or waits for something else."""
        away = self._away(rank)
        others = self._where_the_others_are(rank)
        if away:
            self._conclude(away[0], f" did not come where rank {rank} waited for it: {others}. Rank {rank}: {text}")
        else:
            self._conclude(rank, f": {text}; {others}")

    def _look_for_crossing(self) -> None:
        lasting = {
            rank: beat
            for rank, beat in self._beats.items()
            if rank in self._present and beat.waits and beat.seconds > _CROSSED_S
        }
        closing = [rank for rank, beat in lasting.items() if beat.phase == CLOSING]
        waiting = [rank for rank, beat in lasting.items() if beat.phase != CLOSING]
        if closing and waiting:
            self._conclude(
                closing[0],
                f" came to its end after step {lasting[closing[0]].step}, and rank {waiting[0]} still waits for it, "
                f"{lasting[waiting[0]]}",
            )

    def _conclude(self, rank: int, text: str, *, frozen: bool = False, everywhere: bool = False) -> None:
        if self.verdict is None:
            text = f"{self._members[rank]}{text}"
            self.verdict = Verdict(rank, text, frozen, everywhere)
            self._say(None, self.verdict)

    def _place(self, rank: int) -> str:
        return str(self._beats[rank]) if rank in self._beats else "starting"

    def _away(self, asking: int) -> list[int]:
        """Return the other ranks that do not wait."""
        return [r for r in sorted(self._present - {asking}) if r not in self._beats or not self._beats[r].waits]

    def _where_the_others_are(self, asking: int) -> str:
        """Say which ranks have not come to where one waits, or that all wait, but not for the same."""
        named = self._away(asking) or sorted(self._present - {asking})
        return "; ".join(f"{self._members[rank]} is {self._place(rank)}" for rank in named[:4])
