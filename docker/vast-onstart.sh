#!/bin/bash
# The on-start script for Vast's launch modes SSH and Jupyter. They set an image's own entry point aside, so take an image with
# PyTorch, for CUDA 12 or 13, and give DTFM_INVITATION. SOURCE is what pip installs, a wheel's URL or git+https://...;
# `make templates SOURCE=...` writes yours into the next line.
SOURCE=${SOURCE:-}
set -eu
umask 077 # the log is for this user alone
: "${SOURCE:?is empty: where is the wheel of dtfm, or its repository? Give -e SOURCE=URL}"
made=$(mktemp -d)
pip wheel --quiet --no-deps --wheel-dir "$made" "$SOURCE"
wheel=$(echo "$made"/dtfm-*.whl)
# The versions that dtfm was tested with, which its wheel names; but PyTorch stays the image's.
python3 - "$wheel" > "$made/pinned" << 'END'
import sys, torch, zipfile
lines = zipfile.ZipFile(sys.argv[1]).read("dtfm/constraints.txt").decode().splitlines()
print(*(line for line in lines if not line.startswith("torch==")), f"torch=={torch.__version__}", sep="\n")
END
pip install --constraint "$made/pinned" "dtfm[gpu] @ file://$wheel"
nohup dtfm-node join > /var/log/dtfm-node.log 2>&1 &
