"""Images in prompts: encoded images in messages, and the model's processor, which makes tokens and tensors of them.

A rollout worker decodes each image once. It gives the pixels to the model's processor, whose tensors travel with the answer
to the trainer, and sends the same pixels to the engine as a PNG. So the engine and the trainer use the same pixels.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import io
import sys
import threading
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, final

import numpy as np

from windlass.errors import ConfigError
from windlass.rollout.tensors import IMAGES, SampleTensor, joined

MAX_IMAGES = 64
"""Largest number of images in a prompt."""
MAX_IMAGE_NBYTES = 8 << 20
"""Largest size of an encoded image."""
MAX_IMAGE_PIXELS = 1 << 25
"""Largest number of pixels of an image. A small file can contain far more pixels than fit into memory."""
PNG, JPEG = b"\x89PNG\r\n\x1a\n", b"\xff\xd8\xff"
"""First bytes of the two formats."""
_ORIENTATION = 0x0112
"""Number of the EXIF field with the orientation of a photograph."""
_MODES = frozenset({"1", "L", "LA", "P", "PA", "RGB", "RGBA", "CMYK", "YCbCr"})
"""Modes of Pillow with at most 8 bits per channel."""
NEEDS = "install windlass-rl[text] and torchvision"


@dataclass(frozen=True, slots=True)
class ImageSet:
    """Images that the processor converted in one call.

    Attributes:
        key: digest of the images. Equal images in the same order have the same key.
        tensors: tensors that the processor made of the images, by the model's names, such as `pixel_values`.
    """

    key: str
    tensors: Mapping[str, SampleTensor]

    def named(self) -> dict[str, SampleTensor]:
        """Return the tensors with the names that they have in an outcome; see `IMAGES`."""
        return {f"{IMAGES}{self.key}.{name}": tensor for name, tensor in self.tensors.items()}


@dataclass(frozen=True, slots=True)
class ImagePrompt:
    """Prompt with images, or a part of it.

    Attributes:
        ids: token ids of the prompt as the engine uses them, with all tokens of each image.
        short_ids: token ids with the chat template's own placeholders. The engine expands them to `ids`.
        urls: images as data URLs, in the order of the placeholders.
        token_id: token that stands for an image; -1 if the part has no image.
        sets: images in the order of the placeholders.
    """

    ids: tuple[int, ...]
    short_ids: tuple[int, ...]
    urls: tuple[str, ...] = ()
    token_id: int = -1
    sets: tuple[ImageSet, ...] = ()

    @property
    def keys(self) -> tuple[str, ...]:
        """Keys of the sets of images, in order."""
        return tuple(each.key for each in self.sets)

    @property
    def nbytes(self) -> int:
        """Approximate size in memory."""
        tensors = sum(tensor.nbytes for each in self.sets for tensor in each.tensors.values())
        return tensors + sum(map(len, self.urls)) + 8 * (len(self.ids) + len(self.short_ids))

    def followed_by(self, other: ImagePrompt) -> ImagePrompt:
        """Return a prompt with the tokens and images of `other` after those of this prompt. One of both has images.

        Raises:
            ConfigError: the prompt has more than `MAX_IMAGES` images, tensors of the images cannot be joined, or a token of
                text is the token that stands for an image.
        """
        token_id = max(self.token_id, other.token_id)
        for part in (self, other):
            if not part.sets and token_id in part.ids:
                raise ConfigError(
                    f"messages: text and answers before or after images must not have the token of an image, got token "
                    f"{token_id} at place {part.ids.index(token_id)} of {len(part.ids)} tokens"
                )
        urls, sets = self.urls + other.urls, self.sets + other.sets
        if len(urls) > MAX_IMAGES:
            raise ConfigError(f"messages: must have at most {MAX_IMAGES} images, got {len(urls)}")
        # Find tensors that cannot be joined now, and not in a trainer. Compare empty tensors, which cost no copy.
        joined([{name: _without_rows(t) for name, t in each.tensors.items()} for each in sets])
        short_ids = self.short_ids + other.short_ids
        return ImagePrompt(self.ids + other.ids, short_ids, urls, token_id, sets)


def _without_rows(tensor: SampleTensor) -> SampleTensor:
    """Return an empty tensor of the same dtype and the same dimensions after the first. A scalar is returned unchanged."""
    if not tensor.shape:
        return tensor
    return SampleTensor(dtype=tensor.dtype, shape=(0, *tensor.shape[1:]), per_token=False)


def digest_of(images: Sequence[bytes]) -> str:
    """Return a digest of encoded images, in hexadecimal. It depends on their order."""
    found = hashlib.sha256()
    for image in images:
        found.update(len(image).to_bytes(8) + image)
    return found.hexdigest()[:32]


def is_image(part: object) -> bool:
    """Return whether a part of a message's content is an image, in OpenAI's or transformers' form."""
    return isinstance(part, Mapping) and part.get("type") in ("image", "image_url")


