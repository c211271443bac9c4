#!/usr/bin/env bash
# Expandable segments on one GPU: tests, mapping of chunks, turns, and two live proofs with vLLM. Requires the packages of run_live_engine.sh and
# pytest with pytest-asyncio and hypothesis. Results go to RESULT_FOLDER. On an H200 it takes about 8 minutes.
set -uo pipefail
cd "$(dirname "$0")/../.."
OUT=${1:?usage: run_expandable.sh RESULT_FOLDER}
source benchmarks/gpu/gpu_environment.sh
failed=0
# Some tests measure the free memory of the GPU, so nothing else runs at the same time.
timeout 300 python3 -m pytest -v -s -p no:cacheprovider -o addopts= -W ignore -m gpu -k expandable \
  tests/transports/test_expandable_on_gpu.py tests/transfer/test_backends_on_gpu.py > "$OUT/tests.txt" 2>&1 || failed=1
tail -20 "$OUT/tests.txt"
timeout 60 python3 benchmarks/gpu/bench_sharing.py --json "$OUT/bench_sharing.json" || failed=1
timeout 60 python3 benchmarks/gpu/bench_turns.py --turns 6 --json "$OUT/bench_turns.json" || failed=1
timeout 60 python3 benchmarks/gpu/bench_turns.py --turns 6 --expandable --json "$OUT/bench_turns_expandable.json" || failed=1
# Trainer and engine have expandable segments; the trainer writes into the engine.
PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True timeout 240 python3 benchmarks/gpu/prove_live_engine.py --case dense --tp 1 --trainers 1 \
  --transport cuda_ipc --updates 2 --json "$OUT/prove_live_engine.json" --logs "$OUT" || failed=1
# The trainer has expandable segments; the engine, which sleeps in between, reads.
timeout 300 python3 benchmarks/gpu/prove_turns.py --case qwen3-4b --turns 4 --expandable --no-own --json "$OUT/prove_turns.json" \
  --logs "$OUT" || failed=1
exit $failed
