"""Through slime's interface of weight updaters, live Megatron-core ranks update an SGLang server with the plugin."""

from __future__ import annotations

import sys
from argparse import Namespace
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from types import ModuleType

import pytest
from servers import TOKEN, Server, save
from sglang_servers import (
    SLIME_SERVER,
    check_answer,
    install,
    kill,
    launched,
    token_file,
    variables,
)
from trainer_rank import Order

from trainers import MEGATRON_TP, Ranks, training
from windlass.errors import ConfigError
from windlass.integrations import slime
from windlass.net.addresses import free_port


@pytest.mark.engines
@pytest.mark.timeout(900)
def test_megatron_ranks_update_servers_through_slimes_interface(tmp_path: Path) -> None:
    old, log, port = save("dense", 1, tmp_path / "old"), tmp_path / "server.log", free_port()
    told = {"WINDLASS_CONTROLLER": "wait", "WINDLASS_TOKEN_FILE": str(token_file(tmp_path, TOKEN))}
    environment = variables(install(tmp_path / "site"), **told)
    started = partial(launched, old, log, port, environment, program=SLIME_SERVER)
    with ExitStack() as running:
        ranks = running.enter_context(training(MEGATRON_TP, "dense", old, script="slime_rank.py"))
        with started() as server:
            update(server, ranks, 41, tmp_path, has_new_engines=True)
            update(server, ranks, 42, tmp_path)
            kill(server)
        server = running.enter_context(started())
        update(server, ranks, 43, tmp_path, has_new_engines=True)


def update(
    server: Server, ranks: Ranks, version: int, folder: Path, *, has_new_engines: bool = False
) -> None:
    checkpoint = folder / str(version)
    order = Order(server.url, "new" if has_new_engines else "", version, str(checkpoint))
    ranks.publish(order)
    assert server.digests() == server.digests_of_fresh_load(checkpoint)
    check_answer(server, checkpoint, version)


USUAL = {
    "colocate": False,
    "offload_train": None,
    "update_weight_mode": "full",
    "update_weight_transport": "nccl",
}


@pytest.fixture
def actor(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """Provide slime's module with the names of its updaters."""
    module = ModuleType("slime.backends.megatron_utils.actor")
    vars(module)["UpdateWeightFromDistributed"] = "slime's own"
    for name in ("slime", "slime.backends", "slime.backends.megatron_utils"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    monkeypatch.setitem(sys.modules, module.__name__, module)
    return module


def test_slimes_actor_finds_the_updater(actor: ModuleType) -> None:
    slime.install(Namespace(**USUAL))
    assert vars(actor)["UpdateWeightFromDistributed"] is slime.WeightUpdater


@pytest.mark.parametrize(
    ("option", "given", "says"),
    [
        ("colocate", True, "--colocate must be False with Windlass, got True"),
        ("offload_train", True, "--offload-train must be False with Windlass, got True"),
        (
            "update_weight_mode",
            "delta",
            "--update-weight-mode must be full with Windlass, got delta",
        ),
        ("update_weight_transport", "disk", "--update-weight-transport must be nccl"),
    ],
)
def test_slime_options_that_prevent_updates_are_refused(
    actor: ModuleType, option: str, given: object, says: str
) -> None:
    with pytest.raises(ConfigError, match=says):
        slime.install(Namespace(**{**USUAL, option: given}))
    assert vars(actor)["UpdateWeightFromDistributed"] == "slime's own"


def test_a_checkpoint_that_does_not_say_its_family_is_refused(tmp_path: Path) -> None:
    args = Namespace(hf_checkpoint=str(tmp_path), vocab_size=8)
    for content in (None, "{}", "no JSON"):
        if content is not None:
            (tmp_path / "config.json").write_text(content)
        with pytest.raises(ConfigError, match=f"--hf-checkpoint must be a folder.*got {tmp_path}"):
            slime.WeightUpdater(args, [], dict, model_name="x", quantization_config=None)
