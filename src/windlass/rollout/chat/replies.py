"""Replies in the form of chat completions, completions and responses, whole or as server-sent events."""

from __future__ import annotations

import secrets
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any

import msgspec

from windlass.rollout.chat.deltas import Choice, Delta, Token
from windlass.rollout.chat.messages import Message

DONE = b"data: [DONE]\n\n"
"""Last event of a stream of completions."""


def _now() -> int:
    """Return the Unix time in whole seconds."""
    return int(time.time())


def event(data: object, name: str = "") -> bytes:
    """Return one server-sent event with JSON data."""
    head = f"event: {name}\n".encode() if name else b""
    return head + b"data: " + msgspec.json.encode(data) + b"\n\n"


def _usage(choices: Sequence[Choice]) -> tuple[int, int]:
    """Return the number of tokens of the prompt and of all answers."""
    answers = sum(len(choice.turn.output.output_ids) for choice in choices)
    return len(choices[0].turn.prompt_ids), answers


def _usage_body(choices: Sequence[Choice]) -> dict[str, int]:
    """Return the token counts of an answer with OpenAI's field names."""
    prompt, answers = _usage(choices)
    return {
        "prompt_tokens": prompt,
        "completion_tokens": answers,
        "total_tokens": prompt + answers,
    }


@dataclass(frozen=True, slots=True)
class ChatReply:
    """Reply of `/v1/chat/completions`."""

    model: str
    choices: Sequence[Choice]
    logprobs: bool = False
    include_usage: bool = False
    reply_id: str = field(default_factory=lambda: f"chatcmpl-{secrets.token_hex(12)}")
    created: int = field(default_factory=_now)

    def body(self) -> Mapping[str, Any]:
        """Return the answer as one object."""
        return {
            **self._head("chat.completion"),
            "choices": [
                {
                    "index": index,
                    "message": self._message(choice.message),
                    "logprobs": self._logprobs(choice.tokens),
                    "finish_reason": choice.finish_reason,
                }
                for index, choice in enumerate(self.choices)
            ],
            "usage": _usage_body(self.choices),
        }

    def delta(self, new: Delta) -> Iterator[bytes]:
        """Yield a new part of an answer as events."""
        if new.is_first:
            yield self._chunk(new.index, {"role": "assistant", "content": ""})
        if new.reasoning:
            yield self._chunk(new.index, {"reasoning_content": new.reasoning})
        if new.content or new.tokens:
            content = {"content": new.content} if new.content else {}
            yield self._chunk(new.index, content, logprobs=self._logprobs(new.tokens))

    def ending(self) -> Iterator[bytes]:
        """Yield the events that follow the parts of all answers."""
        for index, choice in enumerate(self.choices):
            for number, call in enumerate(self._calls(choice.message)):
                yield self._chunk(index, {"tool_calls": [{"index": number, **call}]})
            yield self._chunk(index, {}, finish_reason=choice.finish_reason)
        if self.include_usage:
            usage = _usage_body(self.choices)
            yield event({**self._head("chat.completion.chunk"), "choices": [], "usage": usage})
        yield DONE

    def events(self) -> Iterator[bytes]:
        """Yield the whole answers as server-sent events."""
        for index, choice in enumerate(self.choices):
            message = choice.message
            yield from self.delta(
                Delta(
                    index,
                    reasoning=message.reasoning,
                    content=message.content,
                    tokens=choice.tokens,
                )
            )
        yield from self.ending()

    def _head(self, kind: str) -> dict[str, Any]:
        """Return the fields that the object and all its chunks have. `kind` is the type of the object."""
        return {
            "id": self.reply_id,
            "object": kind,
            "created": self.created,
            "model": self.model,
        }

    def _chunk(
        self,
        index: int,
        delta: Mapping[str, Any],
        *,
        finish_reason: str | None = None,
        logprobs: Mapping[str, Any] | None = None,
    ) -> bytes:
        """Return a stream event that contains the next part of an answer."""
        choice = {
            "index": index,
            "delta": delta,
            "logprobs": logprobs,
            "finish_reason": finish_reason,
        }
        return event({**self._head("chat.completion.chunk"), "choices": [choice]})

    def _message(self, message: Message) -> dict[str, Any]:
        """Return an answer as OpenAI's message. Its content is None if the answer has only tool calls."""
        calls = self._calls(message)
        content = None if calls and not message.content else message.content
        found: dict[str, Any] = {"role": "assistant", "content": content, "refusal": None}
        if message.reasoning:
            found["reasoning_content"] = message.reasoning
        return {**found, "tool_calls": calls} if calls else found

    @staticmethod
    def _calls(message: Message) -> list[dict[str, Any]]:
        """Return the tool calls of an answer in OpenAI's format; empty for none."""
        return [
            {
                "id": call.id,
                "type": "function",
                "function": {"name": call.name, "arguments": call.arguments},
            }
            for call in message.tool_calls
        ]

    def _logprobs(self, tokens: Sequence[Token]) -> dict[str, Any] | None:
        """Return the log-probabilities of tokens, or None if the request does not ask for them."""
        return {"content": _logprobs(tokens), "refusal": None} if self.logprobs else None


