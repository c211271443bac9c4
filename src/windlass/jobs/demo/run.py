"""Run a demo: launch the job, check every answer, and report problems."""

from __future__ import annotations

import asyncio
import importlib.util
import shutil
import subprocess
import sys
import time
from functools import partial
from pathlib import Path
from typing import Any, final

import msgspec
import torch
from rich.console import Group, RenderableType
from rich.text import Text

import windlass
from windlass.config import P2pBackend, PauseMode
from windlass.control.report import RoundOutcome
from windlass.controller import Controller
from windlass.engines.sglang.spec import TOKEN_VERSIONS
from windlass.engines.spec import ENGINES
from windlass.engines.versions import has
from windlass.engines.vllm.spec import PLUGIN, PLUGINS
from windlass.errors import ConfigError
from windlass.jobs.config import LaunchConfig
from windlass.jobs.demo.checker import TornReport, check_served
from windlass.jobs.demo.own_transfer import (
    OwnResult,
    comparison,
    own_config,
    own_transfer_of,
    run_own_transfer,
)
from windlass.jobs.demo.recipe import DemoRecipe
from windlass.jobs.demo.trainer import build_model
from windlass.jobs.launch import check_options, how_to_watch, run_job
from windlass.jobs.output import OutputFolder
from windlass.jobs.results import JobSummary
from windlass.jobs.schedulers.local import visible_gpus
from windlass.observability.ceilings import measure_memcpy_gbps
from windlass.observability.live import LiveView, plain_console
from windlass.observability.terminal import status_within
from windlass.progress import Progress
from windlass.transports.registry import parse_transport
from windlass.wording import shortest_path

BARS = " ▁▂▃▄▅▆▇█"
"""Characters for rewards from 0 to 1."""
NUM_BARS = 60
"""Number of newest steps whose rewards are shown."""
LAST_UPDATES = 5
"""Number of newest updates that are shown."""
ROOM_FOR_PROGRESS = 3
"""Number of terminal lines that the view leaves for the progress of a slow operation."""


def check_output(config: LaunchConfig) -> None:
    """Check that `make_directory` may empty the output folder; change nothing.

    Raises:
        ConfigError: the folder contains files that are not from an earlier demo, or another demo runs in it.
    """
    folder = Path(config.output_dir)
    made = [folder / "job.json", folder / "versions"]
    try:
        if not folder.exists():
            return
        if any(folder.iterdir()) and not all(path.exists() for path in made):
            raise ConfigError(
                "demo: --output must be a new folder, an empty folder, or the folder of an earlier demo, got "
                f"{folder}: the demo deletes all files in this folder"
            )
    except OSError as error:
        raise ConfigError(f"demo: --output {folder} cannot be used: {error}") from error
    with OutputFolder(folder).locked():
        pass


def make_directory(config: LaunchConfig) -> None:
    """Create the output folder with an empty folder `versions`, and write the configuration to `job.json`.

    If the folder exists, delete it first: `check_output` accepts only an empty folder or the folder of an earlier demo.

    Raises:
        ConfigError: `check_output` raised it, or the folder cannot be deleted or written.
    """
    check_output(config)
    folder = Path(config.output_dir)
    try:
        if folder.exists():
            shutil.rmtree(folder)
        (folder / "versions").mkdir(parents=True)
        (folder / "job.json").write_bytes(msgspec.json.format(msgspec.json.encode(config)))
    except OSError as error:
        raise ConfigError(f"demo: --output {folder} cannot be created: {error}") from error


def engine_install(kind: str) -> str:
    """Return a text that tells the user how to install an engine: with pip if this host has GPUs, else with make."""
    if visible_gpus():
        return (
            f"run `pip install {kind}` in a separate environment, see docs/integrations/{kind}.md"
        )
    return "run `make engines` first"


PACKAGES = {"mooncake": "mooncake", "nixl": "nixl"}
"""Name of a transport -> package that the transport imports in trainers and engines."""


