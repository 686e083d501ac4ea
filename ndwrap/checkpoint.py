"""Checkpoints: every rank writes its own shards, a whole checkpoint appears at once or not at all, and any mesh reads it.

A checkpoint is a folder `step_N` of torch.distributed.checkpoint. It is written under another name and renamed when all ranks are through, so that
whatever dies at whatever moment, the folders called `step_N` are complete.
"""

import concurrent.futures
import copy
import functools
import os
import random
import re
import shutil
from pathlib import Path
from typing import Any, Protocol

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint import state_dict as dcp_state
from torch.optim import Optimizer
from transformers import AutoModelForCausalLM

__all__ = ["Saving", "export_hf", "latest_step", "load_checkpoint", "save_checkpoint"]

STEP = re.compile(r"step_(\d+)")


class Stateful(Protocol):
    """What has a state: a scheduler, a data loader."""

    def state_dict(self) -> dict[str, Any]: ...

    def load_state_dict(self, state: dict[str, Any]) -> None: ...


def save_checkpoint(
    folder: str | Path,
    model: nn.Module,
    optimizer: Optimizer,
    *,
    step: int,
    scheduler: Stateful | None = None,
    data: Stateful | None = None,
    keep: int | None = None,
    is_async: bool = False,
) -> "Saving":
    """Save everything that training goes on from, as `folder/step_N`. Every rank calls it.

    Args:
        folder: seen by all ranks. step: steps made so far.
        scheduler, data: anything with `state_dict()`, the same on every rank; of `data`, say, how many global batches are done.
        keep: how many checkpoints remain, the newest; None (default) is all.
        is_async: return when the state has been copied to CPU memory, and write in the background. The checkpoint is complete
            after `wait()` of what is returned, which every rank calls, before the next checkpoint at the latest.

    Raises:
        ValueError: `keep` is below 1, or `folder/step_N` exists.
    """
    if keep is not None and keep < 1:
        raise ValueError(f"save_checkpoint: keep is {keep}; it must be at least 1, or None for all.")
    final, partial = Path(folder) / f"step_{step}", Path(folder) / f".step_{step}.partial"
    if final.exists():
        raise ValueError(f"save_checkpoint: {final} exists; save another step, or remove it.")
    if _rank() == 0:
        shutil.rmtree(partial, ignore_errors=True)  # of a run that died
        partial.mkdir(parents=True)
        extra = {name: x.state_dict() for name, x in (("scheduler", scheduler), ("data", data)) if x is not None}
        torch.save(extra, partial / "extra.pt")
    _barrier()
    torch.save(_generators(), partial / f"generators_{_rank()}.pt")
    model_state, optimizer_state = dcp_state.get_state_dict(model, optimizer)
    state = {"model": model_state, "optimizer": optimizer_state, "step": step}
    saving = Saving(None, partial, final, keep)
    if is_async:
        saving.future = dcp.async_save(state, checkpoint_id=partial, process_group=_background_group())
    else:
        dcp.save(state, checkpoint_id=partial)
        saving.wait()
    return saving


class Saving:
    """A checkpoint under way; made by `save_checkpoint`."""

    def __init__(self, future: Any, partial: Path, final: Path, keep: int | None) -> None:
        self.future: concurrent.futures.Future[Any] | None = future
        self.partial, self.final, self.keep = partial, final, keep
        self.is_done = False

    def wait(self) -> None:
        """Return when the checkpoint is complete on all ranks; every rank calls it. A second call does nothing."""
        if self.is_done:
            return
        if self.future is not None:
            self.future.result()
        _barrier()
        if _rank() == 0:
            _complete(self.partial, self.final)
            for step in sorted(_steps(self.final.parent))[: -self.keep] if self.keep is not None else ():
                shutil.rmtree(self.final.parent / f"step_{step}")
        _barrier()
        self.is_done = True


def _complete(partial: Path, final: Path) -> None:
    """Give a checkpoint its name, on disk too."""
    for path in (*partial.iterdir(), partial):
        _sync(path)
    partial.rename(final)
    _sync(final.parent)


