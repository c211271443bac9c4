"""The weight table of an SGLang server without Windlass, and the layout file that describes the table's bytes.

With `ENABLING`, every rank of SGLang registers its parameters with its own Mooncake engine, and the server publishes
the address, the number of elements and the element size of each parameter. A process with SGLang and Windlass writes the layout file once
(`windlass capture`); the agent of such a server reads both (`windlass.engines.sglang.outside`).
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path

import msgspec

from windlass.engines.http import EngineHttp
from windlass.engines.sglang.spec import check_server
from windlass.errors import DECODE_ERRORS, ConfigError, PeerUnreachable, UnsupportedLayout

ENABLING = "--remote-instance-weight-loader-start-seed-via-transfer-engine"
SETTINGS = (
    *("tp_size", "ep_size", "pp_size", "dp_size", "attn_dp_size", "moe_dense_tp_size", "dtype", "device"),
    *("quantization", "load_format", "model_loader_extra_config", "json_model_override_args"),
    *("moe_runner_backend", "moe_a2a_backend", "fp8_gemm_runner_backend", "disable_shared_experts_fusion"),
    *("ep_num_redundant_experts", "init_expert_location", "enable_dp_lm_head", "speculative_algorithm"),
)  # fmt: skip
"""SGLang's settings that may change a layout without changing a size. The captured server and the live server must agree."""
_ONE = ("pp_size", "dp_size")
"""Settings that must be 1."""
_LABELS = ("transformers_version", "_name_or_path")
"""Entries of a model's config.json that do not describe the model."""


class Parameter(msgspec.Struct, frozen=True):
    """One parameter of a rank's model.

    Attributes:
        itemsize: bytes of one element.
    """

    shape: tuple[int, ...]
    dtype: str
    itemsize: int

    @property
    def numel(self) -> int:
        """Number of elements."""
        numel = 1
        for size in self.shape:
            numel *= size
        return numel


class RankLayout(msgspec.Struct, frozen=True, kw_only=True):
    """Captured layout of one rank.

    Attributes:
        manifest: encoded `ShardManifest`: the checkpoint elements at each place of the parameters.
        parameters: all parameters of the model, by name.
        derived: name of a tensor that only the engine itself can compute after an update -> reason.
    """

    manifest: bytes
    parameters: dict[str, Parameter]
    derived: dict[str, str]


