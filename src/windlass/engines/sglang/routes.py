"""SGLang's own routes to pause it, have it go on, and stamp what it generates."""

from __future__ import annotations

from windlass.config import PauseMode
from windlass.engines.http import post

__all__ = ["SglangRoutes"]


class SglangRoutes:
    """Of one server. Every method raises what `windlass.engines.http.post` raises.

    Args:
        url: of the server.
    """

    def __init__(self, url: str) -> None:
        self.url = url

    def pause_generation(self, mode: PauseMode, deadline_s: float) -> None:
        """Stop admission and treat running requests as `mode` says, whose names are SGLang's own."""
        post(self.url, "/pause_generation", {"mode": str(mode)}, deadline_s)

    def flush_cache(self, deadline_s: float, wait_s: float = 0.0) -> None:
        """Empty the caches; refused while requests are there, for whose end it waits `wait_s`."""
        waits = f"?timeout={wait_s}" if wait_s else ""
        post(self.url, f"/flush_cache{waits}", {}, deadline_s)

    def resume(self, deadline_s: float) -> None:
        """Go on generating."""
        post(self.url, "/continue_generation", {}, deadline_s)

    def set_version(self, version: int, deadline_s: float) -> None:
        """Stamp what is generated from now on; running requests are not aborted."""
        body = {"new_version": str(version), "abort_all_requests": False}
        post(self.url, "/update_weight_version", body, deadline_s)