def check_transport_packages(config: LaunchConfig) -> None:
    """Check that the environments of trainers and engines have the package of the job's transport.

    Raises:
        ConfigError: an environment lacks the package, or see `parse_transport`.
        TransportUnavailable: see `parse_transport`.
    """
    transport = parse_transport(config.transport)
    package = PACKAGES.get(transport.name, "")
    if not package or not isinstance(config.update.backend, P2pBackend):
        return
    look = "import importlib.util, sys; sys.exit(importlib.util.find_spec(sys.argv[1]) is None)"
    pythons = dict.fromkeys([sys.executable, *(e.python or sys.executable for e in config.engines)])
    for python in pythons:
        if subprocess.run([python, "-c", look, package], check=False).returncode:
            raise ConfigError(
                f"demo: --transport {transport.name} needs the package {package} in the environment of {python}: "
                f"{transport.remedy}; or use another --transport"
            )


def check_pause_mode(config: LaunchConfig) -> None:
    """If running answers continue after a pause, check that the installed SGLang reports the version of every token.

    Do nothing for other engines.

    Raises:
        ConfigError: SGLang reports only one version per answer, and the pause mode lets running answers continue.
    """
    server, mode = config.engines[0], config.update.pause_mode
    if server.kind != "sglang" or mode is PauseMode.ABORT:
        return
    ask = "import importlib.metadata; print(importlib.metadata.version('sglang'))"
    asked = [server.python or sys.executable, "-c", ask]
    version = subprocess.run(asked, capture_output=True, text=True, check=False).stdout.strip()
    if not has(TOKEN_VERSIONS, version):
        raise ConfigError(
            f"demo: --pause-mode must be abort with SGLang {version}, got {mode}: in this release {TOKEN_VERSIONS.without}, "
            "so the demo would report correct answers as torn"
        )


def check_room(config: LaunchConfig, model: torch.nn.Module) -> None:
    """Check that the disk of the output folder has room for a float32 copy of the model for every step.

    Raises:
        ConfigError: the copies need more than the free space.
    """
    nbytes = 4 * sum(parameter.numel() for parameter in model.parameters()) * config.steps
    folder = Path(config.output_dir)
    while not folder.exists():
        folder = folder.parent
    if nbytes > (free := shutil.disk_usage(folder).free):
        raise ConfigError(
            f"demo: the disk of --output must have {nbytes / 1e9:.1f} GB free, got {free / 1e9:.1f} GB at {folder}: to check "
            f"answers, the demo stores the weights of {config.steps} versions; use fewer --steps or another --output"
        )


MEGATRON_FAMILIES = ("llama", "qwen2", "qwen3")
"""Values of `model_type` that `megatron_trainer.py` can train."""


def megatron_refusal(config: Any) -> str:
    """Return why `megatron_trainer.py` cannot train the model with this transformers configuration; empty if it can."""
    if config.model_type not in MEGATRON_FAMILIES:
        return f"model_type must be one of {list(MEGATRON_FAMILIES)}, got {config.model_type!r}"
    if (rope_type := config.rope_parameters.get("rope_type", "default")) != "default":
        return f"rope_type must be 'default', got {rope_type!r}"
    values = config.to_dict()
    for name in ("attention_bias", "mlp_bias", "use_sliding_window"):
        if values.get(name):
            return f"{name} must be False, got {values[name]}"
    return ""


def check_demo(config: LaunchConfig) -> None:
    """Check the demo's configuration; change nothing on disk.

    Raises:
        ConfigError: a check of this module or `check_options` raised it, or the model cannot be used. It is also raised if
            the engine's server or Megatron-core is missing.
        TransportUnavailable: a package of the transport is not installed.
    """
    check_output(config)
    server = config.engines[0]
    if ENGINES.find(server.kind).server is not None and not Path(server.python).exists():
        raise ConfigError(
            f"demo: WINDLASS_{server.kind.upper()}_VENV must name an environment with {server.kind}, but "
            f"{server.python} does not exist; {engine_install(server.kind)}"
        )
    check_options(config)
    check_transport_packages(config)
    check_pause_mode(config)
    is_megatron = Path(config.trainer.script).stem == "megatron_trainer"
    if is_megatron and importlib.util.find_spec("megatron") is None:
        raise ConfigError(
            "demo: --trainer megatron needs Megatron-core: `pip install --no-deps megatron-core==0.16.1 packaging`; "
            "or use --trainer fsdp"
        )
    try:
        model = build_model(Path(config.trainer.arguments[0]))
    # The user's configuration may raise any error in transformers.
    except Exception as error:
        raise ConfigError(
            f"demo: --model must be a transformers configuration of a causal LM, or --checkpoint a folder with such a model, got "
            f"{config.trainer.arguments[0]}: {type(error).__name__}: {error}"
        ) from error
    check_room(config, model)
    if is_megatron and (reason := megatron_refusal(model.config)):
        raise ConfigError(
            f"demo: --trainer megatron cannot train this model: {reason}; use --trainer fsdp"
        )


