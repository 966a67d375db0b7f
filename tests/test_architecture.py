"""Rules for the source: import directions, sizes, names, forbidden constructs.

Each rule is a function from source text to findings. `test_a_planted_violation_is_seen` proves with
a planted violation that each rule works.
"""

from __future__ import annotations

import ast
import importlib
import pkgutil
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

import mxpert

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = ROOT / "mxpert"
FILES = sorted(path for path in PACKAGE.rglob("*.py"))
SOURCES = FILES + [
    path
    for folder in ("tests", "examples", "benchmarks", "gfx950-emulator")
    for path in sorted((ROOT / folder).rglob("*.py"))
]

# Higher layers import lower ones, never the other way; a layer may import itself.
LAYERS = {
    "environment": 0,
    "required": 0,
    "errors": 0,
    "interrupts": 0,
    "files": 1,
    "activations": 1,
    "formats": 1,
    "problem": 2,
    "configs": 2,
    "kernel_spec": 2,
    "routing": 2,
    "weights": 2,
    "weights_state": 2,
    "published": 2,
    "runtime": 3,
    "dispatch": 4,
    "ops": 5,
    "modules": 6,
    "distributed": 6,
    "training": 7,
    "integrations": 8,
    "cli": 9,
}
BACKENDS_MAY_IMPORT = {
    "errors",
    "formats",
    "kernel_spec",
    "problem",
    "routing",
    "runtime",
    "weights",
}
DISTRIBUTED_MAY_IMPORT = ["backends", "common", "exchange"]
"""The kernels of one transport, which no op has; `distributed` imports them when it takes it."""
USES_TRITON = ("backends", "runtime", "testing")
MAY_IMPORT_TESTING = {"cli", "testing"}
MAX_FILE_LINES = 500
MAX_FUNCTION_LINES = 80
MAX_POSITIONAL = 8
CONTRACT = ("Roles:", "Barriers:", "Pipeline:", "Timeline:")
"""Parts of a warp-specialised kernel's contract; every other kernel states its grid."""
ASSERT_MARKERS = ("for the type checker", "checked by", "checked at")
FORBIDDEN_NAMES = frozenset(
    (
        "D_HIDDEN",
        "D_INTER",
        "NE",
        "expt_indx",
        "gate_scal",
        "hist",
        "cumsum",
        "m_indices",
        "eids",
        "cumsum0",
        "SBM",
        "shuffle",
        "expert_mask",
        "aq",
        "ascale",
        "sf",
        "BM",
        "kBlock",
        "w1",
        "w3",
        "w13",
        "g1u1",
        "il",
        "sep",
        "dim0",
        "dim1",
        "preshuffled",
        "kAStages",
        "use_nt",
    )
)
EXCEPTIONS: dict[tuple[str, str], str] = {
    # (rule, "file" or "file::function"): reason
    (
        "import_directions",
        "mxpert/ops/moe.py",
    ): "type of a public argument, for type checkers alone",
    (
        "import_directions",
        "mxpert/ops/warm_up.py",
    ): "type of a public argument, for type checkers alone",
}


def module_parts(path: Path) -> tuple[str, ...]:
    """("formats", "codec") for mxpert/formats/codec.py; () for mxpert/__init__.py."""
    parts = path.relative_to(PACKAGE).with_suffix("").parts
    return parts[:-1] if parts[-1] == "__init__" else parts


def imported_modules(tree: ast.AST, path: Path) -> Iterator[str]:
    """Absolute names of imported modules, relative imports resolved; type-only imports included."""
    package = ("mxpert", *path.relative_to(PACKAGE).parts[:-1])
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else ()
            name = ".".join((*base, *(node.module or "").split("."))).strip(".")
            yield name
            if (node.level and not node.module) or name == "mxpert":
                yield from (f"{name}.{alias.name}" for alias in node.names)


def functions(tree: ast.AST) -> Iterator[ast.FunctionDef | ast.AsyncFunctionDef]:
    return (
        node for node in ast.walk(tree) if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef))
    )


