#!/usr/bin/env bash
# Runs asynchronous GRPO with an unmodified vLLM or SGLang on all visible GPUs, in both update modes: trainers, engines, a rollout
# controller and workers. A single GPU is shared. Requires Windlass's packages, and vLLM 0.24 or SGLang 0.5.16, transformers and
# torch 2.11 with CUDA, installed or on PYTHONPATH. The script ends by itself and always writes run_demo.json, .txt and .logs.
#   run_demo.sh RESULT_FOLDER [options of windlass demo]          (default: --engine vllm)
# MODES="in_place staged" DEADLINE_S=260 (of one run; the first run reads vLLM from a cold disk)
set -uo pipefail
cd "$(dirname "$0")/../.."
OUT=${1:?usage: run_demo.sh RESULT_FOLDER [options of windlass demo]}
shift
mkdir -p "$OUT"
. benchmarks/gpu/gpu_environment.sh
WORK=$(mktemp -d)
failed=0
for MODE in ${MODES:-in_place staged}; do
  timeout -s INT -k 20 "${DEADLINE_S:-260}" python3 -m windlass.cli.main demo --device cuda --engine vllm --mode "$MODE" \
    --plain --output "$WORK/$MODE" --json "$WORK/$MODE.json" "$@" 2>&1 | tee -a "$OUT/run_demo.txt"
  STATUS=${PIPESTATUS[0]}
  [ "$STATUS" = 0 ] || failed=1
  echo "$STATUS" > "$WORK/$MODE.status"
  # The second job of --compare has its logs in `own`.
  for LOG in "$WORK/$MODE"/logs/*.log "$WORK/$MODE"/own/logs/*.log; do
    echo "===== $MODE ${LOG#"$WORK/$MODE/"}"
    tail -c 20000 "$LOG"
  done >> "$OUT/run_demo.logs" 2>/dev/null
  rm -rf "$WORK/$MODE/versions"
done
python3 - "$OUT" "$WORK" "$@" <<'PYTHON'
import contextlib, datetime, importlib.metadata, json, pathlib, shutil, subprocess, sys
out, work = map(pathlib.Path, sys.argv[1:3])
names = ("torch", "vllm", "sglang", "transformers")
versions = {}
for name in names:
    with contextlib.suppress(importlib.metadata.PackageNotFoundError):
        versions[name] = importlib.metadata.version(name)
# A rehearsal with --device cpu has no nvidia-smi.
ask = ["nvidia-smi", "--query-gpu=name", "--format=csv,noheader"]
gpus = subprocess.run(ask, capture_output=True, text=True, check=False).stdout if shutil.which(ask[0]) else ""
found = {
    "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
    "gpus": gpus.splitlines(),
    "versions": versions,
    "options": sys.argv[3:],
    "runs": {},
}
for status in sorted(work.glob("*.status")):
    told = status.with_suffix(".json")
    run = json.loads(told.read_text()) if told.exists() else {}
    found["runs"][status.stem] = {"status": int(status.read_text()), **run}
(out / "run_demo.json").write_text(json.dumps(found, indent=1) + "\n")
PYTHON
exit $failed
