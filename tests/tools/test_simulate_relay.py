"""The simulated relay, compared with calculations by hand; replicas cost almost nothing."""

from __future__ import annotations

import pytest

from tools.plan.simulate_relay import SimulatedRelay, simulate_relay
from windlass.config import RelayShape
from windlass.errors import ConfigError
from windlass.planning.relay import RelayGroup, stripes_of

MB = 1_000_000


def run(shape: RelayShape, num_members: int, chunk_nbytes: int, num_chunks: int) -> SimulatedRelay:
    """Simulate a relay over 1 GB/s, fed at the same rate: 1 ms per MB."""
    members = tuple(f"e{i}/0" for i in range(num_members))
    return simulate_relay(
        RelayGroup(members, stripes_of(shape, num_members), chunk_nbytes),
        nbytes=num_chunks * chunk_nbytes,
        fed_s=num_chunks * chunk_nbytes / 1e9,
        nic_gbytes_per_s=1.0,
        verify_gbytes_per_s=1e6,
        hop_s=0.0,
    )


@pytest.mark.parametrize("num_members", [2, 3, 10, 100])
def test_a_chain_takes_one_chunk_longer_per_engine(num_members: int) -> None:
    relay = run(RelayShape.CHAIN, num_members, MB, 50)
    assert relay.wire_s == pytest.approx((50 + num_members - 1) / 1000, rel=1e-4)
    assert relay.member_finish_s.tolist() == sorted(relay.member_finish_s.tolist())
    assert relay.num_chunks == 50


def test_trees_are_logarithmic() -> None:
    few, many = run(RelayShape.TREE, 8, MB, 200), run(RelayShape.TREE, 512, MB, 200)
    assert many.wire_s < 1.25 * few.wire_s
    assert many.wire_s < run(RelayShape.CHAIN, 512, MB, 200).wire_s / 2


def test_a_slow_check_is_the_limit() -> None:
    group = RelayGroup(("a/0", "b/0"), stripes_of(RelayShape.CHAIN, 2), MB)
    slow = simulate_relay(
        group, nbytes=10 * MB, fed_s=0.01, nic_gbytes_per_s=1.0, verify_gbytes_per_s=0.5, hop_s=0.0
    )
    # Fed in 10 ms; ten checks of 2 ms after the first chunk, then one more hop and check.
    assert slow.wire_s == pytest.approx(0.001 + 0.020 + 0.001 + 0.002)


def test_impossible_numbers_are_refused() -> None:
    group = RelayGroup(("a/0", "b/0"), stripes_of(RelayShape.CHAIN, 2), MB)
    with pytest.raises(ConfigError, match="fed_s must be > 0, got 0"):
        simulate_relay(group, nbytes=1, fed_s=0, nic_gbytes_per_s=1.0, verify_gbytes_per_s=1.0)
    with pytest.raises(ConfigError, match=r"len\(group.stripes\) must be > 0, got 0"):
        simulate_relay(
            RelayGroup(("a/0",), (), MB),
            nbytes=1,
            fed_s=1.0,
            nic_gbytes_per_s=1.0,
            verify_gbytes_per_s=1.0,
        )
