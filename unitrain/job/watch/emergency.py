"""Between the failure of a rank and the end of the job: the survivor with the furthest state saves it.

The ranks agree through the hub. Each reports the last step that it has the whole state of, and the hub elects the
furthest of them, which writes a checkpoint; then all end. A launcher leaves little time for that: it has noticed the
failure, too, and kills the others soon.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable
from typing import Protocol

from unitrain.job.watch.messages import Candidate, Elect, Message, SaveEnded, Verdict
from unitrain.launch.detect import Launch

# Seconds between a launcher's SIGTERM and its SIGKILL; others leave 30 (torchrun, SLURM), or kill nobody.
_GRACE_S = {"mpirun": 1.0, "horovodrun": 5.0, "spawn": 2.0}
_USUAL_GRACE_S = 30.0
_USED = 0.9
# The part of that time in which a rank may come from a step to the boundary after it, and the most.
_TO_BECOME_WHOLE, _MOST_S = 0.3, 2.0
# Ranks that make the same mistake as the first one do so within this time.
_SAME_ERROR_S = 0.3
# How much later than it should an answer may arrive.
_LATE_S = 0.2


def grace_s(launch: Launch) -> float:
    """Return how many seconds an emergency checkpoint may take, from the verdict on."""
    return _USED * (_USUAL_GRACE_S if launch.elastic else _GRACE_S.get(launch.launcher, _USUAL_GRACE_S))


def election_s(grace_s: float) -> float:
    """Return how many of them the ranks have to report what they have."""
    return _SAME_ERROR_S + _patience_s(grace_s) + _LATE_S


def _patience_s(grace_s: float) -> float:
    return min(_TO_BECOME_WHOLE * grace_s, _MOST_S)


class Saver(Protocol):
    """Writes the emergency checkpoint of this process."""

    def last_whole(self, patience_s: float) -> tuple[int | None, str]:
        """Freeze the state. Return the last step that it is complete for, or None and the reason.

        Args:
            patience_s: how long to wait for the main thread if it is changing the state.
        """

    def save(self) -> None:
        """Write that state, and say so."""

    def release(self) -> None:
        """Let other processes use the folder: this one goes on, but not with this checkpoint."""


class Emergency:
    """Takes part in the emergency checkpoint, in a thread, since what it does may hang, on a dead disk say.

    Attributes:
        elected: whether this process saves.
        over: set when this process has done its part.
        why: why it has no state to save, if that is worth a word.
    """

    def __init__(
        self,
        saver: Saver,
        send: Callable[[Message], None],
        grace_s: float,
        failed: Callable[[], bool],
        verdict: Verdict,
    ) -> None:
        """Begin. ``failed`` returns whether this process is ending with its own error."""
        self._saver = saver
        self._send = send
        self._patience_s = _patience_s(grace_s)
        self._failed = failed
        self._raised = verdict.raised
        self._decided = threading.Event()
        self.over: threading.Event = threading.Event()
        self.why: str = ""
        self.elected: bool = False
        threading.Thread(target=self._run, name="unitrain emergency", daemon=True).start()

    def elect(self, this_one: bool) -> None:
        """Record whether this process saves. Only the first call counts."""
        if not self._decided.is_set():
            self.elected = this_one
            self._decided.set()

    def _run(self) -> None:
        try:
            if self._raised:
                self._decided.wait(_SAME_ERROR_S)
            step, self.why = self._last_whole()
            self._send(Candidate(step, self.why))
            self._decided.wait()
            if self.elected and step is not None:
                self._saver.save()
                self._send(SaveEnded())
        finally:
            self.over.set()

    def _last_whole(self) -> tuple[int | None, str]:
        if self._failed():
            return None, ""
        try:
            return self._saver.last_whole(self._patience_s)
        except Exception as error:  # a folder that can't be read, say; the others are still asked
            return None, f"{type(error).__name__}: {error}"


class Election:
    """Finds the rank that saves, for the hub. Uses no clock.

    ``ranks`` are those that are left. Ranks that have not answered at the time ``until`` are left out.
    """

    def __init__(self, ranks: Iterable[int], send: Callable[[Message], None], until: float) -> None:
        self._awaited = set(ranks)
        self._send = send
        self._until = until
        self._answers: dict[int, Candidate] = {}
        self._elected: int | None = None
        self._over = False

    def receive(self, rank: int, message: Candidate | SaveEnded) -> None:
        """Process what a rank has, or that it has saved it, or could not."""
        if isinstance(message, Candidate):
            self._answers[rank] = message
            self._awaited.discard(rank)
            self._elect_if_all_answered()
        elif rank == self._elected:
            self._end()

    def gone(self, rank: int) -> None:
        """Process the end of a rank: another one saves, if this one was to."""
        self._awaited.discard(rank)
        self._answers.pop(rank, None)
        if rank == self._elected:
            self._elected = None
        self._elect_if_all_answered()

    def check(self, now: float) -> None:
        """Leave out ranks that have not answered in time."""
        if now >= self._until:
            self._awaited.clear()
            self._elect_if_all_answered()

    def _elect_if_all_answered(self) -> None:
        if self._awaited or self._elected is not None or self._over:
            return
        steps = {rank: answer.step for rank, answer in self._answers.items() if answer.step is not None}
        if not steps:
            self._end()
            return
        # Of several, the first, which is rank 0 if it is among them: its host has the folder in any case.
        self._elected = min(steps, key=lambda rank: (-steps[rank], rank))
        self._send(Elect(self._elected))

    def _end(self) -> None:
        self._over = True
        why = next((answer.why for _, answer in sorted(self._answers.items()) if answer.why), "")
        self._send(Elect(None, "" if self._elected is not None else why))
