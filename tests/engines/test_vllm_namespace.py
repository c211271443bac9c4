"""Requests find blocks of vLLM's prefix cache only under the same version of the weights.

These tests check the keys of requests. Live servers: `tests/engines/test_vllm_caches.py`.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field

import pytest

from windlass.engines.vllm.engine_core import WEIGHTS, Namespace, load_current_entries
from windlass.engines.vllm.worker import WorkerMethods
from windlass.errors import ConfigError

BLOCK = 4


@dataclass
class Request:
    """A request that hashes its full blocks as vLLM does: in a chain that begins with the salt."""

    tokens: list[int]
    cache_salt: str | None
    block_hashes: list[bytes] = field(default_factory=list)
    kv_transfer_params: dict[str, object] | None = None

    def __post_init__(self) -> None:
        self.update_block_hashes()

    def update_block_hashes(self) -> None:
        for begin in range(len(self.block_hashes) * BLOCK, len(self.tokens) - BLOCK + 1, BLOCK):
            before = self.block_hashes[-1] if begin else (self.cache_salt or "").encode()
            block = repr(self.tokens[begin : begin + BLOCK]).encode()
            self.block_hashes.append(hashlib.sha256(before + block).digest())


def asked(namespace: Namespace, own: str | None = None, *, count: int = 10) -> Request:
    return Request(list(range(count)), namespace.salt(own))


def test_only_requests_of_the_same_version_share_blocks() -> None:
    namespace = Namespace()
    first, second = asked(namespace), asked(namespace)
    old = list(first.block_hashes)
    namespace.enter(first)
    assert first.block_hashes == second.block_hashes == old
    namespace.begin()
    assert not set(asked(namespace).block_hashes) & set(old)


def test_a_request_that_waited_during_an_update_enters_the_new_version() -> None:
    namespace = Namespace()
    waited, old = asked(namespace), set(asked(namespace).block_hashes)
    namespace.begin()
    namespace.begin()
    namespace.enter(waited)
    assert waited.block_hashes == asked(namespace).block_hashes
    assert not set(waited.block_hashes) & old


@pytest.mark.parametrize("count", [BLOCK - 1, 2 * BLOCK + 1])
def test_a_request_that_runs_during_an_update_caches_no_block_for_later_requests(
    count: int,
) -> None:
    namespace = Namespace()
    running = asked(namespace, count=count)
    namespace.begin()
    running.tokens = list(range(10))
    running.update_block_hashes()
    assert len(running.block_hashes) == 10 // BLOCK
    assert not set(running.block_hashes) & set(asked(namespace).block_hashes)


def test_salts_separate_clients_in_every_version() -> None:
    namespace = Namespace()
    salts = (None, "a", "b")
    waited = [asked(namespace, own) for own in salts]
    namespace.begin()
    for request in waited:
        namespace.enter(request)
    assert [request.block_hashes for request in waited] == [
        asked(namespace, own).block_hashes for own in salts
    ]
    assert len({request.block_hashes[0] for request in waited}) == len(salts)


def test_no_two_cores_share_a_namespace() -> None:
    assert not set(asked(Namespace()).block_hashes) & set(asked(Namespace()).block_hashes)


@dataclass
class Connector:
    """Scheduler's side of a connector that finds all blocks of every request, and asks again if `answers` is False."""

    answers: bool = True

    def get_num_new_matched_tokens(self, request: Request, count: int) -> tuple[int | None, bool]:
        if not self.answers:
            return None, False
        return len(request.block_hashes) * BLOCK - count, True

    def request_finished(
        self, request: Request, blocks: list[int]
    ) -> tuple[bool, dict[str, object] | None]:
        """Return the address of the entries of a prefill, as NIXL's connector does; None for other requests."""
        if request.kv_transfer_params is None:
            return False, None
        return True, {"remote_block_ids": blocks}


def test_a_request_with_kept_keys_of_old_weights_loads_nothing() -> None:
    """A connector may keep the keys of its first look-up, so a preempted request must load nothing after an update."""
    namespace, connector = Namespace(), Connector()
    load_current_entries(connector, namespace)
    load_current_entries(connector, namespace)
    looked_up, waited = asked(namespace), asked(namespace)
    namespace.enter(looked_up)
    assert connector.get_num_new_matched_tokens(looked_up, 0) == (2 * BLOCK, True)
    namespace.enter(looked_up)
    assert connector.get_num_new_matched_tokens(looked_up, BLOCK) == (BLOCK, True)
    namespace.begin()
    for request in (looked_up, waited):
        namespace.enter(request)
    assert connector.get_num_new_matched_tokens(looked_up, 0) == (0, False)
    assert vars(looked_up)["skip_reading_prefix_cache"]
    assert connector.get_num_new_matched_tokens(waited, 0) == (2 * BLOCK, True)
    connector.answers = False
    assert connector.get_num_new_matched_tokens(looked_up, 0) == (None, False)


class Engine:
    """An engine of a fleet."""

    def __init__(self) -> None:
        self.namespace, self.connector = Namespace(), Connector()
        load_current_entries(self.connector, self.namespace)

    def update(self, weights: str) -> None:
        self.namespace.begin()
        self.namespace.weights = weights

    def prefill(self) -> Request:
        """Return a running request whose entries another engine will read."""
        request = asked(self.namespace)
        request.kv_transfer_params = {}
        self.namespace.enter(request)
        return request

    def finish(self, request: Request) -> dict[str, object] | None:
        return self.connector.request_finished(request, [3, 4])[1]

    def num_loaded(self, handover: dict[str, object] | None) -> int | None:
        """Return the number of tokens that a request loads from another engine."""
        request = asked(self.namespace)
        request.kv_transfer_params = handover
        self.namespace.enter(request)
        return self.connector.get_num_new_matched_tokens(request, 0)[0]


def test_a_decode_engine_reads_only_entries_of_its_own_weights() -> None:
    prefills, decodes = Engine(), Engine()
    initial = prefills.finish(prefills.prefill())
    assert decodes.num_loaded(initial) == 2 * BLOCK
    prefills.update("run/1")
    assert decodes.num_loaded(prefills.finish(prefills.prefill())) == 0
    decodes.update("run/1")
    assert decodes.num_loaded(initial) == 0
    entries = prefills.finish(prefills.prefill())
    assert decodes.num_loaded(entries) == 2 * BLOCK
    decodes.update("other run/1")
    assert decodes.num_loaded(entries) == 0


def test_entries_of_two_versions_are_read_by_no_engine() -> None:
    prefills, decodes = Engine(), Engine()
    running = prefills.prefill()
    prefills.update("run/1")
    decodes.update("run/1")
    entries = prefills.finish(running)
    assert entries is not None
    assert entries[WEIGHTS] == ""
    assert decodes.num_loaded(entries) == 0
    prefills.namespace.begin()
    decodes.namespace.begin()
    unknown = prefills.finish(prefills.prefill())
    assert decodes.num_loaded(unknown) == 0


def test_entries_without_the_identity_of_their_weights_are_not_read() -> None:
    assert Engine().num_loaded({"remote_block_ids": [3]}) == 0
    assert Engine().num_loaded(None) == 2 * BLOCK


def test_only_a_prefill_names_its_weights() -> None:
    engine = Engine()
    assert engine.finish(asked(engine.namespace)) is None


def test_a_worker_without_a_namespace_refuses_to_pause() -> None:
    with pytest.raises(ConfigError, match="must separate its caches by version"):
        WorkerMethods().windlass_quiesce("1.1")
    with pytest.raises(ConfigError, match="must separate its caches by version"):
        WorkerMethods().windlass_quiesce("1.1", "1.0")
