"""House rules that no linter knows. Prints one line per finding; exit status 1 if there is any.

    python tools/tidy.py [PATH ...]          all files of the repository if none is named

name            no file or folder called utils, common, helpers or misc: a helper lives with its noun
environment     os.environ, os.getenv only in engine/config/env.py
swallow         no bare except, no broad except that does nothing
type-checking   no import of lamella.* under TYPE_CHECKING: a cycle in disguise (but a package that loads its attributes
                when they are first asked for tells type checkers so what they are)
local-import    no import inside a function, except by providers, registries, CLI commands, lazy package attributes, and
                in testing modules of what only tests need installed
testing         lamella.*.testing is imported by testing modules and tests only
namespace       lamella/ itself holds no file: it is an implicit namespace
marker          no left-over work markers
place           no path of a particular machine, no package registry's host
note: long      a file of more than 600 lines is reported, without failing
"""

from __future__ import annotations

import argparse
import ast
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path, PurePosixPath
from typing import NamedTuple, TypeGuard

ROOT = Path(__file__).resolve().parent.parent

BANNED_NAMES = {"utils", "util", "common", "helpers", "helper", "misc"}
ENVIRONMENT_OWNER = "packages/engine/src/lamella/engine/config/env.py"
LOCAL_IMPORT_OWNERS = (
    re.compile(r"/providers/[^/]+\.py$"),
    re.compile(r"/registry\.py$"),
    re.compile(r"/engine/cli/[^/]+\.py$"),
)
# assembled, so that this file does not find itself
MARKERS = re.compile(r"\b(TO" r"DO|FIX" r"ME|XX" r"X|HA" r"CK)\b")
PLACES = re.compile(r"(?<![\w.])/(?:wo" r"rk|ro" r"ot|ho" r"me|Use" r"rs)/\w+|py" r"pi\.org|python" r"hosted\.org")
TEXT_ENDINGS = {".py", ".pyi", ".md", ".toml", ".cpp", ".cc", ".c", ".h", ".hpp", ".inc", ".cmake", ".yml", ".yaml",
                ".txt", ".json", ".html", ".jinja", ".ini", ".cfg", ""}  # fmt: skip
MAX_LINES = 600


class Finding(NamedTuple):
    """One line of the report."""

    path: str
    line: int
    rule: str
    text: str

    def __str__(self) -> str:
        return f"{self.path}:{self.line}: {self.rule}: {self.text}"

    @property
    def fails(self) -> bool:
        return not self.rule.startswith("note")


def findings(path: str, text: str) -> list[Finding]:
    """What is wrong with one file, given its path from the root with forward slashes."""
    found = [*_names(path), *_lines(path, text)]
    if path.endswith((".py", ".pyi")):
        tree = ast.parse(text, filename=path)
        in_package = "/src/" in path
        found += _swallowed(path, tree)
        if in_package:
            found += [*_environment(path, tree), *_imports(path, tree)]
    return sorted(found, key=lambda finding: (finding.path, finding.line))


def _names(path: str) -> Iterator[Finding]:
    pure = PurePosixPath(path)
    for part in (*pure.parts[:-1], pure.stem):
        if part in BANNED_NAMES or part.endswith(("_utils", "_helpers")):
            yield Finding(path, 1, "name", f"{part!r} says nothing: name it after what it holds")
    if pure.parent.name == "lamella" and pure.parent.parent.name == "src":
        yield Finding(path, 1, "namespace", "lamella/ is an implicit namespace and holds no files")


def _lines(path: str, text: str) -> Iterator[Finding]:
    lines = text.splitlines()
    for number, line in enumerate(lines, 1):
        if marker := MARKERS.search(line):
            yield Finding(path, number, "marker", f"{marker[0]} left over")
        if place := PLACES.search(line):
            yield Finding(path, number, "place", f"{place[0]} is of one machine or registry")
    if len(lines) > MAX_LINES and path.endswith((".py", ".cpp", ".h")):
        yield Finding(path, 1, "note: long", f"{len(lines)} lines")


def _swallowed(path: str, tree: ast.Module) -> Iterator[Finding]:
    for node in ast.walk(tree):
        if isinstance(node, ast.ExceptHandler):
            if node.type is None:
                yield Finding(path, node.lineno, "swallow", "bare except: name what is expected")
            elif _is_broad(node.type) and all(_does_nothing(statement) for statement in node.body):
                yield Finding(path, node.lineno, "swallow", "a broad except must not do nothing")
        elif _is_suppress(node):
            yield Finding(path, node.lineno, "swallow", "suppressing every exception hides bugs")


