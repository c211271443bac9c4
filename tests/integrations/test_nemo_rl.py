"""Windlass's checkpoint engine, from NeMo-RL's configuration and factory, between real processes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from servers import ROOT

from windlass.net.addresses import free_port

HERE = Path(__file__).parent
CHECKOUT = os.environ.get("WINDLASS_NEMO_RL", "")
NUM_POLICY, NUM_RANKS = 2, 4
DONE_S = 300.0

pytestmark = [
    pytest.mark.engines,
    pytest.mark.skipif(
        not CHECKOUT,
        reason="WINDLASS_NEMO_RL names no checkout of NVIDIA-NeMo/RL, which PyPI lacks",
    ),
]


def test_every_element_of_every_update_reaches_every_rank_of_vllm(tmp_path: Path) -> None:
    store = f"tcp://127.0.0.1:{free_port()}"
    outs = [tmp_path / f"{rank}.json" for rank in range(NUM_RANKS)]
    ranks = [
        subprocess.Popen(
            [
                *(sys.executable, str(HERE / "nemo_rl_rank.py"), str(rank), str(NUM_RANKS)),
                *(store, str(NUM_POLICY), str(out)),
            ],
            env={**os.environ, "PYTHONPATH": os.pathsep.join((str(ROOT / "src"), CHECKOUT))},
        )
        for rank, out in enumerate(outs)
    ]
    try:
        assert [rank.wait(DONE_S) for rank in ranks] == [0] * NUM_RANKS
    finally:
        for rank in ranks:
            rank.kill()
    answers = [json.loads(out.read_text()) for out in outs]
    assert answers == [[]] * NUM_POLICY + [[True] * 3] * (NUM_RANKS - NUM_POLICY)
