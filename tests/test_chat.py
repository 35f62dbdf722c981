"""Messages -> ids and labels: the loss sits on the answers, whatever stands in the text, and media are expanded once."""

from __future__ import annotations

import re
from functools import cache
from typing import Any

import pytest
import torch

from vlm_cp.chat import IGNORE, ChatEncoder, EncodedSample, chat_messages
from vlm_cp.demo.conversations import demo_conversations, encode, pan, photo
from vlm_cp.demo.models import tiny_config
from vlm_cp.demo.processor import build_processor
from vlm_cp.spec import VLMSpec

FAMILIES = ["qwen2_5_vl", "qwen3_vl", "qwen3_5"]


@cache
def processor_of(family: str) -> tuple[Any, VLMSpec]:
    processor = build_processor(family, longest_edge=96 * 96)
    return processor, VLMSpec.from_hf_config(tiny_config(family, processor.tokenizer))


def encoder(family: str = "qwen3_vl", **changed: Any) -> ChatEncoder:
    processor, spec = processor_of(family)
    fields: dict[str, Any] = {
        "processor": processor,
        "train_roles": ("assistant",),
        "turn_start": "<|im_start|>",
        "turn_end": "<|im_end|>",
        "fps": 2.0,
    }
    return ChatEncoder(spec=spec, **(fields | changed))


def run(sample: Any, family: str = "qwen3_vl", index: int = 0, **changed: Any) -> EncodedSample:
    return encoder(family, **changed).encode(chat_messages(sample, index), index)


def trained_text(sample: EncodedSample, family: str = "qwen3_vl") -> str:
    ids, labels = sample.inputs["input_ids"], sample.inputs["labels"]
    assert torch.equal(labels[labels != IGNORE], ids[labels != IGNORE])
    return processor_of(family)[0].tokenizer.decode(ids[labels != IGNORE])


