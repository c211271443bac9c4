"""Rewards from a server: each request asks for the rewards of a batch of rollouts, as JSON."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Mapping, Sequence
from email.utils import parsedate_to_datetime
from typing import Self, final

import aiohttp
import msgspec

from windlass.config import check_numbers
from windlass.envs import REWARD_TOKEN_VARIABLE, check_token, secret_value
from windlass.errors import DECODE_ERRORS, ConfigError, PeerUnreachable, ProtocolError
from windlass.net.addresses import check_url
from windlass.net.clock import Backoff
from windlass.net.sockets import connection_error, open_http
from windlass.rollout.generate import PASSING_4XX
from windlass.rollout.handles import Rollout
from windlass.rollout.rewards import Failures, RewardCounts, RewardError
from windlass.rollout.values import plain_number, plain_value

BACKOFF = Backoff(0.1, 5.0)
"""Pauses between the tries of a request."""
MAX_ANSWER_NBYTES = 4 << 20
"""Largest size of a server's answer."""
MAX_TEXT = 300
"""Largest number of characters of a server's text in an error."""
REFUSALS_OF_BATCHES = frozenset({400, 413, 422})
"""HTTP statuses after which a part of the batch may succeed."""
MAX_FAILURES = 2
"""Number of answers with status 500 after which a batch is divided. One rollout may have caused the failure."""


class ServerRewards(msgspec.Struct, frozen=True, kw_only=True, tag="server", tag_field="kind"):
    """Settings of a reward server.

    The request is `POST url` with `{"rollouts": [...]}`; each element has the fields of a `Rollout`. The answer is
    `{"rewards": [...]}`; each element is a number or `{"error": TEXT}`. If WINDLASS_REWARD_TOKEN is set, requests carry
    it as `Authorization: Bearer TOKEN`.

    Attributes:
        url: address for the requests.
        batch_size: largest number of rollouts in one request.
        max_requests: number of requests at a time.
        deadline_s: seconds for the rewards of one batch. Until then, a request is repeated after a connection error, after
            an HTTP status of 5xx, and after a status of `PASSING_4XX`. After repeated answers with status 500, and after a
            status of `REFUSALS_OF_BATCHES`, both halves of the batch are sent separately.
        max_request_nbytes: largest size of a request; larger batches are split.

    Raises:
        ConfigError: `url` is not a URL, or a value is out of range.
    """

    url: str
    batch_size: int = 64
    max_requests: int = 8
    deadline_s: float = 120.0
    max_request_nbytes: int = 16 << 20

    def __post_init__(self) -> None:
        least = {"batch_size": 1, "max_requests": 1, "max_request_nbytes": 1}
        check_numbers(self, least, ("deadline_s",), where="rewards.")
        check_url(self.url, "rewards.url")


class _Answer(msgspec.Struct, frozen=True):
    rewards: tuple[object, ...]


class _DivideError(Exception):
    """The server failed for a batch, but may succeed for its halves. `ends_at` is the deadline in the event loop's time."""

    def __init__(self, ends_at: float) -> None:
        super().__init__()
        self.ends_at = ends_at


