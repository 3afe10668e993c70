"""Who may import whom, what the slim modules may load, and that every library used is declared."""

import ast
import subprocess
import sys
import tomllib
from importlib.metadata import packages_distributions
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).parents[2]
PACKAGES = ("flows", "tasks", "spotlight_core")
HEAVY = {"torch", "diffusers", "ray", "prefect", "mlflow", "pandas", "plotly", "rapidocr", "onnxruntime"}
# Declared for a file they ship, not for their code: the font, the recogniser's weights.
NOT_IMPORTED = {"accelerate", "ftfy", "matplotlib"}


def test_import_contracts_hold() -> None:
    linter = Path(sys.executable).with_name("lint-imports")
    result = subprocess.run(
        [linter, "--no-cache", "--no-logo"], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert result.returncode == 0, result.stdout + result.stderr


SLIM = ("spotlight_core.config", "spotlight_core.estimates.resources", "flows.cli")


@pytest.mark.parametrize("module", SLIM)
def test_slim_module_loads_no_heavy_library(module: str) -> None:
    program = f"import sys, {module}; print(*sys.modules, sep=chr(10))"
    loaded = subprocess.run(
        [sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=True
    ).stdout.split()
    assert module in loaded
    assert {name.split(".")[0] for name in loaded} & HEAVY == set()


def _imported_roots(path: Path) -> set[str]:
    """The top-level names a file imports, at any depth of its code."""
    roots: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            roots.update(alias.name.split(".")[0] for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            roots.add(node.module.split(".")[0])
    return roots


def _third_party() -> set[str]:
    files = [path for package in PACKAGES for path in (ROOT / package).rglob("*.py")]
    return set().union(*map(_imported_roots, files)) - set(sys.stdlib_module_names) - set(PACKAGES)


def _declared() -> set[str]:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    return {canonicalize_name(Requirement(line).name) for line in project["dependencies"]}


def _optional() -> set[str]:
    """What users install when they want it (pip install 'spotlight-rl[paddleocr]')."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    extras = (lines for name, lines in project["optional-dependencies"].items() if name != "dev")
    return {canonicalize_name(Requirement(line).name) for lines in extras for line in lines}


def test_every_imported_library_is_declared_and_every_declared_one_imported() -> None:
    owners = packages_distributions()
    unknown = {name for name in _third_party() if name not in owners}
    imported = {canonicalize_name(owner) for name in _third_party() - unknown for owner in owners[name]}
    # A name can belong to several distributions (mlflow to mlflow and mlflow-skinny): one declared is enough.
    undeclared = {
        name
        for name in _third_party() - unknown
        if not {canonicalize_name(owner) for owner in owners[name]} & _declared()
    }
    assert unknown - _optional() == set()
    assert undeclared == set(), "add them to dependencies in pyproject.toml"
    assert _declared() - imported == NOT_IMPORTED, "remove what nothing imports from pyproject.toml"


def test_constraints_pin_every_declared_library_to_the_same_version() -> None:
    lines = (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()
    pins = {
        canonicalize_name(name): version
        for name, _, version in (line.partition("==") for line in lines if line and not line.startswith("#"))
    }
    assert all(version and "+" not in version for version in pins.values())
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    for line in project["dependencies"]:
        requirement = Requirement(line)
        assert requirement.specifier.contains(pins[canonicalize_name(requirement.name)]), line
    for line in project["optional-dependencies"]["dev"]:
        assert canonicalize_name(Requirement(line).name) in pins
