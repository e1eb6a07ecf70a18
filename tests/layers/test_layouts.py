"""Rows of each meaning in every batch: each row takes its adapter, or the call is refused."""

import contextlib
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jlora
from tests.layers.merging import Target, assert_close, make_adapter, make_manager, merge, normal
from tests.layers.rowwise import ADAPTERS, K, N, World
from tests.layers.test_scope import TARGETS, Model

NAMES = ["one", "two", "one"]
SEQUENCES = len(NAMES)
FIRST = [None, [1, 0, jlora.NOWHERE], [0, 1, 2]]
PACKED = [pytest.param([2, 1, 0], 3, marks=pytest.mark.slow), ([3, 1, 2], 8)]


ANY = (0, -1)  # in place of a row of no meaning


class Declared(World):
    def __init__(self, row_groups):
        super().__init__()
        self.manager.unwrap()
        self.manager = make_manager(self.model, ADAPTERS, activated=True, row_groups=row_groups)

    def serves(self, shape, rows, row_map, first, **options):
        """Return True if rows are served, each with its adapter, and False if they are refused.

        Args:
          shape: shape of the rows.
          rows: (sequence, position) of each row; None for padding.
          row_map: a map of the rows, or None.
          first: first active rows, or None.
          **options: further arguments of `prepare`.
        """
        starts = first or [0] * SEQUENCES
        adapters = [None if row is None or row[1] < starts[row[0]] else NAMES[row[0]] for row in rows]
        x, known = normal(len(rows), K), [row != ANY for row in rows]

        @jax.jit
        def step(model, x, batch):
            around = contextlib.nullcontext() if row_map is None else jlora.rows(row_map)
            with jlora.use(batch, without=["*"]), around:
                return model.proj(x)

        with self.manager.prepare(NAMES, active_from=first, **options) as batch:
            try:
                found = step(self.model, x.reshape(*shape, K), batch)
            except jlora.LoRAError:
                return False
        if any(known):
            assert_close(found.reshape(-1, N)[np.array(known)], self.expected(x, adapters)[known])
        return True


WORLDS = {"": {}, "packed": {"*": "packed"}, "last": {"proj": "last"}}


@pytest.fixture(scope="module")
def worlds():
    return {name: Declared(groups) for name, groups in WORLDS.items()}


def packed_rows(counts, total):
    """Return name -> (shape, rows, map, and the declaration that is true of the rows)."""
    tokens = [(b, i) for b, count in enumerate(counts) for i in range(count)]
    padded = tokens + [None] * (total - len(tokens))
    last = [(b, count - 1) if count else ANY for b, count in enumerate(counts)]
    two = [(b, count - 2 + i) if count > 1 else ANY for b, count in enumerate(counts) for i in range(2)]
    backwards, ends = np.arange(total)[::-1], np.arange(SEQUENCES)
    return {
        "all": ((total,), padded, None, "packed"),
        "all [1, T]": ((1, total), padded, None, "packed"),
        "heads of all": ((total, 3), [row for row in padded for _ in range(3)], None, "packed"),
        "last": ((SEQUENCES,), last, None, "last"),
        "last [B, 1]": ((SEQUENCES, 1), last, None, "last"),
        "last two": ((SEQUENCES, 2), two, None, "last"),
        "mapped": ((total,), padded[::-1], jlora.RowMap(backwards, of="tokens"), ""),
        "mapped last": ((SEQUENCES,), last, jlora.RowMap(ends, of="tokens", length=1), ""),
        "beams": ((len(tokens),), tokens, jlora.RowMap(np.array([b for b, _ in tokens])), ""),
    }


@pytest.mark.parametrize(("counts", "total"), PACKED)
@pytest.mark.slow
def test_packed_batches(worlds, counts, total):
    for first, name in itertools.product(FIRST[:2], WORLDS):
        for what, (shape, rows, row_map, true_of) in packed_rows(counts, total).items():
            if name and true_of not in ("", name):
                continue
            if what == "heads of all" or (first and what in ("beams", "last two")):
                clear = False
            else:  # with a declaration or a map, or if no other rows have that shape
                clear = bool(name or row_map) or total != SEQUENCES or what == "all [1, T]"
            served = worlds[name].serves(shape, rows, row_map, first, token_counts=counts, pad_to=total)
            assert served == clear, (what, name, first)


