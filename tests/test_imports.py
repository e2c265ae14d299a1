"""The layers of the package: what may import what, and who reads the command line."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).parents[1]
PACKAGE = REPOSITORY / "dspark_jax"

# A part is a module or a subpackage directly under the package. Parts import parts of lower layers only. A new part
# needs a place here before anything else.
LAYERS = (
    {"types", "products", "config", "buckets", "files", "progress", "terminal", "huggingface"}
    | {"sampling", "sharding", "nn"},
    {"target", "draft", "spec", "data"},
    {"training", "engine", "evaluation"},
    {"eval", "train", "regenerate", "calibrate", "profile", "convert", "compile", "bench", "cache", "curves", "reduce"},
)
COMMANDS = LAYERS[-1]
# Measuring needs a decoder to measure.
ALLOWED_SIBLINGS = {("evaluation", "engine")}
# Only data: no module in it.
DATA_FOLDERS = {"pretrained", "prompts"}

MODULES = sorted(PACKAGE.rglob("*.py"))


def part_of(path: Path) -> str:
    """`dspark_jax/nn/rope.py` belongs to `nn`, `dspark_jax/types.py` to `types`, `dspark_jax/__init__.py` to itself."""
    return path.relative_to(PACKAGE).parts[0].removesuffix(".py")


def layer_of(part: str) -> int:
    for layer, parts in enumerate(LAYERS):
        if part in parts:
            return layer
    raise AssertionError(f"dspark_jax/{part} belongs to no layer: give it one in {Path(__file__).name}")


def imported_parts(path: Path) -> set[str]:
    """Parts of the package that a module imports, anywhere in it."""
    found = set()
    # The package a relative import starts from: `from . import x` in dspark_jax/nn/rope.py means dspark_jax.nn.
    here = ("dspark_jax", *path.relative_to(PACKAGE).parent.parts)
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            base = ".".join(here[: len(here) - node.level + 1]) if node.level else ""
            module = ".".join(filter(None, (base, node.module)))
            names = [f"{module}.{alias.name}" for alias in node.names]
        else:
            continue
        found |= {name.split(".")[1] for name in names if name.startswith("dspark_jax.")}
    # What is no module is a name that the package itself exports, such as its version.
    return {name for name in found if (PACKAGE / name).is_dir() or (PACKAGE / f"{name}.py").exists()}


def allowed(importer: str, imported: str) -> bool:
    """A part may import itself, lower layers, within layer 0 its equals, and the siblings named above."""
    own, other = layer_of(importer), layer_of(imported)
    return importer == imported or other < own or own == other == 0 or (importer, imported) in ALLOWED_SIBLINGS


@pytest.mark.parametrize("path", MODULES, ids=lambda p: str(p.relative_to(PACKAGE)))
def test_imports_point_to_lower_layers(path: Path):
    part = part_of(path)
    if part == "__init__":
        pytest.skip("the public names come from everywhere")
    wrong = sorted(name for name in imported_parts(path) if not allowed(part, name))
    assert not wrong, (
        f"{part} (layer {layer_of(part)}) imports {', '.join(wrong)}: move the shared piece to a lower layer"
    )


def test_every_part_has_a_layer():
    parts = {part_of(path) for path in MODULES} - {"__init__"}
    for part in parts:
        layer_of(part)
    assert not parts & DATA_FOLDERS, "folders of package data hold no modules"


def test_no_cycles_within_layer_zero():
    edges = {part: set() for part in LAYERS[0]}
    for path in MODULES:
        if part_of(path) in edges:
            edges[part_of(path)] |= imported_parts(path) & LAYERS[0] - {part_of(path)}
    while leaves := {part for part, imports in edges.items() if not imports & edges.keys()}:
        edges = {part: imports for part, imports in edges.items() if part not in leaves}
    assert not edges, f"these parts import each other in a circle: {sorted(edges)}"


def reads_command_line(path: Path) -> bool:
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Attribute) and node.attr == "argv":
            return True
        names = [a.name for a in node.names] if isinstance(node, ast.Import | ast.ImportFrom) else []
        module = [node.module or ""] if isinstance(node, ast.ImportFrom) else []
        if {name.split(".")[0] for name in names + module} & {"argv", "argparse", "tyro"}:
            return True
    return False


def test_only_commands_read_the_command_line():
    readers = {part_of(path) for path in MODULES if reads_command_line(path)}
    assert readers <= COMMANDS, f"{sorted(readers - COMMANDS)} read the command line: hand them values instead"


def test_nothing_names_a_place_on_one_machine():
    """Paths come from arguments and the environment; an absolute one works for its author only."""
    places = re.compile(r"(?<![\w.~/$}])/(?:work|home|root|Users|mnt)/\w|/tmp/venv")
    suffixes = {".py", ".md", ".sh", ".toml", ".yml", ".yaml", ".json", ".jsonl"}
    folders = ("dspark_jax", "tests", "configs", "launch", "colab", "docs", ".ci")
    files = [
        p for folder in folders for p in (REPOSITORY / folder).rglob("*") if p.suffix in suffixes or p.name == "run"
    ]
    files += [p for p in REPOSITORY.iterdir() if p.suffix in suffixes]
    found = [
        f"{path.relative_to(REPOSITORY)}:{number}"
        for path in files
        if path != Path(__file__) and path.is_file()
        for number, line in enumerate(path.read_text(errors="replace").splitlines(), 1)
        if places.search(line)
    ]
    assert not found, f"machine-specific paths in {found}"


def test_the_checks_can_fail(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """The rules above on a made-up package that breaks them."""
    monkeypatch.setitem(globals(), "PACKAGE", tmp_path)
    for part in ("spec", "draft", "nn"):
        (tmp_path / part).mkdir()
    module = tmp_path / "spec" / "verify.py"
    module.write_text(
        "from dspark_jax import engine\nfrom ..draft import dspark\nimport dspark_jax.nn.rope\nfrom . import x\n"
    )
    (tmp_path / "engine.py").touch()
    assert imported_parts(module) >= {"engine", "draft", "nn", "spec"}
    assert [n for n in sorted(imported_parts(module)) if not allowed("spec", n)] == ["draft", "engine"]
    assert allowed("evaluation", "engine") and not allowed("engine", "evaluation")
    with pytest.raises(AssertionError, match="belongs to no layer"):
        layer_of("utils")
    for source in ("import sys\nsys.argv", "from sys import argv", "import tyro", "from tyro import conf"):
        module.write_text(source)
        assert reads_command_line(module)