def import_directions(text: str, path: Path) -> Iterator[str]:
    """cli → integrations → training → distributed → ops → dispatch → backends … → errors."""
    parts = module_parts(path)
    here = parts[0] if parts else ""
    for name in imported_modules(ast.parse(text), path):
        target = name.split(".")
        if target[0] != "mxpert" or len(target) == 1 or not here:
            continue
        there = target[1]
        if there == "testing" and here not in MAY_IMPORT_TESTING:
            yield f"imports {name}: testing serves cli, tests and benchmarks alone"
        elif here == "backends":
            sibling = there == "backends" and bool({*target[2:3]} & {*parts[1:2], "common"})
            if not sibling and there not in BACKENDS_MAY_IMPORT:
                yield f"imports {name}: a backend imports the core and its own package"
        elif there == "backends":
            exchange = here == "distributed" and target[1:4] == DISTRIBUTED_MAY_IMPORT
            if here != "testing" and not exchange:
                yield f"imports {name}: backends are reached through dispatch"
        elif here in LAYERS and LAYERS.get(there, -1) > LAYERS[here]:
            yield f"imports {name}, which lies above {here}"


def triton_stays_below(text: str, path: Path) -> Iterator[str]:
    """`import mxpert` works where there is no Triton: few packages may import it."""
    if module_parts(path)[:1] and module_parts(path)[0] in USES_TRITON:
        return
    for name in imported_modules(ast.parse(text), path):
        if name.split(".")[0] == "triton":
            yield f"imports {name}"


def file_size(text: str, path: Path) -> Iterator[str]:
    lines = text.count("\n")
    if lines > MAX_FILE_LINES:
        yield f"has {lines} lines; split it"


def function_size(text: str, path: Path) -> Iterator[str]:
    for node in functions(ast.parse(text)):
        lines = (node.end_lineno or node.lineno) - node.lineno + 1
        if lines > MAX_FUNCTION_LINES:
            yield f"::{node.name} has {lines} lines; split it"


def no_assert(text: str, path: Path) -> Iterator[str]:
    """Input checks raise errors; an assert may only narrow a type, with a comment that says so."""
    lines = text.splitlines()
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Assert):
            written = lines[node.lineno - 1 : node.end_lineno]
            if not any(marker in line for line in written for marker in ASSERT_MARKERS):
                yield (
                    f"line {node.lineno}: assert; raise an error in the library's form (or say "
                    f"'{ASSERT_MARKERS[0]}' in a comment where it only narrows a type)"
                )


def inline_assembly(text: str, path: Path) -> Iterator[str]:
    """Inline assembly lives in a backend's ptx.py (NVIDIA) or gcn.py (AMD)."""
    if "inline_asm" in text and path.name not in ("ptx.py", "gcn.py"):
        yield "uses inline assembly outside ptx.py and gcn.py"


def reads_environment(text: str, path: Path) -> Iterator[str]:
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Attribute) and node.attr in ("environ", "getenv"):
            yield f"line {node.lineno}: {node.attr}"


def is_public(name: str) -> bool:
    return not name.startswith("_")


def forbidden_names(text: str, path: Path) -> Iterator[str]:
    """Parameters and names of public functions and fields of public classes use the glossary."""
    tree = ast.parse(text)
    for node in functions(tree):
        if not is_public(node.name):
            continue
        arguments = node.args
        names = [
            argument.arg
            for argument in (*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs)
        ]
        for name in (node.name, *names):
            if name in FORBIDDEN_NAMES:
                yield f"::{node.name} uses {name!r}; see the glossary in CONTRIBUTING.md"
    for node in ast.walk(tree):
        if isinstance(node, ast.ClassDef) and is_public(node.name):
            for field in node.body:
                if (
                    isinstance(field, ast.AnnAssign)
                    and isinstance(field.target, ast.Name)
                    and field.target.id in FORBIDDEN_NAMES
                ):
                    yield f"::{node.name} has field {field.target.id!r}"


def jitted(tree: ast.AST) -> Iterator[ast.FunctionDef]:
    """Functions that Triton or Gluon compiles."""
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef):
            for decorator in node.decorator_list:
                made = decorator.func if isinstance(decorator, ast.Call) else decorator
                if isinstance(made, ast.Attribute) and made.attr == "jit":
                    yield node


