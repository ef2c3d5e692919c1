"""Preemption notices: a cloud host says that it will soon take this machine away (spot and preemptible instances).

Each host has a metadata service at a link-local address, documented by Amazon (EC2, "Spot Instance interruption notices",
two minutes ahead), Google (Compute Engine, "Preemptible VM instances", 30 seconds) and Microsoft (Azure, "Scheduled Events",
30 seconds). Others, like Vast and RunPod, send SIGTERM.
"""

from __future__ import annotations

import asyncio
import http.client
import json
import logging
import urllib.error
import urllib.request
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

log = logging.getLogger(__name__)

EVERY_SECONDS = 5.0
"""Seconds between two requests to the metadata service."""
TIMEOUT_SECONDS = 2.0
MOST_BYTES = 1 << 16
"""Bytes that are read of an answer."""

#: fetch(method, path, headers) returns status and body.
Fetch = Callable[[str, str, Mapping[str, str]], tuple[int, bytes]]


@dataclass(frozen=True, slots=True)
class Host:
    """``notice`` asks the service at ``address`` (http://...) and returns a sentence, "" while there is no notice.

    It raises OSError or ValueError if this machine is not on such a host.
    """

    name: str
    address: str
    notice: Callable[[Fetch], str]


def _aws(fetch: Fetch) -> str:
    status, token = fetch("PUT", "/latest/api/token", {"X-aws-ec2-metadata-token-ttl-seconds": "60"})
    if status != 200:
        raise ValueError(f"no token: status {status}")
    proof = {"X-aws-ec2-metadata-token": token.decode("ascii")}
    status, body = fetch("GET", "/latest/meta-data/spot/instance-action", proof)
    if status == 404:
        return ""
    action = json.loads(body)
    return f"spot notice: the instance will {action['action']} at {action['time']}"


def _gcp(fetch: Fetch) -> str:
    status, body = fetch("GET", "/computeMetadata/v1/instance/preempted", {"Metadata-Flavor": "Google"})
    if status != 200 or body not in (b"TRUE", b"FALSE"):
        raise ValueError(f"no answer: status {status}")
    return "preemption notice: the instance is being preempted" if body == b"TRUE" else ""


def _azure(fetch: Fetch) -> str:
    status, body = fetch("GET", "/metadata/scheduledevents?api-version=2020-07-01", {"Metadata": "true"})
    if status != 200:
        raise ValueError(f"no answer: status {status}")
    # Every machine of a scale set gets the events of all its machines.
    named, name = fetch(
        "GET", "/metadata/instance/compute/name?api-version=2021-02-01&format=text", {"Metadata": "true"}
    )
    for event in json.loads(body)["Events"]:
        is_ours = named != 200 or name.decode() in event.get("Resources", [])
        if is_ours and event["EventType"] in ("Preempt", "Terminate"):
            return f"scheduled event: {event['EventType']} not before {event.get('NotBefore') or 'now'}"
    return ""


HOSTS = (
    Host("aws", "http://169.254.169.254", _aws),
    Host("gcp", "http://metadata.google.internal", _gcp),
    Host("azure", "http://169.254.169.254", _azure),
)


async def preemption_notice(hosts: Sequence[Host] = HOSTS, every: float = EVERY_SECONDS) -> str:
    """Waits for a notice and returns its sentence; returns "" at once if this machine is on none of ``hosts``."""
    for host in hosts:
        found = await asyncio.to_thread(_ask, host)
        if found is not None:
            break
    else:
        return ""
    log.info("this machine is on %s; watching for its preemption notices", host.name)
    while not found:
        await asyncio.sleep(every)
        found = await asyncio.to_thread(_ask, host)  # a service that fails once is asked again
    return found


def _ask(host: Host) -> str | None:
    """Its notice; None if this machine is not on such a host."""
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))

    def fetch(method: str, path: str, headers: Mapping[str, str]) -> tuple[int, bytes]:
        request = urllib.request.Request(host.address + path, method=method, headers=dict(headers))
        try:
            with opener.open(request, timeout=TIMEOUT_SECONDS) as answer:
                return answer.status, answer.read(MOST_BYTES)
        except urllib.error.HTTPError as error:
            return error.code, b""

    try:
        return host.notice(fetch)
    except (OSError, ValueError, KeyError, TypeError, http.client.HTTPException) as error:
        log.debug("this machine is not on %s: %s", host.name, error)
        return None
