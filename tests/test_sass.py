"""Control flow, dominators, loops and instruction classes on listings small enough to check by eye."""

import pytest

from bench.sass import (
    COPY,
    EXP2,
    FMA,
    MATRIX,
    REGISTER_MOVE,
    SPILL,
    count,
    flops_per_warp,
    immediate_dominators,
    main_loops,
    natural_loops,
    parse_amdgcn,
    parse_sass,
    reverse_postorder,
)


def sass(*lines: str) -> str:
    """A listing as cuobjdump prints it, 16 bytes an instruction, its encoding in comments behind and below."""
    head = "\t.target\tsm_90a\n\n\t\tFunction : kernel\n"
    code = 50 * " " + "/* 0x000e620000000800 */\n"
    return head + "".join(
        f"        /*{16 * i:04x}*/ {line:>20} ;   /* 0x0000 */\n{code}" for i, line in enumerate(lines)
    )


# Two loops, the second inside a third, and a slow path that jumps back into straight code (0x90 -> 0x30).
NESTED = sass(
    "MOV R1, RZ",  # 0
    "@P0 BRA 0x90",  # 1 to the slow path
    "IADD3 R2, R2, 0x1, RZ",  # 2
    "FADD R3, R3, R2",  # 3 header of the outer loop
    "HMMA.16816.F32.BF16 R4, R8, R12, R4",  # 4 header of the inner loop
    "STL [R1], R9",  # 5
    "@!P1 BRA 0x40",  # 6 back edge
    "@!UP2 BRA 0x30",  # 7 back edge
    "EXIT",  # 8
    "BRA 0x30",  # 9
    "BRA 0xa0",  # 10 padding: never reached
)


def test_lines_become_instructions_with_successors():
    program = parse_sass(NESTED)
    assert [p.text.split()[0] for p in program][:4] == ["MOV", "BRA", "IADD3", "FADD"]
    assert [p.successors for p in program] == [
        (1,),
        (2, 9),
        (3,),
        (4,),
        (5,),
        (6,),
        (7, 4),
        (8, 3),
        (),
        (3,),
        (10,),
    ]


@pytest.mark.parametrize(
    ("line", "successors"),
    [
        ("BRA 0x30", (3,)),
        ("BRA.U 0x30", (3,)),
        ("@P0 BRA 0x30", (1, 3)),
        ("BRA P0, 0x30", (1, 3)),
        ("BRA.DIV UR4, 0x30", (1, 3)),
        ("BRA.U !UP0, 0x30", (1, 3)),
        ("EXIT", ()),
        ("@P3 EXIT", (1,)),
        ("RET.REL.NODEC R4 0x0", ()),
        ("CALL.REL.NOINC 0x30", (1,)),  # it comes back
        ("BSYNC B0", (1,)),
        ("@P0 LDG.E R2, [R4]", (1,)),
    ],
)
def test_jumps(line, successors):
    assert parse_sass(sass(line, "NOP", "NOP", "EXIT"))[0].successors == successors


def test_dominators():
    # The slow path (9) and the fast one (2) meet at 3: neither dominates it.
    program = parse_sass(NESTED)
    assert immediate_dominators(program, reverse_postorder(program)) == {
        0: 0,
        1: 0,
        2: 1,
        3: 1,
        4: 3,
        5: 4,
        6: 5,
        7: 6,
        8: 7,
        9: 1,
    }


def test_natural_loops_leave_out_the_slow_path_and_the_unreachable():
    assert natural_loops(parse_sass(NESTED)) == [frozenset(range(3, 8)), frozenset(range(4, 7))]


def test_back_edges_to_one_header_are_one_loop():
    program = parse_sass(sass("NOP", "@P0 BRA 0x30", "@P1 BRA 0x10", "@P2 BRA 0x10", "EXIT"))
    assert natural_loops(program) == [frozenset({1, 2, 3})]


def test_a_cycle_with_two_entries_is_no_natural_loop():
    program = parse_sass(sass("@P0 BRA 0x20", "NOP", "NOP", "@P1 BRA 0x10", "EXIT"))
    assert natural_loops(program) == []


def test_the_main_loop_is_the_innermost_with_arithmetic():
    (loop,) = main_loops(parse_sass(NESTED))
    assert [p.text.split()[0] for p in loop] == ["HMMA.16816.F32.BF16", "STL", "BRA"]
    assert count(SPILL, loop) == 1
    assert count(MATRIX, loop) == 1


