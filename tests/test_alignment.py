import pytest

from vlm_cp import Alignment

RECIPES = {None: 1, "delayed": 16, "tensorwise": 16, "mxfp8": 32, "blockwise": 128, "nvfp4": 128}


@pytest.mark.parametrize("fp8", RECIPES)
@pytest.mark.parametrize("tp", [1, 2, 3, 4, 8])
@pytest.mark.parametrize("cp", range(1, 9))
@pytest.mark.parametrize("sp", [False, True], ids=["", "sp"])
def test_every_requirement_divides(cp, tp, sp, fp8):
    rule = Alignment(cp_size=cp, tp_size=tp, sequence_parallel=sp, fp8=fp8)
    slices = cp * (tp if sp else 1)
    assert rule.sequence_multiple == (2 * cp if cp > 1 else 1)
    assert rule.stream_multiple % rule.sequence_multiple == 0
    assert rule.stream_multiple % (slices * RECIPES[fp8]) == 0
    # The local input of a sequence-parallel FP8 GEMM needs rows % 8 (Transformer Engine), the gathered one rows % 16.
    if fp8 is not None:
        assert rule.stream_multiple // slices % 8 == 0
        assert rule.stream_multiple // cp % 16 == 0


@pytest.mark.parametrize(
    ("rule", "stream"),
    [
        (dict(cp_size=2, tp_size=8, sequence_parallel=True, fp8="delayed"), 256),
        (dict(tp_size=1, sequence_parallel=True, fp8="delayed"), 16),
        (dict(cp_size=2, tp_size=2, sequence_parallel=True, fp8="mxfp8"), 128),
        (dict(cp_size=4, tp_size=2, sequence_parallel=True, fp8="blockwise"), 1024),
        (dict(cp_size=3, sample_multiple=16), 48),
        (dict(cp_size=12, sample_multiple=16), 48),
        (dict(cp_size=2, total_multiple=10), 20),
        (dict(tp_size=4), 1),
    ],
)
def test_b9_b10_multiples_combine_by_lcm(rule, stream):
    assert Alignment(**rule).stream_multiple == stream


def test_the_rule_is_the_least_one():
    assert Alignment(cp_size=3, sample_multiple=16).sequence_multiple == 48  # not max(16, 6), not 16 * 6


@pytest.mark.parametrize("name", ["cp_size", "tp_size", "sample_multiple", "total_multiple"])
@pytest.mark.parametrize("value", [0, -1, 1.0, True, None])
def test_sizes_that_are_no_sizes(name, value):
    with pytest.raises(
        ValueError, match=f"^{name} must be an int of at least 1, got {value!r}; no padding rule follows from it$"
    ):
        Alignment(**{name: value})


def test_unknown_recipe():
    message = (
        "fp8 must be None or one of delayed, tensorwise, mxfp8, blockwise, nvfp4, got 'e4m3'; "
        "an unknown recipe would be padded as if it were bf16"
    )
    with pytest.raises(ValueError, match=f"^{message}$"):
        Alignment(fp8="e4m3")
