"""GPUs that are not there, under which every missing wait between streams shows.

What is made on ``cuda:N`` lies in the host's memory, and is computed at once. But each operation counts as queued on its thread's
current stream, as it would be on a GPU, and it is noted what it reads and writes. Two accesses to the same bytes of which one
writes must be ordered: by being queued on one stream, or by an event that the later stream, or the host, has waited for. So must
the last use of memory that is freed and what comes next on the stream it was made on, which may get that memory. Whatever is not
ordered is noted as an error, however the threads happened to run: vector clocks (Mattern 1989), as data-race detectors have them.

The host counts as one thread: what one of its threads has waited for, all have. So a wait that is missing in a thread while
another one waits for the same may be overlooked; nothing is noted that is right.
"""

from __future__ import annotations

import itertools
import sys
import threading
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any, ClassVar, cast

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch._ops import OpOverload
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from dtfm.kernels import codec, digest, transfer
from dtfm.kernels.memory import Memory
from dtfm.node.host import cuda_streams

HOST = 0
"""The host's number among those who act; streams have others."""

SHAPES_ALONE = {"empty_like", "zeros_like", "ones_like", "full_like", "new_empty", "new_zeros", "new_full"}
"""Operations that look at their argument's shape, and not at its elements."""

MIX = {"copy_", "index", "index_put_"}
"""Operations whose arguments may be on different devices."""

PLAIN = torch.Tensor, torch.nn.Parameter
"""Other kinds of tensors, such as fake ones, have no memory."""

LOOK_EVERY = 32
"""Accesses between two looks at what has been freed. A look takes as long as several of them."""

#: By actor, how much of what it did or queued is known to be done.
Clock = Counter[int]


@dataclass(frozen=True, slots=True)
class Access:
    """To the bytes from ``start`` to ``stop`` of a storage."""

    actor: int
    writes: bool
    start: int
    stop: int


@dataclass(slots=True)
class Storage:
    """Memory that streams use. ``device``: its number; None: pinned memory of the host. ``made_on`` is the stream that its
    allocation belongs to. ``last``: by access, the actor's count and who did it; a later one of the same kind replaces it."""

    alive: StorageWeakRef | None
    device: int | None
    made_on: int
    last: dict[Access, tuple[int, str]] = field(default_factory=dict)


class Stream:
    gpus: ClassVar[PretendedGpus]

    def __init__(self, device: torch.device) -> None:
        self.device, self.number = device, next(self.gpus.numbers)
        self.gpus.clocks[self.number] = Counter()

    def record_event(self, event: Event | None = None) -> Event:
        event = event or self.gpus.Event()
        event.record(self)
        return event

    def wait_event(self, event: Event) -> None:
        with self.gpus.lock:
            self.gpus.clocks[self.number] |= event.clock


class Event:
    gpus: ClassVar[PretendedGpus]

    def __init__(self, **_: bool) -> None:
        self.clock = Clock()

    def record(self, stream: Stream) -> None:
        with self.gpus.lock:
            self.clock = Counter(self.gpus.clocks[stream.number])

    def synchronize(self) -> None:
        with self.gpus.lock:
            self.gpus.clocks[HOST] |= self.clock

    def elapsed_time(self, _: Event) -> float:
        return 1.0


