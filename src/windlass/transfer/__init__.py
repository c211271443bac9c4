"""Execution of plans, and the registered memory that it uses.

A plan says which source writes which bytes to which destination. A link is the part of a plan from one source to one
destination. It consists of ops: each op moves one box of elements. A link's payload is the bytes of its ops, in plan order.
A write or kernel is late if it did not end by its deadline, so that it may still run.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from windlass.lazy import public

if TYPE_CHECKING:
    from windlass.transfer.arena import Arena as Arena

# At run time only: a type checker must still report names that do not exist.
if not TYPE_CHECKING:
    __all__, __getattr__, __dir__ = public(__name__)
