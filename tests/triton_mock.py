"""A GPU driver for Triton that compiles for real and only notes what it would launch."""

import gc
from types import SimpleNamespace
from typing import NamedTuple

import triton
from triton.backends.compiler import GPUTarget

STREAM = 7


class Launch(NamedTuple):
    kernel: str
    programs: int
    stream: int
    fp_fusion: bool


class MockDriver:
    """Use as a context manager: the active driver of Triton. ``loaded`` names the kernels that were compiled."""

    def __init__(self, capability: int = 90) -> None:
        self.target = GPUTarget("cuda", capability, 32)
        self.launches: list[Launch] = []
        self.loaded: list[str] = []
        self.utils = SimpleNamespace(
            load_binary=self.load_binary,
            unload_module=lambda module: None,
            get_device_properties=lambda device: {"max_shared_mem": 228 << 10},
        )

    def load_binary(self, name, binary, shared, device):
        assert binary[:4] == b"\x7fELF"
        self.loaded.append(name)
        return "module", name, 32, 0, 1024

    def launcher_cls(self, source, metadata):
        def launch(x, y, z, stream, function, *_):
            assert (y, z) == (1, 1)
            self.launches.append(Launch(function, x, stream, metadata.enable_fp_fusion))

        return launch

    def get_current_target(self):
        return self.target

    def get_current_device(self):
        return 0

    def get_current_stream(self, device):
        return STREAM

    def __enter__(self) -> "MockDriver":
        self.before = triton.runtime.driver._active
        triton.runtime.driver.set_active(self)
        self.forget_kernels()
        return self

    def __exit__(self, *_) -> None:
        self.forget_kernels()
        triton.runtime.driver._active = self.before

    @staticmethod
    def forget_kernels() -> None:
        """What was compiled is kept per device number, whatever driver it was for, and is unloaded by the driver."""
        from fused_accum.backends import triton_counts, triton_kernels, triton_scatter

        for module in (triton_counts, triton_kernels, triton_scatter):
            for function in vars(module).values():
                if isinstance(function, triton.JITFunction):
                    function.device_caches.clear()
        gc.collect()
