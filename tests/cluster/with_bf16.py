"""The command of a node that passes its CPU off as a GPU with bf16: ``python -m tests.cluster.with_bf16 join ...``."""

from __future__ import annotations

from typing import Any

from dtfm.node import cli
from dtfm.node.training.trainer import Trainer
from dtfm.protos import control_pb2 as wire


def main() -> None:
    honest: Any = vars(Trainer)["hardware"]

    def hardware(trainer: Trainer) -> wire.Device:
        device: wire.Device = honest.fget(trainer)
        device.kind, device.bf16 = "cuda", True
        return device

    setattr(Trainer, "hardware", property(hardware))  # noqa: B010
    cli.main()


if __name__ == "__main__":
    main()