def _sync(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _steps(folder: Path) -> list[int]:
    return [int(found[1]) for path in folder.glob("step_*") if (found := STEP.fullmatch(path.name))]


def latest_step(folder: str | Path) -> int | None:
    """The newest complete checkpoint of a folder; None where there is none."""
    return max(_steps(Path(folder)), default=None)


def load_checkpoint(
    folder: str | Path,
    model: nn.Module,
    optimizer: Optimizer,
    *,
    step: int | None = None,
    scheduler: Stateful | None = None,
    data: Stateful | None = None,
) -> int:
    """Fill model, optimizer, scheduler and data from `folder/step_N`, of this mesh or of another; the number of steps made.

    The generators of random numbers (torch's on the CPU and the current GPU, Python's) go on where they were if there are as many ranks as when
    it was saved; else they are left alone, since no other number of ranks draws the same.

    Args:
        step: default the newest complete checkpoint.

    Raises:
        FileNotFoundError: there is no complete checkpoint, or not that one.
        ValueError: `scheduler` or `data` is given and was not saved.
    """
    chosen = latest_step(folder) if step is None else step
    path = Path(folder) / f"step_{chosen}"
    if chosen is None or not path.is_dir():
        have = ", ".join(map(str, sorted(_steps(Path(folder))))) or "none"
        raise FileNotFoundError(
            f"load_checkpoint: {folder} has no complete checkpoint{'' if step is None else f' of step {step}'}; its steps are {have}."
        )
    extra = torch.load(path / "extra.pt", weights_only=False)
    for name, x in (("scheduler", scheduler), ("data", data)):
        if x is not None and name not in extra:
            raise ValueError(f"load_checkpoint: {name} is given and {path} has none; leave it out.")
    model_state, optimizer_state = dcp_state.get_state_dict(model, optimizer)
    state = {"model": model_state, "optimizer": optimizer_state, "step": 0}
    dcp.load(state, checkpoint_id=path)
    dcp_state.set_state_dict(model, optimizer, model_state_dict=model_state, optim_state_dict=optimizer_state)
    for name, x in (("scheduler", scheduler), ("data", data)):
        if x is not None:
            x.load_state_dict(extra[name])
    if len(list(path.glob("generators_*.pt"))) == _world_size():
        _set_generators(torch.load(path / f"generators_{_rank()}.pt", weights_only=False))
    return int(state["step"])


def export_hf(model: Any, folder: str | Path) -> None:
    """Write the whole model as `from_pretrained` reads it, tied weights tied. Every rank calls it; rank 0 gathers and writes.

    Args:
        model: a causal language model of transformers, parallelized or not.
    """
    options = dcp_state.StateDictOptions(full_state_dict=True, cpu_offload=True)
    weights = dcp_state.get_model_state_dict(model, options=options)
    if _rank() == 0:
        config = copy.deepcopy(model.config)  # which from_config changes
        whole = AutoModelForCausalLM.from_config(config, dtype=model.dtype, attn_implementation="sdpa")
        whole.load_state_dict(weights)
        whole.save_pretrained(folder)
    _barrier()


def _generators() -> dict[str, Any]:
    cuda = torch.cuda.get_rng_state() if torch.cuda.is_available() else None
    return {"torch": torch.get_rng_state(), "cuda": cuda, "python": random.getstate()}


def _set_generators(states: dict[str, Any]) -> None:
    torch.set_rng_state(states["torch"])
    random.setstate(states["python"])
    if states["cuda"] is not None and torch.cuda.is_available():
        torch.cuda.set_rng_state(states["cuda"])


def _rank() -> int:
    return dist.get_rank() if dist.is_initialized() else 0


def _world_size() -> int:
    return dist.get_world_size() if dist.is_initialized() else 1


def _barrier() -> None:
    if dist.is_initialized():
        dist.barrier()


@functools.cache
def _background_group() -> dist.ProcessGroup | None:
    """A group of its own for what the background says, so that nothing meets the foreground's messages."""
    return dist.new_group(backend="gloo") if dist.is_initialized() else None
