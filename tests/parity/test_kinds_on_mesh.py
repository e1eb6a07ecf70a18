"""The rows of `test_kinds` on meshes of virtual devices, against PEFT."""

import functools

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")
pytest.importorskip("peft")

from tests.models.test_mesh import label, make_mesh
from tests.parity.test_kinds import World, check_random_batches

pytestmark = [
    pytest.mark.parity,
    pytest.mark.mesh,
    pytest.mark.filterwarnings("ignore"),
    pytest.mark.usefixtures("quickly_compiled"),
]

TENSOR, DATA = {"tensor": 2}, {"data": 2, "tensor": 2}


@pytest.fixture(scope="module")
def world_of(tmp_path_factory):
    """Return a function from the name of a base model to its `World`."""
    return functools.cache(lambda name: World(name, tmp_path_factory.mktemp(name)))


@pytest.mark.parametrize(
    ("name", "axes", "fully_sharded"),
    [
        ("llama-biases-llama3", TENSOR, False),
        ("llama-biases-llama3", DATA, True),
        ("qwen2-tied", TENSOR, True),
        ("qwen2-tied", DATA, False),
    ],
    ids=label,
)
def test_random_batches_of_all_kinds(world_of, name, axes, fully_sharded):
    data_axes = ["data"] if "data" in axes else []
    manager = world_of(name).served(make_mesh(axes), data_axes=data_axes, fully_sharded=fully_sharded)
    check_random_batches(world_of(name), manager, 15)