def literal_subscripts(text: str, path: Path) -> Iterator[str]:
    """Jitted code names the parts of what it passes: `tile.expert`, never `tile[1]`."""
    for function in jitted(ast.parse(text)):
        for node in ast.walk(function):
            if not isinstance(node, ast.Subscript):
                continue
            index = node.slice.operand if isinstance(node.slice, ast.UnaryOp) else node.slice
            of_shape = isinstance(node.value, ast.Attribute) and node.value.attr == "shape"
            if isinstance(index, ast.Constant) and type(index.value) is int and not of_shape:
                yield f"::{function.name} line {node.lineno}: {ast.unparse(node)}"


def positional_arguments(text: str, path: Path) -> Iterator[str]:
    """Calls in jitted code with many arguments pass them by keyword."""
    for function in jitted(ast.parse(text)):
        for node in ast.walk(function):
            if isinstance(node, ast.Call) and len(node.args) > MAX_POSITIONAL:
                yield (
                    f"::{function.name} line {node.lineno}: {ast.unparse(node.func)} gets "
                    f"{len(node.args)} positional arguments"
                )


def kernel_contracts(text: str, path: Path) -> Iterator[str]:
    """A kernel states its grid; a warp-specialised one its roles, barriers, depth and timeline."""
    tree = ast.parse(text)
    for function in jitted(tree):
        if not function.name.endswith("_kernel"):
            continue
        stated = f"{ast.get_docstring(tree)}\n{ast.get_docstring(function)}"
        specialised = any(
            isinstance(node, ast.Attribute) and node.attr == "warp_specialize"
            for node in ast.walk(function)
        )
        for part in CONTRACT if specialised else ("Grid:",):
            if part not in stated:
                yield f"::{function.name} does not state {part!r} in its docstring or its file's"


Rule = Callable[[str, Path], Iterator[str]]
PACKAGE_RULES: dict[str, Rule] = {
    "import_directions": import_directions,
    "triton_stays_below": triton_stays_below,
    "no_assert": no_assert,
    "inline_assembly": inline_assembly,
    "forbidden_names": forbidden_names,
    "literal_subscripts": literal_subscripts,
    "positional_arguments": positional_arguments,
    "kernel_contracts": kernel_contracts,
}
SIZE_RULES: dict[str, Rule] = {"file_size": file_size, "function_size": function_size}


def findings(rule: str, check: Rule, paths: list[Path]) -> list[str]:
    """Findings of a rule in files, without the listed exceptions."""
    found = []
    for path in paths:
        name = path.relative_to(ROOT).as_posix()
        for text in check(path.read_text(encoding="utf-8"), path):
            place = name + (text.split(" ", 1)[0] if text.startswith("::") else "")
            if (rule, place) not in EXCEPTIONS and (rule, name) not in EXCEPTIONS:
                found.append(f"{name}: {text}")
    return found


@pytest.mark.parametrize("rule", PACKAGE_RULES)
def test_the_package_keeps(rule: str) -> None:
    found = findings(rule, PACKAGE_RULES[rule], FILES)
    assert not found, "\n".join(found)


@pytest.mark.parametrize("rule", SIZE_RULES)
def test_every_source_keeps(rule: str) -> None:
    found = findings(rule, SIZE_RULES[rule], SOURCES)
    assert not found, "\n".join(found)


def test_every_package_has_a_layer() -> None:
    packages = {module_parts(path)[0] for path in FILES if module_parts(path)}
    assert packages == {*LAYERS, "backends", "testing", "__main__"}


def test_the_environment_is_read_in_one_place() -> None:
    readers = {
        path.relative_to(ROOT).as_posix(): list(
            reads_environment(path.read_text(encoding="utf-8"), path)
        )
        for path in FILES
    }
    readers = {name: places for name, places in readers.items() if places}
    assert len(readers) <= 1, f"environment read in {readers}"


def test_exceptions_are_still_needed() -> None:
    rules = PACKAGE_RULES | SIZE_RULES
    for (rule, place), reason in EXCEPTIONS.items():
        path = ROOT / place.split("::")[0]
        assert path.is_file(), f"{place}: gone; drop its exception"
        assert reason, f"{place}: an exception needs a reason"
        assert list(rules[rule](path.read_text(encoding="utf-8"), path)), f"{place}: not needed"


