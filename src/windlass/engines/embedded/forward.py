"""One forward pass of a padded batch over a cache with a row per running request."""

from __future__ import annotations

from typing import Any, final

import torch

from windlass.engines.embedded.steps import Step

__all__ = ["ForwardRunner"]


@final
class _SlotCache:
    """Keys and values (slots, heads, positions, head dim) per layer, written where a step says.

    The part of transformers' `Cache` that a decoder calls: `update` and `get_seq_length`.
    """

    is_compileable = False

    def __init__(self, num_slots: int, max_positions: int) -> None:
        self._num_slots, self._max_positions = num_slots, max_positions
        self._keys: dict[int, torch.Tensor] = {}
        self._values: dict[int, torch.Tensor] = {}
        self._slots = torch.zeros(0, dtype=torch.int64)
        self._positions = torch.zeros(0, 0, dtype=torch.int64)
        self._span = 0

    def aim(self, slots: torch.Tensor, positions: torch.Tensor, span: int) -> None:
        """Say which rows (B,) and positions (B, T) the next pass writes, and reads up to `span`."""
        self._slots, self._positions, self._span = slots, positions, span

    def get_seq_length(self, layer_idx: int = 0) -> int:  # noqa: ARG002
        """Unused by a pass that is given its positions and its mask."""
        return 0

    def update(
        self,
        key_states: torch.Tensor,
        value_states: torch.Tensor,
        layer_idx: int,
        *_unused: object,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Store (B, heads, T, D) and return (B, heads, span, D)."""
        if layer_idx not in self._keys:
            _, heads, _, dim = key_states.shape
            shape = (self._num_slots, self._max_positions, heads, dim)
            self._keys[layer_idx] = key_states.new_zeros(shape)
            self._values[layer_idx] = value_states.new_zeros(shape)
        rows = self._slots[:, None]
        outputs = []
        for store, new in (
            (self._keys[layer_idx], key_states),
            (self._values[layer_idx], value_states),
        ):
            store[rows, self._positions] = new.transpose(1, 2)
            outputs.append(store[self._slots, : self._span].transpose(1, 2))
        return outputs[0], outputs[1]


@final
class ForwardRunner:
    """Runs steps. Every rank of the engine runs the same ones."""

    def __init__(self, module: torch.nn.Module, *, num_slots: int, max_positions: int) -> None:
        self._module: Any = module
        self._cache = _SlotCache(num_slots, max_positions)
        self._max_positions = max_positions

    @torch.inference_mode()
    def run(self, step: Step) -> torch.Tensor:
        """Logits (B, V) in float32 of the token after the last one of each row."""
        tokens = torch.tensor(step.tokens)
        start = torch.tensor(step.start)[:, None]
        lengths = torch.tensor(step.lengths)
        steps = torch.arange(tokens.shape[1])[None, :]
        positions = (start + steps).clamp(max=self._max_positions - 1)
        span = int((start[:, 0] + lengths).max())
        self._cache.aim(torch.tensor(step.slots), positions, max(span, int(positions.max()) + 1))
        reach = torch.arange(max(span, int(positions.max()) + 1))[None, None, None, :]
        visible = reach <= positions[:, None, :, None]
        hidden = self._module.model(
            input_ids=tokens,
            position_ids=positions,
            attention_mask=self._additive(visible),
            past_key_values=self._cache,
            use_cache=True,
        ).last_hidden_state
        last = hidden[torch.arange(len(lengths)), lengths - 1]
        logits: torch.Tensor = self._module.lm_head(last)
        return logits.float()

    def _additive(self, visible: torch.Tensor) -> torch.Tensor:
        dtype = next(self._module.parameters()).dtype
        lowest = torch.finfo(dtype).min
        return torch.zeros(visible.shape, dtype=dtype).masked_fill(~visible, lowest)
