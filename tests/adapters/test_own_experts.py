"""A process reads the experts that it owns, and skips the bytes of others."""

import json

import numpy as np
import pytest

from jlora.adapters import Adapter
from jlora.adapters.adapter import open_adapter
from jlora.adapters.resolve import resolve
from tests.adapters.reading import before_each_read, reading
from tests.adapters.test_expert_formats import EXPERTS, factors, tensors, three_axes

E, R = 8, 3
PROJECTIONS = ("gate_proj", "up_proj", "down_proj")
OWN = 0, 1, 6, 7


def file_of(kind):
    if kind == "each":
        return {f"{EXPERTS}.{e}.{name}": pair for name in PROJECTIONS for e, pair in enumerate(factors(name, E, R))}
    return {f"{EXPERTS}.{name}": three_axes(factors(name, E, R)) for name in PROJECTIONS}


def is_own(name):
    return int(name.split("experts.")[1].split(".")[0]) in OWN


@pytest.mark.parametrize("kind", ["each", "three axes"])
def test_own_experts_are_read_and_others_are_not(folder_of, kind):
    folder = folder_of(tensors(file_of(kind)), r=R, target_modules=list(PROJECTIONS))
    whole = Adapter.from_pretrained(folder)
    content = (folder / "adapter_model.safetensors").read_bytes()
    begin = 8 + int.from_bytes(content[:8], "little")
    times, wanted = np.zeros((2, len(content)), np.uint8)
    for name, info in json.loads(content[8:begin]).items():
        of_experts = wanted[slice(*(begin + at for at in info["data_offsets"]))].reshape(info["shape"][0], -1)
        of_experts[... if kind == "each" else list(OWN)] = is_own(name) if kind == "each" else 1

    def count(offset, size):
        if offset >= begin:
            times[offset : offset + size] += 1

    with reading(80, part=240, threads=True), open_adapter(resolve(folder)) as opened, before_each_read(count):
        others = {name: () for name in whole.modules if kind == "each" and not is_own(name)}
        of_each = {name: (range(2), range(6, 8)) for name in whole.modules if kind != "each"}
        part = opened.read(others | of_each)
    np.testing.assert_array_equal(times, wanted)
    for name, module in whole.modules.items():
        for found, want in ((part.modules[name].a, module.a), (part.modules[name].b, module.b)):
            expected = np.zeros_like(want)
            rows = list(OWN) if kind != "each" else slice(None if is_own(name) else 0)
            expected[rows] = want[rows]
            np.testing.assert_array_equal(found, expected)
