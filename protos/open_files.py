"""How many files and connections this process may have open at a time."""

from __future__ import annotations

import resource

MOST = 1 << 20
"""As many are asked for where the system sets no limit."""


def raise_limit() -> int:
    """Raises the limit as far as the system lets this user (getrlimit(2)): the usual 1,024 are few for a crowd of members, and
    each stranger's connection takes some. Returns what holds now."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = MOST if hard == resource.RLIM_INFINITY else hard
    if soft == resource.RLIM_INFINITY or soft >= wanted:
        return wanted
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
    except (OSError, ValueError):  # macOS allows less than it says
        return soft
    return wanted