def prepare_server(config: LaunchConfig) -> None:
    """Write the files that the engine's server needs before it starts.

    If the trainer starts with random weights, write a checkpoint with different random weights for the server: then only
    an update can give the server the right weights. If the server runs in another environment, make a folder with a link
    to this package and with the plugin's entry point, so that vLLM finds the plugin.
    """
    server = config.engines[0]
    source, _, seed, *_ = config.trainer.arguments
    if not Path(source).is_dir():
        torch.manual_seed(int(seed) + 1)
        model = build_model(Path(source)).to(torch.bfloat16)
        model.save_pretrained(server.model)  # type: ignore[operator]
    if path := server.environment.get("PYTHONPATH"):
        # Link only this package, so that the server does not see the other packages of this environment.
        link = Path(path) / "windlass"
        link.parent.mkdir(parents=True)
        link.symlink_to(Path(windlass.__file__).parent, target_is_directory=True)
        info = link.parent / f"windlass_plugin-{windlass.__version__}.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(
            f"Metadata-Version: 2.1\nName: windlass-plugin\nVersion: {windlass.__version__}\n"
        )
        (info / "entry_points.txt").write_text(
            f"[{PLUGINS}]\n{PLUGIN} = windlass.integrations.vllm.plugin:register\n"
        )


@final
class DemoView:
    """View of the demo's events and updates: live on a terminal, or as lines if `plain` or without a terminal.

    Attributes:
        console: console that prints the view.
        shown: context manager to enter while the job runs.
        progress: progress of the job's current slow operation.
    """

    def __init__(self, config: LaunchConfig, recipe: DemoRecipe, *, plain: bool) -> None:
        self.console = plain_console()
        self._config, self._recipe = config, recipe
        self._frame: RenderableType = ""
        self.shown = LiveView(self.console, self._draw, is_wanted=not plain)
        self.progress = Progress(is_shown=self.shown.is_drawn)
        self._num_events = self._num_updates = 0
        self._has_said_how_to_watch = False

    def show(self, controller: Controller) -> None:
        """Show the events and updates since the last call. The first call also prints how to watch the job."""
        recipe, rewards = self._recipe, self._recipe.rewards_by_step
        if not self._has_said_how_to_watch:
            self.console.print(
                how_to_watch(controller.url, Path(self._config.output_dir)), soft_wrap=True
            )
            self._has_said_how_to_watch = True
        if self.shown.is_drawn:
            training = self._training()
            height = (
                self.console.height - len(self.console.render_lines(training)) - ROOM_FOR_PROGRESS
            )
            fleet = status_within(
                controller.overview(), self.console, height, last_rounds=LAST_UPDATES
            )
            self._frame = Group(training, fleet)
            self.shown.refresh()
            return
        for event in recipe.events[self._num_events :]:
            self.console.print(event, style="yellow")
        for row in recipe.updates[self._num_updates :]:
            reward = f"{rewards[-1]:.3f}" if rewards else "  -  "
            self.console.print(
                f"v{row.version:<3d} reward {reward} {row.nbytes / 1e6:8.2f} MB  "
                f"wire {row.wire_s * 1e3:6.2f}  update {row.update_s * 1e3:6.1f}  "
                f"pause {row.pause_s * 1e3:6.1f} ms",
                soft_wrap=True,
            )
        self._num_events, self._num_updates = len(recipe.events), len(recipe.updates)

    def _draw(self) -> RenderableType:
        """Return the newest frame, and below it a line with the current slow operation and its duration."""
        return Group(self._frame, *filter(None, [self.progress.text()]))

    def _training(self) -> Text:
        """Return a text with the step, the newest reward, bars for the rewards of the newest steps, and two events."""
        rewards = self._recipe.rewards_by_step
        reward = rewards[-1] if rewards else 0.0
        lines = Text(
            f"step {len(rewards)}/{self._config.steps}   reward {reward:.3f}\n", style="bold"
        )
        bars = (BARS[round(min(max(r, 0.0), 1.0) * (len(BARS) - 1))] for r in rewards[-NUM_BARS:])
        lines.append("".join(bars), style="green")
        for event in self._recipe.events[-2:]:
            lines.append(f"\n{event}", style="yellow")
        return lines


