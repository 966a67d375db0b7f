"""Rules for the source: sizes, names, forbidden constructs, and tests that mirror the package.

Import directions are contracts of import-linter; see test_import_contracts.py. Each rule here is a
function from source text to findings, or from the whole package. Planted violations prove that each
rule works.
"""

from __future__ import annotations

import ast
import importlib
import pkgutil
import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
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

CHIPS = ("hopper", "cdna4", "triton")
OPS = ("moe", "grouped", "quantize", "routing", "training/rows")
USES_TRITON = re.compile(
    r"device/|testing/"
    r"|core/(binary|compilation|cuda_kernel|kernel_keys|launch|replay|toolchain)\.py"
    r"|distributed/exchange/"
    r"|moe/(combine|epilogue|finish|tiles|token_rows)\.py|quantize/dual_host\.py"
    rf"|({'|'.join(OPS)})/.*({'|'.join(CHIPS)})"
)
"""Files that may import Triton: device code, and the host code that launches it."""
NAMES_A_CHIP = re.compile("hopper|cdna4|gfx950|sm_90", re.IGNORECASE)
NAMES_NO_CHIP = re.compile(
    rf"(core|formats)/|(moe|grouped|quantize|routing)/(?!.*({'|'.join(CHIPS)}))"
)
"""Files of the core, and of the ops those of every chip; a chip's parts are in its manifest."""
MAX_FILE_LINES, MAX_KERNEL_FILE_LINES = 500, 900
MAX_HOST_LINES, MAX_COMPILED_LINES = 60, 80
"""Of a function, without its docstring."""
SMALL_MODULE = 60
MAX_POSITIONAL = 8
GENERIC_STEMS = {"host", "config", "op", "reference", "inputs"}
CONTRACT = ("Roles:", "Barriers:", "Pipeline:", "Timeline:")
"""Parts of a warp-specialised kernel's contract; every other kernel states its grid."""
ASSERT_MARKERS = ("for the type checker", "checked by", "checked at")
NOT_IN_THE_GLOSSARY = """
D_HIDDEN D_INTER NE expt_indx gate_scal hist cumsum m_indices eids cumsum0 SBM shuffle expert_mask
aq ascale sf BM kBlock w1 w3 w13 g1u1 il sep dim0 dim1 preshuffled kAStages use_nt
"""
FORBIDDEN_NAMES = frozenset(NOT_IN_THE_GLOSSARY.split())
EXCEPTIONS: dict[tuple[str, str], str] = {
    # (rule, "file" or "file::function"): reason
    ("thin_init", "mxpert/__init__.py"): "the public names, some of them imported at first use",
    ("thin_init", "mxpert/backends/__init__.py"): "one list registers the manifests",
    ("small_module", "mxpert/configs.py"): "a public module",
    ("small_module", "mxpert/integrations/transformers.py"): "a public module",
    ("small_module", "mxpert/required.py"): "stands before every other import",
    ("small_module", "mxpert/testing/_read_kernel.py"): "its importer works without Triton",
}
TESTED_ELSEWHERE: dict[str, str] = {
    # folder or file below tests/ without a module of its name: what it tests
    "benchmarks": "the scripts of benchmarks/",
    "conformance": "one suite for every backend and executor",
    "distributed/multi_gpu": "several GPUs of one host",
    "fuzz": "all public functions",
    "gfx950": "the package's kernels on the emulator",
    "integrations/serving": "plug-ins, in the environments of vLLM and SGLang",
    "outsider": "the wheel, outside of the checkout",
    "planted": "faults that other tests must see",
    "rigs": "what tests share",
    "support": "what tests share",
}


# ---- one file -----------------------------------------------------------------------------------


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
            yield from (f"{name}.{alias.name}" for alias in node.names)


def functions(tree: ast.AST) -> Iterator[ast.FunctionDef | ast.AsyncFunctionDef]:
    return (
        node for node in ast.walk(tree) if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef))
    )


def jitted(tree: ast.AST) -> Iterator[ast.FunctionDef]:
    """Functions that Triton or Gluon compiles."""
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef):
            for decorator in node.decorator_list:
                made = decorator.func if isinstance(decorator, ast.Call) else decorator
                if isinstance(made, ast.Attribute) and made.attr == "jit":
                    yield node


def triton_stays_below(text: str, path: Path) -> Iterator[str]:
    """`import mxpert` works where there is no Triton: few files may import it."""
    if USES_TRITON.match(path.relative_to(PACKAGE).as_posix()):
        return
    for name in imported_modules(ast.parse(text), path):
        if name.split(".")[0] == "triton":
            yield f"imports {name}"


