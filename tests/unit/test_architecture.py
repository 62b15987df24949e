"""The rules that hold the package together, checked on its syntax trees."""

import ast
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
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


def parse(source: Path) -> ast.Module:
    return ast.parse(source.read_text())


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


HANDLE, PREPARE = PACKAGE / "model_handle.py", PACKAGE / "parallel" / "prepare.py"
SHARDS, BENCH = PACKAGE / "models" / "shards.py", PACKAGE / "measure" / "bench.py"

ROOMS = {
    "DistributedDataParallel": {HANDLE, PREPARE},
    "DataParallel": {HANDLE},
    "torch.nn.parallel": {HANDLE, PREPARE},
    "FSDPModule": {HANDLE},
    "FullyShardedDataParallel": {HANDLE},
    "torch.distributed.fsdp": {HANDLE, PREPARE},
    "OptimizedModule": {HANDLE},
    "torch._dynamo.eval_frame": {HANDLE},
    "DTensor": {SHARDS},
    "torch.distributed.tensor": {SHARDS},
    "forward_module": {HANDLE, BENCH},
}
"""Names, and modules with all that is in them, that only these files may know."""


def rooms_entered(tree: ast.AST) -> Iterator[tuple[str, str]]:
    """Every mention of what has a room of its own, in any spelling: (key of `ROOMS`, where)."""

    def entered(*spellings: str) -> Iterator[str]:
        for room in ROOMS:
            if any(f".{spelling}.".find(f".{room}.") >= 0 for spelling in spellings):
                yield room

    for node in ast.walk(tree):
        found: Iterator[str] = iter(())
        if isinstance(node, ast.Import):
            found = entered(*(alias.name for alias in node.names))
        elif isinstance(node, ast.ImportFrom):
            found = entered(*(f"{node.module}.{alias.name}" for alias in node.names))
        elif isinstance(node, ast.Attribute):
            found = entered(ast.unparse(node) if _is_chain(node) else node.attr)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            # For getattr, attrgetter, import_module and annotations; text about it is longer than the name.
            found = entered(node.value) if " " not in node.value else iter(())
        elif isinstance(node, ast.MatchClass):
            found = entered(*node.kwd_attrs)
        for room in found:
            yield room, f"line {node.lineno}: {ast.unparse(node)}"


def _is_chain(node: ast.expr) -> bool:
    return isinstance(node, ast.Name) or (isinstance(node, ast.Attribute) and _is_chain(node.value))


def bare_calls(tree: ast.AST) -> Iterator[str]:
    """Every call of a `meta_module`, also through a name that it was given, or through its `forward`."""

    def is_bare(node: ast.expr) -> bool:
        if isinstance(node, ast.NamedExpr):
            return is_bare(node.value)
        return ast.unparse(node) in aliases or (isinstance(node, ast.Attribute) and node.attr == "meta_module")

    aliases: set[str] = set()
    while True:
        known = len(aliases)
        for node in ast.walk(tree):
            if isinstance(node, ast.Assign):
                for target in node.targets:
                    aliases.update(_named_alike(target, node.value, is_bare))
            elif isinstance(node, ast.AnnAssign | ast.NamedExpr) and node.value is not None:
                aliases.update(_named_alike(node.target, node.value, is_bare))
        if len(aliases) == known:
            break
    for node in ast.walk(tree):
        if isinstance(node, ast.Call):
            called = node.func
            if isinstance(called, ast.Attribute) and called.attr in ("forward", "__call__"):
                called = called.value
            if is_bare(called):
                yield f"line {node.lineno}: {ast.unparse(node)}"


def _named_alike(target: ast.expr, value: ast.expr, is_bare: Callable[[ast.expr], bool]) -> Iterator[str]:
    if isinstance(target, ast.Tuple | ast.List) and isinstance(value, ast.Tuple | ast.List):
        for part, given in zip(target.elts, value.elts, strict=False):
            yield from _named_alike(part, given, is_bare)
    elif is_bare(value):
        yield ast.unparse(target)


@pytest.mark.parametrize("source", SOURCES, ids=name_of)
def test_wrappers_shards_and_what_is_called_stay_in_their_rooms(source: Path) -> None:
    tree = parse(source)
    assert [where for room, where in rooms_entered(tree) if source not in ROOMS[room]] == []
    assert list(bare_calls(tree)) == []


