"""python -m tests.gpu.context_child STAND-IN: which GPUs have a context, in a process like an HTTP server of SGLang and
in a spawned one like rank 1, as a line of JSON: the process and the moment, to a list of device numbers.

Both import the backend (a stand-in with SGLang's signatures) while our `sitecustomize` is in place; rank 1 then goes on
to its own device and launches the kernel there.
"""

from __future__ import annotations

import ctypes
import importlib
import json
import multiprocessing
import sys

MODULE = "sglang.srt.layers.attention.triton_backend"


def with_a_context() -> list[int]:
    """Asks the driver, which makes none to answer."""
    driver = ctypes.CDLL("libcuda.so.1")
    assert driver.cuInit(0) == 0
    count, flags, active = ctypes.c_int(), ctypes.c_uint(), ctypes.c_int()
    assert driver.cuDeviceGetCount(ctypes.byref(count)) == 0
    found = []
    for device in range(count.value):
        assert driver.cuDevicePrimaryCtxGetState(device, ctypes.byref(flags), ctypes.byref(active)) == 0
        found += [device] * active.value
    return found


def import_the_backend(stand_in: str) -> None:
    sys.path.insert(0, stand_in)
    backend = importlib.import_module(MODULE)
    assert type(vars(backend.TritonAttnBackend)["forward_extend"]).__name__ == "FunctionWrapper", "not patched"


def rank_1(stand_in: str, answer: multiprocessing.connection.Connection) -> None:
    import_the_backend(stand_in)
    found = {"rank 1 after the import": with_a_context()}
    import torch

    torch.cuda.set_device(1)
    from kdtree_patch import hook, selftest
    from kdtree_patch.settings import Settings

    assert hook._worker is not None
    kernel = hook.load_kernel(torch.device("cuda", 1), Settings(selftest=False), hook._worker._job)
    assert all(one.good for one in selftest.run(kernel))  # type: ignore[arg-type]
    torch.cuda.synchronize()
    answer.send(found | {"rank 1 at work": with_a_context()})


def main(stand_in: str) -> None:
    import_the_backend(stand_in)
    context = multiprocessing.get_context("spawn")
    receive, send = context.Pipe(duplex=False)
    worker = context.Process(target=rank_1, args=(stand_in, send))
    worker.start()
    send.close()
    found = receive.recv()
    worker.join()
    print(json.dumps(found | {"HTTP server": with_a_context()}))


if __name__ == "__main__":
    main(sys.argv[1])
