"""Real ranks for tests: processes with gloo, started once for each world size and used again.

    results = run(4, function, *args)        # function(rank, 4, *args) on every rank; results by rank

`function` must be at module level. Arguments and results travel as bytes (tensors arrive on the CPU), so no file
descriptor is shared. Workers see the environment as it was when the first of them was started.
"""

import atexit
import dataclasses
import datetime
import functools
import io
import multiprocessing
import os
import pickle
import shutil
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from multiprocessing import connection
from typing import Any

import torch
import torch.distributed as dist

__all__ = ["Exit", "WorkerError", "pids", "prepare", "run", "run_fresh"]

GRACE_S = 5.0  # how long the other ranks have to finish once one has failed
START_S = 120.0  # how long processes have to start and to find each other

Error = tuple[str, str, str]  # type name, message, traceback


class WorkerError(RuntimeError):
    """Ranks failed; `errors[rank] = (type name, message, traceback)` for each that did."""

    def __init__(self, function: str, errors: dict[int, Error]) -> None:
        self.errors = errors
        super().__init__(
            f"{function} failed on ranks {sorted(errors)}\n"
            + "\n".join(f"[rank {rank}] {name}: {message}\n{trace}" for rank, (name, message, trace) in errors.items())
        )


@dataclasses.dataclass(frozen=True)
class Exit:
    """A rank without a result: its exit code (negative: a signal; None: it was still running), or its error."""

    code: int | None
    error: Error | None = None


def prepare() -> None:
    """One thread, a seed, and NaN (the largest integer) in all memory that torch.empty and its kin give out."""
    torch.set_num_threads(1)
    torch.use_deterministic_algorithms(True, warn_only=True)
    torch.utils.deterministic.fill_uninitialized_memory = True
    torch.manual_seed(0)


def run(world_size: int, function: Callable[..., Any], *args: Any, timeout: float = 120) -> list[Any]:
    """Call `function(rank, world_size, *args)` on every rank of a standing pool; the results by rank.

    Raises WorkerError if a rank raises, dies, or has not finished after `timeout` seconds. The pool is then replaced.
    """
    job = _job(function, args)
    pool = _pools.get(world_size)
    if pool is None or not pool.is_alive():
        _discard(world_size)
        pool = _pools[world_size] = _Pool(world_size)
    try:
        outcomes = pool.call(job, timeout)
    except BaseException:  # Ctrl-C too: a pool that may be halfway through a job is of no use
        _discard(world_size)
        raise
    errors = {rank: _reason(outcome) for rank, outcome in enumerate(outcomes) if isinstance(outcome, Exit)}
    if errors:
        _discard(world_size)
        raise WorkerError(function.__qualname__, errors)
    return outcomes


def run_fresh(world_size: int, function: Callable[..., Any], *args: Any, timeout: float = 120) -> list[Any]:
    """As `run`, in new processes, for tests that kill ranks: by rank the result, or an `Exit` where there is none."""
    job = _job(function, args)
    pool = _Pool(world_size)
    try:
        return pool.call(job, timeout, grace=timeout)
    finally:
        pool.kill()


def pids(world_size: int) -> list[int]:
    """The process ids of the standing pool, none if there is none."""
    return [process.pid for process in _pools[world_size].processes] if world_size in _pools else []


def _job(function: Callable[..., Any], args: tuple) -> bytes:
    if "<" in function.__qualname__:
        raise ValueError(f"run: {function.__qualname__} is not at module level; move it there, workers import it.")
    return _dump((function, args))


def _dump(value: Any) -> bytes:
    stream = io.BytesIO()
    torch.save(value, stream)
    return stream.getvalue()


def _load(data: bytes) -> Any:
    return torch.load(io.BytesIO(data), map_location="cpu", weights_only=False)


def _reason(outcome: Exit) -> Error:
    if outcome.error is not None:
        return outcome.error
    if outcome.code is None:
        return ("TimeoutError", "still running when the others had finished or time was up", "")
    return ("ProcessDied", f"exit code {outcome.code}", "")


