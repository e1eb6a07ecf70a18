"""Bad input to a serving manager raises an error that names the cause, and changes no state.

The state is the bytes of the slots, the slot names, the host cache, the counts, the open batch, and afterwards every
logit of every adapter, bitwise.
"""

import contextlib
import json
import os
import struct

import jax
import numpy as np
import pytest
from flax import nnx
from hypothesis import event, given, settings
from hypothesis import strategies as st
from safetensors.numpy import load_file, save, save_file

import jlora
from jlora.models import Decoder, DecoderConfig
from tests.adapters.test_fuzz import edited, edits
from tests.compiled import compiled_programs

PREFIX = "base_model.model."
CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
VOCAB, WIDTH, INNER, MAX_RANK = 19, 16, 24, 8
Q, V = "model.layers.0.self_attn.q_proj", "model.layers.1.self_attn.v_proj"
DOWN, EMBED, HEAD = "model.layers.0.mlp.down_proj", "model.embed_tokens", "lm_head"
SHAPES = {Q: (WIDTH, WIDTH), V: (WIDTH, WIDTH // 2), DOWN: (INNER, WIDTH), EMBED: (VOCAB, WIDTH), HEAD: (WIDTH, VOCAB)}
TOKENS = np.random.default_rng(0).integers(0, VOCAB, (3, 5)).astype(np.int32)

FORMAT, MISMATCH = jlora.AdapterFormatError, jlora.AdapterMismatchError


def tensors_of(ranks: dict[str, int], seed: int = 0) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(seed)
    tensors = {}
    for module, r in ranks.items():
        inputs, outputs = SHAPES[module]
        part = ("lora_embedding_A", "lora_embedding_B") if module == EMBED else ("lora_A.weight", "lora_B.weight")
        tensors[f"{PREFIX}{module}.{part[0]}"] = rng.normal(size=(r, inputs)).astype(np.float32)
        tensors[f"{PREFIX}{module}.{part[1]}"] = rng.normal(size=(outputs, r)).astype(np.float32)
    return tensors


def write(folder, ranks=None, *, seed=0, **fields):
    """A sound adapter folder."""
    ranks = {Q: 4, V: 2} if ranks is None else ranks
    folder.mkdir(parents=True, exist_ok=True)
    config = {"peft_type": "LORA", "r": 4, "lora_alpha": 8, "base_model_name_or_path": "toy/decoder"}
    config["target_modules"] = [name.rpartition(".")[2] for name in ranks]
    config["rank_pattern"] = {name.rpartition(".")[2]: r for name, r in ranks.items() if r != 4}
    (folder / CONFIG).write_text(json.dumps(config | fields))
    save_file(tensors_of(ranks, seed), folder / WEIGHTS)
    return folder


class World:
    """A model serving three adapters in two slots, and the logits they gave before anything bad came.

    The host cache is full: beside the three it holds a spare one that is never used, the first to be evicted.
    """

    def __init__(self, folder, **options):
        sizes = {"vocab_size": VOCAB, "hidden_size": WIDTH, "intermediate_size": INNER, "head_dim": WIDTH // 2}
        config = DecoderConfig(**sizes, num_hidden_layers=2, num_attention_heads=2, num_key_value_heads=1)
        self.model = Decoder(config, rngs=nnx.Rngs(0))
        for param in jax.tree.leaves(nnx.state(self.model, nnx.Param), is_leaf=lambda x: isinstance(x, nnx.Param)):
            param[...] *= 10.0  # the decoder draws small weights
        self.manager = jlora.LoRAManager(
            self.model, jlora.LoRAConfig(max_loras=2, max_lora_rank=MAX_RANK, max_cpu_loras=4, **options)
        )

        @jax.jit
        def forward(model, tokens, batch):
            with jlora.use(batch):
                return model(tokens)

        self.forward = forward
        self.spare = jlora.LoRARequest("spare", str(write(folder / "spare")))
        self.manager.add_adapter(self.spare)
        ranks = {"first": {Q: 4, V: 2}, "second": {EMBED: 3, HEAD: 8, DOWN: 1}, "third": {V: 8, DOWN: 4}}
        for seed, (name, modules) in enumerate(ranks.items()):
            write(folder / name, modules, seed=seed)
            self.manager.add_adapter(jlora.LoRARequest(name, str(folder / name)))
        self.wanted = {name: self.logits([name] * len(TOKENS)) for name in (None, *ranks)}
        for one in ranks:
            assert np.abs(self.wanted[one] - self.wanted[None]).max() > 1e-2 * np.abs(self.wanted[None]).max()

    def logits(self, names) -> np.ndarray:
        with self.manager.prepare(names) as batch:
            return np.asarray(self.forward(self.model, TOKENS, batch))

    def state(self):
        arrays = [np.asarray(array).tobytes() for array in jax.tree.leaves(self.manager.slots)]
        return list(self.manager.list_adapters().items()), self.manager.stats(), arrays

    @contextlib.contextmanager
    def added(self, request):
        """An adapter that loads, in place of the spare one while the block runs; the others are served on."""
        assert self.manager.add_adapter(request)
        assert self.manager.list_adapters(["spare"])["spare"].level == "evicted"
        yield
        assert self.manager.remove_adapter(request.name)
        assert self.manager.add_adapter(self.spare)
        self.check_all()

    def check(self, names, got):
        for i, name in enumerate(names):
            if name in self.wanted:
                np.testing.assert_array_equal(got[i], self.wanted[name][i], err_msg=f"sequence {i}: {name}")

    def check_all(self):
        """Every adapter, mixed with others and swapped through both slots."""
        for names in (["first", None, "second"], ["third", "first", "third"], [None, "second", "third"]):
            self.check(names, self.logits(names))
        assert compiled_programs(self.forward) == 1

    @contextlib.contextmanager
    def unharmed(self, *, open_batch: bool = True):
        """Check that the block leaves the manager, an open batch and all served adapters unchanged."""
        names = ["second", "first", None]
        with self.manager.prepare(names) as batch:
            if not open_batch:
                batch.close()
            before = self.state()
            yield
            assert self.state() == before
            if open_batch:
                self.check(names, np.asarray(self.forward(self.model, TOKENS, batch)))
        self.check_all()

    def refused(self, request, error, *fragments, open_batch=True):
        with self.unharmed(open_batch=open_batch), pytest.raises(jlora.LoRAError) as raised:
            self.manager.add_adapter(request)
        message = str(raised.value)
        assert type(raised.value) is error, message
        for fragment in (f"adapter {request.name!r}", *fragments):
            assert fragment in message


@pytest.fixture(scope="module")
def world(tmp_path_factory) -> World:
    return World(tmp_path_factory.mktemp("served"))


@pytest.fixture(scope="module")
def lenient(tmp_path_factory) -> World:
    return World(tmp_path_factory.mktemp("lenient"), allow_nonfinite=True)


def rewrite(change):
    """Change the tensors of a folder: `change(tensors)` in place."""

    def apply(folder):
        tensors = load_file(folder / WEIGHTS)
        change(tensors)
        save_file({name: np.ascontiguousarray(array) for name, array in tensors.items()}, folder / WEIGHTS)

    return apply


def weights(change):
    """Change the bytes of the weights file."""
    return lambda folder: (folder / WEIGHTS).write_bytes(change((folder / WEIGHTS).read_bytes()))


def fields(**values):
    """Change fields of the configuration; `json` also writes NaN and Infinity."""

    def apply(folder):
        found = json.loads((folder / CONFIG).read_text())
        (folder / CONFIG).write_text(json.dumps(found | values))

    return apply


def flip(text: bytes, at: int, bit: int):
    """Flip one bit of the `at`-th byte of the first `text` in the weights file."""

    def change(data):
        position = data.index(text) + at
        return data[:position] + bytes([data[position] ^ (1 << bit)]) + data[position + 1 :]

    return weights(change)


def embedding(part, value):
    """Write an adapter of the embedding with one other tensor."""

    def apply(folder):
        write(folder, {EMBED: 4})
        rewrite(lambda t: t.update({f"{PREFIX}{EMBED}.{part}": value}))(folder)

    return apply


A, B = f"{PREFIX}{Q}.lora_A.weight", f"{PREFIX}{Q}.lora_B.weight"
WHOLE = "is not a whole safetensors file"
OTHER_TABLE = f"{EMBED}.base_layer.weight", "trained on another base model"

# case -> (damage to a valid folder, error, text of the message besides the adapter's name)
DAMAGED = {
    "last byte gone": (weights(lambda data: data[:-1]), FORMAT, WEIGHTS, WHOLE),
    "header of 2**63": (weights(lambda data: struct.pack("<Q", 2**63) + data[8:]), FORMAT, WEIGHTS, WHOLE),
    "flipped name": (flip(b"q_proj", 0, 0), FORMAT, WEIGHTS, "self_attn.p_proj'", "expected one A and one B"),
    "flipped half": (flip(b"lora_A", 5, 1), MISMATCH, WEIGHTS, "q_proj.lora_C.weight'", "expected lora_A, lora_B"),
    "NaN": (rewrite(lambda t: t[A].fill(np.nan)), FORMAT, WEIGHTS, A, "holds NaN or infinity"),
    # JSON
    "cut config": (lambda folder: (folder / CONFIG).write_text('{"r'), FORMAT, CONFIG, "is not JSON"),
    "nested repeats": (
        fields(target_modules="(" * 16 + ".+" + ")+" * 16 + "b"), MISMATCH, WEIGHTS, "does not target",
    ),
    "rank 0": (fields(r=0), FORMAT, CONFIG, "field 'r' must be a positive integer", "found 0"),
    # tensors
    "A without B": (rewrite(lambda t: t.pop(B)), FORMAT, WEIGHTS, Q, "expected one A and one B"),
    "rank of A": (rewrite(lambda t: t.update({A: t[A][:3]})), FORMAT, A, "has rank 3; expected 4"),
    "three axes": (rewrite(lambda t: t.update({A: t[A][None]})), MISMATCH, A, "(1, 4, 16)"),
    "A too wide": (rewrite(lambda t: t.update({A: np.ones((4, 17), np.float32)})), MISMATCH, Q, "(4, 17)", "(4, 16)"),
    "B too tall": (rewrite(lambda t: t.update({B: np.ones((17, 4), np.float32)})), MISMATCH, Q, "(17, 4)", "(16, 4)"),
    "rank above the slots'": (lambda folder: write(folder, {Q: 9, V: 4}), MISMATCH, Q, "rank 9", "max_lora_rank=8"),
    "too large for the slots": (
        rewrite(lambda t: t.update({B: np.full((WIDTH, 4), 1e300)})), MISMATCH, Q, "B must be", "float32", "1e+300",
    ),
    # other base models
    "deeper": (
        rewrite(lambda t: t.update({k.replace(".0.", ".7."): t.pop(k) for k in (A, B)})), MISMATCH,
        "no module 'model.layers.7.self_attn.q_proj'",
    ),
    "other names": (
        rewrite(lambda t: t.update({k.replace(Q, "h.0.attn.q_proj"): t.pop(k) for k in (A, B)})), MISMATCH,
        "h.0.attn.q_proj: the model has no module", "name_map",
    ),
    "other vocabulary": (embedding("lora_embedding_A", np.ones((4, 23), "f4")), MISMATCH, EMBED, "(4, 23)", "(4, 19)"),
    "other table": (embedding("base_layer.weight", np.ones((VOCAB, WIDTH), np.float32)), MISMATCH, *OTHER_TABLE),
    "other table, too large": (embedding("base_layer.weight", np.full((VOCAB, WIDTH), 1e300)), MISMATCH, *OTHER_TABLE),
}  # fmt: skip


@pytest.mark.parametrize("case", DAMAGED)
def test_damaged_folder(world, tmp_path, case):
    damage, error, *fragments = DAMAGED[case]
    folder = write(tmp_path / "adapter", seed=7)
    damage(folder)
    world.refused(jlora.LoRARequest("bad", str(folder)), error, *fragments, str(folder))
    # In place of an adapter that is in a slot; the first batch is closed, as it would hold that adapter.
    request = jlora.LoRARequest("first", str(folder), load_inplace=True)
    world.refused(request, error, *fragments, open_batch=False)


def test_the_sound_folder_loads(world, tmp_path):
    """The cases above fail for their own reason: the folder they damage is served."""
    for i, ranks in enumerate(({Q: 4, V: 2}, {EMBED: 4}, {Q: 8, V: 4})):
        folder = write(tmp_path / str(i), ranks, seed=7)
        with world.added(jlora.LoRARequest("sound", str(folder))):
            got = world.logits(["sound", "first", None])
            assert np.abs(got[0] - world.wanted[None][0]).max() > 1e-2
            world.check(["sound", "first", None], got)


def test_another_base_model_by_name(world, tmp_path):
    folder = write(tmp_path / "adapter")
    request = jlora.LoRARequest("bad", str(folder), base_model_name="toy/other")
    world.refused(request, MISMATCH, "'toy/decoder'", "'toy/other'", "base_model_name_or_path")
    fields(base_model_name_or_path=None)(folder)
    world.refused(request, MISMATCH, "base_model_name_or_path is None", "'toy/other'")


def swapped(name, make):
    """Replace a file by what `make(path)` puts there, with the file moved to a folder beside."""

    def apply(folder):
        (folder.parent / "secret").mkdir()
        os.replace(folder / name, folder.parent / "secret" / name)
        make(folder / name)
        return folder

    return apply


# case -> (folder -> requested path, error, text of the message)
PATHS = {
    "missing": (lambda folder: folder / "nowhere", jlora.AdapterNotFoundError, "nowhere", "does not exist"),
    "weights file": (lambda folder: folder / WEIGHTS, FORMAT, WEIGHTS, "is a file; expected the folder"),
    "weights are a pipe": (swapped(WEIGHTS, os.mkfifo), FORMAT, WEIGHTS, "is not a regular file"),
    "dangling link": (swapped(WEIGHTS, lambda file: os.symlink("gone", file)), FORMAT, WEIGHTS, "is missing"),
    "weights climb out": (
        swapped(WEIGHTS, lambda file: os.symlink(f"../secret/{WEIGHTS}", file)), FORMAT, WEIGHTS, "outside the",
    ),
    "a pickle": (
        swapped(WEIGHTS, lambda file: (file.parent / "adapter_model.bin").write_bytes(b"\x80\x04.")),
        FORMAT, "adapter_model.bin", "never opened",
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", PATHS)
def test_paths(world, tmp_path, case):
    place, error, *fragments = PATHS[case]
    path = str(place(write(tmp_path / "adapter")))
    world.refused(jlora.LoRARequest("bad", path), error, *fragments)
    world.refused(jlora.LoRARequest("first", path, load_inplace=True), error, *fragments, open_batch=False)


def sound(name):
    return jlora.Adapter.from_arrays(name, {Q: (np.ones((4, WIDTH), "f4"), np.ones((WIDTH, 4), "f4"))}, alpha=8)


ARGUMENTS = {
    "unknown": (lambda m: m.prepare(["nope"]), jlora.AdapterNotFoundError, "'nope'", "call add_adapter first"),
    "one string": (lambda m: m.prepare("first"), jlora.LoRAUsageError, "'first'", "in a list"),
    "nothing": (lambda m: m.prepare([]), jlora.LoRAUsageError, "at least one sequence"),
    "more than the slots": (
        lambda m: m.prepare(["first", "second", "third"]), jlora.NoFreeSlotError, "'third'", "2 slots", "max_loras",
    ),
    "too few counts": (lambda m: m.prepare(["third", None], [3]), jlora.LoRAUsageError, "1 token_counts for 2"),
    "negative count": (lambda m: m.prepare(["third", None], [5, -1]), jlora.LoRAUsageError, "token_counts", "-1"),
    "no tokens": (lambda m: m.prepare(["third", None], [0, 0]), jlora.LoRAUsageError, "token_counts sum to 0"),
    "padding too short": (
        lambda m: m.prepare(["third", None], [5, 4], pad_to=8), jlora.LoRAUsageError, "sum to 9", "8 packed rows",
    ),
    "padding alone": (lambda m: m.prepare(["third"], pad_to=8), jlora.LoRAUsageError, "pad_to", "token_counts"),
    "pin": (lambda m: m.pin_adapter("nope"), jlora.AdapterNotFoundError, "'nope'", "call add_adapter first"),
    "add a name": (lambda m: m.add_adapter("first"), jlora.LoRAUsageError, "LoRARequest or an Adapter", "str"),
    "replace what is held": (
        lambda m: m.add_adapter(sound("first"), load_inplace=True), jlora.AdapterInUseError, "'first'", "open batch",
    ),
    "near": (lambda m: m.prepare(["frist"]), jlora.AdapterNotFoundError, "'frist'", "the nearest is 'first'"),
    "a set": (lambda m: m.prepare({"first"}), jlora.LoRAUsageError, "in a list", "set"),
    "timeout": (lambda m: m.prepare(["first"], timeout=-1), jlora.LoRAUsageError, "timeout", "-1"),
    "prefetch a number": (lambda m: m.prefetch(1), jlora.LoRAUsageError, "LoRARequest", "int"),
    "prefetch who is unknown": (lambda m: m.prefetch("firts"), jlora.AdapterNotFoundError, "'firts'", "'first'"),
    "remove what is held": (lambda m: m.remove_adapter("second"), jlora.AdapterInUseError, "'second'", "open batch"),
    "remove all": (lambda m: m.remove_all_adapters(), jlora.AdapterInUseError, "open batch"),
}  # fmt: skip


@pytest.mark.usefixtures("unchecked_calls")
@pytest.mark.parametrize("case", ARGUMENTS)
def test_arguments(world, case):
    call, error, *fragments = ARGUMENTS[case]
    open_batch = case != "more than the slots"  # else no slot could be freed for any adapter
    with world.unharmed(open_batch=open_batch), pytest.raises(jlora.LoRAError) as raised:
        call(world.manager)
    assert type(raised.value) is error, raised.value
    for fragment in fragments:
        assert fragment in str(raised.value)


def test_unknown_names_that_are_no_error(world):
    with world.unharmed():
        assert world.manager.remove_adapter("nope") is False


@pytest.mark.parametrize("value", [np.nan, -np.inf, 3e38])
def test_weights_out_of_a_broken_training_run(world, lenient, tmp_path, value):
    """NaN and infinity are refused by default. With allow_nonfinite they stay in the rows of their own adapter."""
    folder = write(tmp_path / "adapter", {Q: 8, V: 4, DOWN: 4, EMBED: 4, HEAD: 4}, lora_alpha=4)
    rewrite(lambda t: [array.fill(value) for array in t.values()])(folder)
    request = jlora.LoRARequest("broken", str(folder))
    if not np.isfinite(value):
        world.refused(request, FORMAT, WEIGHTS, "lora_", "holds NaN or infinity", "allow_nonfinite")
        adapter = jlora.Adapter.from_pretrained(folder, name="broken", allow_nonfinite=True)
        world.refused(adapter, FORMAT, "holds NaN or infinity", "LoRAConfig.allow_nonfinite")
    # After the block other adapters use its slot, and no value of it remains there.
    with lenient.added(request):
        for names in (["broken", "first", None], ["second", "broken", "second"], [None, None, "broken"]):
            got = lenient.logits(names)
            assert not np.isfinite(got[names.index("broken")]).all()
            lenient.check(names, got)


@pytest.fixture(scope="module")
def fuzzed(tmp_path_factory):
    """A sound folder with every kind of tensor in it, and its files' bytes."""
    folder = write(tmp_path_factory.mktemp("fuzzed"), {Q: 4, V: 2, EMBED: 3, HEAD: 1}, seed=9)
    return folder, (folder / CONFIG).read_bytes(), (folder / WEIGHTS).read_bytes()


def survives(world, folder):
    """The folder is refused with its own error or served, and no other adapter changes."""
    names = ["second", "first", None]
    request = jlora.LoRARequest("fuzzed", str(folder))
    for file in folder.iterdir():
        os.utime(file, (1, 1))  # a file of just now would be waited for
    world.check(names, world.logits(names))
    before = world.state()
    with contextlib.ExitStack() as stack:
        try:
            stack.enter_context(world.added(request))
        except (FORMAT, MISMATCH) as error:
            refusal = str(error)
            event("refused")
        else:
            event("served")
            for names in (["fuzzed", "first", None], ["third", "fuzzed", "third"]):
                world.check(names, world.logits(names))
            return
    assert "adapter 'fuzzed'" in refusal
    assert str(folder) in refusal
    assert world.state() == before
    world.check(names, world.logits(names))


_RAW = save(tensors_of({Q: 4, V: 2, EMBED: 3, HEAD: 1}, seed=9))
_BODY = 8 + struct.unpack("<Q", _RAW[:8])[0]  # where the header ends


@settings(max_examples=2 * settings().max_examples)
@given(
    changes=st.one_of(
        edits(_RAW),
        edits(_RAW[:_BODY]),
        st.lists(st.tuples(st.just("flip"), st.integers(_BODY, len(_RAW) - 1), st.integers(0, 7)), min_size=1),
    )
)
def test_fuzzed_weights(world, fuzzed, changes):
    """Most bit flips among the numbers themselves load: whatever they make of the adapter, its rows alone show it."""
    folder, text, tensors = fuzzed
    (folder / CONFIG).write_bytes(text)
    (folder / WEIGHTS).write_bytes(edited(tensors, changes))
    survives(world, folder)


_SIZES = st.sampled_from([1, 2, 4, 8, 9, WIDTH // 2, WIDTH, VOCAB, INNER])
_MODULES = st.sampled_from([Q, V, DOWN, EMBED, HEAD, "model.layers.1.mlp.gate_proj", "model.norm", "score"])
_PARTS = st.sampled_from(["lora_A.weight", "lora_B.weight", "lora_embedding_A", "base_layer.weight", "lora_B.bias"])


@settings(max_examples=2 * settings().max_examples)
@given(
    tensors=st.dictionaries(
        st.tuples(_MODULES, _PARTS),
        st.tuples(_SIZES, _SIZES, st.sampled_from([np.float16, np.float32, np.float64, np.int8])),
        max_size=2,
    ),
    kept=st.lists(st.sampled_from([Q, V, DOWN, EMBED, HEAD]), unique=True),
    rank=st.sampled_from([1, 4, 8, 9]),
)
def test_fuzzed_tensors(world, fuzzed, tensors, kept, rank):
    """Draw well-formed files of tensors that fit no module, or fit by chance."""
    folder, text, _ = fuzzed
    sound = tensors_of(dict.fromkeys(kept, rank))
    odd = {f"{PREFIX}{name}.{part}": np.ones((m, n), dtype) for (name, part), (m, n, dtype) in tensors.items()}
    targets = [name.rpartition(".")[2] for name in {*kept, *(name for name, _ in tensors)}]
    changed = json.loads(text) | {"r": rank, "rank_pattern": {}, "target_modules": targets}
    (folder / CONFIG).write_text(json.dumps(changed))
    save_file(sound | odd, folder / WEIGHTS)
    survives(world, folder)
