"""``Checkpoint``: saves and resumes the state of a run."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor, wait
from functools import partial
from pathlib import Path
from typing import Any

import torch

from unitrain import rng
from unitrain.checkpoint import epoch_end, fit, loading, metric_states, saved
from unitrain.checkpoint.emergency import EmergencyCheckpoint, is_here
from unitrain.checkpoint.epoch_end import EpochEnd
from unitrain.checkpoint.folder import METRICS, RUN, Begun, Saved, prune
from unitrain.checkpoint.last_boundary import LastBoundary
from unitrain.checkpoint.manifest import Manifest, folder_name
from unitrain.checkpoint.mapped import MappedFiles
from unitrain.checkpoint.run_state import RunState
from unitrain.checkpoint.shards import file_name, gather_shards, paths, put_blocks, separate
from unitrain.checkpoint.snapshot import snapshot
from unitrain.checkpoint.spool import Spool, is_too_slow
from unitrain.checkpoint.spool import collect as collect_spooled
from unitrain.checkpoint.together import begin, collect, write_own
from unitrain.checkpoint.verifying import JointVerification
from unitrain.communicator import Communicator
from unitrain.config import StrategyConfig
from unitrain.errors import CheckpointError, UsageError, listed
from unitrain.job.messages import StopReason
from unitrain.job.watch import Watch
from unitrain.process import print_stderr
from unitrain.rng import seed_rank
from unitrain.training import batch_norm
from unitrain.training.prepared import PreparedModules
from unitrain.training.step import TrainingStep
from unitrain.training.streaming import Keys, outline
from unitrain.url import parsed

# A checkpoint is this many times as large as its models, at most as a rule: Adam keeps two numbers for each parameter.
_MOST_STATES = 3
_CPU, _META = torch.device("cpu"), torch.device("meta")

# The saves in the background. They use executors, which refuse work once the main thread has ended: a script may end
# with a save, so its end is waited for before that. A forked process has no thread that would end its parent's.
_writing: set[Future[None]] = set()
threading._register_atexit(lambda: wait(_writing))  # type: ignore[attr-defined]
os.register_at_fork(after_in_child=_writing.clear)


class Checkpoint:
    """Saves and resumes modules, optimizers, schedulers, loaders and plain values. Made by ``strategy.checkpoint``.

    Args:
        communicator: the communicator of this process.
        prepared: gives the original modules of prepared ones.
        step: counts the optimizer steps.
        scaler: the GradScaler of fp16, else None.
        request_stop: has all ranks call ``wait`` at their next boundary, where it raises an error.
        watch: has the state saved when another rank fails; None in a world of one.
        restored: called when random number generators have been restored, which ``prepare`` must not seed any more.
        released: called when the checkpoint has been closed.
        settings: the strategy's settings.
        folder: the folder of the checkpoints, each of which is a folder named by its step: a path, or a URL that
            fsspec knows.
        objects: objects by name, with ``state_dict`` and ``load_state_dict``, or dicts of plain values and tensors,
            which ``resume`` updates in place.
        config: the script's settings, as plain data. Resuming with other values is refused. The strategy's settings
            are always compared.
        keep: number of checkpoints to keep; the oldest are removed first. The best is kept in any case.
        background: write checkpoints while training continues, one at a time.

    Raises:
        UsageError: an object has no state, or its name can't be that of a file.
        CheckpointError: the folder can't be written to, has too little space, or is in use by another job.
    """

    def __init__(
        self,
        communicator: Communicator,
        prepared: PreparedModules,
        step: TrainingStep,
        scaler: torch.amp.GradScaler | None,
        request_stop: Callable[[StopReason], None],
        watch: Watch | None,
        restored: Callable[[], None],
        released: Callable[[], None],
        settings: StrategyConfig,
        folder: str | Path,
        objects: dict[str, Any],
        *,
        config: Mapping[str, Any],
        keep: int,
        background: bool,
    ) -> None:
        if keep < 1:
            raise UsageError(f"checkpoint: keep is {keep}, but must be at least 1.")
        self._communicator = communicator
        self._step = step
        self._state = RunState(objects, prepared, scaler, communicator, settings, config)
        self._request_stop = request_stop
        self._restored = restored
        self._released = released
        self._settings = settings
        self._folder = saved.folder_at(folder)
        self._config = dict(config)
        self._keep = keep
        writes = communicator.is_main or communicator.shards
        self._writer = ThreadPoolExecutor(1, "checkpoint") if background and writes else None
        self._writing: Future[None] | None = None
        self._snapshot: dict[str, Any] | None = None
        self._unclaimed: int | None = None  # the step of another run's newest checkpoint, until resume or discard
        self._continues_from: int | None = None
        self._best: int | None = None  # the step of the best checkpoint so far; on rank 0 only
        self._marked: int | None = None  # the step that was last saved as the best, or is being saved
        self._resumed_best: int | None = None  # that of the best when the run was resumed
        self._began = False
        self._epoch_end: EpochEnd | None = None
        step.at_epoch_end = self._remember_epoch_end
        communicator.on_main(self._claim)
        self._watch = watch
        self._boundary: LastBoundary | None = None
        # Of sharded state, no rank has all. What a GPU has queued before a rank failed may still change the weights.
        whole = not communicator.shards and communicator.device.type == "cpu"
        survives = watch is not None and settings.emergency_checkpoint == "auto" and whole
        place = parsed(folder)
        root = place if isinstance(place, Path) else None
        self._spool = self._collect(root, may_spool=survives)
        communicator.on_main(self._look)
        if watch is not None and survives:
            self._prepare_for_emergencies(watch, root)

    def _collect(self, root: Path | None, *, may_spool: bool) -> Spool | None:
        """Fetch an emergency checkpoint from where it was written first, if there is one. Collective.

        Returns:
            Where this run may write one first; None if it does not.
        """
        ranks, watch = self._communicator, self._watch
        large = watch is not None and is_too_slow(_MOST_STATES * self._state.nbytes, watch.grace_s)
        makes = may_spool and (root is None or large)
        run = ranks.on_main(lambda: self._folder.run_id(make=makes))
        if run is None:
            return None
        spool, members = Spool(run), watch.members if watch is not None else ()
        here = root is None or not members or is_here(root, members, ranks.rank)
        collect_spooled(ranks, members, self._folder, spool, is_here=here)
        return spool

    def _prepare_for_emergencies(self, watch: Watch, root: Path | None) -> None:
        self._boundary = LastBoundary(self._state.objects, self._state.modules.values(), self._communicator.pulse)
        self._step.at_boundary, self._step.before_change = self._boundary.record, self._boundary.leave
        watch.saver = EmergencyCheckpoint(
            root,
            self._spool,
            watch.grace_s,
            self._boundary,
            self._state,
            lambda: self._writing,
            lambda: self._marked if self._marked is not None or root is not None else self._resumed_best,
            lambda: self._continues_from,
            self._folder.release,
            self._communicator.rank,
            watch.members,
        )

    def _claim(self) -> None:
        self._folder.claim(self._state.nbytes)

    def _look(self) -> None:
        self._unclaimed = next(iter(self._folder.steps()), None)
        if self._unclaimed is not None:
            self._request_stop(StopReason())  # before the first step, unless resume or discard is called

    # ------------------------------------------------------------------------------------------------------- save

    def save(self, *, best: bool = False) -> None:
        """Save a checkpoint of the current state, or at the end of the accumulation window if one is open. Collective.

        Args:
            best: mark it as the best so far. It is kept, beside the newest ``keep``, until another one is marked, and
                ``resume("best")`` finds it.

        Raises:
            CheckpointError: this checkpoint, or the previous one in the background, could not be written; on every
                rank.
            UsageError: ``best`` differs between ranks; on every rank.
        """
        if self._step.within_window:
            self._step.at_window_end(lambda: self._save(best=best))
        else:
            self._save(best=best)

    def save_now(self) -> str:
        """Save a checkpoint between two steps, wait until it is written, and return where it is. Collective.

        Between two epochs, it has the state before what follows the loop over batches, so that this is done again.
        """
        ended = self._epoch_end
        valid = self._step.between_epochs and ended is not None and ended.step == self._step.global_step
        self._save(ended=ended if valid else None)
        self.wait()
        return self._communicator.on_main(lambda: self._folder.name(self._step.global_step))

    def _remember_epoch_end(self) -> None:
        self._epoch_end = epoch_end.remember(self._state.objects, self._state.of, self._step.global_step)
        if self._boundary is not None:
            self._boundary.record(self._epoch_end)

    def _save(self, *, best: bool = False, ended: EpochEnd | None = None) -> None:
        with self._communicator.pulse.within("checkpoint.save"), self._state.prepared.training_weights():
            if self._boundary is not None and ended is None:
                self._boundary.record()
            self.wait()
            modules = self._state.modules
            batch_norm.average_statistics(list(modules.values()), self._communicator, self._state.prepared.shares)
            random = rng.capture() if ended is None else ended.random
            gathered = self._communicator.all_gather_object((bool(best), random))
            marks, randoms = [mark for mark, _ in gathered], [random for _, random in gathered]
            if len(set(marks)) > 1:
                yes, no = ([rank for rank, mark in enumerate(marks) if mark is value] for value in (True, False))
                raise UsageError(
                    f"save(best=...) got True on rank {listed(yes)} and False on rank {listed(no)}: decide on a value "
                    "that is the same on all ranks, such as that of strategy.meter() or of a strategy.metric()."
                )
            if best:
                self._marked = self._step.global_step
            metrics = metric_states.metrics_in(modules)
            states = metric_states.gather(self._communicator, metrics) if metrics else None
            parts, begun = self._sharded_parts() if self._communicator.shards else (None, None)
            self._communicator.on_main(lambda: self._begin(parts, begun, randoms, states, ended, best=best))

    def _sharded_parts(self) -> tuple[dict[str, Any], Begun | None]:
        """Return states without shards, which each rank writes, and the checkpoint begun; or whole states. Collective.

        Whole they are if rank 0 alone can write: not all ranks see the folder, or the store wants few commits.
        """
        begun = begin(self._communicator, self._folder, self._step.global_step)
        if begun is None:
            return gather_shards(self._communicator, self._state.parts()), None
        parts, own = separate(self._communicator, self._state.parts())
        rank = self._communicator.rank
        if self._communicator.is_main:
            parts[file_name(rank)] = own
        elif rank < self._writers:
            self._write_own(begun, file_name(rank), own)
        return parts, begun

    @property
    def _writers(self) -> int:
        """Number of ranks that together have all shards."""
        return self._communicator.world_size // self._communicator.replicas

    def _write_own(self, begun: Begun, name: str, own: dict[str, Any]) -> None:
        """Write this rank's file, or start to write a snapshot of it in the background."""
        rank, patience_s = self._communicator.rank, self._settings.timeout_s
        if self._writer is None:
            write_own(begun, rank, name, own, patience_s)
            return
        if self._writing is not None:
            wait([self._writing])  # rank 0 has finished, so this is about to
        self._snapshot = snapshot(own, self._snapshot)
        self._submit(self._writer.submit(write_own, begun, rank, name, self._snapshot, patience_s))

    def _submit(self, writing: Future[None]) -> None:
        self._writing = writing
        _writing.add(writing)
        writing.add_done_callback(_writing.discard)

    def _begin(
        self,
        parts: dict[str, Any] | None,
        begun: Begun | None,
        randoms: list[dict[str, Any]],
        metrics: list[dict[str, Any]] | None,
        ended: EpochEnd | None,
        *,
        best: bool,
    ) -> None:
        """Write the state, or start to write a snapshot of it in the background."""
        number = self._step.global_step
        parts = self._state.parts() if parts is None else parts
        if ended is not None:
            parts = ended.applied_to(parts)
        parts[RUN] = self._state.run(number, randoms)
        if metrics is not None:
            parts[METRICS] = metrics
        if self._writer is None:
            self._write(number, parts, best, begun)
        else:
            self._snapshot = snapshot(parts, self._snapshot)
            self._submit(self._writer.submit(self._write, number, self._snapshot, best, begun))
            assert self._writing is not None
            self._writing.add_done_callback(self._report)

    def _remove_newer(self) -> None:
        """Remove checkpoints newer than the one that was resumed: later ones of this run would not be the newest."""
        for step in self._folder.steps():
            if self._continues_from is not None and step > self._continues_from:
                self._folder.remove(step)

    def discard(self) -> None:
        """Remove all checkpoints of earlier runs from the folder. Collective."""

        def remove() -> str | None:
            for step in self._folder.steps():
                self._folder.remove(step)
            self._folder.point_to_best(None)
            self._folder.forget_run()
            self._unclaimed = self._best = None
            return self._folder.run_id(make=self._spool is not None)

        run = self._communicator.on_main(remove)
        if self._spool is not None and run is not None:
            self._spool.belong_to(run)

    def _report(self, writing: Future[None]) -> None:
        """Report a failure in the background to all ranks, which raise it at their next boundary."""
        if writing.exception() is not None:
            self._request_stop(StopReason())

    def wait(self) -> None:
        """Wait until the checkpoint in the background is written. Collective.

        Raises:
            CheckpointError: it could not be written, or the folder has checkpoints of another run; on every rank.
        """
        with self._communicator.pulse.within("checkpoint.wait"):
            self._communicator.on_main(self._finish)

    def _finish(self) -> None:
        self._finish_writing()
        if self._unclaimed is not None:
            raise CheckpointError(
                f"{self._folder} contains checkpoints of another run, up to {folder_name(self._unclaimed)}: call "
                "resume() to continue that run, or discard() to remove them, before training, or use another folder."
            )

    def _finish_writing(self) -> None:
        writing, self._writing = self._writing, None
        error = None if writing is None else writing.exception()
        if error is not None:
            raise CheckpointError(str(error)) from error

    def _write(self, number: int, parts: dict[str, Any], best: bool, begun: Begun | None) -> None:
        best_step = number if best else self._best
        about = self._state.about(best_step)
        try:
            self._folder.check()
            if not self._began:
                self._remove_newer()
                self._began = True
            if begun is None:
                self._folder.write(number, parts, about)
            else:
                others = partial(collect, begun, range(1, self._writers), self._settings.timeout_s)
                self._folder.write(number, parts, about, begun, others)
        except BaseException:
            if begun is not None:
                begun.give_up()
            raise
        self._best = best_step  # not before: what was the best is kept if this one can't be written
        self._folder.point_to_best(best_step)
        prune(self._folder, self._keep, best_step)

    # ----------------------------------------------------------------------------------------------------- resume

    def resume(self, path: str | Path | None = None, *, force: bool = False) -> bool:
        """Resume from the newest intact checkpoint, and return whether there is one. Collective.

        A damaged checkpoint is reported on stderr, and the previous one is used. The state is compared with the run's
        objects before any of it is applied. Random number generators are restored if the world size is the same, else
        seeded with seed, step and rank.

        Args:
            path: path or URL of a checkpoint to resume from (``.../step-0000000120``), or ``"best"`` for the one that
                was last saved with ``best=True``, instead of the newest.
            force: resume even if settings that affect training have changed.

        Raises:
            CheckpointError: no checkpoint is intact, or it does not fit this run; on every rank, with nothing changed.
        """
        ranks = self._communicator
        opened: Saved | None = None
        joint = JointVerification(ranks) if ranks.shards else None

        def open_newest() -> tuple[dict[str, Any], dict[str, Any], dict[str, list[Keys]]] | None:
            nonlocal opened
            self._finish_writing()  # what this run saves in the background may be what it goes back to
            try:
                opened = saved.wanted(path, self._folder, joint)
            finally:
                if joint is not None:
                    joint.end()
            if opened is None:
                return None
            return opened.manifest.model_dump(), outline(opened.parts), paths(opened.parts)

        with ranks.pulse.within("checkpoint.resume"), self._state.prepared.training_weights():
            if joint is not None and not ranks.is_main:
                joint.serve()
            found = ranks.on_main(open_newest)
            if found is None:
                return False
            manifest, parts, places = Manifest.model_validate(found[0]), found[1], found[2]
            files = opened.files if opened is not None else MappedFiles() if joint is None else joint.files
            # All checks are made before anything is loaded, and come out the same on every rank.
            changed = fit.changed_settings(manifest, self._settings, self._config, self._state.objects)
            if changed and not force:
                raise CheckpointError(
                    f"the run in {self._folder} was trained with other settings: {'; '.join(changed)}. Use the same "
                    "settings, or resume(force=True), or start a new run in another folder. Nothing was loaded."
                )
            states = {name: part for name, part in parts.items() if name not in (RUN, METRICS)}
            fit.check_objects(self._state.objects, states, self._state.of, str(self._folder))
            loading.order_by_name(self._state, parts, opened, places)
            held = {} if joint is None else joint.blocks(places, parts, partial(loading.rows_of, ranks, self._state))
            if opened is not None:
                put_blocks(opened.parts, held)
            metrics = metric_states.metrics_in(self._state.modules)
            loaded = metric_states.check(metrics, parts.get(METRICS), ranks.world_size, force=force)
            if changed and ranks.is_main:
                print_stderr(f"unitrain: resuming with other settings: {'; '.join(changed)}")
            self._resumed_best = ranks.on_main(lambda: self._continue_from(opened, is_newest=path is None))
            replaced = [] if self._step.global_step else loading.replaced_options(self._state, parts)
            self._go_on_from(loading.load(ranks, self._state, parts, opened, held, files.release))
            if METRICS in parts:
                source = opened.parts[METRICS] if opened is not None else None
                metric_states.load(ranks, metrics, loaded, parts[METRICS], source)
        if opened is not None:  # on rank 0
            kind = ", an emergency checkpoint" if opened.manifest.emergency else ""
            print_stderr(f"unitrain: resumed after step {self._step.global_step}, from {opened.name}{kind}")
            if replaced:
                print_stderr(
                    f"unitrain: as saved, and not as this script has made it: {'; '.join(replaced)}. To train with "
                    "other values, set them after resume(), or start a new run in another folder."
                )
        return True

    def _continue_from(self, opened: Saved | None, *, is_newest: bool) -> int | None:
        self._unclaimed = None
        self._best = None if opened is None else saved.best_beside(opened, self._folder)
        if is_newest:
            self._folder.point_to_best(self._best)  # a kill may have come before this
        return self._best

    def _go_on_from(self, run: Mapping[str, Any]) -> None:
        """Restore the state of the run itself."""
        ranks = self._communicator
        self._step.global_step = self._continues_from = run["steps"]
        self._marked = None
        self._began = False  # later checkpoints are those of a branch that this run leaves
        self._state.load_scaler(run["scaler"])
        if len(run["random"]) == ranks.world_size:
            rng.restore(run["random"][ranks.rank])
        else:
            seed_rank(self._settings.seed, run["steps"], ranks.rank)
        self._restored()

    def close(self) -> None:
        """Wait for the background writer, and end it. Collective."""
        try:
            with self._communicator.pulse.within("checkpoint.wait"):
                self._communicator.on_main(self._finish_writing)
        finally:
            if self._writer is not None:
                self._writer.shutdown()
            if self._watch is not None:
                self._watch.saver = None
            self.abandon()
            self._step.at_epoch_end = self._step.at_boundary = self._step.before_change = lambda: None
            self._released()

    def abandon(self) -> None:
        """End the background writer, without waiting for it, and let other jobs use the folder. Not collective."""
        if self._writer is not None:
            self._writer.shutdown(wait=False)
        self._folder.release()
