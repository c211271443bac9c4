"""The controller's process: the shipped coordinator and rollout controller, and a program that uses them."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

from chaos_processes import TOKEN, Process
from round_rules import FleetRounds

from windlass.config import ControlConfig, PhaseDeadlines, UpdateMode
from windlass.control.coordinator import Coordinator
from windlass.control.routes import mount_updates
from windlass.errors import PeerTimeout, RolloutError
from windlass.net.server import ControlServer
from windlass.planning.planner import plan_transfer
from windlass.rollout import mount_rollout_routes
from windlass.rollout.batches import BatchQueue
from windlass.rollout.controller import RolloutController
from windlass.rollout.handles import Rollout, RolloutConfig, RolloutGroup
from windlass.rollout.messages import OnAbort
from windlass.rollout.staleness import StalenessPolicy
from windlass.sampling import SamplingParams

if TYPE_CHECKING:
    from chaos_world import World

GROUP_SIZE = 2
MAX_STALENESS = 1
NUM_TOKENS = 6
ROLLOUT_DEADLINE_S = 300.0
DEADLINES = PhaseDeadlines(
    connect_s=4.0,
    prepare_s=3.0,
    pause_s=2.0,
    write_s=3.0,
    verify_s=2.0,
    apply_s=2.0,
    publish_s=2.0,
    fleet_s=6.0,
)
ROUND_BOUND_S = 3.0 + 3 * (3.0 + 2.0) + 3 * 2.0 + 2.0
"""Longest time of a round: every phase lasts until its deadline, and every rewrite is used."""
HEARTBEAT_S = 2.0


class ControllerProcess(Process):
    """The controller's process. Clear `producing` to submit no more rollouts."""

    def __init__(self, world: World) -> None:
        super().__init__(world, "controller")
        config = ControlConfig(
            mode=world.schedule.mode, deadlines=DEADLINES, heartbeat_s=HEARTBEAT_S
        )
        self.coordinator = Coordinator(
            config, journal_path=world.journal_path, planner=world.planner
        )
        self.server = ControlServer(host="127.0.0.1", port=world.port, token=TOKEN)
        self.rounds = FleetRounds(self.coordinator)
        mount_updates(self.coordinator, self.server)
        self.policy = StalenessPolicy(
            max_staleness=MAX_STALENESS,
            batch_size=2 * GROUP_SIZE,
            max_concurrent=4 * GROUP_SIZE,
            start_version=max(0, self.coordinator.fleet.published),
            max_resubmits=1000,
        )
        self.rollouts = RolloutController(
            self.coordinator,
            self.policy,
            token=TOKEN,
            config=RolloutConfig(
                # With RETRY, the age of an attempt's tokens is unknown until its answer arrives.
                on_abort=OnAbort.RETRY if world.schedule.seed % 3 == 1 else OnAbort.CONTINUE,
                max_attempts=1000,
                attempt_deadline_s=15.0,
                engine_grace_s=3.0,
                worker_lease_s=3.0,
                worker_grace_s=5.0,
            ),
        )
        mount_rollout_routes(self.server, self.rollouts, BatchQueue())
        self.producing = True
        self.ready = asyncio.Event()
        self.submitted: dict[int, tuple[int, ...]] = {}
        self.delivered: set[str] = set()
        self.last_update = self.coordinator.fleet.published
        self.round_began_s = -1.0
        self.trainers_were_there = False
        self._next_prompt = 0

    def start(self) -> None:
        self.host.spawn(self._run(), "controller")

    async def _run(self) -> None:
        await self.server.start()
        self.coordinator.on_update(self.world.on_update)
        await self.rollouts.__aenter__()
        self.ready.set()
        await asyncio.gather(self._produce(), self._consume())

    async def _produce(self) -> None:
        while self.producing:
            await self.rollouts.wait_for_room(deadline_s=3600.0)
            prompt = (1 + self._next_prompt % 500, self._next_prompt)
            self._next_prompt += 1
            sampling = SamplingParams(max_new_tokens=NUM_TOKENS)
            if self._next_prompt % 3 == 0:
                handle = self.rollouts.submit(prompt, sampling, metadata=prompt)
                handle.add_done_callback(self._single_done)
            else:
                group = self.rollouts.submit_group(prompt, GROUP_SIZE, sampling, metadata=prompt)
                self.submitted[group.group_id] = prompt
            await asyncio.sleep(0.05)

    def _single_done(self, done: asyncio.Future[Rollout]) -> None:
        if done.cancelled() or not self.host.alive:
            return
        if isinstance(done.exception(), RolloutError | PeerTimeout):
            self.world.violate(f"a rollout failed for good: {done.exception()}")
        else:
            self._check(done.result(), done.result().metadata)

    async def _consume(self) -> None:
        while True:
            try:
                for group in await self.rollouts.next_batch(1, deadline_s=5.0):
                    self._check_group(group)
            except PeerTimeout:
                continue

    def _check_group(self, group: RolloutGroup) -> None:
        prompt = self.submitted.pop(group.group_id, None)
        if prompt is None or len(group.rollouts) != GROUP_SIZE:
            self.world.violate(f"group {group.group_id} was handed out twice or in part")
            return
        for rollout in group.rollouts:
            self._check(rollout, prompt)

    def _check(self, rollout: Rollout, prompt: object) -> None:
        world = self.world
        if rollout.task_id in self.delivered:
            world.violate(f"rollout {rollout.task_id} was delivered twice")
        self.delivered.add(rollout.task_id)
        first, length = rollout.prompt_ids[0], len(rollout.prompt_ids)
        expected = tuple(first * 1000 + length + i for i in range(NUM_TOKENS))
        if rollout.output_ids != expected or rollout.prompt_ids != prompt:
            world.violate(f"rollout {rollout.task_id} has wrong tokens {rollout.output_ids}")
        for version in rollout.versions:
            if version not in world.durable():
                world.violate(f"rollout {rollout.task_id} has tokens of version {version}")
        if rollout.versions and self.policy.version - min(rollout.versions) > MAX_STALENESS:
            world.violate(
                f"rollout {rollout.task_id} was consumed at version {self.policy.version} "
                f"with tokens of {min(rollout.versions)}"
            )

    def kill(self) -> None:
        journal: Any = self.coordinator.run.journal
        # A dead process writes nothing to its journal.
        journal.close()
        super().kill()

    async def buried(self) -> None:
        await self.host.ended()
        await self.rollouts.close()
        await self.coordinator.close()
        await self.server.close()


__all__ = ["ControllerProcess", "UpdateMode", "plan_transfer"]
