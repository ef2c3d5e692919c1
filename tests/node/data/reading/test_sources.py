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
from dtfm.node.data.dataset import Agreed, Data
from dtfm.node.data.load import load_data
from dtfm.node.data.problems import Withheld
from dtfm.node.data.reaching import give_leave
from dtfm.node.data.reading.sources import Source, conversations, documents
from dtfm.node.data.samples import training_samples
from dtfm.protos.places import hub_name
from dtfm.protos.plan_pb2 import Run
from tests.tokenizer import change_config, make_tokenizer

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
def test_what_cannot_be_read_is_refused_in_a_sentence(tmp_path: Path, make: Make, complaint: str) -> None:
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
    places: dict[str, Any] = {"source": "python-stdlib"} | {key: "s3://bucket/texts/*.jsonl"}
    run = Run(data=Run.Data(**places), checkpoint=Run.Checkpoint(uri="coordinator:"))
    with pytest.raises(ValueError, match=rf"^data.{key}: .* --allow-data 's3://bucket/texts/\*.jsonl'$"):
        check_places(run, ())
    check_places(run, read_allowed(["s3://bucket"]))


def several(*sources: Run.Data.Source, **data: Any) -> Data:
    for source in sources:
        source.text_field, source.split = source.text_field or "text", "train"
        source.weight = source.weight or 1.0
    return run_of(source="python-stdlib", sources=sources, **data)


def drawn(data: Data, micro_batches: int) -> list[bytes]:
    batches = [data.training_batch(data.training_samples(1, number, 10))[0] for number in range(micro_batches)]
    return [bytes(row.tolist()) for batch in batches for row in batch]


def test_several_sources_are_mixed_by_weight_and_each_passes_once_before_it_begins_again(tmp_path: Path) -> None:
    one = Run.Data.Source(source=file("one.txt", bytes(range(128)) * 50)(tmp_path), weight=3)
    other = Run.Data.Source(source=file("b.jsonl", as_jsonl([{"x": "OTHER"}] * 200))(tmp_path), template="<{x}>")
    data = several(one, other)
    rows = drawn(data, 60)
    mine = [row for row in rows if b"OTHE" not in row]
    assert 0.70 < len(mine) / len(rows) < 0.80
    assert data.training_count == sum(data._of_sources)
    inputs, _ = data.training_batch(np.arange(data.training_count))
    assert len(inputs) == data.training_count
    held_out = held_out_texts(data)
    assert "<OTHER>" in held_out
    assert "\x01\x02" in held_out
    assert data.fingerprint == several(one, other).fingerprint != several(other, one).fingerprint


def test_a_source_of_text_may_stand_beside_conversations(tmp_path: Path) -> None:
    tokenizer = change_config(
        Path(make_tokenizer(tmp_path / "tokenizer", "so many words, and so few letters")),
        chat_template="{% for m in messages %}<{{m.role}}>{{m.content}}{% endfor %}",
    )
    talk = {"messages": [{"role": "user", "content": "many? " * 20}, {"role": "assistant", "content": "few " * 20}]}
    talks = Run.Data.Source(source=file("a.jsonl", as_jsonl([talk] * 20))(tmp_path), text_field="messages")
    text = Run.Data.Source(source=file("a.txt", b"so many words " * 200)(tmp_path))
    data = several(talks, text, tokenizer=tokenizer)
    of_talks, of_text = data._of_sources
    learnt = [data.training_learnt(np.array([number])) for number in range(data.training_count)]
    assert min(learnt[:of_talks]) < 16
    assert learnt[of_talks:] == [16] * of_text


@pytest.mark.parametrize("content", [b"", b"too few"])
def test_a_source_without_samples_is_named(tmp_path: Path, content: bytes) -> None:
    one = Run.Data.Source(source=file("one.txt", b"text " * 50)(tmp_path))
    empty = Run.Data.Source(source=file("empty.txt", content)(tmp_path))
    with pytest.raises(ValueError, match=r"data.sources\[1\].source: '.*empty.txt' has \d tokens, too few"):
        several(one, empty)


def test_a_newcomer_fetches_the_tokens_of_several_sources(tmp_path: Path) -> None:
    one = Run.Data.Source(source=file("one.txt", b"text of one " * 50)(tmp_path), weight=2)
    other = Run.Data.Source(source=file("other.txt", b"and of another " * 50)(tmp_path), weight=1)
    held_out = file("held_out.txt", b"held out " * 20)(tmp_path)
    founder = several(one, other, held_out=held_out)
    founder.publish(str(tmp_path / "checkpoints"))
    data = Run.Data(
        source="python-stdlib", sources=[one, other], held_out=held_out, tokenizer="bytes", sequence_length=16
    )
    data.evaluation_fraction = 0.1
    run = Run(data=data, checkpoint=Run.Checkpoint(uri=str(tmp_path / "checkpoints")))
    for path in (one.source, other.source, held_out):
        Path(path).unlink()
    newcomer = load_data(run, agreed=Agreed(founder.fingerprint, founder.unigram_entropy))
    assert not newcomer.was_read
    assert drawn(newcomer, 20) == drawn(founder, 20)
    assert held_out_texts(newcomer) == held_out_texts(founder)


def test_each_place_of_several_takes_leave(tmp_path: Path) -> None:
    data = Run.Data(source="python-stdlib", sources=[Run.Data.Source(source=place) for place in ("/etc/a", "/etc/b")])
    with pytest.raises(ValueError, match=r"data.sources\[0\].source: .*\ndata.sources\[1\].source: .*'/etc/b'"):
        check_places(Run(data=data, checkpoint=Run.Checkpoint(uri="coordinator:")), ())
