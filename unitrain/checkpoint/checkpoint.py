"""``Checkpoint``: saves and resumes the state of a run."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from unitrain import rng
from unitrain.checkpoint import metric_states
from unitrain.checkpoint.completeness import warn_of_missing
from unitrain.checkpoint.epoch_end import EpochEnd, EpochEndHook
from unitrain.checkpoint.memory_copies.copies import Memory
from unitrain.checkpoint.run_state import RunState
from unitrain.checkpoint.sharded import loading
from unitrain.checkpoint.sharded.opening import OpenCheckpoint, Search, best_beside, best_in, opened
from unitrain.checkpoint.sharded.saving import divided, gathered, shared_store
from unitrain.checkpoint.store.folder import Draft, Folder
from unitrain.checkpoint.store.located import METRICS, RUN, Located, store_at
from unitrain.checkpoint.store.store import Store, folder_name
from unitrain.checkpoint.writer import Together, Writer
from unitrain.communication.communicator import Communicator
from unitrain.errors import CheckpointError, UsageError, by_rank
from unitrain.job.watch.messages import StopReason
from unitrain.job.watch.stopping import Stopping
from unitrain.job.watch.watch import Watch
from unitrain.process import print_stderr
from unitrain.rng import seed_rank
from unitrain.training.batch_norm import layers as batch_norm
from unitrain.training.loop.step import TrainingStep


class Checkpoint:
    """Saves and resumes modules, optimizers, schedulers, loaders and plain values. Made by ``strategy.checkpoint``.

    ``watch`` is None in a world of one. ``restored`` is called when random number generators have been restored, which
    ``prepare`` must not seed any more.

    Attributes:
        closed: whether ``close`` was called.

    Raises:
        CheckpointError: the folder can't be written to, has too little space, or is in use by another job.
    """

    def __init__(
        self,
        communicator: Communicator,
        state: RunState,
        step: TrainingStep,
        stopping: Stopping,
        watch: Watch | None,
        folder: str | Path,
        *,
        keep: int,
        background: bool,
        partial: bool,
        restored: Callable[[], None],
    ) -> None:
        if keep < 1:
            raise UsageError(f"checkpoint: keep is {keep}, but must be at least 1.")
        self._communicator = communicator
        self._state = state
        self._step = step
        self._stopping = stopping
        self._restored = restored
        self._folder = Folder(store_at(folder))
        self._writer = Writer(
            self._folder,
            state,
            keep,
            background=background and (communicator.is_main or communicator.sharding.any),
            patience_s=state.settings.timeout_s,
            failed=lambda: stopping.request(StopReason()),  # all ranks raise the error at their next boundary
        )
        self._is_complete = partial  # or incomplete on purpose, or told
        self._looked = False
        self._shared: Store | None = None  # where all ranks write, if they do
        self._unclaimed: int | None = None  # the step of another run's newest checkpoint, until resume or discard
        self._epoch_end = EpochEndHook(state, step)
        self.closed: bool = False
        communicator.on_main(lambda: self._folder.claim(state.nbytes))
        communicator.on_main(self._look)
        key = None if watch is None else watch.key
        self._memory = Memory(communicator, state, step, self._writer, key, self._parts)
        if watch is not None:
            watch.before_restart(self._folder.release)
        step.hooks.add_hook(self._epoch_end)
        step.hooks.add_hook(self._memory)
        stopping.listen(self)

    def _look(self) -> None:
        self._unclaimed = self._writer.newest = next(iter(self._folder.steps()), None)
        if self._unclaimed is not None:
            self._stopping.request(StopReason())  # before the first step, unless resume or discard is called

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
        self._save(ended=self._epoch_end.pending)
        self.wait()
        self._memory.close()  # the run stops
        return self._communicator.on_main(lambda: self._folder.name(self._step.global_step))

    def _save(self, *, best: bool = False, ended: EpochEnd | None = None) -> None:
        ranks, state = self._communicator, self._state
        with ranks.collectives.pulse.within("checkpoint.save"), state.prepared.training_weights():
            self.wait()
            if not self._is_complete and self._step.global_step:
                self._is_complete = True
                if ranks.is_main:
                    warn_of_missing(state, self._step)
            batch_norm.average_statistics(list(state.modules.values()), ranks, state.prepared.shares)
            random = rng.capture() if ended is None else ended.random
            marks, randoms = zip(*ranks.all_gather_object((bool(best), random)), strict=True)
            if len(set(marks)) > 1:
                raise UsageError(
                    f"save(best=...) got {by_rank(enumerate(marks))}: decide on a value that is the same on all ranks, "
                    "such as that of strategy.meter() or of a strategy.metric()."
                )
            if best:
                self._writer.marked = self._step.global_step
            together: Together | None = None
            step = self._step.global_step
            with self._step.replicas.shared_weights():
                parts = self._parts(list(randoms), ended)
                if ranks.sharding.any:
                    parts, together = self._sharded(parts)
                ranks.on_main(lambda: self._writer.write(step, parts, together, best=best))
            self._memory.saved(step)

    def _parts(self, random: list[dict[str, Any]], ended: EpochEnd | None = None) -> dict[str, Any]:
        """Return what a checkpoint has, given the states of each rank's random number generators. Collective."""
        ranks, state = self._communicator, self._state
        metrics = metric_states.metrics_in(state.modules)
        metric_parts = {METRICS: metric_states.gather(ranks, metrics)} if metrics else {}
        parts = state.parts() if ended is None else ended.applied_to(state.parts())
        state.complete_shards(ranks, parts)
        collected = {extra.name: extra.collect(state.optimizers) for extra in state.extra}
        extra_parts = {name: its for name, its in collected.items() if its is not None}
        return {**parts, RUN: state.run(self._step.global_step, random), **metric_parts, **extra_parts}

    def _sharded(self, parts: dict[str, Any]) -> tuple[dict[str, Any], Together | None]:
        """Return what rank 0 writes alone, and what each rank writes; or whole states, and None. Collective.

        Rank 0 alone can write if not all ranks see the folder, or if the store wants few commits.
        """
        ranks = self._communicator
        if not self._looked:
            self._looked, self._shared = True, shared_store(ranks, self._folder.store)
        if self._shared is None:
            return gathered(ranks, parts), None
        draft = Draft(self._shared, ranks.on_main(lambda: self._folder.begin(self._step.global_step).name))
        alone, shards = divided(ranks, self._state, parts)
        together = Together(draft, shards, writers=ranks.world_size // ranks.sharding.replicas)
        if 0 < ranks.rank < together.writers:
            self._writer.write_own(together, ranks.rank)
        return alone, together

    def discard(self) -> None:
        """Remove all checkpoints of earlier runs from the folder. Collective."""

        def remove() -> None:
            for step in self._folder.steps():
                self._folder.remove(step)
            self._folder.point_to_best(None)
            self._unclaimed = self._writer.best = self._writer.newest = None

        self._communicator.on_main(remove)
        self._memory.forget()

    def wait(self) -> None:
        """Wait until the checkpoint in the background is written. Collective.

        Raises:
            CheckpointError: it could not be written, or the folder has checkpoints of another run; on every rank.
        """
        with self._communicator.collectives.pulse.within("checkpoint.wait"):
            self._communicator.on_main(self._finish)

    def _finish(self) -> None:
        self._writer.finish()
        if self._unclaimed is not None:
            raise CheckpointError(
                f"{self._folder} contains checkpoints of another run, up to {folder_name(self._unclaimed)}: call "
                "resume() to continue that run, or discard() to remove them, before training, or use another folder."
            )

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
        ranks, state = self._communicator, self._state
        with ranks.collectives.pulse.within("checkpoint.resume"), state.prepared.training_weights():
            found = self._find(path, force=force)
            if found is None:
                return False
            view, changed, recalled = found
            outlines = view.outlines
            metrics = metric_states.metrics_in(state.modules)
            loaded = metric_states.check(metrics, outlines.get(METRICS), ranks.world_size, force=force)
            extras = [extra for extra in state.extra if extra.name in outlines]
            for extra in extras:
                extra.check(outlines[extra.name], force=force)
            if changed and ranks.is_main:
                print_stderr(f"unitrain: resuming with other settings: {'; '.join(changed)}")
            where = ranks.on_main(lambda: self._settle(view, recalled, is_newest=path is None))
            replaced = [] if self._step.global_step else state.replaced_options(outlines)
            self._go_on_from(loading.load(ranks, state, view))
            self._memory.go_on(self._step.global_step, where[0])
            if METRICS in outlines:
                metric_states.load(ranks, metrics, loaded, outlines[METRICS], view.source(METRICS))
            for extra in extras:
                extra.load(state.optimizers, outlines[extra.name], view.source(extra.name))
            view.close()
        if view.saved is not None:  # on rank 0
            print_stderr(f"unitrain: resumed after step {self._step.global_step}, from {view.saved.found}{where[1]}")
            if replaced:
                print_stderr(
                    f"unitrain: as saved, and not as this script has made it: {'; '.join(replaced)}. To train with "
                    "other values, set them after resume(), or start a new run in another folder."
                )
        return True

    def _find(
        self, path: str | Path | None, *, force: bool
    ) -> tuple[loading.CheckpointView, list[str], list[tuple[Located, str]]] | None:
        """Return an intact checkpoint that fits this run, which settings have changed, and what is in memory."""
        ranks, state = self._communicator, self._state
        search: Search | None = None  # on rank 0
        damage: str | None = None
        ranks.on_main(self._writer.finish)  # what this run saves in the background may be what it goes back to
        recalled = self._memory.recall() if path is None else []

        def open_next() -> OpenCheckpoint | None:
            nonlocal search
            if search is None:
                search = Search(self._folder, path, [located for located, _ in recalled])
            if damage is not None:
                search.reject(damage)
            return search.next(opened)

        while (view := loading.open_on_all(ranks, state, open_next)) is not None:
            changed = state.changed_settings(view.manifest)
            if changed and not force:
                raise CheckpointError(
                    f"the run in {self._folder} was trained with other settings: {'; '.join(changed)}. Use the same "
                    "settings, or resume(force=True), or start a new run in another folder. Nothing was loaded."
                )
            state.check_fits(view.manifest, view.outlines)
            loading.order_by_name(state, view)
            damage = view.verify()
            if damage is None:
                return view, changed, recalled
            view.close()
        return None

    def _settle(
        self, view: loading.CheckpointView, recalled: list[tuple[Located, str]], *, is_newest: bool
    ) -> tuple[str, str]:
        """Know the best checkpoint from now on. Return the name of a copy in memory, or "", and what to say of it."""
        assert view.saved is not None
        found, newest = view.saved.found, next(iter(self._folder.steps()), 0)
        hosts = next((hosts for located, hosts in recalled if located is found), "")
        self._unclaimed = None
        self._writer.best = best = best_in(self._folder) if hosts else best_beside(found.manifest, self._folder)
        if is_newest:
            self._folder.point_to_best(best)  # a kill may have come before this
        if hosts:
            newer = f"{found.manifest.step - newest} steps after the newest checkpoint in {self._folder}"
            return found.folder, f", in the memory of {hosts}: {newer}"
        return "", ""

    def _go_on_from(self, run: Mapping[str, Any]) -> None:
        """Restore the state of the run itself."""
        ranks = self._communicator
        self._step.global_step = run["steps"]
        self._writer.go_on_from(run["steps"])
        self._state.load_run(run)
        if len(run["random"]) == ranks.world_size:
            rng.restore(run["random"][ranks.rank])
        else:
            seed_rank(self._state.settings.seed, run["steps"], ranks.rank)
        self._restored()

    def close(self) -> None:
        """Wait for the background writer, and end it. Collective. Further calls do nothing."""
        if self.closed:
            return
        try:
            with self._communicator.collectives.pulse.within("checkpoint.wait"):
                self._communicator.on_main(self._writer.finish)
            self._memory.close()
        finally:
            self.closed = True
            self._writer.close(wait=True)
            self._step.hooks.remove_hook(self._epoch_end)
            self._step.hooks.remove_hook(self._memory)
            self._memory.abandon()
            self._stopping.close()

    def abandon(self) -> None:
        """End the background writer, without waiting for it, and let other jobs use the folder. Not collective."""
        self._memory.abandon()
        self._writer.close(wait=False)
