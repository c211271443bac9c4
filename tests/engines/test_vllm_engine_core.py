"""Versions of tokens that Windlass records in vLLM's core. Live: `test_live_rollouts.py`."""

from __future__ import annotations

from windlass.engines.vllm.engine_core import Span, add_tokens


def test_tokens_of_one_version_extend_the_same_span() -> None:
    spans: list[Span] = []
    for num_tokens, version in ((0, 1), (2, 3), (1, 3), (0, 4), (1, 5)):
        add_tokens(spans, num_tokens, version)
    assert spans == [
        {"version": 3, "start": 0, "end": 3},
        {"version": 5, "start": 3, "end": 4},
    ]
