import os
import re
import time
from unittest import mock

import pytest
import torch
import torch.distributed as dist

import ringattn as ra
from ringattn.testing import assert_matches, naive_attention, virtual
from ringattn.transport import ProcessGroupTransport
from tests import processes

B, N, H, HKV, D = 2, 8, 4, 2, 8


def zeros(*shape, dtype=torch.float32):
    return torch.zeros(shape, dtype=dtype)


Q, K, V = zeros(B, N, H, D), zeros(B, N, HKV, D), zeros(B, N, HKV, D)
SHAPES = "batch and length must be the same in all, and heads in k and v. Queries and keys are shards of one sequence."

# what is passed instead of the right thing, and the error
REFUSALS = {
    "dims of q": (
        {"q": zeros(N, H, D)},
        ValueError,
        "ring_attention: q has shape (8, 4, 8); it must be [B, S, H, D].",
    ),
    "dims of v": (
        {"v": zeros(1, B, N, HKV, D)},
        ValueError,
        "ring_attention: v has shape (1, 2, 8, 2, 8); it must be [B, S, H, D].",
    ),
    "dtypes differ": (
        {"k": K.half()},
        ValueError,
        "ring_attention: k is torch.float16 on cpu and q is torch.float32 on cpu; they must agree.",
    ),
    "integers": (
        {"q": Q.int(), "k": K.int(), "v": V.int()},
        ValueError,
        "ring_attention: q is torch.int32; it must be one of torch.float64, torch.float32, torch.bfloat16, torch.float16.",
    ),
    "no heads": (
        {"k": zeros(B, N, 0, D), "v": zeros(B, N, 0, D)},
        ValueError,
        "ring_attention: k has shape (2, 8, 0, 8); heads and head dim must be at least 1.",
    ),
    "head dim 0": (
        {"v": zeros(B, N, HKV, 0)},
        ValueError,
        "ring_attention: v has shape (2, 8, 2, 0); heads and head dim must be at least 1.",
    ),
    "head counts": (
        {"k": zeros(B, N, 3, D), "v": zeros(B, N, 3, D)},
        ValueError,
        "ring_attention: k has 3 heads and q has 4; q's heads must be a multiple of k's.",
    ),
    "more heads in k": (
        {"k": zeros(B, N, 8, D), "v": zeros(B, N, 8, D)},
        ValueError,
        "ring_attention: k has 8 heads and q has 4; q's heads must be a multiple of k's.",
    ),
    "heads of v": (
        {"v": zeros(B, N, 1, D)},
        ValueError,
        f"ring_attention: q, k, v have shapes (2, 8, 4, 8), (2, 8, 2, 8), (2, 8, 1, 8); {SHAPES}",
    ),
    "head dims": (
        {"k": zeros(B, N, HKV, 5)},
        ValueError,
        "ring_attention: k has head dim 5 and q has 8; they must be equal.",
    ),
    "batch of k": (
        {"k": zeros(1, N, HKV, D)},
        ValueError,
        f"ring_attention: q, k, v have shapes (2, 8, 4, 8), (1, 8, 2, 8), (2, 8, 2, 8); {SHAPES}",
    ),
    "length of k and v": (
        {"k": zeros(B, 9, HKV, D), "v": zeros(B, 9, HKV, D)},
        ValueError,
        f"ring_attention: q, k, v have shapes (2, 8, 4, 8), (2, 9, 2, 8), (2, 9, 2, 8); {SHAPES}",
    ),
    "length of v": (
        {"v": zeros(B, 7, HKV, D)},
        ValueError,
        f"ring_attention: q, k, v have shapes (2, 8, 4, 8), (2, 8, 2, 8), (2, 7, 2, 8); {SHAPES}",
    ),
    "shape of sinks": (
        {"sinks": zeros(HKV)},
        ValueError,
        "ring_attention: sinks is torch.float32 (2,) on cpu; it must be floating point [4] on cpu.",
    ),
    "dtype of sinks": (
        {"sinks": zeros(H, dtype=torch.int64)},
        ValueError,
        "ring_attention: sinks is torch.int64 (4,) on cpu; it must be floating point [4] on cpu.",
    ),
    "softmax_scale": (
        {"softmax_scale": float("inf")},
        ValueError,
        "ring_attention: softmax_scale is inf; it must be finite.",
    ),
    "softcap 0": (
        {"softcap": 0.0},
        ValueError,
        "ring_attention: softcap is 0.0; it must be positive, or None for no cap.",
    ),
    "softcap infinite": (
        {"softcap": float("inf")},
        ValueError,
        "ring_attention: softcap is inf; it must be positive, or None for no cap.",
    ),
    "dropout 1": (
        {"dropout_p": 1.0, "seed": 0},
        ValueError,
        "ring_attention: dropout_p is 1.0; it must be at least 0 and below 1.",
    ),
    "dropout below 0": (
        {"dropout_p": -0.5, "seed": 0},
        ValueError,
        "ring_attention: dropout_p is -0.5; it must be at least 0 and below 1.",
    ),
    "dropout without seed": (
        {"dropout_p": 0.1},
        ValueError,
        "ring_attention: dropout_p is 0.1 and seed None; a seed, the same on every rank, is required.",
    ),
    "timeout": (
        {"timeout": 0},
        ValueError,
        "ring_attention: timeout is 0.0; it must be positive seconds, or None for the group's own.",
    ),
    "deterministic": (
        {"deterministic": "always"},
        ValueError,
        "ring_attention: deterministic is 'always'; it must be False or 'bitwise'.",
    ),
    "layout unknown": (
        {"layout": "spiral"},
        ValueError,
        "layout is 'spiral'; it must be one of 'contiguous', 'zigzag', 'striped', or a value such as per_document(...).",
    ),
    "layout of another type": (
        {"layout": 3},
        ValueError,
        "ring_attention: layout is 3; it must be a name or a value such as ringattn.per_document(...).",
    ),
    "layout for another length": (
        {"layout": ra.per_document((0, 3, 9))},
        ValueError,
        "per_document: its documents have 9 tokens and the sequence 8; they must agree.",
    ),
    "backend unknown": (
        {"backend": "abacus"},
        ValueError,
        "ring_attention: backend is 'abacus'; it must be 'auto' or one of 'cpu', 'triton', 'reference'",
    ),
    "mask is no mask": (
        {"mask": "causal"},
        ValueError,
        "ring_attention: mask is 'causal'; it must be a mask such as ringattn.Causal().",
    ),
    "mask for another length": (
        {"mask": ra.Documents((0, 4, 9))},
        ValueError,
        "mask Documents is for 9 tokens and the sequence has 8; they must agree.",
    ),
    "mask for another batch": (
        {"mask": ra.Rows(ra.Causal(), ra.Full(), ra.Causal())},
        ValueError,
        "ring_attention: mask Rows is for a batch of 3 and q has 2 rows; they must agree.",
    ),
    "mask whose bounds fall": (
        {"mask": ra.Bounds(torch.arange(N).flip(0), torch.full((N,), N))},
        ValueError,
        "Bounds: lo falls from 7 at row 0 to 6 at row 1; over the rows that see something it must not decrease. Split the mask",
    ),
    "rows that do not fit the layout": (
        {"seqlen": 9},
        ValueError,
        "ring_attention: q has 8 rows on rank 0, and layout 'zigzag' gives rank 0 of 1 9 of seqlen 9; they must agree. "
        "Make shards with ringattn.shard, and pass seqlen where their lengths differ.",
    ),
    "length below 0": (
        {"seqlen": -1},
        ValueError,
        "build_plan: seqlen -1, world_size 1, rank 0; needs seqlen >= 0 and 0 <= rank < world_size.",
    ),
}


