"""Weights that nobody trains. They are no state: each node reads its own layers' weights, and has them once, whatever its stages.

They are in no bucket, and so in no snapshot, reduction, vote or checkpoint. Nodes agree on their files (see
`Model.weights_fingerprint`) and on how they are kept.
"""

from __future__ import annotations

import logging
import math
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from pathlib import Path

import torch
from blake3 import blake3
from torch import nn

from dtfm.node.host.work import WORK
from dtfm.node.model.frozen_cache import FrozenCache, Parts, digest_of

log = logging.getLogger(__name__)

Read = Callable[[str], torch.Tensor]
"""Reads a parameter: float32 or float64, on the CPU."""

READERS = 4
"""The number of parameters that are read at the same time."""
PIECE_BYTES = 1 << 20
"""The bytes of a layer that are given to another node at a time. A whole number of frames."""

Layout = Mapping[str, tuple[torch.dtype, tuple[int, ...]]]
"""By name, the dtypes and shapes of the tensors that a packed parameter consists of."""


class Packing:
    """How frozen weights are kept. This class keeps them unchanged, in the dtype that is computed in."""

    name = ""
    """The packing and the release of its library: another one may make other bytes. Empty: nothing is packed."""

    def packed(self, name: str, value: torch.Tensor, dtype: torch.dtype) -> nn.Parameter:
        """The parameter of that name in the host's memory, for computing in ``dtype``: the same bytes on every machine."""
        return nn.Parameter(value.to(dtype), requires_grad=False)

    def placed(self, parameter: nn.Parameter, device: torch.device) -> nn.Parameter:
        """The parameter on ``device``: the same one if it is there."""
        return nn.Parameter(parameter.to(device), requires_grad=False) if parameter.device != device else parameter

    def installable(self, parameter: nn.Parameter) -> nn.Parameter:
        """The parameter as a module takes it. It shares the memory of ``parameter``."""
        return parameter

    def prepare(self, module: nn.Module, names: Iterable[str], dtype: torch.dtype) -> None:
        """Gives ``module`` the submodules that compute with the packed parameters of these names."""

    def layout(self, name: str, shape: torch.Size, dtype: torch.dtype) -> Layout:
        """What the packed parameter of that name consists of."""
        return {"values": (dtype, tuple(shape))}

    def parts(self, parameter: nn.Parameter) -> Parts:
        """The tensors that the packed parameter consists of."""
        return {"values": parameter.detach().contiguous()}

    def joined(self, parts: Parts, shape: torch.Size, dtype: torch.dtype) -> nn.Parameter:
        """The packed parameter of these `parts`, which have its `layout`."""
        return nn.Parameter(parts["values"], requires_grad=False)

    def size(self, name: str, shape: torch.Size, dtype: torch.dtype) -> int:
        """The bytes of the packed parameter."""
        return sum(math.prod(part) * of.itemsize for of, part in self.layout(name, shape, dtype).values())

    def unpacked_bytes(self, name: str, shape: torch.Size, dtype: torch.dtype) -> int:
        """The bytes that computing with the packed parameter takes for a while."""
        return 0


