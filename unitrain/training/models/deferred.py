"""Builds a model that takes no memory: what its tensors come from is recorded, and done again when they are needed.

Every operation of the construction is carried out when it is called. So random numbers are drawn in the order of any
construction, and conditions see true values. A large result is forgotten soon afterwards. To have it again, the calls
that it comes from are repeated, each with the state that the generator of random numbers had.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, ClassVar, NamedTuple, TypeGuard

import torch
from torch import Tensor, UntypedStorage
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import TreeSpec, tree_flatten, tree_leaves, tree_unflatten

from unitrain.errors import UsageError
from unitrain.process import return_memory

LARGE = 2**16
"""Bytes from which on a new tensor is deferred: smaller ones take less to have than to describe."""
_KEPT = 4  # as many bytes as this many of the largest tensor are not forgotten yet: those that an initialiser works on
_CPU = torch.device("cpu")
_OVERWRITING = frozenset(
    f"aten::{name}"
    for name in ("copy_", "exponential_", "fill_", "log_normal_", "normal_", "random_", "uniform_", "zero_")
)


class DeferredTensor(Tensor):
    """A tensor without memory, which reports to be on the CPU.

    Its storage is one of the meta device. Views of it, and tensors whose ``data`` it becomes, share that.
    """

    recorder: Recorder
    __torch_function__: ClassVar[Any] = torch._C._disabled_torch_function_impl

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        """Carry out and record an operation, be it one that follows the construction."""
        return _dispatched(func, args, kwargs or {}, None)

    def __repr__(self, *, tensor_contents: Any = None) -> Any:  # type: ignore[override]
        return f"DeferredTensor(shape={tuple(self.shape)}, dtype={self.dtype})"

    def __reduce_ex__(self, protocol: object) -> Any:
        raise UsageError("a model that was built within strategy.deferred() can't be saved before it is prepared.")


class _Construction(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Has operations recorded that make tensors from nothing, or from small ones."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.recorder = Recorder()

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # else the first call imports the compiler, which takes seconds

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return _dispatched(func, args, kwargs or {}, self.recorder)


def _dispatched(function: Any, args: Any, kwargs: Any, default: Recorder | None) -> Any:
    if function is torch.ops.prim.device.default:
        return _CPU
    found = [leaf for leaf in (*_changed(function, args, kwargs), *tree_leaves((args, kwargs))) if is_deferred(leaf)]
    recorder = found[0].recorder if found else default
    assert recorder is not None
    return recorder.run(function, args, kwargs)


@contextmanager
def deferred() -> Iterator[None]:
    """Context manager in which large tensors take no memory. See ``Strategy.deferred``."""
    construction = _Construction()
    try:
        with construction:
            yield
    finally:
        construction.recorder.forget()
        return_memory()


def is_deferred(value: object) -> TypeGuard[DeferredTensor]:
    """Return whether a value is a tensor that takes no memory, but can be materialised."""
    return isinstance(value, DeferredTensor)


@torch.no_grad()
def materialise(tensor: DeferredTensor) -> Tensor:
    """Return a deferred tensor in memory. Each call computes it again."""
    place = _place(tensor)
    storage = tensor.untyped_storage()
    # It may have got a tensor in memory as its data.
    return place.on(tensor.recorder.in_memory(place.key) if storage.device.type == "meta" else storage)


class _Place(NamedTuple):
    """Where a tensor is: its storage, by address, and its place there."""

    key: int
    dtype: torch.dtype
    offset: int
    shape: tuple[int, ...]
    stride: tuple[int, ...]

    def on(self, storage: UntypedStorage) -> Tensor:
        """Return a tensor at this place of a storage."""
        return torch.empty(0, dtype=self.dtype, device=storage.device).set_(
            storage, self.offset, self.shape, self.stride
        )


def _place(tensor: Tensor) -> _Place:
    if tensor.is_conj() or tensor.is_neg():
        raise UsageError("strategy.deferred() does not support views of complex tensors: build the model without it.")
    key = tensor.untyped_storage()._cdata
    return _Place(key, tensor.dtype, int(tensor.storage_offset()), tuple(tensor.shape), tensor.stride())


class _Call(NamedTuple):
    """An operation that was carried out."""

    function: Any
    given: Sequence[Any]
    """Its arguments, flat, with a ``_Place`` for each deferred tensor."""
    structure: TreeSpec
    made: Sequence[int | None]
    """For each result its storage, if that is new and deferred."""
    after: frozenset[int]
    """The calls that wrote last to what it reads."""
    generator: Tensor | None
    """The state of the generator, if it drew random numbers."""
    dtype: torch.dtype
    """The default dtype."""


class Recorder:
    """Carries out operations, and records what deferred tensors come from."""

    def __init__(self) -> None:
        self._calls: list[_Call] = []
        self._storages: dict[int, UntypedStorage] = {}  # of the meta device, by address, which stays theirs
        self._writer: dict[int, int] = {}  # by storage, the call that wrote to it last
        self._kept: OrderedDict[int, UntypedStorage] = OrderedDict()  # in memory; what was used last is at the end
        self._largest = 0

    def __deepcopy__(self, memo: object) -> Recorder:
        return self

    def forget(self) -> None:
        """Keep nothing in memory."""
        self._kept.clear()

    # ------------------------------------------------------------------------------------------------- recording

    def run(self, function: Any, args: Any, kwargs: Any) -> Any:
        """Carry out an operation, and record it if it makes or changes deferred tensors."""
        leaves, structure = tree_flatten((args, kwargs))
        own = {i: _place(leaf) for i, leaf in enumerate(leaves) if is_deferred(leaf)}
        own = {i: place for i, place in own.items() if place.key in self._storages}
        leaves = [materialise(leaf) if is_deferred(leaf) and i not in own else leaf for i, leaf in enumerate(leaves)]
        changed = {id(value) for value in _changed(function, args, kwargs)}
        overwritten = self._overwritten(function, leaves, own)
        read = {place.key for place in own.values()} - {overwritten}
        if _is_view(function):
            memory = {key: self._kept[key] for key in read if key in self._kept}  # no content is needed
        else:
            memory = {key: self.in_memory(key) for key in read}
        if overwritten is not None and overwritten in self._kept:
            memory[overwritten] = self._kept[overwritten]
        given = self._given([own.get(i, leaf) for i, leaf in enumerate(leaves)], memory)
        recorded = [own[i] if i in own else _copied(leaf) for i, leaf in enumerate(leaves)]  # the call may change it
        generator = _generator(leaves)
        state = generator.get_state()
        results, form = _called(function, given, structure)

        made = self._adopt(results, given, memory, least=0 if own else LARGE)
        written = {own[i].key for i, leaf in enumerate(leaves) if i in own and id(leaf) in changed}
        if written or any(made):
            after = frozenset(self._writer[key] for key in read)
            self._writer.update(dict.fromkeys([*written, *filter(None, made)], len(self._calls)))
            drew = None if torch.equal(state, generator.get_state()) else state
            self._calls.append(_Call(function, recorded, structure, made, after, drew, torch.get_default_dtype()))
        if not _is_view(function):
            for key, storage in memory.items():
                self._keep(key, storage)
        keys = {storage._cdata: key for key, storage in memory.items()}
        originals = {id(given[i]): leaves[i] for i in own}
        for i, place in own.items():
            now = _place(given[i])
            if now.key not in keys:
                raise UsageError(f"strategy.deferred() does not support {function}: build the model without it.")
            now = now._replace(key=keys[now.key])
            if now != place:  # it was transposed in place, say
                leaves[i].data = self._deferred(now)
        returned = [
            originals[id(value)]
            if id(value) in originals
            else self._deferred(_place(value)._replace(key=keys[value.untyped_storage()._cdata]))
            if _is_dense(value) and value.untyped_storage()._cdata in keys
            else value
            for value in results
        ]
        _refuse_other_devices(own, results)
        return tree_unflatten(returned, form)

    def _overwritten(self, function: Any, leaves: Sequence[Any], own: Mapping[int, _Place]) -> int | None:
        """Return the storage whose content does not matter, as the call overwrites all of it."""
        first = own.get(0)
        if first is None or function._schema.name not in _OVERWRITING:
            return None
        whole = leaves[0].is_contiguous() and leaves[0].nbytes == self._storages[first.key].nbytes()
        return first.key if whole and [place.key for place in own.values()].count(first.key) == 1 else None

    def _adopt(
        self, results: Sequence[Any], given: Sequence[Any], memory: dict[int, UntypedStorage], least: int
    ) -> list[int | None]:
        """Add new storages of so many bytes to those in memory, and return them, for each result."""
        known = {leaf.untyped_storage()._cdata for leaf in given if _is_dense(leaf)}
        made: list[int | None] = []
        for value in results:
            storage = value.untyped_storage() if _is_dense(value) else None
            if storage is None or storage._cdata in known or storage.nbytes() < least:
                made.append(None)
                continue
            known.add(storage._cdata)
            meta = _storage(storage.nbytes(), "meta")
            self._storages[meta._cdata], memory[meta._cdata] = meta, storage
            made.append(meta._cdata)
        return made

    def _deferred(self, place: _Place) -> DeferredTensor:
        made: DeferredTensor = Tensor._make_subclass(
            DeferredTensor, place.on(self._storages[place.key]), dispatch_device=True, device_for_backend_keys=_CPU
        )
        made.recorder = self
        return made

    # -------------------------------------------------------------------------------------------------- repeating

    def in_memory(self, key: int) -> UntypedStorage:
        """Return a storage with its content."""
        found = self._kept.get(key)
        return self._repeated(key) if found is None else found

    def _keep(self, key: int, storage: UntypedStorage) -> None:
        self._kept[key] = storage
        self._kept.move_to_end(key)
        self._largest = max(self._largest, storage.nbytes())
        while sum(one.nbytes() for one in self._kept.values()) > _KEPT * self._largest:
            self._kept.popitem(last=False)

    def _given(self, values: Sequence[Any], memory: dict[int, UntypedStorage]) -> list[Any]:
        """Return arguments with tensors in memory. New memory is for what is overwritten."""
        for value in values:
            if isinstance(value, _Place) and value.key not in memory:
                memory[value.key] = _storage(self._storages[value.key].nbytes(), "cpu")
        return [value.on(memory[value.key]) if isinstance(value, _Place) else value for value in values]

    def _repeated(self, key: int) -> UntypedStorage:
        """Repeat the calls that a storage's content comes from, in their order."""
        needed, found = set[int](), [self._writer[key]]
        while found:
            number = found.pop()
            if number not in needed:
                needed.add(number)
                found += self._calls[number].after
        memory: dict[int, UntypedStorage] = {}
        for number in sorted(needed):
            self._repeat(self._calls[number], memory)
        return memory[key]

    def _repeat(self, call: _Call, memory: dict[int, UntypedStorage]) -> None:
        given = self._given([_copied(value) for value in call.given], memory)
        default = torch.get_default_dtype()
        state = torch.default_generator.get_state()
        torch.set_default_dtype(call.dtype)
        try:
            if call.generator is not None:
                own = [i for i, value in enumerate(given) if isinstance(value, torch.Generator)]
                for i in own:
                    given[i] = torch.Generator()
                _generator(given).set_state(call.generator)
            results, _ = _called(call.function, given, call.structure)
        finally:
            torch.default_generator.set_state(state)
            torch.set_default_dtype(default)
        memory.update((key, value.untyped_storage()) for key, value in zip(call.made, results, strict=True) if key)


