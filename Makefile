# Two commands: `make demo` and `make test`. Each does its own set-up.
PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
STAMP  := $(VENV)/.installed
# pytest; tests that fail run again, alone, before the target fails.
RUN    := $(BIN)/python tools/run_tests.py --max-unsteady 6
ARGS   ?=
FULL   ?=

# Bytecode is kept: a thousand processes of the tests would compile the sources anew.
unexport PYTHONDONTWRITEBYTECODE
export OMP_NUM_THREADS ?= 1
export TOKENIZERS_PARALLELISM := false
export HF_HUB_OFFLINE := 1

.PHONY: help setup demo lint types imports unit engine test test-all test-long test-megatron engines test-engines test-integrations \
  test-truth test-scripts test-security fuzz test-clusters test-hosts test-rdma figures docs docs-version test-browser release-check bench clean

help:
	@echo "make demo [ARGS='--steps 40 --transport cma --mode staged']   asynchronous GRPO on this machine"
	@echo "make test                                                   lint, types, import contracts, tests, a live vLLM"
	@echo "make test-all                                               that and everything below"
	@echo "make test-long [ARGS=tests/control/test_chaos.py]           generated faults, kills, relays, whole jobs"
	@echo "make test-megatron | test-engines | test-truth              Megatron-core, live vLLM and SGLang: installed first"
	@echo "make test-integrations [ARGS='-k trl']                      engines and frameworks that the user starts in their own way"
	@echo "make test-scripts                                           every script in benchmarks/, rehearsed on a CPU at a small size"
	@echo "make test-security                                          what SECURITY.md and docs/attacks.md promise"
	@echo "make fuzz [ARGS='--seconds 60']                             every decoder of peer bytes, by coverage"
	@echo "make test-hosts | test-clusters | test-rdma                 several hosts (root), Slurm and Ray, verbs in a guest"
	@echo "make figures                                                figures and tables of the documentation, drawn again"
	@echo "make docs                                                   the documentation as a site, in build/site"
	@echo "make docs-version                                           that site beside those of other versions, on the branch pages"
	@echo "make test-browser                                           the controller's page in Chromium, alerts in Prometheus"
	@echo "make release-check                                          wheel, sdist, containers, the demo from an empty environment"
	@echo "make bench [ARGS='planner update']                            benchmarks, into benchmarks/results/local"

setup: $(STAMP)

$(STAMP): pyproject.toml constraints-cpu.txt tools/install_system_packages.sh tools/install_prometheus.sh
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --disable-pip-version-check -c constraints-cpu.txt torch
	# The distribution is called windlass-rl; until 2026-11-28 it had the name of another project on PyPI.
	$(BIN)/pip uninstall --quiet --disable-pip-version-check --yes windlass 2>/dev/null
	$(BIN)/pip install --quiet --disable-pip-version-check -c constraints-cpu.txt -e '.[dev]'
	# Without its dependencies, which are for training on GPUs.
	$(BIN)/pip install --quiet --disable-pip-version-check --no-deps megatron-core==0.16.1
	$(BIN)/pip install --quiet --disable-pip-version-check --no-deps nixl==1.5.1 nixl-cu12==1.5.1
	bash tools/install_system_packages.sh
	bash tools/install_prometheus.sh build/prometheus || echo "windlass: no prometheus: what asks one about deploy/ is skipped" >&2
	touch $(STAMP)

demo: setup
	$(BIN)/windlass demo $(ARGS)

lint: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/python tools/check_house_rules.py
	$(BIN)/python tools/report_source.py
	$(BIN)/python tools/measure_english.py

types: setup
	$(BIN)/mypy

imports: setup
	$(BIN)/lint-imports

# Four workers on two cores, because much of the time is waiting; files that take longest begin first (tests/conftest.py).
# Tests that fail run again, alone: a busy machine can make a deadline of a test pass. More than six such tests fail it.
# Two is the goal, once tests with short deadlines are steady beside four others.
unit: setup
	$(RUN) -n 4 --dist loadfile --no-loadscope-reorder

