"""Live view on a terminal, redrawn periodically, below the lines that the process logs and prints."""

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


def plain_console(*, stderr: bool = False) -> Console:
    """Return a console that prints text as it is: paths and names are neither coloured nor read as markup or emoji."""
    return Console(stderr=stderr, markup=False, highlight=False, emoji=False)


@final
class LiveView:
    """Context manager that shows a live view on a terminal. It does nothing if `can_draw` is false.

    If other code printed a line over the view, both would become unreadable. Inside the `with` block, `sys.stdout` and
    `sys.stderr`, if they are terminals, are therefore replaced by streams that print above the view. Log lines use
    these streams too, because the handler of `configure_logging` looks up `sys.stderr` for every line.

    Args:
        console: the terminal.
        draw: function that returns the current content. A thread calls it several times a second inside the block.
        is_transient: whether the view is erased at the end of the block.
        fills_screen: whether the view covers the whole terminal until the end of the block.
        is_wanted: False to draw nothing.

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
        # Held while a frame or a line is printed. rich's own lock does not suffice: rich writes after releasing it.
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
        # A console without a file looks up `sys.stdout` at each use. Keep the real stream before the loop
        # below replaces `sys.stdout`.
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
        """Draw the current content at once, before the next periodic redraw."""
        with self._lock:
            if self._live is not None:
                self._live.refresh()

    def _draw_on(self) -> None:
        """Redraw until the block ends, because the view shows durations."""
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
    """Text stream that prints whole lines above a view. After `end`, it writes directly to `stream`.

    Each thread has its own line buffer. If a line has carriage returns (progress bars), only the text after the last one
    is printed.
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
        """Flush `stream`, but keep the unfinished line, which would overlap the view."""
        self.stream.flush()

    def end(self) -> None:
        """Print unfinished lines. Later writes go directly to `stream`."""
        show, self._show = self._show, None
        for line in self._begun.values():
            if show is not None:
                show(self._decoder.decode_line(line))
        self._begun.clear()

    def __getattr__(self, name: str) -> Any:
        return getattr(self.stream, name)


def can_draw(console: Console) -> bool:
    """Return whether a live view can be drawn.

    The console must be a terminal, and neither stdout nor stderr may be a pipe or a socket.
    """
    # If FORCE_COLOR is set, rich treats even a file as a terminal.
    has_cursor = console.is_interactive and console.file.isatty()
    # The reader of a pipe may print to this terminal (`| tee log`) and so damage the view.
    return has_cursor and not any(_is_pipe(stream) for stream in (sys.stdout, sys.stderr))


def _is_pipe(stream: TextIO) -> bool:
    try:
        mode = os.fstat(stream.fileno()).st_mode
    # The stream has no file descriptor.
    except (OSError, ValueError):
        return False
    return stat.S_ISFIFO(mode) or stat.S_ISSOCK(mode)
