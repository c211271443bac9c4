#!/usr/bin/env bash
# guest_tests.sh VENV [PYTEST ARGUMENT...]: the suite of tests/rdma, run inside the guest.
set -eu
VENV=$1
shift
uname -sr
rdma link
bash "$(dirname "$0")/use_system_verbs.sh" "$VENV"
export PYTHONPATH=$PWD/src OMP_NUM_THREADS=1 TOKENIZERS_PARALLELISM=false HF_HUB_OFFLINE=1
# Other plugins take an emulated processor seconds to import, and the suite uses none of them.
export PYTEST_DISABLE_PLUGIN_AUTOLOAD=1
export MC_GID_INDEX=1 # the RoCE v2 address that stands for an IPv4 one; 0 is link-local
# In this order: after errors Mooncake's threads stay busy, which an emulated processor feels.
exec "$VENV/bin/python" -u -m pytest -p pytest_timeout -p pytest_asyncio.plugin -p no:cacheprovider \
  --color=no --tb=short --durations=12 -v -m cluster \
  tests/rdma/test_verbs_update.py tests/rdma/test_verbs_conformance.py \
  tests/rdma/test_verbs_failures.py tests/rdma/test_verbs_nics.py "$@"
