"""Fixtures for devices that this machine lacks, for interpreted kernels, and for tuned tables."""

import types
from dataclasses import replace
from functools import partial
from typing import Any

import pytest

from jlora.pallas import gpus
from jlora.pallas.mosaic_tpu import lora as mosaic_tpu
from jlora.pallas.tables import cache_folder
from jlora.pallas.triton import lora as triton
from jlora.pallas.triton import moe as triton_moe
from jlora.pallas.triton import product as triton_product
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
        "add_lora": (triton, "triton"), "linear_lora": (triton_product, "triton"),
        "combine_lora": (triton_moe, "triton"), "tpu_add_lora": (mosaic_tpu, "mosaic_tpu"),
        "expand": (triton, "triton"), "tpu_expand": (mosaic_tpu, "mosaic_tpu"),
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
        return calls

    return start


@pytest.fixture
def force_tiles(monkeypatch):
    """`force_tiles(**sizes)` replaces static sizes that the TPU kernel derives from the shapes."""

    def force(**sizes: Any) -> None:
        choose = mosaic_tpu._sizes
        monkeypatch.setattr(mosaic_tpu, "_sizes", lambda *args: replace(choose(*args), **sizes))

    return force


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    """Return the folder of the user's own tables, which does not exist yet."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return cache_folder()


@pytest.fixture
def tuned_folder(tmp_path, monkeypatch):
    """Return an empty folder that JLORA_TUNED_DIR names."""
    folder = tmp_path / "tuned"
    folder.mkdir()
    monkeypatch.setenv("JLORA_TUNED_DIR", str(folder))
    return folder
