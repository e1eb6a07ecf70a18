"""The order of the queue, compared with a naive model under random arrivals, slots and loads."""

from hypothesis import given
from hypothesis import strategies as st

from jlora.serve.engine.scheduler import Queue, SlotUse, Waiting

NAMES = ["a", "b", "c", "d", None]


def slots(total=2, running=(), resident=(), taken=None):
    return SlotUse(total, set(running), {*running, *resident}, len(set(running)) if taken is None else taken)


def queue(*loras, ratio=3):
    made = Queue(ratio)
    for i, lora in enumerate(loras):
        made.add(Waiting(lora, i))
    return made


def drain(made, state, loaded=lambda name: True):
    taken = []
    while (one := made.take(state, loaded)) is not None:
        taken.append(one.item)
    return taken


def test_order_of_arrival_by_default():
    assert drain(queue(None, None, None), slots()) == [0, 1, 2]
    assert queue("a", "b").take(slots(), lambda name: True).item == 0


def test_request_without_slot_change_goes_first():
    assert queue("a", "b", "c").take(slots(resident="b"), lambda name: True).item == 1
    assert queue("a", None).take(slots(resident="b"), lambda name: True).item == 1
    assert queue("a", "b", "c").take(slots(running="c"), lambda name: True).item == 2


def test_no_more_adapters_run_than_there_are_slots():
    made = queue("a", "b", "c", None)
    assert drain(made, slots(total=2, running="bd")) == [1, 3]
    assert [one.item for one in made] == [0, 2]


def test_pinned_adapters_and_older_versions_take_slots():
    made = queue("a", "b")
    assert made.take(slots(total=2, running=["b"], taken=2), lambda name: True).item == 1
    assert made.take(slots(total=2, running=["b"], taken=2), lambda name: True) is None


def test_loading_adapter_blocks_no_other_request():
    made = queue("a", *["b"] * 9, ratio=3)
    assert drain(made, slots(), loaded=lambda name: name != "a") == list(range(1, 10))
    assert made.take(slots(), lambda name: True).item == 0


def test_overtaken_request_blocks_later_ones_after_the_bound():
    made = queue("a", *["b"] * 9, ratio=3)
    busy = slots(total=1, running="b")
    assert drain(made, busy) == [1, 2, 3]
    assert made.take(slots(total=1, resident="b"), lambda name: True).item == 0
    assert drain(made, busy) == list(range(4, 10))


def test_put_back_restores_the_queue():
    made = queue("a", "b", "c")
    before = [(one.item, one.passed) for one in made]
    one = made.take(slots(resident="b"), lambda name: True)
    assert one.item == 1
    made.put_back(one)
    assert [(one.item, one.passed) for one in made] == before


@given(st.data())
def test_no_request_is_overtaken_more_often_than_the_bound(data):
    """Random arrivals, ends and loads. In the end every adapter is loaded and every sequence ends."""
    ratio, total = data.draw(st.integers(1, 4)), data.draw(st.integers(1, 3))
    made = Queue(ratio)
    waiting: list[Waiting] = []  # the naive model, in order of arrival
    running: list[str | None] = []
    overtaken: dict[int, int] = {}  # counted while its adapter was loaded
    for step in range(data.draw(st.integers(1, 60))):
        action = data.draw(st.sampled_from(["arrive", "arrive", "end", "take", "take"]))
        if action == "arrive":
            one = Waiting(data.draw(st.sampled_from(NAMES)), step)
            made.add(one)
            waiting.append(one)
        elif action == "end" and running:
            running.pop(data.draw(st.integers(0, len(running) - 1)))
        elif action == "take":
            loaded = data.draw(st.sets(st.sampled_from(["a", "b", "c", "d"])))
            names = {name for name in running if name is not None}
            resident = set(sorted(data.draw(st.sets(st.sampled_from("abcd"), max_size=total)) | names)) | names
            one = made.take(slots(total, names, resident), loaded.__contains__)
            eligible = [w for w in waiting if w.lora is None or w.lora in loaded]
            admissible = [w for w in eligible if w.lora is None or w.lora in names or len(names) < total]
            overdue = [w for w in eligible if w.passed >= ratio]
            if one is None:
                assert not admissible or (overdue and waiting.index(overdue[0]) < waiting.index(admissible[0]))
                continue
            assert one in admissible
            for earlier in waiting[: waiting.index(one)]:
                overtaken[earlier.item] = overtaken.get(earlier.item, 0) + 1
                if earlier in eligible:
                    assert overtaken[earlier.item] <= ratio
            waiting.remove(one)
            running.append(one.lora)
            assert len({name for name in running if name is not None}) <= total
        assert [w.item for w in made] == [w.item for w in waiting]
    for _ in range(len(waiting)):  # all are loaded and no slot is taken
        assert made.take(slots(total), lambda name: True) is not None
    assert len(made) == 0
