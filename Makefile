# Two commands: `make demo` and `make test`. Each does its own set-up.
PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
STAMP  := $(VENV)/.installed
ARGS   ?=
FULL   ?=

export OMP_NUM_THREADS ?= 1
export TOKENIZERS_PARALLELISM := false
export HF_HUB_OFFLINE := 1

.PHONY: help setup demo test engine chaos test-megatron engines test-engines lint types imports unit bench clean test-nixl test-relay test-clusters test-rdma

help:
	@echo "make demo [ARGS='--steps 40 --transport cma --mode staged']   asynchronous GRPO on this machine"
	@echo "make test                                                   lint, types, import contracts, tests, a live vLLM"
	@echo "make bench [ARGS='planner update']                            benchmarks, into benchmarks/results/local"
	@echo "make chaos | test-faults | test-relay | test-hosts            longer: generated faults, kills, relays, several hosts"
	@echo "make test-megatron | test-nixl | test-clusters                longer: more layouts, wires, schedulers"
	@echo "make test-truth                                               live engines, caches on, equal to fresh ones"
	@echo "make test-engines | test-rdma                                 longer: live vLLM and SGLang, true verbs in a guest"

setup: $(STAMP)

$(STAMP): pyproject.toml constraints-cpu.txt tools/install_system_packages.sh
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --disable-pip-version-check -c constraints-cpu.txt torch
	$(BIN)/pip install --quiet --disable-pip-version-check -c constraints-cpu.txt -e '.[dev]'
	# Without its dependencies, which are for training on GPUs.
	$(BIN)/pip install --quiet --disable-pip-version-check --no-deps megatron-core==0.16.1
	$(BIN)/pip install --quiet --disable-pip-version-check --no-deps nixl==1.5.1 nixl-cu12==1.5.1
	bash tools/install_system_packages.sh
	touch $(STAMP)

demo: setup
	$(BIN)/windlass demo $(ARGS)

lint: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/python tools/check_house_rules.py
	$(BIN)/python tools/report_source.py

types: setup
	$(BIN)/mypy

imports: setup
	$(BIN)/lint-imports

unit: setup
	$(BIN)/pytest

# One live server: vLLM with two tensor-parallel ranks, updated in both modes by FSDP2 ranks.
engine: setup
	test -n "$(WINDLASS_VLLM_VENV)" || bash tools/engines/install.sh vllm .venv-vllm $(VENV)
	WINDLASS_ENGINES=one $(BIN)/pytest -m engines tests/engines/test_live_servers.py -k fresh_one

test: lint types imports unit engine

# More Megatron-core layouts on four processes, trained steps of every family with transformers as the
# oracle of their logits, and mbridge as an independent converter.
test-megatron: setup
	$(BIN)/pip install --quiet --disable-pip-version-check --no-deps --target build/converter mbridge==0.15.1 einops==0.8.2
	PYTHONPATH=build/converter $(BIN)/pytest -m megatron tests/trainers

# Unmodified vLLM and SGLang for CPUs, each in an environment of its own; about 3 minutes each.
# WINDLASS_VLLM_VENV and WINDLASS_SGLANG_VENV name environments that are there already.
engines: setup
	test -n "$(WINDLASS_VLLM_VENV)" || bash tools/engines/install.sh vllm .venv-vllm $(VENV)
	test -n "$(WINDLASS_SGLANG_VENV)" || bash tools/engines/install.sh sglang .venv-sglang $(VENV)

# Live servers on this machine's CPU: a choice that covers the matrix (about 27 minutes on two cores),
# or all of it with FULL=1. What was shown becomes docs/capabilities.md.
test-engines: engines
	WINDLASS_ENGINES=$(if $(FULL),all) WINDLASS_CAPABILITIES=docs/capabilities.json \
	  $(BIN)/pytest -m engines tests/engines $(ARGS)
	$(BIN)/python tools/render_capabilities.py

# What an update promises, with the settings that users run: prefix caches on, overlapped gathers. Answers
# of updated servers, in every pause mode, are those of fresh ones. About 15 minutes on two cores; the
# closing line counts what was compared.
.PHONY: test-truth
test-truth: engines
	$(BIN)/pytest -m truth tests/engines tests/trainers $(ARGS)

# The transport conformance suite over NIXL with every wire of a machine without a NIC.
test-nixl: setup
	$(BIN)/pytest -m "nixl or not nixl" tests/transports/test_nixl.py

# Whole jobs on a one-node Slurm cluster (Debian's packages, root) and on a Ray cluster.
test-clusters: setup
	bash tools/install_slurm.sh
	$(BIN)/pytest -m clusters tests/jobs

test-relay: setup
	$(BIN)/pytest -m "relay or not relay" tests/transfer/test_relay.py tests/updates/test_relay_rounds.py tests/planning/test_relay_planning.py

# True verbs: a guest machine with two soft-RoCE devices. Emulated, so it takes many minutes.
# RDMA_TESTS='-k Mooncake' for a part of it.
test-rdma: setup
	bash tools/rdma/build_guest.sh build/rdma
	$(BIN)/python tools/rdma/guest.py --machine build/rdma --deadline-s 5400 -- \
	  bash tools/rdma/guest_network.sh bash tools/rdma/guest_tests.sh $(VENV) $(RDMA_TESTS)

# Processes on hosts of their own: network namespaces, slow and lossy lines, partitions (root).
.PHONY: test-hosts
test-hosts: setup
	$(BIN)/pytest -m hosts tests/updates

# Every kind of process killed in every phase of an update, on every backend; about 15 minutes.
.PHONY: test-faults
test-faults: setup
	$(BIN)/pytest -m "faults or not faults" tests/updates/test_faults.py

# Ten thousand simulated rounds, every planted bug, and real processes that are killed and stopped.
chaos: setup
	$(BIN)/pytest -m chaos -s tests/updates

bench: setup
	$(BIN)/windlass bench $(ARGS)

clean:
	rm -rf $(VENV) .venv-vllm .venv-sglang build dist .mypy_cache .ruff_cache .pytest_cache .import_linter_cache
