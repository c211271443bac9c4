"""Parsers of tool calls in generated text, by the name of the format."""

from __future__ import annotations

import re
import secrets
import string
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import msgspec

from windlass.errors import DECODE_ERRORS, ConfigError
from windlass.rollout.chat.messages import ToolCall

Parser = Callable[[str], tuple[str, list[ToolCall]]]
"""Function that takes generated text, and returns the text without its calls, and the calls. Text with an invalid call
stays text: the agent can then answer with an error."""

NUM_ID_CHARACTERS = 9
"""Length of the id of a call. Chat templates of Mistral refuse ids of other lengths."""
_ID_CHARACTERS = string.ascii_letters + string.digits

_decode = msgspec.json.Decoder().decode


class _Call(msgspec.Struct, frozen=True):
    """Call as JSON. Formats name the arguments differently."""

    name: str
    arguments: dict[str, Any] | None = None
    parameters: dict[str, Any] | None = None


def _new_call(name: str, arguments: str) -> ToolCall:
    """Return a call with a new random id."""
    found = "".join(secrets.choice(_ID_CHARACTERS) for _ in range(NUM_ID_CHARACTERS))
    return ToolCall(found, name, arguments)


def _from_json(text: str) -> list[ToolCall]:
    """Return the calls in one JSON object, or in a list of objects; raise an error of `DECODE_ERRORS` otherwise."""
    found = msgspec.json.decode(text, type=_Call | list[_Call])
    calls = found if isinstance(found, list) else [found]
    return [
        _new_call(call.name, msgspec.json.encode(call.arguments or call.parameters or {}).decode())
        for call in calls
    ]


def _tagged(text: str, parse: Callable[[str], Iterable[ToolCall]]) -> tuple[str, list[ToolCall]]:
    """Parse every part between `<tool_call>` tags. If a part is invalid, return the whole text and no calls."""
    begin, end = "<tool_call>", "</tool_call>"
    outside, calls, at = [], list[ToolCall](), 0
    while (first := text.find(begin, at)) >= 0:
        last = text.find(end, first)
        last = len(text) if last < 0 else last
        outside.append(text[at:first])
        try:
            calls += parse(text[first + len(begin) : last].strip())
        except DECODE_ERRORS:
            return text, []
        at = last + len(end)
    return "".join([*outside, text[at:]]), calls


def _elements(text: str, kind: str, *, may_be_open: bool = False) -> Iterator[tuple[str, str]]:
    """Yield name and body of each `<KIND=NAME>BODY</KIND>` in one pass over the text.

    One pass matters because a model may write thousands of opening tags without closing tags.

    Args:
        text: text of a call.
        kind: KIND.
        may_be_open: whether the last body may lack its closing tag; it then ends with the text.
    """
    begin, end, at = f"<{kind}=", f"</{kind}>", 0
    while (at := text.find(begin, at)) >= 0:
        at += len(begin)
        limit = text.find("<", at)
        after = text.find(">", at, len(text) if limit < 0 else limit)
        name = text[at:after] if after >= 0 else ""
        if not name or "\n" in name:
            continue
        last = text.find(end, after)
        if last < 0 and not may_be_open:
            return
        last = len(text) if last < 0 else last
        yield name.strip(), text[after + 1 : last]
        at = last


def parse_hermes(text: str) -> tuple[str, list[ToolCall]]:
    """Parse `<tool_call>{"name": ..., "arguments": {...}}</tool_call>` (Hermes, Qwen2.5, Qwen3)."""
    return _tagged(text, _from_json)


def parse_qwen3_coder(text: str) -> tuple[str, list[ToolCall]]:
    """Parse `<tool_call><function=NAME><parameter=KEY>VALUE</parameter></function></tool_call>` (Qwen3-Coder)."""

    def parse(part: str) -> Iterator[ToolCall]:
        for name, body in _elements(part, "function", may_be_open=True):
            arguments = {
                key: _plain(value.removeprefix("\n").removesuffix("\n"))
                for key, value in _elements(body, "parameter")
            }
            yield _new_call(name, msgspec.json.encode(arguments).decode())

    return _tagged(text, parse)


def _plain(value: str) -> object:
    """Return the value of a parameter. The format does not quote text, so a value that is not JSON is text."""
    try:
        found: object = _decode(value)
    except DECODE_ERRORS:
        return value
    return found


def parse_llama_json(text: str) -> tuple[str, list[ToolCall]]:
    """Parse one or more objects `{"name": ..., "parameters": {...}}`, separated by `;` (Llama 3)."""
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
    """Parse `[TOOL_CALLS][{"name": ..., "arguments": {...}}]` (Mistral). The engine may have removed the marker."""
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


@dataclass(frozen=True, slots=True)
class Marks:
    """Beginnings of a call: at any place of an answer, or only at its start."""

    anywhere: tuple[str, ...] = ()
    at_start: tuple[str, ...] = ()


MARKS: Mapping[str, Marks] = MappingProxyType(
    {
        "hermes": Marks(("<tool_call>",)),
        "llama_json": Marks(at_start=("<|python_tag|>", "{", "[")),
        "mistral": Marks(("[TOOL_CALLS]",), ("[",)),
        "qwen3_coder": Marks(("<tool_call>",)),
    }
)
"""Name of a format -> beginnings of its calls."""


def text_before(text: str, marks: Iterable[str]) -> str:
    """Return the text before the first mark. If the text ends with a prefix of a mark, leave out this prefix too."""
    end = len(text)
    for mark in marks:
        if (at := text.find(mark)) < 0:
            lengths = range(min(len(mark) - 1, len(text)), 0, -1)
            begun = next((length for length in lengths if text.endswith(mark[:length])), 0)
            at = len(text) - begun
        end = min(end, at)
    return text[:end]


def text_before_calls(text: str, marks: Marks) -> str:
    """Return the text of an unfinished answer before the first place where a call begins or may begin."""
    begun = text.lstrip()
    if any(begun.startswith(mark) or mark.startswith(begun) for mark in marks.at_start):
        return ""
    return text_before(text, marks.anywhere)


def parser_of(name: str) -> Parser:
    """Return the parser of a format.

    Raises:
        ConfigError: no format has this name.
    """
    if name not in PARSERS:
        raise ConfigError(f"chat: tool_format must be one of {sorted(PARSERS)}, got {name!r}")
    return PARSERS[name]


THINK, THOUGHT = "<think>", "</think>"
"""Tags before and after the reasoning of a model."""


def split_reasoning(text: str, *, is_open: bool = False, is_whole: bool = True) -> tuple[str, str]:
    """Divide an answer at `</think>`, and return the reasoning and the text after it.

    Args:
        text: generated text. It has reasoning only if it starts with `<think>` or `is_open` is set.
        is_open: whether the prompt ends with `<think>`, as the chat templates of some models do.
        is_whole: whether the answer is complete. If the text of an incomplete answer ends with a prefix of a tag, leave
            out this prefix.
    """
    begun = text.lstrip()
    if not is_whole and THINK.startswith(begun):
        return "", ""
    if not is_open and not begun.startswith(THINK):
        return "", text
    before, mark, after = begun.removeprefix(THINK).partition(THOUGHT)
    if not mark and not is_whole:
        before = text_before(before, (THOUGHT,))
    return before.strip(), after
