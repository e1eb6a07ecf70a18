"""The order of the queue, compared with a naive model under random arrivals, slots and loads."""

from types import SimpleNamespace

from hypothesis import given
from hypothesis import strategies as st

from jlora.serve.engine.scheduler import Queue, SlotUse

NAMES = ["a", "b", "c", "d", None]


def slots(total=2, running=(), resident=(), taken=None):
    return SlotUse(total, set(running), {*running, *resident}, len(set(running)) if taken is None else taken)


def request(lora, item):
    return SimpleNamespace(lora=lora, item=item, passed=0, handle=None)


def queue(*loras, ratio=3):
    made = Queue(ratio)
    for i, lora in enumerate(loras):
        made.add(request(lora, i))
    return made


def take(made, state, loaded=lambda name: True):
    """Take the next request. Return its index; None if none can begin."""
    if (one := made.next(state, loaded)) is None:
        return None
    made.take(one)
    return one.item


def drain(made, state, loaded=lambda name: True):
    return [*iter(lambda: take(made, state, loaded), None)]


def test_request_without_slot_change_goes_first():
    assert drain(queue(None, None, None), slots()) == [0, 1, 2]
    assert take(queue("a", "b"), slots()) == 0
    assert take(queue("a", "b", "c"), slots(resident="b")) == 1
    assert take(queue("a", None), slots(resident="b")) == 1
    assert take(queue("a", "b", "c"), slots(running="c")) == 2


def test_pinned_adapters_and_older_versions_take_slots():
    assert drain(queue("a", "b"), slots(total=2, running=["b"], taken=2)) == [1]


def test_overtaken_request_blocks_later_ones_after_the_bound():
    made = queue("a", *["b"] * 9, ratio=3)
    busy = slots(total=1, running="b")
    assert drain(made, busy) == [1, 2, 3]
    assert take(made, slots(total=1, resident="b")) == 0
    assert drain(made, busy) == list(range(4, 10))


@given(st.data())
def test_no_request_is_overtaken_more_often_than_the_bound(data):
    ratio, total = data.draw(st.integers(1, 4)), data.draw(st.integers(1, 3))
    made = Queue(ratio)
    waiting: list[SimpleNamespace] = []  # the naive model, in order of arrival
    running: list[str | None] = []
    overtaken: dict[int, int] = {}  # counted while its adapter was loaded
    for step in range(data.draw(st.integers(1, 60))):
        action = data.draw(st.sampled_from(["arrive", "arrive", "end", "take", "take"]))
        if action == "arrive":
            one = request(data.draw(st.sampled_from(NAMES)), step)
            made.add(one)
            waiting.append(one)
        elif action == "end" and running:
            running.pop(data.draw(st.integers(0, len(running) - 1)))
        elif action == "take":
            loaded = data.draw(st.sets(st.sampled_from(["a", "b", "c", "d"])))
            names = {name for name in running if name is not None}
            resident = set(sorted(data.draw(st.sets(st.sampled_from("abcd"), max_size=total)) | names)) | names
            one = made.next(slots(total, names, resident), loaded.__contains__)
            eligible = [w for w in waiting if w.lora is None or w.lora in loaded]
            admissible = [w for w in eligible if w.lora is None or w.lora in names or len(names) < total]
            overdue = [w for w in eligible if w.passed >= ratio]
            if one is None:
                assert not admissible or (overdue and waiting.index(overdue[0]) < waiting.index(admissible[0]))
                continue
            assert one in admissible
            made.take(one)
            for earlier in waiting[: waiting.index(one)]:
                overtaken[earlier.item] = overtaken.get(earlier.item, 0) + 1
                if earlier in eligible:
                    assert overtaken[earlier.item] <= ratio
            waiting.remove(one)
            running.append(one.lora)
            assert len({name for name in running if name is not None}) <= total
        assert [w.item for w in made] == [w.item for w in waiting]
    for _ in range(len(waiting)):  # all are loaded and no slot is taken
        assert take(made, slots(total)) is not None
    assert len(made) == 0


def test_a_version_that_is_held_needs_no_load():
    made = Queue(2)
    made.add(one := request("a", 0))
    assert made.next(slots(1), lambda name: False) is None
    one.handle = "held"
    assert made.next(slots(1), lambda name: False) is one
