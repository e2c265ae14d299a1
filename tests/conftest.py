"""How every test runs: on the CPU with eight host devices, full float32 products and checked array shapes."""

from __future__ import annotations

import os
from pathlib import Path

# Before JAX starts. Eight devices serve the sharding tests. Under xdist every worker keeps to one thread: two workers
# with two threads each on two cores spend their time waiting for each other.
os.environ.setdefault("JAX_PLATFORMS", "cpu")
_flags = ["--xla_force_host_platform_device_count=8"]
# Compiling takes most of the time here, and tiny models run fast however they are compiled. XLA's older way of emitting
# fusions compiles twice as fast as the one through MLIR.
_flags += ["--xla_backend_optimization_level=0", "--xla_llvm_disable_expensive_passes=true"]
_flags += ["--xla_cpu_use_fusion_emitters=false"]
if "PYTEST_XDIST_WORKER" in os.environ:
    _flags += ["--xla_cpu_multi_thread_eigen=false"]
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ["XLA_FLAGS"] = " ".join([os.environ.get("XLA_FLAGS", ""), *_flags]).strip()

import jax
import pytest
from goldens import ABSENT, golden_root
from jaxtyping import install_import_hook

jax.config.update("jax_default_matmul_precision", "highest")

# Shapes in signatures are checked in tests and cost nothing in production. The hook must come before the package's
# first import; `shape_checks` says what is left out.
install_import_hook("dspark_jax", "shape_checks.check")

from dspark_jax.engine.programs import PROGRAMS


@pytest.fixture(scope="session")
def goldens() -> Path:
    """Folder of reference numbers; tests that ask for it are skipped where it is absent."""
    root = golden_root()
    if root is None:
        pytest.skip(ABSENT)
    return root


@pytest.fixture(scope="module", autouse=True)
def _forget_programs():
    """Drop compiled programs after every module: thousands of them exhaust the memory maps a process may have."""
    yield
    PROGRAMS.clear()
