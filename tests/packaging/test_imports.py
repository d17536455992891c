"""Imports go down only. Every file is parsed, and each import is held against the tables below.

What a folder may know is the design: kernels take tensors and numbers and never hear of requests or models;
the arithmetic on blocks runs without torch; triton is imported where it is launched, and only there.
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from fnmatch import fnmatchcase
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

LAYERS = (
    "__main__ cli benchmarks examples",
    "engine parity testing",
    "patching",
    "call_arguments drafts generate_checks",
    "cache cached_forward",
    "backward batch_plan forward_inputs history prospect rows model_adapters",
    "manager",
    "accounts admission audit checkpoints filing sanitizer",
    "room roster guard",
    "group_manager",
    "request usage demand plan pending_ops budget shadow",
    "schemes",
    "block_pool prefix_cache hit_rules prefix_hit prefix_tree retention eviction storage",
    "arena slab_pool block_table multi_group_block_table page_index geometry step_buffers",
    "slab_plan",
    "ops",
    "kernels",
    "specs",
    "errors constants sizes",
)
"""Highest first. A part, a module or a folder of kvgroups, imports its own layer and those below it."""

ONLY = {"kernels": "constants", "ops": "kernels errors constants"}
"""Parts that know even less than their layer allows."""

ONLY_FROM = {"kernels": "ops testing"}
"""Parts that few others may import: there is one dispatch point, and the report on what is compiled."""

LIBRARIES_ONLY_IN = {
    "triton": "kvgroups.kernels.*.triton_impl kvgroups.kernels.*.triton_ragged "
    "kvgroups.testing.dry_driver kvgroups.testing.machine_code",
    "transformers": "kvgroups.model_adapters* kvgroups.cache* kvgroups.patching* kvgroups.parity* "
    "kvgroups.specs.infer kvgroups.specs.model_kind kvgroups.specs.probe kvgroups.engine.sampling kvgroups.testing* "
    "kvgroups.cli* benchmarks* examples*",
}
"""Patterns of the modules that may import the library at all."""

LIGHT = (
    "kvgroups kvgroups.constants kvgroups.errors kvgroups.geometry kvgroups.block_pool "
    "kvgroups.prefix_cache kvgroups.retention kvgroups.eviction "
    "kvgroups.slab_plan kvgroups.slab_pool kvgroups.demand kvgroups.usage kvgroups.plan kvgroups.schemes "
    "kvgroups.specs kvgroups.specs.* !kvgroups.specs.probe"
)
"""Patterns of the modules that are imported without torch; `!` takes one out."""

NOT_WHEN_IMPORTED = {
    "torch": LIGHT,
    "transformers": LIGHT,
    "kvgroups.specs.probe": LIGHT,
    "kvgroups.kernels.*.triton_impl": "* !kvgroups.kernels.*.triton_impl",
    "kvgroups.kernels.*.triton_ragged": "* !kvgroups.kernels.*.triton_impl",
}
"""What these modules import inside a function, or for a type checker, only: importing them stays light."""


@dataclass(frozen=True)
class Import:
    """One imported name: `from kvgroups import ops` in `kvgroups.cache` has the target `kvgroups.ops`."""

    module: str
    target: str
    line: int
    when_imported: bool
    """Not inside a function, and not for a type checker only."""

    def __str__(self) -> str:
        return f"{self.module}:{self.line} imports {self.target}"


def matches(name: str, patterns: str) -> bool:
    hits = [pattern for pattern in patterns.split() if fnmatchcase(name, pattern.removeprefix("!"))]
    return bool(hits) and not any(pattern.startswith("!") for pattern in hits)


def part(module: str) -> str:
    """`kvgroups.specs.base` -> `specs`, `benchmarks.decode` -> `benchmarks`, and `kvgroups` itself."""
    return module.removeprefix("kvgroups.").split(".")[0]


def layer(name: str) -> int | None:
    return next((depth for depth, parts in enumerate(LAYERS) if name in parts.split()), None)


def imports(module: str, source: str, modules: set[str], is_package: bool = False) -> Iterator[Import]:
    """Every import in a module's source. `modules` tells which names imported from a package are modules."""
    package = module if is_package else module.rpartition(".")[0]

    def visit(node: ast.AST, when_imported: bool) -> Iterator[Import]:
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.Import):
                targets = [alias.name for alias in child.names]
            elif isinstance(child, ast.ImportFrom):
                base = package.split(".")
                base = base[: len(base) - child.level + 1] if child.level else []
                home = ".".join([*base, *([child.module] if child.module else [])])
                named = [f"{home}.{alias.name}" for alias in child.names]
                targets = sorted({name if name in modules else home for name in named})
            else:
                is_function = isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda)
                is_typing = isinstance(child, ast.If) and ast.unparse(child.test).endswith("TYPE_CHECKING")
                yield from visit(child, when_imported and not is_function and not is_typing)
                continue
            for target in targets:
                yield Import(module, target, child.lineno, when_imported)

    return visit(ast.parse(source), True)


