# Start with `make demo` or `make test`. Both set up the environment first.
PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
STAMP  := $(VENV)/.installed
# pytest. Failed tests run again, alone, before the target fails.
RUN    := $(BIN)/python tools/run_tests.py
ARGS   ?=
FULL   ?=

# Keep bytecode: otherwise each of a thousand test processes compiles the sources again.
unexport PYTHONDONTWRITEBYTECODE
export OMP_NUM_THREADS ?= 1
export TOKENIZERS_PARALLELISM := false
export HF_HUB_OFFLINE := 1

.PHONY: help setup demo lint types imports unit engine test test-all test-long test-megatron engines test-engines test-integrations \
  test-truth test-rollouts test-scripts test-security fuzz test-clusters test-hosts test-rdma figures docs docs-version test-browser release-check bench clean

help:
	@echo "make demo [ARGS='--steps 40 --transport cma --mode staged']   asynchronous GRPO on this machine"
	@echo "make test                                                   lint, types, import contracts, tests, a live vLLM"
	@echo "make test-all                                               that and everything below"
	@echo "make test-long [ARGS='-k chaos']                            generated faults, kills, relays, whole jobs"
	@echo "make test-megatron | test-engines | test-truth              Megatron-core, live vLLM and SGLang; installs them first"
	@echo "make test-integrations [ARGS='-k trl']                      engines and frameworks that the user starts in their own way"
	@echo "make test-rollouts                                          examples of rollouts that train, and kills during their sessions"
	@echo "make test-scripts                                           every script in benchmarks/, on a CPU at a small size"
	@echo "make test-security                                          the tests that SECURITY.md and docs/attacks.md name"
	@echo "make fuzz [ARGS='--seconds 60']                             every decoder of peer bytes, guided by coverage"
	@echo "make test-hosts | test-clusters | test-rdma                 several hosts (root), Slurm and Ray, verbs in a guest"
	@echo "make figures                                                figures and tables of the documentation, drawn again"
	@echo "make docs                                                   the documentation as a site, in build/site"
	@echo "make docs-version                                           add that site to the sites of other versions, on the branch pages"
	@echo "make test-browser                                           the controller's page in Chromium, alerts in Prometheus"
	@echo "make release-check                                          wheel, sdist, containers, the demo from an empty environment"
	@echo "make bench [ARGS='planner update']                            benchmarks, into benchmarks/results/local"

setup: $(STAMP)

# The distribution is called windlass-rl; until 2026-11-28 it had the name of another project on PyPI.
# Megatron-core is installed without its dependencies, which are for training on GPUs.
$(STAMP): pyproject.toml constraints-cpu.txt tools/install_system_packages.sh tools/install_prometheus.sh
	@echo "set-up of the environment $(VENV), only in the first run, in 4 steps"
	@echo "steps 1 and 2 take minutes, in which pip prints only errors"
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@echo "set-up 1 of 4: PyTorch"
	$(BIN)/pip install --quiet --disable-pip-version-check -c constraints-cpu.txt torch
	$(BIN)/pip uninstall --quiet --disable-pip-version-check --yes windlass 2>/dev/null
	@echo "set-up 2 of 4: Windlass, its extras and the tools of its tests, about 120 packages"
	$(BIN)/pip install --quiet --disable-pip-version-check -c constraints-cpu.txt -e '.[dev]'
	@echo "set-up 3 of 4: Megatron-core and NIXL"
	$(BIN)/pip install --quiet --disable-pip-version-check --no-deps megatron-core==0.16.1
	$(BIN)/pip install --quiet --disable-pip-version-check --no-deps nixl==1.5.1 nixl-cu12==1.5.1
	@echo "set-up 4 of 4: system packages and Prometheus"
	bash tools/install_system_packages.sh
	bash tools/install_prometheus.sh build/prometheus || echo "windlass: no prometheus: tests of deploy/ that need one are skipped" >&2
	touch $(STAMP)

demo: setup
	$(BIN)/windlass demo $(ARGS)

lint: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/ruff check --isolated --select D401 tests benchmarks tools examples
	$(BIN)/python tools/check_house_rules.py
	$(BIN)/python tools/report_source.py
	$(BIN)/python tools/measure_english.py

types: setup
	$(BIN)/mypy

imports: setup
	$(BIN)/lint-imports

# Four workers on two cores, because tests mostly wait. The slowest files start first (tests/conftest.py).
# Failed tests run again, alone, because a busy machine can exceed a test's deadline. More than six such tests fail the
# target. The goal is two, once tests with short deadlines pass reliably while four others run.
unit: setup
	$(RUN) -n 4 --dist loadfile --no-loadscope-reorder

# Live vLLM servers: some with two tensor-parallel ranks, which FSDP2 ranks update in both modes, and plain servers that
# a user starts with one flag. Two test files run at a time, because servers mostly wait.
engine: setup
	test -n "$(WINDLASS_VLLM_VENV)" || bash tools/engines/install.sh vllm .venv-vllm $(VENV)
	WINDLASS_ENGINES=one $(RUN) -n 2 --dist loadfile -m engines -k is_a_fresh_one \
	  tests/engines/test_live_servers.py tests/integrations/test_vllm_plugin.py

