"""The files of a published model or adapter: their names, as transformers and peft have them, and what is read of them."""

from __future__ import annotations

CONFIG = "config.json"
GENERATION = "generation_config.json"
INDEX = "model.safetensors.index.json"
"""transformers looks here for the files of a model that has several."""
SINGLE = "model.safetensors"
"""The file of a model that has only one."""
ADAPTER_CONFIG = "adapter_config.json"
"""In a folder of peft."""
ADAPTER = "adapter_model"
"""The file of an adapter, without its ending."""
PEFT = "base_model.model."
"""Begins the names that peft gives to a model's tensors."""
LENGTHS = ".lora_magnitude_vector"
"""Ends the name of the lengths of a matrix's rows, which DoRA trains."""
MOST_HEADER_BYTES = 100 << 20
"""As in the safetensors library."""
MOST_JSON_BYTES = 64 << 20
READERS = 16
"""The number of pieces that are read at the same time: on the hub, each costs a round trip."""


def in_peft(name: str) -> str:
    """The name of a trained tensor in the file of an adapter, as peft writes it."""
    return f"{PEFT}{name.replace('.default.', '.')}".replace(f"{LENGTHS}.weight", LENGTHS)
