"""`WeightSync` without an engine: refused arguments, and reports of one rank's failure to all ranks of a trainer."""

from __future__ import annotations

import inspect
import json
import re
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from http_answers import answering
from plain_vllm import syncing
from servers import save

from windlass.errors import ConfigError, PeerUnreachable
from windlass.integrations.hosted import HostedController
from windlass.integrations.vllm import PAUSE_MODES, VllmServers, WeightSync
from windlass.net.access import Access
from windlass.net.addresses import free_port
from windlass.trainers.fsdp import connect_trainer

TOLD_S = 20.0
"""Limit in seconds for the report to all ranks."""
NOWHERE = "http://127.0.0.1:1"


@pytest.mark.parametrize(
    ("servers", "what"),
    [
        ([], "servers: must be a sequence of one URL or more, got []"),
        (NOWHERE, "servers: must be a sequence of one URL or more"),
        (["127.0.0.1:8000"], "servers must be http or https://host"),
        ([NOWHERE, NOWHERE + "/"], "servers: each URL must occur once"),
    ],
)
def test_wrong_server_lists_are_refused_before_any_request(servers: list[str], what: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(what)):
        WeightSync(torch.nn.Linear(2, 2), servers=servers)


@pytest.mark.parametrize("name", ["name_map", "stacked", "allow_unused", "keep"])
def test_weight_sync_names_tensors_as_connect_trainer_does(name: str) -> None:
    """Another default for `stacked` switched the conversion of transformers off."""
    own, public = (inspect.signature(each).parameters for each in (WeightSync, connect_trainer))
    assert own[name].default == public[name].default


def test_a_pause_mode_unknown_to_vllm_is_refused() -> None:
    with pytest.raises(ConfigError, match=re.escape(f"pause: must be one of {PAUSE_MODES}")):
        WeightSync(torch.nn.Linear(2, 2), servers=[NOWHERE], pause="retract")
    with pytest.raises(ConfigError, match=re.escape(f"pause: must be one of {PAUSE_MODES}")):
        VllmServers([NOWHERE]).pause([NOWHERE], "retract", 1.0)


def test_an_absent_server_is_reported_with_its_url() -> None:
    servers = VllmServers([NOWHERE])
    reasons = servers.resume([NOWHERE], 5.0)
    assert list(reasons) == [NOWHERE]
    assert f"POST {NOWHERE}/resume: ConnectionRefusedError" in reasons[NOWHERE]
    with pytest.raises(PeerUnreachable, match="init_weight_transfer_engine"):
        servers.init_weight_transfer_engine({NOWHERE: {}}, 5.0)
    servers.close()


def test_a_client_waits_for_a_server_that_does_not_listen_yet(
    caplog: pytest.LogCaptureFixture,
) -> None:
    port = free_port()
    url = f"http://127.0.0.1:{port}"
    servers = VllmServers([url])
    with ThreadPoolExecutor(1) as pool, caplog.at_level("INFO", "windlass"):
        asked = pool.submit(servers.world_size, url, 5.0, listens_within_s=60.0)
        with pytest.raises(TimeoutError):
            asked.result(0.5)
        body = json.dumps({"world_size": 3}).encode()
        with answering(lambda _path, _asked: (200, body), port=port):
            assert asked.result(30) == 3
    assert caplog.text.count(f"waiting for {url}, which does not listen yet: at most 60 s") == 1
    began_s = time.monotonic()
    with pytest.raises(PeerUnreachable, match=r"did not listen within 0\.3 s.*ConnectionRef"):
        servers.world_size(url, 5.0, listens_within_s=0.3)
    assert time.monotonic() - began_s < 10
    servers.close()


@pytest.mark.parametrize(
    "told",
    [
        "RuntimeError: Weight transfer not configured. Please set weight_transfer_config",
        "ValueError: Invalid init_info for NCCLWeightTransferEngine: unexpected argument 'name'",
    ],
)
def test_a_server_without_our_backend_is_reported_with_the_missing_flag(told: str) -> None:
    with answering(lambda _path, _asked: (500, told.encode())) as url:
        servers = VllmServers([url])
        with pytest.raises(PeerUnreachable) as raised:
            servers.init_weight_transfer_engine({url: {}}, 5.0)
        servers.close()
    flag = """--weight-transfer-config '{"backend": "windlass"}'"""
    assert str(raised.value).endswith(f"; start the server with {flag}")


def test_every_rank_fails_when_a_server_is_absent(tmp_path: Path) -> None:
    source, url = save("dense", 1, tmp_path / "source"), f"http://127.0.0.1:{free_port()}"
    with syncing(
        tmp_path / "trainers", 2, source=str(source), servers=[url], deadline_s=2.0
    ) as trainers:
        first, second = trainers.answers()
    for sent in (first, second):
        assert f"GET {url}/get_world_size: ConnectionRefusedError" in sent.error
        assert sent.took_s < TOLD_S
    assert "rank 0 of the trainer: PeerUnreachable" in second.error


def test_a_hosted_controller_gives_tokens_of_roles_and_frees_its_port() -> None:
    hosted = HostedController([NOWHERE])
    addresses = [hosted.address(role) for role in (Access.TRAINER, Access.ENGINE)]
    tokens = {address.token for address in addresses}
    assert len(tokens) == 2
    assert not any(token in repr((hosted.controller, addresses)) for token in tokens)
    began_s = time.monotonic()
    hosted.close()
    hosted.close()
    assert time.monotonic() - began_s < TOLD_S
    with pytest.raises(PeerUnreachable):
        VllmServers([addresses[0].url]).world_size(addresses[0].url, 1.0)