def core_names_no_chip(text: str, path: Path) -> Iterator[str]:
    """A chip is added by its manifest and its kernels; no file of the core knows one."""
    if NAMES_NO_CHIP.match(path.relative_to(PACKAGE).as_posix()):
        for number, line in enumerate(text.splitlines(), 1):
            if NAMES_A_CHIP.search(line):
                yield f"line {number}: {line.strip()}"


def file_size(text: str, path: Path) -> Iterator[str]:
    lines = text.count("\n")
    most = MAX_KERNEL_FILE_LINES if any(jitted(ast.parse(text))) else MAX_FILE_LINES
    if lines > most:
        yield f"has {lines} lines; split it"


def lines_of(node: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    """Lines of a function without its docstring."""
    lines = (node.end_lineno or node.lineno) - node.lineno + 1
    first = node.body[0]
    if isinstance(first, ast.Expr) and ast.get_docstring(node) is not None:
        lines -= (first.end_lineno or first.lineno) - first.lineno + 1
    return lines


def function_size(text: str, path: Path) -> Iterator[str]:
    tree = ast.parse(text)
    compiled = {node.lineno for node in jitted(tree)}
    for node in functions(tree):
        most = MAX_COMPILED_LINES if node.lineno in compiled else MAX_HOST_LINES
        if lines_of(node) > most:
            yield f"::{node.name} has {lines_of(node)} lines; split it"


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


def reasons_for_any(text: str, path: Path) -> Iterator[str]:
    """A value or a parameter of type Any says why: on its line, or once in the file ("Any: …")."""
    for number, line in enumerate(text.splitlines(), 1):
        if re.search(r": Any\b", line) and "#" not in line and "Any: " not in text:
            yield f"line {number}: Any without a reason"


def inline_assembly(text: str, path: Path) -> Iterator[str]:
    """Inline assembly lives in mxpert/device."""
    if "inline_asm" in text and path.parent.name != "device":
        yield "uses inline assembly outside of mxpert/device"


def thin_init(text: str, path: Path) -> Iterator[str]:
    """An `__init__.py` has a docstring, imports and `__all__`."""
    if path.name != "__init__.py":
        return
    for node in ast.parse(text).body:
        is_doc = isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
        names = isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__"
        if not (isinstance(node, (ast.Import, ast.ImportFrom)) or is_doc or names):
            yield f"line {node.lineno}: code in __init__.py"


def reads_environment(text: str, path: Path) -> Iterator[str]:
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Attribute) and node.attr in ("environ", "getenv"):
            yield f"line {node.lineno}: {node.attr}"


def is_public(name: str) -> bool:
    return not name.startswith("_")


def forbidden_names(text: str, path: Path) -> Iterator[str]:
    """Parameters and names of public functions and fields of public classes use the glossary."""
    tree = ast.parse(text)
    for node in filter(lambda node: is_public(node.name), functions(tree)):
        arguments = (*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs)
        for name in (node.name, *(argument.arg for argument in arguments)):
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
        calls = (
            ast.unparse(node.func) for node in ast.walk(function) if isinstance(node, ast.Call)
        )
        specialised = any(name in ("gl.warp_specialize", "start_roles") for name in calls)
        for part in CONTRACT if specialised else ("Grid:",):
            if part not in stated:
                yield f"::{function.name} does not state {part!r} in its docstring or its file's"


Rule = Callable[[str, Path], Iterator[str]]
PACKAGE_RULES: dict[str, Rule] = {
    "triton_stays_below": triton_stays_below,
    "core_names_no_chip": core_names_no_chip,
    "thin_init": thin_init,
    "no_assert": no_assert,
    "reasons_for_any": reasons_for_any,
    "inline_assembly": inline_assembly,
    "forbidden_names": forbidden_names,
    "literal_subscripts": literal_subscripts,
    "positional_arguments": positional_arguments,
    "kernel_contracts": kernel_contracts,
}
SIZE_RULES: dict[str, Rule] = {"file_size": file_size, "function_size": function_size}


# ---- the whole package --------------------------------------------------------------------------

Texts = Mapping[str, str]
"""Path from the checkout's root → text."""


