"""Controller: one process, one HTTP address, for weight updates and rollouts.

async with windlass.Controller(token=token) as controller:
    await controller.wait_for_fleet(num_trainers=2, engines=("engine-a",), deadline_s=60)
    group = controller.rollouts.submit_group(prompt_ids, 8, sampling)
    ...
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any, final

from windlass.config import ControlConfig
from windlass.control.coordinator import Coordinator
from windlass.control.report import RoundOutcome, UpdateReport
from windlass.control.routes import mount_updates
from windlass.errors import ConfigError
from windlass.net.server import ControlServer
from windlass.observability.operations import Operations
from windlass.rollout.batches import BatchQueue
from windlass.rollout.controller import RolloutController, mount_rollout_routes
from windlass.rollout.handles import RolloutConfig
from windlass.rollout.messages import TrainingSample
from windlass.rollout.routers import RouterUpdates
from windlass.rollout.staleness import StalenessPolicy
from windlass.rollout.workflows import Workflow

DEFAULT_CONCURRENCY = 256


@final
class Controller:
    """The coordinator of weight updates and the rollout controller behind one server.

    The two share the address and the token, and nothing else: a long update never delays a
    completion. Use it from the asyncio loop that entered it.

    Args:
        token: shared secret that every trainer, engine and worker presents.
        host: address to bind. port: 0 lets the system choose; `url` says what it chose.
        advertise_host: what others connect to; empty for `host`, needed where that is `0.0.0.0`.
        config: update mode, deadlines and retries.
        staleness: how old a trained answer may be, and how many run at once; only concurrency
            is limited when omitted.
        journal_path: where rounds are recorded, so that a restarted controller goes on.
        rollout_config: limits of rollouts, and the journal of outstanding ones.

    Raises:
        ConfigError: the port is in use, or an argument is out of range.
    """

    def __init__(
        self,
        *,
        token: str,
        host: str = "127.0.0.1",
        port: int = 0,
        advertise_host: str = "",
        config: ControlConfig | None = None,
        staleness: StalenessPolicy | None = None,
        journal_path: Path | None = None,
        rollout_config: RolloutConfig | None = None,
    ) -> None:
        for what, given, kind in (
            ("config", config, ControlConfig),
            ("staleness", staleness, StalenessPolicy),
            ("rollout_config", rollout_config, RolloutConfig),
        ):
            if given is not None and not isinstance(given, kind):
                raise ConfigError(f"Controller: {what} must be {kind.__name__}, got {given!r}")
        self._has_port, self._token = port != 0, token
        self._server = ControlServer(
            host=host, port=port, advertise_host=advertise_host, token=token
        )
        config = config or ControlConfig()
        self.coordinator = Coordinator(config, journal_path=journal_path)
        self.batches = BatchQueue(lambda: self.coordinator.fleet.num_trainer_ranks)
        self.coordinator.on_update(self._note_update)
        self.coordinator.catch_ups.stands_still_if(lambda: self.batches.all_wait)
        self.batches.on_wait(self.coordinator.catch_ups.serve_again)
        policy = staleness or StalenessPolicy.unbounded(DEFAULT_CONCURRENCY)
        self.rollouts = RolloutController(
            self.coordinator, policy, token=token, config=rollout_config
        )
        self._routers = RouterUpdates(self.coordinator, config.routers)
        self._operations = Operations(self.coordinator, self.rollouts, self.batches)

    @property
    def url(self) -> str:
        """The address that trainers, engines and workers are given.

        Raises:
            ConfigError: the system has not chosen the port yet: the controller is not entered.
        """
        if not self._has_port:
            raise ConfigError(
                "Controller: url is not known before the controller is entered, port=0"
            )
        return self._server.url

    @property
    def server(self) -> ControlServer:
        """For routes of others, `TrainController.mount` for one; before the controller is entered."""
        return self._server

    @property
    def phase(self) -> str:
        """What the fleet does now: a phase of an update, or binding; empty for neither."""
        return self._operations.phase

    @asynccontextmanager
    async def evaluation(
        self, workflows: Mapping[str, Workflow] | None = None, *, max_concurrent: int = 64
    ) -> AsyncIterator[RolloutController]:
        """Give a second rollout controller on the same engines, whose rollouts count towards no bound of training.

        Used as `async with controller.evaluation() as evaluation`, with `evaluation.submit` and `evaluation.wait`
        inside. It runs plain prompts, and `workflows`, in this event loop.

        Args:
            workflows: user code by name.
            max_concurrent: rollouts that run at a time.
        """
        policy = StalenessPolicy.unbounded(max_concurrent)
        async with RolloutController(self.coordinator, policy, token=self._token) as evaluation:
            evaluation.run_here(workflows or {}, max_concurrent=max_concurrent)
            yield evaluation

    def observe_samples(self, samples: Sequence[TrainingSample]) -> None:
        """Count the staleness of samples that go to trainers by another way than `batches`."""
        self._operations.observe_samples(samples)

    def overview(self) -> dict[str, Any]:
        """What `/v1/overview` answers and the page shows: fleet, updates, rollouts, history. In the loop."""
        return self._operations.overview()

    def _note_update(self, report: UpdateReport) -> None:
        if report.outcome is RoundOutcome.PUBLISHED:
            self.batches.published()

    async def wait_for_fleet(
        self, *, num_trainers: int, engines: Sequence[str], deadline_s: float
    ) -> None:
        """Return once all trainer ranks and all ranks of the named engines are connected.

        Raises:
            ConfigError: `engines` is one name.
            EngineRefused: one of them was refused, or could not join; quotes the reason, at once.
            PeerTimeout: names who is missing after `deadline_s`.
        """
        _check_names("wait_for_fleet", engines)
        await self.coordinator.members.wait_for_fleet(
            num_trainers=num_trainers, engines=engines, deadline_s=deadline_s
        )

    async def wait_for_version(
        self, version: int, *, engines: Sequence[str] = (), deadline_s: float
    ) -> None:
        """Return once `version` or a later one is published.

        Args:
            version: see `TrainerClient.publish`.
            engines: names of those that must serve what is published, too: one that was left out
                of an update is brought up afterwards.
            deadline_s: of the wait.

        Raises:
            ConfigError: `engines` is one name.
            EngineRefused: as `wait_for_fleet`.
            PeerTimeout: not within `deadline_s`; says who is behind.
        """
        _check_names("wait_for_version", engines)
        await self.coordinator.members.wait_for_version(
            version, engines=engines, deadline_s=deadline_s
        )

    async def __aenter__(self) -> Controller:
        mount_rollout_routes(self._server, self.rollouts, self.batches)
        mount_updates(self.coordinator, self._server)
        self._operations.mount(self._server)
        async with AsyncExitStack() as undo:
            undo.push_async_callback(self.coordinator.close)
            # Whoever is let in must find what an earlier process has left.
            undo.push_async_callback(self.rollouts.close)
            await self.rollouts.__aenter__()
            await self._server.start()
            self._routers.start()
            self._has_port = True
            undo.pop_all()
        return self

    async def __aexit__(self, *_: object) -> None:
        async with AsyncExitStack() as closing:  # from the last to the first, whatever one raises
            closing.push_async_callback(self._server.close)
            closing.push_async_callback(self.coordinator.close)
            closing.push_async_callback(self.rollouts.close)
            closing.callback(self._operations.close)
            closing.push_async_callback(self._routers.close)
            await self._server.stop_listening()


def _check_names(call: str, engines: Sequence[str]) -> None:
    if isinstance(engines, str):  # every letter of it would be an engine
        raise ConfigError(f"{call}: engines must be a sequence of names, got {engines!r}")
