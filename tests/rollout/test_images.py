"""Images in messages: their forms at submission, their pixels in a worker, and requests to engines that refuse them."""

from __future__ import annotations

import base64
import io
import json
import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path
from typing import Any

import aiohttp
import msgspec
import numpy as np
import PIL.Image
import pytest
import torch
from vision_checkpoint import png

from windlass.errors import ConfigError
from windlass.jobs.audit import AuditRecord, read_audit
from windlass.jobs.recipe import Task, decode_tasks, encode_tasks
from windlass.jobs.replay import replay
from windlass.rollout import (
    Chat,
    Rollout,
    RolloutGroup,
    SampleTensor,
    SamplingParams,
    TrainingSample,
    images,
    merge_turns,
    pack,
    training_samples,
)
from windlass.rollout.chat.conversations import Conversations
from windlass.rollout.chat.messages import NO_TOOLS, Message
from windlass.rollout.chat.requests import ChatRequest, Policy, chat_call
from windlass.rollout.held import TensorStore, WriteTensors, destination_of, held_of
from windlass.rollout.images import MAX_IMAGES, ImagePrompt, ImageSet, decoded, digest_of
from windlass.rollout.messages import Partial, Turn
from windlass.rollout.text import ModelPrompt, TemplateInput, TextPrompts, encode_prompt
from windlass.rollout.trajectories import increments, whole_turns
from windlass.training.batches import token_batch
from windlass.transfer.arena import Arena
from windlass.transports.registry import create_transport, parse_transport

PICTURE = png(6, 1, height=4)


def about(image: Any) -> list[dict[str, Any]]:
    return [{"role": "user", "content": [{"type": "image", "image": image}]}]


def linked(url: Any, **more: Any) -> list[dict[str, Any]]:
    part = {"type": "image_url", "image_url": {"url": url, **more}}
    return [{"role": "user", "content": [{"type": "text", "text": "a"}, part]}]


def pixels(data: bytes) -> Any:
    return np.asarray(PIL.Image.open(io.BytesIO(data)))


def url(data: bytes, kind: str = "png") -> str:
    return f"data:image/{kind};base64,{base64.b64encode(data).decode()}"


def stored(image: Any, kind: str = "PNG", **more: Any) -> bytes:
    found = io.BytesIO()
    image.save(found, kind, **more)
    return found.getvalue()


def test_each_form_of_an_image_becomes_its_encoded_bytes() -> None:
    opened = PIL.Image.open(io.BytesIO(PICTURE))
    for messages in (
        about(PICTURE),
        about(bytearray(PICTURE)),
        about(url(PICTURE)),
        linked(url(PICTURE)),
        linked(url(PICTURE), detail="auto"),
    ):
        assert Chat(messages).images == (PICTURE,)  # type: ignore[arg-type]
    for image in (opened, np.asarray(opened), np.asarray(opened)[::-1][::-1]):
        (found,) = Chat(about(image)).images  # type: ignore[arg-type]
        np.testing.assert_array_equal(pixels(found), pixels(PICTURE))
    # A worker gets the same chat, and a checkpoint of a job keeps it.
    chat = Chat(linked(url(PICTURE)))  # type: ignore[arg-type]
    assert decode_tasks(encode_tasks([Task(prompt=chat)])[0]) == [Task(prompt=chat)]
    tasks = [Task(prompt=about(image)) for image in (opened, np.asarray(opened))]
    for task in decode_tasks(encode_tasks(tasks)[0]):
        np.testing.assert_array_equal(pixels(Chat(task.prompt).images[0]), pixels(PICTURE))  # type: ignore[arg-type]
    _, (error,) = encode_tasks([Task(prompt=about(3))])
    assert "task: prompt[0]: content[0]: image must be bytes" in str(error)
    assert chat.messages[0]["content"] == [
        {"type": "text", "text": "a"},
        {"type": "image", "image": PICTURE},
    ]


