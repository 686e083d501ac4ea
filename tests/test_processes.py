"""The harness itself: results by rank, errors of each rank, hangs, deaths, and that processes are used again."""

import os
import signal
import time

import pytest
import torch
import torch.distributed as dist

from tests import processes


def gather(rank, world_size, x):
    out = [torch.zeros(()) for _ in range(world_size)]
    dist.all_gather(out, torch.tensor(10.0 * rank))
    return {"rank": rank, "all": torch.stack(out), "x": x + rank}


def pid(rank, world_size):
    return os.getpid()


def fail_on(rank, world_size, ranks):
    if rank in ranks:
        raise ValueError(f"rank {rank} objects")
    dist.barrier()


def hang_on(rank, world_size, hanging):
    if rank == hanging:
        time.sleep(600)
    return rank


def die_on(rank, world_size, dying):
    if rank == dying:
        os.kill(os.getpid(), signal.SIGKILL)
    return rank


def unsendable(rank, world_size):
    return lambda: None


def empties(rank, world_size):
    x = torch.zeros(3)
    return [torch.empty(3), torch.empty_like(x), x.new_empty(3), torch.empty(3, dtype=torch.bfloat16)]


@torch.library.custom_op("ringattn_tests::empty_like", mutates_args=())
def empty_like(x: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(x)


def threads_and_draw(rank, world_size):
    return torch.get_num_threads(), torch.rand(2)


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_results_come_by_rank(world_size):
    x = torch.arange(3.0)
    results = processes.run(world_size, gather, x)
    assert [result["rank"] for result in results] == list(range(world_size))
    for rank, result in enumerate(results):
        torch.testing.assert_close(result["all"], 10 * torch.arange(float(world_size)), rtol=0, atol=0)
        torch.testing.assert_close(result["x"], x + rank, rtol=0, atol=0)


def test_processes_are_used_again():
    first = processes.run(2, pid)
    assert len({*first, os.getpid()}) == 3
    assert processes.run(2, pid) == first == processes.pids(2)


@pytest.mark.parametrize("ranks", [(1,), (0, 1)])
def test_an_error_comes_with_its_rank_and_traceback(ranks, monkeypatch):
    monkeypatch.setattr(processes, "GRACE_S", 1.0)
    before = processes.run(2, pid)
    with pytest.raises(
        processes.WorkerError, match=rf"(?s)fail_on failed .*ValueError: rank {ranks[0]} objects"
    ) as info:
        processes.run(2, fail_on, ranks)
    for rank in ranks:
        name, message, trace = info.value.errors[rank]
        assert (name, message) == ("ValueError", f"rank {rank} objects")
        assert "in fail_on" in trace
    assert set(processes.run(2, pid)).isdisjoint(before)


def test_a_hang_ends_at_the_timeout():
    began = time.monotonic()
    with pytest.raises(processes.WorkerError, match="TimeoutError: still running") as info:
        processes.run(2, hang_on, 1, timeout=1)
    assert list(info.value.errors) == [1]
    assert time.monotonic() - began < 30
    assert processes.run(2, hang_on, None) == [0, 1]


def test_a_dead_worker_is_reported_with_its_exit_code():
    with pytest.raises(processes.WorkerError, match="ProcessDied: exit code -9") as info:
        processes.run(2, die_on, 0)
    assert info.value.errors == {0: ("ProcessDied", "exit code -9", "")}
    assert processes.run(2, die_on, None) == [0, 1]


def test_a_worker_that_died_between_jobs_is_replaced():
    before = processes.run(2, pid)
    os.kill(before[1], signal.SIGKILL)
    deadline = time.monotonic() + 10
    while processes._pools[2].is_alive() and time.monotonic() < deadline:
        time.sleep(0.01)
    assert set(processes.run(2, pid)).isdisjoint(before)


def test_fresh_processes_are_new_and_leave_the_pool_alone():
    pool = processes.run(2, pid)
    first, second = processes.run_fresh(2, pid), processes.run_fresh(2, pid)
    assert len({*pool, *first, *second}) == 6
    assert processes.run(2, pid) == pool


def test_fresh_processes_give_a_result_or_an_exit_for_each_rank():
    assert processes.run_fresh(3, die_on, 1) == [0, processes.Exit(-9), 2]
    assert processes.run_fresh(2, hang_on, 0, timeout=10) == [processes.Exit(None), 1]
    outcomes = processes.run_fresh(2, fail_on, (0, 1))
    assert [outcome.error[:2] for outcome in outcomes] == [("ValueError", f"rank {rank} objects") for rank in range(2)]


def test_a_result_that_cannot_be_sent_is_an_error():
    with pytest.raises(processes.WorkerError, match=r"(?i)pickle"):
        processes.run(1, unsendable)


def test_a_function_that_workers_cannot_import_is_refused():
    with pytest.raises(ValueError, match=r"<lambda> is not at module level; move it there, workers import it\."):
        processes.run(1, lambda rank, world_size: rank)


def test_unwritten_memory_is_nan_here_and_in_workers():
    here = [*empties(0, 1), empty_like(torch.zeros(3)), torch.empty_strided((3,), (1,)), torch.empty(0).resize_(3)]
    for tensor in here + [tensor for result in processes.run(2, empties) for tensor in result]:
        torch.testing.assert_close(tensor.float(), torch.full((3,), torch.nan), rtol=0, atol=0, equal_nan=True)


def test_each_job_starts_with_one_thread_and_the_same_seed():
    first, second = processes.run(2, threads_and_draw), processes.run(2, threads_and_draw)
    torch.manual_seed(0)
    draw = torch.rand(2)
    for threads, x in first + second:
        assert threads == 1
        torch.testing.assert_close(x, draw, rtol=0, atol=0)
