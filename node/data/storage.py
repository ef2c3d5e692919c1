"""Files in places that several nodes reach: any fsspec URL."""

from __future__ import annotations

import os
import uuid
from contextlib import suppress

import fsspec

# File systems that may show a half-written file under its final name, and rename cheaply. Object stores show whole objects only.
_RENAMING = frozenset({"file", "local", "sftp", "ssh", "smb", "hdfs", "webhdfs"})


def write(folder: str, name: str, content: bytes | memoryview) -> None:
    """Writes a file so that it is there in whole or not at all, also where two nodes write the same one at once.

    Raises:
        OSError, or another exception of the file system: not written.
    """
    fs, path = fsspec.core.url_to_fs(folder)
    fs.makedirs(path, exist_ok=True)
    protocols = {fs.protocol} if isinstance(fs.protocol, str) else set(fs.protocol)
    renames = bool(protocols & _RENAMING)
    final = f"{path.rstrip('/')}/{name}"
    target = f"{final}.{uuid.uuid4().hex}.part" if renames else final
    try:
        with fs.open(target, "wb") as file:
            file.write(content)
            if "file" in protocols:
                file.flush()
                os.fsync(file.fileno())
        if renames:
            fs.mv(target, final)
    except BaseException:
        if renames:
            with suppress(Exception):
                fs.rm_file(target)
        raise
