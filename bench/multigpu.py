"""Dispatch and combine with one process per GPU, against what torch has for it, in one run.

python -m bench.run multigpu

The same routing goes through railwave, with each GPU as its own node ("nodes") or all as one
("node"), and through NCCL's all_to_all_single with the permutes around it; samples take turns.
Torch's all_to_all_vdev_2d starts NVSHMEM its own way and so has processes of its own. A rate
counts the payload bytes that a GPU sends to others, of a stage all bytes that it stores there;
`of_link` is a rate over that of plain copies between the GPUs, both ways at once, of the same run.
"""

from __future__ import annotations

import inspect
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import railwave
from bench.peers import AllToAll, RingCopy, Vdev2d
from bench.ranks import Rank, Sizes, Timed, run_ranks
from bench.timeline import kernels_of
from railwave.kernels.shape import make_format

LINK_BYTES = 256 << 20
PROFILED = 5  # dispatches of which the profiler sees the stage
VDEV_ENVIRONMENT = {"NVSHMEM_DISABLE_NCCL": "1", "TORCH_SYMM_MEM_DISABLE_MULTICAST": "1"}


def measure(sizes: Sizes, time_limit_s: float) -> Iterator[dict[str, Any]]:
    """Yield a result a case, and a line for what is left out.

    Raises:
        RuntimeError: processes failed, or took too long; after all results that there are.
    """
    until, failed = time.monotonic() + time_limit_s, []
    jobs = [(sizes.layouts, {}), (("vdev_2d",), VDEV_ENVIRONMENT)]
    for layouts, environment in jobs if sizes.device == "cuda" else jobs[:1]:
        job = Sizes(**{**asdict(sizes), "layouts": layouts})
        with tempfile.TemporaryDirectory() as folder:
            file = Path(folder) / "results.jsonl"
            file.touch()
            code = run_ranks(job, file, environment, until)
            yield from map(json.loads, file.read_text().splitlines())
        if code:
            failed.append(f"{' '.join(layouts)}: {code}")
    if sizes.device != "cuda":
        yield from (_left_out(what, "needs GPUs") for what in ("vdev_2d", "copies", "graphs"))
    if failed:
        raise RuntimeError("; ".join(failed))


def _left_out(what: str, why: str) -> dict[str, Any]:
    return {"left_out": what, "why": why}


def links(rank: Rank, num_bytes: int) -> dict[Any, Timed]:
    """Return the plain copies: of a fixed size, and of so many bytes."""
    if not rank.on_gpu:
        return {}
    sizes = {("copy", "link"): LINK_BYTES, ("copy", "same bytes"): num_bytes}
    if rank.rank:
        return dict.fromkeys(sizes, lambda: 0.0)
    return {name: RingCopy(rank.sizes.gpus, size).time_us for name, size in sizes.items()}


