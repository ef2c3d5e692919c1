"""`dtfm-node workload`: the demands of a run on the machines that train it."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from dtfm.node.command.options import mistakes
from dtfm.node.host.packages import require_extra
from dtfm.programs import ended_by_ctrl_c


def workload(
    run: Annotated[Path, typer.Argument(metavar="RUN.toml", help="The run file.")],
    output: Annotated[Path | None, typer.Option(help="Write it to this file. Default: print it.")] = None,
    allow_module: Annotated[
        list[str] | None,
        typer.Option(help="Let the run name code in this installed package.module (may be given several times)."),
    ] = None,
) -> None:
    """Says what a run asks of the machines that train it: WORKLOAD.json for `dtfm-coordinator plan`.

    Nothing is trained and no data is read; a model of any size takes seconds and little memory.
    """
    with mistakes():
        require_extra()
        with ended_by_ctrl_c():
            from dtfm.node.command.workload_file import describe
            from dtfm.protos.run_file.run_file import read_run_file

            text = describe(read_run_file(run).with_precision(bf16=True), tuple(allow_module or ()))
        if output is None:
            print(text)
            return
        try:
            output.write_text(text + "\n", encoding="utf-8")
        except OSError as error:
            raise ValueError(f"{output} cannot be written: {error.strerror}; give --output another file") from None
