"""Finds the line of the user's script that made a call, and warns about it."""

from __future__ import annotations

import os
import sys
import warnings
from types import FrameType

_LIBRARIES = frozenset({"unitrain", "torch"})
_LOADERS = ("unitrain.data.", "torch.utils.data.dataloader")
_STANDARD_LIBRARY = os.path.dirname(os.__file__)


def is_own(frame: FrameType) -> bool:
    """Return whether a frame belongs to user code, and not to UniTrain, a backend, torch or Python itself."""
    if frame.f_code.co_filename.startswith(_STANDARD_LIBRARY):
        return False
    module = str(frame.f_globals.get("__name__"))
    return module.split(".")[0] not in _LIBRARIES or module.startswith("unitrain.recipes.")


def current() -> str:
    """Return the line of user code that is being run, as ``file:line``."""
    frame = _own_frame(sys._getframe())
    return _line(frame) if frame is not None else "the end of the script"


def of_thread(ident: int) -> str:
    """Return the line of user code that a thread of this process is running, or an empty string."""
    frame = _own_frame(sys._current_frames().get(ident))
    return _line(frame) if frame is not None else ""


def is_loading(ident: int) -> bool:
    """Return whether a thread of this process is reading its next batch."""
    frame = sys._current_frames().get(ident)
    while frame is not None and not str(frame.f_globals.get("__name__")).startswith(_LOADERS):
        frame = frame.f_back
    return frame is not None


def warn(message: str) -> None:
    """Issue a UserWarning that shows the line of user code that is being run."""
    frame = _own_frame(sys._getframe())
    if frame is None:
        warnings.warn(message, UserWarning, stacklevel=2)
        return
    registry = frame.f_globals.setdefault("__warningregistry__", {})
    module, file = str(frame.f_globals.get("__name__")), frame.f_code.co_filename
    warnings.warn_explicit(message, UserWarning, file, frame.f_lineno, module=module, registry=registry)


def _line(frame: FrameType) -> str:
    return f"{frame.f_code.co_filename}:{frame.f_lineno}"


def _own_frame(frame: FrameType | None) -> FrameType | None:
    """Return the innermost frame of user code, from this one outwards."""
    while frame is not None and not is_own(frame):
        frame = frame.f_back
    return frame
