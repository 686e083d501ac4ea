"""What the tile table compiles to: the checks of `bench.static` on every row, and each check seen to object."""

import dataclasses
import functools
import itertools

import pytest
import torch

triton = pytest.importorskip("triton")

from bench import static  # noqa: E402
from bench.static import Case, Report  # noqa: E402
from ringattn.kernels.triton import backward, merge  # noqa: E402

GOOD = Report(
    case=Case("sm_90", "forward", "bfloat16", 128, 128, 128, 128, 8, 2),
    registers=255,
    shared=163840,
    loop_spills=0,
    masked_spills=0,
    matrix="HGMMA",
    work=1.0,
    exp2=1.03,
    loop=600,
    masked_loop=900,
    warps=8,
    producers=0,
    register_moves=0,
)
SPECIALISED = dataclasses.replace(
    GOOD,
    case=Case("sm_90", "forward", "bfloat16", 128, 128, 128, 128, 4, 2, warp_specialize=True),
    warps=12,
    producers=1,
    register_moves=8,
)


def is_quick(case: Case) -> bool:
    return case.dtype == "bfloat16" and (case.head_dim, case.v_head_dim) == (128, 128)


GROUPS = pytest.mark.parametrize("quick", [True, pytest.param(False, marks=pytest.mark.slow)], ids=["128", "others"])


@functools.cache
def reports(quick: bool) -> list[Report]:
    return static.measure_all(case for case in static.cases() if is_quick(case) == quick)


@GROUPS
def test_every_row_keeps_the_rules(quick):
    assert [line for report in reports(quick) for line in static.failures(report)] == []


@GROUPS
def test_no_loop_has_grown(quick):
    stored = static.baseline()
    if stored is None:
        pytest.skip(f"no bench/results/static_{triton.__version__}.csv: needs stored loops of this version of Triton")
    assert [line for report in reports(quick) for line in static.growth(report, stored)] == []


def test_a_good_report_passes():
    assert static.failures(GOOD) == []
    assert static.failures(SPECIALISED) == []
    assert static.growth(GOOD, {GOOD.case: {"loop": 600, "masked_loop": 900, "masked_spills": 0}}) == []


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"shared": 227 * 1024 + 1}, "232449 bytes are more than a block may have"),
        ({"loop_spills": 1}, "1 spills in its loop"),
        ({"matrix": "HMMA"}, "products are done by HMMA"),
        ({"matrix": "HGMMA HMMA"}, "products are done by HGMMA HMMA"),
        ({"work": 1.5}, "arithmetic is 1.5 times the least"),
        ({"work": 0.5}, "arithmetic is 0.5 times the least"),
        ({"exp2": 2.0}, "2.0 exponentials per score"),
    ],
    ids=str,
)
def test_each_check_objects(change, said):
    bad = dataclasses.replace(GOOD, **change)
    assert static.failures(bad) == [f"sm_90 forward bfloat16 128/128 128x128x8 stages 2: {said}"]


@pytest.mark.parametrize(
    ("arch", "kernel", "dtype", "tile", "instruction"),
    [
        ("sm_80", "forward", "bfloat16", (128, 64, 8, 2), "HMMA"),
        ("sm_90", "forward", "bfloat16", (128, 64, 8, 2), "HGMMA"),
        ("sm_90", "dkv", "bfloat16", (128, 32, 4, 1), "HMMA"),  # its products have the keys for rows
        ("sm_90", "dkv", "bfloat16", (32, 128, 4, 1), "HGMMA"),
        ("sm_100", "dq", "bfloat16", (128, 32, 4, 1), "UTCHMMA"),
        ("sm_100", "dq", "float32", (128, 32, 4, 1), "FFMA"),
        ("sm_90", "dq", "float32", (128, 32, 4, 1), "FFMA"),
        ("gfx942", "dq", "float32", (128, 32, 4, 1), "v_mfma"),
    ],
)
def test_which_instructions_do_the_products(arch, kernel, dtype, tile, instruction):
    assert static.matrix(Case(arch, kernel, dtype, 128, 128, *tile)) == instruction


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"warps": 4}, "4 warps, 1 loops that only load, 8 moves of registers"),
        ({"producers": 0}, "12 warps, 0 loops that only load, 8 moves of registers"),
        ({"register_moves": 0}, "12 warps, 1 loops that only load, 0 moves of registers"),
    ],
    ids=str,
)
def test_warps_that_are_not_specialised_are_found(change, said):
    bad = dataclasses.replace(SPECIALISED, **change)
    assert static.failures(bad) == [f"sm_90 forward bfloat16 128/128 128x128x4 stages 2 specialised: {said}"]


