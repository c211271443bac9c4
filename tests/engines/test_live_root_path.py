"""A live server under a root path receives updates and refuses strangers on its private routes."""

from __future__ import annotations

import asyncio
import http.client
import json
from pathlib import Path
from urllib.parse import urlsplit

import pytest
from servers import TOKEN, Layout, Server, build, save, serving

import windlass

ROOT_PATH = "/v1/m"
OPTIONS = {"vllm": "--root-path", "sglang": "--fastapi-root-path"}
PRIVATE = {
    "vllm": ("/collective_rpc", "/pause", "/reset_prefix_cache", "/v1/load_lora_adapter"),
    "sglang": ("/update_weights_from_tensor", "/pause_generation", "/flush_cache"),
}
HTTP_S = 60.0

pytestmark = [
    pytest.mark.engines,
    pytest.mark.timeout(600),
    pytest.mark.filterwarnings("ignore::FutureWarning"),
]


def status_of(server: Server, path: str, body: object = None) -> int:
    """Return the status that a stranger without a key gets for a POST."""
    parts = urlsplit(server.url)
    connection = http.client.HTTPConnection(str(parts.hostname), parts.port, timeout=HTTP_S)
    try:
        headers = {"Content-Type": "application/json"}
        connection.request("POST", path, json.dumps(body or {}), headers)
        return connection.getresponse().status
    finally:
        connection.close()


@pytest.mark.parametrize("engine", ["vllm", "sglang"])
async def test_a_server_under_a_root_path_is_updated_and_refuses_strangers(
    engine: str, tmp_path: Path
) -> None:
    folder = save("dense", 1, tmp_path / "model")
    async with windlass.Controller(token=TOKEN) as controller:
        url = controller.url

        def update() -> None:
            flags = (OPTIONS[engine], ROOT_PATH)
            log = tmp_path / "server.log"
            with serving(
                engine, folder, log, layout=Layout(), controller=url, flags=flags
            ) as server:
                # SGLang expects a proxy that removes the prefix, and adds the prefix again. vLLM does not change paths.
                for path in PRIVATE[engine]:
                    assert status_of(server, path) == 403, path
                    assert status_of(server, ROOT_PATH + path) in {403, 404}, path
                body = {"input_ids": [5, 9, 33], "sampling_params": {"max_new_tokens": 4}}
                assert status_of(server, "/generate", body) == 200
                if engine == "vllm":
                    assert status_of(server, f"{ROOT_PATH}/generate", body) == 200
                model = build("dense", 2)
                with windlass.connect_trainer(model, controller=url, token=TOKEN) as client:
                    assert client.publish(1).result().digest_ok
                assert server.digests() == server.digests_of_fresh_load(
                    save("dense", 2, tmp_path / "new")
                )

        await asyncio.to_thread(update)
