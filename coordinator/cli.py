"""The ``dtfm-coordinator`` command."""

from __future__ import annotations

import sys

import typer

from dtfm.coordinator.command.backup import backup, restore
from dtfm.coordinator.command.check import check
from dtfm.coordinator.command.demo import demo
from dtfm.coordinator.command.export import export
from dtfm.coordinator.command.health import health
from dtfm.coordinator.command.invite import expel, forgive, invite, revoke
from dtfm.coordinator.command.observe import events, members, watch
from dtfm.coordinator.command.plan import plan, plan_now
from dtfm.coordinator.command.serve import serve
from dtfm.coordinator.command.steer import go_on, pause, rollback, set_key, stop
from dtfm.installed import Version
from dtfm.protos.printable import printable_lines

app = typer.Typer(
    help="Coordinates a training run: which nodes take part, who computes what, and which steps count.",
    no_args_is_help=True,
    rich_markup_mode="markdown",
    pretty_exceptions_enable=False,
)


@app.callback()
def options(version: Version = False) -> None: ...


# Every option of `serve` can come from the environment, as containers need it: DTFM_LISTEN for --listen.
app.command(context_settings={"auto_envvar_prefix": "DTFM"})(serve)
for name, command in (
    ("demo", demo),
    ("watch", watch),
    ("members", members),
    ("events", events),
    ("check", check),
    ("health", health),
    ("invite", invite),
    ("revoke", revoke),
    ("expel", expel),
    ("forgive", forgive),
    ("pause", pause),
    ("continue", go_on),
    ("stop", stop),
    ("set", set_key),
    ("rollback", rollback),
    ("export", export),
    ("backup", backup),
    ("restore", restore),
    ("plan", plan),
    ("plan-now", plan_now),
):
    app.command(name)(command)


def main() -> None:
    """Entry point. Prints a user's mistake to standard error and exits with code 2, or with 1 if it is no mistake: the store
    cannot be used for now."""
    try:
        app()
    except ValueError as mistake:
        from dtfm.coordinator.store.record import StoreAway

        print(printable_lines(f"dtfm-coordinator: {mistake}"), file=sys.stderr)
        raise SystemExit(1 if isinstance(mistake, StoreAway) else 2) from None


if __name__ == "__main__":
    main()
