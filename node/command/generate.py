"""`dtfm-node generate`: text that a trained model writes."""

from __future__ import annotations

from typing import Annotated, Literal

import typer

from dtfm.node.command.options import mistakes
from dtfm.node.host.packages import require_extra
from dtfm.programs import ended_by_ctrl_c


def generate(
    what: Annotated[
        str,
        typer.Argument(
            metavar="FOLDER|RUN",
            help="A folder made by `dtfm-coordinator export`, of a whole model or an adapter; or the name of a run whose "
            "checkpoints are in dtfm-runs here.",
        ),
    ],
    prompt: Annotated[str | None, typer.Option(help="Continue this text. With --chat: answer this message.")] = None,
    chat: Annotated[
        bool, typer.Option("--chat", help="Converse: each line of the input is a message, and the model answers.")
    ] = False,
    max_tokens: Annotated[int, typer.Option(min=1, help="The most tokens to write at a time.")] = 200,
    temperature: Annotated[
        float | None,
        typer.Option(
            min=0,
            max=100,
            help="0: the likeliest token each time. Default: as the model's generation_config.json says, or 0.8.",
        ),
    ] = None,
    seed: Annotated[
        int | None, typer.Option(min=0, max=2**63 - 1, help="Makes texts repeatable. Default: another each time.")
    ] = None,
    device: Annotated[str, typer.Option(help="cuda:0, cpu, or auto: a GPU if there is one.")] = "auto",
    weights: Annotated[
        Literal["bf16", "int8", "nf4"],
        typer.Option(
            help="How the model is kept: as its files have it, or the matrices of its layers in 8 or 4 bits, which need a half "
            "or a quarter of the memory of 16. An adapter beside it stays as it is."
        ),
    ] = "bf16",
    untrained: Annotated[
        int | None,
        typer.Option(metavar="SEED", help="Write as a run of this seed begins, before it trains."),
    ] = None,
    json_lines: Annotated[
        bool, typer.Option("--json", help="Print one JSON object for each text, for scripts.")
    ] = False,
) -> None:
    """Lets a trained model write, on a GPU or the CPU."""
    with mistakes():
        if prompt is None and not chat:
            raise ValueError("dtfm-node generate: give --prompt TEXT to continue a text, or --chat to converse")
        if untrained is not None and weights != "bf16":
            raise ValueError(
                f"--untrained draws weights, and --weights {weights} packs those of files; leave one of them out"
            )
        from dtfm.node.command.trained import trained_folder

        folder = trained_folder(what)
        require_extra()
        with ended_by_ctrl_c():
            from dtfm.node.command.writing import Choices, write
        write(folder, prompt, chat, Choices(max_tokens, temperature, seed, device, weights, untrained, json_lines))
