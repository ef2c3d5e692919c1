"""Text as people have it: each kind of input is read right, or refused in a sentence that names it."""

from __future__ import annotations

import csv
import gzip
import io
import json
from collections.abc import Callable, Iterator
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from typing import Any

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest

from dtfm.node.data.allowed import EVERYTHING, check_places, read_allowed
from dtfm.node.data.dataset import Data, load_data
from dtfm.node.data.problems import Withheld
from dtfm.node.data.reaching import give_leave
from dtfm.node.data.samples import training_samples
from dtfm.node.data.sources import Source, conversations, documents
from dtfm.protos.places import hub_name
from dtfm.protos.plan_pb2 import Run

TEXTS = ["the first\r\nof all", "été, €", "", 'a "third", with\na line']
RECORDS = [{"number": number, "body": text} for number, text in enumerate(TEXTS)]
Make = Callable[[Path], str]


def as_jsonl(records: list[dict[str, Any]]) -> bytes:
    return "".join(f"{json.dumps(record)}\n" for record in records).encode()


def as_csv(records: list[dict[str, Any]]) -> bytes:
    file = io.StringIO(newline="")
    writer = csv.DictWriter(file, [*records[0]])
    writer.writeheader()
    writer.writerows(records)
    return file.getvalue().encode()


def as_parquet(records: list[dict[str, Any]]) -> bytes:
    file = io.BytesIO()
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(records), file)
    return file.getvalue()


def as_zst(content: bytes) -> bytes:
    return bytes(pyarrow.compress(content, codec="zstd", asbytes=True))


BODIES = as_jsonl(RECORDS)
MARK = b"\xef\xbb\xbf"
LONG = as_jsonl([{"text": f"line {number} " * 9} for number in range(5000)])


def file(name: str, content: bytes) -> Make:
    def make(folder: Path) -> str:
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)
        return str(path)

    return make


def texts(source: Source) -> list[str]:
    return ["".join(document) for document in documents(source)]


@pytest.mark.parametrize(
    "make",
    [
        file("a.jsonl", BODIES),
        file("a.jsonl", MARK + BODIES),
        file("a.jsonl.gz", gzip.compress(BODIES)),
        file("a.jsonl.gz", gzip.compress(BODIES[:40]) + gzip.compress(BODIES[40:])),
        file("a.jsonl.zst", as_zst(BODIES)),
        file("a.jsonl.zst", as_zst(BODIES[:40]) + as_zst(BODIES[40:])),
        file("a.csv", as_csv(RECORDS)),
        file("a.csv", MARK + as_csv(RECORDS)),
        file("a.csv.gz", gzip.compress(as_csv(RECORDS))),
        file("a.parquet", as_parquet(RECORDS)),
        file("[v2] all texts/a b.jsonl", BODIES),
    ],
    ids=lambda make: "",
)
def test_records_of_every_kind_of_file_are_read(tmp_path: Path, make: Make) -> None:
    assert texts(Source(make(tmp_path), "body")) == TEXTS
    assert texts(Source(make(tmp_path), "body", limit=2)) == TEXTS[:2]
    assert texts(Source(make(tmp_path), template="{number}: {body}."))[1:] == ["1: été, €.", "2: .", f"3: {TEXTS[3]}."]


@pytest.mark.parametrize(
    "make",
    [
        file("a.txt", "été\r\n".encode()),
        file("a.txt", MARK + "été\r\n".encode()),
        file("a.txt.gz", gzip.compress(MARK + "été\r\n".encode())),
        file("a.txt.zst", as_zst("été\r\n".encode())),
        file("[v2] all texts/a b.txt", "été\r\n".encode()),
    ],
    ids=lambda make: "",
)
def test_a_text_file_is_one_document(tmp_path: Path, make: Make) -> None:
    assert texts(Source(make(tmp_path))) == ["été\r\n"]


def test_an_empty_file_among_others_adds_nothing(tmp_path: Path) -> None:
    for make in (file("a.jsonl", b""), file("b.jsonl", BODIES), file("c.csv", b""), file("d.jsonl.gz", b"")):
        make(tmp_path)
    assert texts(Source(f"{tmp_path}/*", "body")) == TEXTS


