"""Parts of an answer that a client can see while the engine generates the rest.

The endpoint cannot take back a part that a client has seen. `Showing` therefore holds back text if a later token may change
its meaning: a character without its last bytes, the beginning of a stop text or of a tag, white space at the end, and
tool calls.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import final

from windlass.rollout.chat.messages import Message
from windlass.rollout.chat.requests import Call
from windlass.rollout.chat.tool_calls import (
    Marks,
    split_reasoning,
    text_before,
    text_before_calls,
)
from windlass.rollout.generate import GeneratedToken
from windlass.rollout.messages import Turn
from windlass.rollout.text import TextCodec

_INCOMPLETE = "\N{REPLACEMENT CHARACTER}"
"""Character that a tokenizer writes for invalid bytes, for example if the last bytes of a character are missing."""


@dataclass(frozen=True, slots=True)
class Token:
    """Generated token as text, with its log-probability. `top` has texts and log-probabilities of the most probable tokens."""

    text: str
    logprob: float
    top: tuple[tuple[str, float], ...] = ()


@dataclass(frozen=True, slots=True)
class Choice:
    """One answer of the engine.

    Attributes:
        turn: prompt and output as token ids.
        whole_text: generated text without special tokens.
        text: generated text without stop texts and special tokens.
        message: the answer as a message of the conversation.
        finish_reason: OpenAI's reason (`stop`, `length`, `tool_calls`).
        tokens: generated tokens, if the request asks for log-probabilities.
    """

    turn: Turn
    whole_text: str
    text: str
    message: Message
    finish_reason: str
    tokens: tuple[Token, ...] = ()


@dataclass(frozen=True, slots=True)
class Delta:
    """New part of an answer.

    Attributes:
        index: index of the answer in its request.
        is_first: whether the client has seen no part of the answer.
        reasoning, content: new text, after the text of earlier parts.
        tokens: new tokens, if the request asks for log-probabilities.
        text_offset: number of characters of the tokens of earlier parts.
    """

    index: int
    is_first: bool = True
    reasoning: str = ""
    content: str = ""
    tokens: tuple[Token, ...] = ()
    text_offset: int = 0


@final
class Showing:
    """One answer, as far as its client has seen it.

    Args:
        text: tokenizer.
        call: request.
        index: index of the answer in the request.
        marks: beginnings of tool calls.
        is_open: whether the answer begins with reasoning, see `split_reasoning`.
    """

    def __init__(
        self, text: TextCodec, call: Call, index: int, marks: Marks, *, is_open: bool
    ) -> None:
        self._codec, self._call, self._index = text, call, index
        self._marks, self._is_open = marks, is_open
        self._ids: list[int] = []
        # `_text` is the text of the tokens before `_read`. The tokens from `_begin` on are decoded again with new ones,
        # because a token's text may depend on the token before it.
        self._begin = self._read = 0
        self._text = ""
        self._reasoning = self._content = ""
        self._tokens: list[Token] = []
        self._num_tokens = self._text_offset = 0
        self._is_first = True

    def tokens_of(self, new: Sequence[GeneratedToken]) -> tuple[Token, ...]:
        """Convert tokens: replace each token id by its text."""
        return tuple(
            Token(
                self._codec.decode([each.token_id]),
                each.logprob,
                tuple((self._codec.decode([token]), logprob) for token, logprob in each.top),
            )
            for each in new
        )

    def more(self, new: Sequence[GeneratedToken]) -> Delta | None:
        """Add new tokens of an unfinished answer, and return the new visible part; None if no new text is visible."""
        self._ids += [each.token_id for each in new]
        if self._call.logprobs:
            self._tokens += self.tokens_of(new)
        self._decode()
        reasoning, content = self._visible()
        if len(reasoning) <= len(self._reasoning) and len(content) <= len(self._content):
            return None
        return self._next(reasoning, content, self._tokens)

    def rest(self, choice: Choice) -> Delta:
        """Return the last part of a complete answer. It may be empty."""
        message = choice.message
        content = message.content if self._call.prompt is None else choice.text
        return self._next(message.reasoning, content, choice.tokens)

    def _next(self, reasoning: str, content: str, tokens: Sequence[Token]) -> Delta:
        """Return the text and tokens after all earlier parts, and record that they were returned."""
        new = tuple(tokens[self._num_tokens :])
        found = Delta(
            self._index,
            self._is_first,
            reasoning[len(self._reasoning) :],
            content[len(self._content) :],
            new,
            self._text_offset,
        )
        self._is_first, self._num_tokens = False, len(tokens)
        self._text_offset += sum(len(token.text) for token in new)
        self._reasoning, self._content = reasoning, content
        return found

    def _decode(self) -> None:
        """Add the text of new tokens to `_text`, unless this text ends with an incomplete character."""
        before = self._codec.decode(self._ids[self._begin : self._read])
        now = self._codec.decode(self._ids[self._begin :])
        if not now.endswith(_INCOMPLETE):
            self._text += now[len(before) :]
            self._begin, self._read = self._read, len(self._ids)

    def _visible(self) -> tuple[str, str]:
        """Return reasoning and content that no later token can change."""
        call = self._call
        text = text_before(self._text, call.sampling.stop)
        if call.prompt is not None:
            return "", text
        if call.forced or call.sampling.has_structure:
            return "", ""
        reasoning, content = split_reasoning(text, is_open=self._is_open, is_whole=False)
        if call.parses_tools:
            content = text_before_calls(content, self._marks)
        return reasoning, content.strip()
