"""The plugin's use of SGLang's settings; `tests/integrations/test_sglang_plugin.py` tests live servers."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest

from windlass import envs
from windlass.engines.capture.checkpoint import checkpoint_folder
from windlass.engines.join_route import JoinOrder
from windlass.engines.private_routes import saved_key
from windlass.engines.rank_reports import OTHER_NODES_VARIABLE
from windlass.engines.sglang import plugin
from windlass.envs import CONTROLLER_VARIABLE, TOKEN_FILE_VARIABLE, TOKEN_VARIABLE
from windlass.errors import ConfigError, PeerUnreachable
from windlass.net.addresses import own_address

ELSEWHERE = "http://192.0.2.1:8000"


@pytest.fixture(autouse=True)
def told(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    token = tmp_path / "token"
    token.touch(0o600)
    token.write_text("secret of the test")
    monkeypatch.setattr(envs, "removed_secrets", {})
    monkeypatch.delenv(TOKEN_VARIABLE, raising=False)
    monkeypatch.setenv(TOKEN_FILE_VARIABLE, str(token))
    monkeypatch.setenv(CONTROLLER_VARIABLE, "http://127.0.0.1:8000")
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))


def address_towards_elsewhere() -> str:
    try:
        return own_address(ELSEWHERE)
    except PeerUnreachable:
        pytest.skip("no way to another host")


def settings(host: str, nnodes: int = 1) -> SimpleNamespace:
    return SimpleNamespace(host=host, port=30000, nnodes=nnodes, enable_memory_saver=False)


@pytest.mark.parametrize("host", ["127.0.0.1", "10.0.0.2"])
def test_an_engine_is_named_after_its_reachable_address(host: str) -> None:
    member = plugin.SglangMember(settings(host))
    assert member.name_for(member.controller) == f"{host}:30000"
    assert member.url_for(member.controller) == f"http://{host}:30000"
    assert saved_key(member.url_for(member.controller)) == member.key


def test_a_server_on_all_addresses_advertises_the_address_towards_its_controller() -> None:
    member = plugin.SglangMember(settings("0.0.0.0"))
    assert member.url_for(member.controller) == "http://127.0.0.1:30000"
    assert member.url_for(ELSEWHERE) == f"http://{address_towards_elsewhere()}:30000"


def test_a_server_on_loopback_cannot_join_a_remote_controller(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    address_towards_elsewhere()
    monkeypatch.setenv(CONTROLLER_VARIABLE, ELSEWHERE)
    with pytest.raises(
        ConfigError,
        match=r"--host must be an address that other hosts can reach.*got '127\.0\.0\.1'",
    ):
        plugin.SglangMember(settings("127.0.0.1"))


@pytest.mark.parametrize("host", ["127.0.0.1", "0.0.0.0"])
def test_a_server_over_several_hosts_must_be_reachable_by_its_ranks(host: str) -> None:
    """Check a controller on the same host, for which the server would choose its loopback address."""
    with pytest.raises(ConfigError, match=r"got '127\.0\.0\.1': a rank is on another host"):
        plugin.SglangMember(settings(host, nnodes=2))


def test_a_join_order_to_a_server_over_several_hosts_must_have_no_token() -> None:
    member = plugin.SglangMember(settings("10.0.0.2", nnodes=2))
    # The refusal must not prevent a later order to join.
    for _ in range(2):
        with pytest.raises(ConfigError, match="token must be empty or the server's own token"):
            member.join(JoinOrder("http://10.0.0.1:8000", token="another"))


def test_ranks_on_other_hosts_read_the_token_from_a_file(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(OTHER_NODES_VARIABLE, "")
    plugin.check_ranks_have_the_token()
    assert envs.environment_value(OTHER_NODES_VARIABLE)
    monkeypatch.delenv(TOKEN_FILE_VARIABLE)
    with pytest.raises(ConfigError, match="WINDLASS_TOKEN must be set"):
        plugin.check_ranks_have_the_token()
    monkeypatch.setenv(TOKEN_VARIABLE, "it leaves the environment, and ranks do not find it")
    with pytest.raises(ConfigError, match="WINDLASS_TOKEN_FILE must be set on every host"):
        plugin.check_ranks_have_the_token()
    assert not envs.environment_value(TOKEN_VARIABLE)


def test_server_that_slept_without_a_layout_cannot_join(tmp_path: Path) -> None:
    """The layout cannot be captured, here because the checkpoint is missing. SGLang frees the memory nevertheless."""
    given = vars(settings("127.0.0.1")) | {"enable_memory_saver": True, "quantization": None}
    model = {"model_path": str(tmp_path / "none"), "revision": None, "download_dir": None}
    member = plugin.SglangMember(SimpleNamespace(**given, **model))
    member.before_release()
    with pytest.raises(ConfigError, match=r"could not capture their layouts before .*none"):
        member.join(JoinOrder(member.controller, "pull"))


def test_a_plugin_without_a_token_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(TOKEN_FILE_VARIABLE)
    for controller in ("wait", "http://127.0.0.1:8000"):
        monkeypatch.setenv(CONTROLLER_VARIABLE, controller)
        with pytest.raises(ConfigError, match="WINDLASS_TOKEN must be set"):
            plugin.SglangMember(settings("127.0.0.1"))
    for variable in ("WINDLASS_TLS_CA", "WINDLASS_TLS_CERT"):
        monkeypatch.setenv(variable, "/a certificate stands for the token")
    monkeypatch.setenv(CONTROLLER_VARIABLE, "wait")
    # Only its key then opens its join route.
    assert plugin.SglangMember(settings("127.0.0.1")).token == ""


@pytest.fixture
def downloads(tmp_path: Path) -> Path:
    """Provide a cache of the Hugging Face Hub with one model in one revision."""
    cache = tmp_path / "cache"
    model = cache / "models--org--tiny"
    (model / "refs").mkdir(parents=True)
    (model / "refs" / "main").write_text("0" * 40)
    (model / "snapshots" / ("0" * 40)).mkdir(parents=True)
    (model / "snapshots" / ("0" * 40) / "config.json").write_text("{}")
    return cache


def test_the_checkpoint_folder_is_the_folder_that_sglang_loaded(
    downloads: Path, tmp_path: Path
) -> None:
    pytest.importorskip("huggingface_hub")

    def folder_of(path: str, revision: str | None = None) -> Path:
        return checkpoint_folder("--model-path", path, revision, str(downloads))

    assert folder_of(str(tmp_path)) == tmp_path
    found = downloads / "models--org--tiny" / "snapshots" / ("0" * 40)
    assert folder_of("org/tiny") == found
    assert folder_of("org/tiny", "0" * 40) == found
    for unknown in (("org/other",), ("org/tiny", "1" * 40), ("/no/folder",)):
        with pytest.raises(ConfigError, match="--model-path must be a folder of safetensors"):
            folder_of(*unknown)
