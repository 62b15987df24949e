"""The rules that hold the package together, checked on its syntax trees."""

import ast
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "ltx_trainer_plus"
SOURCES = sorted([*PACKAGE.rglob("*.py"), *(ROOT / "scripts").rglob("*.py")])

PEELERS = {"module", "_orig_mod", "_checkpoint_wrapped_module", "_fsdp_wrapped_module"} | {
    "unwrap_model",
    "get_base_model",
    "extract_model_from_parallel",
}
MODELS = {"model", "transformer", "wrapped", "prepared", "forward_module", "meta_module"}


def name_of(source: Path) -> str:
    return str(source.relative_to(ROOT))


def wrapper_peels(tree: ast.AST) -> Iterator[str]:
    """Every place that looks into a model wrapper, or asks a model what it has."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and node.attr in PEELERS:
            yield f"line {node.lineno}: .{node.attr}"
        elif isinstance(node, ast.ImportFrom | ast.Import) and any(a.name in PEELERS for a in node.names):
            yield f"line {node.lineno}: imports {', '.join(a.name for a in node.names)}"
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in ("hasattr", "getattr"):
            subject = node.args[0]
            names_peeler = isinstance(node.args[1], ast.Constant) and node.args[1].value in PEELERS
            subject_name = getattr(subject, "attr", getattr(subject, "id", None))
            if names_peeler or subject_name in MODELS:
                yield f"line {node.lineno}: {ast.unparse(node)}"


def environment_reads(tree: ast.AST) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and node.attr in ("environ", "getenv", "putenv"):
            yield f"line {node.lineno}: .{node.attr}"
        elif isinstance(node, ast.ImportFrom) and any(a.name in ("environ", "getenv") for a in node.names):
            yield f"line {node.lineno}: from {node.module} import"


@pytest.mark.parametrize("source", SOURCES, ids=name_of)
def test_only_the_model_handle_knows_that_wrappers_exist(source: Path) -> None:
    peels = list(wrapper_peels(ast.parse(source.read_text())))
    if source == PACKAGE / "model_handle.py":
        assert peels  # the rule is looking at the right thing
    else:
        assert not peels


@pytest.mark.parametrize("source", SOURCES, ids=name_of)
def test_only_the_topology_reads_the_environment(source: Path) -> None:
    reads = list(environment_reads(ast.parse(source.read_text())))
    if source == PACKAGE / "parallel" / "topology.py":
        assert reads
    else:
        assert not reads


@pytest.mark.parametrize(
    "line",
    [
        "model.module.num_blocks",
        "accelerator.unwrap_model(model)",
        "getattr(thing, '_orig_mod', thing)",
        "hasattr(self.transformer, 'num_blocks')",
        "from accelerate.utils import extract_model_from_parallel",
    ],
)
def test_the_rule_would_see_it(line: str) -> None:
    assert list(wrapper_peels(ast.parse(line)))


def imports(source: Path) -> Iterator[str]:
    """Our modules that a module imports when it is itself imported, as parts of the package (`models`, `flow`, ...)."""

    def visit(node: ast.AST) -> Iterator[ast.stmt]:
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
                continue  # imported later, on purpose
            if isinstance(child, ast.If) and "TYPE_CHECKING" in ast.unparse(child.test):
                continue
            if isinstance(child, ast.Import | ast.ImportFrom):
                yield child
            yield from visit(child)

    for node in visit(ast.parse(source.read_text())):
        names = [alias.name for alias in node.names]
        if isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{name_of(source)}: relative import"
            names = [f"{node.module}.{name}" for name in names] if node.module == PACKAGE.name else [node.module or ""]
        for name in names:
            first, _, rest = name.partition(".")
            if first == PACKAGE.name and rest:
                yield rest.split(".")[0]


def test_imports_between_the_parts_point_one_way() -> None:
    graph: dict[str, set[str]] = {}
    for source in PACKAGE.rglob("*.py"):
        if source.parent == PACKAGE and source.name == "__init__.py":
            continue
        part = source.relative_to(PACKAGE).parts[0].removesuffix(".py")
        graph.setdefault(part, set()).update(set(imports(source)) - {part})
    assert {"models", "model_handle", "guidance"} <= graph.keys()

    while graph:
        lowest = {part for part, used in graph.items() if not used & graph.keys()}
        assert lowest, f"these import each other: {graph}"
        graph = {part: used for part, used in graph.items() if part not in lowest}


def test_every_module_can_be_the_first_to_be_imported() -> None:
    modules = [
        ".".join(source.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")
        for source in sorted(PACKAGE.rglob("*.py"))
    ]
    # One fresh interpreter for all: ours are forgotten between imports, torch and the like are not.
    program = f"""
import importlib, sys
for name in {modules!r}:
    for loaded in [m for m in sys.modules if m.partition(".")[0] == {PACKAGE.name!r}]:
        del sys.modules[loaded]
    try:
        importlib.import_module(name)
    except BaseException as error:
        sys.exit(f"importing {{name}} first: {{type(error).__name__}}: {{error}}")
"""
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    run = subprocess.run(
        [sys.executable, "-c", program], cwd=ROOT, env=environment, capture_output=True, text=True, check=False
    )
    assert run.returncode == 0, run.stderr
