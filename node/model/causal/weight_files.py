"""A folder of weights as transformers saves them: config.json and safetensors files. Only the requested bytes are read.

The folder is a local one, any fsspec URL, or a repository on the Hugging Face hub. Layout of a safetensors file: 8 bytes with
the length of the header (little-endian), then the header, then the tensors. The header is JSON. It has for each tensor its
dtype, its shape, and where it begins and ends, counted from the end of the header.
"""

from __future__ import annotations

import json
import logging
import math
import re
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from dtfm.node.data.problems import Withheld, in_one_line
from dtfm.node.data.reaching import hub_token, needs_leave, open_place, told
from dtfm.node.host.work import WORK
from dtfm.protos.places import COORDINATORS_DISK, LOCAL, is_web
from dtfm.protos.published_files import (
    ADAPTER_CONFIG,
    CONFIG,
    GENERATION,
    INDEX,
    MOST_HEADER_BYTES,
    MOST_JSON_BYTES,
    READERS,
    SINGLE,
)
from dtfm.protos.weights_fingerprint import Described, digest_of_files, digest_of_pieces, picked_pieces

log = logging.getLogger(__name__)

MOST_FILES = 4096
PIECE_BYTES = 64 << 20
"""Of a tensor, at once: the others see in between that the reading goes on. Each piece is a request to where the files are."""
_DTYPES = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}


_TOWER = re.compile(r"^(language_model\.(model\.)?|model\.language_model\.)")
_OF_TOWER = re.compile(rf"{_TOWER.pattern}|^lm_head\.")
"""Names of tensors of the language model inside another model, by the forms that published files have."""
_HEAD = "lm_head.weight"


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """Bytes [begin, end) of ``file`` are the tensor's."""

    file: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    begin: int
    end: int


