"""Small pictures with a question that only the picture answers: read the digits, count the shapes."""

from __future__ import annotations

import random
from typing import Any

from PIL import Image, ImageDraw, ImageFont

SIDE = 64  # pixels: 4 x 4 patches, 4 tokens

READ, COUNT = "Read the digits.", "Count the shapes."


def draw(index: int) -> tuple[Image.Image, str, str]:
    """Picture, question and answer number `index`: odd ones show two digits, even ones up to six shapes.

    The same on every call and rank, so that a batch is a list of numbers and a resumed run needs no random state.
    """
    rng = random.Random(index)
    background = tuple(rng.randint(200, 255) for _ in range(3))
    image = Image.new("RGB", (SIDE, SIDE), background)
    pen = ImageDraw.Draw(image)
    return (image, READ, _digits(pen, rng)) if index % 2 else (image, COUNT, _shapes(pen, rng))


def chat_sample(index: int) -> dict[str, Any]:
    """Picture number `index` as a question and its answer."""
    image, question, answer = draw(index)
    content = [{"type": "image", "image": image}, {"type": "text", "text": question}]
    return {"messages": [{"role": "user", "content": content}, {"role": "assistant", "content": answer}]}


def _ink(rng: random.Random) -> tuple[int, ...]:
    return tuple(rng.randint(0, 110) for _ in range(3))


def _digits(pen: ImageDraw.ImageDraw, rng: random.Random) -> str:
    text = f"{rng.randint(0, 99):02d}"
    font = ImageFont.load_default(36)
    for column, digit in enumerate(text):
        corner = (8 + 26 * column + rng.randint(-1, 1), 10 + rng.randint(-2, 2))
        pen.text(corner, digit, fill=_ink(rng), font=font)
    return text


def _shapes(pen: ImageDraw.ImageDraw, rng: random.Random) -> str:
    cells = rng.sample([(x, y) for x in range(3) for y in range(3)], rng.randint(1, 6))
    for x, y in cells:
        left, top, size = 21 * x + rng.randint(1, 4), 21 * y + rng.randint(1, 4), rng.randint(13, 16)
        box = (left, top, left + size, top + size)
        rng.choice([pen.ellipse, pen.rectangle])(box, fill=_ink(rng))
    return str(len(cells))