test: lint types imports unit engine

# Long tests with the same requirements as `make test`: ten thousand simulated rounds, every planted bug, every kind of
# process killed in every phase, relays, NIXL over TCP, whole jobs.
test-long: setup
	$(RUN) -m "long and not engines and not cluster" tests --ignore tests/trainers $(ARGS)

# More Megatron-core layouts on four processes, and training steps of every model family. transformers gives the expected
# logits. mbridge and mcore-bridge are independent converters, and their exporters are captured. The shards of a newer
# Megatron-core, which asks for Python 3.12 and also works with 3.11, are compared too.
test-megatron: setup
	$(BIN)/pip install --quiet --disable-pip-version-check --no-deps --target build/converter mbridge==0.15.1 mcore-bridge==1.6.5 einops==0.8.2
	PYTHONPATH=build/converter $(RUN) -m long tests/trainers $(ARGS)
	$(BIN)/pip install --quiet --disable-pip-version-check --no-deps --ignore-requires-python --target build/megatron megatron-core==0.17.1
	PYTHONPATH=build/megatron $(RUN) tests/trainers/test_shards.py

# Installs unmodified vLLM and SGLang for CPUs, each in its own environment; about 3 minutes each.
# To use existing environments, set WINDLASS_VLLM_VENV and WINDLASS_SGLANG_VENV.
engines: setup
	test -n "$(WINDLASS_VLLM_VENV)" || bash tools/engines/install.sh vllm .venv-vllm $(VENV)
	test -n "$(WINDLASS_SGLANG_VENV)" || bash tools/engines/install.sh sglang .venv-sglang $(VENV)

# Live servers on this machine's CPU: a selection that covers the matrix (134 minutes beside other work, 2026-11-30), or the whole
# matrix with FULL=1. The results go to docs/capabilities.md.
test-engines: engines
	WINDLASS_ENGINES=$(if $(FULL),all) WINDLASS_CAPABILITIES=docs/capabilities.json \
	  $(RUN) -m engines tests/engines $(ARGS)
	$(BIN)/python tools/render_capabilities.py

# Engines and frameworks that the user starts, in environments that also contain Windlass. About 31 minutes on two cores,
# including 4 for the installation.
# To use existing environments, set WINDLASS_TRL_VENV, WINDLASS_VERL_VENV, WINDLASS_AREAL_VENV and WINDLASS_AGENTS_VENV. WINDLASS_NEMO_RL names
# a checkout of NVIDIA-NeMo/RL; without it the test of NeMo-RL is skipped.
test-integrations: engines
	test -n "$(WINDLASS_VERL_VENV)" || bash tools/engines/install.sh verl .venv-verl $(VENV) $(or $(WINDLASS_VLLM_VENV),.venv-vllm)
	test -n "$(WINDLASS_TRL_VENV)" || bash tools/integrations/install_trl.sh .venv-trl $(VENV) $(or $(WINDLASS_VLLM_VENV),.venv-vllm)
	test -n "$(WINDLASS_AGENTS_VENV)" || bash tools/integrations/install_agents.sh .venv-agents
	test -n "$(WINDLASS_AREAL_VENV)" || bash tools/integrations/install_areal.sh .venv-areal $(VENV)
	$(BIN)/pip install --quiet --disable-pip-version-check --upgrade --target build/routers sglang-router==0.3.2 vllm-router==0.1.17
	WINDLASS_ROUTERS=build/routers $(RUN) -n 2 --dist loadfile -m "engines and not cluster" \
	  tests/integrations tests/rollout/test_routers.py $(ARGS)

# Subset of test-engines and test-megatron that checks the guarantees of an update with settings of real users: prefix
# caches, overlapped gathers, model classes of a plugin that store tensors outside parameters. In every pause mode an
# updated server must give the same answers as a fresh server in another process. Log-probabilities must match the sampled
# distribution, and two servers must draw different samples. About 40 servers start one after another, each with about
# 20 s of processor time (2026-11-28). The last line of the output counts the comparisons.
test-truth: engines
	$(RUN) -m "engines or not engines" tests/engines/test_vllm_encoders.py tests/engines/test_vllm_caches.py \
	  tests/engines/test_sglang_caches.py tests/engines/test_live_derived_state.py tests/engines/test_live_sampling.py \
	  tests/trainers/test_whole.py \
	  tests/integrations/test_vllm_plugin.py::test_versions_of_large_noise_equal_fresh_servers $(ARGS)

