"""A run uses only those files of a machine that its operator allows: `data/allowed.py` and `protos/places.py`."""

from __future__ import annotations

from pathlib import Path

import pytest

from dtfm.node.data.allowed import EVERYTHING, check_places, read_allowed
from dtfm.node.data.load import load_data
from dtfm.protos.plan_pb2 import Run


def run(
    source: str = "python-stdlib",
    tokenizer: str = "bytes",
    pretrained: str = "",
    uri: str = "coordinator:",
    adapter: str = "",
) -> Run:
    return Run(
        data=Run.Data(source=source, tokenizer=tokenizer),
        model=Run.Model(pretrained=pretrained, adapter=Run.Adapter(pretrained=adapter)),
        checkpoint=Run.Checkpoint(uri=uri),
    )


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Holds data/a.txt and, beside the data, secret.txt. It is the working directory."""
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "a.txt").write_text("a")
    (tmp_path / "secret.txt").write_text("s")
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.parametrize(
    "elsewhere",
    [
        run(),
        run(source="module:mine:make"),
        run(source="hf:owner/set:config"),
        run(tokenizer="gpt2"),
        run(tokenizer="owner/name", pretrained="owner/name@main"),
        run(pretrained="https://example.org/weights"),
        run(pretrained="owner/name", adapter="coordinator://disk/adapter"),
        run(uri="memory://x"),
    ],
    ids=lambda each: each.data.source,
)
def test_what_is_not_on_this_machine_need_not_be_allowed(elsewhere: Run) -> None:
    check_places(elsewhere, ())


@pytest.mark.parametrize("place", ["s3://bucket/run", "S3://bucket/run", "gs://bucket/run", "hf://owner/set/run"])
def test_what_is_reached_with_this_machines_keys_takes_leave(folder: Path, place: str) -> None:
    named = run(pretrained=place, uri=place)
    for given in ([], ["/"], ["s3://other"], [f"{place}/deeper"], [f"{place}-2"]):
        with pytest.raises(
            ValueError, match=rf"^model.pretrained: .*{place}.*--allow-data '{place}'\ncheckpoint.uri: "
        ):
            check_places(named, read_allowed(given))
    for leave in (place, place.rpartition("/")[0], f"{place.rpartition('/')[0]}/r*"):
        check_places(named, read_allowed([leave]))
    check_places(named, EVERYTHING)
    with pytest.raises(ValueError, match=r"checkpoint.uri: .*does not let"):
        check_places(run(uri=f"{place}/../../private"), read_allowed([place]))


def test_all_places_that_are_refused_are_told_at_once(folder: Path) -> None:
    with pytest.raises(ValueError, match=r"data.source: .*\ncheckpoint.uri: ") as refused:
        check_places(run(source=f"{folder}/data/a.txt", uri=f"{folder}/elsewhere"), ())
    assert len(str(refused.value).splitlines()) == 2


@pytest.mark.parametrize(
    ("here", "key"),
    [
        (run(source="/etc/*.txt"), "data.source"),
        (run(source="secret.txt"), "data.source"),
        (run(source="~/x.jsonl"), "data.source"),
        (run(source="hf:/etc"), "data.source"),
        (run(source="hf:data"), "data.source"),
        (run(source="hf:csv"), "data.source"),
        (run(tokenizer="/etc"), "data.tokenizer"),
        (run(tokenizer="data"), "data.tokenizer"),
        (run(pretrained="data"), "model.pretrained"),
        (run(pretrained="file:///etc"), "model.pretrained"),
        (run(pretrained="FILE:///etc"), "model.pretrained"),
        (run(adapter="/etc"), "adapter.pretrained"),
        (run(adapter="file:///etc"), "adapter.pretrained"),
        (run(uri="/root/.ssh"), "checkpoint.uri"),
        (run(uri="file:///root/.ssh"), "checkpoint.uri"),
        (run(uri="local:///root/.ssh"), "checkpoint.uri"),
        (run(uri="Local:/root/.ssh"), "checkpoint.uri"),
    ],
)
def test_what_may_be_on_this_machine_is_refused_by_its_name_and_the_option(folder: Path, here: Run, key: str) -> None:
    with pytest.raises(ValueError, match=f"^{key}: .* --allow-data '/"):
        check_places(here, read_allowed([str(folder / "elsewhere")]))


@pytest.mark.parametrize(
    "url",
    [
        "simplecache::file:///root/.ssh",
        "dir::file:///etc",
        "dir::/etc",
        "zip://x::file:///root/.ssh",
        "s3://bucket/x::file:///etc",
        "sftp://host/x",
        "DIR://x",
        "github://owner:name@/x",
    ],
)
def test_what_could_lead_elsewhere_is_refused_whatever_is_allowed(folder: Path, url: str) -> None:
    everything = read_allowed([str(folder), "/"])
    with pytest.raises(ValueError, match=r"^checkpoint\.uri names .*, which no run may use"):
        check_places(run(uri=url), everything)
    with pytest.raises(ValueError, match=r"^model\.pretrained names .*, which no run may use"):
        check_places(run(pretrained=url), everything)


@pytest.mark.parametrize("allow", ["{}/data", "{}/data/*.txt", "{}/da*", "data", "{}", "/"])
@pytest.mark.parametrize("source", ["{}/data/*.txt", "{}/data/a.txt", "data/*.txt", "{}/secret.txt/../data/*.txt"])
def test_a_folder_or_a_pattern_allows_what_is_in_it(folder: Path, allow: str, source: str) -> None:
    check_places(run(source=source.format(folder)), read_allowed([allow.format(folder)]))


def test_checkpoints_go_only_to_folders_that_are_allowed(folder: Path) -> None:
    allowed = read_allowed([str(folder / "data")])
    check_places(run(uri=(folder / "data" / "new").as_uri()), allowed)
    for uri in (f"file://{folder}/data/../.ssh", f"{folder}/data2", folder.as_uri()):
        with pytest.raises(ValueError, match=r"checkpoint\.uri"):
            check_places(run(uri=uri), allowed)


def test_links_and_dots_lead_nowhere_else(folder: Path) -> None:
    allowed = read_allowed(["data"])
    (folder / "data" / "link.txt").symlink_to(folder / "secret.txt")
    (folder / "data" / "up").symlink_to(folder)
    for source in ("data/link.txt", "data/../secret.txt", "data/up/secret.txt", "data/*/../../secret.txt"):
        with pytest.raises(ValueError, match="does not let a run use"):
            check_places(run(source=source), allowed)
    for source in ("data/*.txt", "data/*/secret.txt", "data/**/*.txt"):
        with pytest.raises(ValueError, match="leads to a file that"):
            check_places(run(source=source), allowed)


def test_a_refusal_does_not_tell_whether_a_file_is_there(folder: Path) -> None:
    def refusal(source: str) -> str:
        with pytest.raises(ValueError, match="does not let") as refused:
            check_places(run(source=source), read_allowed(["data"]))
        return str(refused.value)

    there, missing = refusal(f"{folder}/sec*.txt"), refusal(f"{folder}/zec*.txt")
    assert there.replace("sec*", "zec*") == missing


def test_a_pattern_without_bounds_is_refused_where_it_is_given() -> None:
    with pytest.raises(ValueError, match=r"leave out \*\*"):
        read_allowed(["/data/**/*.txt"])


@pytest.mark.parametrize(
    ("here", "key"),
    [
        (run(source="~nobody-of-this-name/x.txt"), "data.source"),
        (run(source="~nobody-of-this-name/*.txt"), "data.source"),
        (run(source="hf:~nobody-of-this-name"), "data.source"),
        (run(tokenizer="~nobody-of-this-name"), "data.tokenizer"),
        (run(pretrained="~nobody-of-this-name"), "model.pretrained"),
        (run(uri="~nobody-of-this-name"), "checkpoint.uri"),
    ],
)
def test_a_home_folder_that_there_is_not_is_refused_like_other_places(here: Run, key: str) -> None:
    with pytest.raises(ValueError, match=rf"^{key} names '~nobody-.*no home folder of that user"):
        check_places(here, ["/"])


def test_a_home_folder_that_there_is_not_cannot_be_allowed() -> None:
    with pytest.raises(ValueError, match="--allow-data names '~nobody-of-this-name', and no home folder"):
        read_allowed(["~nobody-of-this-name"])


def test_a_name_that_is_too_long_for_a_file_is_one_on_the_hub() -> None:
    check_places(run(tokenizer="a" * 5000), ())


@pytest.mark.parametrize("text_field", ["text", "messages"])
def test_what_leads_elsewhere_since_the_run_was_looked_at_is_not_read(folder: Path, text_field: str) -> None:
    """The files are read later where a node's published tokens turn out to be of no use."""
    data = Run.Data(source="data/*.jsonl", tokenizer="bytes", text_field=text_field, sequence_length=4)
    allowed = read_allowed(["data"])
    check_places(run(source=data.source), allowed)
    (folder / "secret.jsonl").write_text('{"text": "the secret"}')
    (folder / "data" / "link.jsonl").symlink_to(folder / "secret.jsonl")
    with pytest.raises(
        ValueError, match=r"link\.jsonl leads to a file that this node's operator does not let a run use"
    ):
        load_data(Run(data=data), allowed=allowed)
