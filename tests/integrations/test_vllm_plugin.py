"""Plain vLLM servers, started with one flag, that FSDP2 trainers update through vLLM's own routes.

After every update each server answers, with its prefix caches on, what a fresh server of the trainer's weights
answers, and every tensor that it holds has the checksum that vLLM takes of the fresh one's.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from plain_vllm import PlainServer, checkpoint, serving_plain, syncing

pytestmark = [pytest.mark.engines, pytest.mark.timeout(1200)]

PREFIX = [(7 * place) % 240 for place in range(100)]
PROMPTS = tuple([*PREFIX, *tail] for tail in ([17, 18], [99, 4, 5]))
"""The second finds the blocks of the first in the prefix cache."""
NUM_TOKENS = 12

Answers = list[tuple[list[int], list[float]]]


def ask(server: PlainServer) -> Answers:
    return [server.answer(prompt, NUM_TOKENS) for prompt in PROMPTS]


@pytest.mark.parametrize(("num_ranks", "tp"), [(1, 1), (2, 1)])
def test_an_updated_server_is_a_fresh_one(num_ranks: int, tp: int, tmp_path: Path) -> None:
    source = checkpoint(1, tmp_path / "source")
    with serving_plain(source, tmp_path / "live.log", tp=tp) as server:
        old, held = ask(server), server.checksums()
        with syncing(
            tmp_path / "trainers", num_ranks, source=str(source), servers=[server.url]
        ) as trainers:
            for joined in trainers.answers():
                assert not joined.error
            for version in (1, 2):
                for sent in trainers.send(version, tmp_path / str(version)):
                    assert (sent.version, sent.servers, sent.left_out) == (
                        version,
                        [server.url],
                        {},
                    )
                    assert sent.digest_ok
                assert server.version() == str(version)
                assert not server.is_paused()
                ask(server)  # fills its prefix cache
        answered, updated = ask(server), server.checksums()
    with serving_plain(tmp_path / "2", tmp_path / "fresh.log", tp=tp) as fresh:
        assert fresh.checksums() == updated != held
        assert ask(fresh) == answered != old
