"""HTTP server of the endpoint: routes, keys, and limits on the cost of a client."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import hmac
import logging
from collections import OrderedDict
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Iterable, Sequence
from dataclasses import replace
from typing import NamedTuple, TypeVar, final

import msgspec
from aiohttp import web

from windlass.config import check_numbers
from windlass.errors import DECODE_ERRORS, ConfigError
from windlass.net.access import Access, AccessGate
from windlass.net.addresses import listen, published_host, url_of
from windlass.net.listener import NO_ROOM, Listener, request_log
from windlass.net.sockets import raise_file_limit
from windlass.net.tls import server_context
from windlass.rollout.chat.deltas import Choice, Delta
from windlass.rollout.chat.errors import ApiError
from windlass.rollout.chat.messages import Message
from windlass.rollout.chat.replies import ChatReply, CompletionReply, ResponseReply, event
from windlass.rollout.chat.requests import (
    Call,
    ChatRequest,
    CommonRequest,
    CompletionRequest,
    Policy,
    ResponseRequest,
    chat_call,
    completion_call,
    response_call,
)
from windlass.rollout.chat.session import (
    ChatSession,
    Generator,
    Limits,
    Reply,
    session_ended,
)
from windlass.rollout.chat.tool_calls import parser_of
from windlass.rollout.generate import AttemptError
from windlass.rollout.messages import ErrorKind, Partial
from windlass.rollout.text import TextCodec
from windlass.rollout.values import encode_value

logger = logging.getLogger(__name__)
BODY_DEADLINE_S = 30.0
"""Seconds within which a client must send the body of a request."""
STREAM_PING_S = 10.0
"""Seconds without data after which a stream gets a comment, so that clients and proxies do not end it."""
READ_DEADLINE_S = 300.0
"""Seconds after which a stream ends if its client reads nothing and the buffers of the connection are full."""
MAX_CLAIM_S = 600.0
"""Longest time that an agent may wait for a rollout to claim."""
MAX_WAITING_CLAIMS = 1024
"""Largest number of agents that wait for a rollout."""
MAX_ENDED = 4096
"""Number of ended sessions for which an agent may repeat the request that set the reward."""
MODEL = "policy"
"""Model name in the answers to requests that name no model."""
END = b""
"""Mark in a stream's queue: the reply is complete, or has failed."""

Send = Callable[[bytes], None]
"""Function that sends a server-sent event."""
T = TypeVar("T", bound=CommonRequest)
C = TypeVar("C", ChatRequest, CompletionRequest)


class ChatSettings(msgspec.Struct, frozen=True, kw_only=True):
    """Settings of the endpoint of one process.

    Attributes:
        tokenizer: folder with the model's tokenizer and chat template.
        host: address that the endpoint binds.
        port: port; 0 lets the system choose.
        advertise_host: address to which agents connect; empty for `host`.
        tool_format: format in which the model writes tool calls, see `PARSERS`.
        max_context: number of tokens of prompt and answer together that the engines accept. The endpoint shortens
            answers so that they fit. 0 if the engines check this.
        max_body_nbytes: largest size of a request's body.
        max_requests: largest number of requests of one session that are answered at a time; further requests wait.
    """

    tokenizer: str = ""
    host: str = "127.0.0.1"
    port: int = 0
    advertise_host: str = ""
    tool_format: str = "hermes"
    max_context: int = 0
    max_body_nbytes: int = 16 << 20
    max_requests: int = 32

    def __post_init__(self) -> None:
        least = {"port": 0, "max_context": 0, "max_body_nbytes": 1024, "max_requests": 1}
        check_numbers(self, least, where="chat: ")
        parser_of(self.tool_format)


