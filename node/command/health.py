"""``dtfm-node health``: for supervisors, and Docker's HEALTHCHECK."""

from __future__ import annotations

import json
import sys
import time
from typing import Annotated

import typer

from dtfm.node.host.pulse import is_alive, pulses
from dtfm.protos.printable import printable


def health(
    id: Annotated[str, typer.Option(help="The node's name. Default: all nodes of this user on this machine.")] = "",
    json_lines: Annotated[bool, typer.Option("--json", help="Print one JSON object per node.")] = False,
) -> None:
    """Says whether the nodes on this machine work.

    Exit codes: 0 each takes part, or waits to; 1 one of them has lost its coordinator, hangs or has died, or none runs here.
    """
    found = [(each, each.trouble(time.time(), is_alive)) for each in pulses(id)]
    documents = [
        {"node": each.node, "healthy": not trouble, "reason": trouble, "said": each.said} for each, trouble in found
    ] or [{"node": id, "healthy": False, "reason": "no such node of this user runs here", "said": ""}]
    healthy = all(document["healthy"] for document in documents)
    for document in documents:
        if json_lines:
            print(json.dumps(document))
            continue
        word, why = ("healthy", document["said"]) if document["healthy"] else ("not healthy", document["reason"])
        line = ": ".join(str(part) for part in (document["node"], word, why) if part)
        print(printable(line), file=sys.stdout if healthy else sys.stderr)
    raise typer.Exit(0 if healthy else 1)
