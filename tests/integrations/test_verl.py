"""verl 0.9.1's own worker groups over Ray, with Windlass's checkpoint engine from the configuration."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from fresh_servers import SUPPORT
from plain_vllm import HTTP_S, serving_plain
from servers import ROOT, environment

from tools.entry_points import write_entry_points

pytestmark = [pytest.mark.engines, pytest.mark.timeout(1500)]

HERE = Path(__file__).parent
VENV = Path(os.environ.get("WINDLASS_VERL_VENV", ROOT / ".venv-verl"))
NUM_ROLLOUTS = 3
NUM_STEPS = 3
"""Steps of the trainer, as `verl_ppo_job.NUM_STEPS`."""
AT_ONCE_S = 3.0
SLEEPS = (SUPPORT, SUPPORT / "cpu_sleep")
"""Folders of the plugin that gives vLLM's worker for CPUs a sleep mode."""
STOP_S = 4.0
"""Seconds that a stopped reader waits, as `verl_job.STOP_S`."""
MODEL = """
import sys, torch, transformers
torch.manual_seed(0)
config = transformers.Qwen3Config(
    vocab_size=256, hidden_size=128, intermediate_size=1024, num_hidden_layers=4, max_position_embeddings=256,
    num_attention_heads=4, num_key_value_heads=2, head_dim=32, tie_word_embeddings=False)
transformers.Qwen3ForCausalLM(config).to(torch.bfloat16).save_pretrained(sys.argv[1])
from tokenizers import Tokenizer, models, pre_tokenizers
# verl's agent loop requires these two tokens for every Qwen model.
names = {f"w{number}": number for number in range(254)} | {"\\n": 254, "<|im_end|>": 255}
words = Tokenizer(models.WordLevel(names, unk_token="w0"))
words.pre_tokenizer = pre_tokenizers.Sequence(
    [pre_tokenizers.Split(" ", "removed"), pre_tokenizers.Split("\\n", "isolated")])
transformers.PreTrainedTokenizerFast(
    tokenizer_object=words, unk_token="w0", pad_token="w1", eos_token="w2", chat_template="{% for message in messages %}"
    "{{ message['content'] + ' <|im_end|>\\n' }}{% endfor %}").save_pretrained(sys.argv[1])
"""


def run(folder: Path, *command: str, path: Sequence[Path] = ()) -> None:
    """Run a command with verl's interpreter, as if Windlass were installed next to verl. `path`: further folders of modules."""
    # verl asks for the version of the package `vllm`. The wheel for CPUs has another name.
    info = folder / "installed" / "vllm-0.32.0+cpu.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: vllm\nVersion: 0.32.0+cpu\n")
    found = [ROOT / "src", HERE, write_entry_points(folder / "installed"), *path]
    variables = {
        **environment("vllm", 1, os.pathsep.join(map(str, found))),
        "VLLM_SERVER_DEV_MODE": "1",
        "VERL_PLATFORM": "cpu",
        # A busy machine needs longer.
        "RAY_raylet_start_wait_time_s": "300",
        # By default, Ray gives its workers the lowest priority.
        "RAY_worker_niceness": "0",
        "VERL_USE_EXTERNAL_MODULES": "verl_cpu_platform",
        # verl registers its FSDP engine only for this device and vendor.
        "VERL_ENGINE_DEVICE": "cuda",
        "VERL_ENGINE_VENDOR": "nvidia",
    }
    log = folder / "log"
    with log.open("w") as out:
        done = subprocess.run(
            [VENV / "bin" / "python", *command],
            env=variables,
            stdout=out,
            stderr=out,
            check=False,
        )
    assert done.returncode == 0, log.read_text()[-4000:]


def test_doctor_reports_that_verl_finds_windlass(tmp_path: Path) -> None:
    run(tmp_path, "-m", "windlass.cli.main", "doctor", "--framework", "verl", "--json")
    assert "windlass.integrations.verl" in (tmp_path / "log").read_text()


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    run(folder, "-c", MODEL, str(folder / "checkpoint"))
    return folder / "checkpoint"


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory, checkpoint: Path) -> dict[str, Any]:
    folder = tmp_path_factory.mktemp("verl")
    run(
        folder,
        *(str(HERE / "verl_job.py"), "--model", str(checkpoint)),
        *("--out", str(folder / "found.json"), "--rollouts", str(NUM_ROLLOUTS)),
        *("--engine-kwargs", '{"transport": "cma"}'),
    )
    answer: dict[str, Any] = json.loads((folder / "found.json").read_text())
    return answer


