"""What a node sends from its disk to the run's place for checkpoints, how fast, and when it stops."""

from __future__ import annotations

import asyncio
import queue
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from unittest import mock
from uuid import uuid4

import fsspec
import pytest
import safetensors.torch
import torch
from blake3 import blake3
from hypothesis import given, strategies as st

from dtfm.node.data.allowed import Allowed
from dtfm.node.data.shared.storage import NewFile
from dtfm.node.model.bucket import Bucket, BucketSpec
from dtfm.node.state import disk, uploads
from dtfm.node.state.disk import Disk
from dtfm.node.state.snapshot_files import file_header, file_name
from dtfm.node.state.uploads import PIECE_BYTES, Uploads
from dtfm.protos.checkpoint_names import bucket_file, marker_file
from dtfm.protos.control_pb2 import Keep, Move, Moved, NodeMessage, Part
from dtfm.protos.plan_pb2 import Run
from tests.node.state.snapshot_nodes import RUN, STEP, Node, buckets, content_of, get, loaded, put

CPU = torch.device("cpu")


@pytest.fixture
async def node(tmp_path: Path) -> AsyncIterator[Node]:
    """It has no connection to others, and may write anywhere."""
    node = Node("a", tmp_path / "disks")
    node.snapshots.open(loaded(node.name))
    yield node
    await asyncio.to_thread(node.snapshots.close)


@pytest.fixture
def place(tmp_path: Path) -> Path:
    """Where checkpoints go."""
    return tmp_path / "checkpoints"


def upload(
    node: Node, place: Path | str, parts: Iterable[Part], *, weights: bool = False, rate: float = 0.0, step: int = STEP
) -> None:
    """As the coordinator asks for it, which has marked the folder above ``place`` as the run's. ``rate``: in bytes per second."""
    if isinstance(place, Path):
        place.parent.mkdir(parents=True, exist_ok=True)
        (place.parent / marker_file(RUN.id)).touch()
    folder = place.as_uri() if isinstance(place, Path) else place
    wanted = Move(step=step, folder=folder, parts=parts, weights=weights, bytes_per_second=rate)
    node.snapshots.upload(wanted)


async def told(node: Node) -> Moved:
    return await asyncio.wait_for(node.uploaded.get(), 10)


async def arrived(node: Node, count: int) -> dict[int, Part]:
    """The next ``count`` files that are reported, by bucket."""
    parts = dict[int, Part]()
    while len(parts) < count:
        message = await told(node)
        assert (message.step, message.problem) == (STEP, "")
        parts |= {part.bucket: part for part in message.parts}
    return parts


def contents(folder: str) -> dict[str, bytes]:
    """The files in it, by name."""
    fs, path = fsspec.core.url_to_fs(folder)
    return {name.rpartition("/")[2]: fs.cat_file(name) for name in fs.ls(path, detail=False)}


def everything(place: Path) -> list[str]:
    """The names of the files there, also of half-written ones."""
    return [file.name for file in place.rglob("*") if file.is_file()]


def files_of_buckets(place: Path) -> list[str]:
    return [name for name in everything(place) if name.startswith("bucket-")]


# What arrives


@pytest.mark.parametrize("scheme", ["file", "memory"])
async def test_a_checkpoint_with_all_of_the_state_has_the_files_of_the_snapshot_byte_for_byte(
    node: Node, place: Path, scheme: str
) -> None:
    folder = place.as_uri() if scheme == "file" else f"memory://{uuid4().hex}"
    parts = await node.write()
    upload(node, place if scheme == "file" else folder, parts)
    sent = await arrived(node, 2)
    found = contents(folder)
    for bucket, live in buckets().items():
        part, content = sent[bucket], content_of(live)
        assert found.pop(bucket_file(bucket, part.nonce)) == content
        digest = blake3(content).digest()
        assert part == Part(bucket=bucket, size_bytes=len(content), digest=digest, nonce=part.nonce)
    assert found.keys() == {"config.json"}


async def test_a_checkpoint_with_the_weights_alone_has_files_that_safetensors_loads_with_the_parameters_and_no_more(
    node: Node, place: Path
) -> None:
    upload(node, place, await node.write(), weights=True)
    sent = await arrived(node, 2)
    for bucket, live in buckets().items():
        part = sent[bucket]
        content = (place / bucket_file(bucket, part.nonce)).read_bytes()
        assert (part.size_bytes, part.digest) == (len(content), blake3(content).digest())
        tensors, expected = safetensors.torch.load(content), live.views(live.parameters)
        assert tensors.keys() == expected.keys()
        assert all(torch.equal(tensors[name], parameter) for name, parameter in expected.items())


