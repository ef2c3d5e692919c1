#!/bin/sh
# install.sh REQUIREMENT ...: installs them into /opt/dtfm, where "." is the source in /source, and removes what no image needs.
set -eu
# The build writes into the source's folder, which is mounted read-only.
cp -R /source /tmp/source
cd /tmp/source
/opt/pip/bin/pip --python /opt/dtfm/bin/python install --constraint constraints.txt "$@"
cd /opt/dtfm/lib/python3*/site-packages
rm -rf /tmp/source
# Nothing is tested there, nor linked against.
find . -type d -name tests -prune -exec rm -rf {} +
rm -rf torch/include torch/test
find . -name '*.a' -delete
# Layers keep whole seconds. What Numba compiles names the time of its source, and would not count with other seconds.
find dtfm -name '*.py' -exec touch -d "$(date -u +%FT%TZ)" {} +
/opt/dtfm/bin/python -m compileall -qq -j 0 . || true # some packages hold templates that are no Python
