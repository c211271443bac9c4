"""A plain vLLM server and a trainer, both with ranks on the same two hosts."""

from __future__ import annotations

from pathlib import Path

import pytest
from hosts import Network, why_no_hosts
from plain_vllm import checkpoint, serving_over_hosts, syncing

pytestmark = [
    pytest.mark.engines,
    pytest.mark.cluster,
    pytest.mark.timeout(1800),
    pytest.mark.skipif(bool(why_no_hosts()), reason=f"hosts: {why_no_hosts()}"),
]
PROMPT = [(7 * place) % 240 for place in range(140)]
NUM_TOKENS = 12
FAST_BIT_S = 10_000_000_000


def test_one_server_over_two_hosts_is_updated_by_links_of_two_kinds(tmp_path: Path) -> None:
    """Check links by cma inside a host and by Mooncake over TCP between hosts."""
    source = checkpoint(1, tmp_path / "source")
    # A wire in user space is too slow for the messages of vLLM's steps.
    with Network(("one", "two"), by_wire=False, rate_bit_s=FAST_BIT_S) as network:
        hosts = (network.host("one"), network.host("two"))
        first = hosts[0]
        with serving_over_hosts(source, tmp_path / "live.log", hosts) as server:
            old = first.call(lambda: server.answer(PROMPT, NUM_TOKENS))
            held = first.call(server.checksums)
            version = 0
            for mode in ("in_place", "staged"):
                with syncing(
                    tmp_path / mode, 2, hosts=hosts, source=str(source), servers=[server.url], mode=mode
                ) as trainers:  # fmt: skip
                    assert [joined.error for joined in trainers.answers()] == ["", ""]
                    for _ in range(2):
                        version += 1
                        answers = trainers.send(version, tmp_path / str(version))
                        for sent in answers:
                            assert not sent.error, sent
                            assert (sent.version, sent.servers) == (version, [server.url]), sent
                        taken = {
                            tuple(int(end.rpartition("/")[2]) for end in link.split(" > ")): name
                            for link, name in answers[0].links.items()
                        }
                        assert taken == {
                            (0, 0): "cma", (1, 1): "cma", (0, 1): "mooncake", (1, 0): "mooncake",
                        }  # fmt: skip
                        assert first.call(server.version) == str(version)
                        assert not first.call(server.is_paused)
            answered = first.call(lambda: server.answer(PROMPT, NUM_TOKENS))
            updated = first.call(server.checksums)
        with serving_over_hosts(tmp_path / str(version), tmp_path / "fresh.log", hosts) as fresh:
            assert first.call(fresh.checksums) == updated != held
            assert first.call(lambda: fresh.answer(PROMPT, NUM_TOKENS)) == answered != old