class WeightFiles:
    """The files' config and tensors.

    ``config`` is the content of config.json, and ``generation`` the content of generation_config.json. ``generation`` is None
    if that file is missing or cannot be read; the run can train without it. ``digest`` is of the config and of all descriptions
    of tensors in the files; not of the values: see `digest_of_values`.
    """

    KEY = "model.pretrained"
    """The run file's key that names the folder."""
    SETTINGS = CONFIG
    WHOLE = SINGLE
    """The file of weights where there is only one."""

    def __init__(self, name: str) -> None:
        """Reads config.json and the files' headers.

        Raises:
            ValueError: the files are missing or wrong. The message names the key, the cause and the fix.
        """
        self.name = name
        self._path = ""  # until it is open
        self.bytes_read = 0
        """Of tensors, by `read`."""
        try:
            self._fs, self._path = _open(name, self.KEY)
            described: Described = []
            self.config = self._json(self.SETTINGS, described)
            self.tensors = self._headers(described)
            self.generation = self._generation()
        except FileNotFoundError as missing:
            raise self._wrong(f"has no {self.SETTINGS} ({missing})", self._instead()) from None
        except Exception as problem:  # whatever the file system raises
            if isinstance(problem, ValueError) and str(problem).startswith(f"{self.KEY}:"):
                raise
            leave = needs_leave(repository_of(name)) if "://" not in name and not self._path else ""
            raise self._wrong(
                f"cannot be read ({in_one_line(problem)}){leave}", "is it there on this node?"
            ) from problem
        self.digest = digest_of_files(described)
        self._of_values: dict[int, bytes] = {}

    def digest_of_values(self, seed: int) -> bytes:
        """A digest of some bytes of every tensor, or of MOST_PIECES tensors; ``seed`` chooses the bytes.

        It differs for other weights of the same shapes, such as another revision or another fine-tuning, but a single wrong
        byte may escape it. Reads the files once. Raises ValueError if a file cannot be read.
        """
        if seed not in self._of_values:
            pieces = picked_pieces({name: stored.end - stored.begin for name, stored in self.tensors.items()}, seed)
            with ThreadPoolExecutor(READERS, "weights") as readers:
                contents = readers.map(lambda piece: self._piece(*piece), pieces)
                found = [(name, content) for (name, _, _), content in zip(pieces, contents, strict=True)]
            self._of_values[seed] = digest_of_pieces(found)
        return self._of_values[seed]

    @property
    def published(self) -> tuple[str, str | None]:
        """The name under which others load these files, and on the hub the commit."""
        repository, _, commit = self._path.partition("@")
        on_hub = "://" not in self.name and commit and repository == repository_of(self.name)
        return (repository, commit) if on_hub else (self.name, None)

    @property
    def is_on_this_disk(self) -> bool:
        """Whether the folder is on this machine's disk, or mounted there."""
        protocols = {self._fs.protocol} if isinstance(self._fs.protocol, str) else set(self._fs.protocol)
        return bool(protocols & LOCAL)

    def source(self, seed: int, authority: bytes) -> bytes:
        """Tells these files from others that any run on this machine may name.

        It has their place, because one run could prepare files with another run's digests. On a coordinator's disk the place is
        its ``authority``'s. On the hub the commit tells the values. Elsewhere `digest_of_values` tells them, and on this disk
        also the times of writing. Raises ValueError if a file cannot be read.
        """
        seen = [f"{self._fs.protocol} {self._path}".encode(), self.digest]
        if self.published[1] is None:
            seen.append(self.digest_of_values(seed))
        if self.name.startswith(COORDINATORS_DISK):
            seen.append(authority)
        if self.is_on_this_disk:
            files = sorted({stored.file for stored in self.tensors.values()})
            seen.append(str([self._fs.info(f"{self._path}/{file}")["mtime"] for file in files]).encode())
        return b"\n".join(seen)

    def keep_text_tower(self, config: dict[str, Any]) -> None:
        """Forgets all except the language model in a model that also reads images or sounds. Its tensors get the names that
        they have in a language model of their own, and ``config``, its settings, become the files'."""
        named = ((_TOWER.sub("", name), stored) for name, stored in self.tensors.items() if _OF_TOWER.match(name))
        self.tensors = {name if name.startswith("lm_head.") else f"model.{name}": stored for name, stored in named}
        # The outer and the inner settings may differ about this, and releases of transformers about which of them counts.
        self.config = config if _HEAD in self.tensors else config | {"tie_word_embeddings": True}

    def _piece(self, name: str, begin: int, end: int) -> bytes:
        start = self.tensors[name].begin
        return self._bytes(name, start + begin, start + end)

    def read(self, name: str) -> torch.Tensor:
        """The tensor on the CPU, in its stored dtype. Raises ValueError if the file is cut off or cannot be read."""
        stored, content = self.tensors[name], bytearray()
        for begin in range(stored.begin, stored.end, PIECE_BYTES):
            content += self._bytes(name, begin, min(begin + PIECE_BYTES, stored.end))
            WORK.did()
        self.bytes_read += len(content)
        if not content:
            return torch.empty(stored.shape, dtype=stored.dtype)
        return torch.frombuffer(content, dtype=stored.dtype).view(stored.shape)

    def _bytes(self, name: str, begin: int, end: int) -> bytes:
        """Bytes [begin, end) of the tensor's file, which belong to the tensor."""
        if begin == end:
            return b""
        file = self.tensors[name].file
        try:
            content: bytes = self._fs.cat_file(f"{self._path}/{file}", start=begin, end=end)
        except Exception as problem:
            raise self._wrong(
                f"{file} cannot be read ({in_one_line(problem)})", "is it there on this node?"
            ) from problem
        if len(content) != end - begin:
            raise self._wrong(f"{file} is cut off: {name} is missing", "copy it again")
        return content

    def _headers(self, described: Described) -> dict[str, StoredTensor]:
        if not self._fs.exists(f"{self._path}/{INDEX}"):
            if not self._fs.exists(f"{self._path}/{self.WHOLE}"):
                raise self._wrong(
                    f"has neither {self.WHOLE} nor {INDEX}",
                    "only safetensors are read; load it with transformers and save it again with save_pretrained",
                )
            return self._header(self.WHOLE, described)
        files = self._json(INDEX, described).get("weight_map")
        if not isinstance(files, dict) or not all(isinstance(file, str) for file in files.values()):
            raise self._wrong(f"{INDEX} has no weight_map", "copy it again")
        names = sorted(set(files.values()))
        if len(names) > MOST_FILES or not all(
            Path(file).name == file and file.endswith(".safetensors") for file in names
        ):
            raise self._wrong(f"{INDEX} does not name up to {MOST_FILES} .safetensors files beside it", "copy it again")
        headers = {file: self._header(file, described) for file in names}
        for tensor, file in files.items():
            if tensor not in headers[file]:
                raise self._wrong(f"{file} does not have {tensor}, although {INDEX} says so", "copy it again")
        return {tensor: headers[file][tensor] for tensor, file in files.items()}

    def _header(self, file: str, described: Described) -> dict[str, StoredTensor]:
        path = f"{self._path}/{file}"
        try:
            size = self._fs.size(path)
        except FileNotFoundError:
            raise self._wrong(f"{file} is missing", "copy it again") from None
        length = int.from_bytes(self._fs.cat_file(path, start=0, end=8), "little")
        if not 2 <= length <= min(MOST_HEADER_BYTES, size - 8):
            raise self._wrong(f"{file} is not a safetensors file, or cut off", "copy it again")
        content = self._fs.cat_file(path, start=8, end=8 + length)
        described.append((file, size, content))
        header = self._object(content, file)
        header.pop("__metadata__", None)
        return {name: self._stored(name, entry, file, 8 + length, size) for name, entry in header.items()}

    def _stored(self, name: str, entry: Any, file: str, start: int, size: int) -> StoredTensor:
        try:
            dtype, shape, (begin, end) = entry["dtype"], tuple(entry["shape"]), entry["data_offsets"]
            whole = all(type(n) is int and n >= 0 for n in (*shape, begin, end))
        except (KeyError, TypeError, ValueError):
            whole = False
        if not whole:
            raise self._wrong(f"{file} describes {name} in a way that safetensors does not have", "copy it again")
        if dtype not in _DTYPES:
            raise self._wrong(
                f"{name} is stored as {dtype}", f"quantised weights cannot be trained; give one in {', '.join(_DTYPES)}"
            )
        if end - begin != math.prod(shape) * _DTYPES[dtype].itemsize or start + end > size:
            raise self._wrong(f"{file} is cut off, or its header is wrong about {name}", "copy it again")
        return StoredTensor(file, _DTYPES[dtype], shape, start + begin, start + end)

    def _instead(self) -> str:
        """The fix for a folder without settings: what else to name."""
        try:
            config = self._json(ADAPTER_CONFIG, [])
        except Exception:  # whatever the file system raises
            return "give a folder that transformers' save_pretrained wrote"
        base = str(config.get("base_model_name_or_path"))
        return f"it is an adapter: name its model as model.pretrained ({base!r:.200}), and the folder as adapter.pretrained"

    def _generation(self) -> dict[str, Any] | None:
        try:
            return self._json(GENERATION, [])
        except FileNotFoundError:
            return None
        except Exception as problem:  # whatever the file system raises
            log.warning("%s of %s is left out of exports: %s", GENERATION, self.name, in_one_line(problem))
            return None

    def _json(self, file: str, described: Described) -> dict[str, Any]:
        content = self._fs.cat_file(f"{self._path}/{file}", start=0, end=MOST_JSON_BYTES)
        described.append((file, len(content), content))
        return self._object(content, file)

    def _object(self, content: bytes, file: str) -> dict[str, Any]:
        try:
            found = json.loads(content)
        except (ValueError, RecursionError) as problem:
            raise self._wrong(f"{file} is not JSON ({problem})", "copy it again") from None
        if not isinstance(found, dict):
            raise self._wrong(f"{file} is not a JSON object", "copy it again")
        return found

    def _wrong(self, what: str, fix: str) -> ValueError:
        sentence = f"{self.KEY}: {self.name}: {what}; {fix}"
        return Withheld(told(self.KEY, self.name), sentence) if is_web(self.name) else ValueError(sentence)


