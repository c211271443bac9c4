"""LoRA adapters. If an engine serves an adapter, updates change the adapter instead of the model."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from windlass.checkpoint_files import ADAPTER
from windlass.errors import ConfigError, UnsupportedLayout

if TYPE_CHECKING:
    import torch

CONFIG = "adapter_config.json"


@dataclass(frozen=True, slots=True)
class Adapter:
    """One LoRA adapter.

    Attributes:
        name: name of the adapter in requests.
        folder: folder that PEFT saved.
        rank: highest rank of the adapter's matrices.
        scalings: all values of alpha / rank in the configuration. An engine multiplies each matrix B by one of them.
    """

    name: str
    folder: Path
    rank: int
    scalings: tuple[float, ...]


_KEEP_BASE = frozenset({"gaussian", "orthogonal", "eva", "mica"})
"""Initialisations of PEFT 0.21 that leave the base model unchanged; PiSSA, OLoRA, CorDA, LoftQ and LoRA-GA do not."""
_OUTER = frozenset(
    {"embed_tokens", "lm_head", "wte", "wpe", "embed_in", "embed_out", "word_embeddings"}
)
"""Names of modules that are embeddings or output matrices."""


class _Config(msgspec.Struct, frozen=True):
    """Fields of PEFT's `adapter_config.json` that decide whether updates can change the whole adapter."""

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
    init_lora_weights: bool | str | None = True
    alora_invocation_tokens: list[int] | None = None
    target_modules: list[str] | str | None = None
    target_parameters: list[str] | None = None
    loftq_config: dict[str, Any] | None = None
    corda_config: Any = None
    use_qalora: bool = False
    use_bdlora: Any = None
    velora_config: Any = None
    monteclora_config: Any = None
    kasa_config: Any = None
    arrow_config: Any = None

    def ranks(self) -> set[int]:
        """Return all ranks of the adapter's matrices."""
        return {self.r, *(self.rank_pattern or {}).values()}

    def scalings(self) -> tuple[float, ...]:
        """Return all values of alpha / rank (with `use_rslora`, of alpha / sqrt(rank)), sorted."""
        alphas = {self.lora_alpha, *(self.alpha_pattern or {}).values()}
        divisors = [rank**0.5 if self.use_rslora else rank for rank in self.ranks()]
        return tuple(sorted({alpha / divisor for alpha in alphas for divisor in divisors}))

    def refusals(self) -> Mapping[str, bool]:
        """Return all possible reasons to refuse an adapter: reason -> whether it applies to this adapter."""
        return {
            f"peft_type must be LORA, got {self.peft_type}": self.peft_type != "LORA",
            "use_dora must be false, because the magnitudes of DoRA depend on the base model's weights": self.use_dora,
            "bias must be none and lora_bias false, because engines serve no biases of adapters": self.bias
            != "none"
            or self.lora_bias,
            "modules_to_save must be empty, because engines serve only the adapter's low-rank matrices": bool(
                self.modules_to_save
            ),
            "trainable_token_indices must be empty, because engines serve no embeddings of adapters": bool(
                self.trainable_token_indices
            ),
            "layer_replication must be empty, because replicated layers share weights": bool(
                self.layer_replication
            ),
            f"init_lora_weights must be one of {sorted(_KEEP_BASE)} or a bool, got {self.init_lora_weights!r}: this "
            "initialisation changes the weights of the base model, but engines serve the original base model; convert "
            "the adapter when you save it (`path_initial_model_for_weight_conversion` of `save_pretrained`), or train "
            "with the default initialisation": self._changes_base,
            "alora_invocation_tokens must be empty: this adapter applies only from its invocation tokens on, but engines "
            "apply an adapter to all tokens; train it without invocation tokens": bool(
                self.alora_invocation_tokens
            ),
            f"target_modules must leave out embeddings and the output matrix, got {self._outer}: engines serve only "
            "adapters of linear layers inside the model": bool(self._outer),
            "target_parameters must be empty, because engines serve only adapters of modules": bool(
                self.target_parameters
            ),
            f"{', '.join(self._variants)} must not be set, because engines compute plain LoRA only": bool(
                self._variants
            ),
        }

    @property
    def _changes_base(self) -> bool:
        """Whether the adapter's initialisation changed the weights of the base model."""
        if isinstance(self.init_lora_weights, str):
            return self.init_lora_weights.lower() not in _KEEP_BASE
        return False

    @property
    def _outer(self) -> list[str]:
        """Embeddings and output matrices among the target modules."""
        given = self.target_modules or []
        names = [given] if isinstance(given, str) else given
        return sorted(name for name in names if name.rpartition(".")[2] in _OUTER)

    @property
    def _variants(self) -> list[str]:
        """Names of the settings that select a variant of LoRA; engines compute plain LoRA only."""
        names = (
            "use_qalora",
            "use_bdlora",
            "velora_config",
            "monteclora_config",
            "kasa_config",
            "arrow_config",
        )
        return [name for name in names if getattr(self, name)]


def adapter_of(text: str, option: str = "--adapter") -> Adapter | None:
    """Return the adapter for the value NAME=FOLDER of a command-line option; None for an empty value.

    Raises:
        ConfigError: the name or the folder is missing, the folder lacks a file that PEFT saves, or the configuration
            file is invalid.
        UnsupportedLayout: updates cannot change the whole adapter; the message has the reason.
    """
    if not text:
        return None
    name, _, place = text.partition("=")
    folder = Path(place).absolute()
    if not name or not place:
        raise ConfigError(f"{option} must be NAME=FOLDER, got {text!r}")
    missing = [file for file in (ADAPTER, CONFIG) if not (folder / file).is_file()]
    if missing:
        raise ConfigError(
            f"{option} {name}: {folder} must contain {ADAPTER} and {CONFIG}, but has no "
            f"{' and no '.join(missing)}"
        )
    try:
        config = msgspec.json.decode((folder / CONFIG).read_bytes(), type=_Config)
    except msgspec.MsgspecError as error:
        raise ConfigError(
            f"{option} {name}: {folder / CONFIG} must be a configuration of PEFT: {error}"
        ) from error
    for reason, applies in config.refusals().items():
        if applies:
            raise UnsupportedLayout(f"{option} {name}: {reason}")
    return Adapter(name, folder, max(config.ranks()), config.scalings())


@contextmanager
def saved(weights: Iterator[tuple[str, torch.Tensor]], like: Path) -> Iterator[Path]:
    """Save an adapter in PEFT's format in a temporary folder. Copy the configuration file from the folder `like`.

    Yield the temporary folder, and delete it at the end of the `with` block.
    """
    from safetensors.torch import save_file

    with tempfile.TemporaryDirectory(prefix="windlass-adapter-") as name:
        folder = Path(name)
        shutil.copy(like / CONFIG, folder)
        tensors = {name: tensor.cpu().contiguous() for name, tensor in weights}
        save_file(tensors, folder / ADAPTER, metadata={"format": "pt"})
        yield folder
