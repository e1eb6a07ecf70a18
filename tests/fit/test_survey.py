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


@pytest.mark.usefixtures("unchecked_calls")
@pytest.mark.parametrize("allow", [False, True])
def test_a_manager_refuses_an_adapter_that_is_not_read(tmp_path, allow):
    pair = np.ones((2, 8), np.float32), np.ones((16, 2), np.float32)
    jlora.Adapter.from_arrays("it", {"up": pair}, alpha=2).save_pretrained(tmp_path / "it")
    unread = []
    jlora.Adapter.from_pretrained(tmp_path / "it", check=unread.append)
    manager = jlora.LoRAManager(Model(), jlora.LoRAConfig(max_loras=1, max_lora_rank=4, allow_nonfinite=allow))
    with pytest.raises(jlora.LoRAUsageError, match="' has not been read"):
        manager.add_adapter(unread[0])
    assert manager.list_adapters() == {}
