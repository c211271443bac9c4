"""Messages of a conversation, equal for chat completions and responses."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from windlass.errors import DECODE_ERRORS
from windlass.rollout.images import digest_of, is_image


class ToolCall(msgspec.Struct, frozen=True):
    """Call of a function by the model. `arguments` is JSON, as the model wrote it."""

    id: str
    name: str
    arguments: str


class Message(msgspec.Struct, frozen=True):
    """Message of a conversation.

    Attributes:
        reasoning: text that the model wrote before its answer, between `<think>` tags.
        tool_call_id: id of the call that a message of role `tool` answers.
        name: name of the function or participant; may be empty.
        more: further keys, which only the chat template knows.
        parts: texts and encoded images of a content with images, in order; empty for a content without images.
    """

    role: str
    content: str
    reasoning: str = ""
    tool_calls: tuple[ToolCall, ...] = ()
    tool_call_id: str = ""
    name: str = ""
    more: Mapping[str, Any] = {}
    parts: tuple[str | bytes, ...] = ()

    @property
    def images(self) -> tuple[bytes, ...]:
        """Encoded images of the message, in order."""
        return tuple(part for part in self.parts if isinstance(part, bytes))

    @classmethod
    def of(cls, given: Mapping[str, Any]) -> Message:
        """Convert a message of a `Chat`. The message must have the format of chat completions.

        If one of its tool calls has a different format, `more` gets all its tool calls unchanged.
        """
        content, parts = given.get("content"), tuple[str | bytes, ...]()
        if isinstance(content, list):
            if any(map(is_image, content)):
                parts = tuple(part["image"] if is_image(part) else part["text"] for part in content)
            content = "\n".join(part["text"] for part in content if not is_image(part))
        calls = given.get("tool_calls")
        found = [_call_of(each) for each in calls] if isinstance(calls, list) else []
        of_client = {"role", "content"}
        known: dict[str, Any] = {}
        if all(call is not None for call in found):
            of_client.add("tool_calls")
            known["tool_calls"] = tuple(found)
        for key, name in (("reasoning_content", "reasoning"), ("tool_call_id",) * 2, ("name",) * 2):
            if isinstance(given.get(key), str):
                of_client.add(key)
                known[name] = given[key]
        more = {key: value for key, value in given.items() if key not in of_client}
        return cls(given["role"], content or "", **known, more=more, parts=parts)

    def for_template(self) -> dict[str, Any]:
        """Return the message as chat templates expect it.

        The arguments of tool calls are decoded from JSON. A content with images is a list of parts, and an image is a part
        without data, because the template only writes its placeholder.
        """
        found: dict[str, Any] = {"role": self.role, "content": self.content}
        if self.parts:
            found["content"] = [
                {"type": "text", "text": part} if isinstance(part, str) else {"type": "image"}
                for part in self.parts
            ]
        if self.reasoning:
            found["reasoning_content"] = self.reasoning
        if self.tool_calls:
            found["tool_calls"] = [
                {
                    "id": call.id,
                    "type": "function",
                    "function": {"name": call.name, "arguments": _value(call.arguments)},
                }
                for call in self.tool_calls
            ]
        more = {"tool_call_id": self.tool_call_id, "name": self.name}
        return {**found, **{name: value for name, value in more.items() if value}, **self.more}

    def identity(self) -> bytes:
        """Return bytes that are equal for equal messages.

        Reasoning and the formatting of JSON arguments do not count, because a client may change both in earlier answers.
        """
        calls = [(call.id, call.name, _value(call.arguments)) for call in self.tool_calls]
        content = self.content.strip() if self.role == "assistant" else self.content
        parts = [part if isinstance(part, str) else [digest_of([part])] for part in self.parts]
        return msgspec.json.encode(
            (self.role, content, calls, self.tool_call_id, self.name, self.more, parts),
            order="sorted",
        )


class Template(msgspec.Struct, frozen=True):
    """Arguments of the chat template besides the messages.

    Attributes:
        tools: functions, in the form of chat completions.
        arguments: further arguments, such as `{"enable_thinking": False}`.
    """

    tools: tuple[Mapping[str, Any], ...] = ()
    arguments: Mapping[str, Any] = {}


NO_TOOLS = Template()


def fingerprints(messages: Sequence[Message], template: Template) -> list[bytes]:
    """Return for each message a digest of the template's arguments and of all messages up to this message."""
    digest = hashlib.sha256(msgspec.json.encode(template, order="sorted"))
    found = []
    for message in messages:
        identity = message.identity()
        digest.update(len(identity).to_bytes(8) + identity)
        found.append(digest.digest())
    return found


def _call_of(call: Any) -> ToolCall | None:
    """Convert a tool call in the format of chat completions. Return None if the call has a different format.

    The arguments of the call may be values or JSON text.
    """
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        return None
    arguments = function.get("arguments", {})
    if not isinstance(arguments, str):
        arguments = msgspec.json.encode(arguments).decode()
    return ToolCall(str(call.get("id", "")), function["name"], arguments)


def _value(arguments: str) -> object:
    """Return the value of a call's arguments. Arguments that are not JSON stay text."""
    try:
        return msgspec.json.decode(arguments)
    except DECODE_ERRORS:
        return arguments
