"""The ``dtfm-node`` command."""

from __future__ import annotations

import typer

from dtfm.installed import Version
from dtfm.node.command.doctor import doctor
from dtfm.node.command.generate import generate
from dtfm.node.command.health import health
from dtfm.node.command.install_line import install_line
from dtfm.node.command.join import join
from dtfm.node.command.relay import relay
from dtfm.node.command.workload import workload

app = typer.Typer(
    help="Lends this machine's GPU (or CPU) to a training run.",
    no_args_is_help=True,
    rich_markup_mode="markdown",
    pretty_exceptions_enable=False,  # they show the values of variables, secrets among them
)


@app.callback()
def options(version: Version = False) -> None: ...


# Every option of these can come from the environment, as containers need it: DTFM_LISTEN for --listen.
ENVIRONMENT = {"auto_envvar_prefix": "DTFM"}
app.command(context_settings=ENVIRONMENT)(join)
app.command(context_settings=ENVIRONMENT)(relay)
app.command(context_settings=ENVIRONMENT)(doctor)
app.command(context_settings=ENVIRONMENT)(health)
app.command()(workload)
app.command()(generate)
app.command("install-line")(install_line)


def main() -> None:
    app()


if __name__ == "__main__":
    main()