def check_whole(update: dict[str, Any], num_rollouts: int) -> None:
    """Check that every rollout rank has every tensor of verl's export, with equal elements."""
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


def test_the_sender_and_other_receivers_fail_at_once_for_a_killed_receiver(
    found: dict[str, Any],
) -> None:
    killed = found["receiver killed"]
    assert killed["raised"]
    assert len(killed["told"]) == NUM_ROLLOUTS
    for why, after_s in killed["told"]:
        assert "PeerUnreachable" in why
        assert after_s < AT_ONCE_S
    check_whole(found["after it"], NUM_ROLLOUTS - 1)


def test_every_receiver_fails_at_once_when_the_sender_is_killed(found: dict[str, Any]) -> None:
    killed = found["sender killed"]
    assert killed["raised"]
    assert len(killed["told"]) == NUM_ROLLOUTS - 1
    for why, _ in killed["told"]:
        assert "PeerUnreachable" in why
    first, last = sorted(after_s for _, after_s in killed["told"])
    # The first receiver was waiting for a bucket. The other was stopped while it read a bucket.
    assert first < AT_ONCE_S
    assert last < STOP_S + AT_ONCE_S


@pytest.fixture(scope="module")
def sharded(tmp_path_factory: pytest.TempPathFactory, checkpoint: Path) -> dict[str, Any]:
    """Provide the results of `verl_shard_job.py`; `weights` is a checkpoint of the actor's final weights."""
    folder = tmp_path_factory.mktemp("shards")
    run(
        folder,
        *(str(HERE / "verl_shard_job.py"), "--model", str(checkpoint)),
        *("--out", str(folder / "found.json")),
    )
    answer: dict[str, Any] = json.loads((folder / "found.json").read_text())
    return {**answer, "weights": folder / "weights"}


def check_served(update: dict[str, Any], num_servers: int) -> None:
    """Check that all servers have the same weights and label tokens with the step."""
    assert len(update["checksums"]) == len(update["answers"]) == num_servers
    for number in range(1, num_servers):
        assert update["checksums"][number] == update["checksums"][0]
        assert update["answers"][number]["tokens"] == update["answers"][0]["tokens"]
    assert {answer["step"] for answer in update["answers"]} == {update["step"]}


def test_every_server_gets_the_shards_and_labels_tokens_with_their_step(
    sharded: dict[str, Any],
) -> None:
    held = sharded["first"]
    for update in sharded["updates"]:
        check_served(update, 2)
        assert update["checksums"][0] != held
        held = update["checksums"][0]
        assert update["metrics"]["windlass/nbytes"] > 2 * 2 * 1_000_000
        for cut_off in update["running"]:
            assert cut_off["stop_reason"] == "aborted"
            assert cut_off["step"] in (None, update["step"] - 1)


def test_a_server_that_left_gets_shards_again(sharded: dict[str, Any]) -> None:
    check_served(sharded["without one"], 1)
    check_served(sharded["with it again"], 2)


def test_a_killed_server_is_named_and_other_servers_get_the_weights(
    sharded: dict[str, Any],
) -> None:
    killed = sharded["killed"]
    assert killed["address"] in killed["raised"]
    assert killed["took_s"] < 30.0
    check_served(killed, 1)
    check_served(sharded["after it"], 1)


def test_the_last_weights_equal_the_weights_of_a_fresh_server(
    sharded: dict[str, Any], tmp_path: Path
) -> None:
    last = {**sharded["after it"], "weights": str(sharded["weights"])}
    check_fresh([last], sharded["prompt"], tmp_path)


@pytest.fixture(scope="module")
def turns(tmp_path_factory: pytest.TempPathFactory, checkpoint: Path) -> dict[str, Any]:
    """Provide the results of `verl_turn_job.py`."""
    folder = tmp_path_factory.mktemp("turns")
    run(
        folder,
        *(str(HERE / "verl_turn_job.py"), "--model", str(checkpoint)),
        *("--out", str(folder / "found.json")),
        path=SLEEPS,
    )
    answer: dict[str, Any] = json.loads((folder / "found.json").read_text())
    return answer