class FrozenWeights:
    """The frozen weights of a model. This node's layers' are in memory. For any thread."""

    def __init__(
        self,
        of_layers: Sequence[Sequence[str]] = (),
        shapes: Mapping[str, torch.Size] | None = None,
        read: Read = lambda _name: torch.empty(0),
        packing: Packing = Packing(),  # noqa: B008  # without state
    ) -> None:
        """``of_layers``: by layer, the names of its frozen parameters; tied ones have the first of their names. ``read``:
        reads one of them, of these ``shapes``."""
        self._of_layers, self._shapes, self._read, self._packing = of_layers, shapes or {}, read, packing
        self._held: dict[str, nn.Parameter] = {}
        self._digests: dict[str, bytes] = {}  # of what was held in this dtype
        self._dtype: torch.dtype | None = None
        self._kept_in: tuple[Path, bytes] | None = None
        self._cache: FrozenCache | None = None
        self._closed = False
        self._turn = threading.Lock()

    def __bool__(self) -> bool:
        return bool(self._shapes)

    @property
    def packing(self) -> str:
        """How they are packed (see Packing.name)."""
        return self._packing.name

    def keep_in(self, folder: Path, source: bytes) -> None:
        """Keeps copies of the parameters in ``folder`` on this machine's disk from now on. ``source`` identifies their source."""
        self._kept_in = (folder, source)

    def load(self, first: int, past_last: int, dtype: torch.dtype, most_bytes: int | None = None) -> None:
        """Reads the missing parameters of layers [first, past_last) into the host's memory, for computing in ``dtype``.

        Reads at most about ``most_bytes``. Raises ValueError if one cannot be read.
        """
        with self._turn:
            self._compute_in(dtype)
            cache = self._cache
        missing = self._missing(first, past_last, dtype, most_bytes)
        if not missing:
            return
        if cache is not None:
            cache.begin(missing)
        cached = 0
        with ThreadPoolExecutor(READERS, "frozen") as readers:
            try:
                for was_cached in readers.map(lambda name: self._hold(name, dtype, cache), missing):
                    cached += was_cached
                    WORK.did()
                    if self._closed:
                        raise ValueError("this node is stopping")
            except BaseException:
                readers.shutdown(wait=False, cancel_futures=True)
                raise
        log.info(
            "read %d frozen parameters of layers %d-%d (%d from this machine's cache)",
            len(missing),
            first,
            past_last - 1,
            cached,
        )

    def into(
        self, module: nn.Module, first: int, past_last: int, device: torch.device, dtype: torch.dtype
    ) -> dict[str, nn.Parameter]:
        """The frozen parameters of layers [first, past_last) of ``module``, on ``device``, by name. Reads missing ones.
        Gives the module the submodules that compute with them."""
        names = self._names(first, past_last)
        if not names:
            return {}
        self.load(first, past_last, dtype)
        found: dict[str, nn.Parameter] = {}
        self._packing.prepare(module, names, dtype)
        for name in names:
            with self._turn:
                placed = self._packing.placed(self._held[name], device)
                self._held[name] = placed
            found[name] = self._packing.installable(placed)
            WORK.did()
        return found

    def missing(self, first: int, past_last: int, dtype: torch.dtype, most_bytes: int | None = None) -> list[int]:
        """The layers in [first, past_last) of which parameters are missing, as far as `load` would read these."""
        names = self._missing(first, past_last, dtype, most_bytes)
        return [layer for layer in range(first, past_last) if not names.keys().isdisjoint(self._of_layers[layer])]

    def digests(self, first: int, past_last: int) -> list[tuple[int, bytes]]:
        """The layers in [first, past_last) whose parameters are all held, each with the digest of these."""
        with self._turn:
            held = {name: self._digests[name] for name in self._names(first, past_last) if name in self._held}
        layers = [(layer, self._names(layer, layer + 1)) for layer in range(first, past_last)]
        return [(layer, _digest(names, held)) for layer, names in layers if names and held.keys() >= set(names)]

    def donate(self, layer: int, offset: int) -> tuple[int, Iterator[memoryview]]:
        """The number of a layer's bytes from ``offset`` on, and these bytes, for another node. Raises LookupError."""
        names = self._names(layer, layer + 1)
        with self._turn:
            held, dtype = [self._held[name] for name in names if name in self._held], self._dtype
        if dtype is None or not names or len(held) < len(names):
            raise LookupError(f"NOT_HELD: the frozen weights of layer {layer} are not held here")
        size = self.layer_bytes(layer, dtype)
        parts = (part for parameter in held for _, part in sorted(self._packing.parts(parameter).items()))
        return max(0, size - offset), _in_pieces(parts, offset)

    def take(self, layer: int, content: memoryview, digest: bytes) -> bool:
        """Holds a layer, whose bytes another node has sent. Returns False if they do not have this ``digest``."""
        with self._turn:
            dtype, cache = self._dtype, self._cache
        assert dtype is not None, "it was to be loaded before"
        made, digests, at = dict[str, Parts](), dict[str, bytes](), 0
        for name in self._names(layer, layer + 1):
            size = self._packing.size(name, self._shapes[name], dtype)
            made[name] = self._separated(name, content[at : at + size], dtype)
            digests[name] = digest_of(made[name])
            at += size
        if _digest(made, digests) != digest:
            return False
        self._have({name: (self._joined(name, parts, dtype), digests[name]) for name, parts in made.items()}, dtype)
        if cache is not None:
            for name, parts in made.items():
                with cache.turn(name, lambda: not self._closed):
                    cache.keep(name, parts, digests[name])
        return True

    def keep(self, *ranges: tuple[int, int]) -> None:
        """Lets go of the parameters of all other layers. Stages that compute with them still have them."""
        wanted = {name for first, past_last in ranges for name in self._names(first, past_last)}
        with self._turn:
            self._held = {name: held for name, held in self._held.items() if name in wanted}

    def close(self) -> None:
        """Ends the reading: the node stops."""
        self._closed = True

    def made_up(self) -> FrozenWeights:
        """The same with random numbers, and without those held here: for timing a device."""

        def drawn(name: str) -> torch.Tensor:
            shape = self._shapes[name]
            return torch.randn(shape) * 0.02 if len(shape) > 1 else torch.ones(shape)

        return FrozenWeights(self._of_layers, self._shapes, drawn, self._packing)

    def layer_bytes(self, layer: int, dtype: torch.dtype) -> int:
        """The bytes of a layer's parameters as nodes keep them."""
        return sum(self._packing.size(name, self._shapes[name], dtype) for name in self._names(layer, layer + 1))

    def unpacked_bytes(self, layer: int, dtype: torch.dtype) -> int:
        """The bytes that computing a layer takes for a while, beside its parameters as nodes keep them."""
        names = self._names(layer, layer + 1)
        return max((self._packing.unpacked_bytes(name, self._shapes[name], dtype) for name in names), default=0)

    def stage_bytes(self, first: int, past_last: int, dtype: torch.dtype) -> int:
        """The bytes of the parameters of layers [first, past_last), each once."""
        return sum(self._packing.size(name, self._shapes[name], dtype) for name in self._names(first, past_last))

    def _names(self, first: int, past_last: int) -> list[str]:
        return list(dict.fromkeys(name for of in self._of_layers[first:past_last] for name in of))

    def _missing(self, first: int, past_last: int, dtype: torch.dtype, most_bytes: int | None) -> dict[str, int]:
        """The bytes of the parameters to read, by name."""
        found, room = dict[str, int](), most_bytes
        with self._turn:
            for name in self._names(first, past_last):
                if name not in self._held:
                    size = self._packing.size(name, self._shapes[name], dtype)
                    if room is not None and (room := room - size) < 0:
                        break
                    found[name] = size
        return found

    def _hold(self, name: str, dtype: torch.dtype, cache: FrozenCache | None) -> bool:
        """Reads a parameter. Returns whether the cache had it."""
        with cache.turn(name, lambda: not self._closed) if cache is not None else nullcontext():
            found = None
            if cache is not None:
                found = cache.find(name, lambda parts, digest: (self._joined(name, parts, dtype), digest))
            if found is not None:
                packed, digest = found
            else:
                packed = self._packing.packed(name, self._read(name), dtype)
                digest = digest_of(self._packing.parts(packed))
                if cache is not None:
                    cache.keep(name, self._packing.parts(packed), digest)
        self._have({name: (packed, digest)}, dtype)
        return found is not None

    def _have(self, packed: Mapping[str, tuple[nn.Parameter, bytes]], dtype: torch.dtype) -> None:
        with self._turn:
            if self._dtype == dtype:
                for name, (parameter, digest) in packed.items():
                    self._held.setdefault(name, parameter)
                    self._digests[name] = digest

    def _joined(self, name: str, parts: Parts, dtype: torch.dtype) -> nn.Parameter:
        """The packed parameter of these parts. Raises ValueError if it has others."""
        layout = self._packing.layout(name, self._shapes[name], dtype)
        if {part: (value.dtype, tuple(value.shape)) for part, value in parts.items()} != layout:
            raise ValueError("it has other tensors than this packing makes")
        return self._packing.joined(parts, self._shapes[name], dtype)

    def _separated(self, name: str, content: memoryview, dtype: torch.dtype) -> Parts:
        """The parts of a parameter, from their bytes in order of their names."""
        found, at = dict[str, torch.Tensor](), 0
        for part, (of, shape) in sorted(self._packing.layout(name, self._shapes[name], dtype).items()):
            end = at + math.prod(shape) * of.itemsize
            found[part] = torch.frombuffer(bytearray(content[at:end]), dtype=of).view(shape)
            at = end
        return found

    def _compute_in(self, dtype: torch.dtype) -> None:
        """The precision of a run may change before its first step."""
        if self._dtype != dtype:
            self._held, self._digests, self._dtype, self._cache = {}, {}, dtype, None
            if self._kept_in is not None:
                folder, source = self._kept_in
                self._cache = FrozenCache(folder, f"{self._packing.name}\n{dtype}\n".encode() + source)


def _digest(names: Iterable[str], digests: Mapping[str, bytes]) -> bytes:
    """A layer's digest, from the ``digests`` of its parameters of these ``names``."""
    found = blake3()
    for name in names:
        found.update(f"{name} ".encode()).update(digests[name])
    return found.digest()


def _in_pieces(parts: Iterable[torch.Tensor], offset: int) -> Iterator[memoryview]:
    """The bytes of the parts from ``offset`` on. Each piece but the last has PIECE_BYTES."""
    rest, skip = bytearray(), offset
    for part in parts:
        if skip >= part.nbytes:
            skip -= part.nbytes
            continue
        content = part.to("cpu").contiguous().view(-1).view(torch.uint8).numpy()[skip:]
        skip = 0
        for at in range(0, len(content), PIECE_BYTES):
            rest += content[at : at + PIECE_BYTES].data
            if len(rest) >= PIECE_BYTES:
                yield memoryview(bytes(rest[:PIECE_BYTES]))
                del rest[:PIECE_BYTES]
    if rest:
        yield memoryview(rest)
