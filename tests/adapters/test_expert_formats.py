"""Experts' LoRA: each format written by a plain loop over experts from known factors, and each value compared."""

import json

import numpy as np
import pytest
from hypothesis import event, given
from hypothesis import strategies as st
from safetensors.numpy import load_file, save_file

from jlora.adapters import Adapter, ExpertsLoRA, ModuleLoRA
from jlora.errors import AdapterFormatError, AdapterMismatchError, LoRAError
from tests.adapters.conftest import PREFIX
from tests.adapters.reading import contents, load_all_ways

MLP = "model.layers.0.mlp"
EXPERTS = f"{MLP}.experts"
MIXTRAL = "model.layers.0.block_sparse_moe"
H, INNER, E, R = 5, 3, 4, 2  # no two alike, and the fused width 2 * INNER neither
SIZES = {
    "gate_up_proj": (H, 2 * INNER),
    "up_proj": (H, INNER),
    "down_proj": (INNER, H),
    "gate_proj": (H, INNER),
    "w1": (H, INNER),
    "w2": (INNER, H),
    "w3": (H, INNER),
}
FUSED = ("gate_up_proj", "down_proj")


# ---- the oracle: factors of each expert, and loops that write them as the tensors of a format


def factors(name, e=E, r=R, sizes=SIZES, dtype=np.float32):
    """[(A of expert 0 [r, in], B of expert 0 [out, r]), ...] of seeded values."""
    rng = np.random.default_rng([*map(ord, name), e, r])
    k, n = sizes.get(name, (H, INNER))
    return [(rng.normal(size=(r, k)).astype(dtype), rng.normal(size=(n, r)).astype(dtype)) for _ in range(e)]


def flat(pairs, *, grouped=False, exchanged=False):
    """A (E * r, in) and B (out, r * E), number by number."""
    if exchanged:  # the delta B A of each expert, transposed: the factors change places
        pairs = [(b.T, a.T) for a, b in pairs]
    e, (r, k), n = len(pairs), pairs[0][0].shape, len(pairs[0][1])
    a, b = np.full((e * r, k), np.nan, pairs[0][0].dtype), np.full((n, e * r), np.nan, pairs[0][1].dtype)
    for expert, (own_a, own_b) in enumerate(pairs):
        for j in range(r):
            for i in range(k):
                a[expert * r + j, i] = own_a[j, i]
            for o in range(n):
                b[o, expert * r + j if grouped else j * e + expert] = own_b[o, j]
    return a, b


def three_axes(pairs, *, shared_a=False, shared_b=False):
    """A [E or 1, r, in] and B [E or 1, out, r]; a shared factor is expert 0's."""
    a = [own_a for own_a, _ in (pairs[:1] if shared_a else pairs)]
    b = [own_b for _, own_b in (pairs[:1] if shared_b else pairs)]
    return np.array(a), np.array(b)


def tensors(modules, prefix=PREFIX):
    """{module: (A, B)} -> the file's tensors."""
    return {
        f"{prefix}{module}.lora_{half}.weight": np.ascontiguousarray(array)
        for module, pair in modules.items()
        for half, array in zip("AB", pair, strict=True)
    }


def fused_file(experts=EXPERTS, names=FUSED, **how):
    """Return PEFT's tensors of `target_parameters`: the first under base_layer, the last under the module."""
    places = [f"{experts}.base_layer", experts][-len(names) :]
    return tensors({place: flat(factors(name), **how) for place, name in zip(places, names, strict=True)})


@pytest.fixture
def load_of(folder_of):
    """load_of(tensors, **config fields) -> the adapter; target_modules is [] unless given."""

    def load(found, *, load_options=None, **fields):
        fields = {"r": R, "target_modules": []} | fields
        return load_all_ways(folder_of(found, **fields), **(load_options or {}))

    return load


def assert_delta(module, pairs):
    """Compare each expert in the orientation of the module."""
    assert isinstance(module, ExpertsLoRA)
    assert len(pairs) == module.experts
    for e, (a, b) in enumerate(pairs):
        got_a, got_b = module.a[e % len(module.a)], module.b[e % len(module.b)]
        want = (b.T, a.T) if module.exchanged else (a, b)
        np.testing.assert_array_equal(got_a, want[0])
        np.testing.assert_array_equal(got_b, want[1])


