"""Every kernel compiles to an sm_90 cubin with no GPU, in the process that also interprets it.

A small cluster runs interpreted, with the tiles of compiled mode; the arguments of every launch are
recorded and the same kernels of `load(interpret=False)` compiled with them.
"""

import functools
import inspect
import os
import subprocess
import sys
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import torch
import triton
import triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.runtime.interpreter import InterpretedFunction
from triton.runtime.jit import JITFunction, mangle_type

from railwave import LocalWorld, Topology
from railwave.config import COMPILED, Config
from railwave.kernels import OPS, load
from railwave.workloads import skewed_routing

SM_90 = GPUTarget("cuda", 90, 32)

# `programs` is the grid, no constant of a kernel: two are enough to record.
TILES = replace(COMPILED, programs=2)
# Every stage of all kinds of path, several rounds of a wave, dtypes of a sum, emulated NICs (and
# granted through those in test_kernels_resources).
RUNS = (
    ("joint", torch.bfloat16, None),
    ("native", torch.bfloat16, None),
    ("joint", torch.float16, None),
    ("granted", torch.bfloat16, None),
    ("joint", torch.bfloat16, 1.0),
)


@dataclass(frozen=True)
class Launch:
    """A kernel and what a variant of it depends on: pointer types and constants."""

    op: str  # the module
    kernel: str
    signature: tuple  # (argument, Triton type or "constexpr")
    constants: tuple  # (argument, value)

    @property
    def id(self):
        """Say the kernel and the constants that are not sizes of the world or a tile."""
        flags = [f"{n.lower()}={v}" for n, v in self.constants if isinstance(v, bool | tl.dtype)]
        return "-".join([self.kernel.strip("_"), *flags])


def run_cluster(path, dtype, nic_gbs):
    """Dispatch and combine in a cluster of 3 nodes of 2 GPUs; return the sums."""
    topo = Topology(3, 2, 2)
    sizes = {"num_experts": 8, "top_k": 2, "hidden": 16, "max_tokens_per_rank": 8, "dtype": dtype}
    world = LocalWorld(topo, **sizes, staging_records=4, max_recv_rows=40, nic_gbs=nic_gbs)
    for pe in world._exchanges:
        pe.compare_calls = True  # as in one process per rank
    routing = skewed_routing(6, 8, 8, 2, gpus_per_node=2, skew=0.0, seed=0)
    xs = [torch.ones(len(ids), 16, dtype=dtype) for ids in routing.topk_idx]
    received = world.dispatch(xs, routing.topk_idx, routing.topk_weights, path=path)
    where = {"notify_off": world.heap.layout["messages"], "word_off": world.heap.layout["notify"]}
    pe.kernels.describe.describe(  # as for path="auto"
        *(pe.descriptors, world.heap.bases, pe.state, pe.all_pairs, pe.rail_gpus),
        **{"me": pe.pe, "record_bytes": 1, "shape": pe.config.shape, **where},
    )
    ys = world.combine([r.x for r in received], [r.handle for r in received])
    world.dispatch(xs, routing.topk_idx, routing.topk_weights, path=path, out="view")
    world.dispatch(xs, handles=[r.handle for r in received])
    pe.kernels.wire.stamp(torch.zeros(1, dtype=torch.int64))  # as for a trace
    if nic_gbs:
        pe.kernels.port.occupy(
            *(torch.zeros(2, 2, 2, dtype=torch.int64), world.heap.bases, pe.state),
            **{"port_off": world.heap.layout["ports"], "from_pe": pe.pe, "to_pe": 1},
            **{"num_bytes": 100, "programs": 2, "shape": pe.config.shape},
        )
    form = {"expert_alignment": 2, "zero_padding": True, "path": path}
    received = world.dispatch(xs, routing.topk_idx, routing.topk_weights, **form)
    weights, bias = [r.topk_weights for r in received], [[x, x[0]] for x in xs]
    world.combine([r.x for r in received], [r.handle for r in received], weights=weights, bias=bias)
    return ys


def as_launch(kernel, args):
    """Describe a launch; scalars get the type that they have in a large world."""
    compiled = getattr(
        getattr(COMPILED_KERNELS, kernel.fn.__module__.split(".")[-1]), kernel.__name__
    )
    signature, constants = [], []
    for parameter in compiled.params:
        name, value = parameter.name, args[parameter.name]
        if parameter.is_constexpr:
            signature.append((name, "constexpr"))
            constants.append((name, value))
        elif isinstance(value, torch.Tensor):
            signature.append((name, mangle_type(value)))
        else:
            signature.append((name, "i64"))
    op = kernel.fn.__module__.split(".")[-1]
    return Launch(op, kernel.__name__, tuple(signature), tuple(constants))


