"""A failed capture, or a failure of a live engine's loader, changes no later answer.

The test replaces the files of a running server's model by those of other models, and orders the server to join. The
server refuses and gives the reason. Its answers keep the same tokens and logprobs, and its tensors keep their bytes. The
same server then joins with its own files and receives an update.

After an update that fails during its load, the next update succeeds. The server then has the weights that the engine's
own loader makes from that version.
"""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from servers import ADAPTER, TOKEN, Layout, Sample, Server, adapted, build, save, serving

import windlass
from windlass.config import ControlConfig, PauseMode, PhaseDeadlines, UpdateMode
from windlass.errors import WindlassError

PROMPTS = ([5, 9, 33, 101], [7, 7, 1, 200, 14, 3, 90], [120])
NUM_TOKENS = 12

pytestmark = [
    pytest.mark.engines,
    pytest.mark.timeout(1200),
    pytest.mark.filterwarnings("ignore::FutureWarning"),
]


def answers(server: Server) -> list[Sample]:
    return [server.sample(list(prompt), NUM_TOKENS) for prompt in PROMPTS]


def cut(folder: Path, to: Path, *, without: str = "", half: str = "") -> Path:
    """Copy a checkpoint without one of its tensors, or with only half the rows of a tensor."""
    tensors = load_file(folder / "model.safetensors")
    tensors.pop(without, None)
    if half:
        tensors[half] = tensors[half][: len(tensors[half]) // 2].clone()
    to.mkdir()
    save_file(tensors, to / "model.safetensors")
    (to / "config.json").write_text((folder / "config.json").read_text())
    return to


@contextmanager
def replaced(folder: Path, other: Path) -> Iterator[None]:
    """Replace the files of a folder by those of another one during the block."""
    aside = folder.rename(folder.with_name(f"{folder.name} aside"))
    shutil.copytree(other, folder)
    try:
        yield
    finally:
        shutil.rmtree(folder)
        aside.rename(folder)


async def refused(server: Server, own: Path, other: Path) -> str:
    """Return the reason why a server does not join while its folder has the files of another one."""
    async with windlass.Controller(token=TOKEN) as controller:
        with replaced(own, other), pytest.raises(WindlassError) as raised:
            await asyncio.to_thread(server.join, controller.url, "cma")
    return str(raised.value)


async def publish(
    server: Server, model: torch.nn.Module, version: int, *, mode: UpdateMode = UpdateMode.IN_PLACE
) -> None:
    config = ControlConfig(
        mode=mode, pause_mode=PauseMode.ABORT, deadlines=PhaseDeadlines(pause_s=120)
    )
    async with windlass.Controller(token=TOKEN, config=config) as controller:
        await asyncio.to_thread(server.join, controller.url, "cma")

        def update() -> None:
            with windlass.connect_trainer(model, controller=controller.url, token=TOKEN) as client:
                assert client.publish(version).result().digest_ok

        await asyncio.to_thread(update)


@pytest.mark.parametrize("tp", [1, 2])
@pytest.mark.parametrize("engine", ["vllm", "sglang"])
async def test_an_engine_that_refuses_to_join_answers_as_before(
    engine: str, tp: int, tmp_path: Path
) -> None:
    own = save("dense", 1, tmp_path / "own")
    down = "model.layers.1.mlp.down_proj.weight"
    others = {
        "of experts": save("moe", 2, tmp_path / "moe"),
        "of a state space": save("recurrent", 2, tmp_path / "recurrent"),
        "without a tensor": cut(own, tmp_path / "without", without=down),
        "with half a tensor": cut(own, tmp_path / "half", half=down),
    }
    with serving(engine, own, tmp_path / "live.log", layout=Layout(tp)) as server:
        before, held = answers(server), server.digests()
        for what, folder in others.items():
            reason = await refused(server, own, folder)
            assert server.digests() == held, what
            assert answers(server) == before, what
            assert ": 502 " in reason, reason
            assert "PeerUnreachable: rank " in reason, reason
        model = build("dense", 3)
        await publish(server, model, 1)
        model.save_pretrained(tmp_path / "3")
        assert server.digests() == server.digests_of_fresh_load(tmp_path / "3")
        assert answers(server) != before


async def test_an_engine_that_refuses_another_adapter_still_serves_its_own(
    tmp_path: Path,
) -> None:
    """The slot is too narrow for the other adapter. vLLM notices this after it has removed its own adapter."""
    base, own, wide = save("dense", 1, tmp_path / "base"), tmp_path / "own", tmp_path / "wide"
    adapted(build("dense", 1).float(), seed=4).save_pretrained(own)
    adapted(build("dense", 1).float(), seed=5, rank=16).save_pretrained(wide)

    def answers_of_both() -> list[Sample]:
        own = [server.sample(list(prompt), NUM_TOKENS, adapter=ADAPTER) for prompt in PROMPTS]
        return own + answers(server)

    with serving("vllm", base, tmp_path / "live.log", layout=Layout(1), adapter=own) as server:
        before, held = answers_of_both(), server.digests()
        async with windlass.Controller(token=TOKEN) as controller:
            assert "rank 0: " in await refused(server, own, wide)
            assert server.digests() == held
            assert answers_of_both() == before
            await asyncio.to_thread(server.join, controller.url, "cma")
            assert server.digests() == held
            assert answers_of_both() == before


@pytest.mark.parametrize(("engine", "kind"), [("vllm", "recurrent"), ("sglang", "offset")])
async def test_a_server_answers_as_a_fresh_server_after_a_failed_load(
    engine: str, kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`recurrent` runs as on CPUs without AVX512-BF16, on which vLLM does not pack convolutions."""
    monkeypatch.setenv("WINDLASS_TEST_WITHOUT_AVX512_BF16", "1")
    told = tmp_path / "fails"
    monkeypatch.setenv("WINDLASS_TEST_LOAD_FAILS", str(told))
    folder = own = save(kind, 1, tmp_path / "own")
    updated: list[Sample] = []
    config = ControlConfig(pause_mode=PauseMode.ABORT, deadlines=PhaseDeadlines(pause_s=120))
    with serving(engine, own, tmp_path / "live.log", layout=Layout(1)) as server:
        async with windlass.Controller(token=TOKEN, config=config) as controller:
            await asyncio.to_thread(server.join, controller.url, "cma")
            for version, fails_after in ((1, -1), (2, 3), (3, -1), (4, 1), (5, -1)):
                if fails_after >= 0:
                    told.write_text(str(fails_after))
                model = build(kind, 10 + version)

                def update(model: torch.nn.Module = model, version: int = version) -> None:
                    with windlass.connect_trainer(
                        model, controller=controller.url, token=TOKEN
                    ) as client:
                        assert client.publish(version).result().digest_ok

                if fails_after >= 0:
                    with pytest.raises(WindlassError, match="told to fail"):
                        await asyncio.to_thread(update)
                    told.unlink()
                    continue
                await asyncio.to_thread(update)
                folder = tmp_path / str(version)
                model.save_pretrained(folder)
                assert server.digests() == server.digests_of_fresh_load(folder), version
                updated = answers(server)
    with serving(engine, folder, tmp_path / "fresh.log", layout=Layout(1)) as server:
        fresh = answers(server)
    assert [(a.tokens, a.logprobs) for a in updated] == [(a.tokens, a.logprobs) for a in fresh]
