"""Processors of each family around a byte-level tokenizer that is built here, so that no hub is asked."""

from __future__ import annotations

from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast, Qwen2VLImageProcessor, Qwen3VLVideoProcessor
from transformers.models.qwen2_5_vl.processing_qwen2_5_vl import Qwen2_5_VLProcessor
from transformers.models.qwen2_vl.video_processing_qwen2_vl import Qwen2VLVideoProcessor
from transformers.models.qwen3_vl.processing_qwen3_vl import Qwen3VLProcessor

SPECIALS = (
    "<|endoftext|>",
    "<|im_start|>",
    "<|im_end|>",
    "<|vision_start|>",
    "<|vision_end|>",
    "<|vision_pad|>",
    "<|image_pad|>",
    "<|video_pad|>",
)

# Qwen's own word split; the few merges below only make samples shorter.
_SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_MERGED_TEXT = "what is written on the page and what does the picture show in the second frame of the video"

# Qwen3's processors write each frame's own vision_start and vision_end themselves; Qwen2.5's do not.
_TEMPLATE = """{%- for message in messages -%}
<|im_start|>{{ message.role }}
{% for part in message.content -%}
{%- if part.type == 'image' -%}<|vision_start|><|image_pad|><|vision_end|>
{%- elif part.type == 'video' -%}VIDEO
{%- else -%}{{ part.text }}{%- endif -%}
{%- endfor -%}<|im_end|>
{% endfor -%}
{%- if add_generation_prompt -%}<|im_start|>assistant
{% endif -%}"""


def build_tokenizer() -> PreTrainedTokenizerFast:
    """Byte-level BPE with Qwen's special tokens; any text round-trips. Use `len(tokenizer)` for the vocabulary."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.normalizer = normalizers.NFC()
    words = pre_tokenizers.Split(Regex(_SPLIT), "isolated")
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [words, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=320, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False
    )
    tokenizer.train_from_iterator([_MERGED_TEXT], trainer)
    tokenizer.add_special_tokens([AddedToken(text, special=True, normalized=False) for text in SPECIALS])
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<|im_end|>", pad_token="<|endoftext|>")


def build_processor(family: str, *, longest_edge: int = 160 * 160) -> Any:
    """The family's processor; `longest_edge`: pixels an image is scaled down to."""
    tokenizer = build_tokenizer()
    size = {"shortest_edge": 32 * 32, "longest_edge": longest_edge}
    if family == "qwen2_5_vl":
        return Qwen2_5_VLProcessor(
            Qwen2VLImageProcessor(size=size),
            tokenizer,
            Qwen2VLVideoProcessor(size=size),
            chat_template=_TEMPLATE.replace("VIDEO", "<|vision_start|><|video_pad|><|vision_end|>"),
        )
    half = [0.5, 0.5, 0.5]
    return Qwen3VLProcessor(
        Qwen2VLImageProcessor(patch_size=16, image_mean=half, image_std=half, size=size),
        tokenizer,
        Qwen3VLVideoProcessor(size={"shortest_edge": 32 * 32, "longest_edge": 4 * longest_edge}),
        chat_template=_TEMPLATE.replace("VIDEO", "<|video_pad|>"),
    )