@final
class RewardServer:
    """Scorer that asks a server. Use it with `async with`.

    Args:
        config: address and limits.

    Attributes:
        counts: counts since the start.
        name: the server's URL.
    """

    def __init__(self, config: ServerRewards) -> None:
        self._config, self.name = config, f"the server {config.url}"
        self._slots = asyncio.Semaphore(config.max_requests)
        self._http: aiohttp.ClientSession | None = None
        self.counts = RewardCounts()
        self._failures = Failures(self.counts)

    async def __aenter__(self) -> Self:
        """Open the HTTP session.

        Raises:
            ConfigError: an HTTP header cannot carry the token in WINDLASS_REWARD_TOKEN.
        """
        token = secret_value(REWARD_TOKEN_VARIABLE)
        if token:
            check_token(token, REWARD_TOKEN_VARIABLE)
        self._http = open_http(token, to_controller=False, many_connections=True)
        return self

    async def __aexit__(self, *_: object) -> None:
        if self._http is not None:
            await self._http.close()

    async def score(self, rollouts: Sequence[Rollout]) -> tuple[float | RewardError, ...]:
        """Return for each rollout its reward, or a `RewardError` that says why it has none.

        Raises:
            ConfigError: the metadata of a rollout is not msgpack-plain, or the call is outside the `async with` block.
        """
        encoded = [_encoded(rollout) for rollout in rollouts]
        jobs = [
            asyncio.create_task(self._score(rollouts[first:last], encoded[first:last]))
            for first, last in self._batches([len(each) for each in encoded])
        ]
        try:
            found = await asyncio.gather(*jobs)
        finally:
            for job in jobs:
                job.cancel()
        return tuple([reward for batch in found for reward in batch])

    def _batches(self, sizes: Sequence[int]) -> list[tuple[int, int]]:
        """Divide rollouts of these sizes into batches. Return the index range [first, last) of each batch.

        A batch has at most `batch_size` rollouts and `max_request_nbytes` bytes. A rollout with more bytes gets a batch of
        its own, which `_score` refuses.
        """
        batches, first, nbytes = [], 0, 0
        for number, size in enumerate(sizes):
            is_full = number - first >= self._config.batch_size
            if number > first and (is_full or nbytes + size > self._config.max_request_nbytes):
                batches.append((first, number))
                first, nbytes = number, 0
            nbytes += size
        return [*batches, (first, len(sizes))] if sizes else []

    async def _score(
        self, rollouts: Sequence[Rollout], encoded: Sequence[bytes], ends_at: float | None = None
    ) -> list[float | RewardError]:
        """Return a reward or a `RewardError` for each rollout of a batch.

        If the server refuses a batch of several rollouts (`_DivideError`), send each half separately. If a request fails
        for another reason, all its rollouts get the same `RewardError`.

        Args:
            rollouts: the batch.
            encoded: each rollout as JSON.
            ends_at: deadline, in the event loop's time; None for a new deadline, which starts with the first request.

        Raises:
            ConfigError: the call is outside the `async with` block.
        """
        if self._http is None:
            raise ConfigError("rewards: call score in an `async with` block of the RewardServer")
        url, limit = self._config.url, self._config.max_request_nbytes
        if (nbytes := sum(map(len, encoded))) > limit:
            reason = f"{url}: a request must have at most {limit} bytes, got {nbytes}"
            return [self._failures.add(RewardError(reason, "size"))]
        try:
            rewards = await self._request(self._http, encoded, ends_at)
        except RewardError as error:
            return [self._failures.add(error) for _ in rollouts]
        except _DivideError as error:
            half = len(rollouts) // 2
            first, second = await asyncio.gather(
                self._score(rollouts[:half], encoded[:half], error.ends_at),
                self._score(rollouts[half:], encoded[half:], error.ends_at),
            )
            return first + second
        return [self._checked(*each) for each in zip(rollouts, rewards, strict=True)]

    def _checked(self, rollout: Rollout, reward: object) -> float | RewardError:
        """Return a rollout's reward, or a `RewardError` if the server sent an error or an invalid reward for it."""
        where = f"rollout {rollout.task_id}: {self._config.url}"
        if isinstance(reward, dict) and isinstance(text := reward.get("error"), str):
            text = text[:MAX_TEXT].replace("\n", " ")
            return self._failures.add(RewardError(f"{where}: {text}", "server"))
        try:
            found = plain_number(f"{where}: reward", reward)
        except ConfigError as error:
            return self._failures.add(RewardError(str(error), "answer"))
        self.counts.scored += 1
        return found

    async def _request(
        self, http: aiohttp.ClientSession, encoded: Sequence[bytes], ends_at: float | None
    ) -> tuple[object, ...]:
        """Send one batch, and return the rewards of the first answer with a status of 2xx.

        Repeat the request after a connection error, a status of 5xx, or a status of `PASSING_4XX`. Wait at least as long
        as the server asks for in `Retry-After`.

        Raises:
            RewardError: the server refused the request, sent an invalid answer, or sent no rewards before the deadline.
            _DivideError: the server failed for the batch, and may succeed for a part of it.
        """
        config, num_tries, num_failures, newest = self._config, 0, 0, "no answer"
        least_s = 0.0
        now = asyncio.get_running_loop().time
        try:
            async with asyncio.timeout_at(ends_at) as deadline:
                while True:
                    try:
                        async with self._slots:
                            if ends_at is None:
                                # The deadline does not include the first wait for other requests.
                                ends_at = now() + config.deadline_s
                                deadline.reschedule(ends_at)
                            num_tries, least_s = num_tries + 1, 0.0
                            status, answer, least_s = await self._post(http, encoded)
                    except PeerUnreachable as error:
                        # The server redirects the request. It would also redirect the next one.
                        raise RewardError(f"{config.url}: {error}", "redirect") from error
                    except (aiohttp.ClientError, OSError) as error:
                        newest = connection_error(error)
                    else:
                        text = answer[:MAX_TEXT].decode(errors="replace").replace("\n", " ")
                        if 200 <= status < 300:
                            return _rewards_in(answer, len(encoded))
                        newest = f"HTTP {status}: {text}"
                        num_failures += status == 500
                        is_refused = status in REFUSALS_OF_BATCHES or num_failures >= MAX_FAILURES
                        if is_refused and len(encoded) > 1:
                            raise _DivideError(ends_at)
                        if status < 500 and status not in PASSING_4XX:
                            raise RewardError(f"{config.url}: {newest}", f"HTTP {status}")
                    if least_s and ends_at is not None and now() + least_s >= ends_at:
                        raise RewardError(
                            f"{config.url}: {newest}; Retry-After must end before the deadline of {config.deadline_s:g} s, "
                            f"got {least_s:g} s",
                            "deadline",
                        )
                    await asyncio.sleep(max(least_s, BACKOFF.after(num_tries)))
        except TimeoutError:
            raise RewardError(
                f"{config.url}: no rewards within {config.deadline_s:g} s, in {num_tries} requests; newest: {newest}",
                "deadline",
            ) from None
        # `ValueError`: the answer is not JSON.
        except (*DECODE_ERRORS, ValueError, ProtocolError) as error:
            raise RewardError(f"{config.url}: {error}", "answer") from error

    async def _post(
        self, http: aiohttp.ClientSession, encoded: Sequence[bytes]
    ) -> tuple[int, bytes, float]:
        """Send one request; return the HTTP status and the body of the answer, and the seconds in `Retry-After`.

        Raises:
            ProtocolError: the body has more than `MAX_ANSWER_NBYTES` bytes.
        """
        body = b'{"rollouts":[' + b",".join(encoded) + b"]}"
        headers, found = {"Content-Type": "application/json"}, bytearray()
        async with http.post(self._config.url, data=body, headers=headers) as response:
            async for part in response.content.iter_any():
                found += part
                if len(found) > MAX_ANSWER_NBYTES:
                    raise ProtocolError(
                        f"an answer must have at most {MAX_ANSWER_NBYTES} bytes, got more"
                    )
            return response.status, bytes(found), _retry_after_s(response.headers)