def turns(*texts: str) -> list[dict[str, Any]]:
    """user, assistant, user, ..."""
    return [{"role": ("user", "assistant")[i % 2], "content": text} for i, text in enumerate(texts)]


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("conversation", demo_conversations(), ids=lambda c: c.name)
def test_the_loss_is_on_the_answer_and_the_inputs_are_the_processors(family: str, conversation: Any) -> None:
    content = [
        {"type": "text", "text": part}
        if isinstance(part, str)
        else {
            "type": "video" if isinstance(part, list) else "image",
            "video" if isinstance(part, list) else "image": part,
        }
        for part in conversation.question
    ]
    sample = run([{"role": "user", "content": content}, {"role": "assistant", "content": conversation.answer}], family)
    assert trained_text(sample, family) == conversation.answer + "<|im_end|>"
    reference = encode(processor_of(family)[0], conversation).inputs
    assert torch.equal(sample.inputs["input_ids"], reference["input_ids"][0])
    for key in set(reference) - {"input_ids", "attention_mask", "mm_token_type_ids"}:
        assert torch.equal(sample.inputs[key], reference[key])
    spec = processor_of(family)[1]
    ids, grids = sample.inputs["input_ids"], sample.grids
    placeholders = int(((ids == spec.image_token_id) | (ids == spec.video_token_id)).sum())
    assert placeholders == (0 if grids is None else int(grids.prod(1).sum()) // spec.spatial_merge_size**2)


def test_every_answer_of_a_long_conversation_is_trained() -> None:
    sample = run(
        [{"role": "system", "content": "Be brief."}, *turns("One?", "1.", "Two?", "2.\n\nTwo.", "Three?", "3.")]
    )
    assert trained_text(sample) == "1.<|im_end|>2.\n\nTwo.<|im_end|>3.<|im_end|>"


def test_the_roles_are_a_choice() -> None:
    sample = [{"role": "tool", "content": "42"}, *turns("One?", "1.")]
    assert trained_text(run(sample, train_roles=("user", "tool"))) == "42<|im_end|>One?<|im_end|>"
    assert trained_text(run(sample, train_roles=())) == ""


def test_a_role_that_begins_with_a_trained_one_is_not_trained() -> None:
    sample = run([{"role": "assistants", "content": "no"}, *turns("One?", "yes")])
    assert trained_text(sample) == "yes<|im_end|>"


def test_18_a_conversation_without_an_answer_has_no_trained_token() -> None:
    sample = run(turns("Hi"))
    assert trained_text(sample) == ""
    assert sample.length == len(sample.inputs["labels"])


def test_placeholders_in_an_answer_are_not_trained() -> None:
    answer = [{"type": "text", "text": "Here: "}, {"type": "image", "image": photo("coffee")}]
    sample = run([*turns("Draw a cup."), {"role": "assistant", "content": answer}])
    assert trained_text(sample) == "Here: <|vision_start|><|vision_end|><|im_end|>"


def test_samples_are_left_as_they_came() -> None:
    messages = turns("One?", "1.")
    run(messages)
    assert messages == turns("One?", "1.")


@pytest.mark.parametrize("family", ["qwen2_5_vl", "qwen3_vl"])
def test_38_video_frames_are_taken_as_given_at_their_own_rate(family: str) -> None:
    frames = pan(photo("rocket"), 6, width=64, height=64)

    def ask(**own: Any) -> EncodedSample:
        content = [{"type": "video", "video": frames, **own}, {"type": "text", "text": "What moves?"}]
        return run([{"role": "user", "content": content}, *turns("", "It.")[1:]], family)

    default, slow, fast = ask(), ask(fps=0.5), ask(fps=8.0)
    # 6 frames, two by two: none dropped, also where the processor would take only two a second.
    assert [int(x.inputs["video_grid_thw"][0, 0]) for x in (default, slow, fast)] == [3, 3, 3]
    if family == "qwen2_5_vl":
        assert [x.inputs["second_per_grid_ts"].tolist() for x in (default, slow)] == [[1.0], [4.0]]
    else:
        decode = processor_of(family)[0].tokenizer.decode
        times = [re.findall(r"<([\d.]+) seconds>", decode(x.inputs["input_ids"])) for x in (default, slow)]
        assert times == [["0.2", "1.2", "2.2"], ["1.0", "5.0", "9.0"]]


@pytest.mark.parametrize("marker", ["<|im_start|>", "<|im_end|>", "<|image_pad|>", "<|video_pad|>", "<|vision_start|>"])
def test_text_that_writes_a_marker_is_refused(marker: str) -> None:
    message = (
        f"samples[3] must not write {marker} in its text, got 'a {marker} b'; "
        "turns would be trained that are none, or media would move to other places"
    )
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        run(turns(f"a {marker} b", "no"), index=3)


@pytest.mark.parametrize(
    ("template", "found"),
    [
        pytest.param(
            "{% for m in messages %}### {{ m.role }}\n{{ m.content[0].text }}<|im_end|>{% endfor %}", 0, id="no-turn"
        ),
        pytest.param(
            "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content[0].text }}{% endfor %}", 0, id="unclosed"
        ),
    ],
)
def test_a_template_with_other_turns_is_refused(template: str, found: int) -> None:
    processor = build_processor("qwen3_vl")
    processor.chat_template = template
    message = (
        "samples[0] must come out of the chat template with its 1 turns of assistant between <|im_start|> and <|im_end|>, "
        f"got {found}; the loss would be on other tokens"
    )
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        run(turns("a", "b"), processor=processor)


@pytest.mark.parametrize(
    ("sample", "message"),
    [
        pytest.param(
            "hello",
            'samples[1] must be chat messages, or a mapping with "messages", got str; there would be no turn to train on',
            id="a-string",
        ),
        pytest.param(
            {"text": "hello"},
            'samples[1] must be chat messages, or a mapping with "messages", got dict; there would be no turn to train on',
            id="no-messages",
        ),
        pytest.param(
            [],
            'samples[1] must be chat messages, or a mapping with "messages", got list; there would be no turn to train on',
            id="empty",
        ),
        pytest.param(
            [{"role": "user", "content": [{"type": "audio", "audio": "a.wav"}]}],
            'samples[1] must have parts of type "text", "image" or "video", got \'audio\'; the chat template would leave it out',
            id="audio",
        ),
        pytest.param(
            [{"role": "user", "content": [{"type": "video", "video": "a.mp4"}]}],
            "samples[1] must give a video as its frames, got 'a.mp4'; "
            "the processor would sample frames by another rate than the times it writes. Decode it first",
            id="video-file",
        ),
    ],
)
def test_bad_samples_are_refused(sample: Any, message: str) -> None:
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        run(sample, index=1)