class LayoutFile(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Captured layout of a server.

    Attributes:
        engine: name of the engine.
        version: version of the engine.
        config_digest: see `config_digest`.
        settings: values of those settings in `SETTINGS` that the release has.
        ranks: captured layouts of all ranks.
    """

    engine: str
    version: str
    config_digest: str
    settings: dict[str, object]
    ranks: tuple[RankLayout, ...]

    @classmethod
    def read(cls, path: Path) -> LayoutFile:
        """Read a layout file.

        Raises:
            ConfigError: the file cannot be read, or `windlass capture` has not written it.
        """
        try:
            return msgspec.json.decode(path.read_bytes(), type=cls)
        except (OSError, *DECODE_ERRORS) as error:
            raise ConfigError(
                f"--layout must be a file that `windlass capture` has written, got {path}: {error}"
            ) from error


class Entry(msgspec.Struct, frozen=True, array_like=True):
    """Place of one parameter in the memory of the server's rank."""

    address: int
    numel: int
    itemsize: int

    @property
    def nbytes(self) -> int:
        """Bytes of the parameter."""
        return self.numel * self.itemsize


class WeightTable(msgspec.Struct, frozen=True, array_like=True):
    """Published table of one rank: `host:port` of its Mooncake engine, and its parameters by name."""

    session: str
    entries: dict[str, Entry]


class _TableAnswer(msgspec.Struct, frozen=True):
    remote_instance_transfer_engine_info: WeightTable


class _Model(msgspec.Struct, frozen=True):
    model_path: str
    weight_version: str | None = None
    has_image_understanding: bool = False
    has_audio_understanding: bool = False


def config_digest(folder: Path) -> str:
    """Return the SHA-256 of the settings in a checkpoint's config.json; an empty string if the file does not exist.

    Formatting and labels do not change the result.
    """
    try:
        config = json.loads((folder / "config.json").read_bytes())
    except OSError:
        return ""
    described = {key: value for key, value in config.items() if key not in _LABELS}
    return hashlib.sha256(json.dumps(described, sort_keys=True).encode()).hexdigest()


def read_table(server: EngineHttp, rank: int) -> WeightTable:
    """Return the table of one rank.

    Raises:
        PeerUnreachable: the server does not answer, or publishes no table.
        PeerTimeout: the server does not answer in time.
    """
    path = f"/remote_instance_transfer_engine_info?rank={rank}"
    try:
        answer = msgspec.json.decode(server.get(path), type=_TableAnswer)
    except (PeerUnreachable, *DECODE_ERRORS) as error:
        raise PeerUnreachable(
            f"{server.url}: rank {rank} must publish a table of its weights: start the server with {ENABLING} and with "
            f"Mooncake in its environment ({error})"
        ) from error
    return answer.remote_instance_transfer_engine_info


def read_model(server: EngineHttp) -> _Model:
    """Return the description of the server's model.

    Raises:
        PeerUnreachable: the server does not answer, or the answer is not SGLang's.
        PeerTimeout: the server does not answer in time.
    """
    try:
        return msgspec.json.decode(server.get("/model_info"), type=_Model)
    except DECODE_ERRORS as error:
        raise PeerUnreachable(
            f"{server.url}/model_info must answer as SGLang does: {error}"
        ) from error


def read_settings(server: EngineHttp) -> tuple[str, dict[str, object]]:
    """Return the version of a server and the values of its `SETTINGS`. For the errors, see `read_model`."""
    try:
        told = msgspec.json.decode(server.get("/server_info"), type=dict[str, object])
    except DECODE_ERRORS as error:
        raise PeerUnreachable(
            f"{server.url}/server_info must answer as SGLang does: {error}"
        ) from error
    return str(told["version"]), {name: told[name] for name in SETTINGS if name in told}


def require_captured(server: EngineHttp, layout: LayoutFile) -> None:
    """Check that a layout file describes a running server.

    Raises:
        ConfigError: the server has another version, setting or model than the layout, or has a setting that would make
            updates wrong.
        UnsupportedLayout: after an update, the server would still use values that it computed from old weights.
        PeerTimeout, PeerUnreachable: see `read_model`.
    """
    version, settings = read_settings(server)
    told = {"version": version, **settings}
    for name, value in {"version": layout.version, **layout.settings}.items():
        if told.get(name) != value:
            raise ConfigError(
                f"{server.url}: {name} must be {value!r} as in the captured layout, got {told.get(name)!r}: capture the "
                "layout again with the server's own options"
            )
    check_server(server, len(layout.ranks))
    for name in _ONE:
        if settings.get(name, 1) != 1:
            raise ConfigError(
                f"{server.url}: {name} must be 1, got {settings[name]}: SGLang publishes weight tables only for "
                "tensor-parallel ranks"
            )
    model = read_model(server)
    if model.has_image_understanding or model.has_audio_understanding:
        raise UnsupportedLayout(
            f"{server.url}: the model must have no encoders, because SGLang would keep embeddings of old weights; to "
            "update this model, install Windlass in the server's environment"
        )
    found = config_digest(Path(model.model_path))
    if found and found != layout.config_digest:
        raise ConfigError(
            f"{server.url}: config.json of {model.model_path} must be that of the captured model "
            f"({layout.config_digest[:12]}), got {found[:12]}"
        )
    for rank, each in enumerate(layout.ranks):
        for name, why in each.derived.items():
            raise UnsupportedLayout(
                f"rank {rank}: {name} cannot be updated in a server without Windlass, because {why}; install Windlass in "
                f"the server's environment (the rank has {len(each.derived)} of these tensors)"
            )


def match(rank: int, captured: Mapping[str, Parameter], table: WeightTable) -> None:
    """Check that a live rank has the parameters of the captured layout.

    Raises:
        UnsupportedLayout: a parameter is missing, is not in the layout, or has another size. The message names the
            first such parameter.
    """
    for name, parameter in captured.items():
        wanted = {"numel": parameter.numel, "element size": parameter.itemsize}
        entry = table.entries.get(name)
        if entry is None:
            raise UnsupportedLayout(
                f"rank {rank}: the server's table must contain {name}, as the layout does; capture the layout again"
            )
        found = {"numel": entry.numel, "element size": entry.itemsize}
        for what, value in wanted.items():
            if found[what] != value:
                raise UnsupportedLayout(
                    f"rank {rank}: {what} of {name} must be {value} as in the layout, got {found[what]}"
                )
    for name in table.entries:
        if name not in captured:
            raise UnsupportedLayout(
                f"rank {rank}: the layout must contain {name}, as the server's table does; capture the layout again"
            )
