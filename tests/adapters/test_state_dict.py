"""Adapters from state dicts and from bytes. `load_all_ways` compares both with folders in other tests."""

import json
from types import SimpleNamespace

import jax.numpy as jnp
import numpy as np
import pytest
import safetensors.numpy

from jlora import Adapter, AdapterFormatError, LoRAUsageError
from tests.adapters.conftest import BASE, PREFIX, Q, lora_tensors
from tests.adapters.reading import load_all_ways, state_dict

KEY = f"{PREFIX}{Q}.lora_A.weight"


def load(tensors=None, config=None, **options):
    tensors = lora_tensors({Q: 4}) if tensors is None else tensors
    return Adapter.from_state_dict(tensors, BASE if config is None else config, **{"name": "sql", **options})


def test_jax_arrays_and_copies():
    for dtype in ("float16", "bfloat16", "float32"):
        tensors = {name: jnp.asarray(value, dtype) for name, value in lora_tensors({Q: 4}).items()}
        lora = load(tensors).modules[Q]
        assert lora.a.dtype == np.dtype(dtype)
        np.testing.assert_array_equal(lora.a, np.asarray(tensors[KEY]))
    tensors = lora_tensors({Q: 4})
    before = tensors[KEY].copy()
    adapter = load(tensors)
    tensors[KEY][:] = 0
    np.testing.assert_array_equal(adapter.modules[Q].a, before)
    assert not adapter.modules[Q].a.flags.writeable


@pytest.mark.parametrize(
    ("value", "cause"),
    [
        ([[1.0]], "is of type list; expected a NumPy or JAX array"),
        (np.ones((4, 6), np.int32), "has dtype int32; expected one of float16, bfloat16, float32, float64"),
        (np.ones((4, 6), object), "has dtype object"),
        (jnp.ones((4, 6), jnp.float8_e4m3fn), "has dtype float8_e4m3fn"),
    ],
)
def test_other_arrays_are_refused_by_name(value, cause):
    with pytest.raises(AdapterFormatError, match=rf"adapter 'sql': tensors: tensor '{KEY}' .*{cause}"):
        load(lora_tensors({Q: 4}) | {KEY: value})


@pytest.mark.parity
def test_torch_tensors():
    torch = pytest.importorskip("torch")
    given = {name: torch.tensor(value) for name, value in lora_tensors({Q: 4}).items()}
    np.testing.assert_array_equal(load(given).modules[Q].a, given[KEY].numpy())
    for wrong in (given[KEY].bfloat16(), given[KEY].requires_grad_()):
        with pytest.raises(AdapterFormatError, match=rf"'{KEY}' .torch.Tensor. cannot be read .*detach"):
            load(given | {KEY: wrong})


def test_configurations():
    """PEFT keeps targets in sets, and its `to_dict` returns them."""
    fields = BASE | {"target_modules": {"q_proj"}, "exclude_modules": frozenset()}
    for config in (fields, SimpleNamespace(to_dict=lambda: fields)):
        assert list(load(config=config).modules) == [Q]
    for config, cause in (
        ({"r": object()}, "config: is not JSON: it holds object"),
        ({"lora_alpha": float("nan")}, "config: holds NaN"),
        ({"r": 0}, "config: field 'r' must be a positive integer"),
    ):
        with pytest.raises(AdapterFormatError, match=f"adapter 'sql': {cause}"):
            load(config=BASE | config)
    with pytest.raises(AdapterFormatError) as raised:  # every problem is reported
        load(lora_tensors({Q: 3}) | {"nonsense": np.ones(2, np.float32)}, BASE | {"lora_alpha": "x"})
    assert len(raised.value.problems) == 3


def test_bytes_are_those_of_the_saved_files(folder_of, tmp_path):
    adapter = load_all_ways(folder_of())
    weights, config = adapter.to_bytes()
    adapter.save_pretrained(tmp_path / "saved")
    assert weights == (tmp_path / "saved/adapter_model.safetensors").read_bytes()
    assert config == (tmp_path / "saved/adapter_config.json").read_bytes()
    again = Adapter.from_bytes(memoryview(weights), bytearray(config), name="again")
    assert (again.name, again.fingerprint) == ("again", Adapter.from_pretrained(tmp_path / "saved").fingerprint)
    assert weights == safetensors.numpy.save(state_dict(weights), metadata={"format": "pt"})


@pytest.mark.parametrize("weights", [b"", b"PK\x03\x04" + bytes(99), b"\x80\x02}q\x00(X\x01" + bytes(99)])
def test_bytes_of_other_formats_are_refused(weights):
    with pytest.raises(AdapterFormatError, match=r"adapter_model.safetensors: is not a whole safetensors file"):
        Adapter.from_bytes(weights, json.dumps(BASE).encode(), name="sql")


def test_a_web_page_in_place_of_the_weights_is_named():
    with pytest.raises(AdapterFormatError, match=r"\(it begins with the text '<!DOCTYP'\)"):
        Adapter.from_bytes(b"<!DOCTYPE html><title>404</title>", json.dumps(BASE).encode(), name="sql")


RELEASED = memoryview(b"{}")
RELEASED.release()


@pytest.mark.parametrize(
    "wrong", [None, "{}", 5, [1], memoryview(b"{} {}")[::2], RELEASED], ids=lambda value: type(value).__name__
)
@pytest.mark.usefixtures("unchecked_calls")
def test_bytes_that_are_none_are_a_usage_error(wrong):
    adapter = Adapter.from_arrays("a", {"q_proj": (np.ones((1, 2)), np.ones((3, 1)))}, alpha=1)
    files = dict(zip(("weights", "config"), adapter.to_bytes(), strict=True))
    for argument in files:
        with pytest.raises(LoRAUsageError, match=f"{argument} must be the contiguous bytes of a file"):
            Adapter.from_bytes(**files | {argument: wrong}, name="a")
    with pytest.raises(LoRAUsageError, match="is not a dtype"):
        Adapter.from_bytes(**files, name="a", dtype="\ud800")
