"""TPU slices without TPUs: topologies to compile for, and what a compiled program takes of a chip."""

from __future__ import annotations

import dataclasses
import os
import re
from importlib.util import find_spec
from typing import Any

import jax
from jax.experimental import topologies

GIB = 1 << 30


@dataclasses.dataclass(frozen=True)
class Chip:
    """Published facts of what JAX calls one device.

    Attributes:
        memory: bytes of HBM; the compiler keeps some of it for itself.
        flops: peak operations a second in bfloat16.
    """

    memory: int
    flops: float


# A tpu7x chip is two devices; these are halves of it.
CHIPS = {
    "v4": Chip(32 * GIB, 275e12),
    "v5e": Chip(16 * GIB, 197e12),
    "v5p": Chip(95 * GIB, 459e12),
    "v6e": Chip(32 * GIB, 918e12),
    "tpu7x": Chip(96 * GIB, 1153.5e12),
}

# As devices name themselves.
_KINDS = {"TPU v4": "v4", "TPU v5 lite": "v5e", "TPU v5": "v5p", "TPU v6 lite": "v6e", "TPU7x": "tpu7x"}


def peak_flops(device_kind: str) -> float | None:
    """Peak operations a second of a device by the name it gives itself; None for what is no known TPU."""
    name = _KINDS.get(device_kind)
    return None if name is None else CHIPS[name].flops


# Unless told not to, libtpu asks the cloud's metadata server about its machine, and refuses to be loaded by two
# processes at once; compiling takes no TPU from anyone.
_ENVIRONMENT = {
    "TPU_SKIP_MDS_QUERY": "1",
    "TPU_WORKER_HOSTNAMES": "localhost",
    "TPU_ACCELERATOR_TYPE": "v5litepod-4",
    "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
}


def chip_of(topology: str) -> Chip:
    """The chip of a topology name such as `v5e:4x4`.

    Raises:
        ValueError: not such a name, or an unknown chip.
    """
    kind, _, shape = topology.partition(":")
    if kind not in CHIPS or not re.fullmatch(r"\d+(x\d+)+", shape):
        raise ValueError(f"topology {topology!r}: expected one of {', '.join(CHIPS)} and a shape, such as v5e:4x4")
    return CHIPS[kind]


def topology_devices(topology: str) -> list[jax.Device]:
    """Devices of a slice that is not there, for compilation only.

    Raises:
        ModuleNotFoundError: libtpu, the compiler for TPUs, is not installed.
        ValueError: a topology that libtpu does not know; its own words follow.
    """
    chip_of(topology)
    if find_spec("libtpu") is None:
        raise ModuleNotFoundError(
            "compiling for TPUs needs their compiler, libtpu: pip install 'dspark_jax[tpu]' (no TPU is needed)"
        )
    for name, value in _ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    try:
        return list(topologies.get_topology_desc(platform="tpu", topology_name=topology).devices)
    except (RuntimeError, NotImplementedError) as error:
        raise ValueError(f"libtpu gives no topology {topology!r}: {error}") from error


@dataclasses.dataclass(frozen=True)
class Memory:
    """Bytes of HBM that a program takes on one device.

    Attributes:
        arguments: state, tables, target and batch.
        outputs: new state and metrics.
        reused: outputs that take the place of donated arguments.
        temporaries: activations, gradients, gathered weights.
        code: the program itself.
        peak: most that is alive at once, arguments included.
    """

    arguments: int
    outputs: int
    reused: int
    temporaries: int
    code: int
    peak: int


def program_memory(compiled: Any) -> Memory:
    """Memory of a compiled program by kind, as its compiler assigned it."""
    found = compiled.memory_analysis()
    arguments, outputs = found.argument_size_in_bytes, found.output_size_in_bytes
    reused, temporaries = found.alias_size_in_bytes, found.temp_size_in_bytes
    code = found.generated_code_size_in_bytes
    together = arguments + outputs - reused + temporaries + code
    # Older runtimes have no peak; then all kinds may be alive at once.
    return Memory(arguments, outputs, reused, temporaries, code, getattr(found, "peak_memory_in_bytes", 0) or together)


def out_of_memory(error: Exception) -> str | None:
    """The compiler's sentence on memory where it refused a program for want of it; None for other errors."""
    text = str(error)
    if "RESOURCE_EXHAUSTED" not in text and "out of memory" not in text.lower():
        return None
    used = r"Used \S+ of \S+ hbm\.( Exceeded hbm capacity by [\d.]+\w?\.)?"
    required = r"total memory required for .*? \(\S+\) exceeds available HBM \(\S+\)"
    sentence = re.search(f"{used}|{required}", text)
    return sentence[0] if sentence else text.splitlines()[0]
