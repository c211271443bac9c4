"""The demo on a GPU: rollout controller, worker, trainer and an unmodified engine."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest
import torch
from demos import check_demo, run_demo

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU"),
]


@pytest.mark.parametrize("mode", ["in_place", "staged"])
@pytest.mark.parametrize("engine", ["vllm", "sglang"])
def test_every_answer_of_an_engine_on_the_trainers_gpu_names_the_versions_that_made_it(
    tmp_path: Path, engine: str, mode: str
) -> None:
    if importlib.util.find_spec(engine) is None:
        pytest.skip(f"{engine} is not installed in this environment")
    options = ("--device", "cuda", "--engine", engine, "--mode", mode)
    check_demo(run_demo(tmp_path, *options, steps=12), 12, ["engine-a"], least_control=0.5)
