"""The command line. Importing this costs nothing: Ctrl-C is answered before argparse or JAX are on their way."""

import io
import os
import signal
import sys
from glob import glob
from types import FrameType
from typing import NoReturn

# Linux shows every accelerator that JAX drives as one of these: TPUs, NVIDIA (also Jetson and WSL), AMD, Neuron.
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
    """The console script `jlora`: one command in a process of its own. Returns the exit status.

    0 is success, 1 an error (one line on stderr), 2 a wrong argument, 130 Ctrl-C, 141 a reader of the output that left.
    """
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:  # a background job ignores it, and goes on
        signal.signal(signal.SIGINT, _interrupted)
    _choose_platform()
    from jlora.cli.commands import run

    try:
        if isinstance(sys.stdout, io.TextIOWrapper):  # it is None where the caller closed it
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
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # for what Python still holds and writes when it ends
    return status


def _interrupted(number: int, frame: FrameType | None) -> NoReturn:
    """Ends the process where it stands: an exception could be swallowed, or printed, by whatever is running."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    try:
        if sys.stdout is not None:
            sys.stdout.flush()
        os.write(2, b"\njlora: interrupted\n")
    finally:
        os._exit(130)


def _choose_platform() -> None:
    """Without an accelerator JAX is told so: it would start an installed libtpu, which prints errors at length."""
    named = os.environ.get("JAX_PLATFORMS") or os.environ.get("JAX_PLATFORM_NAME")
    if sys.platform == "linux" and not named and not any(glob(pattern) for pattern in _ACCELERATORS):
        os.environ["JAX_PLATFORMS"] = "cpu"
