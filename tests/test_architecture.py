"""Imports point downwards only, inside functions too; and `import ringattn` stays light."""

import ast
import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]

# From the bottom up. A module imports from the layers below its own: those beside it are strangers.
LAYERS = (
    ("masks", "network", "timeline", "_env"),
    ("layout", "same_host"),
    ("plan",),
    ("kernels", "transport", "balance", "roofline"),
    ("merge", "schedule", "handshake", "decode"),
    ("bitwise",),
    ("call",),
    ("ops",),
    ("api",),
    ("", "virtual"),  # the nameless one is ringattn/__init__.py
    ("hf", "testing", "picture", "compat"),
    ("cli",),
)
LEVEL = {name: level for level, names in enumerate(LAYERS) for name in names}
EXPORTED = {
    *("api", "balance", "kernels", "layout", "masks", "merge", "network", "plan", "roofline", "timeline")
}  # what ringattn/__init__.py may import
HEAVY = ("triton", "transformers", "accelerate", "matplotlib")


def module_name(path: Path, root: Path) -> str:
    parts = path.relative_to(root).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def trees(package: str, root: Path) -> dict[str, ast.Module]:
    return {module_name(p, root): ast.parse(p.read_text(), str(p)) for p in sorted((root / package).rglob("*.py"))}


def imports(module: str, tree: ast.Module) -> Iterator[tuple[int, str, str | None]]:
    """(line, module, name or None) of every import, wherever it stands, and of `import_module("...")`."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield node.lineno, alias.name, None
        elif isinstance(node, ast.ImportFrom):
            for alias in node.names:
                yield node.lineno, "." * node.level + (node.module or ""), alias.name
        elif isinstance(node, ast.Call) and node.args and isinstance(node.args[0], ast.Constant):
            called = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
            if called in ("import_module", "__import__"):
                yield node.lineno, node.args[0].value, None


def public_names(tree: ast.Module) -> set[str]:
    for node in tree.body:
        if isinstance(node, ast.Assign) and any(isinstance(t, ast.Name) and t.id == "__all__" for t in node.targets):
            return set(ast.literal_eval(node.value))
    return set()


def violations(root: Path) -> list[str]:
    ringattn = trees("ringattn", root)
    submodules = {name.split(".")[1] for name in ringattn if "." in name}
    found = []
    for module, tree in ringattn.items():
        own = module.partition(".")[2].partition(".")[0]
        if own not in LEVEL:
            found.append(f"{module} has no layer; give it one in LAYERS")
            continue
        for line, source, name in imports(module, tree):
            where = f"{module}:{line} imports {source}"
            package, _, rest = source.partition(".")
            if source.startswith("."):
                found.append(f"{where}: relative")
            elif package == "ndwrap":
                found.append(f"{where}: ringattn never imports ndwrap")
            elif package == "ringattn":
                target = rest.partition(".")[0] or (name if name in submodules else "")
                if target == own:
                    continue
                if target not in LEVEL:
                    found.append(f"{where}: it has no layer")
                elif LEVEL[target] >= LEVEL[own]:
                    found.append(f"{where}: {target or 'ringattn'} is not below {own or 'ringattn'}")
                elif target == "hf":
                    found.append(f"{where}: nothing in ringattn imports hf")
                elif own == "" and target not in EXPORTED:
                    found.append(f"{where}: the package re-exports from {sorted(EXPORTED)} only")
    public = public_names(ringattn["ringattn"]) | {"hf"}
    for module, tree in trees("ndwrap", root).items():
        for line, source, name in imports(module, tree):
            where = f"{module}:{line} imports {source}"
            if source.startswith("."):
                found.append(f"{where}: relative")
            elif source == "ringattn" and name is not None and name not in public:
                found.append(f"{where}.{name}: not a public name")
            elif source.startswith("ringattn.") and source != "ringattn.hf":
                found.append(f"{where}: ndwrap imports ringattn and ringattn.hf only")
    return found


def test_imports_point_downwards():
    assert violations(ROOT) == []


def test_every_module_is_seen():
    assert {"ringattn", "ringattn.masks", "ringattn.kernels.reference"} <= set(trees("ringattn", ROOT))
    assert "ndwrap.mesh" in trees("ndwrap", ROOT)


@pytest.mark.parametrize(
    ("path", "code", "expected"),
    [
        (
            "ringattn/masks.py",
            "def f():\n    import ringattn.plan",
            "ringattn.masks:2 imports ringattn.plan: plan is not below masks",
        ),
        ("ringattn/masks.py", "from ringattn import api", "ringattn.masks:1 imports ringattn: api is not below masks"),
        ("ringattn/masks.py", "import ringattn", "ringattn.masks:1 imports ringattn: ringattn is not below masks"),
        ("ringattn/masks.py", "from . import api", "ringattn.masks:1 imports .: relative"),
        ("ringattn/masks.py", "import ndwrap", "ringattn.masks:1 imports ndwrap: ringattn never imports ndwrap"),
        (
            "ringattn/kernels/x.py",
            "from ringattn.transport import f",
            "ringattn.kernels.x:1 imports ringattn.transport: transport is not below kernels",
        ),
        (
            "ringattn/transport.py",
            "from importlib import import_module\nimport_module('ringattn.kernels.x')",
            "ringattn.transport:2 imports ringattn.kernels.x: kernels is not below transport",
        ),
        (
            "ringattn/cli.py",
            "from ringattn import hf",
            "ringattn.cli:1 imports ringattn: nothing in ringattn imports hf",
        ),
        (
            "ringattn/__init__.py",
            "from ringattn.schedule import run\n__all__ = ['f']",
            f"ringattn:1 imports ringattn.schedule: the package re-exports from {sorted(EXPORTED)} only",
        ),
        ("ringattn/extra.py", "", "ringattn.extra has no layer; give it one in LAYERS"),
        (
            "ndwrap/mesh.py",
            "import ringattn.api",
            "ndwrap.mesh:1 imports ringattn.api: ndwrap imports ringattn and ringattn.hf only",
        ),
        ("ndwrap/mesh.py", "from ringattn import ops", "ndwrap.mesh:1 imports ringattn.ops: not a public name"),
    ],
)
def test_a_planted_violation_is_found(tmp_path, path, code, expected):
    clean = {
        "ringattn/__init__.py": "from ringattn.api import f\n__all__ = ['f']",
        "ringattn/api.py": "from ringattn import ops",
        "ringattn/ops.py": "",
        "ringattn/masks.py": "",
        "ringattn/hf/__init__.py": "import ringattn",
        "ringattn/kernels/__init__.py": "def f():\n    from ringattn.kernels import x",
        "ndwrap/__init__.py": "import ringattn.hf\nfrom ringattn import f, hf",
    }
    for files in (clean, {path: code}):
        for name, text in files.items():
            (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
            (tmp_path / name).write_text(text)
        assert violations(tmp_path) == ([] if files is clean else [expected])


def test_the_package_imports_nothing_heavy():
    code = f"import json, sys, ringattn; print(json.dumps([name for name in {HEAVY} if name in sys.modules]))"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert json.loads(done.stdout) == []
