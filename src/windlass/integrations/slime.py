"""Weight updater for slime: Megatron-core ranks write their shards directly into slime's SGLang servers.

    train.py ... --custom-megatron-init-path windlass.integrations.slime.install

slime (read at its commit 624b824a8) has no option for a custom weight updater, so `install` replaces slime's class
`UpdateWeightFromDistributed` (`update_weight/update_weight_from_distributed.py`), and its class for `--colocate`, by
`WeightUpdater`. slime calls `install` in every Megatron rank (`backends/megatron_utils/initialize.py`) before its actor
creates the weight updater (`backends/megatron_utils/actor.py`). No rank gathers or converts tensors, and all servers
switch to a version together. The servers are unmodified SGLang servers, with Windlass installed and
WINDLASS_CONTROLLER=wait.

With `--colocate`, slime makes the servers free their memory right after their start and after each rollout. slime
wakes the servers' weights before an update, and their caches after the update. During the update, torch_memory_saver has
freed the trainer's GPU memory (`--offload-train`). So each rank publishes slime's copies of the weights in host memory.
"""

from __future__ import annotations

import importlib
import logging
from argparse import Namespace
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Protocol, final

import msgspec

from windlass.errors import ConfigError, PlanError, ProtocolError
from windlass.integrations.hosted import HostAddress, TrainerRanks
from windlass.integrations.joined import JoinedServers
from windlass.net.access import Access
from windlass.net.addresses import check_url
from windlass.trainers.client import TrainerClient

if TYPE_CHECKING:
    import torch

__all__ = ["WeightUpdater", "install"]

_log = logging.getLogger(__name__)
_ACTOR = "slime.backends.megatron_utils.actor"
DEADLINE_S = 600.0
"""Longest time in seconds for all servers to join, and for each update."""


def install(args: Namespace) -> None:
    """Make slime's actor use `WeightUpdater`. slime calls this function in every Megatron rank.

    Args:
        args: slime's arguments.

    Raises:
        ConfigError: an option of slime selects another way to send weights.
    """
    for option, allowed in (
        ("update_weight_mode", "full"),
        ("update_weight_transport", "nccl"),
    ):
        given = vars(args)[option] or allowed
        if given != allowed:
            raise ConfigError(
                f"--{option.replace('_', '-')} must be {allowed} with Windlass, got {given}"
            )
    actor = vars(importlib.import_module(_ACTOR))
    actor["UpdateWeightFromDistributed"] = actor["UpdateWeightFromTensor"] = WeightUpdater


class _HfConfig(msgspec.Struct, frozen=True):
    model_type: str


class _Call(Protocol):
    def remote(self) -> object: ...


class EngineHandle(Protocol):
    """Interface of slime's Ray actor for one server, as far as `WeightUpdater` uses it."""

    @property
    def get_url(self) -> _Call:
        """Remote method that returns the server's URL, or None if the actor is not the server's first node."""
        ...


