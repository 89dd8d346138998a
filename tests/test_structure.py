"""How the package hangs together: who imports whom, and what importing does."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest
from triton.language import core
from triton.runtime.interpreter import InterpretedFunction

import railwave
from railwave.kernels import OPS, load

ROOT = Path(railwave.__file__).parent

# A module imports only from those before it; a folder is one layer.
LAYERS = [
    "_version",
    "_check",
    "_signature",
    "_files",
    "errors",
    "discovery",
    "topology",
    "sched",
    "kernels",
    "heap",
    "config",
    "retention",
    "cost_table",
    "stats",
    "port_counters",
    "handle",
    "traffic",
    "timeline",
    "trace_files",
    "tracing",
    "recording",
    "graphs",
    "exchange",
    "turns",
    "recorded",
    "autograd",
    "_uncompiled",
    "compiled",
    "memory",
    "arguments",
    "compiled_calls",
    "agreement",
    "world",
    "meeting",
    "rehearsal",
    "watch",
    "phases",
    "communicator",
    "calibrate",
    "default",
    "workloads",
    "sim",
    "simulation",
    "plots",
    "reference",
    "cases",
    "report",
    "doctor",
    "table",
    "cli",
    "__main__",
]
# The same within kernels/: they import one another relatively, so that each mode has its own.
KERNEL_LAYERS = [
    "shape",
    "lang",
    "nvshmem",
    "port",
    "wire",
    "granted",
    "notify",
    "verdict",
    "count",
    "describe",
    "quota",
    "match",
    "pack",
    "unpack",
    "reduce",
    "group",
    "combine",
]


# The package's modules, `railwave.` left out, and where they are.
MODULES = {
    ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__"): path
    for path in sorted(ROOT.rglob("*.py"))
    if path != ROOT / "__init__.py"
}


def imports(path):
    """List (module, level) of every import statement of a file, wherever it stands."""
    found = []
    for statement in ast.walk(ast.parse(path.read_text())):
        if isinstance(statement, ast.Import):
            found += [(alias.name, 0) for alias in statement.names]
        elif isinstance(statement, ast.ImportFrom) and statement.module in (None, "railwave"):
            prefix = f"{statement.module}." if statement.module else ""
            found += [(prefix + alias.name, statement.level) for alias in statement.names]
        elif isinstance(statement, ast.ImportFrom):
            found.append((statement.module, statement.level))
    return found


def test_every_module_has_a_layer():
    assert {name.split(".")[0] for name in MODULES} <= set(LAYERS)
    kernels = {name.split(".")[1] for name in MODULES if name.startswith("kernels.")}
    assert kernels == set(KERNEL_LAYERS)


@pytest.mark.parametrize("name", MODULES)
def test_a_module_imports_only_from_layers_above_it(name):
    own = name.split(".")[0]
    for module, level in imports(MODULES[name]):
        if level:
            assert own == "kernels" and level == 1, (name, module)
            part = name.split(".")[1]
            assert KERNEL_LAYERS.index(module) < KERNEL_LAYERS.index(part), (name, module)
        elif module.split(".")[0] == "railwave":
            layer = module.split(".")[1]
            assert layer == own != "kernels" or LAYERS.index(layer) < LAYERS.index(own), (
                f"{name} imports {module}, which is not above it"
            )


def test_only_kernels_import_triton():
    for name, path in MODULES.items():
        uses = any(module.split(".")[0] == "triton" for module, _ in imports(path))
        assert not uses or name.startswith("kernels."), name


def test_only_kernels_shape_is_used_without_loading_a_mode():
    """Other modules take kernels from `load`: an import would be a third copy of them."""
    for name, path in MODULES.items():
        if not name.startswith("kernels"):
            used = {module for module, _ in imports(path) if module.startswith("railwave.kernels")}
            assert used <= {"railwave.kernels", "railwave.kernels.shape"}, name


IMPORTING = """
import os, sys, threading, warnings
import torch

def refuse(*args, **kwargs):
    raise AssertionError("a GPU was asked for")

for name in ("is_available", "device_count", "init", "_lazy_init", "current_device"):
    setattr(torch.cuda, name, refuse)
before = (dict(os.environ), list(sys.path), list(warnings.filters), threading.active_count())
defaults = (torch.get_default_dtype(), torch.get_default_device(), torch.get_num_threads())
random = torch.get_rng_state()

import railwave

assert before == (
    dict(os.environ), list(sys.path), list(warnings.filters), threading.active_count()
)
assert defaults == (
    torch.get_default_dtype(), torch.get_default_device(), torch.get_num_threads()
)
assert torch.equal(random, torch.get_rng_state())
loaded = {name for name in sys.modules if name.startswith("railwave.kernels")}
assert loaded == {"railwave.kernels", "railwave.kernels.shape"}, loaded
for name in railwave.__all__:
    getattr(railwave, name)
"""


def test_importing_does_nothing():
    subprocess.run([sys.executable, "-c", IMPORTING], check=True, timeout=120)


@pytest.mark.parametrize("op", OPS)
def test_kernel_modules(op):
    """Triton's interpreter restores what it finds among a kernel's globals: `core` must be there.

    Each file that launches kernels has references beside them.
    """
    module = getattr(load(interpret=True), op)
    assert any(value is core for value in vars(module).values())
    kernels = [value for value in vars(module).values() if isinstance(value, InterpretedFunction)]
    own = [k.__name__ for k in kernels if k.fn.__module__ == module.__name__]
    assert own and all(name.startswith("_") and name.endswith("_kernel") for name in own)
    assert any(name.endswith("_ref") for name in vars(module))


def test_modes_have_modules_of_their_own():
    interpreted, compiled = load(interpret=True), load(interpret=False)
    for op in OPS:
        assert getattr(interpreted, op) is not getattr(compiled, op)
        assert getattr(interpreted, op) is getattr(load(interpret=True), op)


def test_case_n1_no_kernel_uses_a_histogram():
    """Interpreted, tl.histogram counts a value of num_bins in the last bin."""
    for op in OPS:
        assert "histogram" not in (
            Path(__file__).parents[1] / "railwave" / "kernels" / f"{op}.py"
        ).read_text(encoding="utf-8")
