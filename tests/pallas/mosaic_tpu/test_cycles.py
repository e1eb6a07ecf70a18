"""The counter of TPU cycles: programs written here, and one kernel against the recorded figure."""

import json
import os
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

import numpy as np
import pytest

from benchmarks import bundles

RESULTS = Path(__file__).parents[3] / "benchmarks" / "results" / "tpu_cycles.json"
CHIP = bundles.Chip(clock=1e9, bandwidth=32e9, flops=1.0)  # a granule takes a cycle

LOOP = """
     0   :  { %s10_s0 = inlined_call_operand.<no memory space> [shape: s32[], index: 0, kind: input]
              ;;  %s11_s1 = smov 0 }
   0x1 LB: > { %s12_s1 = sadd.s32 1, %s11_s1 /* loc("/x/jlora/a.py":7:1 to :2) */ }
   0x2   : > { %p13_p0 = scmp.lt.s32.totalorder %s12_s1, %s10_s0 }
   0x3   : > { %14 = sbr.rel (%p13_p0) target bundleno = 1 (0x1), region = 2 }
   0x4   :  {}
   0x5   :  {}
   0x6   :  {}
   0x7   :  {}
   0x8   :  { %15 = vst [vmem:[#allocation2]] %v1_v2 /* loc("/x/jlora/a.py":9:1 to :2) */ }
"""
COPY = """
     0   :  { %s10_s0 = inlined_call_operand.hbm [shape: bf16[8,64], index: 0, kind: input]
              ;;  %s1_s1 = inlined_call_operand.vmem [shape: s32[2], index: 1, kind: input] }
   0x1   :  { %3 = dma.vmem_to_smem /*vmem=*/%s1_s1, /*size_in_granules=*/16, [#allocation4], [#allocation5] }
   0x2   :  { %4 = dma.done.wait [#allocation5], 16 }
   0x3   :  { %s5_s2 = sld [smem:[#allocation4 + $0x1]] }
   0x4   :  { %p6_p0 = scmp.gt.s32.totalorder %s5_s2, 0 }
   0x5   :  { %7 = dma.hbm_to_vmem [thread:$0]  (%p6_p0), %s10_s0, /*size_in_granules=*/32, [#allocation6],
              /*dst_syncflagno=*/[#allocation7] }
   0x6   :  { %8 = dma.done.wait (%p6_p0), [#allocation7], 32 }
"""


@pytest.mark.parametrize("rounds", [1, 3])
def test_a_loop_counts_its_bundles_and_those_after_its_branch(rounds):
    program = bundles.parse(LOOP)
    found = bundles.count(program, CHIP, [np.int32(rounds)])
    assert found.cycles == 1 + rounds * 7 + 1
    assert bundles.cycles_of_lines(program, found)["jlora/a.py:9"] == 1


def test_a_copy_takes_its_bytes_and_the_latency():
    program = bundles.parse(COPY)
    found = bundles.count(program, CHIP, [None, np.int32([0, 1])])
    assert found.copied == {0: 1024}
    assert found.waits[6] == 32 + bundles.LATENCY * CHIP.clock - 1
    assert found.cycles == 7 + sum(found.waits.values())
    assert bundles.count(program, CHIP, [None, np.int32([1, 0])]).copied == {}


@pytest.mark.parametrize(("granules", "message"), [(33, "no copy"), (31, "no wait takes the last 1 granules")])
def test_a_wait_without_copy_and_a_copy_without_wait_are_refused(granules, message):
    text = COPY.replace("(%p6_p0), [#allocation7], 32", f"[#allocation7], {granules}")
    with pytest.raises(ValueError, match=message):
        bundles.count(bundles.parse(text), CHIP, [None, np.int32([0, 1])])


def test_an_unknown_instruction_is_named():
    with pytest.raises(NotImplementedError, match=r"sfoo\.s32"):
        bundles.count(bundles.parse(LOOP.replace("sadd", "sfoo")), CHIP, [np.int32(1)])


KERNEL = """
from benchmarks import tpu_cycles
from benchmarks.specs import PROJECTIONS
tpu_cycles.dumps()
(_, count), = tpu_cycles.counted("v6e", tpu_cycles.CASES["64/8"], PROJECTIONS["o"])
print(count.cycles / tpu_cycles.CHIPS["v6e"].clock * 1e6)
"""


def test_a_kernel_takes_no_more_cycles_than_recorded():
    """Notice a change that doubles the cycles. libtpu reads its flags once, so the kernel has a process of its own."""
    recorded = json.loads(RESULTS.read_text())
    if recorded["libtpu"] != version("libtpu"):
        pytest.skip(f"the figures are those of libtpu {recorded['libtpu']}")
    environment = dict(os.environ, JAX_DISABLE_MOST_OPTIMIZATIONS="0")
    ran = subprocess.run([sys.executable, "-c", KERNEL], env=environment, capture_output=True, text=True)
    assert ran.returncode == 0, ran.stderr
    (row,) = (row for row in recorded["rows"] if (row["chip"], row["case"]) == ("v6e", "64/8"))
    assert float(ran.stdout) < 1.4 * row["us"]["o"]
