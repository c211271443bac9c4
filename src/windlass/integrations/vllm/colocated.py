"""Weight updates of a vLLM `LLM` that runs in the trainer's own process.

Every trainer rank runs:

    engine = ColocatedEngine(LLM(..., weight_transfer_config={"backend": "windlass"}))
    sync = ColocatedSync(model, engine)
    sync.send_weights(version)

An update is the same round as for servers: rank 0 hosts the controller, each process has an agent of its trainer rank and
an agent of its engine rank, and the engine rank reads the bytes (`transports/pull.py`). If trainer rank and engine rank
are in one process, the read is a copy within this process. With tensor parallelism, engine ranks also read from the
other processes.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Self, final

import msgspec

from windlass.config import ControlConfig, PauseMode, UpdateMode
from windlass.engines.rank_reports import check_layouts
from windlass.engines.spec import AgentSettings, CapturedLayout, RankStep
from windlass.engines.vllm.api_server import RankAnswer, RankOrder
from windlass.engines.vllm.backend import BACKEND, is_backend_of
from windlass.engines.vllm.engine_core import ORDERS, hold
from windlass.errors import ConfigError, EngineRefused, RoundAborted
from windlass.integrations.fleet_sync import FleetSync, SentWeights
from windlass.integrations.hosted import HostAddress, HostedController, TrainerRanks
from windlass.layout.naming.stacked import StackedRule
from windlass.net.access import Access
from windlass.net.addresses import LOOPBACK
from windlass.transports.processes import host_identity

if TYPE_CHECKING:
    import torch

    from windlass.engines.engine_rank import EngineRank
    from windlass.trainers.client import TrainerClient

__all__ = ["ColocatedEngine", "ColocatedSync"]

TRANSPORT = "pull"


@final
class ColocatedEngine:
    """vLLM's `LLM` in this process: one rank of an engine whose ranks are processes of the trainer.

    The constructor captures the layout of the rank. With tensor parallelism it is collective over all trainer ranks. From
    then on, `llm` raises RoundAborted for new requests while its weights sleep, are lost, or may be of two versions.

    Args:
        llm: vLLM's `LLM`, awake, made with `weight_transfer_config={"backend": "windlass"}` and, for several ranks,
            `distributed_executor_backend="external_launcher"`.
        deadline_s: deadline in seconds for the capture.

    Attributes:
        llm: see above.
        num_ranks: number of ranks of the engine; consecutive trainer ranks form an engine.
        layout: summary of the captured layout of this rank.
        rank: captured layout and fleet of this rank.

    Raises:
        ConfigError: `llm` runs in another process, has another backend, or several replicas.
        EngineRefused: the weights of `llm` cannot be updated; the message has the reason.
    """

    def __init__(self, llm: Any, *, deadline_s: float = 600.0) -> None:
        config = llm.llm_engine.vllm_config
        if not is_backend_of(config):
            raise ConfigError(
                f"""llm: must be made with weight_transfer_config={{"backend": "{BACKEND}"}}, """
                f"got {config.weight_transfer_config}"
            )
        if config.parallel_config.data_parallel_size > 1:
            raise ConfigError(
                f"llm: data_parallel_size must be 1, got {config.parallel_config.data_parallel_size}"
            )
        core = vars(llm.llm_engine.engine_core).get("engine_core")
        if core is None:
            raise ConfigError(
                "llm: vLLM's EngineCore must run in this process; pass "
                'distributed_executor_backend="external_launcher" or set VLLM_ENABLE_V1_MULTIPROCESSING=0'
            )
        self.llm, self.num_ranks = llm, int(config.parallel_config.world_size)
        self._core = core
        ranks = TrainerRanks.of_process()
        if ranks.world_size % self.num_ranks:
            raise ConfigError(
                f"llm: the number of engine ranks must divide the number of trainer ranks, got {self.num_ranks} engine ranks "
                f"and {ranks.world_size} trainer ranks"
            )
        self._settings = AgentSettings(
            name=_name_of(ranks.rank // self.num_ranks),
            controller="",
            transport=TRANSPORT,
            url="",
            checkpoint="",
            world_size=self.num_ranks,
            serves_own_weights=True,
            join_deadline_s=deadline_s,
        )
        self.layout = msgspec.json.decode(self._order(RankStep.CAPTURE), type=CapturedLayout)
        self.rank: EngineRank = llm.llm_engine.model_executor.driver_worker.windlass_engine_rank
        self._refuse_requests()

    def join(self, address: HostAddress) -> None:
        """Leave the previous fleet, if any, and join the fleet of a controller.

        Raises:
            EngineRefused: the rank cannot join; the message has the reason.
        """
        self._settings = msgspec.structs.replace(self._settings, controller=address.url)
        self._order(RankStep.JOIN, address.token)

    def update(self, send: Callable[[], SentWeights]) -> SentWeights:
        """Call `send`, which runs a round, while the engine rests between two steps.

        Raises:
            ConfigError: `llm` has unfinished requests.
            WindlassError: `send` raised it.
        """
        engine = self.llm.llm_engine
        if engine.has_unfinished_requests():
            raise ConfigError(
                f"send_weights: the engine must have no unfinished requests, got {engine.get_num_unfinished_requests()}; "
                "call send_weights between two calls of generate"
            )
        # With asynchronous scheduling, the queue may still contain a step of finished requests.
        while self._core.batch_queue:
            engine.step()
        sent: list[SentWeights] = []

        def held(_namespace: str) -> int:
            with self.rank.gate.held():
                sent.append(send())
            return self.rank.served_version

        hold(self._core, held)
        return sent[0]

    def leave(self) -> None:
        """Leave the fleet. The engine keeps its weights. If the controller does not end, log a warning. Idempotent."""
        self.llm.llm_engine.model_executor.driver_worker.weight_transfer_engine.shutdown()

    def _order(self, step: RankStep, token: str = "") -> str:
        """Make the rank carry out one step of joining a fleet; return the text of its answer (`RankAnswer.said`).

        Raises:
            EngineRefused: the step failed in a rank of the engine.
        """
        order = RankOrder(step=step, settings=self._settings, token=token, pauses_itself=False)
        told = self.llm.collective_rpc(
            ORDERS, args=(str(step), msgspec.json.encode(order).decode())
        )
        answer = msgspec.json.decode(told[0], type=RankAnswer)
        if answer.failed:
            raise EngineRefused(answer.said or f"{step}: another rank has failed, see its log")
        return answer.said

    def _refuse_requests(self) -> None:
        """Make `llm` refuse requests while the rank must not serve."""
        engine, rank = self.llm.llm_engine, self.rank
        add = engine.add_request

        def _add_request(*given: Any, **named: Any) -> Any:
            if not rank.may_serve:
                raise RoundAborted(
                    "generate: the weights of the engine sleep, are lost or may be of two versions; send a version first"
                )
            return add(*given, **named)

        engine.add_request = _add_request


@final
class ColocatedSync:
    """Connection of a trainer to engines in its own processes; see `ColocatedEngine`.

    The constructor and all methods are collective: every trainer rank creates a `ColocatedSync` and calls the same
    methods in the same order. Each rank sends its own shards, and no rank gathers tensors.

    Memory: no engine has a second copy of its weights. The update writes the weights that the engine uses.

    Args:
        module: model that is trained, with FSDP2, tensor parallelism, both, or neither.
        engine: engine rank of this process.
        config: deadlines of updates. Its `mode` and `pause_mode` are not used.
        name_map: see `connect_trainer`.
        stacked: see `connect_trainer`.
        allow_unused: see `connect_trainer`.
        deadline_s: deadline in seconds for all ranks to join, and then for each version.

    Raises:
        ConfigError: an argument is invalid, or module and engine do not fit together.
        UnsupportedLayout: Windlass cannot describe a parameter of the module.
        EngineRefused: an engine rank cannot join; the message has the reason.
        PeerUnreachable: another rank has failed; the message has the reason.
        PeerTimeout: some ranks did not join within `deadline_s`.
    """

    def __init__(
        self,
        module: torch.nn.Module,
        engine: ColocatedEngine,
        *,
        config: ControlConfig | None = None,
        name_map: Callable[[str], str | None] | None = None,
        stacked: Sequence[StackedRule] | None = None,
        allow_unused: Sequence[str] = (),
        deadline_s: float = 600.0,
    ) -> None:
        ranks = TrainerRanks.of_process()
        names = [_name_of(number) for number in range(ranks.world_size // engine.num_ranks)]
        self._engine = engine
        self._fleet: _Fleet | None = None

        def host() -> _Fleet:
            self._fleet = _Fleet(ranks, engine, config or ControlConfig(), names)
            ranks.tell("host", msgspec.json.encode(self._fleet.place).decode())
            return self._fleet

        def connect(address: HostAddress) -> TrainerClient:
            from windlass.trainers.fsdp import connect_trainer

            place = self._fleet.place if self._fleet else _heard_place(ranks, deadline_s)
            client = connect_trainer(
                module,
                controller=address.url,
                token=address.token,
                transport=TRANSPORT,
                name_map=name_map,
                stacked=stacked,
                allow_unused=allow_unused,
                connect_deadline_s=deadline_s,
            )
            try:
                engine.join(place.engines)
            except BaseException:
                client.close()
                raise
            ranks.tell(f"layout/{ranks.rank}", msgspec.json.encode(engine.layout).decode())
            return client

        self._sync = FleetSync({name: name for name in names}, host, connect, deadline_s)

    def send_weights(self, version: int) -> SentWeights:
        """Copy the current weights into every engine, and verify the digests. Collective; blocks.

        Memory: the weights must not change before this method returns.

        Args:
            version: number of the version, greater than all earlier versions.

        Raises:
            ConfigError: `version` is not an integer >= 0, or the engine has unfinished requests.
            RoundAborted: not every engine serves the version; the message has the reason. An engine whose weights may be
                of two versions refuses requests until a later version has been sent.
            PeerUnreachable: another rank has failed; the message has the reason.
            PeerTimeout: the update did not end within `deadline_s`.
        """
        sent = self._engine.update(lambda: self._sync.send_weights(version))
        if sent.left_out:
            reasons = "; ".join(f"{name}: {reason}" for name, reason in sent.left_out.items())
            raise RoundAborted(f"version {version} is not served by every engine: {reasons}")
        return sent

    def shutdown(self) -> None:
        """Leave the fleet. The engines keep their weights. Idempotent."""
        self._sync.shutdown()
        self._engine.leave()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.shutdown()


def _name_of(number: int) -> str:
    """Return an engine's name in the fleet. Its first rank is in trainer rank `number * num_ranks`."""
    return f"vllm-{number}"


