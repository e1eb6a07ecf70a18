"""The table of `jlora.sharding.rules`: from the sharding of a kernel to that of its slot arrays."""

import functools
import itertools

import jax
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from jax.sharding import Mesh, NamedSharding, SingleDeviceSharding
from jax.sharding import PartitionSpec as P

from jlora.errors import LoRAError
from jlora.sharding import rules
from jlora.sharding.rules import KernelSharding, kernel_sharding, names_of, partition, split_axis

LINEAR = ((0,), (1,))  # axes of K and of N


@functools.cache
def mesh_of_eight() -> Mesh:
    return Mesh(np.array(jax.devices()).reshape(2, 2, 2, 1), ("data", "x", "y", "one"))


def rule(spec, axes=LINEAR, sizes=(8, 16), data=(), fully=False, mesh=None) -> KernelSharding | None:
    mesh = mesh or mesh_of_eight()
    return kernel_sharding("up.kernel", NamedSharding(mesh, spec), axes, sizes, data, fully)


@pytest.mark.parametrize(
    ("spec", "ins", "outs"),
    [
        (P(None, "x"), (), ("x",)),
        (P("x"), ("x",), ()),  # a spec may be shorter than the array
        (P("y", "x"), ("y",), ("x",)),
        (P(("y", "x")), ("y", "x"), ()),
        (P(), (), ()),
        (P("one", "x"), (), ("x",)),  # an axis of size 1 does not split
        (P(P.UNCONSTRAINED, "x"), (), ("x",)),
    ],
)
def test_table_of_linear_kernels(spec, ins, outs):
    found = rule(spec)
    assert (found.ins, found.outs, found.experts) == (ins, outs, ())
    assert found.a == ((), (), (), ins)
    assert found.b == ((), (), outs)


@pytest.mark.parametrize(
    ("spec", "a", "b"),
    [(P(None, "x"), (("x",), ()), ("x",)), (P("y", "x"), (("x",), ("y",)), ("x", "y")), (P(), ((), ()), ())],
)
def test_fully_sharded_splits_both_factors(spec, a, b):
    found = rule(spec, fully=True)
    assert found.a[2:] == a  # ranks, K
    assert found.b == ((), (), b)


