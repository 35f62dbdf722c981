"""`cp_comm_type` by plan: what the measurements say, what heads allow, and overrides."""

import re

import pytest

from vlm_cp.alignment import Alignment
from vlm_cp.exchange import EXACT, MEASURED, LayerTime, choose_comm_type
from vlm_cp.plan import SequencePlan

HEADS = {"heads": 16, "key_value_heads": 8, "head_dim": 128}


def plans(*lengths, cp=2):
    return [SequencePlan.from_lengths(x, alignment=Alignment(cp_size=cp)) for x in lengths]


@pytest.mark.parametrize(
    ("lengths", "wanted", "step_ms"),
    [
        pytest.param([4096] * 4, "p2p", {"p2p": 350, "a2a": 367, "all_gather": 399}, id="short"),
        pytest.param([16384], "all_gather", {"p2p": 420, "a2a": 432, "all_gather": 408}, id="long"),
    ],
)
def test_agrees_with_the_steps_it_was_fitted_to(lengths, wanted, step_ms):
    choice = choose_comm_type(plans(lengths), **HEADS)
    assert choice.comm_type == wanted == min(step_ms, key=step_ms.get)
    apart = {name: 28e3 * (s - choice.seconds["p2p"]) for name, s in choice.seconds.items()}  # ms over 28 layers
    assert apart == pytest.approx({name: ms - step_ms["p2p"] for name, ms in step_ms.items()}, abs=1.5)


def test_pairs_of_a_rank_by_hand():
    """Samples of 4 and 8 tokens: 10 + 36 pairs, half of them on each rank; 14 FLOPs a pair and channel."""
    times = {name: LayerTime(fixed=1.0, rate=14.0) for name in MEASURED}
    choice = choose_comm_type(plans([4, 8]), heads=2, key_value_heads=2, head_dim=3, times=times)
    assert choice.seconds == dict.fromkeys(MEASURED, 1 + 23 * 6)


def test_one_type_for_all_micro_batches_of_a_step():
    short, long = [4096] * 4, [16384]
    assert choose_comm_type(plans(short, long), **HEADS).comm_type == "p2p"
    assert choose_comm_type(plans(short, long, long, long, long, long), **HEADS).comm_type == "all_gather"


@pytest.mark.parametrize("allowed", [("a2a",), ("p2p",), EXACT], ids=str)
def test_allowed_types_override(allowed):
    assert choose_comm_type(plans([4096] * 4), allowed=allowed, **HEADS).comm_type == allowed[-1]


def test_a2a_needs_heads_that_divide():
    found = choose_comm_type(plans([16], cp=4), heads=8, key_value_heads=2, head_dim=1)
    assert set(found.seconds) == {"p2p", "all_gather"}


def test_one_rank_exchanges_nothing():
    choice = choose_comm_type(plans([16], cp=1), **HEADS)
    assert str(choice) == "cp_comm_type p2p (nothing is exchanged)"


def test_says_what_was_picked_and_why():
    choice = choose_comm_type(plans([4096] * 4), **HEADS)
    assert str(choice) == "cp_comm_type p2p (a layer: p2p 0.83 ms, all_gather 2.57 ms, a2a 1.42 ms)"


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (
            {"allowed": ("ring",)},
            "allowed must hold some of p2p, all_gather, a2a, got ['ring']; attention layers would exchange nothing",
        ),
        (
            {"allowed": ()},
            "allowed must hold some of p2p, all_gather, a2a, got none; attention layers would exchange nothing",
        ),
        (
            {"allowed": ("a2a",), "key_value_heads": 1},
            "heads must be divisible by cp_size 2 for a2a, got 16 query and 1 key/value heads on a TP rank; allow p2p or all_gather",
        ),
    ],
    ids=["unknown", "none", "heads"],
)
def test_refused(settings, message):
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        choose_comm_type(plans([16]), **{**HEADS, **settings})
