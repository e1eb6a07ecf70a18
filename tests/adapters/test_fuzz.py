"""A load of damaged adapter files returns a consistent Adapter or raises a LoRAError."""

import json
import os

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from safetensors.numpy import save

from jlora.adapters import Adapter
from jlora.errors import LoRAError
from tests.adapters.conftest import Q, V, lora_tensors

TENSORS = save(lora_tensors({Q: 4, V: 2}))
CONFIG = {
    "peft_type": "LORA",
    "r": 4,
    "lora_alpha": 8,
    "use_rslora": False,
    "target_modules": ["q_proj", "v_proj"],
    "exclude_modules": None,
    "rank_pattern": {"v_proj": 2},
    "alpha_pattern": {},
    "layers_to_transform": [0, 1],
    "layers_pattern": "layers",
    "bias": "none",
    "init_lora_weights": True,
    "use_dora": False,
    "alora_invocation_tokens": None,
    "modules_to_save": None,
}

JSON = st.recursive(
    st.one_of(
        st.none(),
        st.booleans(),
        st.integers(),
        st.floats(),
        st.text(max_size=8),
        st.sampled_from([4, 8, "q_proj", ".*", "(", "LORA", "all-linear", 10**400, ".*_proj", "layers", "(a+)+$"]),
    ),
    lambda inner: st.one_of(
        st.lists(inner, max_size=3),
        st.dictionaries(st.sampled_from(["q_proj", "v_proj", "(", ".*"]), inner, max_size=3),
    ),
    max_leaves=4,
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("fuzz")


def load(folder, config: bytes, tensors: bytes) -> Adapter | None:
    (folder / "adapter_config.json").write_bytes(config)
    (folder / "adapter_model.safetensors").write_bytes(tensors)
    for file in folder.iterdir():
        os.utime(file, (1, 1))  # a file of just now would be waited for
    try:
        adapter = Adapter.from_pretrained(folder, name="fuzzed")
    except LoRAError as error:
        with pytest.raises(type(error)):
            Adapter.from_bytes(tensors, config, name="fuzzed")
        return None
    assert Adapter.from_bytes(tensors, config, name="fuzzed").modules.keys() == adapter.modules.keys()
    assert adapter.modules
    for lora in adapter.modules.values():
        assert lora.a.shape[0] == lora.b.shape[1] == lora.rank >= 1
        assert np.isfinite(lora.scaling)
    return adapter


def edits(data: bytes):
    position = st.integers(0, len(data) - 1)
    return st.lists(
        st.one_of(
            st.tuples(st.just("flip"), position, st.integers(0, 7)),
            st.tuples(st.just("set"), st.integers(0, min(400, len(data) - 1)), st.integers(0, 255)),
            st.tuples(st.just("cut"), position, st.just(0)),
            st.tuples(st.just("drop"), position, st.integers(1, 9)),
            st.tuples(st.just("double"), position, st.integers(1, 9)),
        ),
        min_size=1,
        max_size=4,
    )


def edited(data: bytes, changes) -> bytes:
    for kind, at, value in changes:
        at = min(at, max(0, len(data) - 1))
        if not data:
            break
        if kind == "flip":
            data = data[:at] + bytes([data[at] ^ (1 << value)]) + data[at + 1 :]
        elif kind == "set":
            data = data[:at] + bytes([value]) + data[at + 1 :]
        elif kind == "cut":
            data = data[:at]
        elif kind == "drop":
            data = data[:at] + data[at + value :]
        else:
            data = data[: at + value] + data[at:]
    return data


FUZZ = settings(max_examples=5 * settings().max_examples)


@FUZZ
@given(changes=edits(TENSORS[:400]))
def test_damaged_header(folder, changes):
    load(folder, json.dumps(CONFIG).encode(), edited(TENSORS[:400], changes) + TENSORS[400:])


@FUZZ
@given(changes=st.dictionaries(st.sampled_from([*CONFIG, "kasa_config", "new_field"]), JSON, max_size=3), value=JSON)
@example(changes={"target_modules": "(a+)+$"}, value=None)
@example(changes={}, value=[])
def test_changed_fields(folder, changes, value):
    whole = value if value == [] else CONFIG | changes
    load(folder, json.dumps(whole).encode(), TENSORS)
