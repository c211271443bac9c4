"""Parsers of tool calls in generated text, by the name of the format."""

from __future__ import annotations

import re
import secrets
from collections.abc import Callable, Iterable, Mapping
from types import MappingProxyType
from typing import Any

import msgspec

from windlass.errors import DECODE_ERRORS, ConfigError
from windlass.rollout.chat.messages import ToolCall

Parser = Callable[[str], tuple[str, list[ToolCall]]]
"""Function that takes generated text, and returns the text without its calls, and the calls. Text with an invalid call
stays text: the agent can then answer with an error."""

_TAGGED = re.compile(r"<tool_call>(.*?)(?:</tool_call>|\Z)", re.DOTALL)
_FUNCTION = re.compile(r"<function=([^>\n]+)>(.*?)(?:</function>|\Z)", re.DOTALL)
_PARAMETER = re.compile(r"<parameter=([^>\n]+)>\n?(.*?)\n?</parameter>", re.DOTALL)
_decode = msgspec.json.Decoder().decode


class _Call(msgspec.Struct, frozen=True):
    """Call as JSON. Formats name the arguments differently."""

    name: str
    arguments: dict[str, Any] | None = None
    parameters: dict[str, Any] | None = None


def _made(name: str, arguments: str) -> ToolCall:
    return ToolCall(f"call_{secrets.token_hex(12)}", name, arguments)


def _from_json(text: str) -> list[ToolCall]:
    """Return the calls in one JSON object, or in a list of objects; raise an error of `DECODE_ERRORS` otherwise."""
    found = msgspec.json.decode(text, type=_Call | list[_Call])
    calls = found if isinstance(found, list) else [found]
    return [
        _made(call.name, msgspec.json.encode(call.arguments or call.parameters or {}).decode())
        for call in calls
    ]


def _tagged(text: str, parse: Callable[[str], Iterable[ToolCall]]) -> tuple[str, list[ToolCall]]:
    """Parse every part between `<tool_call>` tags; text with an invalid part has no call."""
    try:
        calls = [call for part in _TAGGED.findall(text) for call in parse(part.strip())]
    except DECODE_ERRORS:
        return text, []
    return _TAGGED.sub("", text), calls


def parse_hermes(text: str) -> tuple[str, list[ToolCall]]:
    """Parse `<tool_call>{"name": ..., "arguments": {...}}</tool_call>` (Hermes, Qwen2.5, Qwen3)."""
    return _tagged(text, _from_json)


def parse_qwen3_coder(text: str) -> tuple[str, list[ToolCall]]:
    """Parse `<tool_call><function=NAME><parameter=KEY>VALUE</parameter></function></tool_call>` (Qwen3-Coder)."""

    def parse(part: str) -> list[ToolCall]:
        return [
            _made(
                name.strip(),
                msgspec.json.encode(
                    {key.strip(): _plain(value) for key, value in _PARAMETER.findall(body)}
                ).decode(),
            )
            for name, body in _FUNCTION.findall(part)
        ]

    return _tagged(text, parse)


def _plain(value: str) -> object:
    """Return the value of a parameter. The format does not quote text, so a value that is not JSON is text."""
    try:
        found: object = _decode(value)
    except DECODE_ERRORS:
        return value
    return found


def parse_llama_json(text: str) -> tuple[str, list[ToolCall]]:
    """Parse `{"name": ..., "parameters": {...}}`, several with `;` between them (Llama 3)."""
    body = text.strip().removeprefix("<|python_tag|>").strip()
    if not body.startswith(("{", "[")):
        return text, []
    try:
        return "", _from_json(body)
    except DECODE_ERRORS:
        try:
            return "", [
                call for part in re.split(r"(?<=\})\s*;\s*", body) for call in _from_json(part)
            ]
        except DECODE_ERRORS:
            return text, []


def parse_mistral(text: str) -> tuple[str, list[ToolCall]]:
    """Parse `[TOOL_CALLS][{"name": ..., "arguments": {...}}]` (Mistral)."""
    before, mark, body = text.partition("[TOOL_CALLS]")
    if not mark and not text.lstrip().startswith("["):
        return text, []
    try:
        return (before, _from_json(body.strip())) if mark else ("", _from_json(text.strip()))
    except DECODE_ERRORS:
        return text, []


PARSERS: Mapping[str, Parser] = MappingProxyType(
    {
        "hermes": parse_hermes,
        "llama_json": parse_llama_json,
        "mistral": parse_mistral,
        "qwen3_coder": parse_qwen3_coder,
    }
)
"""Name of a format -> its parser."""


def parser_of(name: str) -> Parser:
    """Return the parser of a format.

    Raises:
        ConfigError: no format has this name.
    """
    if name not in PARSERS:
        raise ConfigError(f"chat: tool_format must be one of {sorted(PARSERS)}, got {name!r}")
    return PARSERS[name]


def split_reasoning(text: str) -> tuple[str, str]:
    """Return the reasoning and the rest of a text. The opening tag may be in the prompt."""
    before, mark, after = text.partition("</think>")
    if mark:
        return before.replace("<think>", "", 1).strip(), after
    if text.lstrip().startswith("<think>"):
        return text.replace("<think>", "", 1).strip(), ""
    return "", text