COMPILED_KERNELS = load(interpret=False)
nvshmem = COMPILED_KERNELS.wire.nvshmem  # the module


def all_kernels():
    """List (op, name) of every jit function of the kernel modules that is launched: `_*_kernel`."""
    return {
        (op, name)
        for op in OPS
        for name, fn in vars(getattr(COMPILED_KERNELS, op)).items()
        if isinstance(fn, JITFunction) and fn.fn.__module__.endswith(f".{op}")
        if name.endswith("_kernel")
    }


NIC_KERNELS = ("_put_kernel", "_granted_kernel", "_occupy_kernel")


@functools.cache
def recorded():
    """Return the distinct launches of all runs, and the sums of the runs."""
    launches, sums = {}, []
    run = InterpretedFunction.run

    def record(self, *args, grid, warmup, **kwargs):
        launch = as_launch(self, dict(zip(self.arg_names, args, strict=False)) | kwargs)
        through_nics = getattr(dict(launch.constants).get("S"), "EMULATED", False)
        if launch.kernel in NIC_KERNELS or not through_nics:  # which change nothing in the others
            launches[launch] = None
        return run(self, *args, grid=grid, warmup=warmup, **kwargs)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(InterpretedFunction, "run", record)
        patch.setattr("railwave.world.Config", functools.partial(Config, tiles=TILES))
        for run_of in RUNS:
            sums.append(run_cluster(*run_of))
    return list(launches), sums


def compile_launch(launch, *, remote=False):
    """Compile a kernel as it was launched, or as if some PEs were not mapped; return its code."""
    kernel = getattr(getattr(COMPILED_KERNELS, launch.op), launch.kernel)
    constants, options = dict(launch.constants), {"enable_fp_fusion": False}
    if remote:
        constants["S"] = replace(constants["S"], REMOTE=True)
        options["extern_libs"] = {nvshmem.LIBRARY: nvshmem.device_library(90)}
    source = ASTSource(fn=kernel, signature=dict(launch.signature), constexprs=constants)
    return triton.compile(source, target=SM_90, options=options).asm


SPACES = (tl, tl.core, tl.math, tl.standard, tl.core.tensor, tl.core.dtype)
LANGUAGE = [{k: v for k, v in vars(space).items() if k != "__annotations__"} for space in SPACES]


def check_language():
    """Check that the interpreter, which patches Triton's language, has put all of it back."""
    for space, before in zip(SPACES, LANGUAGE, strict=True):
        changed = [name for name, value in before.items() if vars(space)[name] is not value]
        assert not changed, (space, changed)
    assert triton.knobs.runtime.interpret is False
    assert "TRITON_INTERPRET" not in os.environ


def test_every_kernel_compiles_and_interpreting_goes_on():
    launches, sums = recorded()
    check_language()
    assert {(launch.op, launch.kernel) for launch in launches} == all_kernels()
    for launch in launches:
        assert compile_launch(launch)["cubin"][:4] == b"\x7fELF", launch.id
    check_language()
    again = run_cluster(*RUNS[0])
    assert all(torch.equal(a, b) for a, b in zip(again, sums[0], strict=True))
    check_language()


def test_nothing_is_evaluated_twice():
    """Triton evaluates the value of an annotated assignment twice: each atomic would be two."""
    launch = next(launch for launch in recorded()[0] if launch.kernel == "_unpack_kernel")
    assert compile_launch(launch)["ptx"].count(".acq_rel.add.") == 1
    for op, name in all_kernels():
        source = getattr(getattr(COMPILED_KERNELS, op), name).src
        assert ": int =" not in source and ": float =" not in source, name


REMOTE_KERNELS = {"_notify_kernel", "_count_kernel", "_forward_kernel", "_quota_kernel"}
REMOTE_KERNELS |= {"_verdict_kernel", "_put_kernel", "_unpack_kernel"}
REMOTE_KERNELS |= {"_copy_in_kernel", "_give_back_kernel", "_granted_kernel"}


