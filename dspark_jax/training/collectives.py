"""What devices tell each other in a compiled program: the collectives of its text, and how often each one runs.

A compiler may meet a layout in ways that nobody asked for (gathering logits where a sum would do). Its text says what
it chose; tests assert on this list and `dspark_jax.compile` prints it.
"""

from __future__ import annotations

import dataclasses
import math
import re
from collections import defaultdict
from collections.abc import Iterable, Iterator

KINDS = ("all-gather", "all-reduce", "reduce-scatter", "all-to-all", "collective-permute", "collective-broadcast")
FLOAT_TYPES = ("f64", "f32", "bf16", "f16")
_BYTES = {
    "pred": 1,
    "s64": 8,
    "u64": 8,
    "f64": 8,
    "s32": 4,
    "u32": 4,
    "f32": 4,
    "s16": 2,
    "u16": 2,
    "bf16": 2,
    "f16": 2,
}

_COMPUTATION = re.compile(r"^(?P<entry>ENTRY )?%?(?P<name>[\w.\-]+) \(.*\{$")
_OPERATION = re.compile(rf"= (?P<type>.*?) (?P<kind>{'|'.join(KINDS)})(?P<start>-start)?\(")
_ARRAY = re.compile(r"\b([a-z]+\d+|pred)\[([\d,]*)\]")
_WHILE = re.compile(r"= .*? while\(.*?condition=%?(?P<condition>[\w.\-]+), body=%?(?P<body>[\w.\-]+)")
_TRIPS = re.compile(r'"known_trip_count":\{"n":"(\d+)"\}')
_CALLS = re.compile(r"(?:calls|to_apply|true_computation|false_computation)=%?([\w.\-]+)")
_BRANCHES = re.compile(r"branch_computations=\{([^}]*)\}")
_GROUPS = re.compile(
    r"replica_groups=(?:\[\d+,(?P<size>\d+)\]|\{\{(?P<first>[\d,]*)\}|mesh\[(?P<axes>[^\]]*)\][^{]*\{(?P<used>[^}]*)\})"
)
_CHANNEL = re.compile(r"channel_id=(\d+)")
_OP_NAME = re.compile(r'op_name="([^"]*)"')


@dataclasses.dataclass(frozen=True)
class Collective:
    """One collective operation on one array.

    Attributes:
        kind: one of `KINDS`.
        dtype: element type as the compiler writes it (`bf16`).
        shape: of the result on one device.
        group: devices that exchange with each other; 0 where the text does not say.
        times: executions in one run of the program: bodies of loops times their trip counts.
        where: the source operation it was made for.
    """

    kind: str
    dtype: str
    shape: tuple[int, ...]
    group: int
    times: int
    where: str

    @property
    def size(self) -> int:
        """Bytes of the result on one device, of one execution."""
        return math.prod(self.shape) * _BYTES.get(self.dtype, 1)

    def __str__(self) -> str:
        return f"{self.times} x {self.kind} {self.dtype}{list(self.shape)} among {self.group} ({self.where})"


def collectives(text: str) -> list[Collective]:
    """List the collectives of a compiled program.

    Args:
        text: `compiled.as_text()`.

    Returns:
        One entry an array that is exchanged, in the order of the text. Loops whose trip count the compiler does not
        know count once.
    """
    computations = _split(text)
    times = _executions(computations)
    found, pieces = [], set()
    for name, lines in computations.items():
        for line in lines:
            match = _OPERATION.search(line)
            if match is None:
                continue
            # TPUs spread one exchange over several fusions, between which other work is done: all of one channel.
            channel = _CHANNEL.search(line)
            if channel and "fus" in name:
                if channel[1] in pieces:
                    continue
                pieces.add(channel[1])
            kind = match["kind"]
            # TPUs write a reduce-scatter as a fusion of a sum and a slice.
            if kind == "all-reduce" and name.startswith("all-reduce-scatter"):
                kind = "reduce-scatter"
            groups, where = _GROUPS.search(line), _OP_NAME.search(line)
            for dtype, shape in _results(match):
                found.append(
                    Collective(
                        kind=kind,
                        dtype=dtype,
                        shape=shape,
                        group=_group_size(groups),
                        times=times[name],
                        where=where[1] if where else "",
                    )
                )
    return found


def total_bytes(found: Iterable[Collective]) -> dict[str, tuple[int, int]]:
    """Executions and bytes of results on one device by kind, over one run of the program."""
    sums: dict[str, tuple[int, int]] = {}
    for one in found:
        count, size = sums.get(one.kind, (0, 0))
        sums[one.kind] = (count + one.times, size + one.times * one.size)
    return sums


def _split(text: str) -> dict[str, list[str]]:
    """Lines of every computation by its name; the entry comes under the name `ENTRY`."""
    computations: dict[str, list[str]] = {}
    lines: list[str] = []
    for line in text.splitlines():
        header = _COMPUTATION.match(line)
        if header:
            lines = computations.setdefault("ENTRY" if header["entry"] else header["name"], [])
        else:
            lines.append(line)
    return computations


def _executions(computations: dict[str, list[str]]) -> dict[str, int]:
    """How often each computation runs, following calls and loops from the entry; both sides of a branch count."""
    times: dict[str, int] = defaultdict(int)

    def visit(name: str, count: int) -> None:
        times[name] += count
        for line in computations.get(name, ()):
            for called, repeats in _called(line, computations):
                visit(called, count * repeats)

    visit("ENTRY", 1)
    return times


def _called(line: str, computations: dict[str, list[str]]) -> Iterator[tuple[str, int]]:
    loop = _WHILE.search(line)
    if loop:
        yield loop["body"], _trips(line, computations.get(loop["condition"], []))
    for name in _CALLS.findall(line):
        yield name, 1
    for names in _BRANCHES.findall(line):
        for name in names.split(","):
            yield name.strip().lstrip("%"), 1


def _trips(line: str, condition: list[str]) -> int:
    """Trip count of a loop: what the compiler states, else the one bound its condition compares with."""
    known = _TRIPS.search(line)
    if known:
        return int(known[1])
    bounds = {int(x) for x in re.findall(r"s32\[\][^=]*? constant\((\d+)\)", "\n".join(condition))}
    return bounds.pop() if len(bounds) == 1 else 1


def _results(match: re.Match[str]) -> list[tuple[str, tuple[int, ...]]]:
    """Arrays that an operation yields; the start of an asynchronous one also lists its operands, before the results."""
    arrays = [(dtype, tuple(int(x) for x in dims.split(",") if x)) for dtype, dims in _ARRAY.findall(match["type"])]
    if match["start"] and match["kind"] != "all-reduce":
        arrays = [x for x in arrays if x != ("u32", ())]
        arrays = arrays[len(arrays) // 2 :]
    return arrays


def _group_size(match: re.Match[str] | None) -> int:
    if match is None:
        return 0
    if match["axes"]:
        sizes = dict(axis.split("=") for axis in match["axes"].split(","))
        return math.prod(int(sizes[axis.strip()]) for axis in match["used"].split(","))
    return int(match["size"]) if match["size"] else len(match["first"].split(","))
