import os
import re
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

import ringattn as ra
from ringattn import same_host
from ringattn.testing import assert_matches, naive_attention
from ringattn.transport import (
    ProcessGroupTransport,
    VirtualTransport,
    VirtualWorld,
    _links,
    _waits_on_host,
    group_name,
    transports,
)
from tests import processes

OFFSETS = (1, 2, -1, -2)


def world_of(world_size):
    world = VirtualWorld(world_size)
    return world, [VirtualTransport(world, rank) for rank in range(world_size)]


def is_nan(tensor):
    return torch.equal(tensor.isnan(), torch.ones(tensor.shape, dtype=torch.bool))


# ---- W ranks in one process ---------------------------------------------------------------------------------------


def test_virtual_bytes_arrive_at_the_wait_and_not_before():
    _, (a, b) = world_of(2)
    sent, received = torch.tensor([1.0, 2.0, 3.0]), torch.zeros(3)
    send = a.exchange(1, sent, None)
    assert not send.ready()
    recv = b.exchange(1, None, received)
    assert (send.ready(), recv.ready()) == (True, True)
    assert is_nan(received)
    sent[0] = 7.0  # written before anybody waited: the receiver gets what is there at the wait
    recv.wait()
    assert received.tolist() == [7.0, 2.0, 3.0]
    sent.fill_(0.0)
    send.wait()
    assert received.tolist() == [7.0, 2.0, 3.0]


def test_virtual_a_senders_wait_moves_the_bytes_too():
    _, (a, b) = world_of(2)
    sent, received = torch.tensor([1.0, 2.0]), torch.zeros(2)
    b.exchange(1, None, received)
    a.exchange(1, sent, None).wait()
    assert received.tolist() == [1.0, 2.0]


def test_virtual_messages_between_two_ranks_match_by_order():
    _, (a, b) = world_of(2)
    first, second, third = (torch.full((2,), x) for x in (1.0, 2.0, 3.0))
    received = [torch.zeros(2) for _ in range(3)]
    sends = [a.exchange(1, x, None) for x in (first, second)]
    recvs = [b.exchange(1, None, x) for x in received]  # the third is posted before it is sent
    assert [recv.ready() for recv in recvs] == [True, True, False]
    recvs[1].wait()
    assert is_nan(received[0])
    assert received[1].tolist() == [2.0, 2.0]
    sends.append(a.exchange(1, third, None))
    for handle in (*recvs, *sends):
        handle.wait()
    assert [x.tolist() for x in received] == [[1.0, 1.0], [2.0, 2.0], [3.0, 3.0]]


@pytest.mark.parametrize("offset", OFFSETS)
def test_virtual_offset_is_where_a_message_goes(offset):
    world_size = 5
    _, ranks = world_of(world_size)
    received = [torch.zeros(1) for _ in ranks]
    handles = [t.exchange(offset, torch.tensor([float(t.rank)]), received[t.rank]) for t in ranks]
    for handle in handles:
        handle.wait()
    assert [int(x) for x in received] == [(rank - offset) % world_size for rank in range(world_size)]


@pytest.mark.parametrize(
    ("received", "message"),
    [
        (torch.zeros(2), "3 elements of torch.float32 were sent and 2 of torch.float32 awaited; both ends must agree."),
        (
            torch.zeros(3, dtype=torch.float64),
            "3 elements of torch.float32 were sent and 3 of torch.float64 awaited; both ends must agree.",
        ),
    ],
)
def test_virtual_refuses_ends_that_differ(received, message):
    _, (a, b) = world_of(2)
    a.exchange(1, torch.zeros(3), None)
    handle = b.exchange(1, None, received)
    with pytest.raises(RuntimeError, match=re.escape(f"virtual transport: {message}")):
        handle.wait()


def test_virtual_writes_events_down_where_asked():
    world = VirtualWorld(2, timeline=ra.Timeline())
    a, b = (VirtualTransport(world, rank) for rank in range(2))
    a.exchange(1, torch.zeros(1), None)
    with b.span("compute", 0):
        pass
    b.exchange(1, None, torch.zeros(1)).wait()
    assert world.timeline.order == [(0, "post", 1), (1, "compute", 0), (1, "post", 1), (1, "wait", 1)]


def test_virtual_needs_a_rank():
    with pytest.raises(ValueError, match=r"virtual: world_size is 0; it must be at least 1\."):
        VirtualWorld(0)


def test_a_virtual_ring_that_is_gone_is_refused():
    world = VirtualWorld(2)
    name = world.name
    assert [t.rank for t in transports(name)] == [0, 1]
    del world
    with pytest.raises(
        RuntimeError, match=f"the virtual ring {name} is gone; keep the object that virtual\\(\\) returned"
    ):
        transports(name)


# ---- groups by name -----------------------------------------------------------------------------------------------