# Live servers of vLLM: with two tensor-parallel ranks, updated in both modes by FSDP2 ranks; and plain ones,
# started by their users with one flag. Side by side, since each waits for much.
engine: setup
	test -n "$(WINDLASS_VLLM_VENV)" || bash tools/engines/install.sh vllm .venv-vllm $(VENV)
	WINDLASS_ENGINES=one $(RUN) -n 2 --dist loadfile -m engines -k fresh_one \
	  tests/engines/test_live_servers.py tests/integrations/test_vllm_plugin.py

test: lint types imports unit engine

# Everything that takes long and needs nothing more than `make test` does: ten thousand simulated rounds and
# every planted bug, every kind of process killed in every phase, relays, NIXL's TCP, whole jobs.
test-long: setup
	$(RUN) -m "long and not engines and not cluster" $(or $(ARGS),tests --ignore tests/trainers)

# More Megatron-core layouts on four processes, trained steps of every family with transformers as the
# oracle of their logits, and mbridge as an independent converter.
test-megatron: setup
	$(BIN)/pip install --quiet --disable-pip-version-check --no-deps --target build/converter mbridge==0.15.1 einops==0.8.2
	PYTHONPATH=build/converter $(RUN) -m long tests/trainers $(ARGS)

# Unmodified vLLM and SGLang for CPUs, each in an environment of its own; about 3 minutes each.
# WINDLASS_VLLM_VENV and WINDLASS_SGLANG_VENV name environments that are there already.
engines: setup
	test -n "$(WINDLASS_VLLM_VENV)" || bash tools/engines/install.sh vllm .venv-vllm $(VENV)
	test -n "$(WINDLASS_SGLANG_VENV)" || bash tools/engines/install.sh sglang .venv-sglang $(VENV)

# Live servers on this machine's CPU: a choice that covers the matrix (about 35 minutes on two cores),
# or all of it with FULL=1. What was shown becomes docs/capabilities.md.
test-engines: engines
	WINDLASS_ENGINES=$(if $(FULL),all) WINDLASS_CAPABILITIES=docs/capabilities.json \
	  $(RUN) -m engines tests/engines $(ARGS)
	$(BIN)/python tools/render_capabilities.py

# Engines and frameworks that the user starts in their own way, with Windlass installed beside them: about 31 minutes on
# two cores, of which 4 install them.
# WINDLASS_TRL_VENV, WINDLASS_VERL_VENV and WINDLASS_AREAL_VENV name environments that are there already; WINDLASS_NEMO_RL
# a checkout of NVIDIA-NeMo/RL, without which that test is skipped.
test-integrations: engines
	test -n "$(WINDLASS_VERL_VENV)" || bash tools/engines/install.sh verl .venv-verl $(VENV) $(or $(WINDLASS_VLLM_VENV),.venv-vllm)
	test -n "$(WINDLASS_TRL_VENV)" || bash tools/integrations/install_trl.sh .venv-trl $(VENV) $(or $(WINDLASS_VLLM_VENV),.venv-vllm)
	test -n "$(WINDLASS_AREAL_VENV)" || bash tools/integrations/install_areal.sh .venv-areal $(VENV)
	$(BIN)/pip install --quiet --disable-pip-version-check --upgrade --target build/routers sglang-router==0.3.2 vllm-router==0.1.17
	WINDLASS_ROUTERS=build/routers $(RUN) -n 2 --dist loadfile -m "engines and not cluster" \
	  tests/integrations tests/rollout/test_routers.py $(ARGS)

# The part of test-engines, and of test-megatron, that shows what an update promises with the settings that users run:
# prefix caches on, overlapped gathers, model classes of a plugin that keep tensors apart from parameters. Answers of
# updated servers, in every pause mode, are those of fresh servers in other processes. Log-probabilities are those of the
# sampled distribution, and two servers draw different samples. About 40 servers start in turn, each with about 20 s of
# processor time (2026-11-28); the closing line counts the comparisons.
test-truth: engines
	$(RUN) -m "engines or not engines" tests/engines/test_vllm_encoders.py tests/engines/test_vllm_caches.py \
	  tests/engines/test_sglang_caches.py tests/engines/test_live_derived_state.py tests/engines/test_live_sampling.py \
	  tests/trainers/test_whole.py \
	  tests/integrations/test_vllm_plugin.py::test_versions_of_large_noise_are_those_of_fresh_servers $(ARGS)

