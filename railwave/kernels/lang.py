"""The few names whose meaning depends on where a kernel runs.

Kernel files import from here what Triton decides when a function is decorated: `jit` for kernels,
`helper` for functions that kernels call, and Triton's own jit functions. When interpreting, helpers
are rewritten once, here, because Triton's interpreter re-patches its language module at every call
of an undecorated helper (0.4-0.9 ms each).

Index arithmetic in kernels is int64: offsets may pass 2**31, and the interpreter checks every
int32 operation for overflow at six times the cost. A scalar goes through `i64` and is assigned with
its type, `n: int = i64(...)`: the interpreter makes a tensor of what is assigned without one. What
is compiled loses those types (`_evaluated_once`).
"""

import re
import threading
import time
from functools import partial
from inspect import signature

import triton
import triton.language as tl
from triton.language import core  # noqa: F401  (see `jit`)

INTERPRET = __name__.endswith(".interpreted.lang")
# How many rows are loaded without looking in between whether there are more: interpreted, what is
# spared costs more; on a GPU each would wait for the answer about it.
ROWS_AT_ONCE = tl.constexpr(1 if INTERPRET else 4)


# Called around every launch while a trace is taken, see `railwave.tracing`: a context manager of a
# kernel's name and its scalar arguments.
around_launch = None
# `told.launch` of a thread is told of its launches while a call is recorded, see
# `railwave.recording`: the loaded kernel, its grid, its arguments and its constants.
told = threading.local()


def _launch(kernel, names, args, launch):
    around = around_launch  # which another thread may change
    if around is None:
        return launch()
    scalars = {n: a for n, a in zip(names, args, strict=False) if not n.endswith("_ptr")}
    with around(kernel.__name__, scalars):
        return launch()


def hooked():
    """Say whether Triton tells somebody of launches."""
    runtime = triton.knobs.runtime
    hooks = runtime.launch_enter_hook, runtime.launch_exit_hook
    return any(getattr(hook, "calls", hook) for hook in hooks)


def jit(fn):
    """Decorate a kernel for this module's mode; arguments that are not `*_ptr` are scalars.

    Compiled, a scalar is an int64 whose value makes no variant of the kernel (Triton would turn a 1
    into a constant, take 2**31 for another type, and recompile while peers wait).

    The kernel's module must have both `triton.language` and `triton.language.core` among its
    globals: the interpreter restores exactly the modules that it finds there.
    """
    scalars = [name for name in signature(fn).parameters if not name.endswith("_ptr")]
    if INTERPRET:
        from triton.runtime.interpreter import InterpretedFunction

        class Interpreted(InterpretedFunction):
            def run(self, *args, **options):
                run, tell = super().run, getattr(told, "launch", None)
                result = _launch(self, self.arg_names, args, lambda: run(*args, **options))
                if tell is not None:
                    tell(partial(run, **options), (*options["grid"], 1, 1)[:3], args, [])
                return result

        kernel = Interpreted(fn)
        # As if they were constexpr: scalar arguments stay Python ints.
        kernel.rewrite().__annotations__.update(dict.fromkeys(scalars, tl.constexpr))
        return kernel
    runtime = [name for name in scalars if fn.__annotations__.get(name) is not tl.constexpr]
    fn.__annotations__.update(dict.fromkeys(runtime, tl.int64))
    return _evaluated_once(_Kernel(fn, do_not_specialize=runtime))