def test_without_matrix_instructions_the_loops_with_fmas_count():
    program = parse_sass(sass("FFMA R1, R2, R3, R4", "@P0 BRA 0x0", "FADD R1, R1, R1", "@P0 BRA 0x20", "EXIT"))
    assert [[p.text.split()[0] for p in loop] for loop in main_loops(program)] == [["FFMA", "BRA"]]


def test_a_loop_of_fmas_does_not_count_beside_matrix_instructions():
    program = parse_sass(
        sass("FFMA R1, R2, R3, R4", "@P0 BRA 0x0", "HMMA.16816.F32 R4, R8, R12, R4", "@P0 BRA 0x20", "EXIT")
    )
    assert [loop[0].text.split()[0] for loop in main_loops(program)] == ["HMMA.16816.F32"]


AMDGCN = """\
\t.amdgcn_target "amdgpu9.42-amd-amdhsa-unknown-gfx942"
kernel:                                 ; @kernel
.Lfunc_begin0:
\ts_load_dwordx2 s[2:3], s[0:1], 0x0
\ts_cbranch_execz .LBB0_2
; %bb.1:
\t.loc\t1 53 9 is_stmt 1                ; kernel.py:53:9
\tv_mov_b32_e32 v1, 0                   ; a comment
.LBB0_2:                                ; =>This Inner Loop Header: Depth=1
\tv_mfma_f32_32x32x8_bf16 a[0:15], v[0:1], v[2:3], a[0:15]
\tv_exp_f32_e32 v4, v5
\tscratch_store_dword off, v7, off offset:16 ; 4-byte Folded Spill
\ts_cbranch_scc1 .LBB0_2
; %bb.3:
\ts_branch .LBB0_4
\tv_mov_b32_e32 v1, 0
.LBB0_4:
\ts_endpgm
    .vgpr_count:     250
"""


def test_amdgcn():
    program = parse_amdgcn(AMDGCN)
    assert [p.successors for p in program] == [(1,), (2, 3), (3,), (4,), (5,), (6,), (7, 3), (9,), (9,), ()]
    (loop,) = main_loops(program)
    assert [p.text.split()[0] for p in loop] == [
        "v_mfma_f32_32x32x8_bf16",
        "v_exp_f32_e32",
        "scratch_store_dword",
        "s_cbranch_scc1",
    ]
    assert [count(pattern, loop) for pattern in (MATRIX, EXP2, SPILL)] == [1, 1, 1]


@pytest.mark.parametrize(
    ("line", "flops"),
    [
        ("HGMMA.64x128x16.F32.BF16 R24, gdesc[UR8], RZ, !UPT", 2 * 64 * 128 * 16 / 4),  # four warps share one
        ("HMMA.16816.F32.BF16 R4, R8, R12, R4", 2 * 16 * 8 * 16),
        ("HMMA.1688.F32.TF32 R4, R8, R12, R4", 2 * 16 * 8 * 8),
        ("v_mfma_f32_16x16x16_f16 a[0:3], v[0:1], v[2:3], a[0:3]", 2 * 16 * 16 * 16),
        ("FFMA R1, R2, R3, R4", 2 * 32),
        ("FFMA2 R2, R4.F32x2.HI_LO, R6.F32x2.HI_LO, R2.F32x2.HI_LO", 2 * 64),
        ("UTCHMMA gdesc[UR4], gdesc[UR12], tmem[UR9], tmem[UR30], idesc[UR31], !UPT", 0),
        ("FADD R1, R2, R3", 0),
    ],
)
def test_flops_of_one_warp(line, flops):
    assert flops_per_warp(parse_sass(sass(line))[0]) == flops


@pytest.mark.parametrize(
    ("pattern", "inside", "outside"),
    [
        (MATRIX, "UTCHMMA gdesc[UR4]", "UTMALDG.2D [UR8]"),
        (EXP2, "MUFU.EX2 R1, R2", "MUFU.LG2 R1, R2"),
        (SPILL, "LDL.LU R5, [R1+0x4]", "LDGSTS.E [R1], [R2]"),
        (SPILL, "STL.64 [R1], R2", "STS [R1], R2"),
        (FMA, "FFMA.FTZ R1, R2, R3, R4", "FMUL R1, R2, R3"),
        (COPY, "UTMALDG.2D [UR8], [UR4]", "UTMASTG.2D [UR8], [UR4]"),
        (REGISTER_MOVE, "USETMAXREG.DEALLOC.CTAPOOL 0x18", "UMOV UR4, 0x18"),
    ],
)
def test_classes(pattern, inside, outside):
    assert [count(pattern, parse_sass(sass(line))) for line in (inside, outside)] == [1, 0]
