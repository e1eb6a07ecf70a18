"""`Survey` of a model of shapes agrees with the manager of the model, and leaves the shapes unchanged."""

import numpy as np
import pytest
from flax import nnx

import jlora


class Model(nnx.Module):
    def __init__(self):
        rngs = nnx.Rngs(0)
        self.up = nnx.Linear(8, 16, rngs=rngs)
        self.norm = nnx.LayerNorm(16, rngs=rngs)


CONFIG = jlora.LoRAConfig(max_loras=3, max_lora_rank=4)


def adapter(name="up", rows=8, base_weights=None):
    module = jlora.ModuleLoRA(
        kind="linear", a=np.ones((2, rows), np.float32), b=np.ones((16, 2), np.float32), alpha=2.0, scaling=1.0
    )
    return jlora.Adapter(name="it", modules={name: module}, base_weights=base_weights or {})


def test_survey_agrees_with_the_manager():
    shapes = nnx.eval_shape(Model)
    before = type(shapes.up)
    survey = jlora.Survey(shapes, CONFIG)
    assert type(shapes.up) is before
    model = Model()
    manager = jlora.LoRAManager(model, CONFIG)
    assert survey.layers() == manager.layers()
    arrays = [value[...] for _, value in nnx.to_flat_state(nnx.state(model, jlora.SlotParam)) if value.ndim > 1]
    assert survey.device_slot_bytes == sum(array.nbytes for array in arrays)  # the rest is one number a slot


@pytest.mark.parametrize(
    ("made", "why", "saved"),
    [
        *((adapter(), None, saved) for saved in (False, True)),
        *((adapter("down"), "down", saved) for saved in (False, True)),
        *((adapter(rows=9), "shapes", saved) for saved in (False, True)),
        (adapter(base_weights={"norm": np.ones((16, 16), np.float32)}), "norm.base_layer", False),
    ],
)
def test_survey_checks_adapters(tmp_path, made, why, saved):
    survey = jlora.Survey(nnx.eval_shape(Model), CONFIG)
    if saved:
        made.save_pretrained(tmp_path / "it")
        made = jlora.LoRARequest("it", str(tmp_path / "it"))
    if why is None:
        survey.check(made)
    else:
        with pytest.raises(jlora.AdapterMismatchError, match=f"adapter 'it'(.|\n)*{why}"):
            survey.check(made)


@pytest.mark.usefixtures("unchecked_calls")
@pytest.mark.parametrize("allow", [False, True])
def test_a_manager_refuses_an_adapter_that_is_not_read(tmp_path, allow):
    adapter().save_pretrained(tmp_path / "it")
    unread = []
    jlora.Adapter.from_pretrained(tmp_path / "it", check=unread.append)
    manager = jlora.LoRAManager(Model(), jlora.LoRAConfig(max_loras=1, max_lora_rank=4, allow_nonfinite=allow))
    with pytest.raises(jlora.LoRAUsageError, match="' has not been read"):
        manager.add_adapter(unread[0])
    assert manager.list_adapters() == {}
