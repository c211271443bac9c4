"""Tests and scripts that run the commands and code blocks of the documentation.

`python tests/support/page_runs.py` prints the list. `tests/cli/test_documented_commands.py` fails
for a command or block that no table here contains.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import NamedTuple

from pages import PAGES, ROOT, Block, all_blocks, commands_of

HERE = "tests/cli/test_documented_commands.py"
LANGUAGES: Mapping[str, str] = {
    "python": "tests/cli/test_documented_code.py::test_code_on_a_page_names_existing_objects",
    "toml": f"{HERE}::test_settings_on_a_page_name_existing_objects",
    "yaml": f"{HERE}::test_settings_on_a_page_name_existing_objects",
    "text": f"{HERE}::test_drawings_and_outputs_are_fenced_as_text",
}
"""Language -> the test that checks its blocks. Commands of `RUN` are also run."""
SCRIPTS = re.compile(
    r"(?:\w+=\S+ )*(?:(?:\S*/)?python (?:benchmarks|tools|tests)/|python -m tools\.|benchmarks/\S+\.(?:sh|py) )"
)
"""Benchmarks and tools: `test_every_script_parses_its_command_line` parses their options."""
VLLM = "tests/integrations/test_vllm_plugin.py::test_an_updated_server_is_a_fresh_one"
LIVE = "tests/engines/test_live_servers.py::test_an_updated_engine_is_a_fresh_one"
EXAMPLES = "tests/cli/test_examples.py::test_commands_of_the_tutorial_train_and_end"
SGLANG = (
    "tests/integrations/test_sglang_plugin.py::test_a_server_of_the_user_joins_the_given_controller"
)
SERVED = (
    "tests/cli/test_serve.py::test_a_served_fleet_is_updated_and_the_next_server_knows_its_version"
)
TLS = f"{HERE}::test_the_commands_of_the_tls_page_make_a_trusted_authority"
RUN: Mapping[str, str] = {
    r"make demo( ARGS=(?!.*cuda).*)?": "tests/jobs/test_demo.py::test_the_demo_of_the_tutorial_runs",
    r"make test": ".ci/run::make test",
    r"make test-rdma.*": "tools/rdma/guest_tests.sh::tests/rdma",
    r"pytest -m cluster tests/rdma --rdma-device .*": "tests/rdma/conftest.py::--rdma-device",
    r"pip install ('?\.(\[\w+\])?'?)": f"{HERE}::test_pages_install_only_existing_extras",
    r"windlass doctor": "tools/release_check.sh::windlass doctor",
    r"windlass doctor --engine-flags .*": "tools/release_check.sh::--engine-flags 'vllm --enable-sleep-mode'",
    r"windlass launch --check examples/launch/slurm.toml": "tests/jobs/test_launch_config.py::test_the_examples_of_several_nodes_are_valid",
    r"windlass launch examples/launch/slurm.toml": "tests/jobs/test_launch.py::test_the_example_of_several_nodes_runs_on_slurm",
    r"windlass launch examples/launch/job.toml": "tests/jobs/test_launch.py::test_the_example_trains_publishes_saves_and_leaves_nothing_behind",
    r"(python|windlass launch) examples/frozen_lake/.*": "tests/jobs/test_agent_examples.py::test_the_environment_of_others_learns",
    r"(python|windlass launch) examples/tool_agent/.*": "tests/jobs/test_agent_examples.py::test_the_tool_agent_learns_although_workers_and_engines_are_killed",
    r"(python|windlass launch) examples/arithmetic/.*": "tests/jobs/test_arithmetic_example.py::test_the_example_learns_and_continues_after_a_kill_with_each_row_once",
    r"windlass demo --engine sglang --trainer megatron .* --compare": "tests/jobs/test_live_demo.py::test_a_checkpoint_and_the_engines_own_transfer",
    r"windlass audit .* --replay .*": "tests/jobs/test_audit.py::test_greedy_sample_is_replayed_bit_for_bit",
    r"windlass audit .*": "tests/jobs/test_audit.py::test_command_shows_versions_rewards_and_tokens",
    r"windlass report .*": 'tests/observability/test_operations.py::"report", controller.url',
    r"windlass status .*": "tests/cli/test_terminal.py::test_status_watch_shows_each_change_until_the_controller_ends",
    r"WINDLASS_TOKEN=\.\.\. windlass serve .* --advertise-host controller.example": TLS,
    r"(WINDLASS_TOKEN=\.\.\. )?windlass serve .*": SERVED,
    r"export WINDLASS_TLS_CA=.*|openssl .*": TLS,
    r"export WINDLASS_(CONTROLLER|TOKEN_FILE)=.*": "tests/integrations/test_slime.py::test_megatron_ranks_update_servers_through_slimes_interface",
    r"export WINDLASS_OPEN_ROUTES=.*": "tests/engines/test_private_routes.py::test_routes_of_a_framework_are_opened_by_name",
    r"export WINDLASS_TOKEN=.*": EXAMPLES,
    r"python -m windlass.engines.vllm .* --dp 2 .*": LIVE,
    r"python -m windlass.engines.vllm .* --adapter .*": "tests/engines/test_live_adapters.py::test_an_updated_adapter_equals_a_freshly_loaded_adapter",
    r"python -m windlass.engines.vllm --attach .*": "tests/engines/test_attach_killed.py::test_attach_makes_a_server_join",
    r"python -m windlass.engines.sglang .* --nnodes 2 .*": "tests/jobs/test_engine_nodes.py::test_an_engine_over_two_nodes_serves_every_version",
    r"python -m windlass.engines.(vllm|sglang) --name \w --model DIR .*": LIVE,
    r"python -m windlass.engines.embedded .* --controller \$?URL": EXAMPLES,
    r"python -m windlass.engines.embedded .* --port 8100": "tests/engines/test_embedded_engine.py::test_every_token_carries_its_weight_version",
    r"python examples/own_engine.py .*": "tests/engines/test_own_engine.py::test_a_custom_engine_serves_and_labels_the_trained_weights",
    r"python examples/controller.py.*|kill \$\(jobs -p\)": EXAMPLES,
    r"python -m windlass.rollout.worker .*": EXAMPLES,
    r"torchrun --nproc-per-node 2 examples/trainer.py .*": EXAMPLES,
    r"CUDA_VISIBLE_DEVICES=1 torchrun --nproc-per-node 1 train.py": VLLM,
    r"(\w+=\d )*vllm serve \S+ --weight-transfer-config '{\"backend\": \"windlass\"}'": VLLM,
    r"VLLM_SERVER_DEV_MODE=1 python -m vllm.entrypoints.openai.api_server .*": VLLM,
    r"vllm serve MODEL --port \d+ --kv-transfer-config .*": "tests/engines/test_vllm_disaggregation.py::test_no_decode_continues_a_prefill_of_other_weights",
    r"WINDLASS_CONTROLLER=\S+ WINDLASS_TOKEN_FILE=token vllm serve MODEL .*": "tests/integrations/test_vllm_membership.py::test_replicas_behind_two_api_servers_join_at_their_start",
    r"WINDLASS_CONTROLLER=\S+ WINDLASS_TOKEN_FILE=token python -m sglang.launch_server .*": SGLANG,
    r"(WINDLASS_TOKEN_FILE=token )?windlass (capture|attach) .*|python -m sglang.launch_server .* --remote-instance-.*": "tests/engines/test_live_outside.py::test_a_server_without_windlass_is_updated_and_its_faults_are_noticed",
    r"python -m sglang.launch_server .* --nnodes 2 .*": "tests/integrations/test_sglang_hosts.py::test_one_server_over_two_hosts_is_updated_by_a_trainer_on_both",
    r"curl http://ENGINE:30000/windlass/join .*": SGLANG,
    r"train_async.py .*": "tests/integrations/test_slime.py::test_megatron_ranks_update_servers_through_slimes_interface",
    r"train.py .* --colocate .*": "tests/integrations/test_slime.py::test_colocated_servers_and_trainers_take_turns",
}
"""Pattern of a command -> the test (or the file and words in it) that runs it, or runs it with
other addresses."""
NOT_RUN: Mapping[str, str] = {
    r"make demo ARGS=.*cuda.*|windlass demo --device cuda .*": "needs GPUs: benchmarks/gpu/run_demo.sh runs it there",
    r"python -m windlass.engines.vllm .* --model FOLDER_OF_A_BLOCK_FP8_CHECKPOINT .*": "needs a GPU with float8: benchmarks/gpu/prove_block_float8.py",
    r"docker (build|run) .*": "needs a container engine and images of gigabytes: tests/cli/test_containers.py reads the files",
    r"ray start .*": "tests start Ray's own test cluster of two nodes in its place",
    r"pip install --no-deps --target build/areal .*": "downloads what one benchmark is compared with",
    r"git worktree add --detach /tmp/reference 4439674": "makes a folder outside of the checkout",
    r'install -m 600 /dev/null token && echo "\$WINDLASS_TOKEN" > token': "two commands of the system that write a file",
    "diff": "a patch of SkyRL, which the page says was not run",
}
"""Pattern of a command, or a language -> why nothing runs it."""


class Shown(NamedTuple):
    """A command, or a block in another language, and the table row that it matches, if any."""

    block: Block
    what: str
    pattern: str
    run_by: str
    why_not: str


def shown() -> Iterator[Shown]:
    """Yield every command, and every block in another language, of every page."""
    for block in (block for page in PAGES for block in all_blocks(page)):
        if block.language not in ("bash", "sh"):
            run_by, why_not = LANGUAGES.get(block.language, ""), NOT_RUN.get(block.language, "")
            yield Shown(block, block.text.partition("\n")[0], block.language, run_by, why_not)
            continue
        for command in commands_of(block):
            yield _command(block, command)


def _command(block: Block, command: str) -> Shown:
    if SCRIPTS.match(command):
        test = f"{HERE}::test_every_script_parses_its_command_line"
        return Shown(block, command, "", test, "")
    for table in (NOT_RUN, RUN):
        for pattern, value in table.items():
            if re.fullmatch(pattern, command):
                found = ("", value) if table is NOT_RUN else (value, "")
                return Shown(block, command, pattern, *found)
    return Shown(block, command, "", "", "")


if __name__ == "__main__":
    for each in shown():
        where = f"{each.block.page.relative_to(ROOT)}:{each.block.line}"
        print(f"{where}: {each.what}\n    {each.run_by or f'not run: {each.why_not}'}")
