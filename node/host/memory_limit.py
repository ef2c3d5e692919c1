"""The memory that a container may still take: Linux's control groups, which /proc/meminfo says nothing of."""

from __future__ import annotations

from pathlib import Path

OWN = Path("/proc/self/cgroup")
MOUNTED = Path("/sys/fs/cgroup")


def room_in_groups(own: Path = OWN, mounted: Path = MOUNTED) -> int | None:
    """Bytes that this process's groups, of which the least counts, may still take; None where no group has a limit.

    Cached files count as free: the kernel drops them when memory is short. See cgroups(7), and the kernel's
    admin-guide/cgroup-v1/memory.rst and cgroup-v2.rst.
    """
    try:
        lines = own.read_text().splitlines()
    except OSError:
        return None
    rooms: list[int] = []
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers == "":
            files, top = ("memory.max", "memory.current", "inactive_file"), mounted
        elif "memory" in controllers.split(","):
            files, top = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"), mounted / "memory"
        else:
            continue
        # In a container, the path may be the host's, of which only the top is there.
        group = top / path.lstrip("/")
        above = (each for each in (group, *group.parents) if each.is_relative_to(top))
        rooms += (room for each in above if (room := _room(each, *files)) is not None)
    return max(0, min(rooms)) if rooms else None


def _room(group: Path, limit: str, usage: str, cached: str) -> int | None:
    """None: the group is not there, or has no limit."""
    try:
        most, used = (group / limit).read_text().strip(), int((group / usage).read_text())
        stat = dict(line.split() for line in (group / "memory.stat").read_text().splitlines())
        return None if most == "max" else int(most) - used + int(stat.get(cached, 0))
    except (OSError, ValueError):
        return None
