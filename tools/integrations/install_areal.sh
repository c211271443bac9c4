#!/usr/bin/env bash
# install_areal.sh VENV BASE: installs AReaL in its own environment VENV. BASE has torch, transformers, ray and peft; it
# is added to the path, not copied. AReaL's metadata is ignored: it requires torch below 2.11 and packages for GPUs.
set -euo pipefail
venv=$1 base=$2
here=$(cd "$(dirname "$0")" && pwd)
marker=$venv/.installed-areal
checksum=$(cat "$0" "$here/areal-1.0.4.txt" | sha256sum)
[ -e "$marker" ] && [ "$(cat "$marker")" = "$checksum" ] && exit 0
python3 -m venv "$venv"
site() { "$1/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))'; }
site "$base" >"$(site "$venv")/base.pth"
pip=("$venv/bin/pip" install --quiet --disable-pip-version-check --no-deps)
"${pip[@]}" -r "$here/areal-1.0.4.txt"
"${pip[@]}" areal==1.0.4
echo "$checksum" >"$marker"
