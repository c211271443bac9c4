"""A 128-bit digest of GPU memory, which thousands of threads can compute in any order.

Each unit of the payload is mixed with its position, and the results are added. The sum depends
neither on the cuts of the payload nor on the order of its parts. It changes if a unit changes,
moves or is missing. For a given position the mixing is a bijection of 64-bit values, so one
changed unit always changes the digest. Digests of two unrelated payloads are equal with a
probability of about 2^-64 at worst. The digest finds errors; it gives no
protection against an attacker.

This is the plain implementation; `memory/cuda/put.cu` is bit-identical.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

__all__ = ["PositionDigest"]

UInt64Array = npt.NDArray[np.uint64]
_MASK = (1 << 64) - 1


class PositionDigest:
    """Digest of the rows of a payload."""

    def __init__(self) -> None:
        self._a = 0
        self._b = 0

    def add_row(self, row: npt.NDArray[np.uint8], position: int) -> None:
        """Add one row.

        Args:
            row: (n,) uint8, contiguous. Its length decides the unit (8, 4, 2 or 1 bytes), so both
                ends must cut a payload into rows of the same lengths.
            position: place of its first byte in the payload.
        """
        unit = 8 if len(row) % 8 == 0 else 4 if len(row) % 4 == 0 else 2 if len(row) % 2 == 0 else 1
        values = row.view(f"<u{unit}").astype(np.uint64)
        positions = np.uint64(position) + np.arange(len(values), dtype=np.uint64) * np.uint64(unit)
        with np.errstate(over="ignore"):
            x = values ^ (positions * np.uint64(0x9E3779B97F4A7C15))
            x ^= x >> np.uint64(32)
            x *= np.uint64(0xD6E8FEB86659FD93)
            x ^= x >> np.uint64(29)
            self._a += int(x.sum()) * 0xA0761D6478BD642F
            x ^= x >> np.uint64(31)
            self._b += int(x.sum()) * 0xE7037ED1A0B428DB

    def words(self) -> tuple[int, int]:
        """Return the two words of the digest."""
        return self._a & _MASK, self._b & _MASK

    def hexdigest(self) -> str:
        """Return 32 hexadecimal digits."""
        a, b = self.words()
        return f"{a:016x}{b:016x}"
