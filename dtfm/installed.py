"""What of dtfm is installed here: its version, and the lines that install more of it."""

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

CONSTRAINTS = Path(__file__).with_name("constraints.txt")
"""The versions that dtfm was tested with, one a line, as `pip -c` and `uv pip -c` read them."""


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


def install_line(extra: str) -> str:
    """The shell line that installs dtfm again, with this extra, for the Python that runs."""
    return f"{shlex.quote(sys.executable)} -m pip install {_requirement(extra)}"


def torch_line(extra: str, *, again: bool = False) -> str:
    """The shell line that installs dtfm with this extra, which needs PyTorch, in tested versions.

    uv asks this machine's driver which build of PyTorch it runs. pip would take the newest CUDA's, and an older driver cannot use
    that. ``again``: PyTorch is here already, in a build that does not fit.
    """
    from importlib.util import find_spec

    python = shlex.quote(sys.executable)
    lines, uv = [], "uv" if shutil.which("uv") else f"{python} -m uv"
    if uv != "uv" and find_spec("uv") is None:
        lines.append(f"{python} -m pip install uv")
    if extra == "gpu" and _is_installed("cupy-cuda13x"):  # both have the same files
        lines.append(f"{uv} pip uninstall --python {python} cupy-cuda13x")
    which = f"--torch-backend=auto {'--reinstall-package torch ' if again else ''}-c {shlex.quote(str(CONSTRAINTS))}"
    lines.append(f"{uv} pip install --python {python} {which} {_requirement(extra)}")
    return " && ".join(lines)


def _requirement(extra: str) -> str:
    """dtfm with this extra as installers take it, from a folder, a file, a repository or an index: where dtfm came from."""
    from importlib.metadata import PackageNotFoundError, distribution  # imported only where somebody must install something

    try:
        source = json.loads(distribution("dtfm").read_text("direct_url.json") or "{}")  # PEP 610
    except PackageNotFoundError:
        source = {}
    what = f"dtfm[{extra}]"
    if source.get("dir_info", {}).get("editable"):
        return f"-e {shlex.quote(unquote(urlsplit(source['url']).path) + f'[{extra}]')}"
    if "vcs_info" in source:
        return shlex.quote(f"{what} @ {source['vcs_info']['vcs']}+{source['url']}@{source['vcs_info']['commit_id']}")
    return shlex.quote(f"{what} @ {source['url']}" if source else what)


def _is_installed(package: str) -> bool:
    from importlib.metadata import PackageNotFoundError, version

    try:
        return bool(version(package))
    except PackageNotFoundError:
        return False