def with_encoded_images(where: str, message: object) -> object:
    """Return a message with each image as `{"type": "image", "image": BYTES}`. Return other values unchanged.

    Args:
        where: place of the message, for errors.
        message: message whose images are data URLs, bytes, or images of Pillow or NumPy.

    Raises:
        ConfigError: an image is not a PNG or JPEG of at most `MAX_IMAGE_NBYTES` bytes, or is not in the message.
    """
    content = message.get("content") if isinstance(message, Mapping) else None
    if not isinstance(content, list | tuple) or not any(map(is_image, content)):
        return message
    found = []
    for number, part in enumerate(content):
        if is_image(part):
            image = encoded_image(f"{where}: content[{number}]", part)
            found.append({"type": "image", "image": image})
        else:
            found.append(part)
    return {**message, "content": found}  # type: ignore[dict-item]


def images_of(messages: Sequence[Mapping[str, Any]]) -> tuple[bytes, ...]:
    """Return the encoded images of messages that `with_encoded_images` returned, in order."""
    contents = [message.get("content") for message in messages]
    parts = [part for content in contents if isinstance(content, list) for part in content]
    return tuple(part["image"] for part in parts if is_image(part))


def encoded_image(where: str, part: Mapping[str, Any]) -> bytes:
    """Return the bytes of an image part; raise `ConfigError` as `with_encoded_images` does."""
    if part["type"] == "image":
        given, known = part.get("image"), {"type", "image"}
    else:
        known = {"type", "image_url"}
        inner = part.get("image_url")
        if not isinstance(inner, Mapping) or inner.get("detail", "auto") != "auto":
            raise ConfigError(
                f"{where}: image_url must be a mapping with `url` and without `detail`, got {_short(inner)}"
            )
        given = inner.get("url")
    if unknown := set(part) - known:
        raise ConfigError(f"{where}: an image must have only {sorted(known)}, got {unknown}")
    image = _from_url(where, given) if isinstance(given, str) else _as_bytes(where, given)
    if not image.startswith((PNG, JPEG)):
        raise ConfigError(
            f"{where}: image must be a PNG or JPEG, got {len(image)} bytes that begin with {image[:8]!r}"
        )
    if len(image) > MAX_IMAGE_NBYTES:
        raise ConfigError(
            f"{where}: image must have at most {MAX_IMAGE_NBYTES} bytes, got {len(image)}"
        )
    return image


def _from_url(where: str, url: str) -> bytes:
    """Return the bytes of a data URL; raise `ConfigError` for another URL and for a path."""
    head, comma, data = url.partition(",")
    if not comma or not head.startswith("data:image/") or not head.endswith(";base64"):
        raise ConfigError(
            f"{where}: image must be bytes or a URL that begins with data:image/png;base64, or data:image/jpeg;base64, "
            f"got {_short(url)}: Windlass opens no file and loads nothing from a network"
        )
    try:
        return base64.b64decode(data, validate=True)
    except (binascii.Error, ValueError) as error:
        raise ConfigError(
            f"{where}: image must be valid base64, got {_short(url)}: {error}"
        ) from error


def _as_bytes(where: str, image: object) -> bytes:
    """Return an image as encoded bytes. Encode an image of Pillow or NumPy as PNG.

    Raises:
        ConfigError: the image is of no supported type, shape or size, or Pillow is not installed.
    """
    if isinstance(image, bytes):
        return image
    if isinstance(image, bytearray | memoryview):
        return bytes(image)
    pillow = sys.modules.get("PIL.Image")
    if pillow is not None and isinstance(image, pillow.Image):
        return _png(_as_rgb(where, image))
    if isinstance(image, np.ndarray):
        if image.dtype != np.uint8 or image.ndim != 3 or image.shape[2] != 3 or not image.size:
            raise ConfigError(
                f"{where}: an array must be uint8 of shape (height, width, 3), got {image.dtype} of shape {image.shape}"
            )
        return _png(_pillow(where).fromarray(np.ascontiguousarray(image)))
    raise ConfigError(
        f"{where}: image must be bytes, a data URL, or an image of Pillow or NumPy, got {type(image).__name__}"
    )


def _short(value: object) -> str:
    """Return the `repr` of a value, with at most 60 characters."""
    text = repr(value[:60]) if isinstance(value, str) else repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."


def _pillow(where: str) -> Any:
    """Return Pillow's module; raise `ConfigError` if Pillow is not installed."""
    try:
        import PIL.Image
    except ModuleNotFoundError as error:
        raise ConfigError(f"{where}: images need Pillow; {NEEDS}") from error
    return PIL.Image


def _png(image: Any) -> bytes:
    """Encode an image of Pillow as PNG. Fast compression: the engine decodes the image soon."""
    stored = io.BytesIO()
    image.save(stored, "PNG", compress_level=1)
    return stored.getvalue()


def _as_rgb(where: str, image: Any) -> Any:
    """Return an image of Pillow in RGB. Transparent pixels become white, as in vLLM; raise as `_check_size` does."""
    _check_size(where, image)
    if image.mode in {"LA", "PA", "RGBA"} or "transparency" in image.info:
        visible = image.convert("RGBA")
        white = _pillow(where).new("RGBA", visible.size, (255, 255, 255, 255))
        return _pillow(where).alpha_composite(white, visible).convert("RGB")
    return image.convert("RGB")


