"""Preemption notices: a cloud says that it will soon take this machine away (spot and preemptible instances).

Amazon gives two minutes (EC2, "Spot Instance interruption notices"). Google and Microsoft give 30 seconds (Compute Engine,
"Preemptible VM instances"; Azure, "Scheduled Events"). Each has a service at the same link-local address, which no router passes
on. The node asks there only if the firmware says that the machine is one of theirs: elsewhere somebody else may have that
address. Other hosts, like Vast and RunPod, send SIGTERM.
"""

from __future__ import annotations

import asyncio
import http.client
import io
import json
import logging
import re
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

log = logging.getLogger(__name__)

FIRMWARE = Path("/sys/class/dmi/id")
"""Linux shows here how the machine's firmware describes it."""
SERVICE = "169.254.169.254", 80
ANSWER_SECONDS = 2.0
"""Most seconds for an answer, from the connection to the last byte."""
MOST_BYTES = 1 << 16
"""Bytes of an answer, with its headers. A longer answer is not read."""
LONGEST_PAUSE_SECONDS = 60.0
"""The longest pause between two questions while the service does not answer, as in a container that cannot reach it."""

#: fetch(method, path, headers) returns status and body. Raises OSError or ValueError.
Fetch = Callable[[str, str, Mapping[str, str]], Awaitable[tuple[int, bytes]]]


class NoAnswer(ValueError):
    """The service does not answer as it should."""


@dataclass(frozen=True, slots=True)
class Cloud:
    """``asks`` returns the notice as a sentence, or an empty text; it raises OSError or ValueError.

    ``firmware``: by name of a file in FIRMWARE, what it contains on this cloud's machines; one such file is
    enough. ``every``: seconds between two questions.
    """

    name: str
    firmware: Mapping[str, str]
    every: float
    asks: Callable[[Fetch], Awaitable[str]]


async def _amazon(fetch: Fetch) -> str:
    status, token = await fetch("PUT", "/latest/api/token", {"X-aws-ec2-metadata-token-ttl-seconds": "60"})
    if status != 200 or not re.fullmatch(rb"[\x21-\x7e]{1,512}", token):
        raise NoAnswer(f"no token (status {status})")
    proof = {"X-aws-ec2-metadata-token": token.decode("ascii")}
    status, body = await fetch("GET", "/latest/meta-data/spot/instance-action", proof)
    if status == 404:
        return ""
    said = _parsed(status, body)
    if not isinstance(said, dict) or said.get("action") not in ("terminate", "stop", "hibernate"):
        raise NoAnswer("no action in the notice")
    return f"a spot instance, to {said['action']}{_at(said.get('time'))}"


async def _google(fetch: Fetch) -> str:
    status, body = await fetch("GET", "/computeMetadata/v1/instance/preempted", {"Metadata-Flavor": "Google"})
    if status != 200 or body.strip() not in (b"TRUE", b"FALSE"):
        raise NoAnswer(f"neither TRUE nor FALSE (status {status})")
    return "a preemptible instance, in 30 seconds" if body.strip() == b"TRUE" else ""


async def _azure(fetch: Fetch) -> str:
    asked = {"Metadata": "true"}
    said = _parsed(*await fetch("GET", "/metadata/scheduledevents?api-version=2020-07-01", asked))
    events = said.get("Events") if isinstance(said, dict) else None
    if not isinstance(events, list):
        raise NoAnswer("no list of events")
    taken = [each for each in events if isinstance(each, dict) and each.get("EventType") in ("Preempt", "Terminate")]
    if not taken:
        return ""
    # All machines of a scale set are told what happens to any of them.
    named, name = await fetch("GET", "/metadata/instance/compute/name?api-version=2021-02-01&format=text", asked)
    for event in taken:
        machines = event.get("Resources")
        if named != 200 or not isinstance(machines, list) or name.decode("utf-8", "replace").strip() in machines:
            return f"{str(event['EventType']).lower()}{_at(event.get('NotBefore'))}"
    return ""