async def test_with_the_weights_come_the_digests_of_the_moments_so_that_both_make_up_the_digest_of_the_state(
    node: Node, place: Path
) -> None:
    upload(node, place, await node.write(), weights=True)
    sent = await arrived(node, 2)
    for bucket, live in buckets().items():
        parameters, first, second = (blake3(tensor.numpy().tobytes()).digest() for tensor in live.state)
        assert sent[bucket].moments == first + second
        assert blake3(parameters + sent[bucket].moments).digest() == live.digests()[0]


SMALL = (
    BucketSpec(0, (0,), (("one", (2, 3)), ("two", (5,)))),
    BucketSpec(1, (1,), ()),
    BucketSpec(2, (2,), (("three", (4,)),)),
)


@given(
    read=st.integers(1, 700),
    piece=st.integers(1, 700),
    weights=st.booleans(),
    precision=st.sampled_from(["FP32", "FP64"]),
)
def test_files_arrive_whole_whatever_the_pieces_in_which_they_are_read_and_sent(
    read: int, piece: int, weights: bool, precision: str
) -> None:
    run = Run(id="run", lease_seconds=2, train=Run.Train(precision=precision))
    dtype = torch.float64 if precision == "FP64" else torch.float32
    reports, folder = queue.Queue[NodeMessage](), f"memory://{uuid4().hex}"
    with (
        TemporaryDirectory() as root,
        mock.patch.object(disk, "PIECE_BYTES", read),
        mock.patch.object(uploads, "PIECE_BYTES", piece),
    ):
        on_disk = Disk(Path(root), "a")
        on_disk.open("run")
        live, parts = [Bucket(spec, CPU, dtype) for spec in SMALL], list[Part]()
        for bucket in live:
            for number, tensor in enumerate(bucket.state):
                tensor.copy_(torch.arange(len(tensor), dtype=dtype) + 100 * number)
            put(on_disk, STEP, bucket.spec.index, content_of(bucket))
            parts.append(Part(bucket=bucket.spec.index, digest=blake3(content_of(bucket)).digest()))
        sending = Uploads(on_disk, reports.put)
        wanted = Move(step=STEP, folder=folder, parts=parts, weights=weights)
        sending.send(loaded("a", run, SMALL), wanted)
        sent = [part for _ in SMALL for part in reports.get(timeout=10).moved.parts]
        sending.close()
    found = contents(folder)
    for bucket, part in zip(live, sent, strict=True):
        content = found[bucket_file(bucket.spec.index, part.nonce)]
        if weights:
            parameters = bucket.parameters.numpy().tobytes()
            assert content == file_header(bucket.spec, dtype, weights=True) + parameters
            assert blake3(blake3(parameters).digest() + part.moments).digest() == bucket.digests()[0]
        else:
            assert content == content_of(bucket)
        assert (part.size_bytes, part.digest) == (len(content), blake3(content).digest())


async def test_each_file_is_reported_as_soon_as_it_has_arrived_and_the_models_files_come_with_bucket_0(
    node: Node, place: Path
) -> None:
    first, second = await node.write()
    upload(node, place, [second, first])
    assert [part.bucket for part in (await told(node)).parts] == [1]
    assert [part.bucket for part in (await told(node)).parts] == [0]
    assert (place / "config.json").read_text() == "torch.float32"
    upload(node, place / "other", [second])
    assert [part.bucket for part in (await told(node)).parts] == [1]
    assert len(everything(place / "other")) == 1


async def test_a_file_that_is_sent_again_has_another_name(node: Node, place: Path) -> None:
    """So no node writes over a file that a manifest names."""
    _, second = await node.write()
    for _ in range(2):
        upload(node, place, [second])
        await told(node)
    assert len(files_of_buckets(place)) == 2


# What cannot be sent


def flipped(at: int) -> Callable[[bytes], bytes]:
    return lambda content: content[:at] + bytes([content[at] ^ 1]) + content[at + 1 :]


DAMAGE: dict[str, Callable[[bytes], bytes]] = {
    "in the header": flipped(20),
    "in the parameters": flipped(1000),
    "in the moments": flipped(3_000_000),
    "cut off": lambda content: content[:-1],
    "too long": lambda content: content + b"\0",
    "empty": lambda _: b"",
}


