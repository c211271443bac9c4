#!/usr/bin/env bash
# use_system_verbs.sh VENV: makes NIXL's wheel use this system's verbs libraries.
#
# The wheel contains a libibverbs that cannot load the system's providers (such as soft-RoCE's), and a second libnl. In
# the guest, the script changes only the guest's memory.
set -eu
LIBS=$(echo "$1"/lib/python3*/site-packages/nixl_cu1*.libs)
for bundled in "$LIBS"/libibverbs-*.so* "$LIBS"/libnl-*.so*; do
  name=$(basename "$bundled" | sed -E 's/^(lib(ibverbs|nl-3|nl-route-3))-?.*/\1/')
  system=$(ldconfig -p | awk -v n="$name.so" 'index($1, n) == 1 {print $NF; exit}')
  [ -n "$system" ] || { echo "use_system_verbs: no $name on this system" >&2; exit 1; }
  ln -sf "$system" "$bundled"
done
