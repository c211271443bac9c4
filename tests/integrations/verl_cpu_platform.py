"""Platform of verl for CPUs, registered like a plugin (`verl/plugin/platform/platform_manager.py`).

verl loads this module if VERL_USE_EXTERNAL_MODULES names it, and uses it with VERL_PLATFORM=cpu.
"""

from __future__ import annotations

import types
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import verl.utils.distributed
from verl.plugin.platform.platform_base import PlatformBase
from verl.plugin.platform.platform_manager import PlatformRegistry

_device = types.ModuleType("torch_cpu")
_device.__dict__.update(vars(torch.cpu))
_device.__dict__.update(
    memory_allocated=lambda *_: 0,
    memory_reserved=lambda *_: 0,
    max_memory_allocated=lambda *_: 0,
    max_memory_reserved=lambda *_: 0,
    mem_get_info=lambda *_: (1 << 30, 1 << 30),
    empty_cache=lambda: None,
    ipc_collect=lambda: None,
    reset_peak_memory_stats=lambda *_: None,
    # verl looks up the peak FLOPS of this name.
    get_device_name=lambda *_: "CPU",
    manual_seed=torch.manual_seed,
    manual_seed_all=torch.manual_seed,
)


@PlatformRegistry.register(platform="cpu")
class PlatformCpu(PlatformBase):  # type: ignore[misc]  # verl has no types
    device_name = "cpu"
    vendor_name = "cpu"
    device_module = _device

    def is_available(self) -> bool:
        return True

    def current_device(self) -> str:
        return "cpu"

    def device_count(self) -> int:
        return 1

    def set_device(self, device_index: int) -> None:
        pass

    def synchronize(self, device_index: int | None = None) -> None:
        pass

    def manual_seed(self, seed: int) -> None:
        torch.manual_seed(seed)

    def manual_seed_all(self, seed: int) -> None:
        torch.manual_seed(seed)

    def set_allocator_settings(self, settings: str) -> None:
        pass

    def empty_cache(self) -> None:
        pass

    def get_device_capability(self, device_index: int = 0) -> tuple[None, None]:
        return None, None

    def communication_backend_name(self) -> str:
        return "gloo"

    def visible_devices_envvar(self) -> str:
        return "CUDA_VISIBLE_DEVICES"

    @contextmanager
    def nvtx_range(self, msg: str) -> Iterator[None]:
        yield

    def profiler_start(self) -> None:
        pass

    def profiler_stop(self) -> None:
        pass

    def ray_resource_name(self) -> str:
        # verl places servers by this resource. Ray does not check that GPUs exist.
        return "GPU"

    def ray_resource_options(self, num_gpus: float) -> dict[str, Any]:
        return {"num_gpus": num_gpus}

    def ray_noset_envvars(self) -> list[str]:
        return []

    def is_ipc_supported(self) -> bool:
        return False

    def cudart(self) -> None:
        return None


_initialize = verl.utils.distributed.initialize_global_process_group_ray


def _initialize_on_cpu(timeout_second: int | None = None, backend: str | None = None) -> None:
    # verl asks for "cpu:gloo,DEVICE:BACKEND", which would name the CPU twice.
    del backend
    _initialize(timeout_second=timeout_second, backend="cpu:gloo")


verl.utils.distributed.initialize_global_process_group_ray = _initialize_on_cpu
