"""``Checkpoint``: saves and resumes the state of a run."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import cached_property, partial
from pathlib import Path
from typing import Any

from unitrain.checkpoint.completeness import Earlier, warn_of_missing
from unitrain.checkpoint.contents import Contents
from unitrain.checkpoint.epoch_end import EpochEnd
from unitrain.checkpoint.hooks import Candidate, CheckpointHook
from unitrain.checkpoint.origin import Origin
from unitrain.checkpoint.sharded.loading import CheckpointView, open_on_all
from unitrain.checkpoint.sharded.opening import Search, best_beside, best_in, opened
from unitrain.checkpoint.sharded.saving import Portion, divided, gathered, shared_store
from unitrain.checkpoint.store.folder import Draft, Folder
from unitrain.checkpoint.store.located import Located, store_at
from unitrain.checkpoint.store.store import Store, folder_name
from unitrain.checkpoint.waiting import WaitingStates
from unitrain.checkpoint.writer import Writer
from unitrain.communication.comparison import first_reason
from unitrain.errors import CheckpointError, UsageError, by_rank
from unitrain.job.watch.stopping import RAISE_ERROR
from unitrain.process import print_stderr
from unitrain.training.loop.sockets import Sockets
from unitrain.training.loop.step import TrainingStep
from unitrain.training.models import batch_norm


class Checkpoint:
    """Saves and resumes modules, optimizers, schedulers, loaders and plain values. Made by ``strategy.checkpoint``.

    Args:
        contents: what is saved and resumed.
        origin: the settings of the run.
        sockets: of the run.
        step: of the run.
        folder: path or URL of the folder of the checkpoints.
        keep: number of the newest checkpoints that are kept.
        background: whether to write them while training continues.
        incomplete: whether they lack something on purpose.

    Attributes:
        contents: as the argument.
        folder: the folder of the checkpoints.
        closed: whether ``close`` was called.

    Raises:
        CheckpointError: the folder can't be written to, has too little space, or is in use by another job.
    """

    def __init__(
        self,
        contents: Contents,
        origin: Origin,
        sockets: Sockets,
        step: TrainingStep,
        folder: str | Path,
        *,
        keep: int,
        background: bool,
        incomplete: bool,
    ) -> None:
        if keep < 1:
            raise UsageError(f"checkpoint: keep is {keep}, but must be at least 1.")
        self._communicator = ranks = sockets.communicator
        self._prepared = sockets.prepared
        self.contents: Contents = contents
        self._origin = origin
        self._step = step
        self._stopping = stopping = sockets.stopping
        self.folder: Folder = Folder(store_at(folder))
        self._writer = Writer(
            self.folder,
            keep,
            background=background and (ranks.is_main or ranks.sharding.any),
            patience_s=sockets.config.timeout_s,
            failed=lambda: stopping.request(RAISE_ERROR),  # all ranks raise the error at their next boundary
        )
        self._earlier = Earlier(step)
        self._is_complete = incomplete  # on purpose, or complete, or told
        self._unclaimed: int | None = None  # the step of another run's newest checkpoint, until resume or discard
        self._epoch_end = EpochEnd(contents, step)
        self._waiting: WaitingStates | None = None
        self._hooks: list[CheckpointHook] = []
        self._changed_at = -1  # after which step objects were added, replaced or removed
        self._round_ended_at: int | None = None  # after which step the last one has ended
        self._deferred: list[bool] = []  # the saves within a round: whether each is the best
        self.closed: bool = False
        self._trial = ranks.collectives.pulse.trial
        # Now, since at the first save an hour of training could be lost.
        with ranks.collectives.pulse.within("strategy.checkpoint, claiming its folder"):
            ranks.on_main(lambda: self.folder.claim(contents.nbytes))
            ranks.on_main(self._look)
        step.hooks.add_hook(self._epoch_end)
        stopping.listen(self)

    def add_hook(self, hook: CheckpointHook) -> None:
        """Tell a hook of the checkpoints from now on."""
        self._hooks.append(hook)

    def _look(self) -> None:
        self._unclaimed = self._writer.newest = next(iter(self.folder.steps()), None)
        if self._unclaimed is not None:
            self._stopping.request(RAISE_ERROR)  # before the first step, unless resume or discard is called

    @property
    def newest(self) -> int | None:
        """The step of the newest checkpoint in the folder that this process knows of; on rank 0 only."""
        return self._writer.newest

    def about(self) -> dict[str, Any]:
        """Return the run's entries in manifests."""
        return {**self._origin.about(), "features": {hook.name: dict(hook.label()) for hook in self._hooks}}

    def divided(self, states: Mapping[str, Any]) -> Portion:
        """Return this rank's portion of states: those that rank 0 writes alone, and this rank's shards. Collective.

        Args:
            states: of all parts by key, as ``contents.collect`` returns them.
        """
        return divided(self._communicator, states, self.contents.modules, self.contents.names())

    def save(self, *, best: bool = False) -> None:
        """Save a checkpoint of the current state. Collective.

        If an accumulation window or a ``round`` is open, it is saved at the end of that.

        Args:
            best: mark it as the best so far. It is kept, beside the newest ``keep``, until another one is marked, and
                ``resume("best")`` finds it.

        Raises:
            CheckpointError: this checkpoint, or the previous one in the background, could not be written; on every
                rank.
            UsageError: ``best`` differs between ranks; on every rank.
        """
        if self._stopping.round_began is not None:
            self._deferred.append(best)
        elif self._step.within_window:  # the gradients of its first micro-batches are in no state
            self._step.at_window_end(lambda: self._save(best=best))
        else:
            self._save(best=best)

    @contextmanager
    def round(self) -> Iterator[None]:
        """Context manager for a part of the run that is saved whole or not at all.

        Signals, copies in memory and ``save`` wait for its end. Then the signal saves a checkpoint and stops the run. A
        second signal ends it at once, within the round. A run that is killed there repeats the round when it is
        resumed, from the state that was saved before it. Collective.

        Raises:
            UsageError: the round is within another, or begins or ends within an accumulation window.

        Example:
            >>> while state["round"] < 10:
            ...     with checkpoint.round():
            ...         train_and_collect(state)
            ...         state["round"] += 1
        """
        self._check_trial("round")
        if self._stopping.round_began is not None or self._step.within_window:
            raise UsageError("checkpoint.round() was called within a round or an accumulation window: end that first.")
        self._deferred = []
        with self._stopping.round():
            yield
        if self._step.within_window:  # as in save
            raise UsageError("checkpoint.round() ended within an accumulation window: end it after a whole step.")
        self._round_ended_at = self._step.global_step
        self._epoch_end.at_epoch_end()  # the code after it is done again, as after the batches of an epoch
        self._step.batches.between_epochs = True
        for reached in self._step.hooks.at_boundary:
            reached()
        self._stopping.pass_boundary()  # if the run stops here, it saves what was to be saved
        saves, self._deferred = self._deferred, []
        if saves:
            self._save(best=any(saves))

    def save_now(self) -> str:
        """Save a checkpoint between two steps, wait until it is written, and return where it is. Collective.

        Between two epochs, it has the state before what follows the loop over batches, so that this is done again.
        While states wait for their objects, nothing has been trained: it is the checkpoint that the run resumed from.
        """
        if self._waiting is not None:
            return self._waiting.view.place
        self._save(best=any(self._deferred), remembered=self._epoch_end.pending)
        self.wait()
        for hook in self._hooks:
            hook.closed()  # the run stops
        return self._communicator.on_main(lambda: self.folder.name(self._step.global_step))

    def _save(self, *, best: bool = False, remembered: Mapping[str, Any] | None = None) -> None:
        if self._waiting is not None:
            self._waiting.before_call("save")
        ranks, step = self._communicator, self._step.global_step
        with self._using("save"):
            self.wait()  # raises the error of the previous one
            if not self._is_complete and step:  # before the first step, no optimizer has been used
                self._is_complete = True
                if ranks.is_main:
                    warn_of_missing(self.contents, self._step, self._earlier)
            batch_norm.average_statistics(list(self.contents.modules.values()), ranks, self._prepared.shares)
            marks = ranks.all_gather_data(bool(best))
            if len(set(marks)) > 1:
                raise UsageError(
                    f"save(best=...) got {by_rank(enumerate(marks))}: decide on a value that is the same on all ranks, "
                    "such as that of a strategy.meter()."
                )
            self._write(self.contents.collect(remembered), best=best)

    def _write(self, states: dict[str, Any], *, best: bool) -> None:
        """Write a checkpoint of states by key, or start to. Collective."""
        ranks, step = self._communicator, self._step.global_step
        draft: Draft | None = None
        writers = 1
        shared = self._shared if ranks.sharding.any else None
        if shared is not None:
            draft = Draft(shared, ranks.on_main(lambda: self.folder.begin(step).name))
            portion = self.divided(states)
            writers = ranks.world_size // ranks.sharding.replicas  # other ranks have the same shards
            if 0 < ranks.rank < writers:
                self._writer.write_own(draft, ranks.rank, portion.shards)
        else:
            portion = Portion(gathered(ranks, states) if ranks.sharding.any else states)
        about = self.about()
        ranks.on_main(lambda: self._writer.write(step, portion, about, best=best, draft=draft, writers=writers))

    @cached_property
    def _shared(self) -> Store | None:
        """The store to which all ranks write; None if rank 0 writes alone. Collective when it is first used.

        Rank 0 alone writes if not all ranks see the folder, or if the store wants few commits.
        """
        return shared_store(self._communicator, self.folder.store)

    def discard(self) -> None:
        """Remove all checkpoints of earlier runs from the folder. Collective."""

        def remove() -> None:
            self._writer.discard()
            self._unclaimed = None

        self._drop_waiting()
        self._communicator.on_main(remove)
        for hook in self._hooks:
            hook.discarded()

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
                f"{self.folder} contains checkpoints of another run, up to {folder_name(self._unclaimed)}: call "
                "resume() to continue that run, or discard() to remove them, before training, or use another folder."
            )

    def resume(self, path: str | Path | None = None, *, force: bool = False, new_options: bool = False) -> bool:
        """Resume from the newest intact checkpoint, and return whether there is one. Collective.

        A damaged checkpoint is reported on stderr, and the previous one is used. The state is compared with the run's
        objects before any of it is applied. Random number generators are restored if the world size is the same, else
        seeded with seed, step and rank. States of objects that this run does not have yet wait for ``add``.

        Args:
            path: path or URL of a checkpoint to resume from (``.../step-0000000120``), or ``"best"`` for the one that
                was last saved with ``best=True``, instead of the newest.
            force: resume even if settings that affect training have changed.
            new_options: train with the options of optimizers and schedulers as the script has made them (``lr``,
                ``T_max``), and not as saved. Schedulers are stepped to where the checkpoint is; a ReduceLROnPlateau,
                and the learning rate that it sets, are as saved. No effect in a run that goes back.

        Raises:
            CheckpointError: no checkpoint is intact, or it does not fit this run; on every rank, with nothing changed.
        """
        ranks, contents = self._communicator, self.contents
        with self._using("resume"):
            self._drop_waiting()
            ranks.on_main(self._writer.finish)  # what this run saves in the background may be what it goes back to
            candidates = [] if path is not None else [copy for hook in self._hooks for copy in hook.candidates()]
            begins = not self._step.global_step  # in a run that goes back, its schedulers have changed the options
            new_options = new_options and begins
            search = Search(self.folder, path, [copy.located for copy in candidates])
            view = self._open(search, force=force, new_options=new_options)
            if view is None:
                return False
            changed = self._origin.changed_settings(view.manifest)
            if changed and ranks.is_main:
                print_stderr(f"unitrain: resuming with other settings: {'; '.join(changed)}")
            folder, place = ranks.on_main(lambda: self._settle(view, candidates))
            waiting = WaitingStates(view, contents.of_objects.keys(), {"force": force, "new_options": new_options})
            self._load(waiting, place, tells=begins)
            self._writer.go_on_from(self._step.global_step)
            for hook in self._hooks:
                hook.resumed(self._step.global_step, folder)
        return True

    def add(self, **objects: Any) -> None:
        """Save these objects, too, from now on. Collective.

        A name that is in use gets the new object: the model of the next round, say. The object before is then free. If
        ``resume`` has found a state of this name that no object has taken yet, it is loaded now: so a script can
        resume first, and then make what depends on its state, such as the loader of the data that it has collected.

        Until all states that ``resume`` has found are taken or removed, a step and ``save`` are errors.

        Args:
            **objects: as of ``strategy.checkpoint``.

        Raises:
            UsageError: an object has no state; or it replaces another since the end of a ``round``, from where a
                resumed run would give the state of that one to this one.
            CheckpointError: while states wait, one of a name that was not saved was added; or a state does not fit its
                object. On every rank, with nothing loaded.
        """
        stale = sorted(objects.keys() & self.contents.objects.keys())
        if stale and self._step.global_step == self._round_ended_at:
            raise UsageError(
                f"checkpoint.add got another {stale[0]}, and a run that is resumed from the end of the last round "
                f"would load the old one's state into it: call checkpoint.remove({stale[0]!r}) within the round."
            )
        self._change("add", {**self.contents.objects, **objects})

    def remove(self, *names: str) -> None:
        """Save the objects of these names no more, and drop states of these names that wait for ``add``. Collective.

        So a checkpoint that is saved between two rounds has no model that the next round would begin with.

        Raises:
            UsageError: the checkpoint has no object, and no state that waits, of a name.
        """
        objects = dict(self.contents.objects)
        for name in names:
            waits = self._waiting is not None and self._waiting.view.outlines.pop(name, None) is not None
            if objects.pop(name, waits) is False:
                raise UsageError(f"checkpoint.remove: there is no {name!r} beside {', '.join(sorted(objects))}.")
        self._earlier = Earlier(self._step)  # what is finished is not missing
        self._change("remove", objects)

    def _change(self, call: str, objects: Mapping[str, Any]) -> None:
        """Save other objects from now on, and load the states that wait for them. Collective."""
        waiting = self._waiting
        with self._using(call):
            self.contents.replace(objects)
            if waiting is not None and (misfit := self._misfit(waiting.view, **waiting.options)):
                raise CheckpointError(misfit)
            self._epoch_end.forget()
            self._changed_at = self._step.global_step
            if waiting is not None:
                taken = ", ".join(sorted(waiting.names & objects.keys()))
                self._load(waiting, f": {taken}" if taken else "", tells=True)

    def _load(self, waiting: WaitingStates, place: str, *, tells: bool) -> None:
        """Load the states that there are objects for; the others wait. Collective.

        Args:
            waiting: the states.
            place: for the message, after the checkpoint's place.
            tells: whether to say which options of the script are replaced.
        """
        contents, view, new_options = self.contents, waiting.view, waiting.options["new_options"]
        replaced = contents.replaced_options(view, waiting.names, new_options=new_options) if tells else []
        contents.load(view, waiting.names, new_options=new_options)
        waiting.names = contents.waiting(view)
        if view.saved is not None:  # on rank 0
            then = f"; checkpoint.add loads {', '.join(sorted(waiting.names))}" if waiting.names else ""
            step = self._step.global_step
            print_stderr(f"unitrain: resumed after step {step}, from {view.saved.located}{place}{then}")
            if replaced:
                remedy = "set them after resume()" if new_options else "call resume(new_options=True)"
                print_stderr(
                    f"unitrain: as saved, and not as this script has made it: {'; '.join(replaced)}. To train with "
                    f"the script's values, {remedy}, or start a new run in another folder."
                )
        if self._waiting is None:
            self._waiting = waiting
            self._step.hooks.add_hook(waiting)
        if not waiting.names:
            self._drop_waiting()

    def _drop_waiting(self) -> None:
        """Close the checkpoint with states that wait."""
        if self._waiting is not None:
            self._step.hooks.remove_hook(self._waiting)
            self._waiting.view.close()
            self._waiting = None

    def _open(self, search: Search, *, force: bool, new_options: bool = False) -> CheckpointView | None:
        """Return the first intact checkpoint of a search, if there is one. Collective.

        Raises CheckpointError if it does not fit this run.
        """
        ranks = self._communicator
        while (view := open_on_all(ranks, lambda: search.next(opened))) is not None:
            changed = self._origin.changed_settings(view.manifest)
            if changed and not force:
                raise CheckpointError(
                    f"the run in {self.folder} was trained with other settings: {'; '.join(changed)}. Use the same "
                    "settings, or resume(force=True), or start a new run in another folder. Nothing was loaded."
                )
            misfit = self._misfit(view, force=force, new_options=new_options)
            damage = "" if misfit else view.verify()
            if not misfit and not damage:
                return view
            view.close()
            ranks.on_main(partial(search.refuse, misfit) if misfit else partial(search.reject, damage))
        return None

    def _misfit(self, view: CheckpointView, *, force: bool, new_options: bool) -> str:
        """Return why the states of a checkpoint don't fit the run's objects, "" if they do. Collective."""
        why = ""
        try:
            self.contents.fit(view, force=force, new_options=new_options)
        except CheckpointError as error:
            why = f"{view.place}: {error}"
        return first_reason(self._communicator, why)

    def go_back(self, located: Located | None) -> bool:
        """Put modules and optimizers back as they are in a checkpoint of this start of the run. Collective.

        All else stays: positions of loaders, options of optimizers, random number generators, the number of steps.

        Args:
            located: the checkpoint, on rank 0.

        Returns:
            False if there is none, or it is damaged, or the run had other objects then.
        """
        # An earlier one may be of another model.
        candidates = [] if located is None or located.manifest.step <= self._changed_at else [located]
        with self._prepared.training_weights():
            view = self._open(Search(self.folder, first=candidates, only=True), force=True)
            if view is None:
                return False
            self.contents.load_trained(view)
            view.close()
        return True

    def _settle(self, view: CheckpointView, candidates: list[Candidate]) -> tuple[str, str]:
        """Adopt a checkpoint. Return the folder of the candidate that it is ("" if none), and the message's end."""
        assert view.saved is not None
        located, newest = view.saved.located, next(iter(self.folder.steps()), 0)
        candidate = next((copy for copy in candidates if copy.located is located), None)
        self._unclaimed = None
        self._writer.best = best_beside(located, self.folder) if candidate is None else best_in(self.folder)
        if candidate is None:
            return "", ""
        newer = f"{located.manifest.step - newest} steps after the newest checkpoint in {self.folder}"
        return located.folder, f", {candidate.place}: {newer}"

    def close(self) -> None:
        """Wait for the background writer, and end it. Collective. Further calls do nothing."""
        if self.closed:
            return
        with self._using("close"):
            try:
                self._communicator.on_main(self._writer.finish)
                for hook in self._hooks if self._waiting is None else ():  # else a copy has the states that wait
                    hook.closed()
            finally:
                self.closed = True
                self._writer.close(wait=True)
                self._step.hooks.remove_hook(self._epoch_end)
                self._drop_waiting()
                self._abandon_hooks()
                self._stopping.close(self)

    @contextmanager
    def _using(self, call: str) -> Iterator[None]:
        """Record that the block waits for the other ranks, and give modules the weights of training within it."""
        self._check_trial(call)
        with self._communicator.collectives.pulse.within(f"checkpoint.{call}"), self._prepared.training_weights():
            yield

    def _check_trial(self, call: str) -> None:
        """Raise UsageError in a trial that this was opened outside of: steps and objects are others."""
        # A trial's checkpoint is closed after it.
        if not self._trial.startswith(self._communicator.collectives.pulse.trial):
            raise UsageError(f"{call}() was called within a trial, on a checkpoint from outside of it: open one in it.")

    def abandon(self) -> None:
        """End the background writer, without waiting for it, and let other jobs use the folder. Not collective."""
        self._abandon_hooks()
        self._writer.close(wait=False)

    def _abandon_hooks(self) -> None:
        hooks, self._hooks = self._hooks, []  # they know this object: a cycle would keep connections open
        for hook in hooks:
            hook.abandon()