def violations(found: list[Import]) -> list[str]:
    """The imports that a table above forbids, each with the reason."""
    wrong = []
    for each in found:
        here, there = part(each.module), part(each.target)
        root = each.target.split(".")[0]
        if root in ("specs", "kernels", "model_adapters"):
            wrong.append(f"{each}: write kvgroups.{root}, or its classes exist twice")
        for library, patterns in LIBRARIES_ONLY_IN.items():
            if root == library and not matches(each.module, patterns):
                wrong.append(f"{each}: only the modules in LIBRARIES_ONLY_IN know {library}")
        for target, patterns in NOT_WHEN_IMPORTED.items():
            is_target = root == target or matches(each.target, target)
            if each.when_imported and is_target and matches(each.module, patterns):
                wrong.append(f"{each}: import it inside the function that needs it")
        if root != "kvgroups" or here in ("kvgroups", there):
            continue  # the root names what is public, and imports it when it is asked for
        if there == "kvgroups":
            if layer(here) != 0:
                wrong.append(f"{each}: import the module that defines the name")
        elif layer(here) is None or layer(there) is None:
            unknown = here if layer(here) is None else there
            wrong.append(f"{each}: {unknown} is in no layer, give it one in LAYERS")
        elif layer(there) < layer(here):
            wrong.append(f"{each}: {there} is a layer above {here}")
        elif here in ONLY and there not in ONLY[here].split():
            wrong.append(f"{each}: {here} knows only {ONLY[here]}")
        elif there in ONLY_FROM and here not in ONLY_FROM[there].split():
            wrong.append(f"{each}: only {' and '.join(ONLY_FROM[there].split())} imports {there}")
    return wrong


def sources(root: Path) -> dict[str, Path]:
    """Module name, as it is imported, -> file. The tests are not among them: they may look anywhere."""
    files = {}
    for top in ("kvgroups", "specs", "kernels", "model_adapters", "benchmarks", "examples"):
        for file in (root / top).rglob("*.py"):
            parts = file.relative_to(root).with_suffix("").parts
            prefix = () if top in ("kvgroups", "benchmarks", "examples") else ("kvgroups",)
            files[".".join(prefix + parts).removesuffix(".__init__")] = file
    return files


@pytest.fixture(scope="module")
def found(root: Path) -> list[Import]:
    files = sources(root)
    return [
        each
        for module, file in files.items()
        for each in imports(module, file.read_text(), set(files), is_package=file.name == "__init__.py")
    ]


def test_imports_go_down(found: list[Import]):
    assert not (wrong := violations(found)), "\n".join(wrong)


def test_no_two_modules_need_each_other_to_be_imported(found: list[Import]):
    graph: dict[str, set[str]] = {}
    for each in found:
        if each.when_imported and each.target.startswith("kvgroups.") and each.target != each.module:
            graph.setdefault(each.module, set()).add(each.target)
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        pytest.fail(f"import cycle: {' -> '.join(error.args[1])}")


@pytest.mark.parametrize(
    ("module", "source", "reason"),
    [
        ("kvgroups.specs.base", "from kvgroups.manager import Manager", "manager is a layer above specs"),
        ("kvgroups.specs.base", "from .. import manager", "manager is a layer above specs"),
        ("kvgroups.geometry", "def f():\n    import kvgroups.cache", "cache is a layer above geometry"),
        (
            "kvgroups.kernels.write_kv.reference",
            "from kvgroups.specs import MambaSpec",
            "knows only constants",
        ),
        (
            "kvgroups.kernels.write_kv.reference",
            "from kvgroups.errors import ShapeError",
            "knows only constants",
        ),
        ("kvgroups.cache", "from kvgroups.kernels.write_kv import torch_impl", "only ops and testing imports kernels"),
        ("kvgroups.manager", "import kvgroups", "import the module that defines the name"),
        ("kvgroups.manager", "from kvgroups.nonsense import x", "nonsense is in no layer"),
        ("kvgroups.nonsense", "from kvgroups.errors import SpecError", "nonsense is in no layer"),
        ("kvgroups.specs.groups", "from specs.base import Spec", "its classes exist twice"),
        ("kvgroups.ops", "import triton.language as tl", "know triton"),
        ("kvgroups.block_table", "def f():\n    import transformers", "know transformers"),
        ("kvgroups.specs.base", "import torch", "inside the function"),
        ("kvgroups.block_pool", "class A:\n    from torch import Tensor", "inside the function"),
        ("kvgroups.specs.infer", "from transformers import Cache", "inside the function"),
        ("kvgroups.specs.infer", "from kvgroups.specs.probe import probe", "inside the function"),
        ("kvgroups.ops", "from kvgroups.kernels.write_kv import triton_impl", "inside the function"),
    ],
)
def test_a_planted_import_is_seen(module: str, source: str, reason: str):
    op = "kvgroups.kernels.write_kv"
    modules = {"kvgroups.manager", f"{op}.torch_impl", f"{op}.triton_impl"}
    (violation,) = violations(list(imports(module, source, modules)))
    assert reason in violation


@pytest.mark.parametrize(
    ("module", "source"),
    [
        ("kvgroups.specs.infer", "def infer_config():\n    import torch, transformers"),
        ("kvgroups.specs.probe", "import torch, transformers"),
        ("kvgroups.specs.base", "if TYPE_CHECKING:\n    import torch"),
        ("kvgroups.ops", "def launch():\n    from kvgroups.kernels.write_kv import triton_impl"),
        ("kvgroups.block_table", "import torch\nfrom kvgroups import ops, specs"),
        ("kvgroups.cli.main", "import kvgroups\nfrom kvgroups.parity import check_parity"),
        ("kvgroups", "from kvgroups.errors import SpecError"),
    ],
)
def test_an_allowed_import_passes(module: str, source: str):
    modules = {"kvgroups.ops", "kvgroups.specs", "kvgroups.kernels.write_kv.triton_impl"}
    assert not violations(list(imports(module, source, modules)))


@pytest.mark.parametrize("module", ["kvgroups", "kvgroups.specs", "kvgroups.geometry", "kvgroups.block_pool"])
def test_a_light_module_is_imported_without_torch(module: str, root: Path, run):
    """The tables hold what each file says; this holds what the import in fact pulls in."""
    heavy = "{'torch', 'transformers', 'triton'}"
    run(sys.executable, "-c", f"import {module}, sys; assert not {heavy} & set(sys.modules)", cwd=root)