@pytest.mark.parametrize(
    ("make", "complaint"),
    [
        (file("a.txt", b""), r"data.source: '.*a.txt' has 0 tokens, too few for two windows"),
        (file("texts/a.csv", b"x"), r"data.source: .*texts is a folder; name the files in it, like '.*texts/\*.csv'$"),
        (
            file("a.jsonl.gz", gzip.compress(LONG)[:-9]),
            r"a.jsonl.gz cannot be read to its end .*cut short.*copy it again",
        ),
        (file("a.txt.gz", gzip.compress(LONG)[:3000]), r"a.txt.gz cannot be read to its end .*cut short"),
        (file("a.jsonl.zst", as_zst(LONG)[:-9]), r"a.jsonl.zst cannot be read to its end .*cut short"),
        (file("a.txt.zst", b"no such thing"), r"a.txt.zst cannot be read to its end .*or no .zst file"),
        (file("a.txt.gz", b"no such thing"), r"a.txt.gz cannot be read to its end .*or no .gz file"),
        (file("a.parquet", as_parquet(RECORDS)[:-20]), r"a.parquet cannot be read .*cut short"),
        (file("a.parquet", b""), r"a.parquet cannot be read .*cut short"),
        (file("a.parquet.gz", b""), r"\.parquet files are compressed inside; unpack the .gz"),
        (file("a.jsonl.xz", b""), r"a.jsonl.xz is of no kind that is read here; give .txt, .jsonl, .csv or .parquet"),
        (
            file("a.csv", as_csv(RECORDS)),
            r"a.csv, line 3 has no field 'text', only \['body', 'number'\]; set data.text_field",
        ),
        (file("a.csv", b"text\n\xe9\n"), r"a.csv is not UTF-8 text"),
        (lambda folder: str(folder / "none.jsonl"), r"no file matches '.*none.jsonl'"),
        (lambda _: "hf:nobody/nothing@v2", r"data.source: 'hf:nobody/nothing@v2' cannot be loaded"),
    ],
    ids=lambda _: "",
)
def test_what_cannot_be_read_is_refused_in_a_sentence(
    tmp_path: Path, make: Make, complaint: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    place = make(tmp_path)
    if complaint.endswith("like '.*texts/\\*.csv'$"):
        place = str(Path(place).parent)
    with pytest.raises(ValueError, match=complaint):
        run_of(source=place)


def run_of(tokenizer: str = "bytes", length: int = 16, **data: Any) -> Data:
    described = Run.Data(tokenizer=tokenizer, sequence_length=length, evaluation_fraction=0.1, **data)
    if not described.text_field:
        described.text_field = "text"
    return load_data(Run(data=described))


def test_one_sample_makes_a_batch_of_four(tmp_path: Path) -> None:
    data = run_of(source=file("a.txt", b"x" * 40)(tmp_path))
    assert (data.training_count, data.evaluation_count) == (1, 1)
    inputs, _ = data.training_batch(training_samples(1, 3, micro_batch=4, count=data.training_count))
    assert inputs.shape == (4, 16)


def test_a_parquet_files_conversations_have_no_key_that_a_record_has_not(tmp_path: Path) -> None:
    talks = [[{"role": "user", "content": "x"}, {"role": "assistant", "content": "y", "name": "z"}]] * 2
    path = file("a.parquet", as_parquet([{"messages": talk} for talk in talks]))(tmp_path)
    assert [each.messages for each in conversations(Source(path, "messages"))] == talks


def test_of_a_table_only_the_needed_columns_are_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked, read = list[object](), pyarrow.parquet.ParquetFile.iter_batches

    def counted(table: Any, *arguments: Any, **keywords: Any) -> Any:
        asked.append(keywords["columns"])
        return read(table, *arguments, **keywords)

    monkeypatch.setattr(pyarrow.parquet.ParquetFile, "iter_batches", counted)
    texts(Source(file("a.parquet", as_parquet(RECORDS))(tmp_path), "body"))
    assert asked == [["body"]]


@pytest.fixture
def folder_of_splits(tmp_path: Path) -> Path:
    """As the package datasets reads it."""
    for split, count in (("train", 60), ("validation", 20)):
        records = [{"text": f"{split} {number}, and more of it. "} for number in range(count)]
        file(f"set/{split}.jsonl", as_jsonl(records))(tmp_path)
    return tmp_path / "set"


def test_a_split_of_a_data_set_is_read(folder_of_splits: Path) -> None:
    place = f"hf:{folder_of_splits}"
    assert texts(Source(place))[0].startswith("train 0")
    assert texts(Source(place, split="validation", limit=2))[1].startswith("validation 1")
    with pytest.raises(ValueError, match=r"cannot be loaded .*absent"):
        texts(Source(place, split="absent"))


@pytest.mark.parametrize(
    ("written", "meant"),
    [
        ("hf:owner/set", ("owner/set", "", "")),
        ("hf:owner/set:config", ("owner/set", "config", "")),
        ("hf:owner/set@v2", ("owner/set", "", "v2")),
        ("hf:owner/set:config@refs/convert/parquet", ("owner/set", "config", "refs/convert/parquet")),
    ],
)
def test_a_data_sets_name_may_have_a_configuration_and_a_revision(written: str, meant: tuple[str, ...]) -> None:
    assert hub_name(written) == meant


def test_a_path_with_a_colon_or_an_at_is_taken_as_it_is(tmp_path: Path) -> None:
    (tmp_path / "a:b@c").mkdir()
    assert hub_name(f"hf:{tmp_path}/a:b@c") == (f"{tmp_path}/a:b@c", "", "")
    assert hub_name(f"hf:{tmp_path}/a:b@c:config@v1")[0] != f"{tmp_path}/a:b@c"


def held_out_texts(data: Data) -> str:
    inputs, _ = data.evaluation_batch(np.arange(data.evaluation_count))
    return "".join(bytes(row.tolist()).decode() for row in inputs)


def test_held_out_samples_come_from_a_file_of_their_own(tmp_path: Path) -> None:
    training = file("train.txt", b"training text. " * 40)(tmp_path)
    held_out = file("test.txt", b"TEST " * 20)(tmp_path)
    data = run_of(source=training, held_out=held_out)
    assert (data.training_count, data.evaluation_count) == ((15 * 40 - 1) // 16, 99 // 16)
    assert {*held_out_texts(data)} == {*"TEST "}
    inputs, _ = data.training_batch(np.arange(data.training_count))
    assert {*bytes(inputs.flatten().tolist()).decode()} == {*"training text. "}
    assert data.fingerprint != run_of(source=training).fingerprint


def test_held_out_samples_come_from_a_split_of_their_own(folder_of_splits: Path) -> None:
    data = run_of(source=f"hf:{folder_of_splits}", held_out_split="validation", limit=30)
    assert held_out_texts(data).startswith("validation 0")
    inputs, _ = data.training_batch(np.arange(data.training_count))
    assert b"validation" not in bytes(inputs.flatten().tolist())
    assert b"train 31" not in bytes(inputs.flatten().tolist())


def test_a_held_out_source_that_is_too_small_is_named(tmp_path: Path) -> None:
    training = file("train.txt", b"training text. " * 40)(tmp_path)
    held_out = file("test.txt", b"few")(tmp_path)
    with pytest.raises(ValueError, match=r"data.held_out: '.*test.txt' has 3 tokens, too few for a window of"):
        run_of(source=training, held_out=held_out)


class Quiet(SimpleHTTPRequestHandler):
    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def web(tmp_path: Path) -> Iterator[str]:
    """The URL of ``tmp_path``, which a run may use."""
    with ThreadingHTTPServer(("127.0.0.1", 0), partial(Quiet, directory=str(tmp_path))) as server:
        Thread(target=server.serve_forever, daemon=True).start()
        give_leave(EVERYTHING)
        yield f"http://127.0.0.1:{server.server_port}"
        give_leave(())
        server.shutdown()


def test_files_are_read_from_a_url(tmp_path: Path, web: str) -> None:
    for name, content in (
        ("a.jsonl.gz", gzip.compress(BODIES)),
        ("a.jsonl.zst", as_zst(BODIES)),
        ("a.csv", as_csv(RECORDS)),
    ):
        file(name, content)(tmp_path)
        assert texts(Source(f"{web}/{name}", "body")) == TEXTS


def test_of_a_url_that_cannot_be_read_the_machines_operator_alone_learns_why(web: str) -> None:
    with pytest.raises(Withheld, match=r"none.jsonl") as refused:
        texts(Source(f"{web}/none.jsonl"))
    assert refused.value.told == f"data.source: {web}/none.jsonl cannot be used from this node; its operator sees why"
    give_leave(())
    with pytest.raises(Withheld, match=r"leads to 127.0.0.1, which is this machine"):
        texts(Source(f"{web}/none.jsonl"))


@pytest.mark.parametrize("key", ["source", "held_out"])
def test_a_url_that_is_reached_with_this_machines_keys_takes_leave(key: str) -> None:
    places = {"source": "python-stdlib"} | {key: "s3://bucket/texts/*.jsonl"}
    run = Run(data=Run.Data(**places), checkpoint=Run.Checkpoint(uri="coordinator:"))
    with pytest.raises(ValueError, match=rf"^data.{key}: .* --allow-data 's3://bucket/texts/\*.jsonl'$"):
        check_places(run, ())
    check_places(run, read_allowed(["s3://bucket"]))