def test_a_ring_of_one_needs_no_group():
    assert group_name(None) == ""
    ((transport),) = transports("")
    assert (transport.rank, transport.world_size) == (0, 1)
    world = VirtualWorld(3)
    assert group_name(world) == world.name


@pytest.mark.parametrize("group", ["cp", 2, [0, 1]])
def test_other_types_of_group_are_refused(group):
    message = f"group is a {type(group).__name__}; it must be a ProcessGroup, a one-dimensional DeviceMesh or None."
    with pytest.raises(ValueError, match=re.escape(message)):
        group_name(group)
    x = torch.zeros(1, 2, 1, 2)
    with pytest.raises(ValueError, match=re.escape(message)):
        ra.ring_attention(x, x, x, group=group)


def name_groups(rank, world_size):
    mesh = init_device_mesh("cpu", (1, world_size), mesh_dim_names=("dp", "cp"))
    with pytest.raises(ValueError) as info:  # noqa: PT011
        group_name(mesh)
    same = group_name(mesh["cp"]) == group_name(mesh.get_group("cp"))
    return str(info.value), same


def test_a_mesh_needs_one_axis():
    for message, same in processes.run(3, name_groups):
        assert message == "group is a mesh with the axes ('dp', 'cp'); it must have one. Pass mesh['cp']."
        assert same


# ---- one process a rank -------------------------------------------------------------------------------------------


def length(source, target):
    """How much `source` sends to `target`: uneven, and sometimes nothing."""
    return (source * target + source) % 4


def group_over(path):
    """All ranks, with messages over gloo or from memory to memory."""
    os.environ["RINGATTN_SAME_HOST"] = str(int(path == "memory"))
    group = dist.new_group()
    ProcessGroupTransport(group).connect(torch.device("cpu"))
    del os.environ["RINGATTN_SAME_HOST"]
    assert (_links[group] is not None) == (path == "memory")
    return group


PATHS = ("memory", "gloo")


def exchange(rank, world_size, path):
    """What each exchange brought, two rounds in a row so that messages between two ranks have to match by order."""
    timeline = ra.Timeline()
    transport = ProcessGroupTransport(group_over(path), timeline=timeline)
    got, handles = {}, []
    for turn in range(2):
        for offset in OFFSETS:
            target, source = (rank + offset) % world_size, (rank - offset) % world_size
            n_send, n_recv = length(rank, target), length(source, rank)
            send = torch.full((n_send,), 100.0 * turn + 10 * rank + offset) if n_send else None
            recv = torch.full((n_recv,), torch.nan) if n_recv else None
            handles.append(transport.exchange(offset, send, recv))
            got[turn, offset] = recv
            assert handles[-1].ready()
    for handle in handles:
        handle.wait()
    return got, timeline.order


@pytest.mark.parametrize("path", PATHS)
def test_processes_exchange_in_both_directions(path):
    world_size = 3
    sizes = set()
    for rank, (got, events) in enumerate(processes.run(world_size, exchange, path)):
        for (turn, offset), recv in got.items():
            source = (rank - offset) % world_size
            n = length(source, rank)
            sizes.add(n)
            assert ([] if recv is None else recv.tolist()) == [100.0 * turn + 10 * source + offset] * n
        assert events == [(rank, what, offset) for what in ("post", "wait") for offset in OFFSETS * 2]
    assert sizes == {0, 1, 2, 3}


def exchange_in_a_part(rank, world_size):
    group = dist.new_group([2, 0])
    if rank == 1:
        return None
    transport = ProcessGroupTransport(group)
    received = torch.full((2,), torch.nan)
    transport.exchange(1, torch.full((2,), float(rank)), received).wait()
    return transport.rank, transport.world_size, received.tolist()


def test_ranks_are_those_of_the_group():
    first, none, last = processes.run(3, exchange_in_a_part)
    assert none is None
    assert {first[0], last[0]} == {0, 1}
    assert (first[1:], last[1:]) == ((2, [2.0, 2.0]), (2, [0.0, 0.0]))


def attend_in_groups(rank, world_size, q):
    """What rings whose backend has another name than gloo give, and whether a wait is bounded there."""
    results = []
    for backend in (None, "cpu:gloo", "cpu:gloo,cuda:gloo"):
        group = dist.new_group(backend=backend)
        out = ra.ring_attention(*[ra.shard(q, group=group)] * 3, group=group, timeout=30)
        results.append((ra.unshard(out, group=group), _waits_on_host(group, "cpu")))
    return results


def test_a_group_is_known_by_its_backend_for_the_device_and_not_by_a_name():
    q = torch.randn(1, 8, 2, 4, dtype=torch.float64)
    want = naive_attention(q, q, q, ra.Causal())
    for results in processes.run(2, attend_in_groups, q):
        assert [is_timed for _, is_timed in results] == [True] * 3
        for out, _ in results:
            assert_matches(out, want, rtol=1e-12)


