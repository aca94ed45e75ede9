"""Saving checkpoints while training goes on, and continuing the newest one that can be read."""

from __future__ import annotations

import logging
import shutil
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self, TypeVar

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.staging import BlockingAsyncStager

from tagc.config import Config, to_dict
from tagc.errors import UserError
from tagc.train import checkpoint_files as files
from tagc.train.checkpoint_files import CheckpointInfo, DamagedCheckpoint
from tagc.train.checkpoint_state import collect_state, count_bytes, restore_state

if TYPE_CHECKING:
    from tagc.train.trainer import Trainer

logger = logging.getLogger("tagc")
T = TypeVar("T")


class _SaveFailed(Exception):
    """A checkpoint could not be written; all ranks know."""


class Checkpoints:
    """One rank's end of a run's checkpoints. To be used on all ranks alike; only rank 0 logs.

    :meth:`save` copies the state to host memory, which training waits for; a thread writes the copy, with a gloo group
    of its own, and rank 0 renames the finished folder. A failure to write is logged and never raised.
    """

    def __init__(self, run_dir: Path, config: Config) -> None:
        self.run_dir, self._config = Path(run_dir), config
        self._rank, self._ranks = dist.get_rank(), dist.get_world_size()
        timeout = timedelta(seconds=config.cluster.timeout_s)
        self._group: dist.ProcessGroup = dist.new_group(backend="gloo", timeout=timeout)
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="checkpoint")
        self._pending: Future[None] | None = None
        self._blocked_s = 0.0

    # --- saving -------------------------------------------------------------------------------------------------

    def is_due(self, step: int) -> bool:
        """Whether to save after ``step`` steps: at every interval, and at the end of a run that is longer than one."""
        every, last = self._config.trainer.checkpoint_every, self._config.trainer.max_steps
        return every > 0 and (step % every == 0 or (step == last and last > every))

    def save(self, trainer: Trainer) -> None:
        """Save the state after ``trainer.step`` steps; returns when it is copied."""
        begin_s = time.perf_counter()
        self.wait()
        info = CheckpointInfo(
            step=trainer.step,
            ranks=self._ranks,
            torch=torch.__version__,
            config=to_dict(self._config),
            parameters={name: list(parameter.shape) for name, parameter in trainer.model.named_parameters()},
            data=trainer.data_state,
            time_dilation=trainer.link_scale.measured,
        )
        staged = BlockingAsyncStager().stage(collect_state(trainer))
        self._pending = self._thread.submit(self._write, staged, info)
        self._blocked_s += time.perf_counter() - begin_s

    def wait(self) -> bool:
        """Wait until the last :meth:`save` is on the disk; returns whether it is. A storage failure was logged.

        Errors: whatever else went wrong in the thread, such as a lost rank.
        """
        pending, self._pending = self._pending, None
        if pending is None:
            return True
        try:
            pending.result()
        except _SaveFailed:
            return False
        return True

    def take_blocked_ms(self) -> float:
        """Milliseconds that training waited for checkpoints since the last call."""
        blocked_ms, self._blocked_s = self._blocked_s * 1e3, 0.0
        return blocked_ms

    def _write(self, staged: dict[str, Any], info: CheckpointInfo) -> None:
        """In the thread: write this rank's files, and on rank 0 complete the folder."""
        begin_s = time.perf_counter()
        folder = files.step_dir(self.run_dir, info.step)
        partial = files.partial_dir(folder)
        try:
            self._agree(lambda: files.start_partial(folder) if self._rank == 0 else None)
            writer = dcp.FileSystemWriter(partial, sync_files=True)
            try:
                dcp.save(staged, storage_writer=writer, process_group=self._group)
            except CheckpointException as error:  # every rank gets all ranks' failures
                needed_bytes = sum(self._agree(lambda: count_bytes(staged)))
                reason = _first_reason(error)
                if self._rank == 0:  # which deletes the partial folder then
                    reason = files.explain_failure(reason, partial, needed_bytes)
                raise _SaveFailed(reason) from None
            for part in self._agree(lambda: self._measure_own(partial)):
                info.files |= part
            self._agree(lambda: files.commit(folder, info) if self._rank == 0 else None)
        except _SaveFailed as failure:
            if self._rank == 0:
                with suppress(OSError):  # a full disk needs the room
                    shutil.rmtree(partial)
                logger.error(
                    "step %d: no checkpoint was saved (%s); training goes on, the last complete one is untouched, and "
                    "the next interval tries again",
                    info.step,
                    failure,
                )
            raise
        if self._rank == 0:
            with suppress(OSError):  # what cannot be deleted now is deleted next time
                files.keep_newest(self.run_dir, self._config.trainer.keep_checkpoints)
            logger.info("step %d: checkpoint written in %.2f s", info.step, time.perf_counter() - begin_s)

    def _measure_own(self, partial: Path) -> dict[str, list[int]]:
        own = list(partial.glob(f"__{self._rank}_*"))
        own += [partial / ".metadata"] if self._rank == 0 else []
        return {path.name: files.measure_file(path) for path in own}

    def _agree(self, work: Callable[[], T]) -> list[T]:
        """Do ``work`` on every rank; returns all ranks' results, or raises :class:`_SaveFailed` on all of them."""
        try:
            own: tuple[str | None, Any] = (None, work())
        except OSError as error:
            own = (str(error), None)
        everyone: list[tuple[str | None, Any]] = [own] * self._ranks
        dist.all_gather_object(everyone, own, group=self._group)
        for reason, _ in everyone:
            if reason is not None:
                raise _SaveFailed(reason)
        return [result for _, result in everyone]

    # --- continuing ---------------------------------------------------------------------------------------------

    def restore_newest(self, trainer: Trainer) -> int | None:
        """Bring a fresh trainer to the newest checkpoint of the run folder; returns its step, None if there is none.

        A damaged checkpoint is set aside, loudly, and the one before is taken.
        Errors: ``UserError`` if there are checkpoints and none can be read, or the newest is of another run or model.
        """
        damages: list[str] = []
        while (newest := self._broadcast(self._newest_name())) is not None:
            folder = files.checkpoints_dir(self.run_dir) / newest
            damage = self._find_damage(folder)
            if damage is None:
                self._restore(trainer, folder)
                return trainer.step
            damages.append(damage)
            dist.barrier(self._group)  # nobody reads it any more
            if self._rank == 0:
                moved = files.mark_damaged(folder)
                logger.error("the checkpoint is damaged: %s; it is now %s, and the one before is taken", damage, moved)
        if damages:
            raise UserError(
                f"no checkpoint of {self.run_dir} can be read: {'; '.join(damages)}. "
                "Set trainer.resume=never to start over (the record moves to earlier/)"
            )
        return None

    def _newest_name(self) -> str | None:
        found = files.list_checkpoints(self.run_dir)
        return found[0].name if found else None

    def _broadcast(self, value: T) -> T:
        box = [value]
        dist.broadcast_object_list(box, group_src=0, group=self._group)
        return box[0]

    def _find_damage(self, folder: Path) -> str | None:
        """The ranks share the reading of the files, and all hear of the first that is damaged."""
        damage = None
        try:
            info = files.read_info(folder)
            files.check_files(folder, info, sorted(info.files)[self._rank :: self._ranks])
        except DamagedCheckpoint as error:
            damage = str(error)
        everyone: list[str | None] = [None] * self._ranks
        dist.all_gather_object(everyone, damage, group=self._group)
        return next((reason for reason in everyone if reason is not None), None)

    def _restore(self, trainer: Trainer, folder: Path) -> None:
        info = files.read_info(folder)
        notes = files.check_config(folder, info, self._config)
        _check_shapes(folder, info, trainer)
        if info.torch != torch.__version__:
            notes.append(
                f"torch {torch.__version__}, {info.torch} in the checkpoint: the numbers may differ in rounding"
            )
        trainer.load_data_state(info.data)
        # Measured once per run, so that its rows can be compared.
        trainer.link_scale.take_over(files.dilation_to_keep(info, self._config))
        restore_state(trainer, folder, info, self._group)
        trainer.step = info.step
        if self._rank == 0:
            ranks = "" if info.ranks == self._ranks else f", saved by {info.ranks} ranks and now on {self._ranks}"
            logger.warning("continuing %s after step %d%s", folder, info.step, ranks)
            for note in notes:
                logger.warning("differs from the steps before: %s", note)

    # --- end ----------------------------------------------------------------------------------------------------

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is None:
            self.wait()
        self._thread.shutdown(wait=error is None)


def _first_reason(error: CheckpointException) -> str:
    rank, (cause, _) = next(iter(error.failures.items()))
    return f"rank {rank}: {type(cause).__name__}: {cause}".splitlines()[0]


def _check_shapes(folder: Path, info: CheckpointInfo, trainer: Trainer) -> None:
    """Errors: ``UserError`` if the model's parameters are not those of the checkpoint."""
    shapes = {name: list(parameter.shape) for name, parameter in trainer.model.named_parameters()}
    for name in sorted({*shapes, *info.parameters}):
        if shapes.get(name) != info.parameters.get(name):
            raise UserError(
                f"the checkpoint {folder} is of another model: {name} is {info.parameters.get(name)} there and "
                f"{shapes.get(name)} here; set trainer.resume=never to start over, or hydra.run.dir to another folder"
            )
