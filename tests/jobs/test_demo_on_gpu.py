"""The demo on a GPU: rollout controller, worker, trainer and an unmodified vLLM."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest
import torch
from demos import check_demo, run_demo

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU"),
    pytest.mark.skipif(
        importlib.util.find_spec("vllm") is None, reason="vLLM is not installed in this environment"
    ),
]


@pytest.mark.parametrize("mode", ["in_place", "staged"])
def test_every_answer_of_a_vllm_on_the_trainers_gpu_names_the_versions_that_made_it(
    tmp_path: Path, mode: str
) -> None:
    options = ("--device", "cuda", "--engine", "vllm", "--mode", mode)
    check_demo(run_demo(tmp_path, *options, steps=12), 12, ["engine-a"], least_control=0.5)