def _check_size(where: str, image: Any) -> None:
    """Check an image of Pillow, which need not be decoded.

    Raises:
        ConfigError: the image has more than 8 bits per channel, or more than `MAX_IMAGE_PIXELS` pixels.
    """
    if image.mode not in _MODES:
        raise ConfigError(
            f"{where}: image must have 8 bits per channel, got Pillow's mode {image.mode}; convert it to RGB"
        )
    if image.width * image.height > MAX_IMAGE_PIXELS:
        raise ConfigError(
            f"{where}: image must have at most {MAX_IMAGE_PIXELS} pixels, got {image.width} x {image.height}"
        )


def decoded(where: str, data: bytes) -> tuple[Any, bytes]:
    """Decode an image.

    Returns:
        The image of Pillow, upright and in RGB, and a PNG with the same pixels. The PNG is `data` itself if possible.

    Raises:
        ConfigError: the image cannot be decoded, or is too large; see `_as_rgb`.
    """
    pillow = _pillow(where)
    import PIL.ImageOps

    try:
        with pillow.open(io.BytesIO(data), formats=("PNG", "JPEG")) as image:
            _check_size(where, image)
            image.load()
            is_turned = image.getexif().get(_ORIENTATION, 1) != 1
            found = _as_rgb(where, PIL.ImageOps.exif_transpose(image) if is_turned else image)
            is_plain = image.mode == "RGB" and "transparency" not in image.info and not is_turned
            as_given = data.startswith(PNG) and is_plain
    # Pillow raises many types of errors for damaged files.
    except (OSError, ValueError, SyntaxError, EOFError, pillow.DecompressionBombError) as error:
        raise ConfigError(f"{where}: image cannot be decoded: {error}") from error
    return found, data if as_given else _png(found)


@final
class ModelImages:
    """Processor of a vision-language model, by transformers. Its methods may be called in several threads.

    Args:
        folder: folder with the files of the processor and the tokenizer.

    Raises:
        ConfigError: a library is not installed, or the folder has no processor of images.
    """

    def __init__(self, folder: str) -> None:
        import transformers

        self._folder = folder
        self._lock = threading.Lock()
        try:
            processor = transformers.AutoProcessor.from_pretrained(folder, local_files_only=True)
        # transformers raises errors of many types for a folder without a processor, and for missing libraries.
        except Exception as error:
            raise self._refusal(f"{error}; {NEEDS}") from error
        # For a model without images, transformers returns the tokenizer.
        if vars(processor).get("image_processor") is None:
            raise self._refusal(f"transformers found a {type(processor).__name__}")
        self._processor: Any = processor

    def _refusal(self, reason: str) -> ConfigError:
        """Return the error for a folder without a usable processor."""
        return ConfigError(
            f"tokenizer: must be a folder with a processor for prompts with images, got {self._folder!r}: {reason}"
        )

    def prompt(self, text: str, short_ids: tuple[int, ...], images: Sequence[bytes]) -> ImagePrompt:
        """Return the prompt of a rendered text with images.

        Args:
            text: text of the chat template, with placeholders of images.
            short_ids: token ids of `text`.
            images: encoded images, in the order of the placeholders.

        Raises:
            ConfigError: there are more than `MAX_IMAGES` images, an image cannot be decoded, or the processor refuses the text
                and the images.
        """
        if len(images) > MAX_IMAGES:
            raise ConfigError(f"messages: must have at most {MAX_IMAGES} images, got {len(images)}")
        pairs = [decoded(f"messages: image {n}", image) for n, image in enumerate(images)]
        try:
            with self._lock:
                found = self._processor(
                    text=[text],
                    images=[image for image, _ in pairs],
                    return_tensors="pt",
                    add_special_tokens=False,
                )
            ids = tuple(found["input_ids"][0].tolist())
            shape = found["input_ids"].shape
            # Tensors with one entry per token of the prompt, such as `attention_mask`, can be computed from the ids.
            tensors = {
                name: SampleTensor.of(value, per_token=False)
                for name, value in found.items()
                if value.shape != shape
            }
        # A processor can raise any error for a text and images that do not match.
        except Exception as error:
            raise ConfigError(
                f"messages: the processor of {self._folder} refuses their {len(images)} images: {error}"
            ) from error
        if len(ids) <= len(short_ids):
            # The engine's prompt would not show whether the engine has used the images.
            raise ConfigError(
                f"messages: the processor of {self._folder} must expand images to more than one token, got {len(ids)} "
                f"tokens for a text of {len(short_ids)} tokens"
            )
        urls = [f"data:image/png;base64,{base64.b64encode(png).decode()}" for _, png in pairs]
        # An image becomes many equal tokens. Some models add other tokens around them.
        ((token_id, _),) = (Counter(ids) - Counter(short_ids)).most_common(1)
        made = ImageSet(digest_of([png for _, png in pairs]), tensors)
        return ImagePrompt(ids, short_ids, tuple(urls), token_id, (made,))