async def run_demo(
    config: LaunchConfig,
    recipe: DemoRecipe,
    *,
    json_path: Path | None,
    plain: bool,
    compared: DemoRecipe | None = None,
) -> int:
    """Run the demo to its end.

    Args:
        config: job of the demo.
        recipe: recipe to use instead of the recipe in `config`. It also records the measurements.
        json_path: file for the measurements; None for `demo.json` in the output folder.
        plain: whether to print lines instead of a live view.
        compared: recipe for a second job, in which the engine's own transfer sends the weights; None for no second job.

    Returns:
        0 for success, 1 if the demo found a problem, or 128 plus the number of the signal that ended it.

    Raises:
        ConfigError: the output folder cannot be written, or contains files that are not from an earlier demo.
        WindlassError: a process could not be started, or died; the error contains the end of its log.
    """
    view = DemoView(config, recipe, plain=plain)
    recipe.show = view.show
    with (
        LiveView(
            view.console, view.progress.text, is_transient=True, is_wanted=view.shown.is_drawn
        ),
        view.progress.part("checking the model and the environments of the demo"),
    ):
        await asyncio.to_thread(check_demo, config)
        make_directory(config)
        if ENGINES.find(config.engines[0].kind).server is not None:
            await asyncio.to_thread(prepare_server, config)
        ceiling_gbps, began_s = measure_memcpy_gbps(), time.perf_counter()
    folder = Path(config.output_dir)
    with view.shown:
        job = await run_job(config, recipe=recipe, notify=lambda _: None, progress=view.progress)
    if job.stopped_by:
        return 128 + job.stopped_by
    torn = await asyncio.to_thread(check_answers, config, recipe, view)
    problems, wall_s = find_problems(config, recipe, job, torn), time.perf_counter() - began_s
    pace = recipe.clock.pace()
    own: OwnResult | None = None
    if compared is not None:
        transfer = own_transfer_of(config)
        view.console.print(f"the same job with {transfer.title}", soft_wrap=True)
        show = partial(view.console.print, soft_wrap=True)
        own = await run_own_transfer(own_config(config), compared, transfer, show=show)
        if own.torn.torn or own.lost:
            problems.append(
                f"{own.title}: torn answers: {own.torn.torn}, lost rollouts: {own.lost}"
            )
    content = {
        "pace": pace,
        "updates": recipe.updates,
        "rewards": recipe.rewards_by_step,
        "rollouts": job.rollouts,
        "torn": torn.torn,
        "torn_check": torn,
        "staleness": {str(age): n for age, n in sorted(recipe.staleness.items())},
        "ceiling_gbps": ceiling_gbps,
        "events": recipe.events,
        "problems": problems,
        "wall_s": wall_s,
        "own_transfer": own,
    }
    (json_path or folder / "demo.json").write_bytes(
        msgspec.json.format(msgspec.json.encode(content))
    )
    detected = torn.control_detected
    shown = "not known" if detected is None else f"{100 * detected:.0f} %"
    rewards = recipe.rewards_by_step
    view.console.print(
        f"\n{job.version + 1} versions published, reward {rewards[0]:.3f} -> {rewards[-1]:.3f}, "
        f"{torn.torn} torn of {torn.checked} answers "
        f"(answers in which the check would notice a wrong version: {shown}), {job.rollouts['lost']} lost, {wall_s:.0f} s",
    )
    view.console.print(
        f"of these, {pace.seconds:.0f} s of training, from the first version to the last: "
        f"{pace.samples_per_hour:,.0f} samples per hour, {pace.tokens_per_s:,.0f} trained tokens/s, "
        f"mean staleness {pace.mean_staleness:.2f}, engines paused {100 * pace.paused_share:.2f} % of "
        f"this time, trainers waited for answers {100 * pace.idle_share:.0f} % of it"
    )
    if own is not None:
        backend = config.update.backend
        way = config.transport if isinstance(backend, P2pBackend) else backend.name
        title = f"Windlass ({way})"
        for line in ["", *comparison(recipe, own, title, torn.torn)]:
            view.console.print(line, soft_wrap=True)
    for problem in problems:
        view.console.print(f"PROBLEM: {problem}", style="red")
    for line in what_next(config, problems):
        view.console.print(line, soft_wrap=True)
    return 1 if problems else 0