def _logprobs(tokens: Sequence[Token]) -> list[dict[str, Any]]:
    """Return log-probabilities in the format of chat completions and responses."""
    return [
        {
            **_logprob(token.text, token.logprob),
            "top_logprobs": [_logprob(*other) for other in token.top],
        }
        for token in tokens
    ]


def _logprob(text: str, logprob: float) -> dict[str, Any]:
    """Return the text of a token in JSON, with its bytes and its log-probability."""
    return {"token": text, "logprob": logprob, "bytes": list(text.encode())}


@dataclass(frozen=True, slots=True)
class CompletionReply:
    """Reply of `/v1/completions`."""

    model: str
    choices: Sequence[Choice]
    logprobs: bool = False
    include_usage: bool = False
    reply_id: str = field(default_factory=lambda: f"cmpl-{secrets.token_hex(12)}")
    created: int = field(default_factory=_now)

    def body(self) -> Mapping[str, Any]:
        choices = [
            self._part(self._whole(index, choice), choice.finish_reason)
            for index, choice in enumerate(self.choices)
        ]
        return {**self._head(), "choices": choices, "usage": _usage_body(self.choices)}

    def delta(self, new: Delta) -> Iterator[bytes]:
        """Yield a new part of an answer as events."""
        if new.content or new.tokens:
            yield event({**self._head(), "choices": [self._part(new)]})

    def ending(self) -> Iterator[bytes]:
        """Yield the events that follow the parts of all answers."""
        for index, choice in enumerate(self.choices):
            part = self._part(Delta(index), choice.finish_reason)
            yield event({**self._head(), "choices": [{**part, "logprobs": None}]})
        if self.include_usage:
            yield event({**self._head(), "choices": [], "usage": _usage_body(self.choices)})
        yield DONE

    def events(self) -> Iterator[bytes]:
        """Yield the whole answers as server-sent events."""
        for index, choice in enumerate(self.choices):
            yield from self.delta(self._whole(index, choice))
        yield from self.ending()

    @staticmethod
    def _whole(index: int, choice: Choice) -> Delta:
        """Return a whole answer as one part."""
        return Delta(index, content=choice.text, tokens=choice.tokens)

    def _head(self) -> dict[str, Any]:
        """Return the fields that the object and all its chunks have."""
        return {
            "id": self.reply_id,
            "object": "text_completion",
            "created": self.created,
            "model": self.model,
        }

    def _part(self, new: Delta, finish_reason: str | None = None) -> dict[str, Any]:
        """Return a part of an answer, with the answer's index, in OpenAI's format."""
        lengths = (len(token.text) for token in new.tokens)
        has_top = any(token.top for token in new.tokens)
        logprobs = {
            "tokens": [token.text for token in new.tokens],
            "token_logprobs": [token.logprob for token in new.tokens],
            # If several tokens have the same text, the dict keeps the last one: the most probable.
            "top_logprobs": [dict(reversed(t.top)) for t in new.tokens] if has_top else None,
            "text_offset": [*accumulate(lengths, initial=new.text_offset)][:-1],
        }
        return {
            "index": new.index,
            "text": new.content,
            "logprobs": logprobs if self.logprobs else None,
            "finish_reason": finish_reason,
        }