def parameters(*names):
    return {"target_parameters": [f"mlp.experts.{name}" for name in names]}


# ---- read


@pytest.mark.parametrize("exchanged", [False, True])
@pytest.mark.parametrize("marker", [None, "rank_major", "grouped_by_expert"])
def test_fused(load_of, exchanged, marker):
    fields = {} if marker is None else {"lora_B_layout": marker}
    how = {"exchanged": exchanged, "grouped": marker == "grouped_by_expert"}
    adapter = load_of(fused_file(**how), **parameters(*FUSED), **fields)
    assert list(adapter.modules) == [f"{EXPERTS}.gate_up_proj", f"{EXPERTS}.down_proj"]
    for name in FUSED:
        module = adapter.modules[f"{EXPERTS}.{name}"]
        assert (module.kind, module.rank, module.alpha, module.scaling) == ("experts", R, 8.0, 4.0)
        assert (module.exchanged, module.flat) == (exchanged, True)
        assert_delta(module, factors(name))


@pytest.mark.parametrize("marker", ["rank_major", "grouped_by_expert"])
def test_layouts_of_each_parameter(load_of, marker):
    """As Unsloth writes them beside the flat marker, and without it where they differ."""
    grouped = marker == "grouped_by_expert"
    detail = {
        "lora_A_layout": "grouped_by_expert",
        "parameters": {
            "gate_up_proj": {"lora_B_layout": marker, "num_experts": E},
            "down_proj": {"lora_B_layout": "rank_major", "num_experts": E},
        },
    }
    found = fused_file() | tensors({f"{EXPERTS}.base_layer": flat(factors("gate_up_proj"), grouped=grouped)})
    adapter = load_of(found, **parameters(*FUSED), unsloth_fused_expert_lora=detail)
    for name in FUSED:
        assert_delta(adapter.modules[f"{EXPERTS}.{name}"], factors(name))


@pytest.mark.parametrize(("name", "exchanged"), [(FUSED[0], False), (FUSED[1], True)])
def test_one_parameter_alone(load_of, name, exchanged):
    """The file does not define whether in and out are exchanged, so the arrays keep their stored order."""
    adapter = load_of(fused_file(names=[name], exchanged=exchanged), **parameters(name))
    (found, module), *rest = adapter.modules.items()
    assert not rest
    assert found == f"{EXPERTS}.{name}"
    assert module.exchanged is None
    for e, (a, b) in enumerate(factors(name)):
        np.testing.assert_array_equal(module.a[e], b.T if exchanged else a)
        np.testing.assert_array_equal(module.b[e], a.T if exchanged else b)


def test_parameters_of_some_layers(load_of):
    """A full name targets one layer: what `experts` holds differs from layer to layer."""
    other = EXPERTS.replace("layers.0", "layers.1")
    found = fused_file() | fused_file(other, names=["gate_up_proj"])
    entries = [f"{EXPERTS}.down_proj", "experts.gate_up_proj"]
    modules = load_of(found, target_parameters=entries).modules
    assert set(modules) == {f"{EXPERTS}.gate_up_proj", f"{EXPERTS}.down_proj", f"{other}.gate_up_proj"}
    assert_delta(modules[f"{EXPERTS}.gate_up_proj"], factors("gate_up_proj"))
    assert modules[f"{other}.gate_up_proj"].exchanged is None


@pytest.mark.parametrize("exchanged", [False, True])
def test_the_other_parameter_orients_a_square_down_projection(load_of, exchanged):
    """gpt-oss has as many features within an expert as without."""
    sizes = {"gate_up_proj": (H, 2 * H), "down_proj": (H, H)}
    places = {f"{EXPERTS}.base_layer": "gate_up_proj", EXPERTS: "down_proj"}
    pairs = {place: flat(factors(name, sizes=sizes), exchanged=exchanged) for place, name in places.items()}
    adapter = load_of(tensors(pairs), **parameters(*FUSED))
    for name in FUSED:
        assert adapter.modules[f"{EXPERTS}.{name}"].exchanged is exchanged
        assert_delta(adapter.modules[f"{EXPERTS}.{name}"], factors(name, sizes=sizes))