class PretendedGpus:
    """Made by `pretended_gpus`. ``errors``: sentences, each about two uses of memory of which neither waits for the other."""

    def __init__(self) -> None:
        self.lock = threading.RLock()
        self.numbers = itertools.count(HOST + 1)
        self.clocks: dict[int, Clock] = {HOST: Counter()}
        self.errors: dict[str, None] = {}
        self.accesses = self._looked = 0
        self._storages: dict[int, Storage] = {}
        self._locked: dict[int, NDArray[np.uint8]] = {}  # by address
        self._default: dict[int, Stream] = {}
        self._current = threading.local()
        self.moving = threading.local()
        """``now``: the thread moves a tensor to another device on purpose."""
        self.Stream: type[Stream] = type("Stream", (Stream,), {"gpus": self})
        self.Event: type[Event] = type("Event", (Event,), {"gpus": self})

    # Streams

    def current(self, device: torch.device | None = None) -> Stream:
        number = (device.index if device is not None else None) or 0
        chosen: Stream | None = getattr(self._current, "stream", None)
        if chosen is not None and chosen.device.index == number:
            return chosen
        with self.lock:
            if number not in self._default:
                self._default[number] = self.Stream(torch.device("cuda", number))
            return self._default[number]

    @contextmanager
    def on(self, stream: Stream) -> Iterator[None]:
        before = getattr(self._current, "stream", None)
        self._current.stream = stream
        try:
            yield
        finally:
            self._current.stream = before

    # Memory

    def page_locked(self, size: int) -> NDArray[np.uint8]:
        block = np.empty(size, np.uint8)
        self._locked[block.ctypes.data] = block
        return block

    def storage(self, tensor: torch.Tensor) -> Storage | None:
        """None: of memory that no stream uses."""
        if type(tensor) not in PLAIN or tensor.is_meta or tensor.layout is not torch.strided:
            return None
        at = tensor.untyped_storage()
        if at.data_ptr() in self._locked:
            return self._storages.setdefault(at.data_ptr(), Storage(None, None, HOST))
        return self._storages.get(at._cdata)

    def device(self, tensor: torch.Tensor) -> int | None:
        found = self.storage(tensor)
        return found.device if found is not None else None

    def register(self, tensor: torch.Tensor, device: int | None) -> None:
        at = tensor.untyped_storage()
        made_on = HOST if device is None else self.current(torch.device("cuda", device)).number
        alive = StorageWeakRef(at)  # type: ignore[no-untyped-call]
        self._storages.setdefault(at._cdata, Storage(alive, device, made_on))

    def free(self) -> None:
        """Forgets storages that are gone. What comes next on the stream that such memory was made on may get it."""
        for key, storage in list(self._storages.items()):
            if storage.alive is not None and storage.alive.expired():  # type: ignore[no-untyped-call]
                del self._storages[key]
                known = self.clocks[storage.made_on] | self.clocks[HOST]
                for access, (count, who) in storage.last.items():
                    if storage.device is not None and access.actor != storage.made_on and count > known[access.actor]:
                        self.note(f"{who} may use memory after it is freed")

    def access(self, actor: int, tensors: Sequence[tuple[torch.Tensor, bool]], name: str) -> None:
        """That ``actor`` uses these tensors, and whether it writes to them."""
        if self.accesses // LOOK_EVERY != self._looked:
            self._looked = self.accesses // LOOK_EVERY
            self.free()
        clock = self.clocks[actor]
        clock |= self.clocks[HOST]
        clock[actor] += 1
        who = f"{name} in {place()}"
        for tensor, writes in tensors:
            storage = self.storage(tensor)
            if storage is None or not tensor.numel():
                continue
            self.accesses += 1
            start = int(tensor.storage_offset()) * tensor.itemsize
            last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
            mine = Access(actor, writes, start, start + (int(last) + 1) * tensor.itemsize)
            for other, (count, by) in storage.last.items():
                overlaps = other.start < mine.stop and mine.start < other.stop
                if overlaps and (writes or other.writes) and count > clock[other.actor]:
                    self.note(f"{who} does not wait for {by}")
            storage.last[mine] = clock[actor], who

    def note(self, error: str) -> None:
        self.errors[error] = None

    def host_uses(self, tensor: torch.Tensor, name: str) -> None:
        with self.lock:
            if self.storage(tensor) is not None:
                self.access(HOST, [(tensor, True)], name)