def _storage(nbytes: int, device: str) -> UntypedStorage:
    return UntypedStorage(nbytes, device=device)  # type: ignore[no-untyped-call]


def _changed(function: Any, args: Any, kwargs: Any) -> list[Any]:
    """Return the tensors that an operation writes to, by its schema."""
    found = []
    for i, argument in enumerate(function._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            found += tree_leaves(args[i] if i < len(args) else kwargs.get(argument.name))
    return found


def _is_view(function: Any) -> bool:
    """Return whether an operation only returns views of its arguments, by its schema."""
    aliases = [one.alias_info for one in function._schema.returns]
    return bool(aliases) and all(alias is not None and not alias.is_write for alias in aliases)


def _called(function: Any, given: Sequence[Any], structure: TreeSpec) -> tuple[list[Any], TreeSpec]:
    args, kwargs = tree_unflatten(given, structure)
    return tree_flatten(function(*args, **kwargs))


def _copied(value: Any) -> Any:
    return value.clone() if isinstance(value, Tensor) else value


def _generator(given: Sequence[Any]) -> torch.Generator:
    return next((value for value in given if isinstance(value, torch.Generator)), torch.default_generator)


def _is_dense(value: object) -> TypeGuard[Tensor]:
    return isinstance(value, Tensor) and value.device == _CPU and value.layout == torch.strided


def _refuse_other_devices(own: Mapping[int, _Place], results: Sequence[Any]) -> None:
    if own and any(isinstance(value, Tensor) and value.device != _CPU for value in results):
        raise UsageError(
            "a model that is built within strategy.deferred() can't be moved to another device: prepare() does that."
        )
