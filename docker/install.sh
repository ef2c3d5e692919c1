#!/bin/sh
# install.sh REQUIREMENT ...: installs them into /opt/dtfm, where "." is the source in /source, and removes what no image needs.
# TORCH_BACKEND: which build of PyTorch, like cu129 or cpu, as uv names them. Where no index is reached, pip takes the one in the folder.
set -eu
# The build writes into the source's folder, which is mounted read-only.
cp -R /source /tmp/source
cd /tmp/source
if [ -n "${TORCH_BACKEND:-}" ] && [ -z "${PIP_NO_INDEX:-}" ]; then
    /opt/pip/bin/pip install uv
    UV_LINK_MODE=copy /opt/pip/bin/uv pip install --python /opt/dtfm/bin/python --torch-backend "$TORCH_BACKEND" \
        --constraint constraints.txt --find-links /source/docker/wheels ${PIP_EXTRA_INDEX_URL:+--index "$PIP_EXTRA_INDEX_URL"} "$@"
else
    /opt/pip/bin/pip --python /opt/dtfm/bin/python install --constraint constraints.txt "$@"
fi
cd /opt/dtfm/lib/python3*/site-packages
rm -rf /tmp/source
# Nothing is tested there, nor linked against.
find . -type d -name tests -prune -exec rm -rf {} +
rm -rf torch/include torch/test
find . -name '*.a' -delete
# Layers keep whole seconds. What Numba compiles names the time of its source, and would not count with other seconds.
find dtfm -name '*.py' -exec touch -d "$(date -u +%FT%TZ)" {} +
/opt/dtfm/bin/python -m compileall -qq -j 0 . || true # some packages hold templates that are no Python