# Examples that train for some steps with the embedded engine and a live vLLM, and tests that kill processes during
# rollouts: workers, engines, processes of rewards, agents, the controller.
test-rollouts: setup
	test -n "$(WINDLASS_VLLM_VENV)" || bash tools/engines/install.sh vllm .venv-vllm $(VENV)
	$(RUN) -n 2 --dist loadfile -m "not cluster and not engines" tests/jobs/test_arithmetic_example.py tests/jobs/test_agent_examples.py \
	  tests/jobs/test_job_runs.py tests/jobs/test_job_tensors.py tests/jobs/test_hangs.py tests/rollout/test_agentic.py tests/rollout/test_chat_kills.py \
	  tests/rollout/test_clean_up.py tests/rollout/test_group_sizes.py tests/rollout/test_held_tensors.py tests/rollout/test_reward_server.py \
	  tests/rollout/test_rewards.py tests/rollout/test_rollout_durable.py $(ARGS)

# Every test that SECURITY.md and docs/attacks.md name, against real processes: clients without a token, tokens, TLS, forged
# or faulty members, other runs, damaged journals. About 2 minutes on two cores. `make test` also runs most of them.
test-security: setup
	$(RUN) -m "not engines and not cluster" \
	  $$(grep -ohE 'tests/[a-z_/]+\.py(::test_[a-z0-9_]+)?' SECURITY.md docs/attacks.md | sort -u) $(ARGS)

# Every script in benchmarks/, on a CPU at a small size. Scripts with live engines use vLLM for CPUs.
test-scripts: setup
	test -n "$(WINDLASS_VLLM_VENV)" || bash tools/engines/install.sh vllm .venv-vllm $(VENV)
	$(RUN) -n 2 -m scripts tests/scripts $(ARGS)

# Fuzzing of every decoder of data from peers, guided by coverage (atheris has wheels for Linux on x86-64 only). Takes ten
# minutes, or use ARGS="--seconds 60 'agent frame'". Inputs that fail are stored in build/fuzz.
fuzz: setup
	$(BIN)/pip install --quiet --disable-pip-version-check -e '.[fuzz]'
	$(BIN)/python tests/fuzz/fuzz_decoders.py $(ARGS)

# Whole jobs, engines and gangs over several nodes, and GPUs, on a Slurm cluster (Debian's packages, root) and on a Ray
# cluster, each with one and with two nodes.
test-clusters: engines
	bash tools/install_slurm.sh
	$(RUN) -m cluster tests/jobs $(ARGS)

# Processes on simulated hosts (network namespaces): slow and lossy links, partitions, a live vLLM over two hosts (root).
test-hosts: setup
	test -n "$(WINDLASS_VLLM_VENV)" || bash tools/engines/install.sh vllm .venv-vllm $(VENV)
	test -n "$(WINDLASS_SGLANG_VENV)" || bash tools/engines/install.sh sglang .venv-sglang $(VENV)
	$(RUN) -m cluster tests/control tests/integrations/test_vllm_hosts.py tests/integrations/test_sglang_hosts.py $(ARGS)

# Real verbs calls in a virtual machine with two soft-RoCE devices. Emulation makes this slow: many minutes.
# ARGS='-k Mooncake' runs a part of the tests.
test-rdma: setup
	bash tools/rdma/build_guest.sh build/rdma
	$(BIN)/python tools/rdma/guest.py --machine build/rdma --deadline-s 5400 -- \
	  bash tools/rdma/guest_network.sh bash tools/rdma/guest_tests.sh $(VENV) $(ARGS)

test-all: test test-long test-megatron test-hosts test-clusters test-engines test-integrations test-rdma

# Regenerates the figures, the list of public names and the matrix of engines from sources and committed results.
# Tests fail if one of them is out of date.
figures: setup
	$(BIN)/python -m tools.figures
	$(BIN)/python tools/render_api.py
	$(BIN)/python tools/render_capabilities.py
	$(BIN)/python tools/features.py render

# The site. A broken link is an error.
docs: setup
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build

# Adds the site of this version to the sites of other versions, as a commit on the local branch `pages`, with a menu of
# versions.
docs-version: setup
	NO_MKDOCS_2_WARNING=1 $(BIN)/mike deploy --branch pages --update-aliases \
	  $$(sed -n 's/^version = "\(.*\)"/\1/p' pyproject.toml) latest
	NO_MKDOCS_2_WARNING=1 $(BIN)/mike set-default --branch pages --allow-undefined latest

# Tests the controller's page in a real Chromium, which also makes the pictures of docs/operations.md, and deploy/ in a
# real Prometheus (from Debian, unpacked in build/). `make test` runs both tests if Chromium and Prometheus are installed.
test-browser: setup
	command -v chromium >/dev/null || apt-get install -y --no-install-recommends chromium
	bash tools/install_prometheus.sh build/prometheus
	WINDLASS_SCREENSHOT=docs/figures $(RUN) tests/observability/test_page.py tests/observability/test_deploy.py $(ARGS)

# Checks the wheel, the sdist, the container files, and the version number in every file. Installs the wheel into empty
# environments with pip and uv, without and with the extra for the demo.
release-check:
	bash tools/release_check.sh $(PYTHON)

bench: setup
	$(BIN)/python benchmarks/run.py $(ARGS)

clean:
	rm -rf $(VENV) .venv-vllm .venv-sglang .venv-trl .venv-verl .venv-areal build dist .mypy_cache .ruff_cache .pytest_cache .import_linter_cache
