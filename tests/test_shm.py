"""Shared memory: room, names, modes, what is left and what `railwave clean` removes."""

import fcntl
import os
import re
import secrets
import signal
import stat
import time

import pytest
import torch
import torch.distributed as dist

from processes import run, run_all, state_of
from railwave.cli import main
from railwave.heap import Layout, ShmHeap, shm

LAYOUT = Layout.of({"words": 4096})


def gather(value):
    values = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values


def attach(rank, folder):
    """M2: processes that only attached end first; the owner's memory stays."""
    shm.FOLDER = folder
    heap = ShmHeap(rank, 3, LAYOUT, gather=gather)
    dist.barrier()
    assert os.listdir(folder) == []
    pids = gather(os.getpid())
    heap.region(0, "words", torch.int64)[rank] = rank + 1
    dist.barrier()
    if rank == 0:
        while any(state_of(pid) != "Z" for pid in pids[1:]):
            time.sleep(0.01)
        assert heap.region(0, "words", torch.int64)[:4].tolist() == [1, 2, 3, 0]
        heap.close()
        heap.close()
        return
    if rank == 1:
        heap.close()
    os._exit(0)


def test_case_m2_every_pe_reaches_every_heap_and_none_has_a_name(shm_folder):
    ended = run(attach, 3, shm_folder)
    assert [(e.code, e.error) for e in ended] == [(0, "")] * 3
    assert os.listdir(shm_folder) == []


def outlive(rank, folder):
    shm.FOLDER = folder
    heap = ShmHeap(rank, 2, LAYOUT, gather=gather)
    words = heap.region(0, "words", torch.int64)
    words[rank] = 7
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    while words[1] != 7:
        pass
    assert words[:3].tolist() == [7, 7, 0]


def test_a_killed_process_takes_nothing_from_the_others_and_leaves_nothing(shm_folder):
    ended = run(outlive, 2, shm_folder)
    assert (ended[0].code, ended[0].error) == (0, "")
    assert ended[1].code == -signal.SIGKILL
    assert os.listdir(shm_folder) == []


def kill_between(rank, folder):
    """Rank 1 dies when its file has a name; the other ends, and only rank 1's file is left."""
    shm.FOLDER = folder
    make = shm._make

    def make_and_die(path, size):
        make(path, size)
        os.kill(os.getpid(), signal.SIGKILL)

    if rank == 1:
        shm._make = make_and_die
    with pytest.raises(RuntimeError):
        ShmHeap(rank, 2, LAYOUT, gather=gather)


def test_a_kill_while_a_file_has_a_name_leaves_what_clean_removes(shm_folder, monkeypatch):
    ended = run(kill_between, 2, shm_folder)
    assert (ended[0].code, ended[0].error) == (0, "")
    (left,) = os.listdir(shm_folder)
    assert re.fullmatch(rf"railwave-{os.getuid()}-[0-9a-f]{{32}}-1", left)
    monkeypatch.setattr(shm, "FOLDER", shm_folder)
    assert shm.clean() == [f"{shm_folder}/{left}"]
    assert os.listdir(shm_folder) == []


def no_room(rank, folder, free):
    shm.FOLDER = folder
    if rank == 1:  # the ranks may see different amounts
        shm.free_bytes = lambda: free
    with pytest.raises(MemoryError) as caught:
        ShmHeap(rank, 2, LAYOUT, gather=gather)
    assert os.listdir(folder) == []
    return str(caught.value)


def test_too_little_room_is_said_on_every_rank_before_anything_is_made(shm_folder):
    need = 2 * LAYOUT.size
    for text in run_all(no_room, 2, shm_folder, need - 1):
        assert f"need {need} bytes of {shm_folder}, of which {need - 1} are free" in text
        assert "--shm-size" in text and "max_tokens_per_rank" in text


def full(rank, folder):
    """The room goes to somebody else between the check and the allocation."""
    shm.FOLDER = folder
    if rank == 1:

        def no_space(*_):
            raise OSError(28, "No space left on device")

        os.posix_fallocate = no_space
    with pytest.raises(RuntimeError, match=r"could not make shared memory .*by rank: \{1: .*space"):
        ShmHeap(rank, 2, LAYOUT, gather=gather)
    gather(None)
    assert os.listdir(folder) == []


def test_room_that_is_lost_meanwhile_is_an_error_on_every_rank_and_leaves_nothing(shm_folder):
    run_all(full, 2, shm_folder)


def small(rank, folder):
    shm.FOLDER = folder
    with pytest.raises(MemoryError, match="are free"):
        ShmHeap(rank, 2, Layout.of({"rows": 1 << 20}), gather=gather)
    heap = ShmHeap(rank, 2, LAYOUT, gather=gather)
    heap.close()