@given(st.permutations(["x", "y", None]), st.booleans())
def test_every_shard_of_a_factor_has_the_size_of_the_rules(order, fully):
    """Slot arrays of one shard hold 1 / size of every axis that the rule splits, and no axis of the mesh twice."""
    found = rule(P(*order[:2]), fully=fully)
    for names, shape in ((found.a, (1, 1, 16, 8)), (found.b, (1, 16, 16))):
        flat = [name for axis in names for name in axis]
        assert len(flat) == len(set(flat))
        local = found.named(*names).shard_shape(shape)
        assert local == tuple(size // found.size(axis) for size, axis in zip(shape, names, strict=True))


@pytest.mark.parametrize("data", [("data",), ("data", "y")])
def test_axes_of_sequences_split_no_slot_array(data):
    found = rule(P(("data", "x"), "y"), data=data)
    assert (found.ins, found.outs) == (("x",), () if "y" in data else ("y",))
    assert found.data == data


def test_stacked_kernels():
    stacked = ((1,), (2,))
    assert rule(P(None, None, "x"), stacked, (4, 8, 16)).outs == ("x",)
    assert rule(P("one", "x"), stacked, (4, 8, 16)).ins == ("x",)
    with pytest.raises(
        LoRAError, match=r"up\.kernel is a stack of layers that is split over 'x'.*leave that axis whole"
    ):
        rule(P("x"), stacked, (4, 8, 16))


def test_experts():
    found = rule(P("x", None, "y"), ((1,), (2,), (0,)), (4, 8, 16))
    assert (found.experts, found.outs) == (("x",), ("y",))
    assert found.a == (("x",), (), (), ())
    assert found.b == (("x",), (), ("y",))


HEADS = ((0, 1), (2, 3))


@pytest.mark.parametrize(
    ("spec", "sizes", "ins", "outs"),
    [
        (P("y", None, "x"), (4, 2, 4, 6), ("y",), ("x",)),
        (P(None, "x"), (1, 2, 4, 6), ("x",), ()),  # the axes before it have size 1, so each part is contiguous
        (P(None, None, None, ("x", "y")), (4, 2, 1, 8), (), ("x", "y")),
    ],
)
def test_several_axes_make_one(spec, sizes, ins, outs):
    found = rule(spec, HEADS, sizes)
    assert (found.ins, found.outs) == (ins, outs)


@pytest.mark.parametrize(
    ("spec", "axis", "said"),
    [(P(None, "x"), 1, "'x'"), (P("x", "y"), 1, "'y'"), (P(None, ("x", "y")), 1, "'x' and 'y'")],
)
def test_a_split_of_an_inner_axis_is_refused(spec, axis, said):
    with pytest.raises(LoRAError) as error:
        rule(spec, HEADS, (4, 4, 4, 6))
    message = str(error.value)
    assert message.startswith("up.kernel of shape (4, 4, 4, 6)")
    assert f"over {said} along axis {axis}" in message
    assert "split the first of these axes" in message


@pytest.mark.parametrize(
    "sharding",
    [None, SingleDeviceSharding(jax.devices()[0]), NamedSharding(Mesh(np.array(jax.devices()[:1]), "x"), P("x"))],
)
def test_kernels_without_a_mesh_have_no_sharding(sharding):
    assert kernel_sharding("up.kernel", sharding, LINEAR, (8, 16), (), False) is None


@given(st.lists(st.sampled_from([(), ("x",), ("y",), ("y", "x")]), max_size=4))
def test_partition_and_names_of_are_inverse(axes):
    assert [names_of(entry) for entry in partition(*axes)] == axes


@given(
    st.lists(st.integers(1, 3), min_size=1, max_size=4).flatmap(
        lambda s: st.tuples(st.just(s), st.permutations(range(len(s))))
    )
)
def test_split_axis_is_the_one_that_may_be_split(case):
    """The rule allows a split of one axis of a group: the first of any size in the order of flattening."""
    sizes, order = case
    sizes = [2 * size if size > 1 else 1 for size in sizes]
    axis = split_axis(order, sizes)
    for i in itertools.takewhile(lambda i: i != axis, order):
        assert sizes[i] == 1
    for i in order:
        spec = P(*("x" if i == j else None for j in range(len(sizes))))
        if sizes[i] == 1:
            continue
        if i == axis:
            assert rule(spec, (order, ()), sizes).ins == ("x",)
        else:
            with pytest.raises(LoRAError, match="in the middle"):
                rule(spec, (order, ()), sizes)


@given(st.permutations(["data", "x", "y"]), st.integers(1, 3), st.lists(st.integers(0, 2), min_size=8, max_size=8))
def test_shards_of_experts_are_on_the_devices_of_jax(order, count, processes):
    """Compare with `devices_indices_map` of an array with one row for each shard."""
    names = tuple(order[:count])
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(rules, "process_of", lambda device: processes[device.id])
        found = KernelSharding(mesh_of_eight(), experts=names).experts_by_process
    expected: dict[int, set[int]] = {}
    for device, (rows,) in NamedSharding(mesh_of_eight(), P(names)).devices_indices_map((2**count,)).items():
        assert rows.stop - rows.start == 1
        expected.setdefault(processes[device.id], set()).add(rows.start)
    assert found == {process: tuple(sorted(own)) for process, own in expected.items()}


def test_devices_name_their_process():
    assert KernelSharding(mesh_of_eight(), experts=("x",)).experts_by_process == {jax.process_index(): (0, 1)}
    assert KernelSharding(mesh_of_eight()).experts_by_process == {}
    assert KernelSharding(mesh_of_eight().abstract_mesh, experts=("x",)).experts_by_process == {}
