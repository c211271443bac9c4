"""Bytes that other versions of Windlass read.

A change here needs a higher schema or protocol version. After an intended change, write the file
again: `PYTHONPATH=tests/support python tests/control/test_golden_wire.py`.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from offers import offer_of

from windlass.config import PauseMode, UpdateMode
from windlass.control.connect_messages import (
    CannotJoin,
    ChangeLinks,
    ConnectEngine,
    ConnectTrainer,
    Hello,
    Welcome,
)
from windlass.control.messages import (
    AGENT_FRAMES,
    CONTROLLER_FRAMES,
    Abort,
    Announce,
    Command,
    Failure,
    FailureKind,
    Pause,
    Publish,
    Verified,
    Verify,
    Write,
)
from windlass.control.report import RoundOutcome, UpdateReport
from windlass.layout.box import Box
from windlass.layout.dtypes import DType
from windlass.layout.manifest import ManifestBuilder, Role, ShardManifest
from windlass.net.messages import PROTOCOL_VERSION, Envelope, Reply, encode
from windlass.planning.plan import PLAN_SCHEMA_VERSION, TransferPlan
from windlass.planning.planner import plan_transfer
from windlass.transfer.bindings import DestinationBinding, LinkOutcome, LinkStatus, Written
from windlass.transports.peers import PeerEndpoint, RemoteRegion

GOLDEN = Path(__file__).with_name("golden_wire.json")
ENDPOINT = PeerEndpoint("cma", "4711", "123456")
BINDING = DestinationBinding(
    "engine-a/0", ENDPOINT, (RemoteRegion(ENDPOINT, 4096, 8192, "key"),), (4096, 8128), 12288
)


def manifest(worker: str, role: Role) -> ShardManifest:
    builder = ManifestBuilder(worker, role)
    dtype = DType.FLOAT32 if role is Role.TRAINER else DType.BFLOAT16
    builder.add_parameter("p", nbytes=24 * dtype.itemsize, dtype=dtype)
    builder.add_shard("weight", (4, 6), Box((0, 0), (4, 6)), "p")
    return builder.build()


def plan() -> TransferPlan:
    return plan_transfer(
        [manifest("trainer/0", Role.TRAINER)], [manifest("engine-a/0", Role.ENGINE)]
    )


def from_agents() -> dict[str, bytes]:
    hello = Hello(
        protocol_version=PROTOCOL_VERSION,
        worker="trainer/0",
        incarnation="00ff",
        role=Role.TRAINER,
        group="trainer",
        rank=0,
        world_size=1,
        manifest=b"manifest",
        offers=(offer_of(ENDPOINT, "process_vm_writev", "pid 4711"),),
        host="boot pid:[1] net:[2]",
        lineage="00ff",
        job="ff00",
    )
    links = (LinkOutcome("engine-a/0", LinkStatus.OK, 48, "0" * 32),)
    return {
        "hello": encode(hello),
        "cannot_join": encode(CannotJoin(PROTOCOL_VERSION, "engine-a", "why")),
        "announce": encode(Announce(3, 1)),
        "written": encode(Reply(1, 2, 3, Written(links, 0.5, 0.25))),
        "verified": encode(Reply(1, 2, 3, Verified(("trainer/0",)))),
        "failure": encode(Reply(1, 2, 3, Failure(FailureKind.UNKNOWN, "late"))),
    }


def from_controllers() -> dict[str, bytes]:
    report = UpdateReport(
        version=3,
        outcome=RoundOutcome.PUBLISHED,
        reason="",
        engines=("engine-a",),
        left_out={"engine-b": "gone"},
        measures={"nbytes": 48.0, "wire_s": 0.25, "update_s": 0.5, "pause_s": 0.125},
        phase_s={"write": 0.25},
        digest_ok=True,
        attempt=1,
    )
    commands: dict[str, Command] = {
        "connect_engine": ConnectEngine(b"plan", "digest", UpdateMode.STAGED),
        "connect_trainer": ConnectTrainer(b"plan", (BINDING,)),
        "change_links": ChangeLinks(6, ("engine-b/0",), b"plan", (BINDING,)),
        "pause": Pause(PauseMode.IN_PLACE, 30.0),
        "write": Write(3, ("engine-a/0",), 120.0),
        "verify": Verify(3, {"trainer/0": "0" * 32}),
        "publish": Publish(3, 25.0, "00ff"),
        "abort": Abort("why", mixed_weights=True, deadline_s=25.0),
    }
    frames = {name: encode(Envelope(1, 2, 3, command)) for name, command in commands.items()}
    return frames | {"welcome": encode(Welcome(7, "00ff")), "report": encode(report)}


def everything() -> dict[str, str]:
    blobs = from_agents() | from_controllers()
    blobs["manifest"] = manifest("trainer/0", Role.TRAINER).encode()
    blobs["plan"] = plan().encode()
    return {
        "protocol_version": str(PROTOCOL_VERSION),
        "plan_schema_version": str(PLAN_SCHEMA_VERSION),
        "manifest_digest": manifest("trainer/0", Role.TRAINER).digest(),
        "plan_digest": plan().digest(),
        **{name: data.hex() for name, data in blobs.items()},
    }


@pytest.mark.parametrize("name", everything())
def test_encoded_bytes_equal_the_golden_bytes(name: str) -> None:
    assert everything()[name] == json.loads(GOLDEN.read_text())[name]


def test_golden_bytes_decode_to_their_messages() -> None:
    read = json.loads(GOLDEN.read_text())
    golden = {k: bytes.fromhex(v) for k, v in read.items() if not k.endswith(("version", "digest"))}
    for name in from_agents():
        assert encode(AGENT_FRAMES.decode(golden[name])) == golden[name]
    for name in from_controllers():
        assert encode(CONTROLLER_FRAMES.decode(golden[name])) == golden[name]
    assert ShardManifest.decode(golden["manifest"]).encode() == golden["manifest"]
    assert TransferPlan.decode(golden["plan"]).encode() == golden["plan"]


if __name__ == "__main__":
    GOLDEN.write_text(json.dumps(everything(), indent=1) + "\n")
