"""Prompts as text: strings and chat messages, which a worker turns into token ids with the model's own tokenizer.

Messages may contain images, see `windlass.rollout.images`.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from functools import lru_cache
from typing import Any, NamedTuple, Protocol, TypeAlias, final

import msgspec

from windlass.errors import ConfigError
from windlass.rollout.images import (
    MAX_IMAGES,
    ImagePrompt,
    ModelImages,
    images_of,
    is_image,
    with_encoded_images,
)
from windlass.rollout.values import encode_value, plain_map

Message: TypeAlias = Mapping[str, object]
"""One message of a chat, as in OpenAI's API: `role`, `content`, and other keys that the chat template reads."""

MAX_CACHED_PROMPTS = 1024
"""Number of prompts for which a worker keeps the token ids, so that it tokenises the prompt of a group once."""
MAX_CACHED_NBYTES = 256 << 20
"""Size of these prompts with their images and tensors, in bytes."""
_RESERVED = [
    "conversation",
    "messages",
    "tools",
    "documents",
    "chat_template",
    "add_generation_prompt",
    "continue_final_message",
    "tokenize",
    "padding",
    "truncation",
    "max_length",
    "return_tensors",
    "return_dict",
    "return_assistant_tokens_mask",
    "tokenizer_kwargs",
]
"""Arguments of transformers' `apply_chat_template` that are not arguments of the template."""


class TemplateInput(msgspec.Struct, frozen=True, omit_defaults=True):
    """Input of a chat template. Its values may be any JSON values, for example integers of 65 bits, which `Chat` refuses.

    Attributes:
        messages, tools, template_arguments: see `Chat`.
    """

    messages: tuple[Message, ...]
    tools: tuple[Mapping[str, object], ...] = ()
    template_arguments: Mapping[str, object] = {}


class Chat(TemplateInput, frozen=True, omit_defaults=True):
    """Chat messages as a prompt, with tools and other arguments of the chat template.

    Attributes:
        messages: messages with `role` and `content`, as in OpenAI's API. The content is text, a list of parts (texts and
            images), or None. The constructor encodes images of Pillow and NumPy as PNG.
        tools: JSON schemas of tools.
        template_arguments: additional arguments of the model's chat template, such as `{"enable_thinking": False}`.

    Raises:
        ConfigError: a value has another type, a message has audio or video, or an image is invalid.
    """

    def __post_init__(self) -> None:
        where = "chat: "
        for name in ("messages", "tools"):
            values: object = getattr(self, name)
            if not isinstance(values, Sequence) or isinstance(values, str | bytes):
                raise ConfigError(f"{where}{name} must be a sequence of mappings, got {values!r}")
            found = []
            for number, each in enumerate(values):
                what = f"{where}{name}[{number}]"
                found.append(plain_map(what, with_encoded_images(what, each)))
            msgspec.structs.force_setattr(self, name, tuple(found))
        if not self.messages:
            raise ConfigError(f"{where}messages must not be empty")
        for number, message in enumerate(self.messages):
            _check_message(f"{where}messages[{number}]", message)
        if (num_images := len(self.images)) > MAX_IMAGES:
            raise ConfigError(
                f"{where}messages must have at most {MAX_IMAGES} images, got {num_images}"
            )
        arguments = plain_map(f"{where}template_arguments", self.template_arguments)
        msgspec.structs.force_setattr(self, "template_arguments", arguments)
        check_template_arguments(f"{where}template_arguments", arguments)

    @property
    def images(self) -> tuple[bytes, ...]:
        """Encoded images of the messages, in order."""
        return images_of(self.messages)


def check_template_arguments(what: str, arguments: Mapping[str, object]) -> None:
    """Raise `ConfigError` if a key of `arguments` is the name of an argument of `apply_chat_template` itself.

    `what` is the beginning of the error's text.
    """
    if reserved := [name for name in arguments if name in _RESERVED]:
        raise ConfigError(
            f"{what} must have only arguments of the template, got {reserved[0]!r}, an argument of apply_chat_template"
        )


def _check_message(where: str, message: Message) -> None:
    """Raise `ConfigError` unless a message has a role, and its content is text, a list of texts and images, or None."""
    role, content = message.get("role"), message.get("content")
    if not isinstance(role, str) or not role:
        raise ConfigError(f"{where}: role must be text, got {role!r}")
    if content is None or isinstance(content, str):
        return
    if not isinstance(content, list):
        raise ConfigError(
            f"{where}: content must be text, a list of parts or None, got {content!r}"
        )
    for part in content:
        kind = part.get("type") if isinstance(part, dict) else None
        if not is_image(part) and (kind != "text" or not isinstance(part.get("text"), str)):
            raise ConfigError(
                f"{where}: content must be parts with text or images, got a part of type {kind!r}; audio and video are "
                "not supported"
            )