def _retry_after_s(headers: Mapping[str, str]) -> float:
    """Return the seconds that a server asks clients to wait; 0 if it asks for nothing, or if the value is invalid.

    The value of the header is a number of seconds or a date.
    """
    value = headers.get("Retry-After", "").strip()
    if value.isascii() and value.isdecimal():
        return float(value)
    try:
        return max(0.0, parsedate_to_datetime(value).timestamp() - time.time())
    except (ValueError, OverflowError):
        return 0.0


def _rewards_in(answer: bytes, num_rollouts: int) -> tuple[object, ...]:
    """Return the rewards in an answer. An entry may be invalid; see `RewardServer._checked`.

    Raises:
        ProtocolError: the answer does not have one reward per rollout.
        msgspec.MsgspecError: the answer has no list of rewards.
        ValueError: the answer is not JSON.
    """
    # Not msgspec's decoder: it refuses the whole answer if one reward is NaN.
    rewards = msgspec.convert(json.loads(answer), type=_Answer).rewards
    if len(rewards) != num_rollouts:
        raise ProtocolError(f"rewards must have {num_rollouts} entries, got {len(rewards)}")
    return rewards


def _encoded(rollout: Rollout) -> bytes:
    """Return a rollout as JSON; raise `ConfigError` if its `metadata` or its `value` cannot be encoded."""
    try:
        return msgspec.json.encode(rollout, enc_hook=plain_value)
    except (TypeError, ValueError, OverflowError, RecursionError) as error:
        raise ConfigError(
            f"rollout {rollout.task_id}: metadata and value must be msgpack-plain for rewards from a server: {error}"
        ) from error