def attend(*, q=Q, k=K, v=V, **kwargs):
    return ra.ring_attention(q, k, v, **kwargs)


@pytest.mark.parametrize("name", REFUSALS)
def test_what_is_wrong_is_refused_with_its_value_and_the_remedy(name):
    wrong, error, message = REFUSALS[name]
    attend()
    with pytest.raises(error, match=re.escape(message)) as info:
        attend(**wrong)
    assert type(info.value) is error


def test_a_virtual_ring_needs_a_shard_for_each_rank():
    ring = virtual(3)
    q = ring.shard(zeros(1, 6, 1, 4))
    with pytest.raises(ValueError, match=r"got 3, 2, 3 shards of q, k, v for 3 ranks; one each is needed\."):
        ring.attention(q, q[:2], q)


def test_a_virtual_ring_compares_its_ranks_too():
    ring = virtual(2)
    q = ring.shard(zeros(1, 6, 1, 4))
    wide = [q[0], q[1].double()]
    message = "ring_attention: ranks disagree on dtype: torch.float32 on rank 0; torch.float64 on rank 1; every rank must pass the same."
    with pytest.raises(ValueError, match=re.escape(message)):
        ring.attention(wide, wide, wide)
    assert ring.timeline.order == []


# ---- over processes -----------------------------------------------------------------------------------------------

SAME = "every rank must pass the same."

