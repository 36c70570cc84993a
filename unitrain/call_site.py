"""Finds the line of the user's script that made a call, and warns about it."""

from __future__ import annotations

import os
import sys
import warnings
from types import FrameType

_LIBRARIES = frozenset({"unitrain", "torch"})
_LOADERS = ("unitrain.data.", "torch.utils.data.dataloader")
_STANDARD_LIBRARY = os.path.dirname(os.__file__)


def is_user_code(frame: FrameType) -> bool:
    """Return whether a frame belongs to user code, and not to UniTrain, a backend, torch or Python itself.

    The recipes count as user code.
    """
    if frame.f_code.co_filename.startswith(_STANDARD_LIBRARY):
        return False
    module = str(frame.f_globals.get("__name__"))
    return module.split(".")[0] not in _LIBRARIES or module.startswith("unitrain.recipes.")


def current() -> str:
    """Return the line of user code that is being run, as ``file:line``."""
    return _line(_user_frame(sys._getframe())) or "the end of the script"


def of_thread(ident: int) -> str:
    """Return the line of user code that a thread of this process is running, or an empty string. From any thread.

    Args:
        ident: the thread's ``threading.get_ident()``.
    """
    return _line(_user_frame(sys._current_frames().get(ident)))


def is_loading(ident: int) -> bool:
    """Return whether a thread of this process is reading its next batch. From any thread.

    Args:
        ident: the thread's ``threading.get_ident()``.
    """
    # A snapshot: the thread runs on meanwhile.
    frame = sys._current_frames().get(ident)
    while frame is not None and not str(frame.f_globals.get("__name__")).startswith(_LOADERS):
        frame = frame.f_back
    return frame is not None


def warn(message: str) -> None:
    """Issue a UserWarning that shows the line of user code that is being run.

    A level of the stack would not do: the number of frames in between differs.
    """
    frame = _user_frame(sys._getframe())
    if frame is None:
        warnings.warn(message, UserWarning, stacklevel=2)
        return
    # Python's own registry of the module, by which a line warns once.
    registry = frame.f_globals.setdefault("__warningregistry__", {})
    module, file = str(frame.f_globals.get("__name__")), frame.f_code.co_filename
    warnings.warn_explicit(message, UserWarning, file, frame.f_lineno, module=module, registry=registry)


def _line(frame: FrameType | None) -> str:
    """Return a frame's place as ``file:line``; an empty string without a frame."""
    return f"{frame.f_code.co_filename}:{frame.f_lineno}" if frame is not None else ""


def _user_frame(frame: FrameType | None) -> FrameType | None:
    """Return the innermost frame of user code, from this one outwards."""
    while frame is not None and not is_user_code(frame):
        frame = frame.f_back
    return frame
