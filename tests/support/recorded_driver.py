"""The CUDA driver without a GPU: the functions of cuda-bindings are recorded, and do nothing."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

from cuda.bindings import driver

RESULTS = {
    "cuMemGetAddressRange": 2,
    "cuDeviceGet": 1,
    "cuMemAlloc": 1,
    "cuDevicePrimaryCtxRetain": 1,
}
"""Function -> number of its results, for the functions whose results the tests read."""
NO_RESULT = (
    *("cuInit", "cuEventRecord", "cuEventSynchronize", "cuEventDestroy", "cuStreamDestroy", "cuStreamSynchronize"),
    *("cuCtxSynchronize", "cuCtxPushCurrent", "cuCtxEnablePeerAccess", "cuMemFree", "cuMemHostRegister", "cuMemcpyHtoD"),
    *("cuMemMap", "cuMemSetAccess", "cuMemUnmap", "cuMemRelease", "cuMemAddressFree"),
    *("cuMemcpyDtoH", "cuMemcpyDtoHAsync", "cuMemcpyAsync", "cuMemsetD8Async", "cuLaunchKernel"),
)  # fmt: skip
THEIRS = 1000
"""Context of the calling thread's own GPU. GPU i of the driver has context i + 1."""


class RecordedDriver:
    """Stands for `cuda.bindings.driver`, with its constants, and checks each call against its signature.

    Attributes:
        calls: function, context that was current, and arguments of each call.
        contexts: stack of the calling thread's contexts.
        failing: name of the function that returns the error 1.
    """

    def __init__(self) -> None:
        self.calls: list[tuple[str, int, tuple[Any, ...]]] = []
        self.contexts = [THEIRS]
        self.failing = ""

    @property
    def names(self) -> list[str]:
        """Names of the functions, in the order of their calls."""
        return [name for name, _, _ in self.calls]

    def __getattr__(self, name: str) -> Any:
        found = getattr(driver, name)
        return self._recorded(name, inspect.signature(found)) if name.startswith("cu") else found

    def _recorded(self, name: str, signature: inspect.Signature) -> Callable[..., tuple[Any, ...]]:
        def call(*arguments: Any) -> tuple[Any, ...]:
            signature.bind(*arguments)
            self.calls.append((name, self.contexts[-1], arguments))
            if name == "cuCtxPushCurrent":
                self.contexts.append(arguments[0])
            elif name == "cuCtxPopCurrent":
                return 0, self.contexts.pop()
            elif name == "cuGetErrorString":
                return 0, b"as the test wants"
            elif name == "cuDeviceGet":
                return 0, arguments[0]
            elif name == "cuDevicePrimaryCtxRetain":
                return 0, arguments[0] + 1
            elif name == "cuIpcGetMemHandle":
                return 0, driver.CUipcMemHandle()
            code = int(name == self.failing)
            return (code,) if name in NO_RESULT else (code, *[64] * RESULTS.get(name, 1))

        return call
