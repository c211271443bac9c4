#!/usr/bin/env bash
# Asynchronous GRPO with an unmodified vLLM on all GPUs that are visible, in both modes of updates: trainers, engines, a rollout
# controller and workers. On one GPU they share it. Needs vLLM 0.24, transformers and torch 2.11 with CUDA on PYTHONPATH or
# installed, besides what Windlass needs. Ends by itself; results and logs are in the folder whatever happens.
#   run_demo.sh RESULT_FOLDER [options of windlass demo]
# MODES="in_place staged" DEADLINE_S=165 (of one run)
set -uo pipefail
cd "$(dirname "$0")/../.."
OUT=${1:?usage: run_demo.sh RESULT_FOLDER [options of windlass demo]}
shift
mkdir -p "$OUT"
export PYTHONPATH="$PWD/src${PYTHONPATH:+:$PYTHONPATH}" PYTHONUNBUFFERED=1 COLUMNS=160
export HF_HUB_OFFLINE=1 TRANSFORMERS_OFFLINE=1 DO_NOT_TRACK=1 TOKENIZERS_PARALLELISM=false CUDA_MODULE_LOADING=LAZY
export NCCL_NVLS_ENABLE=0 TORCH_SYMM_MEM_DISABLE_MULTICAST=1 NVSHMEM_DISABLE_NVLS=1
export VLLM_USE_FLASHINFER_SAMPLER=0 VLLM_USE_DEEP_GEMM=0 VLLM_WORKER_MULTIPROC_METHOD=spawn
export VLLM_ALLREDUCE_USE_SYMM_MEM=0 VLLM_HOST_IP=127.0.0.1 VLLM_NO_USAGE_STATS=1
WORK=$(mktemp -d)
failed=0
for MODE in ${MODES:-in_place staged}; do
  timeout -s INT -k 20 "${DEADLINE_S:-165}" python3 -m windlass.cli.main demo --device cuda --engine vllm --mode "$MODE" \
    --plain --output "$WORK/$MODE" --json "$OUT/demo_$MODE.json" "$@" 2>&1 | tee "$OUT/demo_$MODE.txt"
  STATUS=${PIPESTATUS[0]}
  [ "$STATUS" = 0 ] || failed=1
  echo "$STATUS" > "$OUT/demo_$MODE.status"
  for LOG in "$WORK/$MODE"/logs/*.log; do
    echo "===== $(basename "$LOG")"
    tail -c 20000 "$LOG"
  done > "$OUT/demo_$MODE.logs" 2>/dev/null
  rm -rf "$WORK/$MODE/versions"
done
python3 - "$OUT" "$@" <<'PYTHON'
import datetime, importlib.metadata, json, pathlib, subprocess, sys
out = pathlib.Path(sys.argv[1])
names = ("torch", "vllm", "transformers")
found = {
    "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
    "gpus": subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True, check=False).stdout.splitlines(),
    "versions": {n: importlib.metadata.version(n) for n in names},
    "options": sys.argv[2:],
    "runs": {},
}
for status in sorted(out.glob("demo_*.status")):
    mode = status.stem.removeprefix("demo_")
    told = out / f"demo_{mode}.json"
    run = json.loads(told.read_text()) if told.exists() else {}
    found["runs"][mode] = {"status": int(status.read_text()), **run}
(out / "run_demo.json").write_text(json.dumps(found, indent=1) + "\n")
PYTHON
exit $failed
