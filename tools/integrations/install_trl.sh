#!/usr/bin/env bash
# install_trl.sh VENV BASE VLLM: TRL in an environment of its own. BASE has torch, transformers, accelerate and
# peft; VLLM is vLLM's, because TRL's rollout worker imports it. Both are put on the path, not copied.
set -euo pipefail
venv=$1 base=$2 vllm=$3
[ -e "$venv/.installed-trl" ] && exit 0
python3 -m venv "$venv"
site() { "$1/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))'; }
site "$base" >"$(site "$venv")/base.pth"
"$base/bin/python" -m pip freeze --exclude-editable | grep -v ' @ ' >"$venv/constraints.txt"
"$venv/bin/pip" install --quiet --disable-pip-version-check -c "$venv/constraints.txt" trl==1.16.0 datasets
site "$vllm" >"$(site "$venv")/vllm.pth" # after the other: transformers is BASE's
touch "$venv/.installed-trl"