@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize(
    "targets", ["all-linear", ["gate_proj", "up_proj", "down_proj"], ["experts"], ["w1", "w2", "w3"]]
)
def test_three_axes(load_of, targets, shared):
    """Tinker's: with `shared`, one A of w1 and of w3 and one B of w2 are for all experts."""
    sizes = {"w1": (1, E), "w2": (E, 1), "w3": (1, E)} if shared else dict.fromkeys(("w1", "w2", "w3"), (E, E))
    arrays = {name: three_axes(factors(name)) for name in sizes}
    found = {f"{EXPERTS}.{name}": (a[: sizes[name][0]], b[: sizes[name][1]]) for name, (a, b) in arrays.items()}
    adapter = load_of(tensors(found), target_modules=targets)
    assert list(adapter.modules) == [f"{EXPERTS}.{name}" for name in sizes]
    for name, (of_a, of_b) in sizes.items():
        pairs, module = factors(name), adapter.modules[f"{EXPERTS}.{name}"]
        assert (module.exchanged, module.flat, module.experts) == (False, False, E)
        assert (len(module.a), len(module.b)) == (of_a, of_b)
        assert_delta(module, [(pairs[e % of_a][0], pairs[e % of_b][1]) for e in range(E)])


def test_the_placeholder_of_a_projection_that_is_not_there(load_of):
    """Tinker writes an empty w3 for experts without a gate."""
    found = tensors({f"{EXPERTS}.{name}": three_axes(factors(name)) for name in ("w1", "w2")})
    found |= tensors({f"{EXPERTS}.w3": (np.zeros((E, R, 0), np.float32), np.zeros((E, 0, R), np.float32))})
    assert list(load_of(found, target_modules="all-linear").modules) == [f"{EXPERTS}.w1", f"{EXPERTS}.w2"]


def test_one_expert_at_a_time(load_of):
    """PEFT's oldest format needs no more than names; ranks may differ from expert to expert."""
    ranks = {f"{EXPERTS}.{e}.{name}": R + (e == 3) for e in (0, 3) for name in ("gate_proj", "down_proj")}
    ranks |= {f"{MIXTRAL}.experts.1.w1": R}
    found = {module: factors(module.rpartition(".")[2], 1, r)[0] for module, r in ranks.items()}
    fields = {"target_modules": ["gate_proj", "down_proj", "w1"], "rank_pattern": {r"experts\.3\..*": R + 1}}
    modules = load_of(tensors(found), **fields).modules
    assert set(modules) == set(ranks)
    for module, (a, b) in found.items():
        assert type(modules[module]) is ModuleLoRA
        assert modules[module].scaling == 8 / ranks[module]
        np.testing.assert_array_equal(modules[module].a, a)
        np.testing.assert_array_equal(modules[module].b, b)


def test_ranks_and_alphas_are_those_of_the_parameter(load_of):
    """PEFT looks patterns up by the parameter's name, which the file's tensors do not have."""
    pairs = {f"{EXPERTS}.base_layer": factors("gate_up_proj", r=2 * R), EXPERTS: factors("down_proj", r=R)}
    fields = {"rank_pattern": {r".*\.gate_up_proj": 2 * R}, "alpha_pattern": {r".*\.gate_up_proj": 16}}
    found = tensors({module: flat(pair) for module, pair in pairs.items()})
    modules = load_of(found, **parameters(*FUSED), **fields, use_rslora=True).modules
    up, down = modules[f"{EXPERTS}.gate_up_proj"], modules[f"{EXPERTS}.down_proj"]
    assert (up.rank, up.alpha, up.scaling) == (2 * R, 16.0, 16 / (2 * R) ** 0.5)
    assert (down.rank, down.alpha, down.scaling) == (R, 8.0, 8 / R**0.5)
    assert_delta(up, pairs[f"{EXPERTS}.base_layer"])
    assert_delta(down, pairs[EXPERTS])


