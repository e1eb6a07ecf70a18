"""The smallest case of each benchmark that a CPU can run."""

import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.__main__ import summaries
from tests.two_processes import with_four_devices

# Benchmark -> options of its smallest case. FOLDER is a new folder.
QUICK = {
    "bench": "--only prepare --minutes 1 --out FOLDER",  # starts `prepare`
    "kernels": "--projection o --rank 16 --tokens 1 --layers 2 --wall",
}
SLOW = {
    "adapter_load": "--layers 4 --experts 16 --rank 16 --repeats 1",
    "decode_step": "--model small --layers 1 --rounds 1 --batches 2 --steps decode",
    "gradients": "--small --layers 1 --rounds 1 --calls 1 --projections o --tokens 64",
    "soak": "--steps 20 --out FOLDER/soak.json",
}
# The slowest, which use what the others and the tests of servers and meshes use.
NIGHTLY = {
    "mesh": "--model tiny --layers 1 --batch 8 --adapters 2 --slots 2 --rounds 1 --steps decode --no-fully",
    "mesh_of_a_host": "--devices 4 --tiny --only 8b_data_tensor --out FOLDER",
    "processes": "--devices 2 --model tiny --layers 1",
    "serve_decode": "--tiny --batch 4 --context 100 --chunk 32 --window 20 --steps 3",
    "serve_http": "--shape tiny --layers 2 --batches 2 --context 40 --chunk 32 --window 20 --steps 3 --repeats 1 "
    "--in-use 2 --slots 2 --max-cpu-loras 3 --adapters 6 --requests 2",
    "serve_prefixes": "--tiny",
    "train_step": "--model small --layers 1 --tokens 32 --length 8 --members 2 --capacities 2 --rounds 1 --parts steps",
}
# These need an accelerator or minutes, and are only imported.
IMPORTED = {"aot", "aot_gpu", "aot_tpu", "attention", "decode_loop", "in_turns", "moe_block", "moe_kernels"}
IMPORTED |= {"serve_zipf", "swap", "tpu_cycles", "tpu_step"}
# These need packages that the tests do not install.
ELSEWHERE = {
    "aot_vllm",
    "plot",
    "serve_replicas",
    "tinker_http",
    *(name for name in summaries() if name.startswith("peers.")),
}
OPTIONS = [
    *QUICK.items(),
    *(pytest.param(*case, marks=pytest.mark.slow) for case in SLOW.items()),
    *(pytest.param(*case, marks=[pytest.mark.slow, pytest.mark.nightly]) for case in NIGHTLY.items()),
]


@pytest.mark.parametrize(("name", "options"), OPTIONS)
def test_the_smallest_case_runs(name, options, tmp_path):
    assert started("-m", f"benchmarks.{name}", *options.replace("FOLDER", str(tmp_path)).split())


@pytest.mark.slow
def test_the_others_are_imported():
    modules = ", ".join(f"benchmarks.{name}" for name in sorted(IMPORTED))
    assert started("-c", f"import {modules}; print('imported')")


def started(*options: str) -> str:
    ran = subprocess.run([sys.executable, *options], env=with_four_devices(), capture_output=True, text=True)
    assert ran.returncode == 0, ran.stderr
    return ran.stdout.strip()


def test_every_benchmark_is_listed_here_and_by_the_command():
    assert {"prepare", *QUICK, *SLOW, *NIGHTLY} | IMPORTED | ELSEWHERE == set(summaries())
    folder = Path(__file__).parents[1] / "benchmarks"
    files = [path for path in folder.rglob("[!_]*.py") if "if __name__ ==" in path.read_text()]
    runnable = {".".join(path.relative_to(folder).with_suffix("").parts) for path in files}
    assert {line.split()[0] for line in started("-m", "benchmarks").splitlines()[2:]} == runnable