def with_plain_images(what: str, prompt: str | Sequence[Message] | Chat) -> object:
    """Return a prompt with msgpack-plain images: images of Pillow and NumPy in messages become bytes, as in a `Chat`.

    Raises:
        ConfigError: an image is invalid; the message begins with `what`.
    """
    if isinstance(prompt, str | Chat):
        return prompt
    return [with_encoded_images(f"{what}[{number}]", each) for number, each in enumerate(prompt)]


Prompt: TypeAlias = Sequence[int] | str | Sequence[Message] | Chat
"""A prompt: token ids, a text, messages, or a `Chat`."""


def encode_prompt(prompt: Prompt) -> bytes:
    """Encode a prompt of text or messages as msgpack. Return b"" for token ids, which the caller must check.

    Raises:
        ConfigError: the text is empty, or the messages are not a valid `Chat`.
    """
    if isinstance(prompt, str):
        if not prompt:
            raise ConfigError("rollout: prompt must not be empty, got ''")
        return encode_value("rollout: prompt", prompt)
    if not isinstance(prompt, Chat):
        if not (isinstance(prompt, list | tuple) and prompt and isinstance(prompt[0], Mapping)):
            return b""
        prompt = Chat(tuple(prompt))
    return encode_value("rollout: prompt", prompt)


class ModelPrompt(NamedTuple):
    """Prompt in the tokens of a model.

    Attributes:
        ids: token ids; of a prompt with images, `ImagePrompt.ids`.
        images: images of the prompt; None if there are none.
    """

    ids: tuple[int, ...]
    images: ImagePrompt | None = None


_DECODER = msgspec.msgpack.Decoder(str | Chat)


class TextCodec(Protocol):
    """Tokenizer and chat template of a model. Its methods may be called in several threads."""

    def encode(self, text: str, *, add_special_tokens: bool = False) -> tuple[int, ...]:
        """Return the token ids of a text. With `add_special_tokens`, add the tokens that the model expects around a text."""
        ...

    def decode(self, ids: Sequence[int]) -> str:
        """Return the text of token ids, without special tokens."""
        ...

    def template_text(self, chat: TemplateInput, *, add_generation_prompt: bool) -> str:
        """Return a conversation as text in the format of the chat template.

        With `add_generation_prompt`, the text ends with the beginning of an answer.

        Raises:
            ConfigError: the model has no chat template, or the template refuses the conversation.
        """
        ...

    def with_images(self, text: str, images: Sequence[bytes]) -> ImagePrompt:
        """Return the prompt of a rendered conversation with images.

        Args:
            text: text of the chat template, with placeholders of images.
            images: encoded images, in the order of the placeholders.

        Raises:
            ConfigError: the model has no processor of images, or the processor refuses the text and the images.
        """
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
        # Tokenizers of transformers fail if two threads use them at the same time.
        self._lock = threading.Lock()
        self._images: ModelImages | None = None
        try:
            self._tokenizer = transformers.AutoTokenizer.from_pretrained(
                folder, local_files_only=True
            )
            found = self.encode("0")
        # transformers raises errors of many types for a folder without a tokenizer.
        except Exception as error:
            raise self._refusal(str(error)) from error
        if not found:
            # Without tokenizer files, transformers makes an empty tokenizer.
            raise self._refusal("it has no tokens")

    def _refusal(self, reason: str) -> ConfigError:
        """Return the error for a folder without a usable tokenizer."""
        return ConfigError(
            f"tokenizer: must be a folder with a tokenizer, got {self._folder!r}: {reason}"
        )

    def encode(self, text: str, *, add_special_tokens: bool = False) -> tuple[int, ...]:
        with self._lock:
            return tuple(self._tokenizer.encode(text, add_special_tokens=add_special_tokens))

    def decode(self, ids: Sequence[int]) -> str:
        with self._lock:
            return str(self._tokenizer.decode(list(ids), skip_special_tokens=True))

    def template_text(self, chat: TemplateInput, *, add_generation_prompt: bool) -> str:
        if self._tokenizer.chat_template is None:
            raise ConfigError(
                f"tokenizer: {self._folder} must have a chat template for messages, got none; submit text or token ids"
            )
        try:
            text: str = self._tokenizer.apply_chat_template(
                list(chat.messages),
                tools=list(chat.tools) or None,
                add_generation_prompt=add_generation_prompt,
                tokenize=False,
                **chat.template_arguments,
            )
        # A template can raise any error of Jinja and Python.
        except Exception as error:
            raise ConfigError(
                f"messages: the chat template of {self._folder} refuses them: {error}"
            ) from error
        return text

    def with_images(self, text: str, images: Sequence[bytes]) -> ImagePrompt:
        with self._lock:
            if self._images is None:
                self._images = ModelImages(self._folder)
        return self._images.prompt(text, self.encode(text), images)


@lru_cache(maxsize=4)
def load_text(folder: str) -> ModelText:
    """Return the tokenizer and chat template in a folder; a process loads each folder once. See `ModelText`."""
    return ModelText(folder)


