"""A LoRA adapter that an engine serves, and that updates reach instead of the model."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from windlass.errors import ConfigError, UnsupportedLayout

if TYPE_CHECKING:
    import torch

CONFIG = "adapter_config.json"
WEIGHTS = "adapter_model.safetensors"


@dataclass(frozen=True, slots=True)
class Adapter:
    """One adapter.

    Attributes:
        name: that requests give. folder: that PEFT saved. rank: of its matrices, the largest.
        scalings: by one of which an engine multiplies each B.
    """

    name: str
    folder: Path
    rank: int
    scalings: tuple[float, ...]


class _Config(msgspec.Struct, frozen=True):
    """The part of PEFT's `adapter_config.json` that decides whether updates can reach it."""

    r: int
    lora_alpha: float = 8
    use_rslora: bool = False
    rank_pattern: dict[str, int] | None = None
    alpha_pattern: dict[str, float] | None = None
    peft_type: str = "LORA"
    use_dora: bool = False
    bias: str = "none"
    lora_bias: bool = False
    modules_to_save: list[str] | None = None
    trainable_token_indices: Any = None
    layer_replication: Any = None

    def ranks(self) -> set[int]:
        return {self.r, *(self.rank_pattern or {}).values()}

    def scalings(self) -> tuple[float, ...]:
        alphas = {self.lora_alpha, *(self.alpha_pattern or {}).values()}
        divisors = [rank**0.5 if self.use_rslora else rank for rank in self.ranks()]
        return tuple(sorted({alpha / divisor for alpha in alphas for divisor in divisors}))

    def refusals(self) -> Mapping[str, bool]:
        """Why an update would not be the whole adapter -> whether that is so."""
        return {
            f"peft_type {self.peft_type}: only LORA can be updated": self.peft_type != "LORA",
            "use_dora: magnitudes are computed with the model's weights": self.use_dora,
            "bias: engines serve no biases of adapters": self.bias != "none" or self.lora_bias,
            "modules_to_save: engines serve low-rank weights only": bool(self.modules_to_save),
            "trainable_token_indices: these are embeddings": bool(self.trainable_token_indices),
            "layer_replication: layers share weights": bool(self.layer_replication),
        }


def adapter_of(text: str) -> Adapter | None:
    """Return what `--adapter NAME=FOLDER` says; None for an empty text.

    Raises:
        ConfigError: no name, no folder that PEFT saved.
        UnsupportedLayout: an adapter that updates cannot reach as a whole; says why.
    """
    if not text:
        return None
    name, _, place = text.partition("=")
    folder = Path(place).absolute()
    if not name or not place:
        raise ConfigError(f"--adapter must be NAME=FOLDER, got {text!r}")
    missing = [file for file in (WEIGHTS, CONFIG) if not (folder / file).is_file()]
    if missing:
        raise ConfigError(
            f"--adapter {name}: {folder} must hold {WEIGHTS} and {CONFIG}, it lacks "
            f"{' and '.join(missing)}"
        )
    try:
        config = msgspec.json.decode((folder / CONFIG).read_bytes(), type=_Config)
    except msgspec.MsgspecError as error:
        raise ConfigError(f"--adapter {name}: {folder / CONFIG}: {error}") from error
    for reason, applies in config.refusals().items():
        if applies:
            raise UnsupportedLayout(f"--adapter {name}: {reason}")
    return Adapter(name, folder, max(config.ranks()), config.scalings())


@contextmanager
def saved(weights: Iterator[tuple[str, torch.Tensor]], like: Path) -> Iterator[Path]:
    """Save an adapter with other values as PEFT does; yield the folder, from which engines load it; it goes afterwards.

    `like`: folder of an adapter of this configuration.
    """
    from safetensors.torch import save_file

    with tempfile.TemporaryDirectory(prefix="windlass-adapter-") as name:
        folder = Path(name)
        shutil.copy(like / CONFIG, folder)
        tensors = {name: tensor.cpu().contiguous() for name, tensor in weights}
        save_file(tensors, folder / WEIGHTS, metadata={"format": "pt"})
        yield folder