def test_warps_that_are_specialised_unasked_are_found():
    changes = {field: getattr(SPECIALISED, field) for field in ("warps", "producers", "register_moves")}
    (line,) = static.failures(dataclasses.replace(GOOD, **changes))
    assert line.endswith("12 warps, 1 loops that only load, 8 moves of registers")


def test_fmas_may_spill_a_little():
    fma = dataclasses.replace(
        GOOD, case=dataclasses.replace(GOOD.case, dtype="float32"), matrix="FFMA", work=1.05, loop_spills=60
    )
    assert static.failures(fma) == []
    assert len(static.failures(dataclasses.replace(fma, loop_spills=61))) == 1
    assert len(static.failures(dataclasses.replace(fma, work=1.2))) == 1


@pytest.mark.parametrize(
    ("stored", "said"),
    [
        ({"loop": 570, "masked_loop": 900, "masked_spills": 0}, "loop is 600 and was 570"),
        ({"loop": 600, "masked_loop": 850, "masked_spills": 0}, "masked_loop is 900 and was 850"),
    ],
)
def test_growth_objects(stored, said):
    assert static.growth(GOOD, {GOOD.case: stored}) == [f"{GOOD.case}: {said}"]


def test_growth_wants_every_case_stored():
    (line,) = static.growth(GOOD, {})
    assert "not in the stored results" in line


def test_stored_results_are_read_as_they_were_written(tmp_path, monkeypatch):
    monkeypatch.setattr(static, "RESULTS", tmp_path)
    assert static.baseline("1.2.3") is None
    static.write_csv(tmp_path / "static_1.2.3.csv", [GOOD, SPECIALISED])
    loops = {"loop": 600, "masked_loop": 900, "masked_spills": 0}
    assert static.baseline("1.2.3") == {GOOD.case: loops, SPECIALISED.case: loops}


WAYS = [
    pytest.param(*way, id=" ".join(map(str, way)))
    for way in itertools.product(filter(is_quick, static.cases(["sm_90"])), (False, True), (False, True), (0.0, 0.1))
    if not (way[0].warp_specialize and way[3])  # specialised warps serve no dropout
]


@pytest.mark.slow
@pytest.mark.parametrize(("case", "is_full", "start", "dropout_p"), WAYS)
def test_what_is_asked_of_a_kernel_leaves_its_products_and_warps_alone(case, is_full, start, dropout_p):
    features = {"start": start, "finish": True, "is_full": is_full, "dropout_p": dropout_p, "softcap": 3.0}
    report = static.measure(case, **features, has_sinks=start)
    # The softcap takes one exponential more.
    assert static.failures(dataclasses.replace(report, exp2=report.exp2 - 1)) == []


def every_kernel():
    """Launches each kernel of the backend."""
    rows, numbers = torch.empty(1, 64, 2, 64, device="meta"), torch.empty(1, 2, 64, device="meta")
    for kernel in ("forward", "dkv"):
        static.launch(Case("sm_90", kernel, "bfloat16", 64, 64, 64, 64, 4, 1))
    backward.delta(rows, rows, numbers)
    merge.merge([rows, rows], [numbers, numbers])
    merge.merge_backward(rows, numbers, [rows, rows], [numbers, numbers])


def test_every_launch_asks_for_fused_multiply_adds():
    with triton.knobs.language.scope():
        triton.knobs.language.default_fp_fusion = False
        launches = static.launches(static.TARGETS["sm_90"], every_kernel)
    kernels = ["_forward", "_row_ranges", "_dkv", "_dq", "_delta", "_merge_kernel", "_merge_backward_kernel"]
    assert {name: options["enable_fp_fusion"] for name, (_, options) in launches.items()} == dict.fromkeys(
        kernels, True
    )


def test_bad_tiles_are_found():
    # Too few threads for the accumulator; two warp groups that do the same half of two products; Triton specialises 4 warps only.
    bad = [("forward", (128, 128, 4, 2)), ("dkv", (64, 64, 8, 1)), ("forward", (128, 128, 8, 2, True))]
    spilling, redundant, plain = static.measure_all(
        Case("sm_90", kernel, "bfloat16", 128, 128, *tile) for kernel, tile in bad
    )
    assert any("spills in its loop" in line for line in static.failures(spilling)), spilling
    assert any("arithmetic is 1.5 times the least" in line for line in static.failures(redundant)), redundant
    assert any("8 warps, 0 loops that only load" in line for line in static.failures(plain)), plain