@final
class TextPrompts:
    """Conversion of text and messages into token ids. Its methods may be called in several threads.

    Args:
        codec: tokenizer of the model that the engines serve.

    Attributes:
        codec: see the argument.
    """

    def __init__(self, codec: TextCodec) -> None:
        self.codec = codec
        self.encode, self.decode = codec.encode, codec.decode
        self._lock = threading.Lock()
        self._made: OrderedDict[bytes, tuple[Future[ModelPrompt], int]] = OrderedDict()
        """Encoded prompt -> its conversion, and the number of bytes that both take; the newest last."""
        self._nbytes = 0

    def prompt(self, encoded: bytes) -> ModelPrompt:
        """Return the token ids and images of an encoded prompt, see `encode_prompt`. Convert a prompt of a group once.

        Raises:
            ConfigError: the prompt has no tokens, or the tokenizer, the chat template or the processor refuses it.
        """
        with self._lock:
            known = self._made.get(encoded)
            if known is not None:
                self._made.move_to_end(encoded)
            future = Future[ModelPrompt]() if known is None else known[0]
            if known is None:
                self._made[encoded] = future, 0
        # Another thread converts this prompt, or has converted it.
        if known is not None:
            return future.result()
        try:
            found = self._converted(encoded)
        except BaseException as error:
            with self._lock:
                self._made.pop(encoded, None)
            future.set_exception(error)
            raise
        future.set_result(found)
        self._keep(encoded, future, found)
        return found

    def _keep(self, encoded: bytes, future: Future[ModelPrompt], found: ModelPrompt) -> None:
        """Record the size of a converted prompt. Drop the oldest prompts if all together are too many or too large."""
        images = found.images
        nbytes = len(encoded) + 8 * len(found.ids) + (0 if images is None else images.nbytes)
        with self._lock:
            if encoded in self._made and self._made[encoded][0] is future:
                self._made[encoded] = future, nbytes
                self._nbytes += nbytes
            while self._nbytes > MAX_CACHED_NBYTES or len(self._made) > MAX_CACHED_PROMPTS:
                _, (_, nbytes) = self._made.popitem(last=False)
                self._nbytes -= nbytes

    def _converted(self, encoded: bytes) -> ModelPrompt:
        """Return the token ids and images of a prompt in msgpack (`encode_prompt`). The method `prompt` keeps the result.

        Raises:
            ConfigError: there are no tokens, or the chat template or the processor refuses the messages.
        """
        prompt = _DECODER.decode(encoded)
        if isinstance(prompt, str):
            ids = self.encode(prompt, add_special_tokens=True)
        elif prompt.images:
            images = self.codec.with_images(self._template_text(prompt), prompt.images)
            return ModelPrompt(images.ids, images)
        else:
            ids = self.render(prompt)
        if not ids:
            raise ConfigError("rollout: prompt must have at least one token, got none")
        return ModelPrompt(ids)

    def render(self, chat: Chat) -> tuple[int, ...]:
        """Return the token ids of messages in the model's chat template, with the beginning of an answer.

        Raises:
            ConfigError: the messages have images, whose token ids alone are no prompt.
        """
        if chat.images:
            raise ConfigError(
                f"messages must have no images, got {len(chat.images)}: token ids alone do not contain them"
            )
        return self.encode(self._template_text(chat))

    def _template_text(self, chat: Chat) -> str:
        """Return messages as text in the model's chat template, with the beginning of an answer; see `TextCodec`."""
        return self.codec.template_text(_plain(chat), add_generation_prompt=True)


def _plain(chat: Chat) -> TemplateInput:
    """Return messages as chat templates expect them: contents as text, arguments of tool calls as mappings."""
    messages = tuple(map(_plain_message, chat.messages))
    return TemplateInput(messages, chat.tools, chat.template_arguments)


def _plain_message(message: Message) -> Message:
    """Return a copy of a message. Join its text parts with newlines, and decode the arguments of its tool calls.

    A message with images keeps its parts, because the template writes the placeholders of the images between its texts.
    """
    content: Any = message.get("content")
    plain = dict(message)
    if isinstance(content, list):
        if any(map(is_image, content)):
            plain["content"] = [{"type": "image"} if is_image(part) else part for part in content]
        else:
            plain["content"] = "\n".join(part["text"] for part in content)
    calls = message.get("tool_calls")
    if isinstance(calls, list):
        plain["tool_calls"] = [_plain_call(call) for call in calls]
    return plain


def _plain_call(call: Any) -> Any:
    """Return a tool call with its arguments as a mapping. If the arguments are text that is not JSON, keep the text."""
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("arguments"), str):
        return call
    try:
        decoded = msgspec.json.decode(function["arguments"])
    except msgspec.DecodeError:
        return call
    return {**call, "function": {**function, "arguments": decoded}}