def measure_layout(rank: Rank, layout: str, tokens: int) -> Iterator[dict[str, Any]]:
    """Compare railwave with `AllToAll`, then time both, on all ranks."""
    sizes, n = rank.sizes, rank.sizes.gpus
    topo = railwave.Topology(n, 1, 1) if layout == "nodes" else railwave.Topology(1, n, n)
    x, ids, _ = mine = rank.draw(tokens)
    rows = remote_rows(ids, sizes.experts // n, rank.rank, n)
    num_bytes = max(rank.gather(rows * x.shape[1] * x.itemsize))
    peer = AllToAll(rank.group, sizes.experts)
    with railwave.Communicator(
        topo,
        num_experts=sizes.experts,
        top_k=sizes.top_k,
        hidden=sizes.hidden,
        max_tokens_per_rank=tokens,
        paths=("joint",),
        deadline_s=60,
        device=rank.device,
    ) as rw:
        runs = railwave_runs(rw, mine, on_gpu=rank.on_gpu)
        check_equal(rw, peer, mine, runs)
        got, sent = peer.dispatch(*mine)
        runs[("dispatch", "all_to_all_single")] = partial(peer.dispatch, *mine)
        runs[("dispatch", "all_to_all_single, x alone")] = partial(peer.dispatch, x, ids, None)
        runs[("combine", "all_to_all_single")] = partial(peer.combine, got, sent)
        cases = {name: partial(rank.once_us, run) for name, run in runs.items()}
        about = {"layout": layout, "tokens": tokens}
        times = rank.time_all({**cases, **links(rank, num_bytes)})
        results = list(summaries(times, num_bytes, about))
        if rank.on_gpu:
            results.append(stage_result(rank, rw, mine, rows, about, results))
            results.append(stage_times(rank, runs, about))
    if rank.on_gpu and ("dispatch", "static view") not in runs:
        results.append(_left_out("static view, graph", "this railwave has no static_shapes"))
    yield from results


def remote_rows(topk_idx: torch.Tensor, rank_experts: int, rank: int, ranks: int) -> int:
    """Count (token, other rank) pairs: what a rank must send over the links."""
    goes = torch.zeros(len(topk_idx), ranks, dtype=torch.bool, device=topk_idx.device)
    goes.scatter_(1, topk_idx // rank_experts, True)
    return int(goes.sum() - goes[:, rank].sum())


def railwave_runs(
    rw: railwave.Communicator, mine: list[torch.Tensor], *, on_gpu: bool
) -> dict[tuple[str, str], Callable[[], Any]]:
    """Return dispatch and combine in every form that there is."""
    runs: dict[tuple[str, str], Callable[[], Any]] = {}

    def add(form: str, **options: Any) -> None:
        for _ in range(3):  # from the third one on, static calls repeat launches
            received = rw.dispatch(*mine, path="joint", **options)
        out = received.x.clone()  # what experts give, not where rows come in
        runs[("dispatch", form)] = partial(rw.dispatch, *mine, path="joint", **options)
        runs[("combine", form)] = partial(rw.combine, out, received.handle)

    add("copy")
    if on_gpu and "static_shapes" in inspect.signature(rw.dispatch).parameters:
        add("static view", static_shapes=True, out="view")
        for phase in ("dispatch", "combine"):
            runs[(phase, "static view, graph")] = captured(runs[(phase, "static view")])
    return runs


def captured(run: Callable[[], Any]) -> Callable[[], Any]:
    """Capture a call in a CUDA graph; return its replay."""
    run()
    torch.cuda.synchronize()
    dist.barrier()  # no rank's kernels wait for one that captures
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        result = run()

    def replay() -> Any:
        graph.replay()
        return result

    return replay


def check_equal(
    rw: railwave.Communicator,
    peer: AllToAll,
    mine: list[torch.Tensor],
    runs: dict[tuple[str, str], Callable[[], Any]],
) -> None:
    """Check that railwave and the peer give the same: rows bit for bit, sums closely."""
    rows, sent = peer.dispatch(*mine)
    for (phase, form), run in runs.items():
        if phase == "dispatch":
            # A view may have more rows than came; those are last.
            got = run().x[: len(rows)].contiguous()
            assert torch.equal(got.view(torch.int16), rows.view(torch.int16)), form
        else:
            # bfloat16, rounded once on either side, but added in another order.
            torch.testing.assert_close(
                run(), peer.combine(rows, sent), msg=lambda text, form=form: f"{form}: {text}"
            )
    # In fp32 nothing is rounded but the sums; half the hidden size fits what was declared.
    out = rows[:, : rows.shape[1] // 2].float().contiguous()
    handle = rw.dispatch(*mine, path="joint").handle
    torch.testing.assert_close(rw.combine(out, handle), peer.combine(out, sent))


def summaries(
    times: dict[Any, list[float]], num_bytes: int, about: dict[str, Any]
) -> Iterator[dict[str, Any]]:
    """Yield a result a case: times, rate, and its fraction of the link's."""
    link = times.get(("copy", "link"))
    link_gbs = link and LINK_BYTES / statistics.median(link) / 1e3
    for (phase, form), us in times.items():
        moved = LINK_BYTES if form == "link" else num_bytes
        rate = moved / statistics.median(us) / 1e3
        result = {
            **about,
            "phase": phase,
            "form": form,
            "median_us": round(statistics.median(us), 1),
            "min_us": round(min(us), 1),
            "p95_us": round(statistics.quantiles(us, n=20, method="inclusive")[-1], 1),
            "bytes": moved,
            "GB_s": round(rate, 1),
        }
        yield result | ({"of_link": round(rate / link_gbs, 3)} if link_gbs else {})


def stage_result(
    rank: Rank,
    rw: railwave.Communicator,
    mine: list[torch.Tensor],
    rows: int,
    about: dict[str, Any],
    results: list[dict[str, Any]],
) -> dict[str, Any]:
    """Return the rate of the stage that uses the links, from the profiler's kernel times."""
    name = "_put_kernel" if about["layout"] == "nodes" else "_local_kernel"

    def run() -> None:
        for _ in range(PROFILED):
            rw.dispatch(*mine, path="joint")

    fmt = make_format(mine[0].shape[1] * mine[0].itemsize, rank.sizes.top_k, rw.config.shape.G)
    # With one GPU a node a record is a row; in a node only the row's part of it moves.
    words = fmt.RECORD_WORDS if name == "_put_kernel" else fmt.META
    us = sum(one["us"] for one in kernels_of(run, rank.device) if name in one["kernel"]) / PROFILED
    both = rank.gather((us, rows * words * 4))
    us, num_bytes = (max(of) for of in zip(*both, strict=True))
    link = next(one["GB_s"] for one in results if one["form"] == "link")
    rate = num_bytes / us / 1e3 if us else 0.0
    stage = {"phase": "stage", "form": name, "mean_us": round(us, 1), "bytes": num_bytes}
    return {**about, **stage, "GB_s": round(rate, 1), "of_link": round(rate / link, 3)}


def stage_times(rank: Rank, runs: dict[Any, Callable[[], Any]], about: dict[str, Any]) -> Any:
    """Return what each kernel of a static dispatch and combine takes, waits included."""
    times: dict[str, float] = {}
    for phase in ("dispatch", "combine"):
        run = runs.get((phase, "static view"))
        for one in kernels_of(run, rank.device) if run else ():
            name = f"{phase} {one['kernel']}"[:40]
            times[name] = round(times.get(name, 0.0) + one["us"], 1)
    return {**about, "phase": "stages", "form": "static view, profiler", "us": times}


def measure_vdev(rank: Rank, tokens: int) -> Iterator[dict[str, Any]]:
    """Time all_to_all_vdev_2d, with the permute before it and without, on all ranks."""
    x, ids, _ = rank.draw(tokens)
    peer = Vdev2d(x, ids, rank.sizes.experts)
    num_bytes = max(rank.gather(peer.remote_rows * x.shape[1] * x.itemsize))
    runs = {"vdev_2d": peer.dispatch, "vdev_2d, exchange alone": peer.exchange}
    cases = {("dispatch", name): partial(rank.once_us, run) for name, run in runs.items()}
    times = rank.time_all({**cases, **links(rank, num_bytes)})
    yield from summaries(times, num_bytes, {"layout": "vdev_2d", "tokens": tokens})


def why_no_vdev() -> str:
    """Return why torch's all_to_all_vdev_2d cannot run here, or ""."""
    try:
        import torch.distributed._symmetric_memory as symm_mem

        if not symm_mem.is_nvshmem_available():
            return "torch finds no NVSHMEM"
        if not hasattr(torch.ops.symm_mem, "all_to_all_vdev_2d"):
            return "torch has no all_to_all_vdev_2d"
        symm_mem.set_backend("NVSHMEM")
    except (ImportError, AttributeError, RuntimeError) as error:
        return f"torch's symmetric memory: {error}"
    return ""


def main() -> None:
    """Run as one rank of torchrun: sizes as JSON, and the file to which rank 0 adds results."""
    values = json.loads(sys.argv[1])
    sizes = Sizes(**{name: tuple(v) if type(v) is list else v for name, v in values.items()})
    rank = Rank(sizes)
    shared = {name: getattr(sizes, name) for name in ("gpus", "hidden", "experts", "top_k")}

    def results() -> Iterator[dict[str, Any]]:
        for layout in sizes.layouts:
            why = why_no_vdev() if layout == "vdev_2d" else ""
            if why:
                yield _left_out(layout, why)
                continue
            # The largest first: later heaps use its memory again.
            for tokens in sorted(sizes.tokens, reverse=True):
                if layout == "vdev_2d":
                    yield from measure_vdev(rank, tokens)
                else:
                    yield from measure_layout(rank, layout, tokens)

    for result in results():
        if rank.rank == 0:
            with open(sys.argv[2], "a", encoding="utf-8") as file:
                print(json.dumps({**shared, **result}), file=file)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