def small_module(texts: Texts) -> Iterator[tuple[str, str]]:
    """A module below SMALL_MODULE lines with one importer belongs into that importer."""
    importers: dict[str, set[str]] = defaultdict(set)
    for place, text in texts.items():
        for name in imported_modules(ast.parse(text), ROOT / place):
            importers[name].add(place)
    for place, text in texts.items():
        if place.endswith("__init__.py") or text.count("\n") >= SMALL_MODULE:
            continue
        users = importers[place.removesuffix(".py").replace("/", ".")]
        if len(users) == 1:
            yield place, f"has {text.count(chr(10))} lines and one importer, {min(users)}"


def same_stem(texts: Texts) -> Iterator[tuple[str, str]]:
    """Within a package of mxpert no two files share a name; a chip's folder is part of the name."""
    seen: dict[tuple[str, str], str] = {}
    for place in texts:
        path = Path(place)
        is_twin = {*path.parts} & {*CHIPS, "vllm", "sglang"}
        if path.stem in GENERIC_STEMS | {"__init__"} or is_twin or len(path.parts) < 3:
            continue
        other = seen.setdefault((path.parts[1], path.stem), place)
        if other != place:
            yield place, f"shares its name with {other}"


def same_kernel(texts: Texts) -> Iterator[tuple[str, str]]:
    """A profile names a kernel, so that no two may share a name."""
    seen: dict[str, str] = {}
    for place, text in texts.items():
        for function in jitted(ast.parse(text)):
            if function.name.endswith("_kernel"):
                other = seen.setdefault(function.name, place)
                if other != place:
                    yield place, f"{function.name} stands in {other}, too"


WHOLE_RULES: dict[str, Callable[[Texts], Iterator[tuple[str, str]]]] = {
    "small_module": small_module,
    "same_stem": same_stem,
    "same_kernel": same_kernel,
}


def texts_of(paths: Iterable[Path]) -> dict[str, str]:
    return {path.relative_to(ROOT).as_posix(): path.read_text(encoding="utf-8") for path in paths}


def findings(rule: str, check: Rule, paths: list[Path]) -> list[str]:
    """Findings of a rule in files, without the listed exceptions."""
    found = []
    for name, source in texts_of(paths).items():
        for text in check(source, ROOT / name):
            place = name + (text.split(" ", 1)[0] if text.startswith("::") else "")
            if (rule, place) not in EXCEPTIONS and (rule, name) not in EXCEPTIONS:
                found.append(f"{name}: {text}")
    return found


@pytest.mark.parametrize("rule", PACKAGE_RULES)
def test_the_package_keeps(rule: str) -> None:
    found = findings(rule, PACKAGE_RULES[rule], FILES)
    assert not found, "\n".join(found)


@pytest.mark.parametrize("rule", WHOLE_RULES)
def test_the_whole_package_keeps(rule: str) -> None:
    found = [
        f"{place}: {text}"
        for place, text in WHOLE_RULES[rule](texts_of(FILES))
        if (rule, place) not in EXCEPTIONS
    ]
    assert not found, "\n".join(found)


@pytest.mark.parametrize("rule", SIZE_RULES)
def test_every_source_keeps(rule: str) -> None:
    found = findings(rule, SIZE_RULES[rule], SOURCES)
    assert not found, "\n".join(found)


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
    rules, whole = PACKAGE_RULES | SIZE_RULES, texts_of(FILES)
    for (rule, place), reason in EXCEPTIONS.items():
        path = ROOT / place.split("::")[0]
        assert path.is_file(), f"{place}: gone; drop its exception"
        assert reason, f"{place}: an exception needs a reason"
        if rule in rules:
            found = list(rules[rule](path.read_text(encoding="utf-8"), path))
        else:
            found = [text for name, text in WHOLE_RULES[rule](whole) if name == place]
        assert found, f"{place}: not needed"


def unmirrored(tests: Iterable[str], package: Iterable[str]) -> list[str]:
    """Test files below tests/ whose folder and name say no module of the package.

    ``tests/a/test_b.py`` and ``tests/a/test_b_more.py`` test ``mxpert/a/b.py`` or ``mxpert/a/b/``.
    In a chip's folder, `kernels` stands for all its kernels.
    """
    modules = set(package)
    found = []
    for place in tests:
        folder, _, name = place.rpartition("/")
        if not folder or any(place.startswith(f"{each}/") for each in TESTED_ELSEWHERE):
            continue
        words = name.removeprefix("test_").split("_")
        starts = ["_".join(words[:count]) for count in range(1, len(words) + 1)]
        of_chip = words[0] == "kernels" and folder.rpartition("/")[2] in CHIPS
        if not (of_chip or any(f"{folder}/{start}" in modules for start in starts)):
            found.append(place)
    return found