@pytest.mark.parametrize("weights", [False, True], ids=["state", "weights"])
@pytest.mark.parametrize("damage", DAMAGE.values(), ids=DAMAGE.keys())
async def test_a_file_that_is_damaged_on_the_disk_is_reported_and_leaves_nothing_behind(
    node: Node, place: Path, damage: Callable[[bytes], bytes], weights: bool
) -> None:
    parts = await node.write()
    (file,) = node.folder.rglob(file_name(0))
    file.write_bytes(damage(file.read_bytes()))
    upload(node, place, parts, weights=weights)
    message = await told(node)
    assert (message.step, list(message.parts)) == (STEP, [])
    assert message.problem == f"OSError: bucket 0 of step {STEP} is damaged on this node's disk"
    assert files_of_buckets(place) == []


@pytest.mark.parametrize("weights", [False, True], ids=["state", "weights"])
async def test_a_file_that_names_other_tensors_than_the_runs_model_is_not_sent_even_if_it_is_the_one_that_was_written(
    node: Node, place: Path, weights: bool
) -> None:
    _, second = await node.write()
    content = get(node.disk, STEP, 1).replace(b"second", b"others")
    put(node.disk, STEP, 1, content)
    second.digest = blake3(content).digest()
    upload(node, place, [second], weights=weights)
    assert (await told(node)).problem == f"OSError: bucket 1 of step {STEP} is damaged on this node's disk"
    assert files_of_buckets(place) == []


async def test_a_file_that_is_not_on_the_disk_is_reported_and_the_files_before_it_have_arrived(
    node: Node, place: Path
) -> None:
    first, second = await node.write()
    (file,) = node.folder.rglob(file_name(0))
    file.unlink()
    upload(node, place, [second, first])
    assert (await arrived(node, 1)).keys() == {1}
    message = await told(node)
    assert message.problem == f"LookupError: NOT_HELD: bucket 0 as of step {STEP} is in no snapshot on this disk"
    assert len(files_of_buckets(place)) == 1


async def test_a_place_that_cannot_be_written_is_reported_once_and_the_next_upload_is_made(
    node: Node, tmp_path: Path, place: Path
) -> None:
    parts = await node.write()
    (tmp_path / "file").write_text("in the way")
    upload(node, tmp_path / "file", parts)
    message = await told(node)
    assert (message.step, list(message.parts)) == (STEP, [])
    assert message.problem.startswith(("NotADirectoryError: ", "FileExistsError: "))
    assert str(tmp_path / "file") in message.problem
    upload(node, place, parts)
    await arrived(node, 2)
    assert node.uploaded.empty()


async def test_nothing_is_written_where_the_nodes_operator_does_not_allow_it(
    node: Node, tmp_path: Path, place: Path
) -> None:
    parts = await node.write()
    node.snapshots.open(replace(loaded("a"), allowed=Allowed([str(tmp_path / "data")])))
    upload(node, place, parts)
    problem = (await told(node)).problem
    assert problem.startswith("checkpoint.uri: this node's operator does not let a run use")
    assert f"--allow-data '{place}'" in problem
    assert everything(place) == []
    upload(node, tmp_path / "data" / "checkpoints", parts)
    await arrived(node, 2)


# How fast


