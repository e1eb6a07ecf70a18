"""Fixtures for devices that this machine lacks, and for interpreted kernels."""

import types
from dataclasses import replace
from functools import partial
from typing import Any

import pytest

from jlora.layers.forward import few_rows
from jlora.pallas import gpus
from jlora.pallas.mosaic_tpu import lora as mosaic_tpu
from jlora.pallas.triton import lora as triton
from tests.pallas.running import interpret_of


@pytest.fixture
def default_device(monkeypatch):
    """`default_device(kind, platform, **attributes)` makes jlora choose kernels and tiles for such a device."""

    def set_device(kind: str = "NVIDIA H200", platform: str = "gpu", **attributes: Any) -> None:
        device = types.SimpleNamespace(device_kind=kind, platform=platform, **attributes)
        monkeypatch.setattr(gpus, "default_device", lambda: device)

    return set_device


@pytest.fixture
def interpret(monkeypatch):
    """`interpret(**tiles)` interprets the kernels that `jlora.ops` calls, and returns the list of their names."""
    kernels = {
        "add_lora": (triton, "triton"), "product_in_parts": (few_rows, "triton"),
        "expand": (triton, "triton"), "tpu_add_lora": (mosaic_tpu, "mosaic_tpu"),
        "tpu_expand": (mosaic_tpu, "mosaic_tpu"),
    }  # fmt: skip

    def start(**tiles: Any) -> list[str]:
        calls: list[str] = []

        def wrap(name, kernel):
            def call(*args, **kwargs):
                calls.append(name)
                return kernel(*args, **kwargs)

            return call

        for name, (module, backend) in kernels.items():
            function = name.removeprefix("tpu_")
            fixed = {"tiles": tiles[name]} if name in tiles else {}
            kernel = partial(getattr(module, function), interpret=interpret_of(backend))
            monkeypatch.setattr(module, function, wrap(name, partial(kernel, **fixed)))
        for module, backend in ((triton.backward, "triton"), (mosaic_tpu.backward, "mosaic_tpu")):
            for name in ("shrink_grads", "expand_grads"):
                kernel = partial(getattr(module, name), interpret=interpret_of(backend))
                monkeypatch.setattr(module, name, kernel)
        return calls

    return start


@pytest.fixture
def force_tiles(monkeypatch):
    """`force_tiles(**sizes)` replaces static sizes that the TPU kernel derives from the shapes."""

    def force(**sizes: Any) -> None:
        choose = mosaic_tpu._sizes
        monkeypatch.setattr(mosaic_tpu, "_sizes", lambda *args: replace(choose(*args), **sizes))

    return force


@pytest.fixture
def force_product(monkeypatch):
    """Make the kernel of products of few rows take all shapes of up to 128 rows, in two parts of K."""
    monkeypatch.setattr(few_rows, "parts_and_stages", lambda rows, k, n: (2, 1) if 0 < rows <= 128 else None)