def _is_suppress(node: ast.AST) -> TypeGuard[ast.Call]:
    """A call contextlib.suppress(Exception)."""
    if not isinstance(node, ast.Call) or _dotted(node.func) not in ("suppress", "contextlib.suppress"):
        return False
    return any(_is_broad(argument) for argument in node.args)


def _is_broad(node: ast.expr) -> bool:
    kinds = node.elts if isinstance(node, ast.Tuple) else [node]
    return any(_dotted(kind) in ("Exception", "BaseException") for kind in kinds)


def _does_nothing(statement: ast.stmt) -> bool:
    constant = isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant)
    return constant or isinstance(statement, ast.Pass | ast.Continue | ast.Break)


def _dotted(node: ast.AST) -> str:
    if isinstance(node, ast.Attribute):
        return f"{_dotted(node.value)}.{node.attr}"
    return node.id if isinstance(node, ast.Name) else ""


def _environment(path: str, tree: ast.Module) -> Iterator[Finding]:
    if path == ENVIRONMENT_OWNER:
        return
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute):
            names = [_dotted(node)]
        elif isinstance(node, ast.ImportFrom) and node.module == "os":
            names = [f"os.{alias.name}" for alias in node.names]
        else:
            continue
        if any(name in ("os.environ", "os.environb", "os.getenv", "os.putenv", "os.unsetenv") for name in names):
            yield Finding(path, node.lineno, "environment", f"{names[0]}: only {ENVIRONMENT_OWNER} reads it")


def _imports(path: str, tree: ast.Module) -> Iterator[Finding]:
    lazy = any(isinstance(node, ast.FunctionDef) and node.name == "__getattr__" for node in tree.body)
    in_testing = "/testing/" in path
    for node, place in _placed(tree, "module"):
        if not isinstance(node, ast.Import | ast.ImportFrom):
            continue
        modules = _modules(node)
        ours = [module for module in modules if module.split(".")[0] == "lamella" or _is_relative(node)]
        if place == "type checking" and ours and not lazy:
            yield Finding(
                path, node.lineno, "type-checking", f"{ours[0]}: move what is needed to where both may see it"
            )
        allowed = any(owner.search("/" + path) for owner in LOCAL_IMPORT_OWNERS) or (in_testing and not ours)
        if place == "function" and not allowed:
            yield Finding(path, node.lineno, "local-import", f"{modules[0]}: import it at the top")
        fakes = [m for m in modules if m.split(".")[0] == "lamella" and "testing" in m.split(".")]
        if fakes and not in_testing:
            yield Finding(path, node.lineno, "testing", f"{fakes[0]} is for tests")


def _is_relative(node: ast.Import | ast.ImportFrom) -> bool:
    """from . import x"""
    return isinstance(node, ast.ImportFrom) and node.level > 0


def _modules(node: ast.Import | ast.ImportFrom) -> list[str]:
    """What a statement may import: for `from a import b` also a.b, which may be a module."""
    if isinstance(node, ast.Import):
        return [alias.name for alias in node.names]
    module = node.module or "."
    return [module, *(f"{module}.{alias.name}" for alias in node.names)]


def _placed(node: ast.AST, place: str) -> Iterator[tuple[ast.AST, str]]:
    """Every node with where it stands: "module", "type checking" or "function"."""
    for child in ast.iter_child_nodes(node):
        inner = place
        if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef):
            # a package may load its attributes when they are first asked for (PEP 562)
            inner = place if child.name == "__getattr__" and isinstance(node, ast.Module) else "function"
        elif isinstance(node, ast.If) and child in node.body and _dotted(node.test).endswith("TYPE_CHECKING"):
            inner = "type checking"
        yield child, inner
        yield from _placed(child, inner)


def repository_files(root: Path) -> list[str]:
    """Files that git knows or would add."""
    command = ["git", "-C", str(root), "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    listed = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    return sorted(path for path in listed.split("\0") if path and (root / path).is_file())


def examine(root: Path, paths: list[str]) -> list[Finding]:
    """Findings of all text files among the paths."""
    found: list[Finding] = []
    for path in paths:
        if PurePosixPath(path).suffix in TEXT_ENDINGS:
            try:
                text = (root / path).read_text(encoding="utf-8")
            except UnicodeDecodeError:
                continue
            found += findings(path, text)
        else:
            found += _names(path)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("paths", nargs="*", metavar="PATH")
    args = parser.parse_args()
    paths = [Path(path).resolve().relative_to(ROOT).as_posix() for path in args.paths] or repository_files(ROOT)
    found = examine(ROOT, paths)
    for finding in found:
        print(finding)
    failed = sum(finding.fails for finding in found)
    print(f"tidy: {failed} finding{'' if failed == 1 else 's'} in {len(paths)} files")
    sys.exit(1 if failed else 0)


if __name__ == "__main__":
    main()