PLANTED = [
    pytest.param(
        import_directions,
        "formats/planted.py",
        "from ..ops.moe import fused_moe",
        id="formats-imports-ops",
    ),
    pytest.param(
        import_directions,
        "backends/triton/planted.py",
        "from ...dispatch import resolve",
        id="backend-imports-dispatch",
    ),
    pytest.param(
        import_directions,
        "backends/triton/planted.py",
        "from ..reference import KERNELS",
        id="backend-imports-another",
    ),
    pytest.param(
        import_directions,
        "ops/planted.py",
        "import mxpert.testing.timing",
        id="ops-imports-testing",
    ),
    pytest.param(
        import_directions, "ops/planted.py", "from mxpert import cli", id="ops-imports-cli"
    ),
    pytest.param(
        import_directions,
        "distributed/planted.py",
        "from ..backends.common import routing",
        id="distributed-imports-a-backend",
    ),
    pytest.param(
        triton_stays_below,
        "ops/planted.py",
        "import triton.language as tl",
        id="ops-imports-triton",
    ),
    pytest.param(file_size, "ops/planted.py", "x = 1\n" * 501, id="long-file"),
    pytest.param(
        function_size, "ops/planted.py", "def f():\n" + "    x = 1\n" * 80, id="long-function"
    ),
    pytest.param(no_assert, "ops/planted.py", "assert x", id="bare-assert"),
    pytest.param(
        inline_assembly, "backends/triton/moe/host.py", "tl.inline_asm_elementwise()", id="assembly"
    ),
    pytest.param(
        reads_environment, "ops/planted.py", "import os\nos.environ['X']", id="environment"
    ),
    pytest.param(forbidden_names, "ops/planted.py", "def op(expert_mask): ...", id="argument-name"),
    pytest.param(forbidden_names, "ops/planted.py", "class A:\n    sf: int", id="field-name"),
    pytest.param(
        literal_subscripts,
        "backends/hopper/planted.py",
        "@gluon.jit\ndef f(tile):\n    return tile[1] + x.shape[0]",
        id="tuple-subscript",
    ),
    pytest.param(
        literal_subscripts,
        "backends/hopper/planted.py",
        "@triton.jit(noinline=True)\ndef f(tile):\n    return tile[-1]",
        id="negative-subscript",
    ),
    pytest.param(
        positional_arguments,
        "backends/hopper/planted.py",
        "@gluon.jit\ndef f():\n    g(1, 2, 3, 4, 5, 6, 7, 8, 9)",
        id="nine-positional-arguments",
    ),
    pytest.param(
        kernel_contracts,
        "backends/hopper/planted.py",
        '@gluon.jit\ndef _f_kernel():\n    """Roles: … Barriers: … Pipeline: …"""\n'
        "    gl.warp_specialize([])",
        id="no-timeline",
    ),
    pytest.param(
        kernel_contracts,
        "backends/triton/planted.py",
        '@triton.jit\ndef _f_kernel():\n    """Add."""',
        id="no-grid",
    ),
]


@pytest.mark.parametrize(("check", "place", "text"), PLANTED)
def test_a_planted_violation_is_seen(check: Rule, place: str, text: str) -> None:
    assert list(check(text, PACKAGE / place))


def test_every_public_name_exists_and_has_a_docstring() -> None:
    missing = []
    for module in public_modules():
        for name in getattr(module, "__all__", ()):
            value = getattr(module, name)
            documented = getattr(value, "__doc__", None)
            if (callable(value) or isinstance(value, type)) and not (documented or "").strip():
                missing.append(f"{module.__name__}.{name}")
    assert not missing, missing


def public_modules() -> Iterator[object]:
    yield mxpert
    for found in pkgutil.walk_packages(mxpert.__path__, "mxpert."):
        inner = found.name.split(".")[1:]
        if inner[0] not in ("backends", "cli", "testing") and all(map(is_public, inner)):
            yield importlib.import_module(found.name)