def test_a_router_targeted_as_a_parameter(load_of):
    rng = np.random.default_rng(0)
    a, b = rng.normal(size=(3, H)).astype(np.float32), rng.normal(size=(E, 3)).astype(np.float32)
    found = fused_file() | tensors({f"{MLP}.gate": (a, b)})
    fields = {"target_parameters": ["gate.weight", *FUSED], "rank_pattern": {"gate.weight": 3}, "target_modules": None}
    lora = load_of(found, **fields).modules[f"{MLP}.gate"]
    assert (type(lora), lora.kind, lora.rank) == (ModuleLoRA, "linear", 3)
    np.testing.assert_array_equal(lora.a, a)
    np.testing.assert_array_equal(lora.b, b)


# ---- refused


def refused(load_of, found, error, match, **fields):
    with pytest.raises(error, match=match):
        load_of(found, **fields)


def changed(module, change):
    """`fused_file` with the pair of one module changed by `change(a, b)`."""
    found = fused_file()
    a, b = (found[f"{PREFIX}{module}.lora_{half}.weight"] for half in "AB")
    return found | tensors({module: change(a, b)})


def without(half):
    return {key: array for key, array in fused_file().items() if half not in key}


def axes_of_w1(change):
    return tensors({f"{EXPERTS}.w1": change(*three_axes(factors("w1")))})


ALONE = fused_file(names=["down_proj"])
NEITHER = {"target_modules": ["experts"]}
MALFORMED = [
    # flat pairs
    (changed(EXPERTS, lambda a, b: (a[:-R], b)), {}, r"'.*experts' has A \(6, 3\) and B \(5, 8\); expected \(experts"),
    (changed(EXPERTS, lambda a, b: (a[:-R], b[:, :-R])), {}, "is of 4 experts and .* of 3; expected as many"),
    (changed(EXPERTS, lambda a, b: (a[:-1], b[:, :-1])), {}, r"A \(7, 3\) and B \(5, 7\); expected rank \* experts"),
    (changed(EXPERTS, lambda a, b: (a[:R], b[:, :R])), {}, "two experts or more, and rank 2"),
    (changed(EXPERTS, lambda a, b: (a[:, :2], b)), {}, "takes 5 and gives 6, .* 2 and 5; expected the one"),
    (changed(EXPERTS, lambda a, b: (b.T, a.T)), {}, "takes 5 and gives 6, .* 5 and 3; expected the one"),
    (changed(EXPERTS, lambda a, b: (a[None], b[None])), {}, r"expected \(experts \* rank, in\)"),
    (changed(EXPERTS, lambda a, b: (a[:0], b[:, :1])), {}, "none empty"),
    (changed(EXPERTS, lambda a, b: (a[0], b)), {}, "both of two or of three axes"),
    # pairs of three axes
    (
        axes_of_w1(lambda a, b: (a[:3], b)),
        NEITHER,
        r"A \(3, 2, 5\) and B \(4, 3, 2\); expected as many experts in both",
    ),
    (axes_of_w1(lambda a, b: (a[:, :1], b)), NEITHER, r"expected \(experts, 2, in\) and \(experts, out, 2\)"),
    (axes_of_w1(lambda a, b: (a[0], b)), NEITHER, "both of two or of three axes"),
    (axes_of_w1(lambda a, b: (a[..., :0], b)), NEITHER, "none empty"),
    (
        tensors({f"{EXPERTS}.w1": three_axes(factors("w1")), f"{EXPERTS}.w2": three_axes(factors("w2", 3))}),
        NEITHER,
        "is of 4 experts and .* of 3",
    ),
    # missing, or there twice
    (without(f"{EXPERTS}.lora_A"), {}, "expected one A and one B"),
    (without(f"{EXPERTS}.base_layer.lora_B"), {}, "expected one A and one B"),
    (ALONE, {}, "names gate_up_proj, down_proj; expected base_layer and"),
    (fused_file(), parameters("down_proj"), "names down_proj; expected"),
    (without(f"{EXPERTS}.lora_"), {}, "is the first of two parameters, and the second"),
    (ALONE, {"target_parameters": None, **NEITHER}, "of one parameter, and nothing says which"),
    *(
        (fused_file() | tensors({f"{EXPERTS}.{other}": pair}), {"target_modules": ".*"}, match)
        for other, pair, match in (
            ("1.gate_proj", factors("gate_proj")[0], "holds all experts and .*experts.1.gate_proj' one"),
            ("1.w2", factors("w2")[0], "holds all experts and .*experts.1.w2' one"),
            ("w3", three_axes(factors("w3")), "'.*base_layer'.* are of the same projection"),
            ("down_proj", three_axes(factors("down_proj")), "are of the same projection"),
        )
    ),
]


