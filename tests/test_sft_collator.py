"""`SFTCollator`: from messages to a packed batch that loses no image, no label and no offset on the way."""

from __future__ import annotations

import pickle
import re
from math import lcm
from typing import Any

import pytest
import torch
from test_chat import processor_of
from torch import Tensor
from torch.utils.data import DataLoader

from vlm_cp.alignment import Alignment
from vlm_cp.batch import PackedBatch
from vlm_cp.chat import IGNORE, EncodedSample
from vlm_cp.collate import SFTCollator
from vlm_cp.demo.conversations import pan, photo
from vlm_cp.demo.models import tiny_config
from vlm_cp.packing import bin_samples
from vlm_cp.plan import SequencePlan
from vlm_cp.spec import TextSpec

PAD = 7


def collator(family: str = "qwen3_vl", alignment: Alignment | None = None, **options: Any) -> SFTCollator:
    processor, spec = processor_of(family)
    return SFTCollator(processor, spec=spec, alignment=alignment or Alignment(), pad_token_id=PAD, **options)


def image(name: str) -> dict[str, Any]:
    return {"type": "image", "image": photo(name)}


def video(frames: int = 4) -> dict[str, Any]:
    return {"type": "video", "video": pan(photo("astronaut"), frames, width=64, height=64)}


def text(words: str) -> dict[str, Any]:
    return {"type": "text", "text": words}


def chat(*content: dict[str, Any], answer: str = "A cup.") -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": list(content)}, {"role": "assistant", "content": answer}]}


SAMPLES = [
    chat(image("coffee"), text("What is this?")),
    chat(text("Say yes."), answer="Yes."),
    chat(text("Compare"), video(), text("with"), image("rocket"), image("coffee"), answer="They differ."),
]


def decode(ids: Tensor) -> str:
    return processor_of("qwen3_vl")[0].tokenizer.decode(ids)


@pytest.mark.parametrize("cp_size", [1, 2, 4])
def test_b15_b16_labels_are_shifted_inside_each_sample_before_the_cut_and_padding_has_none(cp_size: int) -> None:
    batch = collator(alignment=Alignment(cp_size=cp_size))(SAMPLES)
    plan, ids, labels = batch.plan, batch.input_ids[0], batch.labels[0]
    assert torch.equal(batch.loss_mask, batch.labels != IGNORE)
    scored = batch.loss_mask[0]
    assert torch.equal(labels[scored], ids.roll(-1)[scored])
    assert not (scored & ~plan.scored).any()
    assert (ids[~plan.valid] == PAD).all()
    answers = [decode(labels[scored & (plan.sample_index == i)]) for i in range(3)]
    assert answers == ["A cup.<|im_end|>", "Yes.<|im_end|>", "They differ.<|im_end|>"]
    shards = [batch.local(rank) for rank in range(cp_size)]
    assert torch.equal(plan.unshard([shard.labels for shard in shards], 1), batch.labels)
    assert sum(int(shard.loss_mask.sum()) for shard in shards) == int(scored.sum())


@pytest.mark.parametrize("family", ["qwen2_5_vl", "qwen3_vl", "qwen3_5"])
@pytest.mark.parametrize("cp_size", [1, 2])
def test_b37_images_and_videos_of_one_sample_keep_their_order_and_placeholders(family: str, cp_size: int) -> None:
    batch = collator(family, Alignment(cp_size=cp_size))(SAMPLES)
    media, spec = batch.media, processor_of(family)[1]
    assert media.samples.tolist() == [0, 2, 2, 2]
    ids = batch.input_ids[0, media.row_slots]
    expected = [spec.image_token_id] * int(media.row_counts[:3].sum()) + [spec.video_token_id] * int(
        media.row_counts[3]
    )
    assert ids.tolist() == expected