# what rank 1 of 3 passes that the others do not, and what all say
ODD = {
    "softcap wrong": (
        {"softcap": -1.0},
        "ValueError",
        r"ring_attention: softcap is -1\.0; it must be positive, or None for no cap\. \(found on rank 1 of 3\)",
    ),
    "sinks wrong": (
        {"sinks": torch.zeros(3)},
        "ValueError",
        r"ring_attention: sinks is torch\.float32 \(3,\) on cpu; it must be .* on cpu\. \(found on rank 1 of 3\)",
    ),
    "layout unknown": (
        {"layout": "spiral"},
        "ValueError",
        r"layout is 'spiral'; it must be one of .* \(found on rank 1 of 3\)",
    ),
    "layout": (
        {"layout": "striped"},
        "ValueError",
        rf"ring_attention: ranks disagree on layout: zigzag on ranks 0, 2; striped on rank 1; {SAME}",
    ),
    "layout value": (
        {"layout": ra.per_document((0, 12))},
        "ValueError",
        rf"ring_attention: ranks disagree on layout: zigzag on ranks 0, 2; [0-9a-f]{{16}} on rank 1; {SAME}",
    ),
    "mask": (
        {"mask": ra.Window(2)},
        "ValueError",
        r"ring_attention: ranks disagree on mask: Causal\(\) #[0-9a-f]{16} on ranks 0, 2; "
        rf"Window\(left=2, right=0\) #[0-9a-f]{{16}} on rank 1; {SAME}",
    ),
    "softcap": (
        {"softcap": 2.0},
        "ValueError",
        rf"ring_attention: ranks disagree on options: .*softcap=None.* on ranks 0, 2; .*softcap=2\.0.* on rank 1; {SAME}",
    ),
    "deterministic": (
        {"deterministic": "bitwise"},
        "ValueError",
        rf"ring_attention: ranks disagree on deterministic: False on ranks 0, 2; bitwise on rank 1; {SAME}",
    ),
    "message longer than a card": (
        {"layout": "é" * 2000},
        "ValueError",
        r"layout is 'é{100,} \(found on rank 1 of 3\)",
    ),
    "mask for another length": (
        {"mask": ra.Documents((0, 4, 9))},
        "ValueError",
        r"build_plan: mask Documents is for 9 tokens and the sequence has 12; they must agree\. \(found on rank 1 of 3\)",
    ),
    "head count": (
        {"heads": 3},
        "ValueError",
        r"ring_attention: k has 2 heads and q has 3; q's heads must be a multiple of k's\. \(found on rank 1 of 3\)",
    ),
    "shards of other lengths without seqlen": (
        {"rows": 3},
        "ValueError",
        rf"ring_attention: ranks disagree on seqlen: 12 on ranks 0, 2; 9 on rank 1; {SAME}",
    ),
    "sinks on one rank only": (
        {"sinks": torch.zeros(H, dtype=torch.float64)},
        "ValueError",
        rf"ring_attention: ranks disagree on sinks: none on ranks 0, 2; torch\.float64 on rank 1; {SAME}",
    ),
    "seqlen": (
        {"seqlen": 13},  # rank 1 holds four of 13 as it does of 12
        "ValueError",
        rf"ring_attention: ranks disagree on seqlen: 12 on ranks 0, 2; 13 on rank 1; {SAME}",
    ),
    "dtype": (
        {"dtype": torch.float32},
        "ValueError",
        rf"ring_attention: ranks disagree on dtype: torch\.float64 on ranks 0, 2; torch\.float32 on rank 1; {SAME}",
    ),
    "batch": (
        {"batch": 1},
        "ValueError",
        rf"ring_attention: ranks disagree on batch: 2 on ranks 0, 2; 1 on rank 1; {SAME}",
    ),
    "sinks": (
        {"sinks": torch.zeros(H)},
        "ValueError",
        rf"ring_attention: ranks disagree on sinks: none on ranks 0, 2; torch\.float32 on rank 1; {SAME}",
    ),
    "heads": (
        {"kv_heads": 1},
        "ValueError",
        rf"ring_attention: ranks disagree on heads of q and k: 4, 2 on ranks 0, 2; 4, 1 on rank 1; {SAME}",
    ),
    "head dim of v": (
        {"v_head_dim": 3},
        "ValueError",
        rf"ring_attention: ranks disagree on head dims of q and v: 8, 8 on ranks 0, 2; 8, 3 on rank 1; {SAME}",
    ),
}


