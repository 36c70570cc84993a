"""The watch: a thread in each process that sends heartbeats to the hub, and ends the process when the job ends.

The hub runs in another thread of rank 0, which has a watch like the others. When a process dies, its connection is
closed, and the hub notices at once. A stalled process sends no heartbeats. Nothing here runs within a training step.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from multiprocessing.connection import wait
from typing import TypeVar

from unitrain import call_site
from unitrain.communication.communicator import Communicator
from unitrain.config import StrategyConfig
from unitrain.errors import CommunicationError, ConfigError
from unitrain.job.ending import end_for_others, is_succeeded
from unitrain.job.watch import messages
from unitrain.job.watch.admission import introduce
from unitrain.job.watch.boundaries import Boundaries
from unitrain.job.watch.hub import SILENT_END, Member, heartbeat_interval_s
from unitrain.job.watch.hub_server import HubServer, Observer
from unitrain.job.watch.link import Link
from unitrain.job.watch.messages import Message, Verdict
from unitrain.launch.detect import Launch
from unitrain.launch.network.addresses import own_addresses
from unitrain.process import exit_now, is_busy, kill_stalled, print_stacks, print_stderr, resident_memory

A = TypeVar("A", messages.Answer, messages.CallsAgree)

_CLOSE_S = 5.0
_ANSWER_S = 2.0
# What a process does for longer than this is reported with its line in the script.
_LONG_S = 1.0


class Watch:
    """The watchdog of one process. Collective: connects to the hub, which waits for all ranks.

    Args:
        communicator: connects the ranks; with it, rank 0 tells the others where the hub listens.
        members: all processes of the job, by rank.
        boundaries: at which this process can be stopped; shared with ``Stopping``.
        config: has the timeouts, in seconds.
        launch: how this process was started.
        key: the job's key, which admits a process to the hub.

    Attributes:
        members: all processes of the job, by rank.
        key: the job's key.

    Raises:
        CommunicationError: the hub can't be reached, or not all ranks have connected to it within ``timeout_s``.
    """

    def __init__(
        self,
        communicator: Communicator,
        members: Sequence[Member],
        boundaries: Boundaries,
        config: StrategyConfig,
        launch: Launch,
        key: bytes,
    ) -> None:
        self.key: bytes = key
        self._launch = launch
        self._one_host = launch.local_world_size == communicator.world_size
        self._pulse = communicator.collectives.pulse
        self._is_observed = False
        self._boundaries = boundaries
        self.members: tuple[Member, ...] = tuple(members)
        self._me = members[communicator.rank]
        self._timeout_s = config.timeout_s
        self._heartbeat_timeout_s = min(config.heartbeat_timeout_s, config.timeout_s)
        self._interval_s = heartbeat_interval_s(self._heartbeat_timeout_s, len(members))
        self._link, self._server = self._connect(communicator, key)
        self._changed = threading.Condition()
        self._verdict: Verdict | None = None
        self._answer: messages.Answer | messages.CallsAgree | None = None
        self._ending = False
        self._left = False
        self._releases: list[Callable[[], None]] = []
        # The thread that calls the library. Its stack has the line to report.
        self._script_thread = threading.get_ident()
        self._state, self._since, self._blocked_since = ("", 0, 0), 0.0, 0.0
        self._thread = threading.Thread(target=self._run, name="unitrain watch", daemon=True)
        self._thread.start()

    def __str__(self) -> str:
        """Return the process that this watch belongs to, for messages."""
        return str(self._me)

    def _connect(self, communicator: Communicator, key: bytes) -> tuple[Link, HubServer | None]:
        """Start the hub on rank 0, connect to it, and wait until all ranks have. Collective."""
        server: HubServer | None = None

        def start() -> tuple[list[str], int]:
            nonlocal server
            server = HubServer(
                self.members, key, timeout_s=self._timeout_s, heartbeat_timeout_s=self._heartbeat_timeout_s,
                one_host=self._one_host,
            )  # fmt: skip
            server.start()
            return ["127.0.0.1"] if self._one_host else own_addresses(), server.port

        # On_main raises an error of rank 0's, such as too few open files, on every rank.
        hosts, port = communicator.on_main(start)
        link = Link(introduce(hosts, port, key, communicator.rank, self._timeout_s))
        # The hub's first message comes when all ranks have been admitted.
        if link.receive(self._timeout_s) is None:
            raise CommunicationError(
                f"rank 0 did not answer {self._me} within {self._timeout_s:g} s: not all ranks have connected to it."
            )
        return link, server

    def fail(
        self, text: str, *, patience_s: float = 0.0, secondary: bool = False, on_all_ranks: bool = False
    ) -> Verdict | None:
        """Report that this process is about to end with an error, and return which failure was the first of the job.

        From now on the caller ends this process; a verdict no longer does. Blocks for ``patience_s`` and a few seconds
        at most. None if rank 0 does not answer.

        Args:
            text: the error, in one line.
            patience_s: seconds to wait first for a verdict on another rank.
            secondary: as in ``messages.Failed``.
            on_all_ranks: as in ``messages.Failed``.
        """
        if self._verdict is not None and not self._ending:  # the watch's thread is about to end the process
            time.sleep(_CLOSE_S)
        with self._changed:
            self._ending = True
            known = self._changed.wait_for(lambda: self._verdict is not None, patience_s)
        if not known:
            # The hub blames a rank that does not wait, so it must know what this one is doing now.
            self._send_heartbeat()
            self._link.send(messages.Failed(text, secondary, on_all_ranks))
            with self._changed:
                self._changed.wait_for(lambda: self._verdict is not None, _ANSWER_S)
        return self._verdict

    def before_restart(self, release: Callable[[], None]) -> None:
        """Call a function before this process goes on in another world (``unitrain.job.ending``).

        Args:
            release: releases what the rank holds, such as the lock of a folder: the restarted process has the same id,
                and may have another rank. It is called in the watch's thread.
        """
        self._releases.append(release)

    def observe(self, observer: Observer | None) -> None:
        """Have heartbeats tell the memory that each process uses, and whether it loads data. Called on all ranks.

        Args:
            observer: on rank 0, called with each heartbeat of any rank, in the hub's thread.
        """
        self._is_observed = True
        if self._server is not None and observer is not None:
            self._server.observers.append(observer)

    def whereabouts(self) -> str:
        """Return a description of the ranks that this rank waits for; an empty string if rank 0 does not answer.

        In the main thread only. Blocks for ``_ANSWER_S`` at most.
        """
        answer = self._ask(messages.Ask(), messages.Answer, _ANSWER_S)
        return answer.text if answer is not None else ""

    def _ask(self, request: Message, expected: type[A], timeout_s: float | None = None) -> A | None:
        """Send the hub a request, from the main thread, and return its answer; None after ``timeout_s``.

        Args:
            request: the request.
            expected: the class of the answer.
            timeout_s: how long to wait, in seconds; None until the verdict, with which the watch ends this process,
                unless it is about to end with an error of its own.
        """
        with self._changed:
            self._answer = None
        self._send_heartbeat()
        # The heartbeat came first, so that the hub knows of the call that this process is in.
        self._link.send(request)
        with self._changed:
            self._changed.wait_for(lambda: isinstance(self._answer, expected) or self._verdict is not None, timeout_s)
            return self._answer if isinstance(self._answer, expected) else None

    def send(self, message: Message) -> None:
        """Send the hub a message, from any thread."""
        self._link.send(message)

    def compare_calls(self, call: str, place: str) -> None:
        """Return once every rank has reached this call. The job ends if a rank makes another call.

        In the main thread only: at the end, and with the setting ``debug`` in each call.

        Args:
            call: the name of the call, and its arguments as far as they must be the same on all ranks.
            place: the line of the script that makes it, for the error message.
        """
        if self._ask(messages.Call(call, place), messages.CallsAgree) is None:
            # The watch's thread is about to end this process. In a collective, gloo would: others wait in another.
            self._thread.join(_CLOSE_S)

    def close(self) -> None:
        """Leave the job. Blocks until every rank has reached its end, or for some seconds if the hub has gone."""
        self._left = True
        self._link.send(messages.Leave())
        self._thread.join(_CLOSE_S)
        # The hub ends with this process: the others must have received its last message.
        if self._server is not None:
            self._server.join(_CLOSE_S)
        self._link.close()

    def _run(self) -> None:
        """Send heartbeats and receive messages until the job ends. Runs in the watch's thread."""
        heard_at = checked_at = beat_at = now = time.monotonic()
        # A verdict is the last that counts: the end of rank 0's connection follows it.
        while not self._left and self._verdict is None:
            if now >= beat_at:
                beat_at = now + self._interval_s
                self._send_heartbeat()
            ready = wait([self._link.fileno()], beat_at - now)
            now = time.monotonic()
            if now - checked_at > self._heartbeat_timeout_s / 2:
                heard_at = now  # this process was suspended itself, and perhaps the whole job
            checked_at = now
            if ready:
                heard_at = now
                message = self._link.receive()
                if message is None:
                    if not self._left:
                        self._decide(Verdict(0, f"{self.members[0]} {SILENT_END}"))
                    return
                self._receive(message)
            elif now - heard_at > self._heartbeat_timeout_s:
                silence = f"sent no heartbeat for {now - heard_at:.0f} s"
                self._decide(Verdict(0, f"{self.members[0]} {silence}", stalled=True))

    def _send_heartbeat(self) -> None:
        """Send the hub this process's state, and how long it has lasted. From any thread.

        A state that has not changed for long is reported with the line of the script. A process is blocked as long as
        no thread of it runs, except the watch's.
        """
        pulse, now = self._pulse, time.monotonic()
        state = (pulse.phase, pulse.calls, pulse.boundary)
        if state != self._state:
            self._state, self._since, self._blocked_since = state, now, now
        place, lasted = "", now - self._since
        if lasted > _LONG_S:
            place = call_site.of_thread(self._script_thread)
            if is_busy():
                self._blocked_since = now
        blocked_s = now - self._blocked_since
        use = (resident_memory(), call_site.is_loading(self._script_thread)) if self._is_observed else ()
        self._link.send(messages.Heartbeat(pulse.phase, pulse.step, lasted, place, blocked_s, pulse.trained, *use))

    def _receive(self, message: Message) -> None:
        """Act on a message from the hub."""
        match message:
            case Verdict():
                self._decide(message)
            case messages.Hold():
                self._link.send(messages.NextBoundary(self._boundaries.hold()))
            case messages.Stop(boundary=boundary, request=request):
                self._boundaries.agree(boundary, request)
            case messages.Answer() | messages.CallsAgree():
                with self._changed:
                    self._answer = message
                    self._changed.notify_all()
            case messages.Notice(text=text):
                print_stderr(f"unitrain: {text}")
            case messages.Leave():
                self._left = True

    def _decide(self, verdict: Verdict) -> None:
        """End this process because of the verdict, which is its own if the hub has gone."""
        rank, culprit = verdict.rank, self.members[verdict.rank]
        with self._changed:
            self._verdict = verdict
            self._changed.notify_all()
        # Otherwise the process ends, and with it what it holds.
        for release in self._releases if is_succeeded() else ():
            release()
        ending = self._ending
        # The stalled process may hold GPUs and ports. It does not end by itself, and its launcher may not notice.
        if verdict.stalled and culprit.host == self._me.host and rank != self._me.rank:
            neighbours = [m.rank for m in self.members if m.host == culprit.host and m.rank != rank]
            kill_stalled(culprit.pid, culprit.started, aborts=self._me.rank == neighbours[0])
        if ending:
            return  # the main thread has an error to report
        if verdict.on_all_ranks:
            exit_now(ConfigError.exit_code)
        line = f"unitrain: {self._me}: stopped because {verdict.text}"
        if rank == self._me.rank:
            print_stacks(f"unitrain: stacks of {self._me} when the job was ended because of it:")
            exit_now(1, line)
        end_for_others(line)