@pytest.mark.parametrize("kernel", sorted(REMOTE_KERNELS))
def test_a_kernel_that_reaches_other_nodes_compiles_against_the_bitcode_of_nvshmem(kernel):
    if torch.version.cuda is None:
        assert nvshmem._version_of("nvidia-nvshmem-cu13") == "3.4.5"
    launch = next(launch for launch in recorded()[0] if launch.kernel == kernel)
    asm = compile_launch(launch, remote=True)
    assert asm["cubin"][:4] == b"\x7fELF"
    assert "nvshmemi_device_state_d" in asm["ptx"]  # it calls what needs NVSHMEM's state
    assert "nvshmem" not in compile_launch(launch)["ptx"]


def test_only_kernels_that_reach_other_nodes_link_nvshmem():
    links = {
        f"_{name}_kernel"
        for op in OPS
        for name, fn in vars(getattr(COMPILED_KERNELS, op)).items()
        if inspect.isfunction(fn) and fn.__module__.endswith(f".{op}")
        if "**libraries(" in inspect.getsource(fn)
    }
    assert links == REMOTE_KERNELS


@pytest.mark.parametrize("names", [["libnvshmem_device.bc"], ["libnvshmem_device_sm_90.bc"]])
def test_the_bitcode_is_found_in_both_layouts_of_its_package(names, tmp_path, monkeypatch):
    (tmp_path / "lib").mkdir()
    for name in names:
        (tmp_path / "lib" / name).touch()
    monkeypatch.setattr(nvshmem, "_package_paths", lambda: [str(tmp_path)])
    assert nvshmem.device_library(90) == str(tmp_path / "lib" / names[0])


def test_a_missing_or_unfit_bitcode_is_an_error_that_says_what_to_do(tmp_path, monkeypatch):
    monkeypatch.setattr(nvshmem, "_package_paths", list)
    monkeypatch.delenv("NVSHMEM_HOME", raising=False)
    with pytest.raises(ImportError, match="pip install nvidia-nvshmem-cu13, or set NVSHMEM_HOME"):
        nvshmem.device_library(90)
    (tmp_path / "lib").mkdir()
    (tmp_path / "lib" / "libnvshmem_device_sm_80.bc").touch()
    monkeypatch.setenv("NVSHMEM_HOME", str(tmp_path))
    with pytest.raises(ImportError, match="no device bitcode for sm_90"):
        nvshmem.device_library(90)
    for fit in (("3.4.5", "3.6.0"), ("3.7.9", "3.6.1"), ("3.8.0", "3.7.0"), ("", "3.6.0")):
        nvshmem._check_versions(*fit)
    with pytest.raises(RuntimeError, match=r"triton 3\.6\.0 cannot .* NVSHMEM 3\.8\.0"):
        nvshmem._check_versions("3.8.0", "3.6.0")


def test_compiling_comes_first_in_a_fresh_process(tmp_path):
    """Compile, interpret, compile: the first of them decides nothing.

    In a cache of its own: one shared with other checkouts may hand out code that names their files.
    """
    program = """
import sys
sys.path.insert(0, sys.argv[1])
import torch, triton, triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from railwave.kernels import load
from heaps import make_config

S = make_config(2, 2, 2).shape

def compile_verdict():
    constants = {"S": S}
    signature = dict.fromkeys(("me", "verdict_off"), "i64")
    signature |= {"bases_ptr": "*i64", "state_ptr": "*i64"}
    signature |= dict.fromkeys(constants, "constexpr")
    kernel = load(interpret=False).verdict._verdict_kernel
    signature = {name: signature[name] for name in kernel.arg_names}
    source = ASTSource(fn=kernel, signature=signature, constexprs=constants)
    return triton.compile(source, target=GPUTarget("cuda", 90, 32)).asm["ptx"]

first = compile_verdict()
import test_kernels_move
test_kernels_move.test_unpack_example()
triton.knobs.compilation.always_compile = True
assert compile_verdict() == first
"""
    subprocess.run(
        [sys.executable, "-c", program, str(Path(__file__).parent)],
        env=os.environ | {"TRITON_CACHE_DIR": str(tmp_path)},
        check=True,
        timeout=300,
    )


def test_a_run_needs_no_variant_for_a_scalar():
    """Steps, waves, offsets and PEs are no constants: a launch's arguments may change freely."""
    for op, name in all_kernels():
        kernel = getattr(getattr(COMPILED_KERNELS, op), name)
        for parameter in kernel.params:
            if not parameter.is_constexpr and not parameter.name.endswith("_ptr"):
                assert parameter.do_not_specialize, (name, parameter.name)
        assert inspect.getdoc(kernel.fn), name
