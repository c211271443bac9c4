#!/usr/bin/env bash
# install_trl.sh VENV BASE VLLM: installs TRL in its own environment VENV. BASE has torch, transformers, accelerate and
# peft. VLLM has vLLM, because TRL's rollout worker imports it. Both are added to the path, not copied.
set -euo pipefail
venv=$1 base=$2 vllm=$3
marker=$venv/.installed-trl
checksum=$(cat "$0" | sha256sum)
[ -e "$marker" ] && [ "$(cat "$marker")" = "$checksum" ] && exit 0
python3 -m venv "$venv"
site() { "$1/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))'; }
site "$base" >"$(site "$venv")/base.pth"
"$base/bin/python" -m pip freeze --exclude-editable | grep -v ' @ ' >"$venv/constraints.txt"
"$venv/bin/pip" install --quiet --disable-pip-version-check -c "$venv/constraints.txt" trl==1.16.0 datasets
site "$vllm" >"$(site "$venv")/vllm.pth" # after BASE, so that BASE's transformers is used
echo "$checksum" >"$marker"
