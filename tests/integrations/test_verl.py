"""verl 0.9.1's own worker groups over Ray, with the checkpoint engine that its configuration names."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest
from servers import ROOT

from tools.entry_points import write_entry_points

pytestmark = [pytest.mark.engines, pytest.mark.timeout(900)]

HERE = Path(__file__).parent
VENV = Path(os.environ.get("WINDLASS_VERL_VENV", ROOT / ".venv-verl"))
NUM_ROLLOUTS = 3
AT_ONCE_S = 3.0
STOP_S = 4.0
"""`verl_job.STOP_S`: how long the reader that was told to stop stands still."""
MODEL = """
import sys, torch, transformers
torch.manual_seed(0)
config = transformers.Qwen3Config(
    vocab_size=2048, hidden_size=128, intermediate_size=352, num_hidden_layers=4,
    num_attention_heads=8, num_key_value_heads=4, head_dim=16, tie_word_embeddings=False)
transformers.Qwen3ForCausalLM(config).to(torch.bfloat16).save_pretrained(sys.argv[1])
from tokenizers import Tokenizer, models
words = Tokenizer(models.WordLevel({"a": 0, "b": 1, "c": 2}, unk_token="a"))
transformers.PreTrainedTokenizerFast(
    tokenizer_object=words, pad_token="c", eos_token="b").save_pretrained(sys.argv[1])
"""


def run(folder: Path, *command: str) -> None:
    """With verl's interpreter, as an installation of Windlass beside verl would be seen there."""
    path = [ROOT / "src", HERE, write_entry_points(folder / "installed")]
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(map(str, path)),
        "VERL_PLATFORM": "cpu",
        "VERL_USE_EXTERNAL_MODULES": "verl_cpu_platform",
        # Its FSDP engine is registered for these only.
        "VERL_ENGINE_DEVICE": "cuda",
        "VERL_ENGINE_VENDOR": "nvidia",
    }
    log = folder / "log"
    with log.open("w") as out:
        done = subprocess.run(
            [VENV / "bin" / "python", *command],
            env=environment,
            stdout=out,
            stderr=out,
            check=False,
        )
    assert done.returncode == 0, log.read_text()[-4000:]


def test_doctor_says_that_verl_finds_windlass(tmp_path: Path) -> None:
    run(tmp_path, "-m", "windlass.cli.main", "doctor", "--framework", "verl", "--json")
    assert "windlass.integrations.verl" in (tmp_path / "log").read_text()


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folder = tmp_path_factory.mktemp("verl")
    run(tmp_path_factory.mktemp("model"), "-c", MODEL, str(folder / "checkpoint"))
    run(
        folder,
        *(str(HERE / "verl_job.py"), "--model", str(folder / "checkpoint")),
        *("--out", str(folder / "found.json"), "--rollouts", str(NUM_ROLLOUTS)),
        *("--engine-kwargs", '{"transport": "cma"}'),
    )
    answer: dict[str, Any] = json.loads((folder / "found.json").read_text())
    return answer


def check_whole(update: dict[str, Any], num_rollouts: int) -> None:
    """Every tensor of verl's export is on every rollout rank, every element the same."""
    assert update["differences"] == [[]] * num_rollouts
    assert update["num_tensors"] == 47
    assert update["num_elements"] > 1_000_000
    assert update["metrics"]["windlass/num_buckets"] > 1


def test_every_element_arrives_in_every_update(found: dict[str, Any]) -> None:
    for update in found["updates"]:
        check_whole(update, NUM_ROLLOUTS)


def test_a_replica_leaves_and_comes_back(found: dict[str, Any]) -> None:
    check_whole(found["without one"], NUM_ROLLOUTS - 1)
    check_whole(found["with it again"], NUM_ROLLOUTS)


def test_a_killed_receiver_is_told_to_the_sender_and_to_the_others_at_once(
    found: dict[str, Any],
) -> None:
    killed = found["receiver killed"]
    assert killed["raised"]
    assert len(killed["told"]) == NUM_ROLLOUTS
    for why, after_s in killed["told"]:
        assert "PeerUnreachable" in why
        assert after_s < AT_ONCE_S
    check_whole(found["after it"], NUM_ROLLOUTS - 1)


def test_a_killed_sender_is_told_to_every_receiver_at_once(found: dict[str, Any]) -> None:
    killed = found["sender killed"]
    assert killed["raised"]
    assert len(killed["told"]) == NUM_ROLLOUTS - 1
    for why, _ in killed["told"]:
        assert "PeerUnreachable" in why
    first, last = sorted(after_s for _, after_s in killed["told"])
    assert first < AT_ONCE_S  # who waited for a bucket
    assert last < STOP_S + AT_ONCE_S  # who stood still with one in its hands
