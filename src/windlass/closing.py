"""Objects that are closed at the end of a `with` block."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Self


class Closing(ABC):
    """Base class for objects that are closed at the end of a `with` block."""

    @abstractmethod
    def close(self) -> None:
        """Stop this object's work and free its resources. Idempotent."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
