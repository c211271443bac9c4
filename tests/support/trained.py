"""A sample for training, and the report of an update."""

from __future__ import annotations

from windlass.control.report import LinkWire, RoundOutcome, TransportWire, UpdateReport
from windlass.rollout.messages import TrainingSample

__all__ = ["report", "sample"]


def sample(version: int) -> TrainingSample:
    return TrainingSample(
        prompt_ids=(1,),
        output_ids=(2,),
        logprobs=(-0.5,),
        versions=(version,),
        reward=0.5,
        group_id=1,
        engine="e",
    )


def report(version: int) -> UpdateReport:
    return UpdateReport(
        version=version,
        outcome=RoundOutcome.PUBLISHED,
        reason="",
        engines=("engine-a",),
        left_out={},
        measures={
            "nbytes": 1_234_567.0,
            "wire_s": 0.5,
            "update_s": 0.75,
            "pause_s": 0.25,
            "pack_s": 0.0625,
        },
        phase_s={"prepare": 0.1, "write": 0.5, "verify": 0.15},
        digest_ok=True,
        wire={
            "cma": TransportWire(
                1_234_567, 0.25, 2, (LinkWire(1_000_000, 0.125, "trainer/0", "engine-a/1"),)
            )
        },
    )
