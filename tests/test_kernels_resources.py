"""What the compiled kernels take of a GPU at full size, read from their cubins.

A kernel that keeps values in local memory is slow, and on a GPU that several processes share CUDA
may wait for all of them before it makes room for that: for ever, if one waits for this kernel.
"""

import re
import subprocess
from dataclasses import replace
from itertools import product
from pathlib import Path

import pytest
import torch
import triton
from triton.compiler import ASTSource
from triton.runtime.jit import JITFunction, mangle_type

from railwave import Topology
from railwave.arguments import check_call, check_out, check_repeat
from railwave.config import COMPILED, PATHS, Config, fitting
from railwave.exchange import Exchange, combine, dispatch
from railwave.heap import LocalHeap
from railwave.kernels import load
from test_kernels_compile import SM_90

CUOBJDUMP = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
HALF_AN_SM = 1 << 15  # registers, so that two programs fit
# What moves payload: 16 bytes at a time.
BY_EXPERT = tuple(f"_{name}_kernel" for name in ("tally", "place", "spread", "gather", "final"))
MOVING = (
    *("pack", "local", "put", "granted", "unpack", "finish", "spread"),
    *("gather", "copy_in", "own", "reduce", "take"),
)


def recorded(
    nodes,
    gpus,
    tokens,
    hidden,
    top_k,
    *,
    sharing=1,
    remote=False,
    nic_gbs=None,
    paths=("joint", "native", "granted"),
):
    """Return {(kernel, signature, constants)} of a dispatch and a combine, which never run."""
    launches = {}

    def record(self, *args, grid, warmup, num_warps=4, extern_libs=None, **kwargs):
        values = dict(zip(self.arg_names, args, strict=False)) | kwargs
        signature, constants, attrs = {}, {}, {}
        for i, parameter in enumerate(self.params):
            name, value = parameter.name, values[parameter.name]
            signature[name] = "constexpr" if parameter.is_constexpr else "i64"
            if parameter.is_constexpr:
                constants[name] = value
            elif isinstance(value, torch.Tensor):
                signature[name] = mangle_type(value)
                attrs[(i,)] = [["tt.divisibility", 16]]
        launches[self.__name__, str(signature), str(constants)] = (
            *(self, signature, constants, attrs),
            {"num_warps": num_warps, "enable_fp_fusion": False, "extern_libs": extern_libs},
        )

    topo, cpu = Topology(nodes, gpus, gpus), torch.device("cpu")
    sizes = dict(num_experts=8 * topo.num_ranks, top_k=top_k, hidden=hidden)
    sizes |= dict(max_tokens_per_rank=tokens, dtype=torch.bfloat16, tiles=COMPILED)
    sizes |= dict(nic_gbs=nic_gbs)

    def one_pe(**more):
        config = Config(topo=topo, **sizes, **more)
        # As `Communicator` does it, once it knows who shares a GPU.
        config = replace(config, tiles=fitting(config.tiles, 132, sharing), remote=remote)
        heap = LocalHeap(topo.num_ranks, config.layout, device=cpu)
        pe = Exchange(config, heap, 0, device=cpu, deadline_s=1)
        pe.kernels, pe.persists = load(interpret=False), True
        return config, pe

    config, pe = one_pe()
    x = torch.zeros(tokens, hidden, dtype=torch.bfloat16)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(JITFunction, "run", record)
        for path in paths:
            ids, weights = torch.zeros(tokens, top_k).long(), torch.zeros(tokens, top_k)
            handle = result(dispatch(pe, check_call(config, x, ids, weights, path))).handle
            result(dispatch(pe, check_repeat(config, x, handle)))
            result(combine(pe, x[:0], handle))
        by_token = set(launches)
        config, pe = one_pe(max_recv_rows=8)  # or all that could come by expert
        form = {"static_shapes": True, "expert_alignment": 8, "zero_padding": True}
        handle = result(dispatch(pe, check_call(config, x, ids, weights, **form))).handle
        result(dispatch(pe, check_repeat(config, x, handle, zero_padding=True)))
        out = torch.zeros(handle.num_rows, hidden, dtype=torch.bfloat16)
        given = {"weights": torch.zeros(len(out)), "bias": (x, x[0].float())}
        out, options = check_out(config, out, handle, **given)
        result(combine(pe, out, handle, options))
    return [
        launch
        for key, launch in launches.items()
        if key in by_token or key[0] in BY_EXPERT  # the others are there already
    ]


def result(stages):
    """Run stages to their end."""
    try:
        while True:
            next(stages)
    except StopIteration as stop:
        return stop.value


