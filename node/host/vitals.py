"""How busy and how warm a GPU is, from the management library (NVML) of NVIDIA's driver."""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable
from dataclasses import dataclass

import torch

LIBRARY = "libnvidia-ml.so.1"
"""The library's name. The driver brings it."""
_OF_THE_GPU = 0  # NVML_TEMPERATURE_GPU


@dataclass(frozen=True, slots=True)
class Vitals:
    """``load``: how busy the GPU was in the last moments, from 0 to 1. None: not known."""

    load: float | None = None
    celsius: float | None = None


class _Rates(ctypes.Structure):
    """nvmlUtilization_t, in percent."""

    _fields_ = (("gpu", ctypes.c_uint), ("memory", ctypes.c_uint))


class Watched:
    """Asks for vitals on a thread of its own. A driver that hangs holds up nobody, and its last answer is dropped."""

    def __init__(self, read: Callable[[], Vitals] | None) -> None:
        """``read`` None: the vitals are never known."""
        self._read = read
        self._known = Vitals()
        self._asking = False

    def now(self) -> Vitals:
        """The vitals from the previous call's question, if they have come since. Asks again."""
        known, self._known = self._known, Vitals()
        if self._read is not None and not self._asking:
            self._asking = True
            threading.Thread(target=self._ask, args=[self._read], name="vitals", daemon=True).start()
        return known

    def _ask(self, read: Callable[[], Vitals]) -> None:
        self._known = read()
        self._asking = False


def vitals_of(device: torch.device) -> Watched:
    """The device's vitals. Not known for a CPU, or if the driver says nothing."""
    return Watched(nvml(f"GPU-{torch.cuda.get_device_properties(device).uuid}") if device.type == "cuda" else None)


def nvml(uuid: str, library: str = LIBRARY) -> Callable[[], Vitals] | None:
    """A function that asks for the vitals of the GPU with this UUID, from any thread. None: the driver knows no such GPU."""
    try:
        known = ctypes.CDLL(library)
        handle = ctypes.c_void_p()
        if known.nvmlInit_v2() or known.nvmlDeviceGetHandleByUUID(uuid.encode(), ctypes.byref(handle)):
            return None
    except (OSError, AttributeError):
        return None

    def now() -> Vitals:
        rates, celsius = _Rates(), ctypes.c_uint()
        no_load = known.nvmlDeviceGetUtilizationRates(handle, ctypes.byref(rates))
        no_heat = known.nvmlDeviceGetTemperature(handle, _OF_THE_GPU, ctypes.byref(celsius))
        return Vitals(None if no_load else rates.gpu / 100, None if no_heat else float(celsius.value))

    return now