@pytest.mark.parametrize("cp_size", [1, 2, 4])
def test_b17_an_answer_of_one_token_is_one_loss_term_at_the_slot_before_it(cp_size: int) -> None:
    batch = collator(alignment=Alignment(cp_size=cp_size))([chat(text("Say nothing."), answer="")])
    (slot,) = batch.loss_mask[0].nonzero().flatten().tolist()
    assert decode(batch.input_ids[0, slot + 1]) == decode(batch.labels[0, slot]) == "<|im_end|>"
    assert sum(int(batch.local(rank).loss_mask.sum()) for rank in range(cp_size)) == 1


@pytest.mark.parametrize("order", [[0, 1, 2], [2, 1, 0]], ids=str)
def test_b54_pixels_and_grids_stay_with_their_sample(order: list[int]) -> None:
    encoded = [collator().encode(sample) for sample in SAMPLES]
    batch = collator()([SAMPLES[i] for i in order])
    for key, found in (("pixel_values", batch.pixel_values), ("image_grid_thw", batch.image_grid_thw)):
        own = [sample.inputs[key] for i in order if (sample := encoded[i]) is not None and key in sample.inputs]
        assert found is not None
        assert torch.equal(found, torch.cat(own))


def test_b41_a_sample_that_was_cut_through_its_image_elsewhere_is_refused() -> None:
    sample = collator().encode(SAMPLES[0])
    assert sample is not None
    cut = EncodedSample(
        inputs={**sample.inputs, "input_ids": sample.inputs["input_ids"][:11], "labels": sample.inputs["labels"][:11]}
    )
    with pytest.raises(
        ValueError, match=r"^sample 1 must hold one image placeholder for every feature row, got \d+ placeholders"
    ):
        collator()([SAMPLES[1], cut])


def test_b39_a_batch_of_text_has_no_pixels() -> None:
    batch = collator(alignment=Alignment(cp_size=2))([SAMPLES[1]])
    assert batch.pixel_values is batch.pixel_values_videos is None
    assert len(batch.media.grids) == 0


def test_b53_samples_keep_their_order_and_what_is_said_of_them() -> None:
    batch = collator(max_length=40, overflow="drop_sample", alignment=Alignment(cp_size=2))(
        [SAMPLES[2], SAMPLES[1], SAMPLES[0]]
    )
    assert batch.sample_extras["sample"].tolist() == [1, 2]
    assert batch.sample_extras["dropped_media"].tolist() == [0, 0]


def test_the_offsets_that_thd_needs_always_travel() -> None:
    """NeMo's get_batch dropped cu_seqlens unless told to tune, and packed samples then attended to each other."""
    batch = collator(alignment=Alignment(cp_size=2))(SAMPLES)
    again: PackedBatch = pickle.loads(pickle.dumps(batch))  # as a DataLoader's worker sends it
    for plan in (batch.plan, again.plan, batch.to("cpu").plan, batch.local(1).plan):
        assert plan.cu_seqlens.tolist() == [0, *torch.tensor(batch.plan.lengths).cumsum(0).tolist()]
        assert plan.cu_seqlens_padded.tolist() == [0, *torch.tensor(batch.plan.padded_lengths).cumsum(0).tolist()]
        assert plan.max_seqlen == max(batch.plan.padded_lengths)


def test_it_is_a_collate_fn() -> None:
    batches = list(DataLoader(SAMPLES, batch_size=2, collate_fn=collator()))  # pyright: ignore[reportArgumentType]
    assert [len(batch.plan.lengths) for batch in batches] == [2, 1]


def test_a_fixed_stream_length_is_kept_or_refused() -> None:
    assert collator(total_tokens=512, alignment=Alignment(cp_size=2))(SAMPLES).plan.total_tokens == 512
    with pytest.raises(ValueError, match=r"^total_tokens must be a multiple of 4 and at least \d+, got 64; "):
        collator(total_tokens=64, alignment=Alignment(cp_size=2))(SAMPLES)


# Truncation.


def test_a_long_text_is_cut_at_its_end() -> None:
    sample = chat(image("coffee"), text("What?"), answer="A cup of coffee on a table, seen from above.")
    whole, cut = collator().encode(sample), collator(max_length=40).encode(sample)
    assert whole is not None
    assert cut is not None
    assert whole.length > cut.length == 40
    for key in ("input_ids", "labels"):
        assert torch.equal(cut.inputs[key], whole.inputs[key][:40])
    assert torch.equal(cut.inputs["pixel_values"], whole.inputs["pixel_values"])