@pytest.mark.parametrize(("found", "fields", "match"), MALFORMED)
def test_malformed_pairs(load_of, found, fields, match):
    refused(load_of, found, AdapterFormatError, match, **parameters(*FUSED) | fields)


def test_a_third_parameter(load_of):
    third = fused_file() | tensors({f"{EXPERTS}.base_layer.base_layer": flat(factors("w1"))})
    refused(load_of, third, AdapterMismatchError, "is of a third parameter", **parameters(*FUSED))


def unsloth(detail):
    return {"lora_B_layout": "grouped_by_expert", "unsloth_fused_expert_lora": detail}


BY_PARAMETER = (
    ({"lora_B_layout": "mixed", "num_experts": E}, AdapterMismatchError, "'gate_up_proj', lora_B_layout is 'mixed'"),
    ({"lora_B_layout": "rank_major", "num_experts": E}, AdapterFormatError, "expected the same"),
    ({"lora_B_layout": "grouped_by_expert", "num_experts": E + 1}, AdapterFormatError, "of 4 experts .* has 5"),
    ({"lora_B_layout": "grouped_by_expert"}, AdapterFormatError, "must have num_experts"),
    ([], AdapterFormatError, "must be an object"),
)
NAMES = (
    *((["q_proj.weight"], AdapterMismatchError), (["my_gate.weight"], AdapterMismatchError)),
    (["mlp.experts.gate_up_proj", "mlp.experts.gate_up_proj_bias"], AdapterMismatchError),
    *(("gate_up_proj", AdapterFormatError), ([1], AdapterFormatError), ({"a": 1}, AdapterFormatError)),
)


@pytest.mark.parametrize(
    ("fields", "error", "match"),
    [
        *(({"lora_B_layout": a}, AdapterMismatchError, "not a known layout") for a in ("other", "", 1, ["x"], {})),
        *((unsloth({"parameters": {"gate_up_proj": detail}}), *refusal) for detail, *refusal in BY_PARAMETER),
        (unsloth({"parameters": {}, "lora_A_layout": "rank_major"}), AdapterMismatchError, "lora_A_layout is 'rank_m"),
        (unsloth([]), AdapterFormatError, "must be an object with parameters"),
        *(({"target_parameters": names}, error, "field 'target_parameters'") for names, error in NAMES),
    ],
)
def test_fields_that_are_not_served(load_of, fields, error, match):
    refused(load_of, fused_file(), error, match, **parameters(*FUSED) | fields)


@pytest.mark.parametrize(
    ("found", "fields"),
    [
        (fused_file(), {}),
        (fused_file(), {"target_modules": ["q_proj"]}),
        (fused_file(), {"target_parameters": ["layers.1.mlp.experts.gate_up_proj"]}),
        (fused_file(), {"target_modules": ["experts"], "layers_to_transform": [1]}),
        (fused_file(), {"target_modules": ".*", "exclude_modules": r".*experts.*"}),
        (tensors({f"{EXPERTS}.w1": three_axes(factors("w1"))}), {"target_modules": ["down_proj"]}),
        (tensors({f"{MLP}.gate": factors("w1")[0]}), {"target_parameters": ["router.weight"]}),
    ],
)
def test_not_targeted(load_of, found, fields):
    refused(load_of, found, AdapterMismatchError, "does not target", **fields)


def test_shapes_are_checked_before_a_tensor_is_read(load_of):
    """The tensors hold NaN, which a read would refuse first."""
    bad = changed(EXPERTS, lambda a, b: (a[:-R] * np.nan, b * np.nan))
    refused(load_of, bad, AdapterFormatError, "expected", **parameters(*FUSED))
    bad = changed(EXPERTS, lambda a, b: (a * np.nan, b))
    refused(load_of, bad, AdapterFormatError, "NaN", **parameters(*FUSED))
    with pytest.raises(ZeroDivisionError):
        load_of(bad, **parameters(*FUSED), load_options={"check": lambda shapes: 1 / 0})