class _Kernel(triton.JITFunction):
    """A compiled kernel whose sums are as written: no multiplication is fused with an addition.

    Launchers pass pointers and scalars by position and constants by name. A variant that has been
    launched is found by what makes it one, pointers' types and alignment and the constants: Triton
    itself looks at every argument and every global again, which takes longer than a dispatch may.
    """

    def __init__(self, fn, **options):
        super().__init__(fn, **options)
        self._variants = {}
        self._constants = [p.name for p in self.params if p.is_constexpr]
        self._pointers = [i for i, p in enumerate(self.params) if p.name.endswith("_ptr")]

    def run(self, *args, **options):
        if around_launch is None:
            return self._run(*args, **options)
        return _launch(self, self.arg_names, args, lambda: self._run(*args, **options))

    def _run(self, *args, grid, warmup, **options):
        key = [value for name, value in options.items() if name != "extern_libs"]
        for i in self._pointers:
            key += (args[i].dtype, args[i].data_ptr() % 16)
        # Which libraries are linked, the constants say (`Shape.REMOTE`).
        key = (args[self._pointers[0]].device, *key)
        kernel, sizes = self._variants.get(key), (*grid, 1, 1)[:3]
        constants = [options[name] for name in self._constants]
        if kernel is None:
            kernel = super().run(*args, grid=grid, warmup=warmup, enable_fp_fusion=False, **options)
            self._variants[key] = kernel
        else:
            kernel[sizes](*args, *constants)
        tell = getattr(told, "launch", None)
        if tell is not None:
            tell(kernel, sizes, args, constants)
        return kernel


def helper(fn):
    """Decorate a function that kernels call."""
    if INTERPRET:
        from triton.runtime.interpreter import InterpretedFunction

        return InterpretedFunction(fn).rewrite()
    return _evaluated_once(triton.jit(fn))


def _evaluated_once(compiled):
    """Compile `x: int = f()` as `x = f()`: of an annotated one triton runs f() twice."""
    compiled._unsafe_update_src(re.sub(r"(?m)^(\s+\w+): (?:int|float) = ", r"\1 = ", compiled.src))
    return compiled


def _bind(fn):
    return helper(fn.fn) if INTERPRET else fn


# Triton's own jit functions; those that would hide a Python builtin get a name of their own.
cumsum = _bind(tl.cumsum)
tile_max = _bind(tl.max)
tile_min = _bind(tl.min)
tile_sum = _bind(tl.sum)
cdiv = _bind(tl.cdiv)


@helper
def iota(N: tl.constexpr):
    """Return 0, 1, ..., N - 1 as int64."""
    return tl.arange(0, N).to(tl.int64)


@helper
def column(table, j):
    """Return column j of a two-dimensional table."""
    return tile_sum(tl.where(iota(table.shape[1])[None, :] == j, table, 0), 1)


if INTERPRET:

    def i64(x):
        """Return a scalar as a Python int, whose arithmetic costs nothing."""
        if isinstance(x, tl.tensor):
            return int(x.handle.data.item())
        return x.value if isinstance(x, tl.constexpr) else x

    def clamp(x, low, high):
        """Return the scalar x, or the bound that it passes."""
        return low if x < low else high if x > high else x

    def ratio(a, b):
        """Return a / b of two integers below 2**53, in float64."""
        return float(a) / float(b)

    def f64(x):
        """Return a scalar as a float64 tensor, for a store: a Python float would be a float32."""
        return tl.full((), x, tl.float64)

    def clock_ns():
        """Return a monotonic time in nanoseconds."""
        return time.monotonic_ns()

    def relax():
        """Let another process run between two polls."""
        time.sleep(0)

else:

    @helper
    def i64(x):
        """Return a scalar as int64."""
        return tl.cast(x, tl.int64)

    @helper
    def clamp(x, low, high):
        """Return the scalar x, or the bound that it passes."""
        return tl.minimum(tl.maximum(x, low), high)

    @helper
    def ratio(a, b):
        """Return a / b of two integers below 2**53, in float64."""
        return tl.cast(a, tl.float64) / tl.cast(b, tl.float64)

    @helper
    def f64(x):
        """Return a scalar as a float64 tensor."""
        return tl.cast(x, tl.float64)

    @helper
    def clock_ns():
        """Return the GPU's global timer in nanoseconds (Triton has no call for it)."""
        return tl.inline_asm_elementwise(
            "mov.u64 $0, %globaltimer;", "=l", [], dtype=tl.int64, is_pure=False, pack=1
        )

    @helper
    def relax():
        """Poll again at once: a waiting program is small."""
        pass
