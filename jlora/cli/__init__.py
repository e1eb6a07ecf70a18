"""Entry point of the command line. It handles Ctrl-C before argparse and JAX are imported."""

import io
import os
import signal
import sys
from glob import glob
from types import FrameType
from typing import NoReturn

# Linux device files of the accelerators that JAX supports: TPUs, NVIDIA (also Jetson and WSL), AMD, Neuron.
_ACCELERATORS = (
    "/dev/accel*",
    "/dev/vfio/[0-9]*",
    "/dev/nvidia[0-9]*",
    "/dev/nvgpu*",
    "/dev/nvhost-gpu",
    "/dev/dxg",
    "/dev/kfd",
    "/dev/neuron*",
)


def main() -> int:
    """Run the console script `jlora` and return its exit status.

    The status is 0 for success, 1 for an error (one line on stderr), 2 for a wrong argument, 130 for Ctrl-C, and 141
    if the reader of the output has closed it.
    """
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:  # a background job keeps SIGINT ignored
        signal.signal(signal.SIGINT, _interrupted)
    _choose_platform()
    from jlora.cli.commands import run

    try:
        if isinstance(sys.stdout, io.TextIOWrapper):  # None if the parent process closed it
            sys.stdout.reconfigure(errors="backslashreplace")
        status = run(sys.argv[1:])
        if sys.stdout is not None:
            sys.stdout.flush()
        return status
    except BrokenPipeError:  # `jlora inspect X | head -1`
        status = 141
    except OSError as error:  # a full disk
        os.write(2, f"jlora: error: the output could not be written: {error}\n".encode())
        status = 1
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # discards output that Python flushes at exit
    return status


def _interrupted(number: int, frame: FrameType | None) -> NoReturn:
    """End the process at once. Running code could swallow or print an exception."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    try:
        if sys.stdout is not None:
            sys.stdout.flush()
        os.write(2, b"\njlora: interrupted\n")
    finally:
        os._exit(130)


def _choose_platform() -> None:
    """Set JAX_PLATFORMS=cpu if there is no accelerator. JAX would start an installed libtpu, which prints errors."""
    named = os.environ.get("JAX_PLATFORMS") or os.environ.get("JAX_PLATFORM_NAME")
    if sys.platform == "linux" and not named and not any(glob(pattern) for pattern in _ACCELERATORS):
        os.environ["JAX_PLATFORMS"] = "cpu"