class _Claim(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Body of `POST /v1/sessions`."""

    deadline_s: float = 60.0


class _Reward(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Body of `POST /v1/sessions/{id}/reward`."""

    reward: float
    metadata: object = None


class _Ended(NamedTuple):
    """Session that ended with a reward. A repeated request must have the same key, reward and metadata."""

    key_digest: bytes
    reward: float
    metadata_digest: bytes


@final
class ChatServer:
    """OpenAI's API for the agents of one process. The server starts to listen when the first session begins.

    Args:
        settings: settings.
        agent_tokens: tokens of external agents, which may claim rollouts.
        text: tokenizer and chat template of `settings.tokenizer`; None if there is none.
    """

    def __init__(self, settings: ChatSettings, *agent_tokens: str, text: TextCodec | None) -> None:
        self.settings = settings
        self._gate = AccessGate("", *((token, Access.AGENT) for token in agent_tokens))
        self._text = text
        self._sessions: dict[str, ChatSession] = {}
        self._ended: OrderedDict[str, _Ended] = OrderedDict()
        """Session id -> ended session."""
        self._offers: dict[str, tuple[bytes, asyncio.Event]] = {}
        """Session id -> answer to an agent that claims the session, and event to set after the claim."""
        self._num_offers = asyncio.Semaphore(0)
        self._num_claims = 0
        self._lock = asyncio.Lock()
        self._runner: web.AppRunner | None = None
        self._listener: Listener | None = None
        self._url = ""

    # --- for workflows -------------------------------------------------------------------

    @contextlib.asynccontextmanager
    async def session(
        self, context: Generator, *, request_sampling: bool
    ) -> AsyncIterator[ChatSession]:
        """Open a session for the duration of a `with` block. The agent's requests become turns of `context`.

        Start to listen if the server does not listen yet. After the block, keep the key and the reward, so that the agent
        may repeat the request that set the reward.

        Raises:
            ConfigError: there is no tokenizer, or the address cannot be bound.
            RolloutError: see `ChatSession.running`.
        """
        text = await self.start()
        session = ChatSession(
            context,
            f"{self._url}/v1",
            text,
            self.settings.tool_format,
            request_sampling=request_sampling,
            limits=Limits(self.settings.max_context, self.settings.max_requests),
        )
        self._sessions[session.session_id] = session
        try:
            async with session.running():
                yield session
        finally:
            del self._sessions[session.session_id]
            if session.reward is not None:
                digest = hashlib.sha256(session.api_key.encode()).digest()
                given = _metadata_digest(session.metadata)
                self._ended[session.session_id] = _Ended(digest, session.reward, given)
                if len(self._ended) > MAX_ENDED:
                    self._ended.popitem(last=False)

    async def offer(self, session: ChatSession) -> None:
        """Offer a session to external agents, and wait until an agent claims it.

        This wakes an agent that waits for a rollout. If this call is cancelled, it withdraws the offer.

        Raises:
            AttemptError: JSON cannot represent the arguments of the rollout.
        """
        offered = {
            "id": session.session_id,
            "base_url": session.base_url,
            "api_key": session.api_key,
            "task_id": session.task_id,
            "attempt": session.attempt,
            "arguments": session.arguments,
        }
        try:
            answer = msgspec.json.encode(offered)
        except TypeError as error:
            text = f"agent: arguments must be JSON, got {session.arguments!r:.80}: {error}"
            raise AttemptError(text, Partial(), ErrorKind.REFUSED) from error
        claimed = asyncio.Event()
        self._offers[session.session_id] = answer, claimed
        self._num_offers.release()
        try:
            await claimed.wait()
        finally:
            self._offers.pop(session.session_id, None)

    async def start(self) -> TextCodec:
        """Listen, and return the tokenizer. Idempotent.

        Raises:
            ConfigError: there is no tokenizer, or the address cannot be bound.
        """
        async with self._lock:
            if self._text is None:
                raise ConfigError(
                    "chat: tokenizer must be the folder of the model's tokenizer, got ''; start the worker with "
                    "--tokenizer FOLDER"
                )
            if self._runner is None:
                await self._listen()
            return self._text

    async def close(self) -> None:
        """Stop listening and close all connections. Idempotent."""
        async with self._lock:
            if self._listener is not None:
                await self._listener.stop()
            if self._runner is not None:
                await self._runner.cleanup()
            self._listener = self._runner = None

    async def _listen(self) -> None:
        """Bind the address, start the server, and log its URL. Raise the process's limit of open files."""
        settings, tls = self.settings, server_context()
        host = published_host(settings.host, settings.advertise_host, "chat")
        bound = listen(settings.host, settings.port, "chat")
        scheme = "http" if tls is None else "https"
        self._url = url_of(host, bound.getsockname()[1], scheme=scheme)
        app = web.Application(middlewares=[self._guard], client_max_size=settings.max_body_nbytes)
        app.add_routes(
            [
                web.post("/v1/chat/completions", self._chat),
                web.post("/v1/completions", self._completions),
                web.post("/v1/responses", self._responses),
                web.get("/v1/models", self._models),
                web.get("/v1/models/{name}", self._models),
                web.post("/v1/sessions", self._claim),
                web.post("/v1/sessions/{id}/reward", self._reward),
            ]
        )
        # If a client disconnects, aiohttp cancels the handler. The session then records no turn for this request.
        self._runner = web.AppRunner(
            app,
            access_log=None,
            shutdown_timeout=2.0,
            handler_cancellation=True,
            logger=request_log,
        )
        await self._runner.setup()
        raise_file_limit()
        self._listener = Listener(self._runner, bound, tls=tls)
        await self._listener.start()
        logger.info("agents connect to %s/v1", self._url)

    # --- requests ------------------------------------------------------------------------

    @web.middleware
    async def _guard(
        self, request: web.Request, handler: Callable[[web.Request], Awaitable[web.StreamResponse]]
    ) -> web.StreamResponse:
        """Check the key before the body is read, and answer errors in OpenAI's format."""
        try:
            self._authenticate(request)
            return await handler(request)
        except ApiError as error:
            return _refused(error)
        except (ConfigError, *DECODE_ERRORS) as error:
            return _refused(ApiError(400, str(error), "invalid_request"))
        except web.HTTPException as error:
            return _refused(ApiError(error.status, error.reason, "http_error"))

    def _authenticate(self, request: web.Request) -> None:
        """Check the key of a request, and admit its connection; see `Listener.admit`.

        An ended session accepts only a repetition of the request that set its reward.

        Raises:
            ApiError: the key is wrong, or no file descriptor is left for the connection.
        """
        if request.path == "/v1/sessions":
            if self._gate.role_of(request.headers.get("Authorization", "")) is None:
                raise ApiError(401, "missing or wrong agent token", "invalid_api_key")
        elif not request.path.endswith("/reward") or not self._is_ended(request):
            self._session_of(request)
        if self._listener is not None and not self._listener.admit(request):
            raise ApiError(503, NO_ROOM, "no_room", retry=True)

    def _session_of(self, request: web.Request) -> ChatSession:
        """Return the session that has the key of a request; raise `ApiError` for a wrong key."""
        key = _key_of(request)
        session = self._sessions.get(_public_part(key))
        if session is None or not session.is_key(key):
            raise session_ended()
        return session

    def _is_ended(self, request: web.Request) -> bool:
        """Return whether a request has the key of a session that ended with a reward."""
        key = _key_of(request)
        ended = self._ended.get(_public_part(key))
        digest = ended.key_digest if ended is not None else b""
        return hmac.compare_digest(digest, hashlib.sha256(key.encode()).digest())

    async def _chat(self, http: web.Request) -> web.StreamResponse:
        """Answer `POST /v1/chat/completions`."""
        return await self._choices(http, ChatRequest, chat_call, ChatReply)

    async def _completions(self, http: web.Request) -> web.StreamResponse:
        """Answer `POST /v1/completions`."""
        return await self._choices(http, CompletionRequest, completion_call, CompletionReply)

    async def _choices(
        self,
        http: web.Request,
        kind: type[C],
        call_of: Callable[[C, Policy], Call],
        reply_of: Callable[[str, Sequence[Choice], bool, bool], ChatReply | CompletionReply],
    ) -> web.StreamResponse:
        """Answer a request for chat completions or completions.

        Args:
            http: the request.
            kind: type of the request's body.
            call_of: function that makes the session's call from the body.
            reply_of: function that makes the reply. Its arguments are the model's name, the answers, whether the agent
                wants log-probabilities, and whether the agent wants token counts in a stream.
        """
        session = self._session_of(http)

        async def reply(request: C, send: Send | None) -> Reply:
            call = call_of(request, session.policy)
            usage = request.stream_options is not None and request.stream_options.include_usage
            begun = reply_of(request.model or MODEL, (), call.logprobs, usage)

            def show(new: Delta) -> None:
                _send_all(send, begun.delta(new))

            choices = await session.answer(call, show if send is not None else None)
            made = replace(begun, choices=choices)
            _send_all(send, made.ending())
            return made

        return await self._serve(http, kind, reply)

    async def _responses(self, http: web.Request) -> web.StreamResponse:
        """Answer `POST /v1/responses`. Store the conversation, so that a later request can continue it."""
        session = self._session_of(http)

        async def reply(request: ResponseRequest, send: Send | None) -> Reply:
            previous: tuple[Message, ...] = ()
            if name := request.previous_response_id:
                if name not in session.responses:
                    raise ApiError(404, f"no response {name!r} in this session", "not_found")
                previous = session.responses[name]
            call = response_call(request, session.policy, previous)
            (choice,) = await session.answer(call)
            made = ResponseReply(request.model or MODEL, choice, _echoed(request, call))
            session.responses[made.reply_id] = (*call.new_messages, choice.message)
            _send_all(send, made.events())
            return made

        return await self._serve(http, ResponseRequest, reply)

    async def _serve(
        self,
        http: web.Request,
        kind: type[T],
        reply_to: Callable[[T, Send | None], Coroutine[None, None, Reply]],
    ) -> web.StreamResponse:
        """Read a request, get its reply from `reply_to`, and send the reply as one object or as a stream.

        `reply_to` sends the events of a stream itself. A repetition of an earlier request gets the reply of the earlier
        request, also if the endpoint still makes this reply.
        """
        session = self._session_of(http)
        async with session.request():
            body = await _body_of(http)
            session.check_open()
            key, repeated = _repetition(http, body)
            request = msgspec.json.decode(body, type=kind)
            found = session.find_reply(key) if repeated else None

            async def replied(send: Send | None) -> Reply:
                making = found
                # The last client of the earlier request may have gone away since `find_reply`.
                if making is None or making.job.cancelling():
                    making = session.make_reply(key, reply_to(request, send))
                reply = await session.wait_for_reply(key, making)
                if making is found:
                    _send_all(send, reply.events())
                return reply

            if request.stream:
                return await _stream(http, replied)
            return _json((await replied(None)).body())

    async def _models(self, http: web.Request) -> web.StreamResponse:
        """Answer `GET /v1/models` with a list of the one model `MODEL`.

        `GET /v1/models/{name}` succeeds for every name.
        """
        name = http.match_info.get("name", MODEL)
        model = {"id": name, "object": "model", "created": 0, "owned_by": "windlass"}
        return _json(model if "name" in http.match_info else {"object": "list", "data": [model]})

    async def _reward(self, http: web.Request) -> web.StreamResponse:
        """Set the reward of a session, and close the session. A repetition with the same reward and metadata succeeds.

        Raises:
            ApiError: the key is not the key of the session in the path, or an ended session has another reward or other
                metadata.
            ConfigError: an open session has another reward or other metadata, or msgpack cannot encode the metadata.
        """
        given = msgspec.json.decode(await _body_of(http), type=_Reward)
        name = http.match_info["id"]
        if name != _public_part(_key_of(http)):
            raise session_ended()
        if self._is_ended(http):
            # The agent repeats the request, because it did not get the reply.
            ended = self._ended[name]
            if given.reward != ended.reward:
                text = f"reward: must be {ended.reward}, the reward of the ended session, got {given.reward}"
                raise ApiError(409, text, "reward_exists")
            if _metadata_digest(given.metadata) != ended.metadata_digest:
                text = (
                    "reward: metadata must be that of the ended session, got other metadata with reward "
                    f"{ended.reward}; repeat the request without a change"
                )
                raise ApiError(409, text, "reward_exists")
        else:
            session = self._session_of(http)
            if session.reward is None:
                # The attempt may have failed already, while its workflow still cleans up. Then refuse the reward.
                session.check_open()
            # Refuse the metadata now: the agent cannot correct it after the session has ended.
            value = {**session.result(), "reward": given.reward, "metadata": given.metadata}
            encode_value("reward: metadata", value)
            session.set_reward(given.reward, given.metadata)
        return _json({"id": name, "reward": given.reward})

    async def _claim(self, http: web.Request) -> web.StreamResponse:
        """Wait until a session is offered, or until the agent's deadline passes. Give the session to the agent.

        Raises:
            ApiError: no session was offered in time, or too many agents wait.
            ConfigError: the deadline is out of range.
        """
        body = await _body_of(http)
        claim = msgspec.json.decode(body or b"{}", type=_Claim)
        if not 0 < claim.deadline_s <= MAX_CLAIM_S:
            raise ConfigError(
                f"deadline_s: must be in (0, {MAX_CLAIM_S:g}], got {claim.deadline_s}"
            )
        if self._num_claims >= MAX_WAITING_CLAIMS:
            raise ApiError(429, f"{MAX_WAITING_CLAIMS} agents wait already", "rate_limit_exceeded")
        self._num_claims += 1
        try:
            async with asyncio.timeout(claim.deadline_s):
                await self._num_offers.acquire()
                # When an attempt ends, `offer` removes the offer and does not decrease the semaphore. So the
                # semaphore may count more offers than exist.
                while not self._offers:
                    await self._num_offers.acquire()
            answer, claimed = self._offers.pop(next(iter(self._offers)))
            claimed.set()
        except TimeoutError as error:
            text = f"no rollout to claim within {claim.deadline_s:g} s"
            raise ApiError(408, text, "no_rollout", retry=True) from error
        finally:
            self._num_claims -= 1
        return web.Response(body=answer, content_type="application/json")


def _key_of(http: web.Request) -> str:
    """Return the key in the `Authorization` header of a request; "" without the header."""
    return http.headers.get("Authorization", "").removeprefix("Bearer ")


def _public_part(key: str) -> str:
    """Return the session's id in a key. The id is not secret: the server also compares the whole key."""
    return "".join(key.split("-")[2:3])


def _metadata_digest(metadata: object) -> bytes:
    """Return a digest of metadata that came with a reward.

    The digest is empty if JSON cannot represent the metadata. A workflow may set such metadata, but no request contains it.
    """
    try:
        encoded = msgspec.json.encode(metadata, order="deterministic")
    except (TypeError, ValueError, OverflowError, *DECODE_ERRORS):
        return b""
    return hashlib.sha256(encoded).digest()


def _json(body: object) -> web.Response:
    """Return a response with this body as JSON."""
    return web.Response(body=msgspec.json.encode(body), content_type="application/json")


def _refused(error: ApiError) -> web.Response:
    """Return the response for an error. If the request's body may be unread, the response closes the connection."""
    response = web.Response(
        body=msgspec.json.encode(error.body()),
        status=error.status,
        headers=error.headers,
        content_type="application/json",
    )
    if error.status in {401, 408, 413}:
        # The rest of the body is never read.
        response.force_close()
    return response


async def _body_of(http: web.Request) -> bytes:
    """Return the body of a request; raise `ApiError` if it does not arrive in time."""
    try:
        async with asyncio.timeout(BODY_DEADLINE_S):
            return await http.read()
    except TimeoutError as error:
        text = f"the body must arrive within {BODY_DEADLINE_S:g} s"
        raise ApiError(408, text, "body_too_slow") from error


def _repetition(http: web.Request, body: bytes) -> tuple[bytes, bool]:
    """Return a key that is equal for all repetitions of a request, and whether this request may be a repetition."""
    name = http.headers.get("Idempotency-Key", "")
    digest = hashlib.sha256(http.path.encode() + b"\0" + (name.encode() if name else body))
    count = http.headers.get("X-Stainless-Retry-Count", "0")
    return digest.digest(), bool(name) or count not in {"", "0"}


def _send_all(send: Send | None, events: Iterable[bytes]) -> None:
    """Send events, if the request asks for a stream."""
    if send is not None:
        for each in events:
            send(each)


async def _stream(
    http: web.Request, reply: Callable[[Send | None], Awaitable[Reply]]
) -> web.StreamResponse:
    """Call `reply`, and send its server-sent events to the client immediately.

    The stream begins with the first event, or with a comment if there is no event within `STREAM_PING_S`. If
    `reply` raises an error before that, send the error with an HTTP status. If the client disconnects or reads nothing,
    cancel `reply`; the engine then stops generating.
    """
    parts = asyncio.Queue[bytes]()
    job = asyncio.ensure_future(reply(parts.put_nowait))
    job.add_done_callback(lambda _: parts.put_nowait(END))
    stream = web.StreamResponse(
        headers={"Content-Type": "text/event-stream", "Cache-Control": "no-cache"}
    )
    try:
        while True:
            try:
                async with asyncio.timeout(STREAM_PING_S):
                    part = await parts.get()
            except TimeoutError:
                part = b": the engine generates\n\n"
            is_last = part is END
            if is_last:
                part = _last_event(job, has_begun=stream.prepared)
            try:
                async with asyncio.timeout(READ_DEADLINE_S):
                    if not stream.prepared:
                        await stream.prepare(http)
                    await stream.write(part)
                    if is_last:
                        await stream.write_eof()
            except TimeoutError:
                if http.transport is not None:
                    http.transport.abort()
                return stream
            if is_last:
                return stream
    finally:
        job.cancel()


def _last_event(job: asyncio.Future[Reply], *, has_begun: bool) -> bytes:
    """Return an event with the error of `job`; `END` if there is none. If the stream has not begun, raise the error."""
    try:
        job.result()
    except (ApiError, ConfigError) as error:
        if not has_begun:
            raise
        refusal = error if isinstance(error, ApiError) else ApiError(400, str(error), "invalid")
        return event(refusal.body())
    return END


def _echoed(request: ResponseRequest, call: Call) -> dict[str, object]:
    """Return the settings of a request that its response repeats."""
    return {
        "instructions": request.instructions,
        "previous_response_id": request.previous_response_id,
        "tools": msgspec.to_builtins(request.tools or []),
        "tool_choice": request.tool_choice or "auto",
        "temperature": call.sampling.temperature,
        "top_p": call.sampling.top_p,
        "metadata": request.metadata or {},
        "parallel_tool_calls": call.parallel_calls,
    }
