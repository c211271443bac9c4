"""Controller: weight updates and rollouts in one process, behind one HTTP address.

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

from windlass.config import ControlConfig, PauseMode
from windlass.control.coordinator import Coordinator
from windlass.control.report import RoundOutcome, UpdateReport
from windlass.control.routes import mount_updates
from windlass.control.turns import sleep_engines
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
    """Coordinator of weight updates and controller of rollouts, with one HTTP server.

    Enter the controller with `async with`, and use it only in the event loop that entered it. A long update does not
    delay the results of rollouts.

    Args:
        token: shared secret that every trainer, engine and worker sends.
        host: address to bind.
        port: port to bind. With 0, the system chooses a port; see `url`.
        advertise_host: host to which trainers, engines and workers connect; empty for `host`. Required if `host`
            is `0.0.0.0`.
        config: settings for updates.
        staleness: maximum staleness of trained samples, and maximum number of concurrent rollouts. If omitted,
            staleness is unlimited and `DEFAULT_CONCURRENCY` rollouts run at once.
        journal_path: file that records rounds, so that a restarted controller knows the published version.
        rollout_config: limits of rollouts, and the journal of outstanding rollouts.
        tensor_transport: name or JSON of the transport for large tensors of samples that are made in this process.

    Raises:
        ConfigError: an argument is out of range, or the journal of the rounds cannot be used. At the beginning of the
            `async with` block: the port is in use, or the journal of the rollouts cannot be used.
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
        tensor_transport: str = "auto",
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
        self.batches = BatchQueue(
            lambda: self.coordinator.fleet.num_trainer_ranks, transport=tensor_transport
        )
        self.coordinator.on_update(self._note_update)
        self.coordinator.catch_ups.add_standstill_check(lambda: self.batches.all_wait)
        self.batches.on_wait(self.coordinator.catch_ups.serve_again)
        policy = staleness or StalenessPolicy.unbounded(DEFAULT_CONCURRENCY)
        self.rollouts = RolloutController(
            self.coordinator, policy, token=token, config=rollout_config
        )
        self._routers = RouterUpdates(self.coordinator, config.routers)
        self._operations = Operations(self.coordinator, self.rollouts, self.batches)

    @property
    def url(self) -> str:
        """URL to which trainers, engines and workers connect.

        Raises:
            ConfigError: `port` is 0, and the controller's `async with` block has not begun, so there is no port yet.
        """
        if not self._has_port:
            raise ConfigError(
                "Controller: url is not known before `async with` begins, because port=0 takes a free port then"
            )
        return self._server.url

    @property
    def server(self) -> ControlServer:
        """HTTP server of the controller. Routes are added before its `async with` block, as by `TrainController.mount`."""
        return self._server

    @property
    def phase(self) -> str:
        """Text with the current phase of an update, or of a binding; empty if no update and no binding runs."""
        return self._operations.phase

    @asynccontextmanager
    async def evaluation(
        self,
        workflows: Mapping[str, Workflow] | None = None,
        *,
        max_concurrent: int = 64,
        tokenizer: str = "",
    ) -> AsyncIterator[RolloutController]:
        """Yield a rollout controller for evaluation on the same engines. Its rollouts run in this event loop.

        Call it as `async with controller.evaluation() as evaluation`, and call `evaluation.submit` and
        `evaluation.wait` inside the block. The controller's own `staleness` does not limit these rollouts.

        Args:
            workflows: name -> workflow (user code).
            max_concurrent: maximum number of concurrent rollouts.
            tokenizer: folder of the model's tokenizer, for prompts of text and messages; empty for none.

        Raises:
            ConfigError: see `RolloutController.run_here`.
        """
        policy = StalenessPolicy.unbounded(max_concurrent)
        async with RolloutController(self.coordinator, policy, token=self._token) as evaluation:
            evaluation.run_here(workflows or {}, max_concurrent=max_concurrent, tokenizer=tokenizer)
            yield evaluation

    def observe_samples(self, samples: Sequence[TrainingSample]) -> None:
        """Count the staleness of samples, for metrics. Call this for samples that trainers do not get from `batches`."""
        self._operations.observe_samples(samples)

    def overview(self) -> dict[str, Any]:
        """Return the content of `/v1/overview`: fleet, updates, rollouts, history. Call this in the event loop."""
        return self._operations.overview()

    def _note_update(self, report: UpdateReport) -> None:
        if report.outcome is RoundOutcome.PUBLISHED:
            self.batches.published()

    async def wait_for_fleet(
        self, *, num_trainers: int, engines: Sequence[str], deadline_s: float
    ) -> None:
        """Wait until all trainer ranks and all ranks of the named engines are connected.

        Args:
            num_trainers: number of trainer ranks.
            engines: names of the engines.
            deadline_s: seconds to wait.

        Raises:
            ConfigError: `engines` is a string.
            EngineRefused: a named engine was refused or could not join; the message has the reason. This error is
                raised at once.
            PeerTimeout: a rank is not connected after `deadline_s`; the message names the missing ranks.
        """
        _check_names("wait_for_fleet", engines)
        await self.coordinator.members.wait_for_fleet(
            num_trainers=num_trainers, engines=engines, deadline_s=deadline_s
        )

    async def sleep_engines(
        self, mode: PauseMode = PauseMode.RETRACT, *, deadline_s: float = 30.0
    ) -> None:
        """Make every engine free its weights and caches, so that trainers on the same device can step.

        The next update wakes the engines and fills them. Until then they serve nothing, and requests wait. Engines must
        use the transport `pull` (the embedded engine may also use `cma`). Call this between two updates.

        Args:
            mode: treatment of running requests, ABORT or RETRACT.
            deadline_s: seconds within which the engines must sleep.

        Raises:
            ConfigError: `mode` is IN_PLACE.
            RoundAborted: an engine did not sleep; the message has the reason.
        """
        coordinator = self.coordinator
        await sleep_engines(
            coordinator.run, coordinator.members, coordinator.rounds.lock, mode, deadline_s
        )

    async def wait_for_version(
        self, version: int, *, engines: Sequence[str] = (), deadline_s: float
    ) -> None:
        """Wait until `version` or a later version is published.

        Args:
            version: number of the version, as trainers pass it to `TrainerClient.publish`.
            engines: names of engines that must also serve the published version. If an update left out such an engine,
                wait until the controller has brought it up to the published version: by the next update, or by a copy
                from another engine (a catch-up).
            deadline_s: seconds to wait.

        Raises:
            ConfigError: `engines` is a string.
            EngineRefused: a named engine was refused or could not join, or no engine can receive updates; the message has
                the reason. This error is raised at once.
            PeerTimeout: after `deadline_s`, the version is not published, or some of the named engines do not serve the
                published version. The message names the engines that do not serve it.
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
            # Recover rollouts of an earlier process first: workers report results as soon as the server starts.
            undo.push_async_callback(self.rollouts.close)
            await self.rollouts.__aenter__()
            await self._server.start()
            self._routers.start()
            self._has_port = True
            undo.pop_all()
        return self

    async def __aexit__(self, *_: object) -> None:
        # The stack runs the callbacks in reverse order, and continues if a callback raises.
        async with AsyncExitStack() as closing:
            closing.callback(self.batches.close)
            closing.push_async_callback(self._server.close)
            closing.push_async_callback(self.coordinator.close)
            closing.push_async_callback(self.rollouts.close)
            closing.callback(self._operations.close)
            closing.push_async_callback(self._routers.close)
            await self._server.stop_listening()


def _check_names(call: str, engines: Sequence[str]) -> None:
    # A string is a sequence too, but each letter would count as the name of an engine.
    if isinstance(engines, str):
        raise ConfigError(f"{call}: engines must be a sequence of names, got {engines!r}")