class Watching(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Notes what a thread does. All of it runs on the CPU."""

    def __init__(self, gpus: PretendedGpus) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.gpus = gpus

    def __torch_dispatch__(
        self, function: OpOverload, types: object, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        gpus, options, name = self.gpus, dict(kwargs or {}), function._schema.name.removeprefix("aten::")
        given, asked = tensors_in((args, options)), options.get("device")
        if any(type(each) not in PLAIN or each.is_meta for each in given) or (asked and asked.type == "meta"):
            return function(*args, **options)
        devices = {device for each in given if (device := gpus.device(each)) is not None}
        of_host = [each for each in given if gpus.device(each) is None and each.ndim]
        if len(devices) > 1 or (devices and of_host and name not in MIX):
            raise RuntimeError(f"{name} in {place()} mixes devices")
        onto = min(devices, default=None)
        if asked is not None:
            # Autograd takes all tensors for the CPU's, and brings gradients back to it.
            if name != "_to_copy" or getattr(gpus.moving, "now", False):
                onto = asked.index or 0 if asked.type == "cuda" else None
            options["device"] = torch.device("cpu")
        pins = options.pop("pin_memory", None) is True
        result = function(*args, **options)
        made = [each for each in tensors_in(result) if all(each is not other for other in given)]
        with gpus.lock:
            for each in made:
                if (onto is not None or pins) and gpus.storage(each) is None:
                    gpus.register(each, onto)
            if not only_views(function):
                written = tensors_in(written_arguments(function, args, options))
                used = [(each, any(each is other for other in written)) for each in given if name not in SHAPES_ALONE]
                used += [(each, True) for each in made]
                self._note(name, used, options, args, devices | ({onto} if onto is not None else set()))
        return result

    def _note(
        self,
        name: str,
        used: Sequence[tuple[torch.Tensor, bool]],
        options: Mapping[str, Any],
        args: Sequence[Any],
        devices: set[int],
    ) -> None:
        gpus = self.gpus
        if not devices:
            gpus.access(HOST, used, name)
            return
        stream = gpus.current(torch.device("cuda", min(devices)))
        gpus.access(stream.number, used, name)
        of_host = [each for each, _ in used if gpus.device(each) is None and each.ndim]
        goes_on = options.get("non_blocking") or (name == "copy_" and True in args[2:])
        pinned = all(gpus.storage(each) is not None for each in of_host)
        if name == "_local_scalar_dense" or (of_host and not (goes_on and pinned)):
            gpus.clocks[HOST] |= gpus.clocks[stream.number]


def tensors_in(tree: object) -> list[torch.Tensor]:
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, torch.Tensor)]


def only_views(function: OpOverload) -> bool:
    """Whether its result is another view of an argument, whose elements it does not use."""
    returns = [each.alias_info for each in function._schema.returns]
    return bool(returns) and all(alias is not None and not alias.is_write for alias in returns)


def written_arguments(function: OpOverload, args: Sequence[Any], options: Mapping[str, Any]) -> list[Any]:
    return [
        args[number] if number < len(args) else options.get(argument.name)
        for number, argument in enumerate(function._schema.arguments)
        if argument.alias_info is not None and argument.alias_info.is_write
    ]


def place() -> str:
    """The file and the function of the product's code that is at work."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and "/dtfm/" not in frame.f_code.co_filename:
        frame = frame.f_back
    return f"{Path(frame.f_code.co_filename).name}, {frame.f_code.co_name}" if frame is not None else "a test"


@contextmanager
def pretended_gpus() -> Iterator[PretendedGpus]:
    """Within it ``cuda:N`` may be used, by this thread and those that it starts."""
    gpus, run, plain, monkeypatch = PretendedGpus(), threading.Thread.run, torch._C.TensorBase, pytest.MonkeyPatch()

    def watched(thread: threading.Thread) -> None:
        with Watching(gpus):
            run(thread)

    def device_of(tensor: torch.Tensor) -> torch.device:
        number = gpus.device(tensor)
        real: torch.device = plain.device.__get__(tensor)
        return real if number is None else torch.device("cuda", number)

    def to(tensor: torch.Tensor, *args: Any, **options: Any) -> torch.Tensor:
        """As on a GPU: a tensor that is there already is not copied."""
        device, *others = (
            args if args and isinstance(args[0], torch.device | str) else (options.pop("device", None), *args)
        )
        if device is None or torch.device(device) == device_of(tensor):
            moved: torch.Tensor = plain.to(tensor, *others, **options) if others or options else tensor
            return moved
        device, copied = torch.device(device), torch.ops.aten._to_copy.default
        dtype = next((each for each in others if isinstance(each, torch.dtype)), options.get("dtype"))
        waits = {"non_blocking": True} if options.get("non_blocking") else {}
        gpus.moving.now = True
        try:
            return cast(torch.Tensor, copied(tensor, dtype=dtype, device=device, **waits))
        finally:
            gpus.moving.now = False

    def pin_memory(tensor: torch.Tensor) -> torch.Tensor:
        pinned = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
        return pinned.copy_(tensor)

    def numpy(tensor: torch.Tensor) -> NDArray[Any]:
        if gpus.device(tensor) is not None:
            raise TypeError("a GPU's memory is not NumPy's")
        gpus.host_uses(tensor, "numpy")
        return plain.numpy(tensor)

    def cpu(tensor: torch.Tensor) -> torch.Tensor:
        return tensor.to(torch.device("cpu"))

    def tolist(tensor: torch.Tensor) -> Any:
        return plain.tolist(cpu(tensor))

    for name, patched in {
        "device": property(device_of),
        "is_cuda": property(lambda tensor: gpus.device(tensor) is not None),
        "to": to,
        "pin_memory": pin_memory,
        "numpy": numpy,
        "cpu": cpu,
        "tolist": tolist,
    }.items():
        monkeypatch.setattr(torch.Tensor, name, patched, raising=False)
    for name, replaced in {
        "Event": gpus.Event,
        "Stream": gpus.Stream,
        "current_stream": gpus.current,
        "stream": gpus.on,
        "_lazy_init": lambda: None,
    }.items():
        monkeypatch.setattr(torch.cuda, name, replaced)
    for module in (codec, digest):  # the kernels that CuPy launches are not followed
        monkeypatch.setattr(module, "gpu_kernels", lambda _: None)
    monkeypatch.setattr(threading.Thread, "run", watched)
    monkeypatch.setattr(transfer, "PINNED", Memory(transfer.KEPT_BYTES, gpus.page_locked))
    cuda_streams._side_stream.cache_clear()
    try:
        with Watching(gpus):
            yield gpus
    finally:
        cuda_streams._side_stream.cache_clear()
        monkeypatch.undo()
