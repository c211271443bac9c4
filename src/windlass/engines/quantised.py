"""Check that trainers can quantise their weights as a checkpoint's config.json declares.

Launchers call this module before they start an engine.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import msgspec

from windlass.engines.options import options_of
from windlass.errors import ConfigError
from windlass.layout.quantization import BLOCK, CAPABILITIES, Scheme

_OPTIONS = ("--quantization", "-q")
_ONLINE = "weights that the engine quantises while it loads are computed, not copied"
_METHODS: Mapping[str, Scheme] = {
    "ptpc_fp8": Scheme.FP8_CHANNEL,
    "fbgemm_fp8": Scheme.FP8_CHANNEL,
    "mxfp4": Scheme.MXFP4,
    "modelopt_fp4": Scheme.NVFP4,
    "w8a8_int8": Scheme.INT8,
    "awq": Scheme.INT4_GROUPED,
    "awq_marlin": Scheme.INT4_GROUPED,
    "gptq": Scheme.INT4_GROUPED,
    "gptq_marlin": Scheme.INT4_GROUPED,
}
_ALGORITHMS: Mapping[str, Scheme] = {"FP8": Scheme.FP8_TENSOR, "NVFP4": Scheme.NVFP4}
"""`quant_algo` -> scheme, for NVIDIA ModelOpt, which uses one `quant_method` for several schemes."""


class _Quantisation(msgspec.Struct, frozen=True):
    """Fields of `quantization_config` in config.json that identify a scheme."""

    quant_method: str = ""
    weight_block_size: tuple[int, ...] | None = None
    scale_fmt: str | None = None
    quant_algo: str | None = None


class _Config(msgspec.Struct, frozen=True):
    quantization_config: _Quantisation | None = None
    compression_config: _Quantisation | None = None
    text_config: _Config | None = None


class _Modelopt(msgspec.Struct, frozen=True):
    quantization: _Quantisation


def require_followed(folder: Path, rest: Sequence[str]) -> bool:
    """Return whether the checkpoint is quantised. Check that trainers support its scheme (float8 in blocks).

    Args:
        folder: folder of the checkpoint; a folder without config.json counts as not quantised.
        rest: engine options from the command line.

    Raises:
        ConfigError: an option makes the engine quantise weights while it loads them, trainers do not support
            the checkpoint's scheme (the message has the reason), or config.json is invalid.
    """
    declared = _declared(folder)
    for option, value in options_of(rest):
        if option not in _OPTIONS:
            continue
        if declared is None:
            raise ConfigError(f"{option} must not be given: {_ONLINE}")
        if value != "fp8":
            raise ConfigError(
                f"{option} must be fp8 with this checkpoint, got {value!r}: {_ONLINE}"
            )
    if declared is None:
        return False
    scheme, what = _scheme(declared)
    if scheme is None:
        raise ConfigError(f"checkpoint: {folder}: {what}")
    reason = next(row.reason for row in CAPABILITIES if row.scheme is scheme)
    if reason:
        raise ConfigError(f"checkpoint: {folder}: scheme {scheme} is not supported: {reason}")
    return True


def is_declared(folder: Path) -> bool:
    """Return whether a checkpoint might be quantised.

    Return True if it declares a quantisation or has no config.json.

    Raises:
        ConfigError: config.json is invalid.
    """
    return not (folder / "config.json").exists() or _declared(folder) is not None


def _declared(folder: Path) -> _Quantisation | None:
    """Return the quantisation that a checkpoint declares, or None.

    Raises:
        ConfigError: config.json or NVIDIA ModelOpt's configuration file is invalid.
    """
    modelopt, path = folder / "hf_quant_config.json", folder / "config.json"
    is_modelopt = modelopt.exists()
    if is_modelopt:
        path = modelopt
    elif not path.exists():
        return None
    try:
        if is_modelopt:
            found = msgspec.json.decode(path.read_bytes(), type=_Modelopt).quantization
            return msgspec.structs.replace(found, quant_method="modelopt")
        config = msgspec.json.decode(path.read_bytes(), type=_Config)
    except msgspec.DecodeError as error:
        raise ConfigError(f"checkpoint: {path} must be valid: {error}") from error
    inner = config.text_config.quantization_config if config.text_config else None
    return config.quantization_config or config.compression_config or inner


def _scheme(declared: _Quantisation) -> tuple[Scheme | None, str]:
    """Return (scheme, text). If the scheme is unknown, it is None and the text is the reason. Else ignore the text."""
    method = declared.quant_method.lower()
    if method == "fp8":
        if declared.weight_block_size is None:
            return Scheme.FP8_TENSOR, ""
        if declared.scale_fmt not in (None, "", "float32", "float"):
            return Scheme.FP8_BLOCK_UE8M0, ""
        if declared.weight_block_size == (BLOCK, BLOCK):
            return Scheme.FP8_BLOCK, ""
        blocks = list(declared.weight_block_size)
        return None, f"weight_block_size must be [{BLOCK}, {BLOCK}], got {blocks}"
    known = _METHODS.get(method)
    if known is None and method.startswith("modelopt"):
        known = _ALGORITHMS.get((declared.quant_algo or "").upper())
    return known, (
        f"quant_method must be fp8 in blocks, got {declared.quant_method!r}: trainers cannot quantise "
        f"weights by this method"
    )
