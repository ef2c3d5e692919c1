"""`python -m tests.attacks.reads_run LEAVE`: reads runs (JSON of Run, one a line) as a node does, and prints for each what went
wrong. An empty line: nothing. LEAVE: what the node's operator allows."""

from __future__ import annotations

import sys
from pathlib import Path

import torch
from google.protobuf import json_format

from dtfm.node.data.allowed import Allowed, read_allowed
from dtfm.node.training.preparing.preparation import check_run, read_run
from dtfm.protos.plan_pb2 import Run

if __name__ == "__main__":
    allowed = Allowed(read_allowed(sys.argv[1].split()))
    for line in sys.stdin:
        problem = ""
        try:
            run = json_format.Parse(line, Run())
            check_run(run, torch.device("cpu"), allowed)
            read_run(run, allowed, Path("tokens"), None, lambda what, done, of: None)
        except ValueError as error:
            problem = " ".join(str(error).split())
        print(problem, flush=True)