@pytest.mark.parametrize("overflow", ["error", "drop_sample", "drop_media"])
@pytest.mark.parametrize("family", ["qwen2_5_vl", "qwen3_vl"])
def test_b44_no_length_ever_cuts_through_media(family: str, overflow: Any) -> None:
    """Every max_length: what is kept passes the media check of the packer, and is as long as it may be."""
    sample = chat(text("Look"), image("coffee"), text("and"), video(6), text("then"), image("rocket"), text("Well?"))
    full = collator(family).encode(sample)
    assert full is not None
    outcomes: set[int | str] = set()
    for max_length in range(8, full.length + 8, 4):
        collate = collator(family, Alignment(cp_size=2), max_length=max_length, overflow=overflow)
        try:
            batch = collate([sample, SAMPLES[1]])
        except ValueError:
            outcomes.add("error")
            continue
        assert max(batch.plan.lengths) <= max_length
        assert batch.loss_mask.any()
        if batch.sample_extras["sample"][0] == 1:
            outcomes.add("dropped")
        else:
            outcomes.add(int(batch.sample_extras["dropped_media"][0]))
    assert (
        outcomes
        == {
            "error": {"error", 0},
            "drop_sample": {"error", "dropped", 0},
            "drop_media": {"error", 3, 2, 1, 0},
        }[overflow]
    )


def test_as_few_media_as_needed_are_dropped_and_the_rest_is_the_processors_own() -> None:
    media = [image("coffee"), image("rocket"), video(), image("astronaut")]
    sample = chat(*media, text("What?"))
    kept = chat(*media[:2], text("What?"))
    short = collator().encode(kept)
    assert short is not None
    found = collator(max_length=short.length, overflow="drop_media").encode(sample)
    assert found is not None
    assert found.dropped_media == 2
    assert found.inputs.keys() == short.inputs.keys()
    assert all(torch.equal(found.inputs[key], short.inputs[key]) for key in short.inputs)
    tighter = collator(max_length=short.length - 10, overflow="drop_media").encode(sample)
    assert tighter is not None
    assert tighter.dropped_media == 3


def test_an_image_that_stands_twice_is_dropped_once() -> None:
    cup = image("coffee")
    sample, once = chat(cup, cup, text("What?")), collator().encode(chat(cup, text("What?")))
    assert once is not None
    found = collator(max_length=once.length, overflow="drop_media").encode(sample)
    assert found is not None
    assert (found.dropped_media, found.length) == (1, once.length)


def test_a_cut_right_after_an_images_last_token_is_a_cut_through_it() -> None:
    sample = chat(text("Look"), image("coffee"), answer="")
    sample["messages"] = [{"role": "assistant", "content": "A cup."}, *sample["messages"]]
    full = collator().encode(sample)
    assert full is not None
    ids, spec = full.inputs["input_ids"], processor_of("qwen3_vl")[1]
    end = int((ids == spec.image_token_id).nonzero()[-1, 0]) + 2
    assert decode(ids[end - 1 : end]) == "<|vision_end|>"
    kept = collator(max_length=end, overflow="drop_sample").encode(sample)
    assert kept is not None
    assert kept.length == end
    assert collator(max_length=end - 1, overflow="drop_sample").encode(sample) is None


