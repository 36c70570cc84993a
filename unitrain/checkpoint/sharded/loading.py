"""Reads the states of a checkpoint, which rank 0 has opened, or of which each rank reads its part."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from torch import Tensor
from torch.optim import Optimizer

from unitrain.checkpoint.names import PARAMS, STATE
from unitrain.checkpoint.sharded.dcp import METADATA, Stored
from unitrain.checkpoint.sharded.opening import OpenCheckpoint
from unitrain.checkpoint.sharded.saving import owners
from unitrain.checkpoint.store.located import DamagedError, Located, Manifest, store_at
from unitrain.communication.communicator import Communicator
from unitrain.communication.comparison import first_reason
from unitrain.communication.state_transfer import SentState, Triples, broadcast_tensors, outline
from unitrain.errors import CheckpointError


class CheckpointView(NamedTuple):
    """An open checkpoint, as a rank sees it."""

    communicator: Communicator
    place: str  # the path or URL of the checkpoint
    manifest: Manifest
    outlines: dict[str, Any]  # the states by key, with the forms of the tensors in their places
    saved: OpenCheckpoint | None  # the checkpoint itself; on rank 0 only
    by_several: bool  # whether several ranks have written tensors
    stored: Stored | None  # those tensors, if this rank sees them
    each: bool  # whether each rank reads its own parts of them; else rank 0 reads all, and sends the parts

    def state(self, key: str) -> SentState:
        """Return the state of a part."""
        source = None if self.saved is None else self.saved.parts[key]
        return SentState(self.communicator, self.outlines[key], source, sent=self.release, fill=self._fill)

    def release(self) -> None:
        """Release mapped pages."""
        if self.saved is not None:
            self.saved.files.release()

    def close(self) -> None:
        """Remove downloaded files."""
        if self.stored is not None:
            self.stored.close()

    def verify(self) -> str:
        """Have each rank verify some of the files. Return the damage, "" if there is none. Collective.

        If there are as many ranks as when the files were written, they are those that the rank reads. It verifies
        others that it reads when it opens them.
        """
        if not self.by_several:
            return ""
        ranks, damage, why = self.communicator, "", ""
        names = [name for name in self.manifest.files if name.endswith(".distcp")]  # in the order of ranks
        # As many, one after the other: what a rank needs of tensors that are divided anew is mostly in these.
        mine = [name for n, name in enumerate(names) if n * ranks.world_size // len(names) == ranks.rank]
        try:
            if self.stored is not None:
                self.stored.fetch(mine if self.each else names)
        except DamagedError as error:
            damage = str(error)
        except CheckpointError as error:
            why = str(error)
        # A file that can't be read now is no damage, after which an older checkpoint would be taken.
        if why := first_reason(ranks, why):
            raise CheckpointError(f"{why}. Nothing was loaded.")
        return first_reason(ranks, damage)

    def _fill(self, optimizer: Optimizer | None, triples: Triples) -> None:
        """Overwrite tensors of a part, given their paths and forms. Collective. Raises CheckpointError.

        Args:
            optimizer: the optimizer that the state is of, if it is one's.
            triples: the path of each tensor, its form and the tensor.
        """
        if not self.by_several:
            return
        ranks, reads, sent = self.communicator, dict[str, Tensor](), dict[str, Tensor]()
        owned: list[int | None] = []
        if optimizer is not None:
            count = sum(len(group[PARAMS]) for group in optimizer.param_groups)
            owned = owners(ranks, optimizer.state_dict()[STATE], count)
        for path, form, tensor in triples:
            key, sharded = str(form.key), ranks.sharding.is_sharded(tensor)
            owner = owned[path[1]] if owned and path[0] == STATE else None
            is_read = sharded or owner == ranks.rank
            if not self.each or (owner is None and not sharded):
                sent[key] = tensor
                # Rank 0 reads a sharded tensor when it is sent.
                is_read = ranks.is_main and not sharded and not tensor.is_meta
            if is_read:
                reads[key] = tensor
        self._read(reads)
        if ranks.world_size > 1:
            stored = self.stored
            sources = (whole if key in reads or stored is None else stored.whole(key) for key, whole in sent.items())
            broadcast_tensors(ranks, list(sent.values()), sources)

    def _read(self, reads: dict[str, Tensor]) -> None:
        why = ""
        try:
            if self.stored is not None:
                self.stored.read(reads)
        except (DamagedError, CheckpointError) as error:
            why = str(error)
        if why := first_reason(self.communicator, why):
            raise CheckpointError(why)
        self.release()


def open_on_all(communicator: Communicator, opened: Callable[[], OpenCheckpoint | None]) -> CheckpointView | None:
    """Return the checkpoint that ``opened`` returns on rank 0, as this rank sees it. Collective.

    Errors of ``opened`` are raised on every rank.
    """
    saved: OpenCheckpoint | None = None

    def described() -> tuple[dict[str, Any], dict[str, Any], str | None, str] | None:
        nonlocal saved
        saved = opened()
        if saved is None:
            return None
        digest = None if saved.stored is None else saved.stored.digest
        return saved.located.manifest.model_dump(), outline(saved.parts), digest, saved.located.place

    description = communicator.on_main(described)
    if description is None:
        return None
    dumped, outlines, digest, place = description
    manifest = Manifest.model_validate(dumped)
    stored = None if saved is None else saved.stored
    if digest is not None and communicator.sharding.any and not communicator.is_main:
        stored = _seen(place, manifest, digest)
    each = digest is not None and communicator.sharding.any and all(communicator.all_gather_data(stored is not None))
    return CheckpointView(communicator, place, manifest, outlines, saved, digest is not None, stored, each)


def _seen(place: str, manifest: Manifest, digest: str) -> Stored | None:
    """Open rank 0's checkpoint on another rank. Return None if this rank does not see the same files."""
    store = store_at(place)
    try:
        stored = Stored(Located(store, "", manifest), store.get(METADATA))
    except (OSError, CheckpointError):
        return None
    # A host's own disk may have an earlier run's checkpoint in a folder of this name.
    return stored if stored.digest == digest else None
