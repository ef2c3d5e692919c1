"""The tables of the run file that say where its results go: checkpoints, messages and curves."""

from __future__ import annotations

import re
from typing import Literal

import fsspec
from pydantic import Field, field_validator

from dtfm.installed import install_line
from dtfm.protos.places import COORDINATOR, KNOWN, check_url, expanded
from dtfm.protos.run_file.table import Table
from dtfm.protos.run_file.trackers import MOST_TRACKERS, Destination, read_destination


class Checkpoint(Table):
    """Where and how often the run writes the model. Nodes also keep snapshots of the whole state on their own disks."""

    uri: str = Field(
        default=f"{COORDINATOR}:",
        min_length=1,
        max_length=4096,
        description=f'Where the run writes checkpoints. "{COORDINATOR}:" is the folder dtfm-runs/NAME on the coordinator\'s '
        "disk, to which nodes send them. Otherwise it is a path or a URL that the coordinator and all nodes reach. Kinds of URL, "
        f"as fsspec names them: {', '.join(sorted(KNOWN))}; not wrapped into each other (::).",
    )
    every: int = Field(
        default=100,
        ge=0,
        description="Steps between checkpoints. 0: none but the last. A checkpoint always follows the last step.",
    )
    holds: Literal["auto", "weights", "state"] = Field(
        default="auto",
        description='"weights": the model alone, which `from_pretrained` loads. "state": the optimizer\'s state too, three times '
        'as many bytes. Training can go on from it if all nodes are lost. "auto": "weights" on the coordinator\'s disk, "state" '
        "elsewhere.",
    )
    keep: int = Field(
        default=3,
        ge=1,
        le=1_000_000,
        description="The number of whole checkpoints to keep. The coordinator deletes older ones once a newer one is whole.",
    )

    @property
    def weights(self) -> bool:
        """Whether checkpoints hold the weights alone."""
        return self.holds == "weights" or (self.holds == "auto" and self.uri == f"{COORDINATOR}:")

    @field_validator("uri")
    @classmethod
    def _uri_reachable(cls, uri: str) -> str:
        check_url(uri)
        protocol, _, path = uri.partition(":") if re.match(r"[A-Za-z][\w+.-]*:", uri) else ("file", "", uri)
        if protocol == COORDINATOR:
            return f"{COORDINATOR}:"
        if protocol == "file":
            return f"file://{expanded(path.removeprefix('//') or '/').resolve()}"
        try:
            fsspec.get_filesystem_class(protocol)
        except (ValueError, ImportError) as error:
            extra = {"s3": "s3", "s3a": "s3", "gs": "gcs", "gcs": "gcs"}.get(protocol)
            fix = f"; install it, here and on each node, with: {install_line(extra)}" if extra else ""
            raise ValueError(f"names a kind of storage that is not installed here: {error}{fix}") from None
        return uri.rstrip("/")


class Notify(Table):
    """Where the coordinator sends a message when a person should look. The log does not keep this table, and nodes do not get it:
    `serve` reads it at each start."""

    url: str = Field(
        default="",
        max_length=2048,
        repr=False,
        description="The URL to which `serve` sends a message (POST, JSON). It sends one when the run begins or ends, when no "
        "step is committed for long, when the loss spikes, and when a member is quarantined. The URL may hold a token: keep the "
        "file to yourself.",
    )

    @field_validator("url")
    @classmethod
    def _url_usable(cls, url: str) -> str:
        if not re.fullmatch(r"(https?://[A-Za-z0-9.\-\[\]:]+(/[!-~]*)?)?", url):
            raise ValueError("must begin with https:// or http://, a host without a user name, and have no spaces")
        return url


class Track(Table):
    """Trackers that also get the run's curves: TensorBoard, Weights & Biases or trackio. The log does not keep this table, and
    nodes do not get it: `serve` reads it at each start."""

    to: list[str] = Field(
        default=[],
        description='"tensorboard:DIR" writes into a folder of the coordinator\'s machine. "wandb:PROJECT" and '
        '"wandb:ENTITY/PROJECT" write to Weights & Biases. "trackio:PROJECT" writes into trackio\'s own folder on that machine, '
        f'and "trackio:OWNER/SPACE" to a Space on the Hugging Face hub. At most {MOST_TRACKERS}. Each needs its library there, '
        "as in dtfm[tensorboard].",
    )

    @field_validator("to")
    @classmethod
    def _all_known(cls, to: list[str]) -> list[str]:
        if len(to) > MOST_TRACKERS:
            raise ValueError(f"must be at most {MOST_TRACKERS}")
        for text in to:
            read_destination(text)
        return to

    @property
    def destinations(self) -> list[Destination]:
        """Each once."""
        return list(dict.fromkeys(map(read_destination, self.to)))