@final
class WeightUpdater:
    """slime's weight updater of one Megatron rank.

    All methods are collective: every rank creates an updater and calls the same methods in the same order. Rank 0 hosts
    the controller, which pauses and resumes the servers for each update. slime's `pause_generation` is not called.

    Memory: weights are read only during `update_weights`. With `--offload-train` the model's memory has no pages then, and
    slime's copies in host memory are published (`HostCopies`). A trainer with a critic and without `--colocate` is awake in
    updates, and slime calls `disconnect_rollout_engines` before it frees the model's memory again.

    Args:
        args: slime's arguments. `hf_checkpoint` is a folder with the model's config.json, and `vocab_size` is the
            checkpoint's vocabulary size.
        model: model chunks of this rank.
        weights_getter: function that returns slime's copies of the actor's weights in host memory, by slime's names.
        model_name, quantization_config: arguments of slime's own updaters; not used.

    Attributes:
        weight_version: version of the last update. slime's actor sets this attribute before the first update.

    Raises:
        ConfigError: `args.hf_checkpoint` has no config.json that names a `model_type`.
    """

    def __init__(
        self,
        args: Namespace,
        model: Sequence[torch.nn.Module],
        weights_getter: Callable[[], Mapping[str, torch.Tensor]],
        *,
        model_name: str,  # noqa: ARG002
        quantization_config: Mapping[str, object] | None,  # noqa: ARG002
    ) -> None:
        self.weight_version = 0
        self._args, self._model = args, model
        # An engine that sleeps reads by itself.
        self._transport = "pull" if args.offload_rollout else "auto"
        is_awake = not args.offload_train or (args.use_critic and not args.colocate)
        self._copies = None if is_awake else HostCopies(model, weights_getter)
        self._family = _model_type(Path(args.hf_checkpoint))
        self._ranks = TrainerRanks.of_process()
        self._num_connected = 0
        self._fleet: JoinedServers | None = None
        self._trainer: TrainerClient | None = None
        self._metrics: dict[str, float] = {}

    def connect_rollout_engines(
        self,
        rollout_engines: Sequence[EngineHandle],
        rollout_engine_lock: object,  # noqa: ARG002
        engine_gpu_counts: Sequence[int] | None = None,  # noqa: ARG002
        engine_gpu_offsets: Sequence[int] | None = None,  # noqa: ARG002
        engine_parallel_configs: Sequence[Mapping[str, object]] | None = None,  # noqa: ARG002
    ) -> None:
        """Make every server join the fleet, unless it has joined before. Collective; blocks.

        Args:
            rollout_engines: all current servers.
            rollout_engine_lock: not used: the controller runs one round at a time.
            engine_gpu_counts: not used: servers report their own layout.
            engine_gpu_offsets: not used, for the same reason.
            engine_parallel_configs: not used, for the same reason.

        Raises:
            ConfigError: neither WINDLASS_TOKEN nor WINDLASS_TOKEN_FILE is set, or a server has no valid URL.
            UnsupportedLayout, ManifestError: see `connect_megatron_trainer`.
            PlanError: see `HostCopies.load`.
            EngineRefused: a server cannot be updated; the message has the reason. Only rank 0 raises this error.
            PeerUnreachable: another rank has failed (the message has the reason), or a server could not be reached.
            PeerTimeout: a server or a rank has not joined within `DEADLINE_S`.
        """
        self._num_connected += 1
        if self._copies is not None:
            # slime calls this method (but not `update_weights`) inside its region of torch_memory_saver. Load the copies
            # outside this region, because other processes cannot map memory that was allocated in it.
            with self._copies.outside_saver():
                self._copies.load()

        def host() -> HostAddress:
            if self._fleet is None:
                self._fleet = JoinedServers(_urls_of(rollout_engines), self._transport)
            return self._fleet.hosted.address(Access.TRAINER)

        def join() -> None:
            if self._fleet is not None:
                self._fleet.urls = _urls_of(rollout_engines)
                self._fleet.join(DEADLINE_S)

        self._ranks.meet(f"engines/{self._num_connected}", host, self._connect, join, DEADLINE_S)

    def _connect(self, address: HostAddress) -> None:
        """Connect this rank's model to the controller if it is not connected. Collective over the Megatron ranks."""
        if self._trainer is not None:
            return
        from windlass.trainers.megatron import connect_megatron_trainer

        args = self._args
        self._trainer = connect_megatron_trainer(
            self._model,
            family=self._family,
            vocab_size=args.vocab_size,
            controller=address.url,
            token=address.token,
            transport=self._transport,
            copy_of=None if self._copies is None else self._copies.copy_of,
            connect_deadline_s=DEADLINE_S,
        )

    def disconnect_rollout_engines(self) -> None:
        """Leave the fleet, because slime will free this rank's memory. `connect_rollout_engines` joins it again. Idempotent."""
        if self._trainer is not None:
            self._trainer.close()
            self._trainer = None

    def update_weights(self) -> None:
        """Publish the current weights to every server as version `weight_version + 1`. Collective; blocks.

        The update leaves out a server that is dead or fails. slime then restarts this server, and calls
        `connect_rollout_engines` to make the server join again.

        Memory: the weights must not change before this method returns.

        Raises:
            ProtocolError: `connect_rollout_engines` was not called.
            PlanError: see `HostCopies.load`.
            RoundAborted: the version was not published; the servers keep their weights.
            PeerTimeout: the update did not end within `DEADLINE_S`.
            AuthenticationError, ProtocolError, PeerUnreachable: the connection to the controller has ended.
        """
        if self._trainer is None:
            raise ProtocolError("update_weights: connect_rollout_engines must be called first")
        copies = nullcontext() if self._copies is None else self._copies.loaded()
        with copies:
            report = self._trainer.publish(self.weight_version + 1, deadline_s=DEADLINE_S).result()
        self.weight_version += 1
        for name, reason in report.left_out.items():
            _log.warning("server %s does not serve version %s: %s", name, report.version, reason)
        self._metrics = {
            "perf/windlass_update_s": report.update_s,
            "perf/windlass_wire_s": report.wire_s,
            "perf/windlass_nbytes": float(report.nbytes),
        }

    def pop_metrics(self) -> dict[str, float]:
        """Return the figures of the last update, and clear them."""
        metrics, self._metrics = self._metrics, {}
        return metrics

    def close(self) -> None:
        """Leave the fleet. The servers keep their weights. Idempotent."""
        if self._trainer is not None:
            self._trainer.close()
        if self._fleet is not None:
            self._fleet.close()


