"""Text as token ids: the only place where rollouts use a tokenizer and a chat template."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol, final

from windlass.errors import ConfigError

TemplateMessage = Mapping[str, Any]
"""Message or tool schema, in the form that chat templates of transformers take."""


class TextCodec(Protocol):
    """Tokenizer and chat template of a model."""

    def encode(self, text: str) -> tuple[int, ...]:
        """Return the token ids of a text, without tokens that the tokenizer adds at its ends."""
        ...

    def render(
        self,
        messages: Sequence[TemplateMessage],
        tools: Sequence[TemplateMessage] = (),
        *,
        add_generation_prompt: bool = True,
    ) -> tuple[int, ...]:
        """Return the token ids of a conversation.

        Raises:
            ConfigError: the chat template refuses the conversation.
        """
        ...

    def decode(self, ids: Sequence[int]) -> str:
        """Return the text of token ids, without special tokens."""
        ...


@final
class ModelText:
    """Tokenizer and chat template of a model, by transformers (extra `text`).

    Args:
        folder: folder with the tokenizer's files.

    Raises:
        ConfigError: transformers is not installed, or the folder has no tokenizer.
    """

    def __init__(self, folder: str) -> None:
        try:
            import transformers
        except ModuleNotFoundError as error:
            raise ConfigError("tokenizer: needs transformers; install windlass-rl[text]") from error
        self._folder = folder
        try:
            self._tokenizer = transformers.AutoTokenizer.from_pretrained(
                folder, local_files_only=True
            )
        # transformers raises errors of many types for a folder without a tokenizer.
        except Exception as error:
            raise ConfigError(
                f"tokenizer: must be a folder with a tokenizer, got {folder!r}: {error}"
            ) from error

    def encode(self, text: str) -> tuple[int, ...]:
        return tuple(self._tokenizer.encode(text, add_special_tokens=False))

    def render(
        self,
        messages: Sequence[TemplateMessage],
        tools: Sequence[TemplateMessage] = (),
        *,
        add_generation_prompt: bool = True,
    ) -> tuple[int, ...]:
        try:
            text = self._tokenizer.apply_chat_template(
                list(messages),
                tools=list(tools) or None,
                add_generation_prompt=add_generation_prompt,
                tokenize=False,
            )
        # A template can raise any error of Jinja and Python.
        except Exception as error:
            raise ConfigError(
                f"messages: the chat template of {self._folder} refuses them: {error}"
            ) from error
        return self.encode(text)

    def decode(self, ids: Sequence[int]) -> str:
        return str(self._tokenizer.decode(list(ids), skip_special_tokens=True))