@pytest.mark.parametrize(
    ("options", "samples", "message"),
    [
        pytest.param(
            {"max_length": 12},
            [SAMPLES[0]],
            "samples[0] must fit max_length 12, got 44 tokens, and its media end at token 14; "
            "features would be left without their placeholders. See `overflow`",
            id="44-image-cut",
        ),
        pytest.param(
            {"max_length": 8, "overflow": "drop_media"},
            [SAMPLES[1], chat(text("Say yes, please."), answer="Yes.")],
            "samples[0] must fit max_length 8, got 31 tokens, and all its trained tokens lie beyond; "
            "it would add nothing to the loss. See `overflow`",
            id="no-trained-token-left",
        ),
        pytest.param(
            {"max_length": 8, "overflow": "drop_media"},
            [SAMPLES[0]],
            "samples[0] must fit max_length 8, got 36 tokens, and all its trained tokens lie beyond; "
            "it would add nothing to the loss. See `overflow`",
            id="no-trained-token-left-without-media",
        ),
        pytest.param(
            {"max_length": 8, "overflow": "drop_sample"},
            [SAMPLES[0], SAMPLES[1]],
            "samples must hold one that fits max_length 8, got 2 of which none does; "
            "this rank would have no micro-batch and the others would wait for it",
            id="all-dropped",
        ),
        pytest.param(
            {},
            [],
            "samples must hold one that fits max_length None, got 0 of which none does; "
            "this rank would have no micro-batch and the others would wait for it",
            id="03-no-samples",
        ),
    ],
)
def test_what_does_not_fit_is_refused(options: dict[str, Any], samples: list[Any], message: str) -> None:
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        collator(**options)(samples)


def test_b8_a_max_length_that_is_no_multiple_is_refused() -> None:
    message = "max_length must be a multiple of the alignment's sequence_multiple 4, got 66; a sample cut there would be padded beyond it"
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        collator(alignment=Alignment(cp_size=2), max_length=66)


def test_an_unknown_overflow_is_refused() -> None:
    message = "overflow must be one of error, drop_sample, drop_media, got 'cut'; samples would be lost unasked"
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        collator(overflow="cut")


# Padding: what Transformer Engine's FP8 GEMMs take, for every layout and rule of the published table.

LAYOUTS = [(8, 2, True), (4, 4, True), (8, 1, True), (1, 1, True), (1, 2, False), (2, 2, True)]


def takes_fp8(total: int, tp: int, cp: int, sp: bool, multiple: int = 16) -> bool:
    """Rows of the gathered activations, contracted by the weight gradient, and of a sequence-parallel rank's own (TE: % 8)."""
    if total % cp or (sp and total % (cp * tp)):
        return False
    return total // cp % multiple == 0 and total // (cp * (tp if sp else 1)) % 8 == 0


def aligner_rule(tp: int, cp: int, sp: bool) -> int:
    """NeMo-Aligner as merged."""
    return (8 * tp if sp else 16) * cp


def reviewer_rule(tp: int, cp: int, sp: bool) -> int:
    """NeMo-Aligner's reviewer."""
    return lcm(16, tp) * cp


def our_rule(tp: int, cp: int, sp: bool) -> int:
    return Alignment(cp_size=cp, tp_size=tp, sequence_parallel=sp, fp8="delayed").stream_multiple


@pytest.mark.parametrize(
    ("rule", "fails"),
    [
        pytest.param(aligner_rule, [(1, 1, True)], id="as-merged"),
        pytest.param(reviewer_rule, [(8, 2, True), (4, 4, True), (8, 1, True)], id="reviewers"),
        pytest.param(our_rule, [], id="ours"),
    ],
)
def test_b10_published_padding_rules_fail_and_ours_does_not(rule: Any, fails: list[tuple[int, int, bool]]) -> None:
    found = [(tp, cp, sp) for tp, cp, sp in LAYOUTS if not takes_fp8(rule(tp, cp, sp), tp, cp, sp)]
    assert found == fails


@pytest.mark.parametrize("recipe", ["delayed", "tensorwise", "mxfp8", "blockwise", "nvfp4"])
@pytest.mark.parametrize(("tp", "cp", "sp"), [*LAYOUTS, (2, 3, True), (1, 12, False), (6, 3, True)])
def test_b10_packed_batches_fit_every_fp8_recipe(recipe: Any, tp: int, cp: int, sp: bool) -> None:
    alignment = Alignment(cp_size=cp, tp_size=tp, sequence_parallel=sp, fp8=recipe)
    plan = collator(alignment=alignment)([SAMPLES[1], SAMPLES[1]]).plan
    multiple = {"mxfp8": 32, "blockwise": 128, "nvfp4": 128}.get(recipe, 16)
    assert takes_fp8(plan.total_tokens, tp, cp, sp, multiple)
    assert all(length % (2 * cp) == 0 for length in plan.padded_lengths if cp > 1)


