"""Cloud hosts' notices that this machine will be taken away soon: spot and preemptible instances.

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
TIMEOUT_SECONDS = 2.0
MOST_BYTES = 1 << 16

#: fetch(method, path, headers) gives status and body.
Fetch = Callable[[str, str, Mapping[str, str]], tuple[int, bytes]]


@dataclass(frozen=True, slots=True)
class Host:
    """``notice`` asks the service at ``address`` (http://...) for a notice: a sentence, "" where there is none yet. It raises
    OSError or ValueError where this is not such a host."""

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
    # Every machine of a scale set gets the events of all of them.
    named, name = fetch(
        "GET", "/metadata/instance/compute/name?api-version=2021-02-01&format=text", {"Metadata": "true"}
    )
    for event in json.loads(body)["Events"]:
        concerned = named != 200 or name.decode() in event.get("Resources", [])
        if concerned and event["EventType"] in ("Preempt", "Terminate"):
            return f"scheduled event: {event['EventType']} not before {event.get('NotBefore') or 'now'}"
    return ""


HOSTS = (
    Host("aws", "http://169.254.169.254", _aws),
    Host("gcp", "http://metadata.google.internal", _gcp),
    Host("azure", "http://169.254.169.254", _azure),
)


async def notice(hosts: Sequence[Host] = HOSTS, every: float = EVERY_SECONDS) -> str:
    """Waits for a notice, and returns its sentence; where none of ``hosts`` is there, "" at once."""
    for host in hosts:
        found = await asyncio.to_thread(_ask, host)
        if found is not None:
            break
    else:
        return ""
    log.info("this is a machine of %s: its notices are watched for", host.name)
    while not found:
        await asyncio.sleep(every)
        found = await asyncio.to_thread(_ask, host)  # a service that fails for once is asked again
    return found


def _ask(host: Host) -> str | None:
    """Its notice; None: it does not answer as such a host does."""
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
        log.debug("no machine of %s: %s", host.name, error)
        return None
