"""A strict parser of Prometheus' text format 0.0.4, after Go's `expfmt`, which routers use."""

import math
import re
from dataclasses import dataclass, field

_NAME = re.compile(r"[a-zA-Z_:][a-zA-Z0-9_:]*")
_LABEL = re.compile(r'([a-zA-Z_][a-zA-Z0-9_]*)="((?:[^"\\\n]|\\["\\n])*)"')
_NUMBER = re.compile(r"[-+]?(\d+(\.\d*)?([eE][-+]?\d+)?|\.\d+|Inf)|NaN")
_KINDS = ("counter", "gauge", "histogram", "summary", "untyped")


@dataclass
class Family:
    """A metric with its type, and samples of (name, labels, value)."""

    kind: str
    samples: list[tuple[str, dict[str, str], float]] = field(default_factory=list)


def parse(text: str) -> dict[str, Family]:
    """Return the families of a /metrics response by name. Raises AssertionError where Go's parser would fail."""
    assert text.endswith("\n"), "the last line has no end"
    families: dict[str, Family] = {}
    series: set[tuple[str, frozenset[tuple[str, str]]]] = set()
    current = ""
    for line in text.split("\n")[:-1]:
        if line.startswith("# TYPE "):
            _, _, current, kind = line.split(" ")
            assert _NAME.fullmatch(current), line
            assert kind in _KINDS, line
            assert current not in families, f"a second TYPE line for {current}"
            families[current] = Family(kind)
            continue
        if not line or line.startswith("#"):
            continue
        name, labels, value = _sample(line)
        family = families[current]
        if family.kind == "histogram":
            assert name in (f"{current}_bucket", f"{current}_sum", f"{current}_count"), line
        else:
            assert name == current, f"{line} does not belong to {current}"
        assert (name, frozenset(labels.items())) not in series, f"{line}: a second time"
        series.add((name, frozenset(labels.items())))
        family.samples.append((name, labels, value))
    for name, family in families.items():
        if family.kind == "histogram":
            _check_buckets(name, family)
        if family.kind == "counter":
            assert all(value >= 0 for _, _, value in family.samples), name
    return families


def _sample(line: str) -> tuple[str, dict[str, str], float]:
    name = _NAME.match(line)
    assert name, line
    rest, labels = line[name.end() :], {}
    if rest.startswith("{"):
        rest = rest[1:]
        while not rest.startswith("}"):
            label = _LABEL.match(rest)
            assert label, line
            assert label[1] not in labels, f"{line}: {label[1]} twice"
            labels[label[1]] = re.sub(r"\\(.)", lambda found: "\n" if found[1] == "n" else found[1], label[2])
            rest = rest[label.end() :].removeprefix(",")
        rest = rest[1:]
    assert rest.startswith(" "), line
    assert _NUMBER.fullmatch(rest[1:]), line  # without a timestamp
    return name[0], labels, float(rest[1:])


def _check_buckets(name: str, family: Family) -> None:
    counts = [(float(labels["le"]), value) for one, labels, value in family.samples if one == f"{name}_bucket"]
    for column in zip(*counts, strict=True):
        assert list(column) == sorted(column), f"{name}: buckets are not sums from below"
    assert counts[-1][0] == math.inf, f"{name}: no bucket of +Inf"
    assert [value for one, _, value in family.samples if one == f"{name}_count"] == [counts[-1][1]], name