_ASSET_TAG_OF_AZURE = "7783-7084-3265-9085-8269-3286-77"  # of each virtual machine there; Hyper-V elsewhere has others
CLOUDS = (
    Cloud("AWS", {"sys_vendor": "Amazon EC2", "bios_vendor": "Amazon EC2", "bios_version": ".amazon"}, 5.0, _amazon),
    Cloud("Google Cloud", {"product_name": "Google Compute Engine"}, 2.0, _google),
    Cloud("Azure", {"chassis_asset_tag": _ASSET_TAG_OF_AZURE}, 2.0, _azure),
)


def cloud_here(firmware: Path = FIRMWARE) -> Cloud | None:
    """The cloud that owns this machine, by its firmware. None if it is none of CLOUDS."""

    def said(file: str) -> str:
        try:
            return (firmware / file).read_text(errors="replace")[:256]
        except OSError:
            return ""

    return next((each for each in CLOUDS if any(words in said(file) for file, words in each.firmware.items())), None)


@asynccontextmanager
async def notices(notice: Callable[[str], None], firmware: Path = FIRMWARE) -> AsyncIterator[None]:
    """Calls ``notice`` with the first preemption notice that comes in this context, on a machine of CLOUDS."""
    cloud = cloud_here(firmware)
    if cloud is None:
        yield
        return

    async def watch() -> None:
        notice(await preemption_notice(cloud))

    log.info("this machine is one of %s: watching for a preemption notice (--preemption off does not)", cloud.name)
    watching = asyncio.create_task(watch())
    try:
        yield
    finally:
        watching.cancel()


async def preemption_notice(cloud: Cloud, service: tuple[str, int] = SERVICE, every: float | None = None) -> str:
    """Waits for a notice; returns it as a sentence that names the cloud. ``every``: seconds between questions, by default the
    cloud's."""
    pause = every = cloud.every if every is None else every
    answered = True
    while True:
        try:
            if notice := await cloud.asks(lambda *asked: _fetch(service, *asked)):
                return f"{cloud.name} takes this machine back ({notice})"
            pause, answered = every, True
        except (OSError, ValueError) as error:
            if answered:
                why = str(error) or type(error).__name__
                log.info(
                    "%s's metadata service does not answer (%s): a preemption may come without notice", cloud.name, why
                )
            answered, pause = False, min(2 * pause, max(every, LONGEST_PAUSE_SECONDS))
        await asyncio.sleep(pause)


async def _fetch(service: tuple[str, int], method: str, path: str, headers: Mapping[str, str]) -> tuple[int, bytes]:
    """Asks by one connection, past any proxy; follows no redirect. Raises OSError or ValueError."""
    lines = [f"{method} {path} HTTP/1.1", f"Host: {service[0]}", "Connection: close", "Content-Length: 0"]
    lines += [f"{name}: {value}" for name, value in headers.items()]
    said = bytearray()
    async with asyncio.timeout(ANSWER_SECONDS):
        reader, writer = await asyncio.open_connection(*service)
        try:
            writer.write("\r\n".join([*lines, "", ""]).encode("ascii"))
            while piece := await reader.read(MOST_BYTES):
                said += piece
                if len(said) > MOST_BYTES:
                    raise NoAnswer(f"an answer of more than {MOST_BYTES} bytes")
        finally:
            writer.close()
            with suppress(OSError):
                await writer.wait_closed()
    answer = http.client.HTTPResponse(cast(Any, _Received(said)), method=method)
    try:
        answer.begin()
        return answer.status, answer.read()
    except http.client.HTTPException as error:
        raise NoAnswer(f"no HTTP: {type(error).__name__}") from None


class _Received:
    """Bytes in place of a socket, for http.client to parse."""

    def __init__(self, said: bytearray) -> None:
        self._said = bytes(said)

    def makefile(self, _mode: str) -> io.BytesIO:
        return io.BytesIO(self._said)


def _parsed(status: int, body: bytes) -> object:
    if status != 200:
        raise NoAnswer(f"status {status}")
    try:
        return json.loads(body)
    except RecursionError:
        raise NoAnswer("nested too deeply") from None


def _at(time: object) -> str:
    """A time in the cloud's notation, if it may be printed."""
    return f" at {time}" if isinstance(time, str) and re.fullmatch(r"[A-Za-z0-9:,.+ -]{1,40}", time) else ""