# ---- saved


@pytest.mark.parametrize("exchanged", [False, True])
def test_round_trip(load_of, tmp_path, exchanged):
    """All formats at once; what PEFT knows is written as PEFT has it."""
    other = EXPERTS.replace("layers.0", "layers.1")
    pairs = {
        f"{other}.w1": three_axes(factors("w1", r=3), shared_a=True),
        f"{other}.w2": three_axes(factors("w2"), shared_b=True),
        f"{other}.3.up_proj": factors("up_proj")[0],
        f"{MLP}.gate": factors("w1")[0],
    }
    found = fused_file(exchanged=exchanged, grouped=True) | tensors(pairs)
    fields = {
        **parameters(*FUSED),
        "target_modules": ["experts", "up_proj", "gate"],
        "lora_B_layout": "grouped_by_expert",
        "rank_pattern": {"w1": 3},
        "alpha_pattern": {"experts.down_proj": 5},
        "peft_version": "0.18.1",
        "use_rslora": True,
    }
    adapter = load_of(found, **fields)
    adapter.save_pretrained(tmp_path / "saved")
    again = Adapter.from_pretrained(tmp_path / "saved")
    assert len(again.modules) == 6
    assert contents(again) == contents(adapter)
    config = json.loads((tmp_path / "saved" / "adapter_config.json").read_text())
    assert set(config["target_parameters"]) == {f"{EXPERTS}.{name}" for name in FUSED}
    assert set(config["target_modules"]) == set(pairs)
    written = load_file(tmp_path / "saved" / "adapter_model.safetensors")
    for place, name in zip((f"{EXPERTS}.base_layer", EXPERTS), FUSED, strict=True):
        for half, want in zip("AB", flat(factors(name), exchanged=exchanged), strict=True):
            np.testing.assert_array_equal(written[f"{PREFIX}{place}.lora_{half}.weight"], want)


@pytest.mark.parametrize("names", [("w1",), ("w1", "w2"), ("gate_proj", "up_proj", "down_proj"), ("up_proj", "w2")])
def test_flat_pairs_that_peft_has_no_place_for(load_of, tmp_path, names):
    found = tensors({f"{EXPERTS}.{name}": flat(factors(name)) for name in names})
    adapter = load_of(found, target_modules=["experts"])
    adapter.save_pretrained(tmp_path / "saved")
    again = Adapter.from_pretrained(tmp_path / "saved")
    assert list(adapter.modules) == [f"{EXPERTS}.{name}" for name in sorted(names)]
    for name in names:
        assert_delta(adapter.modules[f"{EXPERTS}.{name}"], factors(name))
    assert contents(again) == contents(adapter)


def in_memory(names, shared_a=False, **facts):
    arrays = {name: three_axes(factors(name.rpartition(".")[2]), shared_a=shared_a) for name in names}
    modules = {
        name: ExpertsLoRA(a=a, b=b, alpha=8.0, scaling=4.0, **{"exchanged": False} | facts)
        for name, (a, b) in arrays.items()
    }
    return Adapter(name="mine", modules=modules)


@pytest.mark.parametrize(
    ("adapter", "match"),
    [
        (in_memory([f"{EXPERTS}.w1"], exchanged=True), "has exchanged=True, and would be read as False"),
        (in_memory([f"{EXPERTS}.w1"], exchanged=None), "has exchanged=None, and would be read as False"),
        (in_memory([f"{EXPERTS}.down_proj"], flat=True), "has exchanged=False, and would be read as None"),
        (in_memory([f"{EXPERTS}.w1"], flat=True), "has exchanged=False, and would be read as None"),
        (in_memory([f"{MLP}.gate_up_proj"]), "cannot be saved; expected one of gate_up_proj"),
        (in_memory([f"{EXPERTS}.q_proj"]), "cannot be saved; expected one of gate_up_proj"),
        (in_memory([f"{EXPERTS}.w1", f"{EXPERTS}.gate_up_proj"]), "are of the same projection"),
        (
            in_memory([f"{EXPERTS}.gate_up_proj"], True, flat=True, exchanged=None),
            "must have both factors of each expert",
        ),
    ],
)
def test_adapters_that_no_file_can_express_are_not_saved(adapter, tmp_path, match):
    with pytest.raises(LoRAError, match=match):
        adapter.save_pretrained(tmp_path / "saved")
    assert not (tmp_path / "saved" / "adapter_model.safetensors").exists()