def attend_to_odd(rank, world_size, q, k, v, names):
    """What this rank raised where rank 1 is odd, and how many messages moved; then the result of a right call."""
    group = dist.group.WORLD
    mine = [ra.shard(x, group=group) for x in (q, k, v)]
    said = {}
    exchange = ProcessGroupTransport.exchange
    with mock.patch.object(ProcessGroupTransport, "exchange", autospec=True, side_effect=exchange) as move:
        for name in names:
            kwargs = dict(ODD[name][0]) if rank == 1 else {}
            batch, kv_heads, v_dim = kwargs.pop("batch", B), kwargs.pop("kv_heads", HKV), kwargs.pop("v_head_dim", D)
            dtype = kwargs.pop("dtype", q.dtype)
            odd = [x[:batch, : kwargs.get("rows")].to(dtype) for x in mine]
            odd = [odd[0][:, :, : kwargs.pop("heads", H)], odd[1][:, :, :kv_heads], odd[2][:, :, :kv_heads, :v_dim]]
            kwargs.pop("rows", None)
            try:
                ra.ring_attention(*odd, group=group, timeout=30, **kwargs)
            except (ValueError, NotImplementedError) as error:
                said[name] = (type(error).__name__, str(error))
        moved = move.call_count
        out = ra.ring_attention(*mine, group=group, timeout=30)
        assert move.call_count > moved
    return said, moved, ra.unshard(out, group=group)


def test_what_one_rank_does_wrong_every_rank_says_and_the_group_lives_on():
    q, k, v = (torch.randn(B, 12, h, D, dtype=torch.float64) for h in (H, HKV, HKV))
    want = naive_attention(q, k, v, ra.Causal())
    results = processes.run(3, attend_to_odd, q, k, v, list(ODD))
    for said, moved, out in results:
        assert said == results[0][0]
        assert moved == 0
        assert_matches(out, want, rtol=1e-12)
    for name, (_, kind, message) in ODD.items():
        assert results[0][0][name][0] == kind, name
        assert re.fullmatch(message, results[0][0][name][1]), results[0][0][name][1]


def attend_wrongly(rank, world_size):
    x = zeros(1, 4, 2, 8)
    ra.ring_attention(x, x, x, group=dist.group.WORLD, timeout=30, softcap=-1.0 if rank == 2 else None)


def test_an_error_ends_every_rank():
    with pytest.raises(processes.WorkerError) as info:
        processes.run(3, attend_wrongly)
    message = "ring_attention: softcap is -1.0; it must be positive, or None for no cap. (found on rank 2 of 3)"
    assert {rank: error[:2] for rank, error in info.value.errors.items()} == dict.fromkeys(
        range(3), ("ValueError", message)
    )


def two_are_wrong(rank, world_size):
    x = zeros(1, 4, 2, 8)
    try:
        ra.ring_attention(x, x, x, group=dist.group.WORLD, timeout=30, softcap=-float(rank) if rank else None)
    except ValueError as error:
        same = str(error)
    try:
        ra.ring_attention(x, x, x, group=dist.group.WORLD, timeout=30, softcap=-1.0)
    except ValueError as error:
        return same, str(error)


def test_of_several_errors_every_rank_says_the_first():
    rule = "it must be positive, or None for no cap."
    for first, shared in processes.run(3, two_are_wrong):
        assert first == f"ring_attention: softcap is -1.0; {rule} (found on rank 1 of 3)"
        assert shared == f"ring_attention: softcap is -1.0; {rule}"


# ---- ranks that die -----------------------------------------------------------------------------------------------

TIMEOUT_S = 5.0


def attend_beside_the_dying(rank, world_size, when, validate):
    """Rank 1 dies; the others return what they raised and after how long."""
    q, k, v = (torch.randn(1, 4, 2, 8, requires_grad=True) for _ in range(3))
    if rank == 1 and when == "before":
        os._exit(3)
    began = time.monotonic()
    try:
        out = ra.ring_attention(q, k, v, mask=ra.Full(), group=dist.group.WORLD, timeout=TIMEOUT_S, validate=validate)
        if when == "between":
            dist.barrier()
            if rank == 1:
                os._exit(3)
            began = time.monotonic()
            out.sum().backward()
    except RuntimeError as error:
        return str(error), time.monotonic() - began


@pytest.mark.parametrize(("when", "validate"), [("before", True), ("before", False), ("between", True)])
def test_ranks_beside_one_that_died_raise_in_time(when, validate):
    first, died, last = processes.run_fresh(3, attend_beside_the_dying, when, validate)
    assert died == processes.Exit(3)
    for rank, (message, elapsed_s) in ((0, first), (2, last)):
        assert elapsed_s < TIMEOUT_S + 5
        if when == "before" and validate:
            want = rf"ring_attention: rank {rank} of 3 got no answer from rank 1 before hop 0: .*; that rank died, left, or makes another "
            want += r"call\. Look at its log first\."
        else:
            want = rf"ring_attention: rank {rank} of 3 failed (sending to|receiving from) rank \d.* on (the gradients' way home of )?hop [12]( of pass [12] "
            want += r"over its group)? \(limit 5 s\): .*; that rank died, left, or hangs\. Look at its log first\."
        assert re.fullmatch(want, message), message
