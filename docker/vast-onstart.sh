#!/bin/bash
# The on-start script for Vast's launch modes SSH and Jupyter. They set an image's own entry point aside, so take an image with
# PyTorch for CUDA 13, and give SOURCE (what pip installs: a wheel's URL, or git+https://...) beside DTFM_INVITATION.
set -eu
pip install "dtfm[cuda13] @ $SOURCE"
nohup dtfm-node join > /var/log/dtfm-node.log 2>&1 &
