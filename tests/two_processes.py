"""Starts the two processes of a test of `jax.distributed`."""

import os
import socket
import subprocess
import sys
from collections.abc import Callable
from typing import Any


def free_port() -> int:
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        return server.getsockname()[1]


def with_four_devices() -> dict[str, str]:
    """The environment of a process with four devices, and the tests' other flags. The last of a kind counts."""
    return dict(os.environ, XLA_FLAGS=os.environ.get("XLA_FLAGS", "") + " --xla_force_host_platform_device_count=4")


def run_two(module: str, arguments: Callable[[int], tuple[Any, ...]], timeout: float) -> None:
    """`python -m module NUMBER PORT *arguments(NUMBER)` for NUMBER 0 and 1 at once; both must end with 0.

    Each has four devices of its own.
    """
    port = free_port()
    running = [
        subprocess.Popen(
            [sys.executable, "-m", module, *map(str, (i, port, *arguments(i)))],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env=with_four_devices(),
        )
        for i in range(2)
    ]
    try:
        said = [process.communicate(timeout=timeout)[0] for process in running]
    finally:
        for process in running:
            process.kill()
    assert [process.returncode for process in running] == [0, 0], "\n".join(said)
