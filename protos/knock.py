"""Whether a certain process answers at an address: it sends a token that it was told to whoever connects."""

from __future__ import annotations

import asyncio

TOKEN_BYTES = 16
KNOCK_SECONDS = 3.0
"""Most seconds for one address."""
ANOTHER = "another program answers there"


async def dial(host: str, port: int, token: bytes) -> str:
    """Why it is not the one that sends ``token``; empty if it is. What else was read is told nobody."""
    try:
        async with asyncio.timeout(KNOCK_SECONDS):
            reader, writer = await asyncio.open_connection(host, port)
            try:
                answered = await reader.readexactly(len(token))
            finally:
                writer.transport.abort()
    except TimeoutError:
        return f"no answer within {KNOCK_SECONDS:.0f} s"
    except asyncio.IncompleteReadError:
        return ANOTHER
    except OSError as error:
        return error.strerror or str(error)
    return "" if answered == token else ANOTHER
