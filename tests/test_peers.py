"""The rows and the reference of benchmarks/peers, which needs PyTorch and no JAX. Its kernels need a GPU."""

import numpy as np
import pytest

from tests import oracle

pytestmark = pytest.mark.parity
torch = pytest.importorskip("torch")

from benchmarks.peers import common


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
