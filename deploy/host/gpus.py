"""The GPUs of this host, as nvidia-smi tells them: no CUDA context is created for it."""

from __future__ import annotations

from dataclasses import dataclass

from deploy.host.systemd import SystemdError, run
from kdtree_patch import compile as compiling

_QUERY = "name,uuid,compute_mode,compute_cap,driver_version,memory.free"


@dataclass(frozen=True)
class Gpu:
    name: str
    uuid: str
    compute_mode: str  # Default, or one that keeps all processes out but the service's
    capability: tuple[int, int]
    driver: str
    free_bytes: int

    def problem(self, config: str) -> str | None:
        """Why the kernel does not run there in a configuration."""
        if compiling.cubin_target(self.capability, config) is not None:
            return None
        return compiling.refusal(self.name, self.capability, config)[1]

    @property
    def about_capability(self) -> str:
        return f"{self.capability[0]}.{self.capability[1]}"


def on_this_host() -> list[Gpu]:
    """In the order of nvidia-smi. Raises SystemdError if that is missing or fails."""
    output = run("nvidia-smi", f"--query-gpu={_QUERY}", "--format=csv,noheader,nounits")
    found = []
    for line in output.splitlines():
        try:
            name, uuid, compute_mode, capability, driver, free = (part.strip() for part in line.rsplit(",", 5))
            major, minor = capability.split(".")
            mib = int(free) if free.isdigit() else 0
            found.append(Gpu(name, uuid, compute_mode, (int(major), int(minor)), driver, mib << 20))
        except ValueError:
            raise SystemdError(f"nvidia-smi says {line!r}, which is not understood") from None
    return found