class _Place(msgspec.Struct, frozen=True):
    """Message of rank 0 to the other ranks.

    Attributes:
        engines: address to which engine ranks connect.
        host: identity of rank 0's host.
    """

    engines: HostAddress
    host: str


def _heard_place(ranks: TrainerRanks, deadline_s: float) -> _Place:
    """Wait for the message of rank 0, and return it.

    Raises:
        ConfigError: rank 0 is on another host.
    """
    place = msgspec.json.decode(ranks.hear("host", deadline_s), type=_Place)
    if place.host != host_identity():
        raise ConfigError(
            f"ColocatedSync: all ranks must be on one host, got rank {ranks.rank} on another host than rank 0; "
            "use servers (WeightSync) for several hosts"
        )
    return place


@final
class _Fleet:
    """Controller in trainer rank 0, with the engine ranks of all trainer ranks."""

    def __init__(
        self,
        ranks: TrainerRanks,
        engine: ColocatedEngine,
        config: ControlConfig,
        names: Sequence[str],
    ) -> None:
        self._ranks, self._engine, self._names = ranks, engine, names
        # Nothing generates during an update, so a second copy of the weights would only take memory.
        config = msgspec.structs.replace(
            config, mode=UpdateMode.IN_PLACE, pause_mode=PauseMode.IN_PLACE
        )
        self.hosted = HostedController([f"http://{LOOPBACK}"], config)
        self.place = _Place(self.hosted.address(Access.ENGINE), host_identity())

    def join(self, deadline_s: float) -> None:
        """Check the layouts of all engine ranks, and wait until they are in the fleet.

        Raises:
            ConfigError: updates would not reach a tensor that vLLM's loader reads.
            PeerUnreachable, PeerTimeout: see `TrainerRanks.hear` and `HostedController.wait_for_fleet`.
        """
        layouts = [self._engine.layout]
        for rank in range(1, self._ranks.world_size):
            told = self._ranks.hear(f"layout/{rank}", deadline_s)
            layouts.append(msgspec.json.decode(told, type=CapturedLayout))
        size = self._engine.num_ranks
        for number, name in enumerate(self._names):
            check_layouts(name, layouts[number * size : (number + 1) * size])
        self.hosted.wait_for_fleet(self._names, deadline_s)

    def rejoin(self, deadline_s: float) -> Mapping[str, str]:
        """Do nothing: the ranks of an engine stay in the fleet as long as their processes."""
        del deadline_s
        return {}

    def wait_resumed(self, names: Collection[str]) -> None:
        """Do nothing: the engines run no step before `send_weights` has returned on their ranks."""

    def close(self) -> None:
        """End the controller. Idempotent."""
        self.hosted.close()
