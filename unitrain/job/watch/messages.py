"""The messages between the processes of a job and its hub, and their encoding."""

from __future__ import annotations

from typing import NamedTuple, get_args

from pydantic import TypeAdapter, ValidationError

from unitrain.pulse import USER_CODE


class BoundaryRequest(NamedTuple):
    """A request for all ranks to do something at the same boundary."""

    kind: str  # and no enum, since features add kinds
    """The action of ``Stopping`` that it asks for."""
    number: int = 0
    """The argument of the action, such as the number of a signal."""


class Heartbeat(NamedTuple):
    """From a process: a heartbeat, with its phase, its step and the line of the script that it is at."""

    phase: str
    """The call that waits for other ranks, or ``USER_CODE``."""
    step: int
    """Optimizer steps that have ended."""
    seconds: float
    """How long it has been doing that."""
    place: str = ""
    """The line of the script, if that is long."""
    blocked_s: float = 0.0
    """How long no thread of the process has run."""
    trained: tuple[int, int] = (0, 0)
    """As in ``Pulse``."""
    memory: int = 0
    """Bytes of host memory."""
    loads: bool = False
    """Whether the script waits for a loader."""

    @property
    def waits(self) -> bool:
        """Whether the process waits for other ranks."""
        return self.phase != USER_CODE

    def __str__(self) -> str:
        """Return the phase, the step and the line of the script, for messages."""
        where = f", at {self.place}" if self.place else ""
        return f"in {self.phase} after step {self.step}, for {self.seconds:.0f} s{where}"


class HubHeartbeat(NamedTuple):
    """From the hub: a heartbeat. The first one says that all ranks have connected."""


class Failed(NamedTuple):
    """From a process: it is about to end with an error."""

    text: str
    """The error, in one line."""
    secondary: bool = False
    """Whether the error follows from another rank's failure: a collective that failed, say."""
    on_all_ranks: bool = False
    """Whether all ranks have the same error: a wrong setting, say."""


class Exits(NamedTuple):
    """From a process: it is about to exit. This counts if the others have not done so by then."""

    text: str
    """Why, in words that follow its name."""


class Ask(NamedTuple):
    """From a process: a question, where the ranks are that it waits for."""


class Answer(NamedTuple):
    """From the hub: the answer to ``Ask``, a description of those ranks."""

    text: str


class Call(NamedTuple):
    """From a process: it has reached a collective call."""

    call: str
    """Its name and arguments, as far as they must be the same on all ranks."""
    place: str
    """The line of the script."""


class CallsAgree(NamedTuple):
    """From the hub: every rank has reached the same call."""


class RequestStop(NamedTuple):
    """From a process: asks for all ranks to stop at their next common boundary, and to act there."""

    request: BoundaryRequest


class Hold(NamedTuple):
    """From the hub: pass no boundary, and report which is the next."""


class NextBoundary(NamedTuple):
    """From a process: its next boundary, in answer to ``Hold``. It passes none until it gets a ``Stop``."""

    boundary: int
    """The boundaries of a process are counted from the start of the job."""


class Stop(NamedTuple):
    """From the hub: stop at this boundary, and act there."""

    boundary: int
    request: BoundaryRequest


class Settled(NamedTuple):
    """From a process: the stop has been acted on."""


class Leave(NamedTuple):
    """From a process: it has reached its end without an error. From the hub: all have."""


class Verdict(NamedTuple):
    """From the hub: why the job ends."""

    rank: int
    """The rank that failed first."""
    text: str
    """What happened to it, with its host and pid, in one line."""
    stalled: bool = False
    """Whether the process still exists, but sends no heartbeat."""
    on_all_ranks: bool = False
    """As in ``Failed``."""


class Notice(NamedTuple):
    """From the hub to rank 0: a line to print."""

    text: str


Message = (
    Heartbeat | HubHeartbeat | Failed | Exits | Ask | Answer | Call | CallsAgree | RequestStop | Hold | NextBoundary
    | Stop | Settled | Leave | Verdict | Notice
)  # fmt: skip

# Made once: pydantic compiles a validator for each class.
_ADAPTERS: dict[str, TypeAdapter[Message]] = {kind.__name__: TypeAdapter(kind) for kind in get_args(Message)}


def encode(message: Message) -> bytes:
    """Return the name of a message's class, and its fields as JSON. No message is ever pickled."""
    name = type(message).__name__
    return name.encode() + b" " + _ADAPTERS[name].dump_json(message)


def decode(data: bytes) -> Message | None:
    """Return the message that was encoded as ``data``, or None if it is invalid."""
    # The name comes first, so that a message which is not of these classes is never parsed.
    name, _, fields = data.partition(b" ")
    adapter = _ADAPTERS.get(name.decode(errors="replace"))
    try:
        return None if adapter is None else adapter.validate_json(fields)
    except ValidationError:
        return None
