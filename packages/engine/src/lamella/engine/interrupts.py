"""Ctrl-C where it must not strike: between the start of a step and its books."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable
from types import FrameType, TracebackType
from typing import Any


class InterruptsHeld:
    """Holds SIGINT back inside; at the end the handler that was there gets it, which by default raises
    KeyboardInterrupt. On any other thread than the main one, where Python runs no handlers, it does nothing."""

    __slots__ = ("_came", "_handler")

    def __init__(self) -> None:
        self._came: tuple[int, FrameType | None] | None = None
        self._handler: Callable[[int, FrameType | None], Any] | None = None

    def __enter__(self) -> None:
        if threading.current_thread() is not threading.main_thread():
            return
        handler = signal.getsignal(signal.SIGINT)
        if callable(handler):  # neither ignored, nor fatal, nor set by something else than Python
            self._handler = handler
            signal.signal(signal.SIGINT, self._note)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._handler is None:
            return
        signal.signal(signal.SIGINT, self._handler)
        if self._came is not None:
            self._handler(*self._came)

    def _note(self, number: int, frame: FrameType | None) -> None:
        self._came = (number, frame)
