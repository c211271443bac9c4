"""How long the stages of a capture take."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import final

import torch


@final
class Stages:
    """Adds up times.

    Attributes:
        seconds: by stage, in the order in which they first began.
    """

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}

    @contextmanager
    def within(self, name: str) -> Iterator[None]:
        """Within it the stage goes on; what it has queued on a GPU counts, and is waited for."""
        begun = time.perf_counter()
        self.seconds.setdefault(name, 0.0)
        try:
            yield
        finally:
            if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
                torch.cuda.synchronize()
            self.seconds[name] += time.perf_counter() - begun
