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
# Every stage of both kinds of path, several rounds of a wave, and each dtype of a sum.
RUNS = (
    ("joint", torch.bfloat16),
    ("native", torch.bfloat16),
    ("joint", torch.float32),
    ("joint", torch.float16),
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


def run_cluster(path, dtype):
    """Dispatch and combine in a cluster of 3 nodes of 2 GPUs; return the sums."""
    topo = Topology(3, 2, 2)
    sizes = {"num_experts": 8, "top_k": 2, "hidden": 16, "max_tokens_per_rank": 8, "dtype": dtype}
    world = LocalWorld(topo, **sizes, staging_records=4)
    routing = skewed_routing(6, 8, 8, 2, gpus_per_node=2, skew=0.0, seed=0)
    xs = [torch.ones(len(ids), 16, dtype=dtype) for ids in routing.topk_idx]
    received = world.dispatch(xs, routing.topk_idx, routing.topk_weights, path=path)
    return world.combine([r.x for r in received], [r.handle for r in received])


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


def all_kernels():
    """List (op, name) of every jit function of the kernel modules that is launched: `_*_kernel`."""
    return {
        (op, name)
        for op in OPS
        for name, fn in vars(getattr(COMPILED_KERNELS, op)).items()
        if isinstance(fn, JITFunction) and fn.fn.__module__.endswith(f".{op}")
        if name.endswith("_kernel")
    }


@functools.cache
def recorded():
    """Return the distinct launches of all runs, and the sums of the runs."""
    launches, sums = {}, []
    run = InterpretedFunction.run

    def record(self, *args, grid, warmup, **kwargs):
        launches[as_launch(self, dict(zip(self.arg_names, args, strict=False)) | kwargs)] = None
        return run(self, *args, grid=grid, warmup=warmup, **kwargs)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(InterpretedFunction, "run", record)
        patch.setattr("railwave.world.Config", functools.partial(Config, tiles=TILES))
        for path, dtype in RUNS:
            sums.append(run_cluster(path, dtype))
    return list(launches), sums


def compile_launch(launch):
    """Compile a kernel as it was launched; return the cubin."""
    kernel = getattr(getattr(COMPILED_KERNELS, launch.op), launch.kernel)
    source = ASTSource(
        fn=kernel, signature=dict(launch.signature), constexprs=dict(launch.constants)
    )
    return triton.compile(source, target=SM_90, options={"enable_fp_fusion": False}).asm["cubin"]


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
        cubin = compile_launch(launch)
        assert cubin[:4] == b"\x7fELF", launch.id
    check_language()
    again = run_cluster(*RUNS[0])
    assert all(torch.equal(a, b) for a, b in zip(again, sums[0], strict=True))
    check_language()


def test_compiling_comes_first_in_a_fresh_process():
    """Compile, interpret, compile: the first of them decides nothing."""
    program = """
import sys
sys.path.insert(0, sys.argv[1])
import torch, triton, triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from railwave.kernels import load
from heaps import make_config

S = make_config(2, 2, 2).shape

def compile_tell():
    constants = {"S": S, "GRANT_WAVES": 1}
    signature = dict.fromkeys(("me", "word_off", "grant_off"), "i64")
    signature |= {"bases_ptr": "*i64", "state_ptr": "*i64"}
    signature |= {"recv_load_ptr": "*i32", "rail_mates_ptr": "*i32"}
    signature |= dict.fromkeys(constants, "constexpr")
    kernel = load(interpret=False).wire._tell_kernel
    signature = {name: signature[name] for name in kernel.arg_names}
    source = ASTSource(fn=kernel, signature=signature, constexprs=constants)
    return triton.compile(source, target=GPUTarget("cuda", 90, 32)).asm["cubin"]

first = compile_tell()
import test_kernels_move
test_kernels_move.test_unpack_example()
triton.knobs.compilation.always_compile = True
assert len(compile_tell()) == len(first)
"""
    subprocess.run(
        [sys.executable, "-c", program, str(Path(__file__).parent)], check=True, timeout=300
    )


def test_a_run_needs_no_variant_for_a_scalar():
    """Steps, waves, offsets and PEs are no constants: a launch's arguments may change freely."""
    for op, name in all_kernels():
        kernel = getattr(getattr(COMPILED_KERNELS, op), name)
        for parameter in kernel.params:
            if not parameter.is_constexpr and not parameter.name.endswith("_ptr"):
                assert parameter.do_not_specialize, (name, parameter.name)
        assert inspect.getdoc(kernel.fn), name
