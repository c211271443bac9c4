"""Scheduler of processes in Ray placement groups.

Windlass uses Ray only to place and launch processes. A reservation is a placement group with one bundle and one
launcher actor per node; Ray grants the whole placement group or nothing. Each process is a subprocess of a launcher, so
that colocated processes share cores and GPUs. If this process dies, Ray ends the launchers, and each launcher ends its
subprocesses. Ray deserialises with pickle, so every client of the cluster can run code on the cluster.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable
from pathlib import Path
from typing import Any, final

import msgspec

from windlass.envs import inherited_environment, set_defaults
from windlass.errors import ConfigError, PeerTimeout, PeerUnreachable, TransportUnavailable
from windlass.jobs.schedulers.base import (
    ClusterBackend,
    ProcessSpec,
    SchedulerConfig,
    first_node,
)
from windlass.jobs.schedulers.local import LocalBackend
from windlass.net.addresses import is_loopback
from windlass.wording import install_command

MAX_CALLS = 1000
"""Largest number of concurrent calls of one launcher actor. Each running process needs one call, which waits for its end."""
CALL_DEADLINE_S = 60.0
"""Longest time of a call that does not wait for a process."""
START_TRIES = 3
"""Number of tries to start a cluster on this host. Ray waits at most 30 s until its node has started. A busy host may need
longer."""
NICENESS = "RAY_worker_niceness"
"""Ray's variable for the niceness of launcher actors, which their processes inherit."""


class RaySchedulerConfig(SchedulerConfig, frozen=True, tag="ray"):
    """Configuration of a Ray cluster.

    Attributes:
        address: address of a running cluster; empty starts a cluster on this host that ends with the scheduler.
        num_cpus: number of cores of a cluster started on this host; omitted for all cores.
    """

    address: str = ""
    num_cpus: int | None = None

    @property
    def is_one_host(self) -> bool:
        """Whether the scheduler starts a cluster on this host, because no address is given."""
        return not self.address

    @property
    def crosses_hosts(self) -> bool:
        """Whether the scheduler uses an existing cluster, and its address is not a loopback address."""
        return bool(self.address) and not is_loopback(
            self.address.rpartition(":")[0] or self.address
        )

    def make_backend(self, log_dir: Path) -> ClusterBackend:  # noqa: ARG002
        """Return the backend of the Ray cluster. Logs stay on the cluster's nodes."""
        return RayBackend(self)


