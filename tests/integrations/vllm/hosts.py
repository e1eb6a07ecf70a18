"""Two hosts of a slice on one machine: Ray nodes with one TPU each, by name, and the environment of pods on GKE."""

import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path

import psutil
import ray

from tests.integrations.vllm.serving import stop
from tests.two_processes import free_port


@contextmanager
def two_hosts(folder: Path, environment: Mapping[str, str]) -> Iterator[tuple[dict[str, str], list[psutil.Process]]]:
    """Start the nodes and return the environment of `vllm serve` on the first of them, and the process of each.

    Each has a home folder of its own, `folder/home0` and `folder/home1`.
    """
    program = str(Path(sys.executable).with_name("ray"))
    port, coordinator = free_port(), free_port()
    common = {
        **environment,
        "TPU_MULTIHOST_BACKEND": "ray",
        "VLLM_EXECUTE_MODEL_TIMEOUT_SECONDS": "120",  # the wait of vLLM's engine for a step of a lost host
        "SKIP_JAX_PRECOMPILE": "1",  # one host compiles ahead in test_serve.py
        # JAX reads these on GKE. The first has it look for them where there is no TPU.
        "JAX_FORCE_TPU_INIT": "1",
        "TPU_WORKER_HOSTNAMES": "localhost,localhost",
        "MEGASCALE_COORDINATOR_ADDRESS": "localhost",
        "MEGASCALE_NUM_SLICES": "1",
        "MEGASCALE_SLICE_ID": "0",
        "JAX_COORDINATOR_PORT": str(coordinator),
        "XLA_FLAGS": "--xla_force_host_platform_device_count=1",
        "VLLM_HOST_IP": ray.util.get_node_ip_address(),
        "RAY_ADDRESS": f"127.0.0.1:{port}",
        "RAY_USAGE_STATS_ENABLED": "0",
    }
    with ExitStack() as stack:
        first, nodes = {}, []
        places = [["--head", f"--port={port}", "--include-dashboard=false"], [f"--address=127.0.0.1:{port}"]]
        for i, place in enumerate(places):
            home = folder / f"home{i}"
            home.mkdir()
            variables = {**common, "HOME": str(home), "TPU_WORKER_ID": str(i)}
            first = first or variables
            command = [program, "start", *place, "--block", "--num-cpus=1", '--resources={"TPU": 1}']
            command.append("--object-store-memory=100000000")
            log = stack.enter_context((folder / f"ray{i}.log").open("wb"))
            node = subprocess.Popen(command, env=variables, cwd=home, stdout=log, stderr=subprocess.STDOUT)
            stack.callback(stop, node)
            _wait(folder / f"ray{i}.log", node)
            nodes.append(psutil.Process(node.pid))
        yield first, nodes


def _wait(log: Path, node: subprocess.Popen[bytes]) -> None:
    end = time.monotonic() + 120
    while "Ray runtime started" not in log.read_text(errors="replace"):
        if node.poll() is not None or time.monotonic() > end:
            raise RuntimeError(f"ray does not start:\n{log.read_text(errors='replace')}")
        time.sleep(0.2)
