"""How a coordinator or a node is, for whoever supervises its process.

It answers on a Unix socket, from its event loop, so one that hangs does not answer. ``python -m dtfm.protos.health`` asks all
whose sockets are in the folder that DTFM_HEALTH names, as a container's HEALTHCHECK does, and imports nothing heavy for it.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import sys
from collections.abc import AsyncIterator, Callable
from pathlib import Path

VARIABLE = "DTFM_HEALTH"
ANSWER_SECONDS = 5.0
MOST_BYTES = 4096
_GOOD, _BAD = "good", "BAD"


@contextlib.asynccontextmanager
async def answering(folder: Path | None, name: str, health: Callable[[], tuple[bool, str]]) -> AsyncIterator[None]:
    """Inside the block, whoever asks for ``name`` is told what ``health`` returns: whether all is well, and a sentence. A
    ``folder`` of None: nobody can ask. Raises ValueError if the socket cannot be made."""
    if folder is None:
        yield
        return
    path = folder / f"{name}.sock"

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        good, sentence = health()
        writer.write(f"{_GOOD if good else _BAD} {name}: {sentence}\n".encode()[:MOST_BYTES])
        with contextlib.suppress(OSError):
            await writer.drain()
        writer.close()

    try:
        folder.mkdir(parents=True, exist_ok=True)  # noqa: ASYNC240 - once, before anything else
        server = await asyncio.start_unix_server(answer, path)
    except OSError as error:
        raise ValueError(f"cannot answer at {path} ({error}); name another folder with --health, or none") from None
    try:
        yield
    finally:
        server.close()
        path.unlink(missing_ok=True)


def ask(folder: Path, timeout: float = ANSWER_SECONDS) -> tuple[bool, list[str]]:
    """Whether all that answer in the folder are well, and what each says. One that was killed has left its socket, and is not
    well."""
    told = [_asked(path, timeout) for path in sorted(folder.glob("*.sock"))]
    return bool(told) and all(text.startswith(_GOOD) for text in told), told or [f"{_BAD} nothing answers in {folder}"]


def _asked(path: Path, timeout: float) -> str:
    try:
        with socket.socket(socket.AF_UNIX) as connection:
            connection.settimeout(timeout)
            connection.connect(str(path))
            with connection.makefile("rb") as stream:
                return stream.read(MOST_BYTES).decode(errors="replace").strip() or f"{_BAD} {path.stem}: it hung up"
    except OSError as error:
        return f"{_BAD} {path.stem}: no answer ({error})"


if __name__ == "__main__":
    well, sentences = ask(Path(os.environ.get(VARIABLE) or "."))
    print("\n".join(sentences))
    sys.exit(not well)
