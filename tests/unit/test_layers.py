"""The layers of `src/pgcdc`: who may know whom. Lazy and TYPE_CHECKING imports count."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

SOURCE = Path(__file__).parents[2] / "src"

MAY_KNOW = {
    "core": "",
    "postgres": "core",
    "spool": "core",
    "event": "core postgres spool",
    "source": "core postgres spool event",
    "capture": "core spool source",
    "sink": "core postgres event",
    "transform": "core event",
    "spark": "core postgres spool event source capture sink transform",
    "run": "core postgres spool event source capture sink transform spark",
}
"""Layers, lowest first. What is not listed (config, cli, playground, the public modules) stands above and may know all."""

REGISTRIES = {
    "pgcdc",
    "pgcdc.cli.main",
    "pgcdc.core.compiled",
    "pgcdc.sink.spec",
    "pgcdc.source.protocol",
    "pgcdc.transform",
}
"""Modules that import others of ours by name."""


def read_modules() -> dict[str, ast.Module]:
    found = {}
    for path in sorted((SOURCE / "pgcdc").rglob("*.py")):
        name = ".".join(path.relative_to(SOURCE).with_suffix("").parts).removesuffix(".__init__")
        found[name] = ast.parse(path.read_text())
    return found


MODULES = read_modules()


def imports_of(tree: ast.Module) -> Iterator[str]:
    """The modules of ours that are imported anywhere in a module."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names if alias.name.split(".")[0] == "pgcdc")
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "imports of this project are absolute"
            if node.module and node.module.split(".")[0] == "pgcdc":
                for alias in node.names:
                    full = f"{node.module}.{alias.name}"
                    yield full if full in MODULES else node.module


def layer_of(module: str) -> str:
    """The layer; of one source of several, `source.NAME`: only that source knows it, and what stands above `spark`."""
    parts = module.split(".")[1:]
    if parts[:1] == ["source"] and len(parts) > 1 and (SOURCE / "pgcdc" / "source" / parts[1]).is_dir():
        return ".".join(parts[:2])
    return parts[0] if parts and parts[0] in MAY_KNOW else ""


def is_allowed(layer: str, wanted: str) -> bool:
    own = layer.split(".", maxsplit=1)[0]
    if not own or wanted == layer:
        return True
    if wanted.startswith("source."):
        return own == "run"
    return wanted == own or wanted in MAY_KNOW[own].split()


def upward_edges() -> set[str]:
    return {
        f"{module} -> {wanted}"
        for module, tree in MODULES.items()
        for wanted in imports_of(tree)
        if not is_allowed(layer_of(module), layer_of(wanted))
    }


def test_no_layer_imports_from_one_above_it() -> None:
    assert sorted(upward_edges()) == []


def imports_by_name(tree: ast.Module) -> bool:
    """Whether a module calls `import_module` for a module of ours."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and node.args and ast.unparse(node.func).endswith("import_module"):
            argument = node.args[0].values[0] if isinstance(node.args[0], ast.JoinedStr) else node.args[0]
            if isinstance(argument, ast.Constant) and str(argument.value).startswith("pgcdc."):
                return True
    return False


def test_modules_of_this_project_are_imported_by_name_in_registries_only() -> None:
    found = {module for module, tree in MODULES.items() if imports_by_name(tree)}
    assert sorted(found - REGISTRIES) == []


def test_lower_layers_work_without_spark() -> None:
    layers = ["core", "postgres", "spool", "event", "source", "capture", "sink"]
    modules = [name for name in MODULES if layer_of(name).split(".")[0] in layers]
    assert len(modules) > 100
    program = f"""
import importlib, sys
sys.modules["pyspark"] = None
for name in {modules!r}:
    importlib.import_module(name)
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
