"""What a process and the hub of its job say to each other, and how that is written on a connection."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal

from pydantic import Field, TypeAdapter, ValidationError

from unitrain.pulse import OWN_CODE


@dataclass(frozen=True)
class StopReason:
    """Why a run is to stop at a boundary."""

    signal: int | None = None
    """Number of the signal; None where a checkpoint could not be written in the background."""


@dataclass(frozen=True)
class Hello:
    """From a process: the first message on its connection."""

    token: str
    rank: int
    kind: Literal["hello"] = "hello"


@dataclass(frozen=True)
class Welcome:
    """From the hub: all ranks have connected."""

    kind: Literal["welcome"] = "welcome"


@dataclass(frozen=True)
class Beat:
    """From a process: a heartbeat, and what the process is doing."""

    phase: str
    step: int
    seconds: float
    """How long it has been doing that."""
    kind: Literal["beat"] = "beat"

    @property
    def waits(self) -> bool:
        """Whether the process waits for other ranks."""
        return self.phase != OWN_CODE

    def __str__(self) -> str:
        return f"in {self.phase} after step {self.step}, for {self.seconds:.0f} s"


@dataclass(frozen=True)
class HubBeat:
    """From the hub: a heartbeat."""

    kind: Literal["hub_beat"] = "hub_beat"


@dataclass(frozen=True)
class Failed:
    """From a process: it is about to end with an error."""

    text: str
    follows: bool = False
    """Whether the error is a library's whose wait for another rank failed."""
    everywhere: bool = False
    """Whether all ranks have it: a wrong setting, say."""
    kind: Literal["failed"] = "failed"


@dataclass(frozen=True)
class Ask:
    """From a process: where are the ranks that it waits for?"""

    kind: Literal["ask"] = "ask"


@dataclass(frozen=True)
class Answer:
    """From the hub: where they are."""

    text: str
    kind: Literal["answer"] = "answer"


@dataclass(frozen=True)
class Call:
    """From a process: it has come to a collective call."""

    call: str
    """Its name, and all that must be the same on all ranks."""
    place: str
    """The line of the script."""
    kind: Literal["call"] = "call"


@dataclass(frozen=True)
class CallsAgree:
    """From the hub: every rank has come to the same call."""

    kind: Literal["calls_agree"] = "calls_agree"


@dataclass(frozen=True)
class RequestStop:
    """From a process: all ranks are to stop at their next common boundary."""

    reason: StopReason
    kind: Literal["request_stop"] = "request_stop"


@dataclass(frozen=True)
class Hold:
    """From the hub: pass no boundary, and say which is the next."""

    kind: Literal["hold"] = "hold"


@dataclass(frozen=True)
class Held:
    """From a process: the next boundary that it will come to."""

    boundary: int
    kind: Literal["held"] = "held"


@dataclass(frozen=True)
class Stop:
    """From the hub: stop at this boundary."""

    boundary: int
    reason: StopReason
    kind: Literal["stop"] = "stop"


@dataclass(frozen=True)
class Settled:
    """From a process: what the stop was for has been done."""

    kind: Literal["settled"] = "settled"


@dataclass(frozen=True)
class Leave:
    """From a process: it has come to its end, in good order. From the hub: all have."""

    kind: Literal["leave"] = "leave"


@dataclass(frozen=True)
class Verdict:
    """From the hub: why the job ends."""

    rank: int
    """The rank that failed first."""
    text: str
    """What happened to it, with its host and pid, in one line."""
    frozen: bool = False
    """Whether the process is still there, and gives no sign of life."""
    everywhere: bool = False
    """As in ``Failed``."""
    kind: Literal["verdict"] = "verdict"


Message = (
    Hello | Welcome | Beat | HubBeat | Failed | Ask | Answer | Call | CallsAgree | RequestStop | Hold | Held | Stop
    | Settled | Leave | Verdict
)  # fmt: skip

_ADAPTER: TypeAdapter[Message] = TypeAdapter(Annotated[Message, Field(discriminator="kind")])


def encode(message: Message) -> bytes:
    """Return a message as JSON."""
    return _ADAPTER.dump_json(message)


def decode(data: bytes) -> Message | None:
    """Return the message that the bytes hold, or None where they hold none."""
    try:
        return _ADAPTER.validate_json(data)
    except ValidationError:
        return None