def check_turn(update: dict[str, Any], num_servers: int) -> None:
    """Check that all servers serve the same weights, and that every actor rank has offloaded its parameters once."""
    check_served(update, num_servers)
    assert update["offloads"] == [1, 1]
    assert update["metrics"]["windlass/nbytes"] >= num_servers * 2 * 1_000_000


def test_servers_on_the_actors_gpus_sleep_and_get_every_step(turns: dict[str, Any]) -> None:
    held = None
    for step, update in enumerate(turns["updates"]):
        assert update["step"] == step
        check_turn(update, 2)
        assert update["checksums"][0] != held
        held = update["checksums"][0]


def test_servers_do_not_answer_after_a_failed_offload(turns: dict[str, Any]) -> None:
    failed = turns["failed offload"]
    assert "the test fails this offload" in failed["raised"]
    assert failed["num_answered"] == 0
    check_turn(failed["after it"], 2)
    for waited, answer in zip(failed["waited"], failed["after it"]["answers"], strict=True):
        assert waited["tokens"] == answer["tokens"]


def test_a_server_killed_in_a_turn_is_named_and_other_servers_get_the_weights(
    turns: dict[str, Any],
) -> None:
    killed = turns["killed server"]
    assert killed["address"] in killed["raised"]
    check_served(killed, 1)
    check_turn(killed["after it"], 1)


def test_servers_do_not_answer_after_an_actor_rank_is_killed(turns: dict[str, Any]) -> None:
    assert turns["killed actor"]["raised"]
    assert turns["killed actor"]["num_answered"] == 0


def test_servers_on_the_actors_gpus_equal_fresh_loads(
    turns: dict[str, Any], tmp_path: Path
) -> None:
    after = [turns["failed offload"]["after it"], turns["killed server"]]
    check_fresh([*turns["updates"], *after, after[-1]["after it"]], turns["prompt"], tmp_path)


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory, checkpoint: Path) -> list[dict[str, Any]]:
    """Provide the records of `verl_ppo_job.py`: the state of all servers after the update of each step, from step 0 on.

    `weights` of a record is the checkpoint that verl saved in the step.
    """
    folder = tmp_path_factory.mktemp("ppo")
    run(
        folder,
        *(str(HERE / "verl_ppo_job.py"), "--model", str(checkpoint)),
        *("--out", str(folder / "found.json")),
        path=SLEEPS,
    )
    saved = [folder / f"global_step_{step}/actor/huggingface" for step in range(1, NUM_STEPS + 1)]
    records = json.loads((folder / "found.json").read_text())
    return [
        {**record, "step": step, "weights": str(weights)}
        for step, (record, weights) in enumerate(zip(records, [checkpoint, *saved], strict=True))
    ]


def test_verls_own_job_serves_the_weights_of_every_step(
    trained: list[dict[str, Any]], tmp_path: Path
) -> None:
    for record in trained:
        check_served(record, 2)
    check_fresh(trained, trained[-1]["prompt"], tmp_path)


def test_verls_own_job_gets_every_step_by_a_new_version(trained: list[dict[str, Any]]) -> None:
    served = [
        identity.rpartition("/") for record in trained for identity in {*record["identities"]}
    ]
    assert len({lineage for lineage, _, _ in served}) == 1
    # The servers join without a version. verl's trainer then makes an update for step 0.
    assert [int(version) for _, _, version in served] == [1 + step for step in range(NUM_STEPS + 1)]
    digests = [json.dumps(record["digests"][0]) for record in trained]
    assert len({*digests}) == NUM_STEPS + 1


def check_fresh(updates: Sequence[dict[str, Any]], prompt: list[int], folder: Path) -> None:
    """Check that servers had the tensors of fresh loads after every update, and the tokens of a fresh server after the last."""
    last = updates[-1]
    tokens, loads = (
        last["answers"][0]["tokens"],
        ("--worker-extension-cls", "vllm_fresh.FreshLoads"),
    )
    with serving_plain(Path(last["weights"]), folder / "fresh.log", flags=loads) as fresh:
        assert fresh.checksums() == last["checksums"][0]
        assert fresh.answer(prompt, len(tokens))[0] == tokens
        for update in updates:
            body = {"method": "fresh_digests", "args": [update["weights"]]}
            found = json.loads(fresh.http.post("/collective_rpc", body, HTTP_S))["results"][0]
            assert update["digests"] == [found] * len(update["checksums"])
