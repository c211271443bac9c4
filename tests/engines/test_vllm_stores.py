"""A live vLLM server with a store outside its cache never answers from entries of other weights.

The server's own cache has room for one prompt and a half, so that a repeated prompt comes from the store. After every update
the first answers compute their prompts again, and repeated prompts come from the store with the new weights and
are equal. The answers of the last weights equal those of a fresh server without a store.
"""

from __future__ import annotations

import json
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest
from fresh_servers import require_equal_answers, serving_fresh
from live_updates import Counter, update_beside
from rows import Record, of_setting
from servers import (
    HTTP_S,
    VENVS,
    Layout,
    Server,
    build,
    engine_version,
    save,
    serving,
)

from windlass.config import UpdateMode
from windlass.net.addresses import free_port

pytestmark = [pytest.mark.engines, pytest.mark.timeout(1200)]

KIND = "long"
BLOCK, NUM_BLOCKS, NUM_TOKENS = 32, 20, 12
PROMPTS = [[(i * i * 7 + i * 3 + 31 * n) % 240 + 5 for i in range(400)] for n in range(3)]
"""Prompts without a common prefix. Each fills 12 blocks."""
STORES: dict[str, dict[str, object]] = {
    "OffloadingConnector": {
        "spec_name": "HostSpec",
        "spec_module_path": "vllm_cpu_store",
        "cpu_bytes_to_use": 256 << 20,
    },
    "MooncakeStoreConnector": {},
    "SimpleCPUOffloadConnector": {"cpu_bytes_to_use": 256 << 20},
}
"""Connector -> its `kv_connector_extra_config`."""
FLAGS = (
    *("--dtype", "float32", "--max-model-len", "512", "--block-size", str(BLOCK)),
    *("--num-gpu-blocks-override", str(NUM_BLOCKS)),
)
_IN_TORCH = "the test copies blocks in plain torch, because vLLM's copies need a GPU"
BLOCKS = {
    "OffloadingConnector": _IN_TORCH,
    "SimpleCPUOffloadConnector": _IN_TORCH,
    "MooncakeStoreConnector": "the store is Mooncake's, over TCP",
}
Said = tuple[list[int], list[float]]


def tokens_of(answers: Sequence[Said]) -> list[list[int]]:
    return [tokens for tokens, _ in answers]


def ask_all(server: Server) -> list[Said]:
    """Ask every prompt in turn; each displaces the blocks of the one before it."""
    found = [server.sample(list(prompt), NUM_TOKENS) for prompt in PROMPTS]
    return [(sample.tokens, sample.logprobs) for sample in found]


@contextmanager
def mooncake_master(folder: Path) -> Iterator[dict[str, str]]:
    """Run the master of a Mooncake store, and yield variables for its clients."""
    port, metrics = free_port(), free_port()
    told = {
        "metadata_server": "P2PHANDSHAKE", "master_server_address": f"127.0.0.1:{port}", "protocol": "tcp",
        "device_name": "", "global_segment_size": "256mb", "local_buffer_size": "64mb",
    }  # fmt: skip
    (folder / "mooncake.json").write_text(json.dumps(told))
    command = [str(VENVS["vllm"] / "bin/mooncake_master"), f"--rpc_port={port}"]
    with (folder / "master.log").open("w") as log:
        process = subprocess.Popen(
            [*command, f"--metrics_port={metrics}"], stdout=log, stderr=subprocess.STDOUT
        )
    try:
        yield {"MOONCAKE_CONFIG_PATH": str(folder / "mooncake.json")}
    finally:
        process.terminate()
        process.wait(HTTP_S)


@pytest.mark.parametrize("connector", list(STORES))
async def test_no_answer_after_an_update_comes_from_stored_entries_of_old_weights(
    connector: str, tmp_path: Path, shown: Record
) -> None:
    own = save(KIND, 1, tmp_path / "1")
    told: dict[int, list[list[Said]]] = {}
    store = {
        "kv_connector": connector,
        "kv_role": "kv_both",
        "kv_connector_extra_config": STORES[connector],
    }
    flags = (*FLAGS, "--kv-transfer-config", json.dumps(store))
    with ExitStack() as running:
        given = {}
        if connector == "MooncakeStoreConnector":
            given = running.enter_context(mooncake_master(tmp_path))
        server = running.enter_context(
            serving(
                "vllm",
                own,
                tmp_path / "live.log",
                layout=Layout(),
                flags=flags,
                variables={"VLLM_HOST_IP": "127.0.0.1", **given},
            )
        )
        hits = Counter(server, "external_prefix_cache_hits_total")
        told[1] = [ask_all(server) for _ in range(2)]
        assert hits.since() > 0, "repeated prompts must come from the store"
        for version, mode in ((2, UpdateMode.IN_PLACE), (3, UpdateMode.STAGED)):
            model = build(KIND, version)
            model.save_pretrained(tmp_path / str(version))
            # The request runs across the update: its entries belong to the old weights.
            await update_beside(
                server, model, version, mode, prompt=PROMPTS[0], num_tokens=100, head_start_s=0.1
            )
            hits.since()
            first = ask_all(server)
            assert hits.since() == 0, "entries of old weights must not be found"
            told[version] = [first, ask_all(server)]
            assert hits.since() > 0, "repeated prompts must come from the store"
    for first, second in told.values():
        require_equal_answers(second, first)
    with serving_fresh("vllm", tmp_path / "3", tmp_path / "fresh.log") as fresh:
        said = [fresh.answer(prompt, NUM_TOKENS) for prompt in PROMPTS]
    for answers in told[3]:
        assert tokens_of(answers) == tokens_of(said)
        require_equal_answers(answers, said)
    one, two, three = (tokens_of(told[version][0]) for version in (1, 2, 3))
    assert one != two != three
    setting = f"--kv-transfer-config with kv_connector {connector}"
    detail = f"entries are kept apart by version; {BLOCKS[connector]}"
    shown(of_setting("vllm", engine_version("vllm"), setting, detail=detail))
