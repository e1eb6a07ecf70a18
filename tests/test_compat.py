"""Private names of JAX behave as jlora expects, in every supported version."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jlora._compat import launch_of, without_graphs


def compiled(function, *args, **options):
    return jax.jit(function, keep_unused=True, **options).lower(*args).compile()


def test_a_launch_returns_and_donates_as_the_program_does():
    rng = np.random.default_rng(0)
    taken, added, unused = (jnp.asarray(rng.standard_normal(8, np.float32)) for _ in range(3))
    launch = launch_of(compiled(lambda a, b, c: (a + b, b * 2), taken, added, unused, donate_argnums=0))
    want = np.asarray(taken) + np.asarray(added), np.asarray(added) * 2
    for found, expected in zip(launch([taken, added, unused]), want, strict=True):
        np.testing.assert_array_equal(found, expected)
        assert (found.sharding, found.committed, found.aval) == (added.sharding, added.committed, added.aval)
    assert taken.is_deleted()
    assert not added.is_deleted()


def test_arrays_that_were_consumed_before_are_refused():
    arrays = [jnp.zeros(8), jnp.ones(8)]
    launch = launch_of(compiled(lambda a, b: a + b, *arrays))
    arrays[0].delete()
    with pytest.raises((RuntimeError, ValueError), match=r"deleted|Expected args"):
        launch(arrays)


def test_programs_that_a_launch_cannot_run_are_refused():
    x, effect = jnp.zeros(8), lambda x: (jax.debug.callback(lambda y: None, x), x + 1)[1]
    with pytest.raises(NotImplementedError, match="effects, constants or arguments that are not used"):
        launch_of(compiled(effect, x))
    with pytest.raises(NotImplementedError, match="effects, constants or arguments that are not used"):
        launch_of(jax.jit(lambda x, y: x + 1).lower(x, x).compile())


def test_xla_knows_the_flag_that_turns_graphs_off():
    options = without_graphs("gpu")
    assert jax.jit(lambda x: x + 1, compiler_options=options)(1) == 2
    with pytest.raises(RuntimeError, match="No such compile option"):
        jax.jit(lambda x: x + 1, compiler_options={f"{flag}_": value for flag, value in options.items()})(1)