def test_case_m1_a_small_shared_memory_is_refused_and_a_smaller_heap_fits(tmp_path):
    """M1, on a real tmpfs where one may be mounted."""
    if os.system(f"mount -t tmpfs -o size=1m railwave-test {tmp_path} 2>/dev/null"):
        pytest.skip("needs the right to mount a tmpfs")
    try:
        run_all(small, 2, str(tmp_path))
        assert os.listdir(tmp_path) == []
    finally:
        os.system(f"umount {tmp_path}")


def hosts(rank):
    shm._boot_id = lambda: str(rank)
    with pytest.raises(RuntimeError, match="all ranks on one host, got"):
        ShmHeap(rank, 2, LAYOUT, gather=gather)


def test_ranks_on_two_hosts_are_refused():
    run_all(hosts, 2)


@pytest.fixture
def folder(shm_folder, monkeypatch):
    monkeypatch.setattr(shm, "FOLDER", shm_folder)
    return shm_folder


def leftover(folder, *, uid=None):
    uid = os.getuid() if uid is None else uid
    return f"{folder}/railwave-{uid}-{secrets.token_hex(16)}-0"


def test_files_are_private_and_their_names_cannot_be_guessed(folder):
    path = leftover(folder)
    file = shm._make(path, 100)
    info = os.stat(path)
    assert (stat.S_IMODE(info.st_mode), info.st_size) == (0o600, 100)
    with pytest.raises(FileExistsError):
        shm._make(path, 100)
    with pytest.raises(OSError, match="with 100 bytes"):
        shm._open(path, 200)
    os.close(file)

    tokens = []

    def spy(value):
        if isinstance(value, tuple):
            tokens.append(value[1])
        return [value]

    for _ in range(2):
        ShmHeap(0, 1, LAYOUT, gather=spy).close()
    assert len(set(tokens)) == 2 and all(re.fullmatch("[0-9a-f]{32}", t) for t in tokens)


def test_clean_removes_own_leftovers_and_nothing_else(folder):
    paths = sorted(leftover(folder) for _ in range(2))
    for path in paths:
        os.close(shm._make(path, 10))
    used = leftover(folder)
    file = shm._make(used, 10)  # its user holds a lock
    others = [leftover(folder, uid=os.getuid() + 1), f"{folder}/railwave-x", f"{folder}/torch_1"]
    for path in others:
        open(path, "w").close()
    target = f"{folder}/target"
    open(target, "w").close()
    link = leftover(folder)
    os.symlink(target, link)

    assert shm.clean(remove=False) == paths == shm.clean()
    assert sorted(os.listdir(folder)) == sorted(
        map(os.path.basename, [used, *others, target, link])
    )
    os.close(file)
    assert shm.clean() == [used]


def test_clean_keeps_what_another_process_uses(folder):
    path = leftover(folder)
    os.close(shm._make(path, 10))
    ours, theirs = os.pipe()
    child = os.fork()
    if child == 0:
        fcntl.flock(os.open(path, os.O_RDWR), fcntl.LOCK_SH)
        os.write(theirs, b"locked")
        signal.pause()
    try:
        os.read(ours, 6)
        assert shm.clean() == []
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        os.close(ours)
        os.close(theirs)
    assert shm.clean() == [path]


def test_clean_may_come_between_making_and_locking_a_file(folder, monkeypatch):
    lock, came = fcntl.flock, []

    def clean_first(file, how):
        if how == fcntl.LOCK_SH and not came:
            came.append(shm.clean())
        lock(file, how)

    monkeypatch.setattr(fcntl, "flock", clean_first)
    path = leftover(folder)
    file = shm._make(path, 10)
    assert came == [[path]] and os.fstat(file).st_nlink == 1
    assert shm.clean() == [] and os.listdir(folder) == [os.path.basename(path)]
    os.close(file)


def test_two_cleans_at_once_keep_what_is_in_use(folder, monkeypatch):
    """The other clean removes the file, and its owner makes a new one, before this one locks it."""
    path, lock, made = leftover(folder), fcntl.flock, []
    os.close(shm._make(path, 10))

    def late(file, how):
        if how & fcntl.LOCK_EX and not made:
            os.unlink(path)
            made.append(shm._make(path, 10))
        lock(file, how)

    monkeypatch.setattr(fcntl, "flock", late)
    assert shm.clean() == []
    assert os.fstat(made[0]).st_nlink == 1
    os.close(made[0])


def test_railwave_clean_lists_what_it_removed(folder, capsys):
    path = leftover(folder)
    os.close(shm._make(path, 10))
    assert main(["clean"]) == 0
    assert capsys.readouterr().out == f"removed {path}\n"
    assert main(["clean"]) == 0
    assert capsys.readouterr().out == f"nothing of yours to remove in {folder}\n"
    assert main(["clean", "everything"]) == 2
