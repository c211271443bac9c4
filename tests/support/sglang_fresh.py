"""The reference in SGLang's ranks: a second model that the engine's own loader makes from a checkpoint."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import msgspec
import sglang_cpu_gaps
import torch

from windlass.engines.capture.memory import fingerprints, held_by
from windlass.engines.rank_reports import carry_out
from windlass.engines.sglang.hook import own_rank

FAILS = os.environ.get("WINDLASS_TEST_LOAD_FAILS", "")
"""File that makes every load fail while it exists, after the number of tensors in it."""


def failing(weights: Iterable[tuple[str, torch.Tensor]]) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the tensors; fail if the file exists."""
    for number, named in enumerate(weights):
        if FAILS and Path(FAILS).exists() and number == int(Path(FAILS).read_text()):
            raise RuntimeError("told to fail")
        yield named


class LoadAfresh(msgspec.Struct, frozen=True):
    """Report the digests of a model loaded from `checkpoint` in `folder`, as JSON.

    The path `.` adds a parameter without memory to the model, or removes it again. A model with such a parameter
    cannot be searched for copies of its weights, so the rank refuses to sleep.
    """

    checkpoint: str
    folder: str


def run(model: Any, named_tensors: Sequence[tuple[str, torch.Tensor]]) -> None:
    """Carry out the order `LoadAfresh`; SGLang calls it in the main loop of every rank."""
    order = msgspec.json.decode(named_tensors[0][0], type=LoadAfresh)
    if Path(order.checkpoint) == Path():
        if hasattr(model, "without_memory"):
            del model.without_memory
        else:
            model.without_memory = torch.nn.UninitializedParameter()
        carry_out(order.folder, own_rank(), lambda _: b"{}")
        return
    if FAILS and "load_weights" not in vars(model):
        load = model.load_weights
        model.load_weights = lambda weights: load(failing(weights))
    from sglang.srt.configs.device_config import DeviceConfig
    from sglang.srt.configs.load_config import LoadConfig
    from sglang.srt.configs.model_config import ModelConfig
    from sglang.srt.model_loader import get_model
    from sglang.srt.runtime_context import get_server_args

    sglang_cpu_gaps.install()
    config = ModelConfig.from_server_args(get_server_args(), model_path=order.checkpoint)
    fresh = get_model(
        model_config=config, load_config=LoadConfig(), device_config=DeviceConfig("cpu", 0)
    )
    digests = msgspec.json.encode(fingerprints(held_by(fresh)))
    carry_out(order.folder, own_rank(), lambda _: digests)
