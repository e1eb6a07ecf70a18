"""The rows and the reference of benchmarks/peers, which needs PyTorch and no JAX. Its kernels need a GPU."""

import json

import numpy as np
import pytest

from tests import oracle

pytestmark = pytest.mark.parity
torch = pytest.importorskip("torch")

from benchmarks.peers import common


@pytest.mark.parametrize("table", [common.DENSE, common.EXPERTS], ids=["dense", "experts"])
def test_rows_are_those_of_the_file_without_figures(table, tmp_path):
    args = common.arguments("", table, ["--out", str(tmp_path / "out.json"), "--rank", "16", "--tokens", "8", "64"])
    rows, chosen = common.chosen(args, table)
    written = json.loads(table.file.read_text())["rows"]
    assert [[row[k] for k in table.key] for row in rows] == [[row[k] for k in table.key] for row in written]
    assert {key for row in written for key in row} <= set(rows[0])
    assert all(rows[0][figure] is None for figure in table.figures)
    assert {(row["rank"], row["tokens"]) for row in chosen} == {(16, 8), (16, 64)}


def test_reference_equals_the_oracle():
    rng = np.random.default_rng(0)
    x, a, b = rng.normal(size=(5, 8)), rng.normal(size=(3, 4, 8)), rng.normal(size=(3, 6, 4))
    group = np.array([2, 0, 2, 1, 0])
    found = common.delta(*map(torch.from_numpy, (x, a, b, group)))
    want = oracle.lora_delta(x, group, a[:, None], b.swapaxes(1, 2))
    np.testing.assert_allclose(found.numpy(), want, rtol=1e-4)
    common.check(found, torch.from_numpy(want))
    with pytest.raises(AssertionError, match="relative error"):
        common.check(found.flip(0), torch.from_numpy(want))