@final
class RayBackend(ClusterBackend):
    """Backend of a Ray cluster. The id of a reservation is the id of a placement group."""

    queues = True

    def __init__(self, config: RaySchedulerConfig) -> None:
        self._config = config
        # Ray's handles have no static types.
        self._groups: dict[str, Any] = {}
        self._launchers: dict[str, list[Any]] = {}
        self._launcher_of: dict[str, Any] = {}
        self._opened = False

    async def open(self) -> None:
        """Connect to the cluster or start one on this host. For the errors, see `ClusterBackend.open`.

        Remove the tokens from the environment of this process. If this method starts a cluster, it sets the
        variable `NICENESS`, unless the variable is set already.
        """
        try:
            import ray
        except ImportError as error:
            raise TransportUnavailable(f"ray: not installed; {install_command('ray')}") from error
        # This call removes the tokens from the environment. Otherwise, Ray's own processes would inherit the tokens.
        inherited_environment()
        address = self._config.address
        if not address:
            # Ray's default is niceness 15. On a busy host, ranks and engines would get hardly any processor time.
            set_defaults({NICENESS: "0"})
        tries = 1 if address else START_TRIES
        while not self._opened:
            tries -= 1
            try:
                ray.init(
                    address=address or "local",
                    num_cpus=None if address else self._config.num_cpus,
                    namespace="windlass",
                    include_dashboard=False,
                    log_to_driver=False,
                    logging_level="ERROR",
                )
                self._opened = True
            # Ray raises a plain Exception for a node that does not start in time.
            except Exception as error:
                ray.shutdown()
                if not tries:
                    goal = f"connect to {address!r}" if address else "start a cluster on this host"
                    raise ConfigError(f"ray: cannot {goal}: {error}") from error

    async def reserve(self, spec: ProcessSpec) -> str:
        """Request a placement group and one launcher actor per node. Ray starts the actors when it grants the group."""
        import ray
        from ray.util.placement_group import placement_group
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

        bundle = {"CPU": spec.num_cpus} | ({"GPU": spec.num_gpus} if spec.num_gpus else {})
        strategy = "STRICT_SPREAD" if spec.num_nodes > 1 else "STRICT_PACK"
        group = placement_group([bundle] * spec.num_nodes, strategy=strategy)
        reservation = str(group.id.hex())
        self._groups[reservation] = group
        self._launchers[reservation] = [
            ray.remote(LocalBackend)
            .options(
                num_cpus=spec.num_cpus,
                num_gpus=spec.num_gpus,
                max_concurrency=MAX_CALLS,
                scheduling_strategy=PlacementGroupSchedulingStrategy(
                    placement_group=group, placement_group_bundle_index=node
                ),
            )
            .remote(None, watched=True, gpus=())
            for node in range(spec.num_nodes)
        ]
        return reservation

    async def launch(self, reservation: str, spec: ProcessSpec) -> int:
        """Wait until the launcher on the process's node runs, and let it start the process; return the pid on that node.

        For the errors, see `ClusterBackend.launch`.
        """
        launcher = self._launcher_of[spec.name] = self._launchers[reservation][spec.node]
        # No deadline: the reservation may stay queued, and only the scheduler's background task waits here. A caller
        # waits in `Scheduler.wait_healthy`, which has a deadline.
        await answer_of(launcher.open.remote(), None)
        told = {**spec.environment, **first_node(spec, self._address_of(reservation))}
        spec = msgspec.structs.replace(spec, environment=told)
        pid: int = await answer_of(launcher.launch.remote(reservation, spec))
        return pid

    def _address_of(self, reservation: str) -> str:
        """Return the address of the reservation's first node."""
        import ray
        from ray.util.placement_group import placement_group_table

        first = placement_group_table(self._groups[reservation])["bundles_to_node_id"][0]
        return next(str(n["NodeManagerAddress"]) for n in ray.nodes() if n["NodeID"] == first)

    async def wait(self, name: str) -> int:
        """See `ClusterBackend.wait`."""
        code: int = await answer_of(self._launcher_of[name].wait.remote(name), None)
        return code

    async def signal(self, name: str, signal_number: int) -> None:
        """See `ClusterBackend.signal`."""
        await answer_of(self._launcher_of[name].signal.remote(name, signal_number))

    async def log_tail(self, name: str, num_lines: int) -> str:
        """See `ClusterBackend.log_tail`."""
        return str(await answer_of(self._launcher_of[name].log_tail.remote(name, num_lines)))

    async def release(self, reservation: str) -> None:
        """End the processes of the reservation, kill its launchers, and remove the placement group. Idempotent."""
        import ray
        from ray.util.placement_group import remove_placement_group

        group = self._groups.pop(reservation, None)
        if group is None:
            return
        launchers = self._launchers.pop(reservation)
        await asyncio.gather(*map(_close, launchers))
        for launcher in launchers:
            ray.kill(launcher)
        remove_placement_group(group)

    async def close(self) -> None:
        """Disconnect from the cluster. If `open` started the cluster, this also shuts it down. Idempotent."""
        if self._opened:
            import ray

            self._opened = False
            ray.shutdown()


async def _close(launcher: Any) -> None:
    """End the processes of a launcher actor. Ignore an actor that is queued or dead: it has no processes."""
    with contextlib.suppress(PeerUnreachable, PeerTimeout):
        await answer_of(launcher.close.remote(), 2.0)


async def answer_of(call: Awaitable[Any], deadline_s: float | None = CALL_DEADLINE_S) -> Any:
    """Wait for the result of a method call to a Ray actor, and return it.

    Args:
        call: awaitable result of the method call.
        deadline_s: seconds to wait; None to wait without a limit. The wait also ends if the actor dies.

    Raises:
        PeerUnreachable: the actor or its node has died.
        ConfigError: the method of the actor raised an exception.
        PeerTimeout: the actor did not answer by the deadline.
    """
    from ray.exceptions import RayError, RayTaskError

    try:
        async with asyncio.timeout(deadline_s):
            return await call
    except TimeoutError:
        raise PeerTimeout(f"ray: an actor gave no answer within {deadline_s} s") from None
    except RayTaskError as error:
        raise ConfigError(f"ray: {error.cause}") from error
    except RayError as error:
        raise PeerUnreachable(f"ray: {type(error).__name__}: {error}") from error
