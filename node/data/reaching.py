"""How this process reads the places that a run names: whose keys it uses, and which addresses it calls.

A run's places are the coordinator's words, and this machine has tokens, keys and a network of its own. So a request carries
this machine's token of the Hugging Face hub only if the operator has named the repository. A request goes to an inner address
(`network/inner.py`) only if the operator has named the URL. Problems with a place on the web are told to the operator alone:
the coordinator could learn from them which ports are open.
"""

from __future__ import annotations

import errno
import socket
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from ipaddress import ip_address
from typing import Any, Literal
from urllib.parse import urlsplit

import fsspec

from dtfm.node.data.allowed import ALLOW, allows_hub, allows_url, everything
from dtfm.node.data.problems import Withheld, in_one_line
from dtfm.node.network.inner import addresses_of, is_inner, own_addresses
from dtfm.protos.candidates import Address
from dtfm.protos.identity.private_files import cache_folder
from dtfm.protos.places import is_web

_leave: tuple[str, ...] = ()


def give_leave(places: Sequence[str]) -> None:
    """From now on a run may use these places (see `read_allowed`) with this machine's keys, and in its network. Before this
    call, it may use none."""
    global _leave
    _leave = tuple(places)


def hub_token(repository: str) -> str | Literal[False]:
    """The token for asking the hub for OWNER/NAME: this machine's, if its operator lets a run use it there; otherwise False.
    From now on the hub's library sends no token by itself."""
    from huggingface_hub import constants, get_token

    constants.HF_HUB_DISABLE_IMPLICIT_TOKEN = True
    return (get_token() or False) if allows_hub(repository, _leave) else False


def hub_cache(repository: str) -> str | None:
    """The folder for the hub's files; None: the usual one. The usual folder may hold files that this machine's token opened
    before."""
    return None if allows_hub(repository, _leave) else str(cache_folder() / "hub")


def needs_leave(repository: str) -> str:
    """How to let the run use this machine's token: a text to append to the hub's error. Empty: the run may use it."""
    if allows_hub(repository, _leave):
        return ""
    return (
        f" (asked without this machine's token; if the repository is private or gated, let the run use the token: start the node "
        f"with {ALLOW} 'hf:{repository}')"
    )


def open_place(place: str, key: str = "checkpoint.uri") -> tuple[Any, str]:
    """The file system of a path or URL, which the run file's ``key`` names, and its path there. Raises Withheld for a URL that
    leads to this machine or its network without its operator's leave, and the exceptions of fsspec."""
    if is_web(place):
        return _web(place, key), place
    if place.lower().startswith("hf://"):  # it needed leave as a whole
        from huggingface_hub import get_token

        hub_token("")
        return fsspec.core.url_to_fs(place, token=get_token() or False)  # type: ignore[no-any-return]
    return fsspec.core.url_to_fs(place)  # type: ignore[no-any-return]


@contextmanager
def withheld(key: str, place: str) -> Iterator[None]:
    """A context for reading ``place``. Every error about a place on the web is raised as Withheld."""
    try:
        yield
    except Withheld:
        raise
    except Exception as problem:
        if not is_web(place):
            raise
        raise Withheld(told(key, place), f"{key}: {place}: {in_one_line(problem)}") from problem


def _web(url: str, key: str) -> Any:
    from fsspec.implementations.http import HTTPFileSystem

    return HTTPFileSystem(
        get_client=partial(_client, _inner_leave(url, key)),
        client_kwargs={},
        skip_instance_cache=True,
        use_listings_cache=False,
    )


def _inner_leave(url: str, key: str) -> frozenset[tuple[Address, int]] | None:
    """The inner addresses, and their ports, that may be called for ``url``; None: all."""
    if everything(_leave):
        return None
    parts = urlsplit(url)
    try:
        host, port = parts.hostname or "", parts.port or (443 if parts.scheme.lower() == "https" else 80)
        own = own_addresses()
        inner = frozenset(each for each in addresses_of(host, port) if is_inner(each, own))
    except (OSError, UnicodeError, ValueError) as problem:
        raise Withheld(told(key, url), f"{key}: {url}: its host is not known here ({in_one_line(problem)})") from None
    if inner and not allows_url(url, _leave):
        shown = ", ".join(sorted(map(str, inner)))
        raise Withheld(
            told(key, url),
            f"{key}: {url} leads to {shown}, which is this machine or its network, where its operator does not let a run call; "
            f"to allow it, start the node with {ALLOW} '{url}'",
        )
    return frozenset((each, port) for each in inner)


async def _client(leave: frozenset[tuple[Address, int]] | None, **options: Any) -> Any:
    """A client that also looks at each address before it connects: a redirection may lead elsewhere, and a name may stand for
    another address by then."""
    import aiohttp

    own = own_addresses()

    def made(info: tuple[Any, ...]) -> socket.socket:
        family, kind, protocol, _, where = info
        address, port = ip_address(str(where[0]).partition("%")[0]), int(where[1])
        if leave is not None and (address, port) not in leave and is_inner(address, own):
            why = f"{address} is this machine or its network, where its operator does not let a run call"
            raise PermissionError(errno.EACCES, why)
        return socket.socket(family, kind, protocol)

    return aiohttp.ClientSession(connector=aiohttp.TCPConnector(socket_factory=made), trust_env=False, **options)


def told(key: str, place: str) -> str:
    """The text that others hear of a problem with a place on the web."""
    return f"{key}: {place} cannot be used from this node; its operator sees why"
