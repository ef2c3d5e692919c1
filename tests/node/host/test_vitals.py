"""How busy and how warm a GPU is, by a library that answers as NVIDIA's does."""

from __future__ import annotations

import shutil
import subprocess
import threading
from pathlib import Path

import pytest
import torch

from dtfm.node.host.vitals import Vitals, Watched, nvml, vitals_of

SOURCE = """
#include <string.h>
struct rates { unsigned int gpu, memory; };
static int here;
int nvmlInit_v2(void) { return 0; }
int nvmlDeviceGetHandleByUUID(const char *uuid, void **device) { *device = &here; return strcmp(uuid, "GPU-12ab") ? 6 : 0; }
int nvmlDeviceGetUtilizationRates(void *device, struct rates *rates)
{ if (device != &here) return 2; rates->gpu = 97; rates->memory = 40; return NO_LOAD; }
int nvmlDeviceGetTemperature(void *device, int sensor, unsigned int *celsius)
{ if (device != &here || sensor) return 2; *celsius = 71; return 0; }
"""


def made(folder: Path, no_load: int) -> str:
    """The library; ``no_load``: what it answers when it is asked for the load."""
    compiler = shutil.which("cc") or shutil.which("gcc")
    if compiler is None:
        pytest.skip("needs a C compiler")
    library = folder / f"libfake-{no_load}.so"
    text = SOURCE.replace("NO_LOAD", str(no_load))
    subprocess.run([compiler, "-shared", "-fPIC", "-x", "c", "-", "-o", library], input=text, text=True, check=True)
    return str(library)


def test_the_driver_says_how_busy_and_how_warm_the_gpu_is(tmp_path: Path) -> None:
    read = nvml("GPU-12ab", made(tmp_path, 0))
    assert read is not None
    assert read() == Vitals(0.97, 71.0)
    read = nvml("GPU-12ab", made(tmp_path, 3))  # "not supported"
    assert read is not None
    assert read() == Vitals(None, 71.0)
    assert nvml("GPU-other", made(tmp_path, 0)) is None
    assert nvml("GPU-12ab", "libno-such-library.so.1") is None
    assert nvml("GPU-12ab", "libc.so.6") is None, "it has no such functions"


def test_a_driver_that_hangs_holds_up_nobody_and_what_it_said_last_is_forgotten() -> None:
    answers, asked = threading.Semaphore(0), threading.Semaphore(0)

    def read() -> Vitals:
        asked.release()
        answers.acquire()
        return Vitals(0.5, 60.0)

    watched = Watched(read)
    assert watched.now() == Vitals(), "nothing is known yet"
    assert asked.acquire(timeout=10)
    thread = next(each for each in threading.enumerate() if each.name == "vitals")
    answers.release()
    thread.join(10)
    assert watched.now() == Vitals(0.5, 60.0)
    assert asked.acquire(timeout=10), "it asks again"
    assert watched.now() == Vitals(), "it hangs"
    assert not asked.acquire(blocking=False), "it is not asked twice at a time"
    answers.release()


def test_of_a_cpu_nothing_is_known() -> None:
    assert vitals_of(torch.device("cpu")).now() == Vitals()