def test_every_room_is_used_by_all_who_may_enter() -> None:
    for source in sorted({source for sources in ROOMS.values() for source in sources}):
        used = {room for room, _ in rooms_entered(parse(source))}
        assert used == {room for room, sources in ROOMS.items() if source in sources}, name_of(source)


@pytest.mark.parametrize(
    "line",
    [
        "handle.forward_module.num_blocks",
        "m = handle.forward_module; m.config",
        "getattr(handle, 'forward_module').config",
        "handle.meta_module(video=video, audio=audio)",
        "model = handle.meta_module; model(video=video)",
        "self._model, other = handle.meta_module, 1; self._model.forward(video=video)",
        "from torch.nn.parallel import DistributedDataParallel as DDP",
        "import torch.distributed.fsdp as f; f.fully_shard(model)",
        "isinstance(model, torch.nn.parallel.DistributedDataParallel)",
        "from torch import nn; isinstance(model, nn.parallel.distributed.DistributedDataParallel)",
        "from torch.distributed import fsdp",
        "from torch._dynamo import OptimizedModule",
        "from torch.nn.parallel import *",
        "def of(t: 'DTensor') -> None: ...",
        "sys.modules['torch.distributed.tensor'].Shard",
        "import torch.distributed.tensor",
    ],
)
def test_the_rule_of_rooms_would_see_it(line: str) -> None:
    assert [*rooms_entered(ast.parse(line)), *bare_calls(ast.parse(line))]


@pytest.mark.parametrize(
    "line",
    [
        "video, audio = handle(video=video, audio=audio, perturbations=None)",
        "blocks = handle.meta_module.transformer_blocks; blocks[0](**arguments)",
        "names = dict(handle.meta_module.named_parameters())",
        "ModelHandle(forward_module=wrapped, meta_module=bare)",
        "import torch.distributed as dist; dist.all_reduce(sums)",
        "from torch.distributed.device_mesh import init_device_mesh",
        "raise TypeError('a DTensor cannot be written here: pass its local part')",
        "is_sharded(tensor)",
        "model = transformer; model(video=video)",
        "import torch.distributed.checkpoint as dcp",
    ],
)
def test_the_rule_of_rooms_lets_it_pass(line: str) -> None:
    assert [*rooms_entered(ast.parse(line)), *bare_calls(ast.parse(line))] == []


@pytest.mark.parametrize("source", SOURCES, ids=name_of)
def test_only_the_model_handle_knows_that_wrappers_exist(source: Path) -> None:
    peels = list(wrapper_peels(parse(source)))
    if source == PACKAGE / "model_handle.py":
        assert peels  # the rule is looking at the right thing
    else:
        assert not peels


@pytest.mark.parametrize("source", SOURCES, ids=name_of)
def test_only_the_topology_reads_the_environment(source: Path) -> None:
    reads = list(environment_reads(parse(source)))
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


PROCESSES = {
    "parallel": "spreads the model over all processes",
    "preparation/prepare.py": "every process encodes files of its own",
    "commands/prepare.py": "says whose files it tells of",
    "run/loop.py": "a process alone has nobody to agree with",
    "run/plan_report.py": "says how many there are",
    "trainer.py": "says which process failed",
    "validation/runner.py": "says which process failed",
}
"""Who may ask a topology for its processes, and why. Whatever is about samples asks it for data ranks."""


def process_questions(tree: ast.AST) -> Iterator[str]:
    for node in ast.walk(tree):
        if not isinstance(node, ast.Attribute) or node.attr not in ("rank", "world_size"):
            continue
        if ast.unparse(node.value).rpartition(".")[2].lstrip("_") == "topology":
            yield f"line {node.lineno}: {ast.unparse(node)}"


def test_whatever_is_about_samples_asks_for_data_ranks_and_not_for_processes() -> None:
    asking = {source.relative_to(PACKAGE) for source in PACKAGE.rglob("*.py") if list(process_questions(parse(source)))}
    for name in PROCESSES:
        assert any(source.is_relative_to(name) for source in asking), name
    assert [source for source in asking if not any(source.is_relative_to(name) for name in PROCESSES)] == []


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

    for node in visit(parse(source)):
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