def check_answers(config: LaunchConfig, recipe: DemoRecipe, view: DemoView) -> TornReport:
    """Compare all answers of the job with the weights that the trainers saved (see `check_served`); show the progress."""
    num_answers = len(recipe.served)
    what = f"checking {num_answers} answers against the trainer's own weights"
    progress = Progress(is_shown=view.shown.is_drawn)
    with (
        LiveView(view.console, progress.text, is_transient=True, is_wanted=view.shown.is_drawn),
        progress.part(what),
    ):
        return check_served(
            recipe.served,
            [r.version for r in recipe.updates if r.outcome is RoundOutcome.PUBLISHED],
            model_config=Path(config.trainer.arguments[0]),
            versions_dir=Path(config.output_dir) / "versions",
            dtypes={e.name: e.arguments[e.arguments.index("--dtype") + 1] for e in config.engines},
            context_is_kept=config.update.pause_mode is PauseMode.IN_PLACE,
            device=config.trainer.arguments[3],
            progress=lambda num: progress.detail(f"{num} of {num_answers} done"),
        )


def what_next(config: LaunchConfig, problems: list[str]) -> list[str]:
    """Return lines that tell a new user which files to read and which commands to try next."""
    folder, program = shortest_path(Path(config.output_dir)), "windlass"
    # After `make demo` the environment is not active, so PATH does not contain the command.
    if shutil.which(program) is None:
        program = shortest_path(Path(sys.executable).with_name(program))
    rows = [
        (f"{folder}/report.html", "in a browser: updates, rollouts"),
        (f"ls {folder}/logs", "what each process printed"),
    ]
    if not problems:
        rows += [
            (f"{program} demo --kill-engine-at 6", "an engine dies in mid-update"),
            (f"{program} demo --engine vllm", f"a real vLLM: {engine_install('vllm')}"),
            (f"{program} doctor", "what works on this machine"),
            (f"{program} launch JOB.toml", "yours, like examples/launch"),
        ]
    # On a terminal of 80 columns, a command and its purpose do not fit on one line.
    return ["\nnext:", *(f"  {command}\n      {why}" for command, why in rows)]


def find_problems(
    config: LaunchConfig, recipe: DemoRecipe, job: JobSummary, torn: TornReport
) -> list[str]:
    """Return the problems that the demo found, one line each; empty if there are none."""
    updates, rewards = recipe.updates, recipe.rewards_by_step
    found = [f"torn answers: {torn.torn}"] if torn.torn else []
    if job.rollouts["lost"]:
        found.append(f"lost rollouts: {job.rollouts['lost']}")
    for update in updates:
        if update.outcome is not RoundOutcome.PUBLISHED:
            found.append(f"version {update.version}: {update.outcome}: {update.reason}")
        elif not update.digest_ok:
            found.append(f"digest of version {update.version} differs")
    found += [
        f"{engine.name} does not serve the last version"
        for engine in config.engines
        if engine.name not in updates[-1].engines
    ]
    third = max(len(rewards) // 3, 1)
    first, last = rewards[:third], rewards[-third:]
    if len(rewards) >= 12 and sum(last) / len(last) <= sum(first) / len(first):
        found.append(f"reward did not rise: first third {first}, last third {last}")
    return found
