"""A private MPS daemon, which lets the kernels of several processes run on one GPU side by side.

CUDA loads a kernel at its first use, by default, and under MPS may then wait until the GPU is idle:
for ever, if another process's kernel waits for this one. `railwave.init` has run all of its own
kernels once; a program that shares a GPU must have run what it uses between the phases, too.

python -m bench.mps python -m pytest -m gpu tests/test_gpu.py
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager

PLACES = ("/usr/local/nvidia/bin", "/usr/bin", "/usr/local/cuda/bin", "/opt/nvidia/bin")


@contextmanager
def mps_daemon() -> Iterator[None]:
    """Start a daemon that this process and its children use; always stop it.

    Raises:
        FileNotFoundError: nvidia-cuda-mps-control is not installed.
    """
    control = shutil.which("nvidia-cuda-mps-control", path=os.pathsep.join(_places()))
    if control is None:
        raise FileNotFoundError(f"nvidia-cuda-mps-control is in none of {_places()}")
    names = ("CUDA_MPS_PIPE_DIRECTORY", "CUDA_MPS_LOG_DIRECTORY")
    before = {name: os.environ.get(name) for name in (*names, "PATH")}
    # NVSHMEM runs the same program to learn of the daemon; without it, it takes there to be none.
    os.environ["PATH"] = os.pathsep.join([os.environ.get("PATH", ""), os.path.dirname(control)])
    # The daemon may still write its log when the folder goes.
    with tempfile.TemporaryDirectory(prefix="railwave-mps-", ignore_cleanup_errors=True) as folder:
        try:
            for name in names:
                os.environ[name] = os.path.join(folder, name.lower())
                os.mkdir(os.environ[name])
            subprocess.run([control, "-d"], check=True, stdin=subprocess.DEVNULL)
            yield
        finally:
            try:
                subprocess.run([control], input="quit\n", text=True, check=False, timeout=60)
            finally:
                for name, value in before.items():
                    os.environ.pop(name, None)
                    if value is not None:
                        os.environ[name] = value


def _places() -> list[str]:
    smi = shutil.which("nvidia-smi")
    beside = [os.path.dirname(smi)] if smi else []
    return [*os.environ.get("PATH", "").split(os.pathsep), *beside, *PLACES]


def main() -> int:
    """Run the command of the arguments under a daemon; return its exit code."""
    if len(sys.argv) < 2:
        print("usage: python -m bench.mps COMMAND [ARGUMENT ...]", file=sys.stderr)
        return 2
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that the daemon is stopped, too
    with mps_daemon():
        return subprocess.run(sys.argv[1:], check=False).returncode


if __name__ == "__main__":
    sys.exit(main())
