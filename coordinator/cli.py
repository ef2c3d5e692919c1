"""The ``dtfm-coordinator`` command."""

from __future__ import annotations

import sys

import typer

from dtfm.coordinator.command.demo_command import demo
from dtfm.coordinator.command.observe import events, members, plan_now, watch
from dtfm.coordinator.command.offline import audit, export, plan
from dtfm.coordinator.command.serve import serve, token

app = typer.Typer(
    help="Coordinates a training run: who is there, who computes what, which steps count.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
for command in (demo, serve, token, members, events, watch, plan_now, plan, export, audit):
    app.command()(command)


def main() -> None:
    """Entry point. A user's mistake is a sentence on standard error and exit code 2."""
    try:
        app()
    except ValueError as mistake:
        print(f"dtfm-coordinator: {mistake}", file=sys.stderr)
        raise SystemExit(2) from None


if __name__ == "__main__":
    main()
