"""Chat messages -> ids, labels by role and media tensors, through a real transformers processor."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from vlm_cp.spec import VLMSpec

IGNORE = -100

_KEYS = (
    "pixel_values",
    "image_grid_thw",
    "pixel_values_videos",
    "video_grid_thw",
    "second_per_grid_ts",
)


@dataclass(frozen=True, kw_only=True, eq=False)
class EncodedSample:
    """One conversation's tensors, ready for `pack_samples`.

    inputs: `input_ids` and unshifted `labels` [L], pixels and grids where there are media.
    dropped_media: images and videos that were left out to fit max_length.
    """

    inputs: Mapping[str, Tensor]
    dropped_media: int = 0

    @property
    def length(self) -> int:
        """L, tokens before padding."""
        return len(self.inputs["input_ids"])

    @property
    def grids(self) -> Tensor | None:
        """[*, 3], images then videos; None for text."""
        found = [self.inputs[key] for key in ("image_grid_thw", "video_grid_thw") if key in self.inputs]
        return torch.cat(found) if found else None


@dataclass(frozen=True, kw_only=True)
class ChatEncoder:
    """Runs a processor on one conversation and finds the turns that carry the loss; `SFTCollator` documents the fields."""

    processor: Any
    spec: VLMSpec
    train_roles: tuple[str, ...]
    turn_start: str
    turn_end: str
    fps: float

    def encode(self, messages: list[dict[str, Any]], index: int = 0) -> EncodedSample:
        """The processor's tensors and the labels of these messages; every placeholder is expanded here, once.

        index: what errors call the sample.
        """
        self._check_text(messages, index)
        videos = [part for part in content_parts(messages) if part["type"] == "video"]
        out = self.processor.apply_chat_template(
            messages,
            tokenize=True,
            return_dict=True,
            return_tensors="pt",
            processor_kwargs=_video_options(videos, self.fps, index),
        )
        ids = out["input_ids"][0]
        trained = self._trained(ids, messages, index)
        inputs = {"input_ids": ids, "labels": ids.where(trained, IGNORE)}
        return EncodedSample(inputs=inputs | {key: out[key] for key in _KEYS if key in out})

    def _check_text(self, messages: list[dict[str, Any]], index: int) -> None:
        """Text must not write the template's own markers: they would open a turn, or take an image's place."""
        spec, tokenizer = self.spec, self.processor.tokenizer
        media = [spec.image_token_id, spec.video_token_id, spec.vision_start_token_id]
        markers = (self.turn_start, self.turn_end, *tokenizer.convert_ids_to_tokens(media))
        for part in content_parts(messages):
            for marker in markers:
                if part["type"] == "text" and marker in part["text"]:
                    raise ValueError(
                        f"samples[{index}] must not write {marker} in its text, got {part['text'][:60]!r}; "
                        "turns would be trained that are none, or media would move to other places"
                    )

    def _trained(self, ids: Tensor, messages: list[dict[str, Any]], index: int) -> Tensor:
        """bool [L]: the tokens of train_roles' turns, found in the ids (transformers' own mask is all False on processors)."""
        tokenizer = self.processor.tokenizer
        (end_id,) = tokenizer(self.turn_end, add_special_tokens=False).input_ids
        ends = (ids == end_id).nonzero()[:, 0]
        mask, turns = torch.zeros(len(ids), dtype=torch.bool), 0
        for role in self.train_roles:
            header = torch.tensor(tokenizer(self.turn_start + role, add_special_tokens=False).input_ids)
            if len(ids) <= len(header):
                continue
            opened = (ids.unfold(0, len(header), 1) == header).all(1)
            for start in opened.nonzero()[:, 0].tolist():
                first = start + len(header)
                closing = ends[ends >= first]
                # The role's line ends here; another role may only begin with the same letters.
                if len(closing) and tokenizer.decode(ids[first : first + 1]).startswith("\n"):
                    mask[first + 1 : int(closing[0]) + 1] = True
                    turns += 1
        expected = sum(message["role"] in self.train_roles for message in messages)
        if turns != expected:
            raise ValueError(
                f"samples[{index}] must come out of the chat template with its {expected} turns of {', '.join(self.train_roles)} "
                f"between {self.turn_start} and {self.turn_end}, got {turns}; the loss would be on other tokens"
            )
        return mask & (ids != self.spec.image_token_id) & (ids != self.spec.video_token_id)


def chat_messages(sample: Any, index: int) -> list[dict[str, Any]]:
    """The sample's messages, copied, with content as a list of parts."""
    messages = sample.get("messages") if isinstance(sample, Mapping) else sample
    if not isinstance(messages, Sequence) or isinstance(messages, str) or not messages:
        raise ValueError(
            f'samples[{index}] must be chat messages, or a mapping with "messages", got {type(sample).__name__}; '
            "there would be no turn to train on"
        )
    copied = [dict(message) for message in messages]
    for message in copied:
        content = message.get("content")
        if isinstance(content, str):
            message["content"] = [{"type": "text", "text": content}]
        elif content is not None:
            message["content"] = [dict(part) for part in content]
    for part in content_parts(copied):
        if part.get("type") not in ("text", "image", "video"):
            raise ValueError(
                f'samples[{index}] must have parts of type "text", "image" or "video", got {part.get("type")!r}; '
                "the chat template would leave it out"
            )
    return copied


def content_parts(messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """All messages' parts, in order; the very objects, so that they can be told apart by identity."""
    return [part for message in messages for part in message.get("content") or ()]


def without_last_media(messages: Sequence[Mapping[str, Any]], count: int) -> list[dict[str, Any]]:
    """The messages without their last `count` images and videos."""
    media = [part for part in content_parts(messages) if part["type"] in ("image", "video")]
    gone = {id(part) for part in media[len(media) - count :]}
    return [
        {**message, "content": [part for part in message["content"] if id(part) not in gone]}
        if message.get("content")
        else dict(message)
        for message in messages
    ]


def _video_options(videos: Sequence[Mapping[str, Any]], fps: float, index: int) -> dict[str, Any]:
    """Frames are taken as given: without this the processor assumes 24 a second, drops some and writes other times."""
    if not videos:
        return {}
    for part in videos:
        if "video" not in part or isinstance(part["video"], str):
            raise ValueError(
                f"samples[{index}] must give a video as its frames, got {part.get('video', part)!r:.60}; "
                "the processor would sample frames by another rate than the times it writes. Decode it first"
            )
    counts = [len(part["video"]) for part in videos]
    metadata = [
        {"fps": part.get("fps", fps), "total_num_frames": count, "frames_indices": list(range(count))}
        for part, count in zip(videos, counts, strict=True)
    ]
    return {"do_sample_frames": False, "video_metadata": metadata}
