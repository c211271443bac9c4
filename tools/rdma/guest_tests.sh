#!/usr/bin/env bash
# guest_tests.sh VENV [PYTEST ARGUMENT...]: runs tests/rdma inside the guest.
set -eu
VENV=$1
shift
uname -sr
rdma link
bash "$(dirname "$0")/use_system_verbs.sh" "$VENV"
export PYTHONPATH=$PWD/src OMP_NUM_THREADS=1 TOKENIZERS_PARALLELISM=false HF_HUB_OFFLINE=1
# The suite uses no other plugins, and an emulated processor needs seconds to import them.
export PYTEST_DISABLE_PLUGIN_AUTOLOAD=1
export MC_GID_INDEX=1 # the RoCE v2 address of the IPv4 address; 0 is link-local
# Failures late: after errors Mooncake's threads stay busy, which slows an emulated processor down.
exec "$VENV/bin/python" -u -m pytest -p pytest_timeout -p pytest_split.plugin -p pytest_asyncio.plugin -p no:cacheprovider \
  --color=no --tb=short --durations=12 -v -m cluster \
  tests/rdma/test_verbs_update.py tests/rdma/test_verbs_conformance.py \
  tests/rdma/test_verbs_failures.py tests/rdma/test_verbs_nics.py "$@"