# Every test that SECURITY.md and docs/attacks.md name: strangers, tokens, TLS, forged and misfit members, other
# runs, damaged journals, against real processes. About 2 minutes on two cores; most are in `make test` as well.
test-security: setup
	$(RUN) -m "not engines and not cluster" \
	  $$(grep -ohE 'tests/[a-z_/]+\.py(::test_[a-z0-9_]+)?' SECURITY.md docs/attacks.md | sort -u) $(ARGS)

# Every script in benchmarks/, rehearsed on a CPU at a small size; those of live engines with a vLLM for CPUs.
test-scripts: setup
	test -n "$(WINDLASS_VLLM_VENV)" || bash tools/engines/install.sh vllm .venv-vllm $(VENV)
	$(RUN) -n 2 -m scripts tests/scripts $(ARGS)

# Bytes for every decoder of what peers send, guided by coverage (atheris, which has wheels for Linux on
# x86-64): ten minutes, or ARGS="--seconds 60 'agent frame'". What it finds is kept in build/fuzz.
fuzz: setup
	$(BIN)/pip install --quiet --disable-pip-version-check -e '.[fuzz]'
	$(BIN)/python tests/fuzz/fuzz_decoders.py $(ARGS)

# Whole jobs, engines and gangs over nodes, and GPUs on a Slurm cluster (Debian's packages, root) and on a Ray cluster, of one and of two nodes.
test-clusters: engines
	bash tools/install_slurm.sh
	$(RUN) -m cluster tests/jobs $(ARGS)

# Processes on hosts of their own: network namespaces, slow and lossy lines, partitions, a live vLLM over two (root).
test-hosts: setup
	test -n "$(WINDLASS_VLLM_VENV)" || bash tools/engines/install.sh vllm .venv-vllm $(VENV)
	test -n "$(WINDLASS_SGLANG_VENV)" || bash tools/engines/install.sh sglang .venv-sglang $(VENV)
	$(RUN) -m cluster tests/control tests/integrations/test_vllm_hosts.py tests/integrations/test_sglang_hosts.py $(ARGS)

# True verbs: a guest machine with two soft-RoCE devices. Emulated, so it takes many minutes.
# RDMA_TESTS='-k Mooncake' for a part of it.
test-rdma: setup
	bash tools/rdma/build_guest.sh build/rdma
	$(BIN)/python tools/rdma/guest.py --machine build/rdma --deadline-s 5400 -- \
	  bash tools/rdma/guest_network.sh bash tools/rdma/guest_tests.sh $(VENV) $(RDMA_TESTS)

test-all: test test-long test-megatron test-hosts test-clusters test-engines test-integrations test-rdma

# What tools make of sources and committed results: figures, the list of public names, the matrix of engines.
# Tests say when one of them is out of date.
figures: setup
	$(BIN)/python -m tools.figures
	$(BIN)/python tools/render_api.py
	$(BIN)/python tools/render_capabilities.py
	$(BIN)/python tools/features.py render

# The site, strictly: a link to nothing is an error.
docs: setup
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build

# The site of one version beside those of others, as a commit on the local branch `pages`, with a switch between them.
docs-version: setup
	NO_MKDOCS_2_WARNING=1 $(BIN)/mike deploy --branch pages --update-aliases \
	  $$(sed -n 's/^version = "\(.*\)"/\1/p' pyproject.toml) latest
	NO_MKDOCS_2_WARNING=1 $(BIN)/mike set-default --branch pages --allow-undefined latest

# The controller's page in a real Chromium, with the pictures in docs/operations.md, and deploy/ in a real Prometheus (of Debian,
# unpacked in build/). Both are part of `make test` where they are.
test-browser: setup
	command -v chromium >/dev/null || apt-get install -y --no-install-recommends chromium
	bash tools/install_prometheus.sh build/prometheus
	WINDLASS_SCREENSHOT=docs/figures $(RUN) tests/observability/test_page.py tests/observability/test_deploy.py $(ARGS)

# Wheel and sdist, container files, empty environments made by pip and uv with the wheel alone and with the demo's extra, one
# version everywhere.
release-check:
	bash tools/release_check.sh $(PYTHON)

bench: setup
	$(BIN)/python benchmarks/run.py $(ARGS)

clean:
	rm -rf $(VENV) .venv-vllm .venv-sglang .venv-trl .venv-verl .venv-areal build dist .mypy_cache .ruff_cache .pytest_cache .import_linter_cache
