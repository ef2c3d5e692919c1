#!/bin/bash
# The on-start script for Vast's launch modes SSH and Jupyter. They set an image's own entry point aside, so take an image with
# PyTorch for CUDA 13, and give beside DTFM_INVITATION: SOURCE, what pip installs (a wheel's URL, or git+https://...), and
# CONSTRAINTS, the URL of the same version's constraints.txt, so that pip installs what that was tested with.
set -eu
umask 077 # the log is for this user alone
pinned=$(mktemp)
# PyTorch stays the image's.
python3 - > "$pinned" << 'END'
import os, torch, urllib.request
with urllib.request.urlopen(os.environ["CONSTRAINTS"]) as lines:
    print(*(line for line in lines.read().decode().splitlines() if not line.startswith("torch==")), sep="\n")
print(f"torch=={torch.__version__}")
END
pip install --constraint "$pinned" "dtfm[cuda13] @ $SOURCE"
nohup dtfm-node join > /var/log/dtfm-node.log 2>&1 &