@pytest.mark.parametrize("length", [1, pytest.param(4, marks=pytest.mark.slow)])
def test_batches_with_a_length(worlds, length):
    every = [(b, i) for b in range(SEQUENCES) for i in range(length)]
    last = [(b, length - 1) for b in range(SEQUENCES)]
    order = np.random.default_rng(0).permutation(len(every))
    beams = [(b, i) for b in (2, 0) for i in range(length)]
    source = np.array([b for b, _ in beams])
    tokens = np.array([b * length + i for b, i in beams])
    cases = {
        "all": ((SEQUENCES, length), every, None),
        "flattened": ((len(every),), every, None),
        "heads of all": ((SEQUENCES, length, 2), [row for row in every for _ in range(2)], None),
        "heads first": ((SEQUENCES, 2, length), [(b, i) for b, _ in last for _ in "ab" for i in range(length)], None),
        "last": ((SEQUENCES,), last, None),
        "last [B, 1]": ((SEQUENCES, 1), last, None),
        "heads of the last": ((SEQUENCES, 2), [row for row in last for _ in range(2)], None),
        "mapped": ((len(every),), [every[i] for i in order], jlora.RowMap(order, of="tokens")),
        "mapped last": ((SEQUENCES, 1), last, jlora.RowMap(np.arange(SEQUENCES), of="tokens", length=1)),
        "beams": ((2, length), beams, jlora.RowMap(source)),
        "beams of tokens": ((2, length), beams, jlora.RowMap(tokens, of="tokens", length=length)),
        "another length": ((2, length), beams, jlora.RowMap(tokens, of="tokens", length=length + 1)),
    }
    unclear = {"heads first", "heads of the last", "beams"} if length > 1 else {"heads first", "heads of the last"}
    if length == 1:  # the same rows as "all" and "flattened"
        del cases["last [B, 1]"], cases["last"]
    for first in FIRST[: length + 1]:  # the last differs from the second by its length only
        for what, (shape, rows, row_map) in cases.items():
            if first is None and what == "another length":
                continue  # indices of other tokens
            served = worlds[""].serves(shape, rows, row_map, first, length=length)
            assert served == (first is None or what not in {*unclear, "another length"}), (what, first)


# --- As many packed rows as sequences -------------------------------------------------------------------------------


@jax.jit
def through_proj(model, x, batch):
    with jlora.use(batch, without=["*"]):
        return model.proj(x)


def test_rows_that_fit_two_layouts_raise(worlds):
    options = {"token_counts": [2, 1, 0], "pad_to": SEQUENCES}
    with worlds[""].manager.prepare(NAMES, **options) as batch:
        for shape in ((SEQUENCES,), (SEQUENCES, 2)):
            with pytest.raises(
                jlora.LoRAUsageError, match=r"(?s)proj: .*row_groups=\{'proj': 'last'\}.*'\*': 'packed'"
            ):
                through_proj(worlds[""].model, normal(*shape, K), batch)
        with pytest.raises(jlora.LoRAUsageError, match=r"under jax\.vmap over a packed batch"):
            jax.vmap(through_proj, in_axes=(None, 0, 0))(worlds[""].model, normal(SEQUENCES, K), batch)
    x = normal(SEQUENCES, K)
    with worlds[""].manager.prepare(NAMES, [1] * SEQUENCES) as batch:  # both layouts are the same
        assert_close(through_proj(worlds[""].model, x, batch), worlds[""].expected(x, NAMES))


def test_counts_do_not_enter_the_layout_of_declared_rows(worlds):
    """[1, 1, 1] and [2, 1, 0] run one compiled step."""
    world, before = worlds["packed"], through_proj._cache_size()
    x = normal(SEQUENCES, K)
    for counts, adapters in (([1, 1, 1], NAMES), ([2, 1, 0], ["one", "one", "two"]), ([0, 1, 0], ["two", None, None])):
        with world.manager.prepare(NAMES, counts, pad_to=SEQUENCES) as batch:
            assert_close(through_proj(world.model, x, batch), world.expected(x, adapters))
    assert through_proj._cache_size() == before + 1


def test_the_lookup_and_the_logits_of_a_tied_table_are_declared_apart():
    model = Model()
    del model.lm_head
    model.tie_word_embeddings = True
    manager = make_manager(model, row_groups={"embed.attend": "last"})
    assert {layer.path: layer.row_group for layer in manager.layers()} == {
        "embed": "packed",
        "embed.attend": "last",
        "proj": "packed",
    }
    targets = [Target("embed.attend", 6, 11, "embed.embedding"), TARGETS[0]]
    adapter, counts, last = make_adapter("both", targets, 2), [2, 1, 0], np.array([1, 2, 2])
    manager.add_adapter(adapter)
    bare = Model()
    merged = merge(bare, targets[1:], adapter)
    head = merge(bare, [Target("embed.attend", 6, 11, "embed.embedding", into=lambda delta: delta)], adapter)

    @jax.jit
    def step(model, tokens, batch):
        with jlora.use(batch):
            return model.embed.attend(jnp.tanh(model.proj(model.embed(tokens)))[last])

    tokens = np.array([3, 10, 5], np.int32)
    with manager.prepare(["both", None, "both"], counts) as batch:
        found = step(model, tokens, batch)
    for row, (of_proj, of_head) in enumerate([(merged, head), (bare, bare), (bare, head)]):
        x = jnp.tanh(of_proj.proj(bare.embed(tokens[[1, 2, 2]][row])))
        assert_close(found[row], of_head.embed.attend(x))