async def test_an_upload_takes_no_more_of_the_line_than_it_may_at_any_time(
    node: Node, place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, _ = await node.write()
    rate, write, written = first.size_bytes / 0.4, NewFile.write, list[tuple[float, int]]()

    def noted(file: NewFile, piece: bytes | memoryview) -> None:
        written.append((time.monotonic(), len(piece)))
        write(file, piece)

    monkeypatch.setattr(NewFile, "write", noted)
    began = time.monotonic()
    upload(node, place, [first], rate=rate)
    await arrived(node, 1)
    assert time.monotonic() - began > 0.4
    sent = 0
    for moment, size in written:
        assert sent < rate * (moment - began) + PIECE_BYTES
        sent += size
    assert sent >= first.size_bytes


# When it stops


class Held:
    """Uploads wait for ``go_on`` once the first large piece of a file has been read. ``begun``: one waits. ``ended``: its file is
    closed, whether it has arrived or not."""

    def __init__(self) -> None:
        self.begun, self.go_on, self.ended = threading.Event(), threading.Event(), threading.Event()


@pytest.fixture
def held(monkeypatch: pytest.MonkeyPatch) -> Iterator[Held]:
    held, write, discard = Held(), NewFile.write, NewFile.discard

    def uploads() -> bool:
        return threading.current_thread().name.startswith("upload")

    def wait(file: NewFile, piece: bytes | memoryview) -> None:
        if uploads() and len(piece) > PIECE_BYTES // 2:
            held.begun.set()
            assert held.go_on.wait(10)
        write(file, piece)

    def end(file: NewFile) -> None:
        discard(file)
        if uploads() and held.begun.is_set():
            held.ended.set()

    monkeypatch.setattr(NewFile, "write", wait)
    monkeypatch.setattr(NewFile, "discard", end)
    yield held
    held.go_on.set()


async def begun(node: Node, place: Path, held: Held) -> list[Part]:
    """Part of bucket 0's file has been sent. Returns the snapshot's parts."""
    parts = await node.write()
    upload(node, place, parts[:1])
    assert await asyncio.to_thread(held.begun.wait, 10)
    return parts


async def test_another_upload_of_the_same_step_follows_the_one_before(node: Node, place: Path, held: Held) -> None:
    parts = await begun(node, place, held)
    upload(node, place, parts[1:])
    held.go_on.set()
    assert [part.bucket for _ in range(2) for part in (await told(node)).parts] == [0, 1]


async def test_an_upload_of_a_newer_step_takes_the_place_of_those_before_and_they_leave_no_files_of_buckets(
    node: Node, place: Path, held: Held
) -> None:
    older = await begun(node, place / "older", held)
    upload(node, place / "older", older[1:])
    await node.snapshots.keep(Keep(steps=[STEP]))
    newer = await node.write(STEP + 1, seed=1)
    upload(node, place / "newer", newer, step=STEP + 1)
    held.go_on.set()
    messages = [await told(node) for _ in newer]
    assert [(message.step, message.problem) for message in messages] == [(STEP + 1, "")] * 2
    assert len(files_of_buckets(place / "newer")) == 2
    assert files_of_buckets(place / "older") == []
    assert node.uploaded.empty()


async def test_an_upload_goes_on_while_the_coordinator_wants_snapshots_of_its_step(
    node: Node, place: Path, held: Held
) -> None:
    parts = await begun(node, place, held)
    upload(node, place, parts[1:])
    await node.snapshots.keep(Keep(steps=[1, STEP]))
    held.go_on.set()
    await arrived(node, 2)
    assert len(files_of_buckets(place)) == 2


async def test_an_upload_ends_without_a_word_when_the_coordinator_does_not_want_snapshots_of_its_step_any_more(
    node: Node, place: Path, held: Held
) -> None:
    await begun(node, place, held)
    await node.snapshots.keep(Keep(steps=[1]))
    held.go_on.set()
    assert await asyncio.to_thread(held.ended.wait, 10)
    assert files_of_buckets(place) == []
    await asyncio.to_thread(node.snapshots.close)
    assert node.uploaded.empty()


async def test_an_upload_that_is_not_wanted_any_more_before_its_turn_writes_and_says_nothing(
    node: Node, place: Path, held: Held
) -> None:
    older = await begun(node, place / "begun", held)
    upload(node, place / "waiting", older)
    newer = await node.write(STEP + 1)
    await node.snapshots.keep(Keep(steps=[STEP + 1]))
    upload(node, place / "newer", newer, step=STEP + 1)
    held.go_on.set()
    messages = [await told(node) for _ in newer]
    assert [(message.step, message.problem) for message in messages] == [(STEP + 1, "")] * 2
    assert everything(place / "waiting") == []


async def test_a_node_that_ends_does_not_send_the_rest(
    node: Node, place: Path, held: Held, monkeypatch: pytest.MonkeyPatch
) -> None:
    parts = await begun(node, place, held)
    upload(node, place, parts[1:])
    shutdown = ThreadPoolExecutor.shutdown

    def go_on_and_wait(pool: ThreadPoolExecutor, wait: bool = True, *, cancel_futures: bool = False) -> None:
        held.go_on.set()
        shutdown(pool, wait, cancel_futures=cancel_futures)

    monkeypatch.setattr(ThreadPoolExecutor, "shutdown", go_on_and_wait)
    await asyncio.to_thread(node.snapshots.close)
    assert files_of_buckets(place) == []
    await asyncio.sleep(0)
    assert node.uploaded.empty()


async def test_a_place_that_an_operator_names_later_is_tried_first(node: Node, tmp_path: Path) -> None:
    other = tmp_path / "other"
    upload(node, (other / "step-00000007").as_uri(), await node.write())
    problem = (await told(node)).problem
    assert f"checkpoint.uri = {other.as_uri()} is not the same place on this machine as on the coordinator's" in problem
    assert everything(other) == []
