"""The models and adapters of experts in the committed goldens (see make_goldens.py)."""

from pathlib import Path

import numpy as np

from tests.parity.expert_files import Adapter, Shapes

FOLDER = Path(__file__).parent / "expert_goldens"
# checkpoint of tests/models/goldens -> its name in `expert_files.MODELS`, size of an expert, layers with experts
MODELS = {
    "mixtral-window": ("mixtral", 40, (0, 1)),
    "qwen3-moe-mlp-layer": ("qwen3-moe", 16, (0, 2)),
    "gpt-oss-square": ("gpt-oss-square", 32, (0, 1)),
}
ADAPTERS = ("each and the router", "some experts", "fused", "fused, exchanged", "three axes, shared")


def made(model: str) -> dict[str, Adapter]:
    """The adapters of a model, a format each."""
    shapes = shapes_of(model)
    adapters = (
        shapes.each("golden", 2, router=1),
        shapes.each("golden some", 1, experts=(1, 3), ranks={3: 4}),
        shapes.fused("golden", 2),
        shapes.fused("golden exchanged", 1, exchanged=True),
        shapes.stacked("golden", 3, shared=True),
    )
    return dict(zip(ADAPTERS, adapters, strict=True))


def shapes_of(model: str) -> Shapes:
    name, inner, layers = MODELS[model]
    return Shapes(name, 32, inner, layers)


def adapter_path(model: str, adapter: str) -> Path:
    return FOLDER / model / adapter.replace(",", "").replace(" ", "-")


def expected(model: str) -> dict[str, np.ndarray]:
    """ "tokens" [2, L] int32, and of each adapter, and of the base model under "None", the logits [2, L, V]."""
    with np.load(FOLDER / model / "expected.npz") as arrays:
        return dict(arrays)
