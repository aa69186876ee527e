"""A library with NVML's names, for GPUs that are not there."""

from __future__ import annotations

import subprocess
from collections.abc import Sequence
from pathlib import Path

GIB = 1 << 30


def fake_nvml(
    folder: Path, capabilities: Sequence[tuple[int, int] | None], init: int = 0, name: str = "", free: int = 80 * GIB
) -> str:
    """For GPUs of these compute capabilities; None is one that does not answer. `init` is what nvmlInit_v2 answers;
    `name` is that of the file, under which a process that has `folder` on LD_LIBRARY_PATH loads it.
    """
    rows = ", ".join("{" + f"{major}, {minor}" + "}" for major, minor in (pair or (-1, -1) for pair in capabilities))
    source = folder / "nvml.cpp"
    source.write_text(
        f"""
        #include <cstdio>
        struct Memory {{ unsigned long long total, free, used; }};
        static int table[][2] = {{{rows or "{0, 0}"}}};
        static int number(void* d) {{ return static_cast<int>(static_cast<int(*)[2]>(d) - table); }}
        extern "C" {{
        int nvmlInit_v2() {{ return {init}; }}
        int nvmlShutdown() {{ return 0; }}
        int nvmlDeviceGetCount_v2(unsigned* n) {{ *n = {len(capabilities)}; return 0; }}
        int nvmlDeviceGetHandleByIndex_v2(unsigned i, void** d) {{ *d = table[i]; return table[i][0] < 0 ? 15 : 0; }}
        int nvmlDeviceGetCudaComputeCapability(int* d, int* a, int* b) {{ *a = d[0]; *b = d[1]; return 0; }}
        int nvmlSystemGetDriverVersion(char* t, unsigned n) {{ std::snprintf(t, n, "580.95.05"); return 0; }}
        int nvmlDeviceGetName(void* d, char* t, unsigned n) {{ std::snprintf(t, n, "GPU %d", number(d)); return 0; }}
        int nvmlDeviceGetUUID(void* d, char* t, unsigned n) {{ std::snprintf(t, n, "GPU-%d0", number(d)); return 0; }}
        int nvmlDeviceGetComputeMode(void*, int* mode) {{ *mode = 0; return 0; }}
        int nvmlDeviceGetMemoryInfo(void*, Memory* m) {{ *m = {{{80 * GIB}, {free}, 0}}; return 0; }}
        }}
        """
    )
    library = folder / (name or f"libfake-{len(list(folder.iterdir()))}.so")
    subprocess.run(["g++", "-shared", "-fPIC", "-o", str(library), str(source)], check=True)
    return str(library)
