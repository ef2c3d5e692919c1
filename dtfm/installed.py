"""What of dtfm is installed here: its version, and the line that installs more of it."""

from __future__ import annotations

import json
import shlex
import shutil
import sys
from pathlib import Path
from typing import Annotated
from urllib.parse import unquote, urlsplit

import typer

from dtfm import __version__


def _tell(wanted: bool) -> None:
    if wanted:
        print(f"dtfm {__version__}")
        raise typer.Exit


Version = Annotated[bool, typer.Option("--version", is_eager=True, callback=_tell, help="Print the version, and exit.")]


def program(name: str) -> str:
    """How a shell here calls this program of the dtfm that runs: its name where that is found, else its path."""
    path, found = Path(sys.executable).with_name(name), shutil.which(name)
    if not path.exists() or (found is not None and path.samefile(found)):
        return name
    return shlex.quote(str(path.relative_to(Path.cwd()) if path.is_relative_to(Path.cwd()) else path))


def install_line(extra: str, also: str = "") -> str:
    """The shell line that installs dtfm with this extra for the Python that runs, from where dtfm was installed: a folder, a file,
    a repository or an index. ``also``: what pip is told before that."""
    from importlib.metadata import PackageNotFoundError, distribution  # only who is told what to install waits for it

    try:
        source = json.loads(distribution("dtfm").read_text("direct_url.json") or "{}")  # PEP 610
    except PackageNotFoundError:
        source = {}
    what = f"dtfm[{extra}]"
    if source.get("dir_info", {}).get("editable"):
        what = f"-e {shlex.quote(unquote(urlsplit(source['url']).path) + f'[{extra}]')}"
    elif "vcs_info" in source:
        what = shlex.quote(f"{what} @ {source['vcs_info']['vcs']}+{source['url']}@{source['vcs_info']['commit_id']}")
    else:
        what = shlex.quote(f"{what} @ {source['url']}" if source else what)
    return " ".join(filter(None, (shlex.quote(sys.executable), "-m pip install", also, what)))
