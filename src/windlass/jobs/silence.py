"""Detection of engines and rollout workers that run and do not answer, for example after SIGSTOP."""

from __future__ import annotations

import asyncio
import logging
from http import HTTPStatus
from typing import final

import aiohttp

from windlass.control.engine_state import EngineStatus
from windlass.controller import Controller
from windlass.engines.private_routes import ALIVE_PATH
from windlass.errors import PeerUnreachable
from windlass.net.access import Access, role_token
from windlass.net.sockets import connection_error, open_http

_log = logging.getLogger(__name__)

NUM_BEATS = 4
"""Number of requests and checks within `max_silence_s`."""


@final
class SilenceWatch:
    """Watch over the engines and rollout workers of a job.

    A worker answers while it is connected. An engine answers while all its ranks are connected and answer commands, and
    its HTTP server answers `ALIVE_PATH`. A process that hangs loses its connection, because it does not answer the
    controller's pings (`update.heartbeat_s`, `rollout.worker_lease_s`). vLLM's EngineCore may have no connection to the
    controller; if it hangs, the server does not answer `ALIVE_PATH`.

    Args:
        controller: controller of the job.
        token: secret of the job.
        start_deadline_s: seconds that a process has to connect.
        max_silence_s: longest time in seconds that a connected process may not answer.
    """

    def __init__(
        self, controller: Controller, token: str, *, start_deadline_s: float, max_silence_s: float
    ) -> None:
        self._controller, self._token = controller, token
        self._start_deadline_s, self._max_silence_s = start_deadline_s, max_silence_s
        self._beat_s = max_silence_s / NUM_BEATS

    async def until_silent(self, name: str, role: Access) -> str:
        """Wait until the engine or worker `name` has been silent for longer than a limit; return a text with the reason.

        The caller has just started the process. The limit is `start_deadline_s` until the process has connected to the
        controller, and `max_silence_s` from then on.
        """
        clock = asyncio.get_running_loop().time
        answered_at, limit_s, what = clock(), self._start_deadline_s, "start_deadline_s"
        has_served = is_noted = False
        async with open_http(role_token(self._token, Access.CLIENT), to_controller=False) as http:
            while True:
                beat_at = clock()
                fault, is_in_update = self._fault(name, role), False
                if not fault:
                    limit_s, what = self._max_silence_s, "max_silence_s"
                    is_in_update = self._controller.coordinator.in_round
                    fault = await self._ask(http, name)
                    is_in_update |= self._controller.coordinator.in_round
                    has_served |= not fault
                    # This host may have no network route to the server: only workers need one. So ignore faults until the
                    # server has answered this host once.
                    fault = fault if has_served else ""
                if fault and is_in_update:
                    # The update may block the engine, and each phase of the update has a deadline. So do not count
                    # the time of this request.
                    answered_at += clock() - beat_at
                elif not fault:
                    if is_noted:
                        _log.warning("%s answers again", name)
                    answered_at, is_noted = beat_at, False
                elif clock() - answered_at >= limit_s:
                    return f"{name} did not answer within {what}={limit_s:g}: {fault}"
                elif what == "max_silence_s" and not is_noted:
                    is_noted = True
                    _log.warning(
                        "%s does not answer: %s; the job starts it again after max_silence_s=%g",
                        *(name, fault, limit_s),
                    )
                await asyncio.sleep(max(beat_at + self._beat_s - clock(), 0.0))

    def _fault(self, name: str, role: Access) -> str:
        """Return why the process `name` counts as silent, according to the controller's connections.

        The text is empty if a worker is connected, or if all ranks of an engine are connected and answer.
        """
        if role is Access.WORKER:
            return "" if self._controller.rollouts.has_worker(name) else "it is not connected"
        group = self._controller.coordinator.fleet.group_of(name)
        if group is None:
            return "it is not connected"
        if not group.complete:
            return f"{len(group.agents)} of {group.world_size} ranks are connected"
        return group.reason if group.status is EngineStatus.SILENT else ""

    async def _ask(self, http: aiohttp.ClientSession, name: str) -> str:
        """Return why the HTTP server of the engine `name` does not answer; empty if it answers.

        A status below 500 counts as an answer, because a plugin's engine need not have the route `ALIVE_PATH`. The text
        is also empty for a worker and for an engine without a server.
        """
        group = self._controller.coordinator.fleet.group_of(name)
        if group is None or not group.url:
            return ""
        url = f"{group.url}{ALIVE_PATH}"
        try:
            limit = aiohttp.ClientTimeout(total=self._beat_s)
            async with http.get(url, timeout=limit) as answer:
                is_fault = answer.status >= HTTPStatus.INTERNAL_SERVER_ERROR
                return f"GET {url}: status {answer.status}" if is_fault else ""
        except PeerUnreachable:
            # The session refuses to follow a redirect. A redirect is an answer too.
            return ""
        except TimeoutError:
            return f"GET {url}: no answer within {self._beat_s:g} s"
        except (aiohttp.ClientError, OSError) as error:
            return f"GET {url}: {connection_error(error)}"