@pytest.mark.parametrize(
    ("messages", "says"),
    [
        (linked("https://host/a.png"), r"content\[1\]: image must be bytes or a URL that begins with data:image/png"),
        (about("/etc/passwd"), r"got '/etc/passwd': Windlass opens no file and loads nothing from a net"),
        (linked("data:image/png;base64,@@"), r"image must be valid base64, got 'data:image/png;base64,@@'"),
        (about(b"GIF89a"), r"image must be a PNG or JPEG, got 6 bytes that begin with b'GIF89a'"),
        (about(PICTURE + bytes(8 << 20)), rf"image must have at most 8388608 bytes, got {len(PICTURE) + (8 << 20)}"),
        (about(3), r"image must be bytes, a data URL, or an image of Pillow or NumPy, got int"),
        (about(None), r"got NoneType"),
        (about(np.zeros((4, 4), np.uint8)), r"an array must be uint8 of shape \(height, width, 3\), got uint8 of shape"),
        (about(np.zeros((4, 4, 3), np.float32)), r"got float32 of shape \(4, 4, 3\)"),
        (about(PIL.Image.new("I;16", (2, 2))), r"8 bits per channel, got Pillow's mode I;16"),
        (linked(url(PICTURE), detail="low"), r"image_url must be a mapping with `url` and without `detail`, got"),
        (
            [{"role": "user", "content": [{"type": "image", "image": PICTURE, "url": "x"}]}],
            r"an image must have only \['image', 'type'\], got \{'url'\}",
        ),
        (
            [{"role": "user", "content": [{"type": "image", "image": PICTURE}] * (MAX_IMAGES + 1)}],
            r"messages must have at most 64 images, got 65",
        ),
        ([{"role": "user", "content": [{"type": []}]}], r"got a part of type \[\]"),
        (
            [{"role": "user", "content": [{"type": "video", "video": PICTURE}]}],
            r"content must be parts with text or images, got a part of type 'video'; audio and video",
        ),
    ],
)  # fmt: skip
def test_invalid_images_are_refused_at_submission(messages: Any, says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        encode_prompt(messages)


def test_an_encoded_prompt_is_at_most_16_mib() -> None:
    large = PICTURE + bytes((8 << 20) - len(PICTURE))
    with pytest.raises(ConfigError, match=r"must have at most 16777216 bytes, got 1677"):
        encode_prompt([*about(large), *about(large)])


def test_an_engine_gets_the_pixels_that_the_processor_gets() -> None:
    opaque = np.arange(24 * 3, dtype=np.uint8).reshape(4, 6, 3)
    alpha = np.arange(24, dtype=np.uint8).reshape(4, 6, 1) * 10
    given = {
        "rgb": PICTURE,
        "grey": stored(PIL.Image.fromarray(opaque[..., 0])),
        "transparent": stored(PIL.Image.fromarray(np.concatenate([opaque, alpha], 2))),
        "photograph": stored(PIL.Image.fromarray(opaque), "JPEG"),
        "turned": stored(PIL.Image.fromarray(opaque), "PNG", exif=_turned()),
    }
    for name, data in given.items():
        image, sent = decoded("image", data)
        assert image.mode == "RGB", name
        reopened = PIL.Image.open(io.BytesIO(sent))
        assert reopened.mode == "RGB", name
        assert not reopened.getexif(), name
        np.testing.assert_array_equal(np.asarray(reopened), np.asarray(image), err_msg=name)
    assert decoded("image", PICTURE)[1] is PICTURE
    np.testing.assert_array_equal(decoded("image", given["turned"])[0], opaque[::-1, ::-1])
    # Transparent pixels become white.
    blended = np.asarray(decoded("image", given["transparent"])[0])
    np.testing.assert_array_equal(blended[0, 0], [255, 255, 255])


def _turned() -> Any:
    """Return EXIF data that turns an image by 180 degrees."""
    exif = PIL.Image.Exif()
    exif[0x0112] = 3
    return exif


def test_damaged_and_huge_images_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    for damaged in (PICTURE[:40], PICTURE[:-30], images.PNG, images.JPEG + bytes(9)):
        with pytest.raises(ConfigError, match=r"image 3: image cannot be decoded"):
            decoded("image 3", damaged)
    monkeypatch.setattr(images, "MAX_IMAGE_PIXELS", 23)
    with pytest.raises(ConfigError, match=r"image 3: image must have at most 23 pixels, got 6 x 4"):
        decoded("image 3", PICTURE)


class Codec:
    """Tokenizer that counts conversions of images. Each conversion waits for `may_end`."""

    def __init__(self) -> None:
        self.num_made = 0
        self.began, self.may_end = threading.Event(), threading.Event()
        self.may_end.set()

    def encode(self, text: str, *, add_special_tokens: bool = False) -> tuple[int, ...]:
        return tuple(text.encode()) + (0,) * add_special_tokens

    def decode(self, ids: Sequence[int]) -> str:
        return bytes(ids).decode()

    def template_text(self, chat: TemplateInput, *, add_generation_prompt: bool) -> str:
        return json.dumps([chat.messages, add_generation_prompt])

    def with_images(self, text: str, images: Sequence[bytes]) -> ImagePrompt:
        self.num_made += 1
        self.began.set()
        assert self.may_end.wait(30)
        if images == (png(2, 9),):
            raise ConfigError("refused")
        # The template writes "image" for each image, and the processor makes one more "g" of it.
        short, whole = text.encode(), text.encode().replace(b"image", b"imagegg")
        rows = np.arange(len(images) * 2, dtype=np.float32).reshape(-1, 2) + len(images[0])
        tensors = {"pixel_values": SampleTensor.of(rows, per_token=False)}
        made = ImageSet(digest_of(images), tensors)
        return ImagePrompt((*whole,), (*short,), tuple(map(url, images)), ord("g"), (made,))


def test_a_group_converts_its_images_once_in_all_threads() -> None:
    codec = Codec()
    prompts = TextPrompts(codec)
    encoded = encode_prompt(about(PICTURE))
    codec.may_end.clear()
    with ThreadPoolExecutor(4) as threads:
        asked = [threads.submit(prompts.prompt, bytes(bytearray(encoded))) for _ in range(4)]
        assert codec.began.wait(30)
        codec.may_end.set()
        found = [each.result(30) for each in asked]
    assert codec.num_made == 1
    assert all(each is found[0] for each in found)
    assert isinstance(found[0], ModelPrompt)
    assert found[0].images is not None
    assert found[0].images.urls == (url(PICTURE),)
    # The template gets a place for the image, and not the image.
    assert json.loads(prompts.decode(found[0].images.short_ids)) == [
        [{"role": "user", "content": [{"type": "image"}]}],
        True,
    ]
    # A refused prompt is converted again.
    for number in (2, 3):
        with pytest.raises(ConfigError, match="refused"):
            prompts.prompt(encode_prompt(about(png(2, 9))))
        assert codec.num_made == number


def test_the_oldest_images_leave_a_full_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    codec = Codec()
    prompts = TextPrompts(codec)
    one, two = (encode_prompt(about(png(32, seed))) for seed in (1, 2))
    size = len(one) + 8 * len(prompts.prompt(one).ids) + prompts.prompt(one).images.nbytes  # type: ignore[union-attr]
    monkeypatch.setattr("windlass.rollout.text.MAX_CACHED_NBYTES", 2 * size - 1)
    assert codec.num_made == 1
    for encoded, number in ((two, 2), (two, 2), (one, 3), (one, 3), (two, 4)):
        prompts.prompt(encoded)
        assert codec.num_made == number


def test_messages_with_images_are_no_token_ids() -> None:
    with pytest.raises(ConfigError, match="messages must have no images, got 1: token ids alone"):
        TextPrompts(Codec()).render(Chat(about(PICTURE)))  # type: ignore[arg-type]


class Talk(Codec):
    """Codec with a template that writes one line per message. One token is one byte."""

    def template_text(self, chat: TemplateInput, *, add_generation_prompt: bool) -> str:
        lines = []
        for message in chat.messages:
            content = message["content"]
            if isinstance(content, list):
                parts = [part.get("text", "<image>") for part in content]
                content = "".join(parts)
            lines.append(f"{message['role']}:{content};")
        return "".join(lines) + "assistant:" * add_generation_prompt


def told(*contents: Any) -> list[Message]:
    """Return messages of the user and the assistant in turn. Bytes in a list are images."""
    found = []
    for number, content in enumerate(contents):
        role = "assistant" if number % 2 else "user"
        if isinstance(content, list):
            content = [
                {"type": "image", "image": part}
                if isinstance(part, bytes)
                else {"type": "text", "text": part}
                for part in content
            ]
        found.append(Message.of(Chat([{"role": role, "content": content}]).messages[0]))  # type: ignore[arg-type]
    return found


ONE, TWO = png(2, 1), png(3, 2)


async def test_a_conversation_continues_with_images_in_any_message() -> None:
    talk = Conversations(Talk())
    first = await talk.prompt(told(["a", ONE]), NO_TOOLS)
    assert bytes(first.ids) == b"user:a<imagegg>;assistant:"
    assert first.images is not None
    assert bytes(first.images.short_ids) == b"user:a<image>;assistant:"
    talk.answered(first, NO_TOOLS, Message("assistant", "b"), (*b"b",))
    second = await talk.prompt(told(["a", ONE], "b", "c"), NO_TOOLS)
    assert bytes(second.ids) == b"user:a<imagegg>;assistant:b;user:c;assistant:"
    assert second.images is not None
    assert second.images.keys == first.images.keys
    assert second.branch == ""
    talk.answered(second, NO_TOOLS, Message("assistant", "d"), (*b"d;",))
    third = await talk.prompt(told(["a", ONE], "b", "c", "d", [TWO, ONE, "e"]), NO_TOOLS)
    assert third.images is not None
    assert bytes(third.ids) == (
        b"user:a<imagegg>;assistant:b;user:c;assistant:d;user:<imagegg><imagegg>e;assistant:"
    )
    assert bytes(third.images.short_ids) == bytes(third.ids).replace(b"gg", b"")
    assert third.images.ids == third.ids
    assert third.images.urls == (url(ONE), url(TWO), url(ONE))
    assert third.images.keys == (digest_of([ONE]), digest_of([TWO, ONE]))
    # The ids of both prompts are equal, but the images are not.
    other = await talk.prompt(told(["a", TWO], "b", "c"), NO_TOOLS)
    assert other.ids == second.ids
    assert other.branch
    assert other.images is not None
    assert other.images.keys == (digest_of([TWO]),)


async def test_an_image_may_follow_messages_of_text() -> None:
    talk = Conversations(Talk())
    first = await talk.prompt(told("a"), NO_TOOLS)
    assert first.images is None
    talk.answered(first, NO_TOOLS, Message("assistant", "b"), (*b"b",))
    second = await talk.prompt(told("a", "b", [ONE]), NO_TOOLS)
    assert second.images is not None
    assert bytes(second.images.short_ids) == b"user:a;assistant:b;user:<image>;assistant:"
    assert bytes(second.ids) == b"user:a;assistant:b;user:<imagegg>;assistant:"
    # The engine and the trainer would put the image in the place of this token.
    talk.answered(first, NO_TOOLS, Message("assistant", "big"), (*b"big",))
    with pytest.raises(
        ConfigError, match=r"must not have the token of an image, got token 103 at place 19 of"
    ):
        await talk.prompt(told("a", "big", [ONE]), NO_TOOLS)
    asked = told("a", "b", [ONE] * (MAX_IMAGES // 2))
    third = await talk.prompt(asked, NO_TOOLS)
    talk.answered(third, NO_TOOLS, Message("assistant", "c"), (*b"c",))
    with pytest.raises(ConfigError, match=r"must have at most 64 images, got 65"):
        await talk.prompt([*asked, *told("", "c", [ONE] * (MAX_IMAGES // 2 + 1))[1:]], NO_TOOLS)


def turn(prompt: bytes, output: bytes, *images: str) -> Turn:
    numbers = (0,) * len(output)
    return Turn(
        (*prompt,), Partial((*output,), (-0.5,) * len(output), numbers), "stop", images=images
    )


def test_turns_with_equal_tokens_and_other_images_are_not_merged() -> None:
    same = [turn(b"pg", b"a", "x"), turn(b"pgab", b"c", "x"), turn(b"pgabcg", b"d", "x", "y")]
    (whole,) = merge_turns(same)
    assert (bytes(whole.prompt_ids), bytes(whole.output_ids)) == (b"pg", b"abcgd")
    assert whole.images == ("x", "y")
    for keys in (("z",), (), ("z", "x")):
        first, second = merge_turns([same[0], turn(b"pgab", b"c", *keys)])
        assert (first.images, second.images) == (("x",), keys)
        assert (second.parent, second.num_shared) == ((-1, 0) if keys else (0, 3))
    turns = (*same, turn(b"pgab", b"c", "z"))
    assert whole_turns(increments(turns)) == turns


def rows(*first: int, columns: int = 2) -> SampleTensor:
    values = [[float(number)] * columns for number in first]
    return SampleTensor.of(np.asarray(values, np.float32), per_token=False)


def finished(turns: tuple[Turn, ...], tensors: dict[str, SampleTensor]) -> RolloutGroup:
    made = Rollout(
        "t", 3, (), (), (), (), "stop", "e", "w", 1, None, 0.0, 0.0, turns=turns, tensors=tensors
    )
    return RolloutGroup(3, (), (made,), None)


def test_a_sample_has_the_images_of_its_conversation_in_order() -> None:
    turns = (turn(b"pg", b"a", "y"), turn(b"pgag", b"b", "y", "x"), turn(b"pg", b"c", "x"))
    tensors = {"images.x.pixel_values": rows(1), "images.y.pixel_values": rows(2, 3)}
    long, short = training_samples(finished(turns, tensors), [1.0])
    np.testing.assert_array_equal(
        long.image_tensors["pixel_values"].to_numpy(), [[2, 2], [3, 3], [1, 1]]
    )
    np.testing.assert_array_equal(short.image_tensors["pixel_values"].to_numpy(), [[1, 1]])
    with pytest.raises(
        ConfigError, match=r"must contain those of its images, got none of the images y"
    ):
        training_samples(finished(turns, {"images.x.pixel_values": rows(1)}), [1.0])
    with pytest.raises(
        ConfigError, match=r"names like 'images\.0\.pixel_values', got 'images\.x\.\.\.'; call tra"
    ):
        msgspec.structs.replace(long, tensors=tensors)
    wide = {**tensors, "images.x.pixel_values": rows(1, columns=3)}
    found, _ = training_samples(finished(turns, wide), [1.0])
    with pytest.raises(
        ConfigError, match=r"'pixel_values' must have the same dtype and the same dimensions after"
    ):
        _ = found.image_tensors


def test_a_batch_and_a_pack_have_the_images_in_the_order_of_their_rows() -> None:
    def sample(number: int, length: int, *first: int) -> TrainingSample:
        images = {f"images.{n}.pixel_values": rows(value) for n, value in enumerate(first)}
        return TrainingSample(
            prompt_ids=(1, *(7,) * len(first)),
            output_ids=(2,) * length,
            logprobs=(-1.0,) * length,
            versions=(0,) * length,
            reward=1.0,
            group_id=number,
            engine="e",
            tensors={"advantages": SampleTensor.of([0.5] * length), **images},
        )

    samples = [sample(0, 2, 5, 6), sample(1, 3), sample(2, 9, 4)]
    batch = token_batch(samples, torch.device("cpu"))
    assert batch.images["pixel_values"].tolist() == [[5, 5], [6, 6], [4, 4]]
    assert "pixel_values" not in batch.model_arguments()
    ((packed,),) = pack(samples, max_tokens=64)
    expected = [value for n in packed.indices for value in ([5, 6], [], [4])[n]]
    assert packed.images["pixel_values"][:, 0].tolist() == expected
    assert packed.to_torch().images["pixel_values"][:, 0].tolist() == expected
    # The filler has the images of the sample that it repeats.
    ((one,), (filler,)) = pack(samples[:1], num_ranks=2, max_tokens=64)
    assert filler.indices.tolist() == [-1]
    assert filler.images["pixel_values"].tolist() == one.images["pixel_values"].tolist()
    assert pack(samples[1:2], max_tokens=64)[0][0].images == {}


def test_an_agent_may_send_images_as_data_urls() -> None:
    def asked(*parts: Any) -> Any:
        body = {"messages": [{"role": "user", "content": [*parts]}]}
        request = msgspec.convert(body, ChatRequest)
        return chat_call(request, Policy(SamplingParams(max_new_tokens=4)))

    picture = {"type": "image_url", "image_url": {"url": url(PICTURE)}}
    (message,) = asked(
        {"type": "text", "text": "a"}, picture, {"type": "text", "text": "b"}
    ).messages
    assert message.parts == ("a", PICTURE, "b")
    assert message.for_template()["content"] == [
        {"type": "text", "text": "a"}, {"type": "image"}, {"type": "text", "text": "b"},
    ]  # fmt: skip
    assert (
        message.identity()
        != asked({"type": "text", "text": "a"}, {"type": "text", "text": "b"})
        .messages[0]
        .identity()
    )
    for bad, says in (
        (
            {"type": "image_url", "image_url": {"url": "https://host/a.png"}},
            "messages: image must be bytes or a URL that",
        ),
        ({"type": "image_url"}, "messages: image_url must be a mapping with `url`"),
        (
            {"type": "input_image", "image_url": url(PICTURE)},
            "content must be text, got a part of type 'input_image'",
        ),
    ):
        with pytest.raises(ConfigError, match=says):
            asked(bad)


@pytest.mark.parametrize("transport", ["cma", "shm"])
async def test_answers_that_share_their_tensors_reach_a_trainer(transport: str) -> None:
    """Two answers to one prompt have the same elements in memory; a rank gets both in one write."""
    data = np.arange(1 << 16, dtype=np.float32)
    shared = {"pixel_values": SampleTensor.of(data, per_token=False)}
    holder = TensorStore("w", "1", transport=transport)
    created = closing(create_transport(parse_transport(transport)))
    with holder, created as receiver, Arena(receiver, 2 * data.nbytes) as arena:
        held = [held_of(await holder.hold(shared, 1024)) for _ in range(2)]
        keys = tuple([each.key for (each,) in held])
        to = destination_of(receiver, arena.region)
        result = holder.write(WriteTensors(keys, (0, data.nbytes), to, 30.0))
        assert result.error == ""
        found = arena.bytes.view(np.float32)
        np.testing.assert_array_equal(found, np.concatenate([data, data]))


async def test_code_that_would_ignore_images_refuses_the_sample(tmp_path: Path) -> None:
    features = SampleTensor.of(np.arange(6, dtype=np.float32).reshape(2, 3), per_token=False)
    advantages = SampleTensor.of([0.5, 0.25])
    sample = TrainingSample(
        prompt_ids=(1, 7, 7),
        output_ids=(2, 3),
        logprobs=(-1.0, -2.0),
        versions=(4, 4),
        reward=1.0,
        group_id=9,
        engine="e",
        tensors={"images.0.pixel_values": features, "advantages": advantages},
    )
    assert sample.image_tensors == {"pixel_values": features}
    says = r"sample of group 9 must have no images, got \['pixel_values'\]; see docs/text\.md"
    with pytest.raises(ConfigError, match=says):
        token_batch([sample], torch.device("cpu"), packed=True)
    # A record of an audit has no elements of tensors.
    path = tmp_path / "audit"
    AuditRecord(path, SamplingParams(max_new_tokens=2)).add(4, 4, [sample], {})
    (recorded,) = read_audit(path, 4).samples
    assert recorded.tensors["images.0.pixel_values"].nbytes == 0
    async with aiohttp.ClientSession() as http:
        with pytest.raises(ConfigError, match=says):
            await replay(http, "http://unused", recorded, SamplingParams(max_new_tokens=2))
    no_images = msgspec.structs.replace(sample, tensors={"advantages": advantages})
    assert no_images.image_tensors == {}
    assert token_batch([no_images], torch.device("cpu")).input_ids.tolist() == [[1, 7, 7, 2]]