@pytest.mark.parametrize(("cp", "joined", "larger"), [(3, 48, 16), (12, 48, 24)])
def test_b9_multiples_are_joined_by_lcm(cp: int, joined: int, larger: int) -> None:
    """NeMo-Aligner's data set and DPO rules take the larger of two multiples, which the other does not divide."""
    assert Alignment(cp_size=cp, sample_multiple=16).sequence_multiple == joined
    assert max(16, 2 * cp) == larger
    assert larger % (2 * cp) or larger % 16


def test_b8_the_smaller_of_two_lengths_is_no_longer_aligned() -> None:
    """min(max_seq_length, ceil_to(longest, multiple)), as NeMo's BSHD collate clamps: refused here, when the collator is made."""
    multiple, max_seq_length, longest = 32, 100, 98
    clamped = min(max_seq_length, -(-longest // multiple) * multiple)
    assert clamped % multiple == 4
    with pytest.raises(
        ValueError, match=r"^max_length must be a multiple of the alignment's sequence_multiple 32, got 100; "
    ):
        collator(alignment=Alignment(sample_multiple=32), max_length=clamped)


# Bins.


def encode(*samples: dict[str, Any], **options: Any) -> tuple[SFTCollator, list[EncodedSample], TextSpec]:
    collate = collator(**options)
    encoded = [collate.encode(sample) for sample in samples]
    text_spec = TextSpec.from_hf_config(tiny_config("qwen3_vl", collate.processor.tokenizer))
    return collate, [sample for sample in encoded if sample is not None], text_spec


def test_bins_count_vision_and_not_length_alone() -> None:
    picture, words = SAMPLES[0], chat(text("Say yes, at once."), answer="Yes, of course.")
    collate, encoded, text_spec = encode(picture, words, words, words, alignment=Alignment(cp_size=2))
    assert encoded[0].length <= encoded[1].length
    bins = collate.bins(encoded, text=text_spec, capacity=1600, bins_multiple_of=2)
    assert bins == [[1, 2, 3], [0]]
    by_length = bin_samples([sample.length for sample in encoded], capacity=1600, bins_multiple_of=2)
    assert by_length == [[1, 3], [0, 2]]


@pytest.mark.parametrize("cp_size", [1, 2, 4])
def test_b7_b52_every_bin_packs_within_its_capacity(cp_size: int) -> None:
    alignment = Alignment(cp_size=cp_size, tp_size=2, sequence_parallel=True, fp8="delayed")
    words = [chat(text("Say yes."), answer="Yes. " * i) for i in range(1, 12)]
    collate, encoded, text_spec = encode(*words, alignment=alignment)
    capacity = 4 * alignment.stream_multiple * (8 // cp_size)
    bins = collate.bins(encoded, text=text_spec, capacity=capacity, bins_multiple_of=2)
    assert len(bins) % 2 == 0
    seen = [i for bin_ in bins for i in bin_]
    assert sorted(seen) == list(range(11))
    for bin_ in bins:
        batch = collate([encoded[i] for i in bin_])
        assert batch.plan.total_tokens <= capacity
        assert batch.plan.lengths == tuple(encoded[i].length for i in bin_)


def test_a_capacity_that_is_no_multiple_is_refused() -> None:
    collate, encoded, text_spec = encode(SAMPLES[1], alignment=Alignment(cp_size=2))
    message = "capacity must be a multiple of the alignment's stream_multiple 4, got 1001; a full bin would be padded beyond it"
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        collate.bins(encoded, text=text_spec, capacity=1001)


def test_b7_a_stream_shorter_than_its_samples_is_refused_before_anything_is_built() -> None:
    with pytest.raises(ValueError, match=r"^total_tokens must be a multiple of 4 and at least 12, got 8; "):
        SequencePlan.from_lengths([5, 3], alignment=Alignment(cp_size=2), total_tokens=8)
