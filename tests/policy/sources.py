"""What the policy tests read: the package's files and what each imports."""

from __future__ import annotations

import ast
from pathlib import Path

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "tagc"
MODULES = sorted(PACKAGE.rglob("*.py"))


def module_name(path: Path) -> str:
    """``tagc/codec/peel.py`` -> ``tagc.codec.peel``; a package's ``__init__.py`` -> the package."""
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def part_of(module: str) -> str:
    """``tagc.codec.peel`` -> ``codec``; ``tagc`` -> ``""``."""
    return [*module.split("."), ""][1]


def imported_modules(source: str, module: str, is_package: bool = False) -> set[str]:
    """Every module that ``source`` imports at any depth of nesting, relative imports resolved.

    >>> sorted(imported_modules("import a.b; from .c import d; from tagc import data", "tagc.x.y"))
    ['a.b', 'tagc', 'tagc.data', 'tagc.x.c', 'tagc.x.c.d']
    """
    found = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            package = module.split(".") if is_package else module.split(".")[:-1]
            base = package[: len(package) - node.level + 1] if node.level else []
            origin = ".".join(base + ([node.module] if node.module else []))
            found.add(origin)
            if origin.split(".")[0] == "tagc":  # the names may be modules: `from tagc import data`
                found |= {f"{origin}.{alias.name}" for alias in node.names}
    return found


def imports_of(path: Path) -> set[str]:
    """What the file at ``path`` imports."""
    return imported_modules(path.read_text(), module_name(path), path.name == "__init__.py")