@final
class HostCopies:
    """slime's copies of the actor's weights in host memory, which this rank publishes while its model has no memory.

    The rank's engines read GPU memory. So if the model is on a GPU, each update loads the copies into the GPU, outside the
    memory of torch_memory_saver. On a CPU, they are published as they are.

    slime's names of experts and layers differ from the model's names, but slime's copies have a fixed order. For each
    chunk, they are in the order of the model's parameters, followed by the buffers with `expert_bias` in their names.

    Args:
        model: model chunks of this rank.
        getter: function that returns the copies by slime's names.
    """

    def __init__(
        self,
        model: Sequence[torch.nn.Module],
        getter: Callable[[], Mapping[str, torch.Tensor]],
    ) -> None:
        self._getter = getter
        self._tensors = [
            tensor
            for chunk in model
            for tensor in (
                *chunk.parameters(),
                *(buffer for name, buffer in chunk.named_buffers() if "expert_bias" in name),
            )
        ]
        # `id` of a tensor of the model -> copy on the tensor's device.
        self._loaded: dict[int, torch.Tensor] = {}

    @contextmanager
    def loaded(self) -> Iterator[None]:
        """Load the copies, if they are not loaded, and free their GPU memory at the end of the block.

        Raises:
            PlanError: see `load`.
        """
        try:
            self.load()
            yield
        finally:
            self._loaded = {}
            if self._is_on_gpu:
                import torch

                torch.cuda.empty_cache()

    def load(self) -> None:
        """Copy slime's host copies to the model's device, unless they are already loaded.

        Raises:
            PlanError: slime has not copied every tensor.
        """
        copies = [*self._getter().values()]
        if len(copies) != len(self._tensors):
            raise PlanError(
                f"weights_getter: must return one copy of each of {len(self._tensors)} tensors, got {len(copies)}"
            )
        if not self._loaded:
            pairs = zip(self._tensors, copies, strict=True)
            self._loaded = {id(tensor): copy.to(tensor.device) for tensor, copy in pairs}

    def copy_of(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return the copy of a tensor of the model.

        Raises:
            PlanError: no update runs, so the copy is not on the GPU.
        """
        found = self._loaded.get(id(tensor))
        if found is None:
            raise PlanError(
                "copy_of: the copies of the weights are loaded only during an update; call update_weights"
            )
        return found

    def outside_saver(self) -> AbstractContextManager[None]:
        """Return a context in which torch_memory_saver does not manage new GPU memory.

        Other processes cannot map managed memory.
        """
        if not self._is_on_gpu:
            return nullcontext()
        disabled: AbstractContextManager[None] = importlib.import_module(
            "torch_memory_saver"
        ).torch_memory_saver.disable()
        return disabled

    @property
    def _is_on_gpu(self) -> bool:
        return any(tensor.is_cuda for tensor in self._tensors)


def _model_type(checkpoint: Path) -> str:
    """Return the `model_type` in the config.json of a checkpoint; raise ConfigError if there is none."""
    try:
        config = (checkpoint / "config.json").read_bytes()
        return msgspec.json.decode(config, type=_HfConfig).model_type
    except (OSError, msgspec.MsgspecError) as error:
        raise ConfigError(
            f"--hf-checkpoint must be a folder whose config.json has a model_type, got {checkpoint}: {error}"
        ) from error


def _urls_of(engines: Sequence[EngineHandle]) -> list[str]:
    """Return the servers' URLs.

    Raises:
        ConfigError: there is no server, or an address is not a valid URL.
    """
    import ray

    told: list[str | None] = ray.get([engine.get_url.remote() for engine in engines])
    urls = [url for url in told if url is not None]
    if not urls:
        raise ConfigError("rollout_engines: must contain at least one server, got none")
    for url in urls:
        check_url(url, "rollout_engines: get_url")
    return urls