def test_arrays_that_are_no_pair():
    b = np.ones((2, 4, 3))
    for a in (np.ones((2, 3)), np.ones((2, 2, 5)), np.ones((3, 3, 5)), np.ones((2, 3, 5), int), np.ones((2, 3, 0)), []):
        with pytest.raises(AdapterFormatError, match="ExpertsLoRA"):
            ExpertsLoRA(a=a, b=b, alpha=1.0, scaling=1.0)


# ---- anything

# Suffix after the experts' name -> kinds, and input and output sizes of the pair.
SUFFIXES = {
    "": (["flat"], (4, 3)),
    ".base_layer": (["flat"], (3, 8)),
    ".base_layer.base_layer": (["flat"], (3, 4)),
    ".w1": (["flat", "axes"], (3, 4)),
    ".w2": (["flat", "axes"], (4, 3)),
    ".gate_up_proj": (["flat", "axes"], (3, 8)),
    ".down_proj": (["axes"], (4, 3)),
    ".1.w1": (["one"], (3, 4)),
}


@st.composite
def files(draw):
    """{(suffix, half): shape}, valid except for the drawn faults."""
    e, r, shapes = draw(st.sampled_from([2, 3])), 2, {}
    names = (
        ["", ".base_layer"] if draw(st.booleans()) else draw(st.lists(st.sampled_from(sorted(SUFFIXES)), max_size=3))
    )
    for suffix in names:
        kinds, (k, n) = SUFFIXES[suffix]
        kind = draw(st.sampled_from(kinds))
        e_a, e_b = draw(st.sampled_from([(e, e), (e, e), (1, e), (e, 1)]))
        shapes[suffix, "A"] = {"flat": (e * r, k), "axes": (e_a, r, k), "one": (r, k)}[kind]
        shapes[suffix, "B"] = {"flat": (n, r * e), "axes": (e_b, n, r), "one": (n, r)}[kind]
    if shapes and draw(st.integers(0, 3)) == 0:
        which = draw(st.sampled_from(sorted(shapes)))
        shape = draw(st.none() | st.lists(st.sampled_from([0, 1, 2, 4, 6]), max_size=4))
        shapes = {key: (shape if key == which else kept) for key, kept in shapes.items()}
    return {key: shape for key, shape in shapes.items() if shape is not None}


@given(
    files(),
    st.sampled_from([[], [], ["gate_up_proj", "down_proj"], ["experts.down_proj"], ["gate.weight"], ["x"]]),
    st.sampled_from([".*", ".*", "all-linear", ["experts"], ["w1", "down_proj"], None]),
    st.sampled_from([None, None, None, "rank_major", "grouped_by_expert", "other"]),
)
def test_any_file_loads_or_is_refused(tmp_path_factory, shapes, entries, targets, layout):
    found = {
        f"{PREFIX}{EXPERTS}{suffix}.lora_{half}.weight": np.ones(shape, np.float32)
        for (suffix, half), shape in shapes.items()
    }
    folder = tmp_path_factory.mktemp("any")
    save_file(found, folder / "adapter_model.safetensors")
    config = {"peft_type": "LORA", "r": 2, "target_parameters": entries, "target_modules": targets}
    (folder / "adapter_config.json").write_text(json.dumps(config | {"lora_B_layout": layout}))
    try:
        adapter = Adapter.from_pretrained(folder)
    except LoRAError:
        event("refused")
        return
    event(f"loaded {len(adapter.modules)}")
    # No number is lost or made up, and the same comes back.
    assert adapter.nbytes == sum(array.nbytes for array in found.values())
    if not adapter.modules:
        return
    adapter.save_pretrained(folder / "again")
    assert contents(Adapter.from_pretrained(folder / "again")) == contents(adapter)
