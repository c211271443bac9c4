"""Bytes and times of links, added up by transport: sums are complete, and a report stays small."""

from __future__ import annotations

from collections import Counter

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from windlass.control.report import (
    SLOWEST_LINKS,
    RoundOutcome,
    UpdateReport,
    wire_by_transport,
)
from windlass.net.messages import MAX_NAME_NBYTES, encode
from windlass.transfer.bindings import Carried, LinkOutcome, LinkStatus, Written

carried_links = st.dictionaries(
    st.tuples(st.sampled_from("abc"), st.sampled_from("uvwxyz")),
    st.tuples(
        st.builds(Carried, st.integers(1, 1 << 50), st.floats(1e-6, 1e3)),
        st.sampled_from(["cma", "nixl", ""]),
    ),
)


@given(carried_links)
def test_a_report_counts_every_byte_once_and_names_the_slowest_links(
    links: dict[tuple[str, str], tuple[Carried, str]],
) -> None:
    transports = {link: name for link, (_, name) in links.items() if name}
    wire = wire_by_transport({link: found for link, (found, _) in links.items()}, transports)
    assert {name: found.num_links for name, found in wire.items()} == Counter(transports.values())
    for name, found in wire.items():
        own = [links[link][0] for link, taken in transports.items() if taken == name]
        assert found.nbytes == sum(link.nbytes for link in own)
        assert found.wire_s == pytest.approx(sum(link.wire_s for link in own))
        longest = sorted((link.wire_s for link in own), reverse=True)[:SLOWEST_LINKS]
        assert [link.wire_s for link in found.slowest] == longest
        for link in found.slowest:
            assert links[link.source, link.destination] == (Carried(link.nbytes, link.wire_s), name)


def test_times_add_one_number_per_link_to_a_reply_and_none_to_a_report() -> None:
    """A trainer rank writes 4096 engine ranks with names of the maximum length."""
    names = [f"engine/{index}".ljust(MAX_NAME_NBYTES, "-") for index in range(4096)]

    links = (LinkOutcome(name, LinkStatus.OK, 1 << 30, "0" * 32, wire_s=0.1) for name in names)
    reply = msgspec.to_builtins(Written(tuple(links), 0.5, 0.25))
    with_times = len(encode(reply))
    for link in reply["links"]:
        del link["wire_s"]
    assert with_times - len(encode(reply)) == 16 * len(names)

    def report_nbytes(num_sources: int) -> int:
        carried = {
            (f"trainer/{rank}".ljust(MAX_NAME_NBYTES, "-"), name): Carried(1 << 40, 0.1)
            for rank in range(num_sources)
            for name in names
        }
        transports = {link: "cma" if index % 2 else "nixl" for index, link in enumerate(carried)}
        wire = wire_by_transport(carried, transports)
        report = UpdateReport(version=1, outcome=RoundOutcome.PUBLISHED, wire=wire)
        assert msgspec.msgpack.decode(encode(report), type=UpdateReport) == report
        return len(encode(report))

    small, large = report_nbytes(1), report_nbytes(16)
    # Figures may have more digits. Nothing else may grow.
    assert large <= small + 16
    assert large <= 8192


def test_a_report_prints_in_one_short_line() -> None:
    report = UpdateReport(
        version=3,
        outcome=RoundOutcome.PUBLISHED,
        engines=("a", "b"),
        measures={"nbytes": 1234567.0, "update_s": 0.25, "pause_s": 0.125},
    )
    assert str(report) == (
        "version 3: published to 2 engines, 1,234,567 bytes in 0.250 s, longest pause 0.125 s"
    )
    without = msgspec.structs.replace(report, engines=("a",), left_out={"b": "dead"})
    assert "published to 1 engine, without b, " in str(without)
    failed = UpdateReport(version=4, outcome=RoundOutcome.ABORTED, reason="no engine is left")
    assert str(failed) == "version 4: aborted: no engine is left"
    assert "measures=" in repr(report)