FEW = ("joint", "granted")
FULL = [
    pytest.param(*on, paths, marks=[] if paths == FEW else [pytest.mark.soak])
    for paths in (FEW, PATHS)
    # A GPU for each PE; and one for eight, as if they were on other hosts.
    for on in ((1, False), (8, True))
]


@pytest.mark.parametrize("sharing, remote, paths", FULL)
def test_kernels_at_full_size_keep_all_in_registers_and_move_16_bytes_at_a_time(
    sharing, remote, paths, tmp_path
):
    seen = set()
    for launch in recorded(4, 8, 4096, 7168, 8, sharing=sharing, remote=remote, paths=paths):
        kernel, _, constants, *_ = launch
        asm = compiled(*launch)
        name = kernel.__name__.removeprefix("_").removesuffix("_kernel")
        stack = stack_of(asm, tmp_path)
        assert stack <= 64, (name, stack, constants)  # a few saved registers are no array
        assert name != "granted" or registers_of(tmp_path) <= 128
        threads = 32 * launch[-1]["num_warps"]
        assert sharing == 1 or registers_of(tmp_path) * threads <= HALF_AN_SM, name
        if name in MOVING:
            seen.add(name)
            for what in ("ld", "st"):
                assert re.search(rf"{what}\.global\S*\.v4", asm["ptx"]), (name, what)
    assert seen == set(MOVING)


@pytest.mark.parametrize("sharing", [1, 32])
def test_put_through_emulated_nics_keeps_all_in_registers_too(sharing, tmp_path):
    launches = recorded(4, 8, 4096, 7168, 1, sharing=sharing, nic_gbs=3.125)
    kernels = ("_put_kernel", "_granted_kernel")
    puts = [launch for launch in launches if launch[0].__name__ in kernels]
    assert len(puts) == 4  # of records and of sums
    for put in puts:
        asm = compiled(*put)
        assert stack_of(asm, tmp_path) <= 64
        assert put[0].__name__ != "_granted_kernel" or registers_of(tmp_path) <= 128
        for what in ("ld", "st"):
            assert re.search(rf"{what}\.global\S*\.v4", asm["ptx"]), what
        assert "%globaltimer" in asm["ptx"]


# Nodes, GPUs, tokens, hidden, top-k, and PEs to a GPU; all but two in `make soak`.
SMALLEST = [(2, 2, 1, 8, 1), (1, 1, 1, 1, 1), (8, 1, 1, 5, 3), (2, 2, 2, 8, 1)]
QUICK = [(SMALLEST[1], 1), (SMALLEST[2], 8)]


@pytest.mark.parametrize(
    "sizes, sharing",
    [
        pytest.param(*both, marks=[] if both in QUICK else [pytest.mark.soak])
        for both in product(SMALLEST, [1, 8])
    ],
)
def test_kernels_compile_at_the_smallest_sizes(sizes, sharing):
    granted = sizes[0] == 8 and sharing == 8  # a large kernel, and the same but for its lanes
    paths = ("joint", "native", "granted") if granted else ("joint", "native")
    for launch in recorded(*sizes, sharing=sharing, paths=paths):
        compiled(*launch)


@pytest.mark.parametrize("sharing", [1, 8])
def test_count_stays_in_registers_with_many_experts_a_token(sharing, tmp_path):
    launches = recorded(2, 8, 2048, 16, 64, sharing=sharing)
    (count,) = [launch for launch in launches if launch[0].__name__ == "_count_kernel"]
    assert stack_of(compiled(*count), tmp_path) <= 64


def compiled(kernel, signature, constants, attrs, options):
    """Compile a launch for an H200; return what Triton made of it."""
    source = ASTSource(fn=kernel, signature=signature, constexprs=constants, attrs=attrs)
    options = {name: value for name, value in options.items() if value is not None}
    return triton.compile(source, target=SM_90, options=options).asm


def stack_of(asm, folder):
    """Return the bytes of local memory that a kernel takes a thread."""
    (folder / "cubin").write_bytes(asm["cubin"])
    return _usage(folder, "STACK")


def registers_of(folder):
    """Return the registers a thread of the kernel that `stack_of` was asked about."""
    return _usage(folder, "REG")


def _usage(folder, what):
    said = subprocess.run(
        [CUOBJDUMP, "-res-usage", folder / "cubin"], capture_output=True, text=True
    ).stdout
    return int(re.search(rf"Function _.*\n.*{what}:(\d+)", said)[1])
