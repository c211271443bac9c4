"""Prompts of a session. A prompt that continues an answer begins with the token ids that the engine generated.

Text is not tokenised again: the tokens of generated text may differ from the tokens that a tokenizer makes of it. The
next prompt is the earlier prompt, the earlier output, and the rendered tokens of the new messages alone.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, final

from windlass.rollout.chat.messages import Message, fingerprints
from windlass.rollout.text import TextCodec

REWRITES = "the chat template renders earlier messages in another way after the new messages"
OTHER_HISTORY = "the messages do not continue an earlier answer of this session"
OTHER_TEXT = "the prompt does not continue an earlier answer of this session"


@dataclass(frozen=True, slots=True)
class Prompt:
    """Prompt of one request.

    Attributes:
        ids: token ids.
        messages: messages of the request; earlier answers are as the engine generated them.
        branch: reason why the prompt does not continue an earlier answer; empty for the first prompt of a session,
            and for a prompt that continues an answer.
    """

    ids: tuple[int, ...]
    messages: tuple[Message, ...] = ()
    branch: str = ""


@dataclass(frozen=True, slots=True)
class _Answered:
    messages: tuple[Message, ...]
    prompt_ids: tuple[int, ...]
    output_ids: tuple[int, ...]


@final
class Conversations:
    """All conversations of one session, and the token ids of each."""

    def __init__(self, text: TextCodec) -> None:
        self._text = text
        self._answered: dict[bytes, _Answered] = {}
        self._texts: list[tuple[str, tuple[int, ...]]] = []

    async def prompt(
        self, messages: Sequence[Message], tools: Sequence[Mapping[str, Any]]
    ) -> Prompt:
        """Return the prompt of a conversation.

        Raises:
            ConfigError: the chat template refuses the conversation.
        """
        # In a thread: the rendering of a long conversation would block the event loop.
        return await asyncio.to_thread(self._prompt, tuple(messages), tools)

    def answered(
        self,
        prompt: Prompt,
        tools: Sequence[Mapping[str, Any]],
        answer: Message,
        output_ids: tuple[int, ...],
    ) -> None:
        """Record an answer of the engine, so that later prompts can continue it."""
        messages = (*prompt.messages, answer)
        known = _Answered(messages, prompt.ids, output_ids)
        self._answered[fingerprints(messages, tools)[-1]] = known

    async def text_prompt(self, text: str) -> Prompt:
        """Return the prompt of a text. It continues the longest earlier prompt and answer with which `text` begins."""
        found = [known for known in self._texts if text.startswith(known[0])]
        begin, ids = max(found, key=lambda known: len(known[0]), default=("", ()))
        rest = await asyncio.to_thread(self._text.encode, text[len(begin) :])
        return Prompt(ids + rest, branch=OTHER_TEXT if self._texts and not found else "")

    def text_answered(self, text: str, prompt: Prompt, output_ids: tuple[int, ...]) -> None:
        """Record an answer to a text prompt; `text` is prompt and answer."""
        self._texts.append((text, prompt.ids + output_ids))

    def _prompt(self, messages: tuple[Message, ...], tools: Sequence[Mapping[str, Any]]) -> Prompt:
        for digest in reversed(fingerprints(messages, tools)):
            if (known := self._answered.get(digest)) is not None:
                # Render the reasoning of earlier answers too, which clients may drop.
                whole = (*known.messages, *messages[len(known.messages) :])
                return self._continued(known, whole, tools)
        ids = self._rendered(messages, tools, True)
        return Prompt(ids, messages, OTHER_HISTORY if self._answered else "")

    def _rendered(
        self,
        messages: Sequence[Message],
        tools: Sequence[Mapping[str, Any]],
        add_generation_prompt: bool,
    ) -> tuple[int, ...]:
        return self._text.render(
            [message.for_template() for message in messages],
            tools,
            add_generation_prompt=add_generation_prompt,
        )

    def _continued(
        self,
        known: _Answered,
        messages: tuple[Message, ...],
        tools: Sequence[Mapping[str, Any]],
    ) -> Prompt:
        """Return a prompt that continues an earlier answer, or a branch if the chat template rewrites the answer."""
        whole = self._rendered(messages, tools, True)
        earlier = self._rendered(known.messages, tools, False)
        end = self._end_of_answer()
        if not end or earlier[-len(end) :] != end or whole[: len(earlier)] != earlier:
            return Prompt(whole, messages, REWRITES)
        known_ids = known.prompt_ids + _ended(known.output_ids, end)
        return Prompt(known_ids + whole[len(earlier) :], messages)

    def _end_of_answer(self) -> tuple[int, ...]:
        """Return the tokens that the chat template adds after an answer.

        Two conversations that differ only in their answers end with the same tokens after the answer.
        """
        question = Message("user", "x")
        one, other = (
            self._rendered((question, Message("assistant", content)), (), False)
            for content in ("0", "1")
        )
        if one == other:
            return ()
        length = 0
        while one[len(one) - length - 1] == other[len(other) - length - 1]:
            length += 1
        return one[len(one) - length :]


def _ended(ids: tuple[int, ...], end: tuple[int, ...]) -> tuple[int, ...]:
    """Return the ids with the tokens of `end` that they do not contain yet. The model may have generated the first ones."""
    for length in range(len(end), 0, -1):
        if ids[-length:] == end[:length]:
            return ids + end[length:]
    return ids + end