@dataclass(frozen=True, slots=True)
class ResponseReply:
    """Reply of `/v1/responses`. `echoed` has the settings of the request that the reply repeats."""

    model: str
    choice: Choice
    echoed: Mapping[str, Any] = field(default_factory=dict)
    reply_id: str = field(default_factory=lambda: f"resp_{secrets.token_hex(12)}")
    created: int = field(default_factory=_now)

    def body(self) -> Mapping[str, Any]:
        """Return the answer as one object."""
        cut = self.choice.finish_reason == "length"
        prompt, answer = _usage([self.choice])
        return {
            **self._head("incomplete" if cut else "completed"),
            "incomplete_details": {"reason": "max_output_tokens"} if cut else None,
            "output": self._items(),
            "usage": {
                "input_tokens": prompt,
                "input_tokens_details": {"cached_tokens": 0, "cache_write_tokens": 0},
                "output_tokens": answer,
                "output_tokens_details": {"reasoning_tokens": 0},
                "total_tokens": prompt + answer,
            },
        }

    def events(self) -> Iterator[bytes]:
        """Yield the answer as server-sent events."""
        body = self.body()
        begun = {**self._head("in_progress"), "incomplete_details": None, "output": []}
        found: list[dict[str, Any]] = [
            {"type": "response.created", "response": {**begun, "usage": None}},
            {"type": "response.in_progress", "response": {**begun, "usage": None}},
        ]
        for index, item in enumerate(body["output"]):
            found += self._events_of(index, item)
        found.append({"type": f"response.{body['status']}", "response": body})
        for number, data in enumerate(found):
            yield event({**data, "sequence_number": number}, data["type"])

    def _head(self, status: str) -> dict[str, Any]:
        """Return the fields that the response has in each state."""
        return {
            "id": self.reply_id,
            "object": "response",
            "created_at": self.created,
            "status": status,
            "model": self.model,
            "error": None,
            **self.echoed,
        }

    def _items(self) -> list[dict[str, Any]]:
        """Return the output items: reasoning, text and tool calls of the answer, in this order."""
        message, items = self.choice.message, list[dict[str, Any]]()
        if message.reasoning:
            items.append(
                {
                    "id": f"rs_{self.reply_id}",
                    "type": "reasoning",
                    "summary": [],
                    "content": [{"type": "reasoning_text", "text": message.reasoning}],
                }
            )
        if message.content or not message.tool_calls:
            part = {
                "type": "output_text",
                "text": message.content,
                "annotations": [],
                "logprobs": _logprobs(self.choice.tokens),
            }
            items.append(
                {
                    "id": f"msg_{self.reply_id}",
                    "type": "message",
                    "role": "assistant",
                    "status": "completed",
                    "content": [part],
                }
            )
        items += [
            {
                "id": f"fc_{call.id}",
                "type": "function_call",
                "status": "completed",
                "call_id": call.id,
                "name": call.name,
                "arguments": call.arguments,
            }
            for call in message.tool_calls
        ]
        return items

    @staticmethod
    def _events_of(index: int, item: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
        """Yield the events of one output item."""
        place: dict[str, Any] = {"output_index": index}
        empty: dict[str, dict[str, Any]] = {
            "message": {"content": []},
            "function_call": {"arguments": ""},
        }
        begun = {**item, **empty.get(item["type"], {})}
        if "status" in begun:
            begun["status"] = "in_progress"
        yield {"type": "response.output_item.added", **place, "item": begun}
        place["item_id"] = item["id"]
        if item["type"] == "message":
            (part,) = item["content"]
            place["content_index"] = 0
            added = {**part, "text": "", "logprobs": []}
            yield {"type": "response.content_part.added", **place, "part": added}
            kind, logprobs = "response.output_text", part["logprobs"]
            yield {"type": f"{kind}.delta", **place, "delta": part["text"], "logprobs": logprobs}
            yield {"type": f"{kind}.done", **place, "text": part["text"], "logprobs": logprobs}
            yield {"type": "response.content_part.done", **place, "part": part}
        elif item["type"] == "function_call":
            arguments, name = item["arguments"], item["name"]
            kind = "response.function_call_arguments"
            yield {"type": f"{kind}.delta", **place, "delta": arguments}
            yield {"type": f"{kind}.done", **place, "arguments": arguments, "name": name}
        yield {"type": "response.output_item.done", "output_index": index, "item": item}
