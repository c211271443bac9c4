"""A view that is drawn again and again on a terminal, with what the process logs and prints above it."""

from __future__ import annotations

import os
import stat
import sys
import threading
from collections.abc import Callable
from types import TracebackType
from typing import Any, Self, TextIO, final

from rich.ansi import AnsiDecoder
from rich.console import Console, RenderableType
from rich.live import Live
from rich.text import Text

DRAWN_EVERY_S = 0.25


@final
class LiveView:
    """The one writer of a terminal while a view is shown; nothing at all where no view can be drawn.

    A line that reaches the terminal past the view leaves an old frame behind and loses words. Inside the `with`
    block `sys.stdout` and `sys.stderr` therefore write above the view, and so does the log, whose handler
    (`configure_logging`) looks `sys.stderr` up for every line. One lock is held for each frame and each line:
    rich computes where to draw under its own lock, but writes outside of it.

    Args:
        console: the terminal.
        draw: returns what is shown now; a thread calls it several times a second, inside the block alone.
        is_transient: the end of the block erases the view.
        fills_screen: the view has the whole terminal, which shows again afterwards what it showed before.
        is_wanted: false draws nothing.

    Attributes:
        is_drawn: whether the block shows a view.
    """

    def __init__(
        self,
        console: Console,
        draw: Callable[[], RenderableType],
        *,
        is_transient: bool = False,
        fills_screen: bool = False,
        is_wanted: bool = True,
    ) -> None:
        self._console, self._draw = console, draw
        self._is_transient, self._fills_screen = is_transient, fills_screen
        self.is_drawn = is_wanted and can_draw(console)
        self._lock, self._ended = threading.RLock(), threading.Event()
        self._live: Live | None = None
        self._clock: threading.Thread | None = None
        self._above: list[_Above] = []

    def __enter__(self) -> Self:
        if not self.is_drawn:
            return self
        self._live = Live(
            console=self._console,
            get_renderable=self._draw,
            transient=self._is_transient,
            screen=self._fills_screen,
            auto_refresh=False,
            redirect_stdout=False,
            redirect_stderr=False,
        )
        # Found before `sys.stdout` and `sys.stderr` are replaced, which the console would look up.
        self._console.file = self._console.file
        self._live.start()
        for name in ("stdout", "stderr"):
            stream: TextIO = getattr(sys, name)
            if stream.isatty():
                above = _Above(stream, self._print)
                self._above.append(above)
                setattr(sys, name, above)
        self._clock = threading.Thread(target=self._draw_on, name="live view", daemon=True)
        self._clock.start()
        return self

    def refresh(self) -> None:
        """Draw now."""
        with self._lock:
            if self._live is not None:
                self._live.refresh()

    def _draw_on(self) -> None:
        """Draw until the block ends: the time that something takes goes on."""
        while not self._ended.wait(DRAWN_EVERY_S):
            self.refresh()

    def _print(self, line: Text) -> None:
        with self._lock:
            self._console.print(line)

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._ended.set()
        if self._clock is not None:
            self._clock.join()
        with self._lock:
            for above in self._above:
                above.end()
                for name in ("stdout", "stderr"):
                    if getattr(sys, name) is above:
                        setattr(sys, name, above.stream)
            if self._live is not None:
                self._live.stop()
            self._live = None


@final
class _Above:
    """A stream of text that prints whole lines above a view, and is `stream` in all else and once the view has ended.

    A line is collected for each thread, and up to its last carriage return it is replaced by what follows.
    """

    def __init__(self, stream: TextIO, show: Callable[[Text], object]) -> None:
        self.stream = stream
        self._show: Callable[[Text], object] | None = show
        self._decoder = AnsiDecoder()
        self._begun: dict[int, str] = {}

    def write(self, text: str) -> int:
        if self._show is None:
            return self.stream.write(text)
        thread = threading.get_ident()
        *lines, rest = (self._begun.pop(thread, "") + text).split("\n")
        if rest:
            self._begun[thread] = rest
        for line in lines:
            newest = line.rstrip("\r").rpartition("\r")[2]
            self._show(self._decoder.decode_line(newest))
        return len(text)

    def writelines(self, lines: list[str]) -> None:
        for line in lines:
            self.write(line)

    def flush(self) -> None:
        """Write nothing of a line that has not ended: the view would stand on it."""
        self.stream.flush()

    def end(self) -> None:
        """Print what was begun, and write to the stream from now on."""
        show, self._show = self._show, None
        for line in self._begun.values():
            if show is not None:
                show(self._decoder.decode_line(line))
        self._begun.clear()

    def __getattr__(self, name: str) -> Any:
        return getattr(self.stream, name)


def can_draw(console: Console) -> bool:
    """Return whether a view on this console stays whole.

    It needs a terminal with a cursor that moves. Colours that are asked for (FORCE_COLOR) make no terminal of a
    file. A pipe may end in the same terminal (`| tee log`), where its lines would damage the view.
    """
    has_cursor = console.is_interactive and console.file.isatty()
    return has_cursor and not any(_is_pipe(stream) for stream in (sys.stdout, sys.stderr))


def _is_pipe(stream: TextIO) -> bool:
    try:
        mode = os.fstat(stream.fileno()).st_mode
    except (OSError, ValueError):  # a stream of no file
        return False
    return stat.S_ISFIFO(mode) or stat.S_ISSOCK(mode)
