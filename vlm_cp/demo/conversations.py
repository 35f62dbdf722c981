"""Conversations on photos, drawn pages and a short video, and what a processor makes of them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from importlib.resources import files
from typing import Any

from PIL import Image, ImageDraw, ImageFont
from torch import Tensor


@dataclass(frozen=True)
class Conversation:
    """One sample: parts of a user's turn (text, `Image`, or a list of images for a video) and the answer."""

    name: str
    question: Sequence[str | Image.Image | list[Image.Image]]
    answer: str

    @property
    def images(self) -> list[Image.Image]:
        return [part for part in self.question if isinstance(part, Image.Image)]

    @property
    def videos(self) -> list[list[Image.Image]]:
        return [part for part in self.question if isinstance(part, list)]


def photo(name: str) -> Image.Image:
    """A shipped photo: "astronaut", "coffee" or "rocket" (credits in assets/CREDITS.md)."""
    with files("vlm_cp.demo").joinpath(f"assets/{name}.jpg").open("rb") as file:
        return Image.open(file).convert("RGB")


def page(lines: Sequence[str], *, width: int = 240, height: int = 320) -> Image.Image:
    """A drawn page of text."""
    image = Image.new("RGB", (width, height), "white")
    draw = ImageDraw.Draw(image)
    for row, line in enumerate(lines):
        draw.text((16, 16 + 30 * row), line, fill="black", font=ImageFont.load_default(22))
    return image


def pan(image: Image.Image, frames: int = 6, *, width: int = 160, height: int = 128) -> list[Image.Image]:
    """A video: a window that moves over a photo."""
    step = (image.width - width) // max(1, frames - 1)
    return [image.crop((step * i, 40, step * i + width, 40 + height)) for i in range(frames)]


def demo_conversations() -> list[Conversation]:
    """A ragged batch: images first, last and in between, text only, one sample of a few tokens, a video, images beside a video."""
    rocket, coffee, astronaut = photo("rocket"), photo("coffee"), photo("astronaut")
    report = page(["Quarterly report", "Revenue 4.2 M", "Costs 3.1 M", "Staff 27"])
    return [
        Conversation(
            "launch", [rocket, "What does the picture show?"], "A rocket leaves its pad at night, on a column of fire."
        ),
        Conversation("note", ["Say yes."], "Yes."),
        Conversation(
            "report",
            ["Read the page, then describe the second picture.", report, coffee],
            "Revenue is 4.2 M. The second shows a cup.",
        ),
        Conversation(
            "video", [pan(astronaut), "What moves?"], "The camera moves from left to right over an astronaut."
        ),
        Conversation(
            "mixed",
            [coffee, pan(rocket, 4), report, "Which of these is drawn?"],
            "Only the page is drawn; its revenue is 4.2 M.",
        ),
        Conversation(
            "text", ["Explain context parallelism in one sentence."], "Each rank holds two chunks of every sample. " * 3
        ),
    ]


@dataclass(frozen=True)
class Sample:
    """A conversation and its tensors, as the processor returns them for one row."""

    conversation: Conversation
    inputs: Mapping[str, Tensor] = field(repr=False)


def encode(processor: Any, conversation: Conversation) -> Sample:
    """Runs the real processor: chat template, image and video processing, placeholders expanded once."""
    content = [_part(part) for part in conversation.question]
    messages = [
        {"role": "user", "content": content},
        {"role": "assistant", "content": [{"type": "text", "text": conversation.answer}]},
    ]
    options: dict[str, Any] = {}
    if conversation.videos:
        metadata = [
            {"fps": 2.0, "total_num_frames": len(v), "frames_indices": list(range(len(v)))} for v in conversation.videos
        ]
        options = {"do_sample_frames": False, "video_metadata": metadata}
    inputs = processor.apply_chat_template(
        messages, tokenize=True, return_dict=True, return_tensors="pt", processor_kwargs=options
    )
    return Sample(conversation, {key: value for key, value in inputs.items() if isinstance(value, Tensor)})


def _part(part: str | Image.Image | list[Image.Image]) -> dict[str, Any]:
    if isinstance(part, str):
        return {"type": "text", "text": part}
    return {"type": "image", "image": part} if isinstance(part, Image.Image) else {"type": "video", "video": part}