def _open(name: str, key: str) -> tuple[Any, str]:
    """The file system of the folder, and its path there."""
    local = Path(name).expanduser()
    if local.is_dir():
        name = f"file://{local.resolve()}"
    elif "://" not in name:
        if name.startswith(("/", ".", "~")) or name.count("/") > 1:
            raise ValueError(
                f"{key}: there is no folder {name!r} on this node (in {Path.cwd()}); copy it there, or give a URL "
                "that all nodes reach, or a name on the Hugging Face hub"
            )
        return _on_hub(name, key)
    fs, path = open_place(name, key)
    return fs, str(path).rstrip("/")


def repository_of(name: str) -> str:
    """OWNER/NAME of a name on the hub, which may end with "@" and a revision."""
    return name.partition("@")[0]


def _on_hub(name: str, key: str) -> tuple[Any, str]:
    """The repository at its present commit, so that all reads are of one commit. ``name`` may end with "@" and a revision."""
    from huggingface_hub import HfApi, HfFileSystem
    from huggingface_hub.errors import RevisionNotFoundError

    repository, _, revision = name.partition("@")
    token = hub_token(repository)
    try:
        found = HfApi(token=token).model_info(repository, revision=revision or None)
    except RevisionNotFoundError:
        raise ValueError(
            f"{key}: {repository} has no revision {revision!r:.100} on the Hugging Face hub; name one of its commits, tags or "
            "branches after the @, or leave it out"
        ) from None
    return HfFileSystem(token=token), f"{repository}@{found.sha}"
