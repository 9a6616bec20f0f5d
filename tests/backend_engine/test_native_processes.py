"""Native threads, shared with torch or of their own, at a fork and at the end of a process."""

import os
import subprocess
import sys

import pytest
from promptsluice.backend_engine.native import Unavailable, native_library

# A child that computes on other numbers of threads and ends as any program does; it is killed if it hangs. It runs none
# of torch's operations that use threads: OpenMP's are not there after a fork, which it does not see.
FORK = """
torch.set_num_threads(3)
expected = run().numpy()
child = os.fork()
if child == 0:
    signal.alarm(20)
    for threads in (3, 1, 2):
        torch.set_num_threads(threads)
        assert (run().numpy() == expected).all()
    del product
    sys.exit(7)
assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
assert (run().numpy() == expected).all()
"""

# The end, while a daemon thread is in the middle of products. Between them it runs nothing of torch's, which ends the
# process itself where it cannot take the interpreter back. It holds what the library reads, as an engine's thread does.
EXIT = """
done = threading.Event()
def repeat(product, *tensors):
    x, weight, scales, out = (tensor.data_ptr() for tensor in tensors)
    matrix = Matrix(weight=weight, scales=scales)
    call = product._functions.promptsluice_product
    while True:
        call(product._handle, ctypes.byref(matrix), x, 64, 512, 4096, out, 3)
        done.set()
tensors = (x, weight, scales, torch.empty(64, 4096))
threading.Thread(target=repeat, args=(product, *tensors), daemon=True).start()
assert done.wait(60)
"""

SET_UP = """
import ctypes, os, signal, sys, threading, torch
from promptsluice.backend_engine.native import NativeProducts, native_library
from promptsluice.backend_engine.native.bindings import Matrix
library = native_library()
if "own" in sys.argv:
    library.functions.promptsluice_share_threads(None)
product = NativeProducts(library)
torch.manual_seed(0)
x, scales = torch.randn(64, 512), torch.rand(4096)
weight = torch.randint(-127, 128, (4096, 512), dtype=torch.int8)
def run():
    return product(x, weight, scales, None)
"""


@pytest.mark.slow
@pytest.mark.skipif(not hasattr(os, "fork"), reason="processes are forked here")
@pytest.mark.parametrize("threads", ["shared", "own"])
@pytest.mark.parametrize("case", [FORK, EXIT], ids=["fork", "exit"])
def test_no_process_hangs_or_crashes_at_its_end(case: str, threads: str) -> None:
    try:
        native_library()
    except Unavailable as error:
        pytest.skip(str(error))
    command = [sys.executable, "-W", "ignore", "-c", SET_UP + case, threads]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
