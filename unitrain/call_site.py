"""Finds the line of the user's script that made a call, and warns about it."""

from __future__ import annotations

import sys
import warnings
from types import FrameType

_LIBRARIES = frozenset({"unitrain", "torch", "contextlib"})


def is_own(frame: FrameType) -> bool:
    """Return whether a frame belongs to user code, and not to UniTrain, a backend or torch."""
    module = str(frame.f_globals.get("__name__"))
    return module.split(".")[0] not in _LIBRARIES or module.startswith("unitrain.recipes.")


def current() -> str:
    """Return the line of user code that is being run, as ``file:line``."""
    frame = _own_frame()
    return f"{frame.f_code.co_filename}:{frame.f_lineno}" if frame is not None else "the end of the script"


def warn(message: str) -> None:
    """Issue a UserWarning that shows the line of user code that is being run."""
    frame = _own_frame()
    if frame is None:
        warnings.warn(message, UserWarning, stacklevel=2)
        return
    registry = frame.f_globals.setdefault("__warningregistry__", {})
    module, file = str(frame.f_globals.get("__name__")), frame.f_code.co_filename
    warnings.warn_explicit(message, UserWarning, file, frame.f_lineno, module=module, registry=registry)


def _own_frame() -> FrameType | None:
    frame: FrameType | None = sys._getframe()
    while frame is not None and not is_own(frame):
        frame = frame.f_back
    return frame
