"""The GPUs of this host, as nvidia-smi tells them: no CUDA context is created for it."""

from __future__ import annotations

from dataclasses import dataclass

from deploy.host.systemd import SystemdError, run
from kdtree_patch import compile as compiling

_QUERY = "name,compute_cap,driver_version,memory.free"


@dataclass(frozen=True)
class Gpu:
    name: str
    capability: tuple[int, int]
    driver: str
    free_bytes: int

    @property
    def target(self) -> str | None:
        """What the kernel is compiled for; None if it does not run there."""
        return compiling.cubin_target(self.capability)

    @property
    def problem(self) -> str:
        return f"{self.name}: {compiling.unsupported_reason(self.capability)}"


def on_this_host() -> list[Gpu]:
    """Raises SystemdError if nvidia-smi is missing or fails."""
    output = run("nvidia-smi", f"--query-gpu={_QUERY}", "--format=csv,noheader,nounits")
    found = []
    for line in output.splitlines():
        try:
            name, capability, driver, free = (part.strip() for part in line.rsplit(",", 3))
            major, minor = capability.split(".")
            mib = int(free) if free.isdigit() else 0
            found.append(Gpu(name, (int(major), int(minor)), driver, mib << 20))
        except ValueError:
            raise SystemdError(f"nvidia-smi says {line!r}, which is not understood") from None
    return found