@functools.cache
def _context() -> Any:
    """A server that has imported torch forks a worker in milliseconds; on macOS, where forks are unsafe, none does."""
    if sys.platform != "linux":
        return multiprocessing.get_context("spawn")
    context = multiprocessing.get_context("forkserver")
    # Imported once instead of in every worker. inductor's config is what torch.use_deterministic_algorithms imports, which takes
    # as long as torch itself.
    models = [f"transformers.models.{m}.modeling_{m}" for m in ("llama", "mistral", "qwen2", "qwen3", "smollm3")]
    context.set_forkserver_preload(["torch", "torch.distributed.tensor", "torch._inductor.config", *models])
    return context


class _Pool:
    def __init__(self, world_size: int) -> None:
        self.directory = tempfile.mkdtemp(prefix="ranks-")
        self.processes, self.pipes = [], []
        for rank in range(world_size):
            ours, theirs = _context().Pipe()
            process = _context().Process(target=_work, args=(rank, world_size, theirs, self.directory), daemon=True)
            process.start()
            theirs.close()
            self.processes.append(process)
            self.pipes.append(ours)
        outcomes = self._collect(START_S, GRACE_S)
        if any(isinstance(outcome, Exit) for outcome in outcomes):
            self.kill()
            raise WorkerError("start", {r: _reason(o) for r, o in enumerate(outcomes) if isinstance(o, Exit)})

    def is_alive(self) -> bool:
        return all(process.is_alive() for process in self.processes)

    def call(self, job: bytes, timeout: float, grace: float = GRACE_S) -> list[Any]:
        for pipe in self.pipes:
            pipe.send_bytes(job)
        return self._collect(timeout, grace)

    def _collect(self, timeout: float, grace: float) -> list[Any]:
        """By rank the result, or an Exit; waits until `timeout`, or until `grace` seconds after the first failure."""
        outcomes: list[Any] = [Exit(None)] * len(self.processes)
        waiting = set(range(len(self.processes)))
        deadline = time.monotonic() + timeout
        while waiting and (left := deadline - time.monotonic()) > 0:
            connection.wait([w for r in waiting for w in (self.pipes[r], self.processes[r].sentinel)], left)
            for rank in sorted(waiting):
                outcome = self._poll(rank)
                if outcome is None:
                    continue
                waiting.remove(rank)
                outcomes[rank] = outcome[0]
                if isinstance(outcome[0], Exit):
                    deadline = min(deadline, time.monotonic() + grace)
        return outcomes

    def _poll(self, rank: int) -> tuple[Any] | None:
        process, pipe = self.processes[rank], self.pipes[rank]
        has_ended = not process.is_alive()  # before the pipe is read: the last words of a process count
        try:
            if pipe.poll():
                error, result = pickle.loads(pipe.recv_bytes())
                return (_load(result) if error is None else Exit(None, error),)
        except (EOFError, ConnectionResetError):
            process.join(GRACE_S)
            has_ended = True
        return (Exit(process.exitcode),) if has_ended else None

    def kill(self) -> None:
        for process in self.processes:
            process.kill()
        for process in self.processes:
            process.join(GRACE_S)
        for pipe in self.pipes:
            pipe.close()
        shutil.rmtree(self.directory, ignore_errors=True)


def _work(rank: int, world_size: int, pipe: connection.Connection, directory: str) -> None:
    """The life of a worker: join the group, then answer jobs until the pipe closes."""

    def start() -> None:
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo" if sys.platform == "linux" else "lo0")
        dist.init_process_group(
            "gloo",
            init_method=f"file://{directory}/rendezvous",
            rank=rank,
            world_size=world_size,
            timeout=datetime.timedelta(minutes=10),
        )

    def answer(function: Callable[[], Any]) -> None:
        try:
            prepare()
            message = (None, _dump(function()))
        except Exception as error:
            message = ((type(error).__name__, str(error), traceback.format_exc()), None)
        pipe.send_bytes(pickle.dumps(message))

    def perform(job: bytes) -> Any:
        function, args = _load(job)
        return function(rank, world_size, *args)

    answer(start)
    while True:
        try:
            job = pipe.recv_bytes()
        except (EOFError, OSError):
            return
        answer(functools.partial(perform, job))


_pools: dict[int, _Pool] = {}


def _discard(world_size: int) -> None:
    pool = _pools.pop(world_size, None)
    if pool is not None:
        pool.kill()


@atexit.register
def _discard_all() -> None:
    for world_size in list(_pools):
        _discard(world_size)
