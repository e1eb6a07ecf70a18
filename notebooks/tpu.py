# ---
# jupyter:
#   accelerator: TPU
#   colab:
#     gpuType: V5E1
#   jupytext:
#     notebook_metadata_filter: accelerator,colab
#     text_representation:
#       extension: .py
#       format_name: percent
#   kernelspec:
#     display_name: Python 3
#     language: python
#     name: python3
# ---

# %% [markdown]
# # jlora on Colab's TPU
#
# This notebook tests jlora on a TPU and measures it there, in about half an hour. Select "Runtime", "Change runtime
# type", a TPU, then "Run all". jlora's kernels have not been timed on a TPU yet. Their times are simulated, from the
# schedule of the compiler. The report of the last cell has measured and simulated times side by side, and so confirms
# the simulated ones or shows that they are wrong. Please send it in an issue, also if a test fails.
#
# The TPU serves one process at a time. Therefore each step is a process of its own, and this notebook does not import
# JAX. Without a TPU the tests are left out, and the measurement is a short one of the CPU.

# %%
import os
import subprocess
import sys
import tempfile
from glob import glob
from importlib.util import find_spec
from pathlib import Path

REPOSITORY = ""  # the address that `git clone` takes; unused inside a checkout

ON_TPU = bool(glob("/dev/accel*") or glob("/dev/vfio/[0-9]*")) and os.environ.get("JAX_PLATFORMS") != "cpu"
print("TPU" if ON_TPU else "No TPU")


def run(*command: str) -> int:
    """Run a command, print its output line by line, and return its exit code."""
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as process:
        for line in process.stdout:
            print(line, end="")
    return process.returncode


# %% [markdown]
# ## 1. The checkout

# %%
if not Path("Makefile").exists():
    if not REPOSITORY:
        raise ValueError("Set REPOSITORY in the first cell to the address of jlora's repository")
    if run("git", "clone", "--depth", "1", REPOSITORY, "jlora"):
        raise RuntimeError(f"git could not clone {REPOSITORY}")
    os.chdir("jlora")
if ON_TPU and find_spec("ensurepip") is None:  # Colab's Python lacks the module that makes environments
    run("apt-get", "install", "-y", "-qq", f"python3.{sys.version_info.minor}-venv")

# %% [markdown]
# ## 2. The tests
#
# `make test-device` installs jlora and JAX for TPUs into `.venv`, and runs the tests marked `device` on the TPU.

# %%
failed = run("make", "test-device", "ACCELERATOR=tpu") if ON_TPU else 0

# %% [markdown]
# ## 3. The figures
#
# `make bench` times `benchmarks.kernels` (the LoRA of single projections, each checked against NumPy first), decode
# steps, swaps and `prepare`. `benchmarks.tpu_cycles` then counts the cycles of the same kernels, without the TPU. The
# measured time of a row also has the start of the kernel and a part of the batch's plan.

# %%
folder = Path(tempfile.mkdtemp())
if ON_TPU:
    run("make", "bench", f"BENCH=--out {folder} --minutes 20")
else:
    run(sys.executable, "-m", "benchmarks.bench", "--only", "prepare", "--out", str(folder))

# %% [markdown]
# ## 4. The report to send
#
# Copy the text below into an issue, with the file `bench.json` that it names. The table `tpu_cycles` is the one that
# no TPU has confirmed yet.

# %%
print("make test-device:", "not run" if not ON_TPU else "failed" if failed else "passed")
print((folder / "report.md").read_text())
print("The figures are in", folder / "bench.json")
