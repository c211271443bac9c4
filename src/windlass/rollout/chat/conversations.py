"""Prompts of a session. A prompt that continues an answer begins with the token ids that the engine generated.

Text is not tokenised again: the tokens of generated text may differ from the tokens that a tokenizer makes of it. The
next prompt is the earlier prompt, the earlier output, and the rendered tokens of the new messages alone.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import final

from windlass.rollout.chat.messages import NO_TOOLS, Message, Template, ToolCall, fingerprints
from windlass.rollout.images import ImagePrompt
from windlass.rollout.text import TemplateInput, TextCodec

MAX_END_TOKENS = 16
"""Longest run of tokens that both the model and the chat template put at the end of an answer, such as an end token.
`_num_repeated` searches no longer run."""

REWRITES = "the chat template renders earlier messages differently if the new messages follow"
OTHER_HISTORY = "the messages do not continue an earlier answer of this session"
OTHER_TEXT = "the prompt does not continue an earlier answer of this session"
WITHOUT_END = (
    "the prompt continues an earlier answer without the end token that the engine generated"
)
"""Reason in `Prompt.branch`, as the three above. `OTHER_TEXT` and `WITHOUT_END` are for text prompts."""


@dataclass(frozen=True, slots=True)
class Prompt:
    """Prompt of one request.

    Attributes:
        ids: token ids.
        messages: messages of the request; earlier answers are as the engine generated them.
        branch: reason why the prompt does not continue an earlier answer; empty for the first prompt of a session,
            and for a prompt that continues an answer.
        images: images of the prompt, whose `ids` are the prompt's; None if there are none.
    """

    ids: tuple[int, ...]
    messages: tuple[Message, ...] = ()
    branch: str = ""
    images: ImagePrompt | None = None


@dataclass(frozen=True, slots=True)
class _Answered:
    """Answer of the engine that a later prompt may continue.

    Attributes:
        messages: the conversation, with the answer as its last message.
        prompt_ids: token ids of the prompt.
        output_ids: token ids that the engine generated.
        images: images of the prompt; None if there are none.
    """

    messages: tuple[Message, ...]
    prompt_ids: tuple[int, ...]
    output_ids: tuple[int, ...]
    images: ImagePrompt | None

    @property
    def reasoning(self) -> tuple[str, ...]:
        """Reasoning of each message."""
        return tuple(message.reasoning.strip() for message in self.messages)

    def num_equal_reasoning(self, messages: Sequence[Message]) -> int:
        """Return the number of these messages that have the same reasoning as the recorded message at their place.

        Messages without reasoning do not count.
        """
        pairs = zip(self.reasoning, messages, strict=False)
        return sum(message.reasoning.strip() == own != "" for own, message in pairs)


@final
class Conversations:
    """All conversations of one session, and the token ids of each."""

    def __init__(self, text: TextCodec) -> None:
        self._text = text
        self._ends: tuple[str, str] | None = None
        self._answered: dict[bytes, tuple[_Answered, ...]] = {}
        """Fingerprint of a conversation -> its answers with different reasoning, the newest first."""
        self._texts: list[tuple[str, tuple[int, ...], tuple[int, ...]]] = []
        """Text, prompt ids and output ids of each answer to a text prompt."""

    async def prompt(self, messages: Sequence[Message], template: Template) -> Prompt:
        """Return the prompt of a conversation.

        Raises:
            ConfigError: the chat template refuses the conversation, or the processor its images; or a text or an answer has
                the token of an image.
        """
        # Render in a thread, because a long conversation would block the event loop.
        return await asyncio.to_thread(self._prompt, tuple(messages), template)

    def answered(
        self,
        prompt: Prompt,
        template: Template,
        answer: Message,
        output_ids: tuple[int, ...],
    ) -> None:
        """Record an answer of the engine, so that later prompts can continue it."""
        messages = (*prompt.messages, answer)
        known = _Answered(messages, prompt.ids, output_ids, prompt.images)
        digest = fingerprints(messages, template)[-1]
        alike = self._answered.get(digest, ())
        others = (each for each in alike if each.reasoning != known.reasoning)
        self._answered[digest] = (known, *others)

    async def text_prompt(self, text: str, *, add_special_tokens: bool = True) -> Prompt:
        """Return the prompt of a text.

        If the text begins with an earlier prompt and its answer, reuse their token ids, and encode only the rest. If several
        earlier prompts match, use the one that is longest with its answer. An earlier answer may end with special tokens,
        such as an end token. Keep these tokens only if the agent has written them after the answer.

        Args:
            text: text to encode.
            add_special_tokens: whether to add the special tokens that the model expects around a text. If the text begins
                with the first of these tokens already, this token is not added again. Without effect for a text that
                continues an earlier answer.
        """
        return await asyncio.to_thread(self._text_prompt, text, add_special_tokens)

    def text_answered(self, text: str, prompt: Prompt, output_ids: tuple[int, ...]) -> None:
        """Record an answer to a text prompt; `text` is prompt and answer."""
        self._texts.append((text, prompt.ids, output_ids))

    def _text_prompt(self, text: str, add_special_tokens: bool) -> Prompt:
        """Compute the result of `text_prompt`."""
        texts = list(self._texts)
        found = [known for known in texts if text.startswith(known[0])]
        if not found:
            encode = self._encode_whole if add_special_tokens else self._text.encode
            return Prompt(encode(text), branch=OTHER_TEXT if texts else "")
        begin, ids, output = max(found, key=lambda known: len(known[0]))
        after = self._text.encode(text[len(begin) :])
        num_visible = self._num_visible(output)
        end = output[num_visible:]
        if after[: len(end)] == end:
            return Prompt(ids + output + after[len(end) :])
        return Prompt(ids + output[:num_visible] + after, branch=WITHOUT_END)

    def _num_visible(self, ids: tuple[int, ...]) -> int:
        """Return the length of `ids`, not counting the last ids that add no text."""
        whole, number = self._text.decode(ids), len(ids)
        while number and not self._text.decode(ids[number - 1 : number]):
            # The text of a token may depend on the tokens before it.
            if self._text.decode(ids[: number - 1]) != whole:
                break
            number -= 1
        return number

    def _encode_whole(self, text: str) -> tuple[int, ...]:
        """Encode a text and add the model's special tokens; see `text_prompt`.

        If the text already starts with the first of them, do not add it twice.
        """
        ids = self._text.encode(text, add_special_tokens=True)
        first = self._text.encode("", add_special_tokens=True)[:1]
        return ids[1:] if first and ids[:2] == first * 2 else ids

    def _prompt(self, messages: tuple[Message, ...], template: Template) -> Prompt:
        """Return a prompt that continues the latest recorded answer in the conversation; a new prompt if there is none."""
        for digest in reversed(fingerprints(messages, template)):
            if alike := self._answered.get(digest):
                known = max(alike, key=lambda each: each.num_equal_reasoning(messages))
                # Use the recorded messages: clients may drop the reasoning of earlier answers.
                whole = (*known.messages, *messages[len(known.messages) :])
                return self._continued(known, whole, template)
        branch = OTHER_HISTORY if self._answered else ""
        return self._new(self._rendered(messages, template), messages, branch)

    def _new(self, text: str, messages: tuple[Message, ...], branch: str) -> Prompt:
        """Return the prompt of messages that continue no answer. `text` is their text in the chat template."""
        found = self._encoded(text, messages)
        return Prompt(found.ids, messages, branch, found if found.sets else None)

    def _encoded(self, text: str, messages: Sequence[Message]) -> ImagePrompt:
        """Return a text with the placeholders of the messages' images in tokens, and these images."""
        if images := [image for message in messages for image in message.images]:
            return self._text.with_images(text, images)
        ids = self._text.encode(text)
        return ImagePrompt(ids, ids)

    def _rendered(
        self,
        messages: Sequence[Message],
        template: Template,
        *,
        add_generation_prompt: bool = True,
    ) -> str:
        """Return the text that the chat template makes of messages; see `TextCodec.template_text`."""
        chat = TemplateInput(
            tuple(message.for_template() for message in messages),
            template.tools,
            template.arguments,
        )
        return self._text.template_text(chat, add_generation_prompt=add_generation_prompt)

    def _continued(
        self, known: _Answered, messages: tuple[Message, ...], template: Template
    ) -> Prompt:
        """Return a prompt that continues an earlier answer.

        If the chat template now renders the earlier messages differently, return a new prompt with the branch `REWRITES`.
        """
        whole = self._rendered(messages, template)
        after = self._after_last(known, whole, template)
        after = after or self._after_any(known, messages, whole, template)
        if not after:
            return self._new(whole, messages, REWRITES)
        new = self._encoded(after, messages[len(known.messages) :])
        # The answer may end with the first ids of the text after it, because the model generated them.
        num_known = _num_repeated(known.output_ids, new.ids)
        answer, ids = known.output_ids, known.prompt_ids + known.output_ids + new.ids[num_known:]
        if known.images is None and not new.sets:
            return Prompt(ids, messages)
        before = known.images or ImagePrompt(known.prompt_ids, known.prompt_ids)
        rest = replace(new, ids=new.ids[num_known:], short_ids=new.short_ids[num_known:])
        images = before.followed_by(ImagePrompt(answer, answer)).followed_by(rest)
        return Prompt(ids, messages, images=images)

    def _after_last(self, known: _Answered, whole: str, template: Template) -> str:
        """Return the part of the new conversation's text `whole` that follows the content of `known`'s answer.

        The part begins with the text that ends an answer. Return "" if the template has no such text, if the text of
        `known.messages` does not end with it, or if `whole` does not begin with the text of `known.messages`.
        """
        last, _ = self._ends_of_answers()
        earlier = self._rendered(known.messages, template, add_generation_prompt=False)
        is_kept = last and earlier.endswith(last) and whole.startswith(earlier)
        return last + whole[len(earlier) :] if is_kept else ""

    def _after_any(
        self, known: _Answered, messages: tuple[Message, ...], whole: str, template: Template
    ) -> str:
        """Return the part of `whole` after the answer of `known`, for templates with which `_after_last` returns "".

        Such a template renders the last answer of a conversation in a special way. To find where the answer ends in
        `whole`, render the conversation with two other answers. The part after the answer is the longest common suffix
        of these two texts. Return "" if `whole` does not contain the rendered prompt and all parts of the answer
        unchanged.
        """
        *before, answer = known.messages
        new = messages[len(known.messages) :]
        changed = [(*before, _changed(answer, mark), *new) for mark in "01"]
        common = _common_end(*(self._rendered(each, template) for each in changed))
        _, end = self._ends_of_answers()
        if not end or end not in common:
            return ""
        # The common text may begin with the end of a tool call, which is part of the answer.
        after = common[common.index(end) :]
        prompt = self._rendered(before, template)
        written = whole[len(prompt) : len(whole) - len(after)]
        parts = [part for part in (answer.reasoning, answer.content) if part]
        is_kept = whole.startswith(prompt) and whole.endswith(after)
        return after if is_kept and all(part in written for part in parts) else ""

    def _ends_of_answers(self) -> tuple[str, str]:
        """Return two texts that the chat template writes after answers.

        The template writes the first text after the last answer of a conversation, and the second text after every
        answer.
        """
        if self._ends is None:
            question = Message("user", "x")
            ends = []
            for new in ((), (question,)):
                changed = ((question, Message("assistant", mark), *new) for mark in "01")
                one, other = (
                    self._rendered(each, NO_TOOLS, add_generation_prompt=False) for each in changed
                )
                ends.append(_common_end(one, other))
            self._ends = ends[0], _common_begin(*ends)
        return self._ends


def _changed(answer: Message, mark: str) -> Message:
    """Return `answer` with `mark` in place of its texts and of its calls' arguments. Empty texts stay empty."""
    calls = tuple(
        ToolCall(call.id, call.name, f'{{"{mark}": "{mark}"}}') for call in answer.tool_calls
    )
    reasoning = answer.reasoning and mark
    return Message("assistant", answer.content and mark, reasoning, calls)


def _common_begin(one: str, other: str) -> str:
    """Return the longest common beginning of two texts."""
    pairs = enumerate(zip(one, other, strict=False))
    length = next((at for at, (a, b) in pairs if a != b), min(len(one), len(other)))
    return one[:length]


def _common_end(one: str, other: str) -> str:
    """Return the longest common end of two texts; "" for equal texts, because the template then leaves answers out."""
    return "" if one == other else _common_begin(one[::-1], other[::-1])[::-1]


def _num_repeated(ids: tuple[int, ...], after: tuple[int, ...]) -> int:
    """Return the number of ids at the end of `ids` with which `after` begins, at most `MAX_END_TOKENS`."""
    for length in range(min(len(after), MAX_END_TOKENS), 0, -1):
        if ids[-length:] == after[:length]:
            return length
    return 0