def test_tests_mirror_the_package() -> None:
    package = {path.relative_to(PACKAGE).with_suffix("").as_posix() for path in FILES}
    package |= {path.relative_to(PACKAGE).parent.as_posix() for path in FILES}
    tests = [
        path.relative_to(ROOT / "tests").with_suffix("").as_posix()
        for path in sorted((ROOT / "tests").rglob("test_*.py"))
    ]
    found = unmirrored(tests, package)
    assert not found, "\n".join(found)
    assert unmirrored(["moe/test_no_such_module"], package)
    for place in TESTED_ELSEWHERE:
        assert (ROOT / "tests" / place).is_dir(), f"{place}: gone"


# ---- planted violations -------------------------------------------------------------------------

GLUON, TRITON = "@gluon.jit\ndef _f_kernel(tile):\n", "@triton.jit\ndef _f_kernel(tile):\n"
ROLES = '    """Roles: … Barriers: … Pipeline: …"""\n    gl.warp_specialize([])'
SHARED_ROLES = ROLES.replace("gl.warp_specialize([])", "start_roles()")
PLANTED: dict[str, tuple[Rule, str, str]] = {
    "an-op-names-a-chip": (core_names_no_chip, "moe/op.py", "# as on Hopper"),
    "a-layer-names-a-chip": (core_names_no_chip, "moe/layer.py", "# as on gfx950"),
    "op-imports-triton": (triton_stays_below, "moe/op.py", "import triton.language as tl"),
    "long-file": (file_size, "moe/planted.py", "x = 1\n" * 501),
    "long-kernel-file": (file_size, "moe/hopper/x.py", f"{GLUON}    pass\n" + "x = 1\n" * 900),
    "long-function": (function_size, "moe/planted.py", "def f():\n" + "    x = 1\n" * 60),
    "long-compiled-function": (function_size, "moe/planted.py", TRITON + "    x = 1\n" * 80),
    "any": (reasons_for_any, "moe/planted.py", "def f(x: Any): ..."),
    "bare-assert": (no_assert, "moe/planted.py", "assert x"),
    "assembly": (inline_assembly, "moe/triton/host.py", "tl.inline_asm_elementwise()"),
    "code-in-init": (thin_init, "moe/__init__.py", "x = 1"),
    "environment": (reads_environment, "moe/planted.py", "import os\nos.environ['X']"),
    "argument-name": (forbidden_names, "moe/planted.py", "def op(expert_mask): ..."),
    "field-name": (forbidden_names, "moe/planted.py", "class A:\n    sf: int"),
    "tuple-subscript": (literal_subscripts, "moe/x.py", f"{GLUON}    return tile[1] + x.shape[0]"),
    "negative-subscript": (
        literal_subscripts,
        "moe/x.py",
        "@triton.jit(noinline=True)\ndef f(tile):\n    return tile[-1]",
    ),
    "nine-positional-arguments": (
        positional_arguments,
        "moe/x.py",
        f"{GLUON}    g(1, 2, 3, 4, 5, 6, 7, 8, 9)",
    ),
    "no-timeline": (kernel_contracts, "moe/hopper/x.py", GLUON + ROLES),
    "shared-roles": (kernel_contracts, "moe/hopper/x.py", GLUON + SHARED_ROLES),
    "no-grid": (kernel_contracts, "moe/triton/x.py", f'{TRITON}    """Add."""'),
}


@pytest.mark.parametrize("name", PLANTED)
def test_a_planted_violation_is_seen(name: str) -> None:
    check, place, text = PLANTED[name]
    assert list(check(text, PACKAGE / place))


KERNEL = "@triton.jit\ndef _planted_kernel():\n    pass\n"
PLANTED_FILES = {
    "small_module": {"mxpert/moe/small.py": "x = 1\n", "mxpert/moe/op.py": "from .small import x"},
    "same_stem": {"mxpert/moe/planted.py": "", "mxpert/moe/deeper/planted.py": ""},
    "same_kernel": {"mxpert/moe/a.py": KERNEL, "mxpert/grouped/b.py": KERNEL},
}


@pytest.mark.parametrize("rule", WHOLE_RULES)
def test_a_planted_violation_of_the_whole_is_seen(rule: str) -> None:
    assert list(WHOLE_RULES[rule](PLANTED_FILES[rule]))


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
        kernels = {*inner} & {"backends", "cli", "testing", "device", "exchange", *CHIPS}
        named = any(chip in inner[-1] for chip in CHIPS)
        if not (kernels or named) and all(map(is_public, inner)):
            yield importlib.import_module(found.name)