def begin_again_with_fewer(rank, world_size, rendezvous, q):
    ra.ring_attention(*[ra.shard(q, group=dist.group.WORLD)] * 3, group=dist.group.WORLD)
    before = dist.group.WORLD.group_name
    dist.destroy_process_group()
    if rank == 2:
        return None
    dist.init_process_group("gloo", init_method=f"file://{rendezvous}", rank=rank, world_size=2)
    out = ra.ring_attention(*[ra.shard(q, group=dist.group.WORLD)] * 3, group=dist.group.WORLD, timeout=30)
    return before == dist.group.WORLD.group_name, ra.unshard(out, group=dist.group.WORLD)


def test_a_new_group_of_an_old_name_is_another_group(tmp_path):
    q = torch.randn(1, 12, 2, 4, dtype=torch.float64)
    want = naive_attention(q, q, q, ra.Causal())
    *results, none = processes.run_fresh(3, begin_again_with_fewer, str(tmp_path / "rendezvous"), q)
    assert none is None
    for same_name, out in results:
        assert same_name
        assert_matches(out, want, rtol=1e-12)


def wait_in_vain(rank, world_size, path):
    """Rank 1 never sends."""
    messages = []
    groups = [group_over(path) for _ in range(2)]
    if rank == 0:
        for group, offset in zip(groups, (1, -1), strict=True):
            transport = ProcessGroupTransport(group, timeout=0.5)
            try:
                transport.exchange(offset, None, torch.zeros(1)).wait()
            except RuntimeError as error:
                messages.append(str(error))
    return messages


@pytest.mark.parametrize("path", PATHS)
def test_a_wait_that_times_out_says_for_whom_and_where(path):
    messages, _ = processes.run_fresh(2, wait_in_vain, path)
    hop, home = messages
    assert hop.startswith("ring_attention: rank 0 of 2 failed receiving from rank 1 on hop 1 (limit 0.5 s): ")
    assert home.startswith(
        "ring_attention: rank 0 of 2 failed receiving from rank 1 on the gradients' way home of hop 1"
    )
    for message in messages:
        assert message.endswith("that rank died, left, or hangs. Look at its log first.")


def differ(rank, world_size):
    transport = ProcessGroupTransport(group_over("memory"), timeout=5)
    try:
        transport.exchange(1, torch.zeros(3 + rank), torch.zeros(3 + rank)).wait()
    except RuntimeError as error:
        return str(error)


def test_ends_that_differ_are_refused():
    said = processes.run_fresh(2, differ)
    for rank, message in enumerate(said):
        assert f"rank {rank} of 2 failed receiving from rank {1 - rank} on hop 1 (limit 5 s): " in message
    assert any(re.search(r"\d+ bytes were sent and \d+ awaited; both ends must agree", m) for m in said)


def one_opts_out(rank, world_size):
    os.environ["RINGATTN_SAME_HOST"] = str(int(rank != 1))
    group = dist.new_group()
    ProcessGroupTransport(group).connect(torch.device("cpu"))
    return _links[group] is None


def one_may_not_read(rank, world_size):
    def refuse(*args):
        raise PermissionError("not permitted")

    group = dist.new_group()
    with mock.patch.object(same_host, "_read", refuse if rank == 1 else same_host._read):
        ProcessGroupTransport(group).connect(torch.device("cpu"))
    return _links[group] is None


@pytest.mark.parametrize("reason", [one_opts_out, one_may_not_read])
def test_all_ranks_leave_messages_to_gloo_where_one_must(reason):
    assert processes.run_fresh(3, reason) == [True] * 3


def attend_without_work_on_the_first_hop(rank, world_size, path, q):
    group = group_over(path)
    out = ra.ring_attention(
        *[ra.shard(q, "contiguous", group)] * 3, mask=FAR, layout="contiguous", group=group, timeout=30
    )
    return ra.unshard(out, "contiguous", group)


FAR = ra.Documents((0, 8, 9, 16))  # of four ranks only the first pair and the last exchange anything


@pytest.mark.parametrize("path", PATHS)
def test_a_rank_without_work_on_a_hop_hangs_nobody(path):
    q = torch.randn(1, 16, 2, 4, dtype=torch.float64)
    for out in processes.run(4, attend_without_work_on_the_first_hop, path, q):
        assert_matches(out, naive_attention(q, q, q, FAR), rtol=1e-12)


def attend(rank, world_size, q, k, v):
    mesh = init_device_mesh("cpu", (world_size,), mesh_dim_names=("cp",))
    shards = (ra.shard(x, group=mesh) for x in (q, k, v))
    out = ra.ring_attention(*shards, group=mesh, seqlen=q.shape[1])
    return ra.unshard(out, group=mesh, seqlen=q.shape[1])


def test_ring_attention_takes_a_mesh():
    q, k, v = torch.randn(3, 1, 11, 2, 4, dtype=torch.float64)
    want = naive_attention(q, k, v, ra.Causal())
    for out in processes.run(3, attend, q, k, v):
        assert_matches(out, want, rtol=1e-12)
