"""The promises, each with a test that fails where it is broken. Hermetic, on a CPU.

Reliability first (its tests fork this process, before any thread is started in it), then text
and tokens, then numbers. FULL=1 in the environment runs the long forms, an hour or so.
"""
import ast
import base64
import collections
import contextlib
import copy
import csv
import errno
import functools
import glob
import gzip
import hashlib
import http.server
import importlib.machinery
import io
import itertools
import json
import math
import mmap
import os
import random
import re
import resource
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import traceback
import types
import zipfile
import zlib

import numpy as np
import pytest
import torch
import torch._dynamo
import torch.utils.serialization
from torch.nn import functional as F

import model as gpt
import prepare
import sample
import train
from config import configure
from model import GPT, GPTConfig

REPO = os.path.dirname(os.path.abspath(train.__file__))
torch.set_num_threads(1)  # part of the numerics; and a process with a thread pool must not fork


# ---- killed, resumed, damaged, refused

FULL = bool(os.environ.get("FULL"))
SMALL = dict(dataset="tiny", n_layer=2, n_head=2, n_embd=32, block_size=16, batch_size=6,
            max_iters=12, warmup_iters=2, eval_interval=4, eval_iters=2, min_delta=0.5, patience=99,
            log_interval=1, checkpoint_interval=3, optimizer="adamw", device="cpu",
            dtype="float32", compile=False, init_from="auto", learning_rate=3e-3, min_lr=0.0,
            lr_schedule="cosine", muon_momentum=0.95, dropout=0.0)
with open(train.__file__) as source:  # `if __name__ == "__main__": ...`, the program
    PROGRAM = compile(ast.Module(ast.parse(source.read()).body[-1:], []), "train.py", "exec")
Run = collections.namedtuple("Run", "code out codes outs")


# ---- running train.py: a fork of this process, so that a start takes no 3 s of `import torch`

def fork(folder, *args, patch=None, rank=0, world=1, port=0, bare=False, **settings):
    """Start `python train.py ARGS` in a folder with data/tiny/; its process id. The output goes to
    folder.RANK. patch(): called in the new process first, to plant a fault. bare: without TINY."""
    if not os.path.exists(f"{folder}/data"):
        make_data(f"{folder}/data/tiny")
    sys.stdout.flush(), sys.stderr.flush()
    if pid := os.fork():
        return pid
    code = 1
    try:
        os.chdir(folder)
        fd = os.open(f"{folder}.{rank}", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        os.dup2(fd, 1), os.dup2(fd, 2)
        sys.stdout, sys.stderr = open(1, "w"), open(2, "w", errors="backslashreplace")
        os.environ.update(RANK=str(rank), WORLD_SIZE=str(world), LOCAL_RANK=str(rank),
                          MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
        sys.modules["matplotlib"] = None  # a second for a picture
        sys.argv = ["train.py", *args, *as_flags({**({} if bare else SMALL), **settings})]
        train.RANK, train.WORLD, train.matmul_rate = rank, world, lambda *a: 1e9
        signal.signal(signal.SIGINT, signal.default_int_handler)
        if patch:
            patch()
        train.__name__ = "__main__"
        exec(PROGRAM, vars(train))
        code = 0
    except SystemExit as e:
        code = e.code if type(e.code) is int else int(e.code is not None)
    except BaseException:
        traceback.print_exc()
    finally:
        with contextlib.suppress(BaseException):
            sys.stdout.flush(), sys.stderr.flush()
        os._exit(code)


def as_flags(settings):
    return [f"--{k}={v}" for k, v in settings.items()]


def wait(*pids, seconds=120):
    """The exit statuses of forked processes, -SIGNAL of killed ones."""
    codes, end = {}, time.monotonic() + seconds
    while len(codes) < len(pids):
        for pid in set(pids) - set(codes):
            done, status = os.waitpid(pid, os.WNOHANG)
            if done:
                codes[pid] = os.waitstatus_to_exitcode(status)
        if time.monotonic() > end:
            for pid in set(pids) - set(codes):
                os.kill(pid, signal.SIGKILL)
                os.waitpid(pid, 0)
                codes[pid] = "hangs"
        time.sleep(0.002)
    return [codes[pid] for pid in pids]


def launch(folder, *args, world=1, **kw):
    """`python train.py ARGS`, or torchrun's `world` processes of it, to the end: a Run."""
    folder, port = str(folder), free_port() if world > 1 else 0
    pids = [fork(folder, *args, rank=r, world=world, port=port, **kw) for r in range(world)]
    codes = wait(*pids)
    outs = [text(f"{folder}.{r}") for r in range(world)]
    return Run(codes[0], outs[0], codes, outs)


def free_port():
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


def text(path):
    with open(path, errors="replace") as f:
        return f.read()


def make_data(folder):
    os.makedirs(folder)
    meta = {"source": "noise", "tokenizer": {"name": "byte"}, "vocab_size": 257, "eot": 256}
    for split, n in (("train", 3000), ("val", 400)):
        ids = np.random.default_rng(n).zipf(1.5, n).clip(0, 256).astype("<u2")
        ids.tofile(f"{folder}/{split}.bin")
        meta[split] = {"tokens": n, "bytes": n}
    with open(f"{folder}/meta.json", "w") as f:
        json.dump(meta, f)


# ---- faults

def at(step, act, ranks=range(9)):
    """A patch: act() in the midst of the step that follows `step` updates, on some ranks."""
    def patch():
        get_lr = train.get_lr

        def lr(it):
            if it == step and train.RANK in ranks:
                act()
            return get_lr(it)
        train.get_lr = lr
    return patch


def both(*patches):
    return lambda: [patch() for patch in patches]


def send(*signals):
    return lambda: [os.kill(os.getpid(), s) for s in signals]


def failing(exception):
    """An action: from here on torch.save writes a part and fails."""
    def act():
        write = torch.save

        def save(state, f, **kw):
            if not hasattr(f, "name"):  # not a file: the processes talk
                return write(state, f, **kw)
            f.write(b"PK\3\4" + bytes(5000))
            raise exception
        torch.save = save
    return act


def draws():
    """A patch: each step draws from Python's and NumPy's generators, which training does not."""
    get_lr = train.get_lr
    train.get_lr = lambda it: (random.random(), np.random.rand(), get_lr(it))[-1]


def scaled(factor, when):
    """A patch: the training loss is multiplied in the steps `it` where when(it) is true."""
    def patch():
        forward, get_lr, now = train.GPT.forward, train.get_lr, [0]
        train.get_lr = lambda it: (now.__setitem__(0, it), get_lr(it))[-1]
        train.GPT.forward = lambda self, x, y: forward(self, x, y) * (
            factor if self.training and when(now[0]) else 1)
    return patch


DRAWS_OVERFLOW = both(draws, scaled(1e36, lambda it: it == 4))  # of float16's gradients


def in_evaluation(n, act):
    """A patch: act() in the n-th forward pass of an evaluation."""
    def patch():
        forward, count = train.GPT.forward, [0]

        def new(self, x, y):
            count[0] += not self.training
            if count[0] == n and not self.training:
                act()
            return forward(self, x, y)
        train.GPT.forward = new
    return patch


# ---- comparing

def load(folder, name="out/ckpt.pt"):
    return torch.load(f"{folder}/{name}", weights_only=True)


def difference(a, b, at=""):
    """Where two checkpoints first differ, "" where they are equal; times and paths do not count,
    nor the rate that each step sets anew."""
    if re.search(r"\.(train_seconds|config\.init_from|config\.out_dir|param_groups\.\d+\.lr)$", at):
        return ""
    if type(a) is not type(b):
        return f"{at}: {type(a)} {type(b)}"
    if isinstance(a, dict):
        if set(a) != set(b):
            return f"{at}: {set(a) ^ set(b)}"
        return next(filter(None, (difference(a[k], b[k], f"{at}.{k}") for k in a)), "")
    if isinstance(a, (list, tuple)):
        if len(a) != len(b):
            return f"{at}: {len(a)} and {len(b)} entries"
        return next(filter(None, (difference(x, y, f"{at}.{i}")
                                  for i, (x, y) in enumerate(zip(a, b)))), "")
    if isinstance(a, torch.Tensor):
        same = a.dtype == b.dtype and a.shape == b.shape
        return "" if same and a.numpy().tobytes() == b.numpy().tobytes() else f"{at}: tensors"
    return "" if a == b or a != a and b != b else f"{at}: {a} and {b}"


CUT = "step tokens train_loss lr grad_norm"  # of the log, where a signal cut an evaluation short


def log_rows(folder, columns):
    with open(f"{folder}/out/log.csv") as f:
        return [[row[k] for k in columns.split()] for row in csv.DictReader(f)]


def assert_same(folder, reference, columns="step tokens train_loss val_loss lr grad_norm"):
    """All but times is equal: checkpoint, best weights, log."""
    assert difference(load(folder), load(reference)) == ""
    assert difference(load(folder, "out/best.pt"), load(reference, "out/best.pt")) == ""
    assert log_rows(folder, columns) == log_rows(reference, columns)
    assert not glob.glob(f"{folder}/out/*.tmp")


def tree(folder):
    """{path: CRC of the file} of all that is in a folder."""
    found = {}
    for root, folders, files in os.walk(folder):
        found.update({os.path.join(root, f): None for f in folders})
        for f in files:
            with open(os.path.join(root, f), "rb") as file:
                found[os.path.join(root, f)] = zlib.crc32(file.read())
    return found


@functools.cache
def uninterrupted(world=1, patch=None, **settings):
    """A folder with a run that nothing disturbed."""
    folder = tempfile.mkdtemp(dir=uninterrupted.root)
    done = launch(folder, world=world, patch=patch, **settings)
    assert done.codes == [0] * world, done.outs
    return folder


@pytest.fixture(scope="module", autouse=True)
def root():
    with tempfile.TemporaryDirectory() as uninterrupted.root:
        yield


def refused(done, *words):
    """One sentence, exit status 2, no traceback."""
    lines = [line for line in done.out.splitlines() if line.startswith("train.py: ")]
    assert done.code == 2 and len(lines) == 1 and "Traceback" not in done.out, done.out
    for word in words:
        assert word in lines[0], lines[0]


# ---- resume is exact

def test_a_fork_is_the_program(tmp_path):
    """What the other tests run is what a user runs."""
    a, b = tmp_path / "a", tmp_path / "b"
    assert launch(a).code == 0
    make_data(b / "data" / "tiny")
    done = subprocess.run(
        [sys.executable, f"{REPO}/train.py", *as_flags(SMALL)], cwd=b,
        env={**os.environ, "OMP_NUM_THREADS": "1"}, capture_output=True, text=True)
    assert done.returncode == 0 and done.stderr == "" and "trained 12 steps" in done.stdout
    assert_same(a, b)


MATRIX = list(itertools.product((0.0, 0.2), (1, 3), ("float32", "float16"), ("adamw", "muon"),
                                (1, 2, 3), ("kill", "term", "save", "twice")))
if not FULL:  # every pair of values of neighbouring columns, and more
    MATRIX = [(0.2, 1, "float32", "adamw", 1, "kill"), (0.0, 3, "float16", "muon", 1, "kill"),
              (0.2, 3, "float16", "adamw", 2, "term"), (0.0, 1, "float32", "muon", 2, "save"),
              (0.2, 1, "float32", "muon", 3, "twice"), (0.2, 3, "float32", "adamw", 3, "save"),
              (0.2, 1, "float16", "adamw", 1, "twice"), (0.2, 3, "float32", "muon", 1, "term"),
              (0.0, 1, "float16", "adamw", 1, "save"), (0.2, 1, "float32", "adamw", 3, "kill")]


@pytest.mark.parametrize("dropout, accumulation, dtype, optimizer, world, stop", MATRIX)
def test_resume_is_exact(tmp_path, dropout, accumulation, dtype, optimizer, world, stop):
    settings = dict(dropout=dropout, gradient_accumulation_steps=accumulation, dtype=dtype,
                    optimizer=optimizer, world=world)
    always = DRAWS_OVERFLOW if dtype == "float16" else draws
    stops = {"kill": [at(7, send(signal.SIGKILL), [world - 1])],
             "term": [at(6, send(signal.SIGTERM), [world - 1])],
             "save": [at(5, failing(KeyError("planted")))],
             "twice": [at(7, send(signal.SIGKILL), [0]), at(9, send(signal.SIGTERM), [0])]}[stop]
    codes = []
    for patch in (*stops, lambda: None):
        done = launch(tmp_path / "run", patch=both(always, patch), **settings)
        codes.append(done.codes[0 if stop in ("save", "twice") else world - 1])
    assert codes == {"kill": [-9, 0], "term": [143, 0], "save": [1, 0], "twice": [-9, 143, 0]}[stop]
    reference = uninterrupted(patch=always, **settings)
    assert_same(tmp_path / "run", reference)
    assert load(reference)["stale"] == 2 and load(reference)["iter_num"] == 12
    if dtype == "float16":
        assert load(reference)["scaler"]["scale"] in (2.0 ** 15, 2.0 ** 14)  # from 2 ** 16


def test_resume_from_every_step(tmp_path):
    """Evaluated or not, saved or not, before the first step and after the last."""
    for step in range(12) if FULL else (0, 7, 11):
        folder = tmp_path / str(step)
        assert launch(folder, patch=at(step, send(signal.SIGTERM)), checkpoint_interval=0).code == 143
        done = launch(folder, checkpoint_interval=0)
        assert done.code == 0 and (f"resuming after step {step + 1}\n" in done.out or step == 11)
        assert_same(folder, uninterrupted(checkpoint_interval=0), CUT)


def test_resume_needs_no_other_flag(tmp_path):
    """The stored settings are the base."""
    launch(tmp_path / "run", patch=at(7, send(signal.SIGKILL)), dropout=0.2, seed=5)
    done = launch(tmp_path / "run", init_from="resume", bare=True)
    assert done.code == 0 and "changed" not in done.out, done.out
    assert_same(tmp_path / "run", uninterrupted(dropout=0.2, seed=5))


def test_early_stop_survives(tmp_path):
    settings = dict(patience=2, min_delta=9.0, max_iters=99, eval_interval=3)
    reference = uninterrupted(**settings)
    for step in (5, 7):
        folder = tmp_path / str(step)
        assert launch(folder, patch=at(step, send(signal.SIGKILL)), **settings).code == -9
        assert launch(folder, **settings).code == 0
        assert_same(folder, reference)
    assert load(reference)["iter_num"] == 6 or load(reference)["iter_num"] == 9


def test_spike_window_survives(tmp_path):
    """130 steps, then a spike, which only 128 steps before it let one notice."""
    settings = dict(max_iters=134, checkpoint_interval=65, eval_interval=0, log_interval=0,
                    n_layer=1, dtype="float32")
    spike = scaled(50, lambda it: it == 131)
    done = launch(tmp_path / "a", patch=spike, **settings)
    assert re.search(r"warning: spike \d+, iter 132", done.out), done.out
    launch(tmp_path / "b", patch=at(100, send(signal.SIGKILL)), **settings)
    done = launch(tmp_path / "b", patch=spike, **settings)
    assert re.search(r"warning: spike \d+, iter 132", done.out), done.out
    assert difference(load(tmp_path / "b"), load(tmp_path / "a")) == ""


def test_ranks_agree(tmp_path):
    """2 and 3 processes train what 1 does, to rounding; only the first one speaks."""
    one = load(uninterrupted())
    for world in (2, 3):
        folder = tmp_path / str(world)
        done = launch(folder, world=world)
        assert done.codes == [0] * world and done.outs[1:] == [""] * (world - 1), done.outs
        many = load(folder)
        for k, v in one["model"].items():
            torch.testing.assert_close(many["model"][k], v, rtol=1e-4, atol=1e-5)
        assert many["best_val_loss"] == pytest.approx(one["best_val_loss"], abs=1e-5)
        assert len(many["rng"]) == world


# ---- killed at any moment

def slow_saves(ticks):
    """A patch: a save takes many small writes; ticks[0] counts them and the steps, ticks[4] is 1
    inside a save."""
    def patch():
        save, write, get_lr = train.save, torch.save, train.get_lr
        replace = os.replace

        def tick(delay=0.002):
            ticks[:4] = (int.from_bytes(ticks[:4], "little") + 1).to_bytes(4, "little")
            time.sleep(delay)

        def slow_write(state, f, **kw):
            if not hasattr(f, "name"):  # not a file: the processes talk
                return write(state, f, **kw)
            whole = io.BytesIO()
            write(state, whole)
            whole = whole.getvalue()
            for i in range(0, len(whole), len(whole) // 6 + 1):
                f.write(whole[i:i + len(whole) // 6 + 1])
                f.flush()
                tick()

        def marked_save(*args):
            ticks[4] = 1
            saved = save(*args)
            tick()
            ticks[4] = 0
            return saved

        torch.save, train.save = slow_write, marked_save
        os.replace = lambda *a: (tick(), replace(*a), tick())
        train.get_lr = lambda it: (tick(0), get_lr(it))[-1]
    return patch


@pytest.mark.parametrize("world, goal", [(1, 200), (2, 40)] if FULL else [(1, 8), (2, 2)])
def test_kill_loop(tmp_path, world, goal):
    """SIGKILL at random moments, in a save and out of it, until the run is through all the same."""
    settings = dict(dropout=0.2, max_iters=24 if FULL else 10, checkpoint_interval=1, world=world)
    rng, kills, inside, starts, begin = random.Random(1), 0, 0, 0, time.monotonic()
    for n in itertools.count():
        folder, newest = f"{tmp_path}/{n}", 0
        while True:
            ticks, port = mmap.mmap(-1, 8), free_port()
            saved = os.path.exists(f"{folder}/out/ckpt.pt")
            pids = [fork(folder, patch=slow_saves(ticks), rank=r, port=port,
                         **settings) for r in range(world)]
            starts += 1
            until = rng.randrange(0, 60) if kills < goal else 10 ** 9
            while os.waitid(os.P_PID, pids[0], os.WEXITED | os.WNOHANG | os.WNOWAIT) is None:
                if int.from_bytes(ticks[:4], "little") >= until:
                    time.sleep(rng.uniform(0, 0.3 if until < 3 else 0.01))
                    inside += ticks[4]
                    with contextlib.suppress(ProcessLookupError):
                        os.kill(rng.choice(pids), signal.SIGKILL)
                    break
                time.sleep(0.0005)
            codes, out = wait(*pids), text(f"{folder}.0")
            assert "warning" not in out and "hangs" not in codes and 2 not in codes, out
            at_step = re.findall(r"resuming after step (\d+)", out)
            assert at_step or not (saved and "\niter " in out), "from scratch, with a checkpoint!"
            assert not at_step or int(at_step[0]) >= newest, "a checkpoint was lost"
            newest = int(at_step[0]) if at_step else newest
            kills += -9 in codes
            if -9 not in codes:
                assert codes == [0] * world, out
                break
        assert_same(folder, uninterrupted(**settings))
        shutil.rmtree(folder)
        if kills >= goal:
            break
    print(f"\n{world} process(es): {kills} kills, {inside} inside a save, {starts} starts, {n + 1} "
          f"runs, {time.monotonic() - begin:.0f} s")
    assert inside >= kills / 8


# ---- damaged checkpoints

def damage(path, kind, rng=random):
    with open(path, "rb") as f:
        old = bytearray(f.read())
    new = old[:]
    if kind == "flip":
        new[rng.randrange(len(new))] ^= 1 << rng.randrange(8)
    elif kind == "page":
        start = len(new) // 2 // 4096 * 4096
        new[start:start + 4096] = bytes(4096)
    else:
        new = new[:int(len(new) * kind)]
    with open(path, "r+b") as f:  # in place: a second name of the file is damaged with it
        f.write(new)
        f.truncate(len(new))


@pytest.mark.parametrize("kind", [0, 0.1, 0.5, 0.999, "page"])
def test_damage(tmp_path, kind):
    """The newest good kept copy is used, with a line that names both; none good: refused."""
    folder = tmp_path / "run"
    launch(folder, patch=at(7, send(signal.SIGKILL)))  # saved at 3, 4 and 6
    damage(folder / "out" / "ckpt.pt", kind)
    before = tree(folder)
    with open(folder / "other.pt", "wb") as f:
        f.write((folder / "out" / "ckpt.pt").read_bytes())
    refused(launch(folder, init_from="other.pt"), "other.pt")
    os.remove(folder / "other.pt")
    assert tree(folder) == before
    shutil.copytree(folder, tmp_path / "none")
    done = launch(folder, init_from="resume")
    line = next(line for line in done.out.splitlines() if line.startswith("warning: "))
    assert os.path.join("out", "ckpt.pt") in line and os.path.join("out", "ckpt_4.pt") in line
    assert done.code == 0 and "resuming after step 4\n" in done.out
    assert_same(folder, uninterrupted())
    for name in os.listdir(tmp_path / "none" / "out"):
        if name.startswith("ckpt_"):
            shutil.copyfile(tmp_path / "none/out/ckpt.pt", tmp_path / "none/out/new.pt")
            os.replace(tmp_path / "none/out/new.pt", tmp_path / "none/out" / name)
    before = tree(tmp_path / "none")
    for init_from in ("resume", "auto"):
        refused(launch(tmp_path / "none", init_from=init_from), "ckpt.pt", "ckpt_4.pt")
        assert tree(tmp_path / "none") == before


def test_flipped_bits(tmp_path):
    """A flip is noticed, or it hit what is not read: padding and the like."""
    shutil.copyfile(f"{uninterrupted()}/out/ckpt.pt", tmp_path / "good.pt")
    good, rng, noticed = train.read_checkpoint(f"{tmp_path}/good.pt"), random.Random(0), 0
    for _ in range(500 if FULL else 50):
        shutil.copyfile(tmp_path / "good.pt", tmp_path / "bad.pt")
        damage(tmp_path / "bad.pt", "flip", rng)
        try:
            assert difference(train.read_checkpoint(f"{tmp_path}/bad.pt"), good) == ""
        except ValueError as e:
            assert "bad.pt" in str(e) and "\n" not in str(e)
            noticed += 1
    print(f"\n{noticed} flips noticed, the others harmless")
    assert noticed >= 25


# ---- the disk

def limit(size):
    """An action: no file may grow beyond size from here on, as on a full disk."""
    return lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (size, resource.RLIM_INFINITY))


def test_full_disk(tmp_path):
    """The old checkpoint stays, training goes on, the next save tries again."""
    seen = tmp_path / "seen"

    def check():  # after the failed saves at steps 4 and 6
        with open(seen, "w") as f:
            print(load(".")["iter_num"], glob.glob("out/*.tmp"), file=f)
        limit(resource.RLIM_INFINITY)()

    folder = tmp_path / "run"
    done = launch(folder, patch=both(at(3, limit(100_000)), at(7, check)))
    assert done.code == 0 and "not saved" in done.out and " MB" in done.out, done.out
    assert text(seen) == "3 []\n"
    assert_same(folder, uninterrupted())
    done = launch(folder, max_iters=20, patch=at(17, limit(100_000)))
    assert done.code == 1 and "warning" in done.out and "Traceback" not in done.out
    assert train.read_checkpoint(f"{folder}/out/ckpt.pt")["iter_num"] == 16
    assert not list((folder / "out").glob("*.tmp"))
    assert launch(folder, max_iters=20).code == 0
    longer = uninterrupted(max_iters=20)
    assert difference(load(folder)["data"], load(longer)["data"]) == ""


@contextlib.contextmanager
def mounted(folder, options):
    """A tmpfs on a folder, where this user may mount one."""
    os.makedirs(folder, exist_ok=True)
    done = subprocess.run(["mount", "-t", "tmpfs", "-o", options, "tmpfs", folder],
                          capture_output=True)
    if done.returncode:
        pytest.skip("mounting is not allowed here")
    try:
        yield
    finally:
        subprocess.run(["umount", "-l", folder], check=True)


@pytest.mark.skipif(not shutil.which("mount"), reason="no mount here")
def test_full_tmpfs(tmp_path):
    folder = tmp_path / "run"
    with mounted(folder / "out", "size=2m"):
        def fill():
            with contextlib.suppress(OSError), open("out/filler", "wb", buffering=0) as f:
                while f.write(bytes(4096)):
                    pass
        done = launch(folder, patch=both(at(4, fill), at(10, lambda: os.remove("out/filler"))))
        assert done.code == 0 and "not saved" in done.out, done.out
        assert difference(load(folder), load(uninterrupted())) == ""
        done = launch(folder, max_iters=20, patch=at(13, fill))
        assert done.code == 1 and "Traceback" not in done.out, done.out
        assert train.read_checkpoint(f"{folder}/out/ckpt.pt")["iter_num"] >= 12
        for name in ("log.csv", "filler"):  # full at the start
            with contextlib.suppress(FileNotFoundError):
                os.remove(folder / "out" / name)
        with contextlib.chdir(folder):
            fill()
        done = launch(folder, max_iters=20)
        assert done.code in (1, 2) and "Traceback" not in done.out, done.out
        assert train.read_checkpoint(f"{folder}/out/ckpt.pt")["iter_num"] >= 12


@pytest.mark.skipif(not shutil.which("mount"), reason="no mount here")
def test_read_only_folder(tmp_path):
    with mounted(tmp_path / "run" / "out", "ro"):
        refused(launch(tmp_path / "run"), "out")


def test_folder_that_cannot_be(tmp_path):
    make_data(tmp_path / "run/data/tiny")
    (tmp_path / "run/out").write_text("a file")
    before = tree(tmp_path / "run")
    for out_dir in ("out", "out/sub", "", "/proc/out", "n" * 300):
        refused(launch(tmp_path / "run", out_dir=out_dir), "out_dir")
    assert tree(tmp_path / "run") == before


def test_io_error(tmp_path):
    """EIO from fsync at one save: warned of, tried again at the next."""
    fsync, folder = os.fsync, tmp_path / "run"

    def act():
        def bad(fd):
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        os.fsync = bad

    def cure():
        os.fsync = fsync
        print("left:", load(".")["iter_num"], glob.glob("out/*.tmp"))
    done = launch(folder, patch=both(at(3, act), at(7, cure)))
    assert done.code == 0 and done.out.count("warning: ") == 3, done.out  # best.pt, 4, 6
    assert "left: 3 []" in done.out and "Input/output error" in done.out
    assert_same(folder, uninterrupted())
    assert launch(tmp_path / "last", patch=at(10, act)).code == 1


def test_folder_removed(tmp_path):
    """rm -rf out while it trains: no traceback, and the end says that it failed."""
    done = launch(tmp_path / "run", patch=at(4, lambda: shutil.rmtree("out")))
    assert done.code == 1 and "not saved" in done.out and "Traceback" not in done.out, done.out
    assert "iter 12:" in done.out


def test_order_of_a_save(tmp_path):
    """Write, fsync, read back, replace, fsync the folder: the old file is whole at any moment."""
    def trace():
        def traced(module, name, word):
            f = getattr(module, name)
            setattr(module, name, lambda *a, **k: (print("did", word(*a)), f(*a, **k))[1])

        def name_of(fd):
            return os.path.basename(os.readlink(f"/proc/self/fd/{fd}"))
        traced(torch, "save", lambda state, f, *a: "write " + f.name)
        traced(os, "fsync", lambda fd: "fsync " + name_of(fd))
        traced(zipfile.ZipFile, "testzip", lambda z: "check " + z.filename)
        traced(os, "replace", lambda a, b: f"replace {b}")
    done = launch(tmp_path / "run", patch=at(11, trace), eval_interval=0, log_interval=0)
    did = [line[4:] for line in done.out.splitlines() if line.startswith("did ")]
    assert did == ["write out/ckpt.pt.tmp", "fsync ckpt.pt.tmp", "check out/ckpt.pt.tmp",
                   "replace out/ckpt.pt", "fsync out"]


def test_damaged_while_written(tmp_path):
    """A disk that keeps other bytes than were written: the old checkpoint stays."""
    def act():
        fsync = os.fsync

        def bad(fd):
            fsync(fd)
            name = os.readlink(f"/proc/self/fd/{fd}")
            if name.endswith("ckpt.pt.tmp"):
                damage(name, "page")
        os.fsync = bad
    done = launch(tmp_path / "run", patch=at(7, act))
    assert done.code == 1 and "not saved" in done.out and "Traceback" not in done.out, done.out
    assert train.read_checkpoint(f"{tmp_path}/run/out/ckpt.pt")["iter_num"] == 6


# ---- numbers

@pytest.mark.parametrize("world", [1, 2])
def test_non_finite_loss_stops(tmp_path, world):
    """A NaN on one rank: no update on any, and the checkpoint stays."""
    nan = scaled(math.nan, lambda it: it == 7)
    done = launch(tmp_path / "run", patch=lambda: nan() if train.RANK == world - 1 else None,
               world=world, dropout=0.2)
    assert done.codes == [1] * world and "Traceback" not in "".join(done.outs), done.outs
    line = next(line for line in done.out.splitlines() if "not finite" in line)
    assert "iter 8" in line and "lr" in line and "norm" in line and "float32" in line
    state = train.read_checkpoint(f"{tmp_path}/run/out/ckpt.pt")
    assert state["iter_num"] == 6
    launch(tmp_path / "run", world=world, dropout=0.2)
    assert_same(tmp_path / "run", uninterrupted(world=world, dropout=0.2))


def test_non_finite_weight_is_not_saved(tmp_path):
    def poison():
        step = train.Muon.step

        def bad(self, *args):
            step(self, *args)
            self.param_groups[0]["params"][0].data.view(-1)[0] = math.inf
        train.Muon.step = bad
    done = launch(tmp_path / "run", patch=at(11, poison))
    assert done.code == 1 and "not finite" in done.out and "Traceback" not in done.out
    assert train.read_checkpoint(f"{tmp_path}/run/out/ckpt.pt")["iter_num"] == 9


def test_float16_gives_up(tmp_path):
    done = launch(tmp_path / "run", patch=scaled(1e36, lambda it: True), dtype="float16",
               max_iters=60)
    assert done.code == 1 and "not finite" in done.out, done.out
    assert done.out.count("overflow") == 16


# ---- signals

def test_signal_to_one_rank(tmp_path):
    for sig, code in ((signal.SIGTERM, 143), (signal.SIGINT, 130)):
        folder = tmp_path / str(code)
        done = launch(folder, patch=at(6, send(sig), [1]), world=2)
        assert done.codes == [code] * 2, done.outs
        assert "after step 7" in done.out and "--init_from=resume --out_dir=out" in done.out
        assert load(folder)["iter_num"] == 7
        assert launch(folder, world=2).codes == [0, 0]
        assert_same(folder, uninterrupted(world=2))


def test_second_signal_leaves_at_once(tmp_path):
    """But launchers pass a signal on that all got: what comes within a second is one."""
    assert launch(tmp_path / "run", patch=at(6, send(signal.SIGTERM, signal.SIGTERM))).code == 143
    assert load(tmp_path / "run")["iter_num"] == 7
    shutil.rmtree(tmp_path / "run")
    done = launch(tmp_path / "run", patch=at(6, lambda: [
        send(signal.SIGTERM)(), time.sleep(1.1), send(signal.SIGTERM)()]))
    assert done.code in (-15, 143) and load(tmp_path / "run")["iter_num"] == 6
    assert launch(tmp_path / "run").code == 0
    assert_same(tmp_path / "run", uninterrupted())


@pytest.mark.parametrize("n, step", [(1, 4), (7, 8), (9, 12), (12, 12)])
def test_signal_cuts_an_evaluation_short(tmp_path, n, step):
    """4 forward passes make one evaluation here; the last one comes after the last step."""
    folder = tmp_path / "run"
    done = launch(folder, patch=in_evaluation(n, send(signal.SIGTERM)))
    assert done.code == 143 and f"after step {step}" in done.out, done.out
    assert f"step {step}: train loss" not in done.out
    assert launch(folder).code == 0
    assert_same(folder, uninterrupted(), CUT)


def test_evaluation_ends_soon_after_a_signal(tmp_path):
    """Of 20 forward passes, those after the signal are left out."""
    count = mmap.mmap(-1, 1)

    def patch():
        forward = train.GPT.forward

        def new(self, x, y):
            count[0] += not self.training
            if count[0] == 2 and not self.training:
                send(signal.SIGTERM)()
            return forward(self, x, y)
        train.GPT.forward = new
    assert launch(tmp_path / "run", patch=patch, eval_iters=10).code == 143
    assert count[0] <= 3


def test_signal_before_the_first_step(tmp_path):
    """While the model is made, or just before step 1: no checkpoint, and a start afterwards."""
    def early():
        make = train.make_optimizer
        train.make_optimizer = lambda *a: (send(sig)(), make(*a))[1]

    def late():
        get_batch = train.get_batch
        train.get_batch = lambda *a, **k: (send(sig)(), get_batch(*a, **k))[1]
    for patch, sig, codes in ((early, signal.SIGINT, (130,)), (early, signal.SIGTERM, (-15, 143)),
                              (late, signal.SIGTERM, (143,))):
        folder = tmp_path / f"{patch.__name__}{sig}"
        done = launch(folder, patch=patch)
        assert done.code in codes and "Traceback" not in done.out, done.out
        assert not list(folder.glob("out/*.pt")) and not list(folder.glob("out/*.tmp"))
        assert launch(folder).code == 0
        assert_same(folder, uninterrupted())


# ---- torchrun

WORKER = """
import os, signal, sys
sys.path.insert(0, {repo!r})
import train
from config import configure
train.matmul_rate, get_lr = lambda *a: 1e9, train.get_lr
def lr(it):
    name = f"died{{it}}.{{train.RANK}}"
    if (it, train.RANK) in {deaths} and not os.path.exists(name):
        open(name, "w").close()
        os.kill(os.getpid(), {signal})
    return get_lr(it)
train.get_lr = lr
open(f"pid{{os.getpid()}}", "w").close()
sys.exit(train.main(configure(vars(train))))
"""


def torchrun(folder, *options, deaths=(), sig=9, **settings):
    """Start torchrun on a worker that trains, and kills itself at (step, rank) of deaths, once.

    Where restarts share torchrun's store, they may read the addresses of the dead (PyTorch's
    issue 135712), and hang.
    """
    if not os.path.exists(f"{folder}/data"):
        make_data(f"{folder}/data/tiny")
    with open(f"{folder}/worker.py", "w") as f:
        f.write(WORKER.format(repo=REPO, deaths=list(deaths), signal=sig))
    return subprocess.Popen(
        [sys.executable, "-m", "torch.distributed.run", *options, "worker.py",
         *as_flags({**SMALL, **settings})], cwd=folder, text=True,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, start_new_session=True,
        env={**os.environ, "OMP_NUM_THREADS": "1", "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"})


def finish(*jobs):
    """The outputs of launchers that end; of those that hang, with what hangs."""
    outs = []
    for job in jobs:
        try:
            outs.append(job.communicate(timeout=240)[0])
        except subprocess.TimeoutExpired:
            job.terminate()
            outs.append(job.communicate()[0] + "\nIT HANGS")
    return outs


def test_torchrun_restarts(tmp_path):
    """A rank is killed twice, the launcher starts anew twice, the run ends as if it were not so."""
    job = torchrun(tmp_path, "--standalone", "--nproc_per_node=2", "--max-restarts=3",
                   deaths=[(5, 1), (10, 0)] if FULL else [(7, 1)], dropout=0.2)
    out = finish(job)[0]
    assert job.returncode == 0, out
    assert re.findall(r"resuming after step (\d+)", out) == (["4", "9"] if FULL else ["6"])
    assert_same(tmp_path, uninterrupted(world=2, dropout=0.2))


@pytest.mark.skipif(not FULL, reason="takes half a minute")
def test_torchrun_is_stopped(tmp_path):
    """SIGTERM and SIGINT to the launcher: the workers save."""
    for sig in (signal.SIGTERM, signal.SIGINT):
        folder = tmp_path / str(sig)
        job = torchrun(folder, "--standalone", "--nproc_per_node=2", max_iters=10 ** 6,
                       eval_interval=0, checkpoint_interval=10, log_interval=10)
        while not os.path.exists(folder / "out/ckpt.pt") and job.poll() is None:
            time.sleep(0.05)
        job.send_signal(sig)
        out = finish(job)[0]
        assert job.returncode and f"stopped by signal {int(sig)} after step" in out, out
        at_step = int(re.findall(r"after step (\d+); to go on", out)[0])
        assert train.read_checkpoint(f"{folder}/out/ckpt.pt")["iter_num"] == at_step


@pytest.mark.skipif(not FULL, reason="takes a minute")
def test_two_machines(tmp_path):
    """Two launchers equal one of four; one is killed, both are started again: the same again."""
    settings = dict(dropout=0.2, batch_size=8)

    def launch(folder, port, **kw):
        return [torchrun(folder, "--nnodes=2", "--nproc_per_node=2", "--rdzv-backend=c10d",
                         f"--rdzv-endpoint=127.0.0.1:{port}", f"--rdzv-id={port}", **settings, **kw)
                for _ in range(2)]
    reference = uninterrupted(world=4, **settings)
    jobs = launch(tmp_path / "a", free_port())
    outs = finish(*jobs)
    assert [job.returncode for job in jobs] == [0, 0], outs
    assert_same(tmp_path / "a", reference)

    b = tmp_path / "b"
    jobs = launch(b, free_port(), deaths=[(7, r) for r in range(4)], sig=19)  # all stand still
    while len(list(b.glob("died7.*"))) < 4:
        assert all(job.poll() is None for job in jobs)
        time.sleep(0.1)
    victims = [int(p.name[3:]) for p in b.glob("pid*")]
    parents = {pid: int(text(f"/proc/{pid}/stat").split()[3]) for pid in victims}
    os.kill(jobs[1].pid, signal.SIGKILL)  # the machine dies: its launcher and its workers
    for pid in victims:
        os.kill(pid, signal.SIGKILL if parents[pid] == jobs[1].pid else signal.SIGCONT)
    outs = finish(*jobs)
    assert jobs[0].returncode, outs
    jobs = launch(b, free_port(), deaths=[])
    outs = finish(*jobs)
    assert [job.returncode for job in jobs] == [0, 0], outs
    assert "resuming after step 6\n" in "".join(outs)
    assert_same(b, reference)


# ---- the folder

def test_lock(tmp_path):
    """A second trainer in a folder is refused; a dead one holds nothing."""
    folder = str(tmp_path / "run")
    pid = fork(folder, patch=at(7, send(signal.SIGSTOP)))
    os.waitpid(pid, os.WUNTRACED)
    before = tree(folder)
    for init_from in ("auto", "scratch", "resume"):
        shutil.copyfile(f"{folder}.0", f"{folder}.first")
        refused(launch(folder, init_from=init_from), "out", "another process")
    assert tree(folder) == before
    os.kill(pid, signal.SIGCONT)
    assert wait(pid) == [0]
    assert_same(folder, uninterrupted())


def test_fresh_start_keeps_the_old_run(tmp_path):
    folder = tmp_path / "run"
    launch(folder)
    before = {os.path.basename(k): v for k, v in tree(folder / "out").items()}
    done = launch(folder, init_from="scratch", seed=2)
    assert done.code == 0 and os.path.join("out", "old-1") in done.out
    after = {os.path.basename(k): v for k, v in tree(folder / "out" / "old-1").items()}
    before.pop("lock")
    assert after == before
    launch(folder, init_from="scratch")
    assert load(folder, "out/old-2/ckpt.pt")["config"]["seed"] == 2
    assert_same(folder, uninterrupted())


def test_resume_of_a_complete_run(tmp_path):
    folder = tmp_path / "run"
    launch(folder)
    before = tree(folder)
    for init_from in ("auto", "resume"):
        done = launch(folder, init_from=init_from)
        assert done.code == 0 and "already" in done.out and "\niter " not in done.out, done.out
        assert tree(folder) == before
    done = launch(folder, max_iters=15)
    assert done.code == 0 and load(folder)["iter_num"] == 15


def test_eval_only_changes_nothing(tmp_path):
    folder = tmp_path / "run"
    for world in (1, 2):
        launch(folder, init_from="scratch", eval_only=True, world=world)
        assert not os.path.exists(folder / "out")
    launch(folder)
    before = tree(folder)
    for init_from in ("resume", "auto", "scratch", "out/best.pt"):
        done = launch(folder, init_from=init_from, eval_only=True)
        assert done.code == 0 and "val loss" in done.out
        assert tree(folder) == before
    shown = float(re.search(r"val loss ([\d.]+)", launch(folder, eval_only=True).out)[1])
    assert shown == pytest.approx(float(log_rows(folder, "val_loss")[-1][0]), abs=1e-4)


def test_kept_copies(tmp_path):
    folder = tmp_path / "run"
    launch(folder, keep_checkpoints=2, checkpoint_interval=2)
    names = sorted(p.name for p in folder.glob("out/*.pt"))
    assert names == ["best.pt", "ckpt.pt", "ckpt_10.pt", "ckpt_12.pt", "ckpt_8.pt"]
    assert os.stat(folder / "out/ckpt.pt").st_ino == os.stat(folder / "out/ckpt_12.pt").st_ino
    for n in (8, 10, 12):
        assert train.read_checkpoint(f"{folder}/out/ckpt_{n}.pt")["iter_num"] == n
    launch(tmp_path / "none", keep_checkpoints=0)
    assert not list(tmp_path.glob("none/out/ckpt_*"))


def test_stale_tmp_is_removed(tmp_path):
    folder = tmp_path / "run"
    launch(folder, patch=at(7, send(signal.SIGKILL)))
    for name in ("ckpt.pt.tmp", "best.pt.tmp"):
        (folder / "out" / name).write_bytes(b"half")
    done = launch(folder, patch=at(6, lambda: print("left:", glob.glob("out/*.tmp"))))
    assert done.code == 0 and "left: []" in done.out, done.out
    assert_same(folder, uninterrupted())


def test_half_a_log_row(tmp_path):
    """Rows after the restored step go, and the half one that a kill left; one header."""
    folder = tmp_path / "run"
    for cut in (b"8,768,5.1", b"7,\xff\xfe\0"):
        launch(folder, init_from="scratch", patch=at(7, send(signal.SIGKILL)))
        with open(folder / "out/log.csv", "ab") as f:
            f.write(cut)
        assert launch(folder).code == 0
        assert_same(folder, uninterrupted())


# ---- what may not be resumed, and what may

def test_weights_only_file(tmp_path):
    folder = tmp_path / "run"
    launch(folder)
    for name in os.listdir(folder / "out"):
        if name.startswith("ckpt"):
            os.remove(folder / "out" / name)
    os.replace(folder / "out/best.pt", folder / "out/ckpt.pt")
    before = tree(folder)
    for init_from in ("resume", "auto"):
        refused(launch(folder, init_from=init_from), "optimizer", "--init_from=")
        assert tree(folder) == before
    assert launch(folder, init_from="out/ckpt.pt", out_dir="new").code == 0


class Evil:
    def __reduce__(self):
        return os.mkdir, ("evil",)


def test_code_in_a_pickle(tmp_path):
    folder = tmp_path / "run"
    launch(folder)
    state = load(folder)
    torch.save({**state, "extra": Evil()}, folder / "evil.pt")
    for name in os.listdir(folder / "out"):
        if name.startswith("ckpt"):
            shutil.copyfile(folder / "evil.pt", folder / "out" / name)
    before = tree(folder)
    for init_from in ("resume", "auto", "evil.pt"):
        refused(launch(folder, init_from=init_from))
    assert tree(folder) == before and not os.path.exists(folder / "evil")


def test_shape_changed(tmp_path):
    folder = tmp_path / "run"
    launch(folder)
    before = tree(folder)
    other = dict(n_layer=3, n_head=4, n_embd=64, block_size=8)
    for name in "bias", "rmsnorm", "rope", "qk_norm", "swiglu", "tie_embeddings":
        other[name] = not getattr(train, name)
    for name, value in other.items():
        refused(launch(folder, **{name: value}), name, str(value))
    refused(launch(folder, n_layer=3, n_embd=64), "n_layer", "n_embd")
    assert tree(folder) == before


def test_data_changed(tmp_path):
    folder = tmp_path / "run"
    launch(folder, patch=at(7, send(signal.SIGKILL)))
    path = folder / "data/tiny/train.bin"
    path.write_bytes(path.read_bytes()[:-2] + b"\7\0")
    before = tree(folder)
    refused(launch(folder), "--allow_data_change=True", "tiny")
    assert tree(folder) == before
    assert launch(folder, allow_data_change=True).code == 0
    make_data(folder / "data/more")
    meta = json.loads(text(folder / "data/more/meta.json"))
    (folder / "data/more/meta.json").write_text(json.dumps({**meta, "tokenizer": {"name": "gpt2"}}))
    refused(launch(folder, dataset="more", max_iters=20), "--allow_data_change=True", "more")


def test_number_of_processes_changed(tmp_path):
    folder = tmp_path / "run"
    launch(folder, patch=at(7, send(signal.SIGKILL), [1]), world=2)
    before = tree(folder)
    port = free_port()
    codes = wait(*[fork(str(folder), rank=r, world=4, port=port) for r in range(4)])
    assert codes == [2] * 4
    refused(Run(2, text(f"{folder}.0"), [], []), "6 sequences", "[1, 2, 3, 6]")
    assert tree(folder) == before
    done = launch(folder, world=3)
    assert done.codes == [0] * 3 and "not bit-exact from here: processes was 2, now 3" in done.out
    one = load(uninterrupted())
    for k, v in load(folder)["model"].items():
        torch.testing.assert_close(v, one["model"][k], rtol=1e-4, atol=1e-5)


def test_micro_batches_changed(tmp_path):
    """The same tokens in a step, in more micro-batches."""
    folder = tmp_path / "run"
    launch(folder, patch=at(7, send(signal.SIGKILL)))
    done = launch(folder, batch_size=2, gradient_accumulation_steps=3)
    assert done.code == 0 and "batch_size from 6 to 2" in done.out
    one = load(uninterrupted())
    for k, v in load(folder)["model"].items():
        torch.testing.assert_close(v, one["model"][k], rtol=1e-4, atol=1e-5)


def test_optimizer_settings_changed(tmp_path):
    folder = tmp_path / "run"
    launch(folder, patch=at(7, send(signal.SIGKILL)))
    done = launch(folder, weight_decay=0.3, beta1=0.8, learning_rate=0.001)
    assert done.code == 0 and "weight_decay from 0.1 to 0.3" in done.out and "beta1" in done.out
    groups = load(folder)["optimizer"]["param_groups"]
    assert {g["weight_decay"] for g in groups} == {0.3, 0.0}
    assert {g["betas"][0] for g in groups} == {0.8}
    assert difference(load(folder)["model"], load(uninterrupted())["model"]) != ""


# ---- helpers that fail

def test_wandb(tmp_path):
    """A log that fails is left out with one warning; one that is not there is named."""
    def fake():
        def log(row, step):
            if step == 5:
                raise ConnectionError("planted")
        wandb = sys.modules["wandb"] = types.ModuleType("wandb")
        wandb.__spec__ = importlib.machinery.ModuleSpec("wandb", None)
        wandb.init, wandb.log = lambda **kw: None, log
    done = launch(tmp_path / "run", patch=fake, wandb_log=True)
    assert done.code == 0 and done.out.count("warning") == 1 and "planted" in done.out, done.out
    assert log_rows(tmp_path / "run", "step") == [[str(i)] for i in range(1, 13)]
    before = tree(tmp_path / "run")

    def absent():
        sys.modules["wandb"] = None
    refused(launch(tmp_path / "run", patch=absent, wandb_log=True, init_from="scratch"), "wandb")
    assert tree(tmp_path / "run") == before


def test_log_fails(tmp_path):
    def act():
        os.remove("out/log.csv")
        os.mkdir("out/log.csv")
    done = launch(tmp_path / "run", patch=at(5, act))
    assert done.code == 0 and done.out.count("warning") == 1, done.out
    assert difference(load(tmp_path / "run"), load(uninterrupted())) == ""
    done = launch(tmp_path / "run", max_iters=14)
    assert "Traceback" not in done.out, done.out


def test_out_of_memory(tmp_path):
    def act():
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")
    done = launch(tmp_path / "run", patch=at(4, act))
    refused(done, "batch_size=6", "block_size=16", "gradient_accumulation_steps")
    assert launch(tmp_path / "run").code == 0
    assert_same(tmp_path / "run", uninterrupted())


# ---- fuzz: no traceback, exit status 0 or 2 (1: the numbers ran away), a refusal changes nothing

WORDS = ["0", "1", "-1", "2", "3", "7", "16", "2147483648", "4611686018427387904", "1" + "0" * 30,
         "1e3", "2.5", "-0.0", "1e308", "1e-308", "1e999", "nan", "True", "False", "None", "",
         "abc", "[1]", "'2'", "__import__('os').mkdir('evil')", "a=b", "x/../y", "ü", "\udcff",
         "n" * 300, "float16", "bfloat16", "cuda", "cuda:99", "cpu:3", "mps", "wsd", "muon", "{}",
         "()", "out/ckpt.pt", "out/best.pt", "data", "/dev/null", "/proc/self/mem", "scratch"]
FILES = ["", "n_layer = 1", "n_layer = '2'", "1/0", "def f(:", "import os",
         "x = 1", "batch_size = batch_size * 2", "learning_rate = 10 ** 400", "_a = 3\nbeta1 = 0.5",
         "for seed in [3]: pass", "out_dir = 'a\\0b'", "dataset = 'a\\0b'", "seed = [1]", "\0",
         "\xff", "def f(): return f()\nf()", "eval_iters: int = 1", "init_from = None"]
SIZES = [w for w in WORDS if not (w.isdigit() and 50 < int(w) < 2 ** 40)]


def sandbox():
    """A patch: 8 GB, 60 s, 3 steps, no network, no compiler."""
    resource.setrlimit(resource.RLIMIT_AS, (8 << 30, 8 << 30))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    signal.alarm(60)

    def offline(name):
        raise OSError("offline")

    get_lr, train.from_hugging_face = train.get_lr, offline
    train.compiled = lambda model, *a: model
    torch.set_num_threads(1)

    def lr(it):
        if it >= train.max_iters - 1 or it >= 2:
            train.max_iters, train.max_minutes, train.benchmark = it + 1, 0.0, False
        return get_lr(it)
    train.get_lr = lr


def fuzz(tmp_path, cases, change):
    """Run train.py `cases` times in a folder that holds data and a run; change(rng, folder) makes
    something wrong and returns the arguments."""
    rng, statuses, wrong, template = random.Random(0), collections.Counter(), [], tmp_path / "good"
    launch(template, max_iters=2, checkpoint_interval=1)
    folder = str(tmp_path / "run")
    settings = {k: SMALL[k] for k in SMALL if k not in ("max_iters", "init_from")}
    shutil.copytree(template, folder)
    whole = tree(folder)
    for i in range(cases):
        args = change(rng, folder)
        before = tree(folder)
        pid = fork(folder, *as_flags(settings), "--max_iters=3", *args, patch=sandbox, bare=True)
        code, out = wait(pid)[0], text(f"{folder}.0")
        statuses[code] += 1
        same = tree(folder) == before or "out of memory" in out
        if code not in (0, 1, 2) or "Traceback" in out or code == 2 and not same or (
                code == 1 and "finite" not in out and "not saved" not in out) or (
                code == 2 and not 1 <= out.count("train.py: ") <= 1):
            last = [line for line in out.splitlines() if line][-1:]
            wrong.append(f"{code} {'' if same else 'CHANGED '}{args} {last}")
        if tree(folder) != whole:
            shutil.rmtree(folder)
            shutil.copytree(template, folder)
    print(f"\n{cases} cases, exit statuses {dict(statuses)}")
    assert not wrong, f"{len(wrong)} of {cases}:\n" + "\n".join(wrong)


def test_fuzz_command_lines(tmp_path):
    names = [k for k in train.names(vars(train)) if k not in ("max_iters", "max_minutes")]

    def change(rng, folder):
        args = [f"--init_from={rng.choice(['scratch', 'resume', 'auto'])}"]
        for _ in range(rng.choice((1, 1, 1, 2, 3))):
            name = rng.choice(names if rng.random() < 0.95 else WORDS[:20] + ["n_layers"])
            sizes = ("n_layer", "gradient_accumulation_steps")
            value = rng.choice(SIZES[:7] + SIZES[-30:] if name in sizes else SIZES)
            if rng.random() < 0.12:
                with open(f"{folder}/config.py", "w", encoding="utf-8") as f:
                    f.write(rng.choice(FILES))
                args.append(rng.choice(["config.py"] * 9 + ["no.py", "data", "out/ckpt.pt"]))
            else:
                args.append(rng.choice(["--{}={}"] * 19 + ["-{}={}", "--{}", "{}", "--{}=={}"])
                            .format(name, value))
        return args
    fuzz(tmp_path, 2000 if FULL else 100, change)


def junk(rng):
    return rng.choice([None, -1, 0, 1, 3, 0.5, math.nan, math.inf, 2 ** 70, "", "x", [], {}, 
                       [1, "a"], {"a": 1}, True])


def mangle(rng, value, depth=0):
    """Drop or replace one thing somewhere inside a nest of dicts and lists."""
    keys = list(value) if isinstance(value, dict) else list(range(len(value))) if isinstance(
        value, (list, tuple)) else []
    if not keys or depth and rng.random() < 0.2:
        if isinstance(value, torch.Tensor) and rng.random() < 0.7:
            return rng.choice([value.flatten()[:-1], value.double(), value * math.nan if
                               value.is_floating_point() else value, value[None], value.int()])
        return junk(rng)
    key = rng.choice(keys)
    if isinstance(value, dict):
        if rng.random() < 0.15:
            return {k: v for k, v in value.items() if k != key}
        return {**value, key: mangle(rng, value[key], depth + 1)}
    changed = [mangle(rng, v, depth + 1) if i == key else v for i, v in enumerate(value)]
    return type(value)(changed[:-1] if rng.random() < 0.1 else changed)


def test_fuzz_data(tmp_path):
    def change(rng, folder):
        path = f"{folder}/data/tiny/" + rng.choice(("train.bin", "val.bin", *["meta.json"] * 2))
        kind = rng.randrange(8)
        if kind == 0:
            os.remove(path)
        elif kind == 1:
            os.remove(path)
            os.mkdir(path)
        elif kind == 2:
            with open(path, "wb") as f:
                f.write(rng.randbytes(rng.choice((0, 1, 2, 32, 33, 34, 36, 1001, 5000))))
        elif kind == 3:
            damage(path, "flip", rng)
        elif kind == 4:
            damage(path, rng.random())
        elif path.endswith("json"):
            meta = mangle(rng, json.loads(text(path)))
            if rng.random() < 0.2 and isinstance(meta, dict):
                meta["tokenizer"] = {"name": "bpe", "pattern": "."}
            with open(path, "w") as f:
                json.dump(meta, f)
        else:
            ids = np.fromfile(path, "<u2")
            ids[rng.randrange(len(ids))] = rng.choice((0, 256, 257, 65535))
            ids[:rng.choice((16, 17, 18, 99999))].tofile(path)
        return [f"--init_from={rng.choice(['scratch', 'resume'])}"]
    fuzz(tmp_path, 300 if FULL else 30, change)


def test_fuzz_checkpoints(tmp_path):
    def change(rng, folder):
        good = load(folder)
        name = rng.choice(("ckpt.pt", "best.pt"))
        path = f"{folder}/out/{name}"
        kind = rng.randrange(10)
        if kind < 2:
            damage(path, "flip", rng)
        elif kind == 2:
            damage(path, rng.random())
        elif kind == 3:
            with open(path, "wb") as f:
                f.write(rng.choice((b"", b"PK\3\4", rng.randbytes(500))))
        elif kind == 4:
            torch.save(rng.choice((junk(rng), good["model"], {"model": good["model"]})), path)
        else:
            torch.save(mangle(rng, load(folder, f"out/{name}")), path)
        if rng.random() < 0.7:  # no kept copy to fall back to
            for n in (1, 2):
                with contextlib.suppress(FileNotFoundError):
                    os.remove(f"{folder}/out/ckpt_{n}.pt")
        return ["--init_from=" + (rng.choice(("resume", "auto")) if name == "ckpt.pt" else path)]
    fuzz(tmp_path, 300 if FULL else 30, change)


# ---- text and tokens

EOT = "<|endoftext|>"
SCRIPT = os.path.abspath(prepare.__file__)
VOCABULARY = "the cat saw a small red ball and it ran to the big tree where Tom and Lily sat".split()
ODD = {
    "BOM": "\ufeffHello there",
    "CRLF": "one\r\ntwo\r\n\r\nthree\rfour",
    "emoji": "a 👩‍👩‍👧‍👦 family 🇩🇪",
    "CJK": "中文字符，日本語の文章。",
    "NUL": "a\0b\0\0c",
    "combining": "e\u0301 \u200b\u200d \u2028 \ufffe \U0010ffff",
    "spaces": "   \t\t  \n\n\n   x" + " " * 5000,
    "one long word": "ab" * 5000,
    "special tokens": "<|endoftext|> and <|fim_prefix|> are text here",
    "no final newline": "the end",
    "digits": "1234567890" * 20,
}


def stories(count, seed=0):
    draw = random.Random(seed)
    return [" ".join(draw.choices(VOCABULARY, k=draw.randint(8, 60))).capitalize() + ".\n"
            for _ in range(count)]


def joined(documents):
    return f"{EOT}\n".join(documents)


@pytest.fixture
def prep(tmp_path, monkeypatch, capsys):
    """prep(text or None, **settings) runs prepare in an empty folder; a refusal is its message."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["prepare.py"])

    def run(text=None, **settings):
        if text is not None:
            with open("in.txt", "w", encoding="utf-8", newline="") as f:
                f.write(text)
            settings = {"input": "in.txt", **settings}
        with monkeypatch.context() as m:
            for name, value in {"dataset": "d", "vocab_size": 300, "processes": 1,
                                **settings}.items():
                m.setattr(prepare, name, value)
            capsys.readouterr()
            try:
                prepare.main()
            except SystemExit as e:
                out, err = capsys.readouterr()
                assert e.code == 2 and err.count("\n") == 1 and out == "", (e.code, out, err)
                return err
            return capsys.readouterr().out
    return run


def prepare_command(*args, **kwargs):
    return [sys.executable, SCRIPT, *args], {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE,
                                             **kwargs}


def documents(split, folder="data/d"):
    """The documents of a split, decoded; what follows the last end of text must be nothing."""
    meta = prepare.read_meta(folder)
    encoding = prepare.load_tokenizer(meta["tokenizer"])
    ids = np.fromfile(f"{folder}/{split}.bin", dtype="<u2").tolist()
    assert meta["eot"] == encoding.eot_token == encoding.n_vocab - 1
    found, start = [], 0
    for i, token in enumerate(ids):
        if token == meta["eot"]:
            found.append(encoding.decode_bytes(ids[start:i]).decode())
            start = i + 1
    if start < len(ids):  # only where the end of the one document is the val split
        assert split == "train" and max(np.fromfile(f"{folder}/val.bin", "<u2")) == meta["eot"]
        found.append(encoding.decode_bytes(ids[start:]).decode())
    return found


def both_ways(folder="data/d"):
    return documents("train", folder) + documents("val", folder)


def snapshot(folder="."):
    """Every file below a folder with its content, and every folder."""
    return {p: open(p, "rb").read() if os.path.isfile(p) else None
            for p in glob.glob(f"{folder}/**", recursive=True, include_hidden=True)}


def gpt2_here():
    try:
        prepare.tiktoken.get_encoding("gpt2")
        return True
    except Exception:
        return False


TOKENIZERS = ["bpe", "byte", pytest.param("gpt2", marks=pytest.mark.skipif(
    not gpt2_here(), reason="needs GPT-2's vocabulary, see TIKTOKEN_CACHE_DIR"))]


# ---- the text comes back

@pytest.mark.parametrize("tokenizer", TOKENIZERS)
@pytest.mark.parametrize("name", ODD)
def test_odd_text_comes_back_byte_for_byte(prep, tokenizer, name):
    text = ODD[name] * 3
    prep(text, tokenizer=tokenizer, separator="")
    assert "".join(both_ways()) == text  # one document: the head is train, the tail is val
    prep(joined([text + str(i) for i in range(20)]) if EOT not in text else text, tokenizer=tokenizer)
    if EOT not in text:
        assert sorted(both_ways()) == sorted(text + str(i) for i in range(20))


@pytest.mark.parametrize("tokenizer", TOKENIZERS)
def test_special_tokens_in_text_are_text_unless_they_separate(prep, tokenizer):
    text = "one<|endoftext|>two\n\nthree<|endoftext|>four"
    prep(text, separator="\\n\\n", tokenizer=tokenizer)
    assert sorted(both_ways()) == sorted(text.split("\n\n"))
    prep(text, tokenizer=tokenizer)
    assert sorted(both_ways()) == sorted(text.split(EOT))


@pytest.mark.parametrize("text", ["x" * 3_000_000, "中" * 1_000_000, " " * 2_000_000 + "x",
                                  "some words " * 300_000])
def test_one_long_line_comes_back_in_bounded_time(prep, text):
    start = time.monotonic()
    prep(text)
    assert "".join(both_ways()) == text and time.monotonic() - start < 30


def test_documents_longer_than_a_block_stay_whole(prep, monkeypatch):
    [monkeypatch.setattr(prepare, k, 64) for k in ("BLOCK", "LONGEST")]
    texts = [f"{n} " + "é" * n + " end" for n in [*range(20, 70), 127, 128, 129, 500, 1001]]
    prep(joined(texts))
    assert sorted(both_ways()) == sorted(texts)
    splits = {text: split for split in ("train", "val") for text in documents(split)}
    prep("prefix" * 5 + EOT + joined(texts[::-1]))  # elsewhere in the file: the same split
    for split in ("train", "val"):
        for text in documents(split):
            assert splits.get(text, split) == split


def test_a_long_document_keeps_its_blank_end(prep, monkeypatch):
    [monkeypatch.setattr(prepare, k, 64) for k in ("BLOCK", "LONGEST")]
    text = "x" * 500 + "\n" * 200
    prep(text)
    assert "".join(both_ways()) == text


def test_the_line_break_behind_a_separator_is_part_of_it(prep):
    prep(f"\na{EOT}\n\nb\n{EOT}\nc\n{EOT}d{EOT}\n")
    assert sorted(both_ways()) == sorted(["\na", "\nb\n", "c\n", "d"])


# ---- splits

def test_splits_are_by_document_and_stay_when_text_is_added(prep):
    texts = [f"{t}{i}" for i, t in enumerate(stories(400))]
    prep(joined(texts[:200]))
    old = {split: set(documents(split)) for split in ("train", "val")}
    assert 5 < len(old["val"]) < 40 and sorted(old["train"] | old["val"]) == sorted(texts[:200])
    draw = random.Random(1)
    draw.shuffle(texts)
    prep(joined(texts), tokenizer="byte", processes=2)
    assert old["train"] <= set(documents("train")) and old["val"] <= set(documents("val"))
    assert len(both_ways()) == 400


def test_order_within_a_split_is_the_order_of_the_input(prep):
    texts = [f"{i} {t}" for i, t in enumerate(stories(200))]
    prep(joined(texts))
    for split in ("train", "val"):
        numbers = [int(t.split()[0]) for t in documents(split)]
        assert numbers == sorted(numbers)


@pytest.mark.parametrize("fraction", [0.1, 0.25, 0.5])
def test_one_document_is_split_at_its_tail(prep, fraction):
    text = "".join(stories(100))
    prep(text, val_fraction=fraction, tokenizer="byte")
    cut = int(len(text) * (1 - fraction))
    assert documents("train") == [text[:cut]] and documents("val") == [text[cut:]]


def test_the_tail_begins_at_a_character(prep):
    for pad in range(4):
        text = "x" * pad + "😀" * 25
        prep(text, tokenizer="byte")
        assert "".join(both_ways()) == text and documents("val")[0]


def test_no_split_is_ever_empty(prep):
    for count in range(2, 8):
        texts = stories(count, seed=count)
        for fraction in (0.01, 0.99):
            prep(joined(texts), val_fraction=fraction, tokenizer="byte")
            assert documents("train") and documents("val")
            assert "".join(sorted(both_ways())).replace("\n", "") != ""
            assert sum(map(len, both_ways())) == sum(map(len, texts))


def test_val_input_is_the_validation_split(prep):
    train, val = stories(30, 1), stories(5, 2)
    open("v.txt", "w").write(joined(val))
    prep(joined(train), val_input="v.txt")
    assert documents("train") == train and documents("val") == val


def test_bpe_learns_from_the_training_split_only(prep):
    open("v.txt", "w").write("zqzqzqzqzq " * 500)
    prep("abab abab cd " * 200, val_input="v.txt", vocab_size=280)
    meta = prepare.read_meta("data/d")
    assert not any(b"zq" in t for t in prepare.load_tokenizer(meta["tokenizer"]).token_byte_values())


def test_the_bpe_sample_is_bounded_and_spread(prep, monkeypatch):
    monkeypatch.setattr(prepare, "BLOCK", 1 << 10)
    seen = []
    train = prepare.train_bpe
    monkeypatch.setattr(prepare, "train_bpe", lambda s: train(seen.append(t) or t for t in s))
    texts = [f"{i} {t}" for i, t in enumerate(stories(20_000))]
    prep(joined(texts), bpe_sample_mb=1)
    size = sum(len(t.encode()) for t in seen)
    assert 0.4e6 < size < 1.1e6 and len(joined(texts)) > 2e6
    assert any(t.startswith("19") for t in seen)  # not the beginning only


# ---- the same on every machine

@pytest.mark.parametrize("tokenizer", TOKENIZERS)
def test_same_result_for_any_number_of_processes(prep, tokenizer):
    text, results = joined(stories(8000) + ["long " * 240_000] + stories(500, 1)), []
    assert len(text) > 4 * prepare.BLOCK  # enough for two workers
    for processes in (1, 2):
        prep(text, tokenizer=tokenizer, processes=processes)
        results.append(snapshot("data"))
    assert results[0] == results[1]


def test_tokens_are_those_of_tiktoken_document_by_document(prep, monkeypatch):
    monkeypatch.setattr(prepare, "BLOCK", 1 << 12)  # many units of work
    texts = [f"{t}  \n {i}" for i, t in enumerate(stories(1000))]
    prep(joined(texts))
    meta = prepare.read_meta("data/d")
    encoding = prepare.load_tokenizer(meta["tokenizer"])
    for split in ("train", "val"):
        want = [i for t in documents(split) for i in [*encoding.encode_ordinary(t), meta["eot"]]]
        assert np.fromfile(f"data/d/{split}.bin", "<u2").tolist() == want


# ---- files and formats

def test_meta_agrees_with_an_independent_count(prep):
    texts = [f"{t} é😀 {i}" for i, t in enumerate(stories(300))]
    prep(joined(texts + ["", " \n "]), vocab_size=350)
    meta = prepare.read_meta("data/d")
    assert meta["source"] == "in.txt" and meta["tokenizer"]["name"] == "bpe"
    assert meta["vocab_size"] == 350 and meta["eot"] == 349
    assert sum(meta[s]["bytes"] for s in ("train", "val")) == sum(len(t.encode()) for t in texts)
    for split in ("train", "val"):
        raw, found = open(f"data/d/{split}.bin", "rb").read(), documents(split)
        assert meta[split] == {"tokens": len(raw) // 2, "documents": len(found),
                               "bytes": sum(len(t.encode()) for t in found),
                               "sha256": hashlib.sha256(raw).hexdigest()}
    lines = [line.split() for line in open("data/d/tokenizer.tiktoken", "rb")]
    assert [int(rank) for _, rank in lines] == list(range(349))
    assert len({base64.b64decode(t) for t, _ in lines}) == 349


def test_byte_tokens_are_the_bytes(prep):
    prep("héllo\n" * 10, tokenizer="byte")
    meta = prepare.read_meta("data/d")
    assert (meta["vocab_size"], meta["eot"]) == (257, 256)
    assert np.fromfile("data/d/train.bin", "<u2")[:7].tolist() == list("héllo\n".encode())
    assert not os.path.exists("data/d/tokenizer.tiktoken")


def test_a_folder_without_meta_is_gpt2(tmp_path):
    for name in ("train.bin", "val.bin"):
        np.arange(10, dtype="<u2").tofile(tmp_path / name)
    assert prepare.read_meta(str(tmp_path)) == {"tokenizer": {"name": "gpt2"}, "vocab_size": 50257,
                                                "eot": 50256,
                                                "source": "no meta.json, so GPT-2's tokens"}


def test_the_tokenizer_spec_is_plain_data(prep):
    prep(joined(stories(50)))
    spec = prepare.read_meta("data/d")["tokenizer"]
    assert json.loads(json.dumps(spec)) == spec and set(spec) == {"name", "pattern", "ranks"}
    a, b = prepare.load_tokenizer(spec), prepare.load_tokenizer(json.loads(json.dumps(spec)))
    assert a.encode_ordinary("Tom saw") == b.encode_ordinary("Tom saw")


def test_a_small_text_gives_the_vocabulary_it_can(prep):
    out = prep("abababab" * 4, vocab_size=5000)
    meta = prepare.read_meta("data/d")
    assert meta["vocab_size"] < 300 and f"vocabulary {meta['vocab_size']}" in out
    assert max(np.fromfile("data/d/val.bin", "<u2")) == meta["eot"] == meta["vocab_size"] - 1


def test_folders_globs_gz_jsonl_and_lists(prep):
    texts = stories(12)
    os.makedirs("in/sub")
    open("in/a.txt", "w").write(joined(texts[:2]))
    gzip.open("in/b.txt.gz", "wt").write(joined(texts[2:4]))
    open("in/c.jsonl", "w").write("".join(json.dumps({"body": t}) + "\n\n" for t in texts[4:6]))
    gzip.open("in/sub/d.jsonl.gz", "wt").write("\n".join(json.dumps({"body": t}) for t in texts[6:8]))
    open("in/sub/e.md", "w").write(texts[8])
    open("in/.hidden", "w").write("not this")
    open("x1.txt", "w").write(texts[9])
    open("x2.txt", "w").write(texts[10])
    open("y.txt", "w").write(texts[11])
    prep(input="in,x*.txt,y.txt", text_field="body")
    assert sorted(both_ways()) == sorted(texts)
    prep(input="in/**/*.gz", text_field="body", tokenizer="byte")
    assert sorted(both_ways()) == sorted(texts[2:4] + texts[6:8])


def test_jsonl_documents_are_not_separated_again(prep):
    texts = [f"a {EOT} b {i}" for i in range(20)] + ["\nwith a line break first"]
    open("in.jsonl", "w").write("\n".join(json.dumps({"text": t}) for t in texts))
    prep(input="in.jsonl")
    assert sorted(both_ways()) == sorted(texts)


def test_standard_input(tmp_path):
    text = joined(stories(30))
    args, kwargs = prepare_command("--input=-", "--dataset=d", "--vocab_size=300", cwd=tmp_path)
    done = subprocess.run(args, input=text.encode(), **kwargs)
    assert done.returncode == 0 and done.stderr == b""
    assert sorted(both_ways(f"{tmp_path}/data/d")) == sorted(text.split(EOT + "\n"))
    assert sorted(os.listdir(tmp_path / "data/d")) == ["meta.json", "tokenizer.tiktoken", "train.bin",
                                                      "val.bin"]


def test_empty_documents_are_dropped_and_counted(prep):
    out = prep(f"first{EOT}" + EOT * 100_000 + f" \r\n\t{EOT}last{EOT}\n", tokenizer="byte")
    assert "dropped 100,001 empty" in out and sorted(both_ways()) == ["first", "last"]


def test_dedup_drops_exact_copies(prep):
    texts = [f"{t}{i}" for i, t in enumerate(stories(50))] + ["long" * 300_000]
    assert len(prep(joined(texts * 3))) and len(both_ways()) == 153
    out = prep(joined(texts * 2 + texts[:1]), dedup=True)
    assert sorted(both_ways()) == sorted(texts) and "52 duplicate" in out
    open("v.txt", "w").write(joined(texts[:5]))
    prep(joined(texts), dedup=True, val_input="v.txt")
    assert documents("val") == texts[:5] and documents("train") == texts[5:]


# ---- refusals: one line, exit status 2, nothing changed

BAD = {
    "missing": dict(input="nothing.txt"),
    "no match": dict(input="*.nothing"),
    "empty": dict(text=""),
    "blank": dict(text=" \n\n "),
    "empty folder": dict(input="empty"),
    "one character": dict(text="x"),
    "val missing": dict(text="some text", val_input="nothing.txt"),
    "val empty": dict(text="some text", val_input="zero.txt"),
    "tokenizer": dict(text="some text", tokenizer="gpt3"),
    "vocab small": dict(text="some text", vocab_size=256),
    "vocab large": dict(text="some text", vocab_size=65537),
    "fraction 0": dict(text="some text", val_fraction=0.0),
    "fraction 1": dict(text="some text", val_fraction=1.0),
    "errors": dict(text="some text", errors="ignore"),
    "processes": dict(text="some text", processes=-1),
    "sample": dict(text="some text", bpe_sample_mb=0),
    "not json": dict(input="bad.jsonl", names="bad.jsonl, line 2"),
    "no field": dict(input="good.jsonl", text_field="body", names="good.jsonl, line 1"),
    "not text": dict(input="number.jsonl", names="number.jsonl, line 1"),
    "half a character": dict(input="surrogate.jsonl", names="surrogate.jsonl, line 1"),
    "not gzip": dict(input="plain.gz", names="plain.gz"),
    "cut gzip": dict(input="cut.gz", names="cut.gz"),
    "latin-1": dict(input="latin.txt", names="latin.txt: byte 1000003 "),
    "latin-1 in gzip": dict(input="latin.txt.gz", names="latin.txt.gz: byte 1000003 "),
    "latin-1 in jsonl": dict(input="latin.jsonl", names="latin.jsonl: byte 26 "),
    "cut character": dict(input="cut.txt", names="cut.txt: byte 5 "),
    "no server": dict(input="http://127.0.0.1:9/x.txt", names="127.0.0.1:9"),
    "a file in the way": dict(text="some text", dataset="in.txt/x", data="in.txt"),
}


@pytest.mark.parametrize("case", BAD)
def test_refusals_are_one_line_and_change_nothing(prep, case):
    settings = dict(BAD[case])
    names, text = settings.pop("names", ""), settings.pop("text", None)
    prep(joined(stories(20)), dataset="old")
    os.mkdir("empty")
    open("zero.txt", "w")
    open("bad.jsonl", "w").write('{"text": "good"}\n{"text": \n')
    open("good.jsonl", "w").write('{"text": "good"}\n')
    open("number.jsonl", "w").write('{"text": 5}\n')
    open("surrogate.jsonl", "w").write('{"text": "\\ud800"}\n')
    open("plain.gz", "w").write("not gzip")
    open("cut.gz", "wb").write(gzip.compress(os.urandom(5000))[:2500])
    latin = "é".encode() * 500_000 + b"abc\xe9 x" + b"y" * 99_999
    open("latin.txt", "wb").write(latin)
    gzip.open("latin.txt.gz", "wb").write(latin)
    open("latin.jsonl", "wb").write(b'{"text": "good"}\n{"text":"\xe9"}\n')
    open("cut.txt", "wb").write("abcde中".encode()[:-1])
    if settings.pop("data", None):
        os.symlink("in.txt", "data/in.txt")
    if text is not None:
        open("in.txt", "w").write(text)
        settings["input"] = "in.txt"
    before = snapshot()
    for dataset in ("old", "new"):
        message = prep(**{"dataset": dataset, **settings})
        assert "Traceback" not in message and names in message, message
        assert snapshot() == before


def test_errors_replace_reads_on(prep):
    open("in.txt", "wb").write(b"caf\xe9 and \xff\xfe more\n" * 40)
    prep(input="in.txt", errors="replace", tokenizer="byte")
    text = "caf\ufffd and \ufffd\ufffd more\n" * 40
    assert "".join(both_ways()) == text
    meta = prepare.read_meta("data/d")
    assert meta["train"]["bytes"] + meta["val"]["bytes"] == len(text.encode())


def test_settings_on_the_command_line(tmp_path):
    for arg, words in (("--vocab=300", "vocab_size"), ("--vocab_size=many", "int"),
                       ("--val_fraction=1.5", "val_fraction")):
        args, kwargs = prepare_command(arg, cwd=tmp_path)
        done = subprocess.run(args, **kwargs)
        assert done.returncode == 2 and words in done.stderr.decode()
        assert done.stderr.count(b"\n") == 1 and not os.listdir(tmp_path)


ENCODER = """
import sys, prepare, numpy
from config import configure
def texts(job, real=prepare.texts):
    if job[1] > 0:
        raise ValueError("broken")
    return real(job)
prepare.texts = texts
if __name__ == "__main__":
    sys.argv[0] = "prepare.py"
    prepare.__file__ = __file__
    configure(vars(prepare))
    prepare.main()
"""


@pytest.mark.parametrize("processes", [1, 2])
def test_an_error_of_a_worker_is_one_line_with_its_place(tmp_path, processes):
    (tmp_path / "run.py").write_text(ENCODER)
    (tmp_path / "in.txt").write_text(joined(stories(15_000)))
    done = subprocess.run(
        [sys.executable, "run.py", "--input=in.txt", "--dataset=d", "--tokenizer=byte",
         f"--processes={processes}"], cwd=tmp_path, capture_output=True,
        env={**os.environ, "PYTHONPATH": os.path.dirname(SCRIPT)})
    assert done.returncode == 2 and b"Traceback" not in done.stderr, done.stderr
    assert b"broken" in done.stderr and b"byte" in done.stderr and done.stderr.count(b"\n") == 1
    assert not os.path.exists(tmp_path / "data")


META = {  # what is wrong with the folder: the file that the refusal names
    "folder": "meta.json", "cut": "meta.json", "binary": "meta.json", "list": "meta.json",
    "source": "meta.json", "vocab_size": "meta.json", "eot": "meta.json", "tokenizer": "meta.json",
    "name": "meta.json", "tokens": "meta.json", "bytes": "meta.json", "val": "meta.json",
    "no ranks": "tokenizer.tiktoken", "cut ranks": "tokenizer.tiktoken",
    "garbled ranks": "tokenizer.tiktoken", "double ranks": "tokenizer.tiktoken",
    "ranks folder": "tokenizer.tiktoken", "no bin": "val.bin"}


@pytest.mark.parametrize("how", META)
def test_a_damaged_data_folder_is_refused_in_one_line(prep, capsys, how):
    prep(joined(stories(50)))
    path, ranks = "data/d/meta.json", "data/d/tokenizer.tiktoken"
    meta, lines = json.load(open(path)), open(ranks).read().splitlines(True)
    wrong = [None]
    if how == "no bin":
        os.remove("data/d/val.bin")
    elif "ranks" in how:
        os.remove(ranks)
        if how == "ranks folder":
            os.mkdir(ranks)
        elif how != "no ranks":
            open(ranks, "w").write({"cut": "".join(lines)[:2000], "double": "".join(
                lines[:-1] + lines[:1]), "garbled": "not a tokenizer\n"}[how.split()[0]])
    elif how in ("folder", "cut", "binary", "list"):
        os.remove(path)
        if how == "folder":
            os.mkdir(path)
        else:
            open(path, "wb").write({"cut": json.dumps(meta)[:90].encode(), "binary": b"\xff\0",
                                    "list": b"[1]"}[how])
    else:
        wrong = ["missing", None, [], -1, "x", 0.5] + [0] * (how != "eot")
    for value in wrong:
        if wrong != [None]:
            changed = json.loads(json.dumps(meta))
            place = {"name": changed["tokenizer"], "tokens": changed["val"],
                     "bytes": changed["val"]}.get(how, changed)
            place[how] = value
            if value == "missing":
                del place[how]
            if how == "source" and type(value) is str and value != "missing":
                continue
            json.dump(changed, open(path, "w"))
        with pytest.raises(SystemExit) as e:
            prepare.read_meta("data/d")
        err = capsys.readouterr().err
        assert e.value.code == 2 and err.count("\n") == 1 and f"data/d/{META[how]}" in err
        assert "python prepare.py --dataset=d " in err


@pytest.mark.parametrize("room", [100_000, 300_000])  # the copy of the text fails, a bin fails
def test_a_full_disk_ends_in_one_line_and_leaves_the_old_data_set(tmp_path, room):
    (tmp_path / "in.txt").write_text(joined(stories(2_000))[:250_000])
    args, kwargs = prepare_command("--input=in.txt", "--dataset=d", "--tokenizer=byte", cwd=tmp_path)
    assert subprocess.run(args, **kwargs).returncode == 0
    before = snapshot(str(tmp_path))
    done = subprocess.run(args, **kwargs, preexec_fn=lambda: resource.setrlimit(
        resource.RLIMIT_FSIZE, (room, room)))
    assert done.returncode == 2 and done.stderr.count(b"\n") == 1 and b"large" in done.stderr
    assert snapshot(str(tmp_path)) == before


def test_gpt2_out_of_reach_says_what_to_do(prep, monkeypatch):
    def fail(name):
        raise ConnectionError("no network")
    monkeypatch.setattr(prepare.tiktoken, "get_encoding", fail)
    message = prep("some text", tokenizer="gpt2")
    assert "--tokenizer=bpe" in message and "TIKTOKEN_CACHE_DIR" in message
    assert not os.path.exists("data")


# ---- kill, Ctrl-C, a worker's death

def consistent(folder, good):
    """No file under a final name is wrong: train.bin stands only among files that belong to it."""
    files = {n: open(f"{folder}/{n}", "rb").read() for n in good if os.path.exists(f"{folder}/{n}")}
    if "train.bin" in files:
        meta = json.loads(files["meta.json"])
        for split in ("train", "val"):
            assert hashlib.sha256(files[f"{split}.bin"]).hexdigest() == meta[split]["sha256"]
        assert ("tokenizer.tiktoken" in files) == (meta["tokenizer"]["name"] == "bpe")
    return "train.bin" in files


def test_kill_at_any_moment_leaves_no_wrong_file(tmp_path):
    (tmp_path / "in.txt").write_text(joined(stories(5_000)))
    folder = str(tmp_path / "data/d")
    args, kwargs = prepare_command("--input=in.txt", "--dataset=d", "--vocab_size=400", cwd=tmp_path)
    start = time.monotonic()
    assert subprocess.run(args, **kwargs).returncode == 0
    took = time.monotonic() - start
    good = snapshot(folder)
    good = {os.path.basename(p): v for p, v in good.items() if v}
    for i in range(5):
        child = subprocess.Popen(args + ["--tokenizer=byte"] * (i % 2), **kwargs)
        time.sleep(took * (i + 1) / 5)
        child.kill()
        child.communicate()
        consistent(folder, good)
    assert subprocess.run(args, **kwargs).returncode == 0
    assert {n: open(f"{folder}/{n}", "rb").read() for n in os.listdir(folder)} == good


def test_a_stop_between_any_two_moves_leaves_no_wrong_data_set(prep, monkeypatch):
    prep(joined(stories(50)))
    names = ["train.bin", "val.bin", "meta.json", "tokenizer.tiktoken"]
    outcomes = set()
    for operation in ("remove", "replace"):
        for stop in range(1, 6):
            prep(joined(stories(50)))
            calls, real = [], getattr(os, operation)

            def stopping(*args):
                calls.append(args)
                if len(calls) == stop:
                    raise OSError("stopped")
                return real(*args)
            with monkeypatch.context() as m:
                m.setattr(os, operation, stopping)
                out = prep(joined(stories(50, 1)), tokenizer="byte")
            outcomes.add("stopped" in out)
            consistent("data/d", names)
    assert outcomes == {True, False}


@pytest.mark.parametrize("when", ["text", "train.bin"])  # reading, or starting workers
def test_ctrl_c_ends_in_one_line(tmp_path, when):
    (tmp_path / "in.txt").write_text(joined(stories(40_000)))
    args, kwargs = prepare_command("--input=in.txt", "--dataset=d", "--processes=2", "--tokenizer=byte",
                           cwd=tmp_path)
    child = subprocess.Popen(args, start_new_session=True, **kwargs, preexec_fn=lambda: (
        signal.signal(signal.SIGINT, signal.SIG_DFL)))  # a background shell ignores it
    while not glob.glob(f"{tmp_path}/data/d/.tmp/{when}"):
        assert child.poll() is None
        time.sleep(0.01)
    time.sleep(0.15)
    os.killpg(child.pid, signal.SIGINT)
    out, err = child.communicate()
    assert child.returncode == 130 and err.count(b"\n") == 1 and b"interrupted" in err, err
    assert not os.path.exists(tmp_path / "data")


def test_a_dead_worker_is_an_error_and_no_worker_outlives_its_parent(tmp_path):
    (tmp_path / "in.txt").write_text(joined(stories(30_000)))

    def workers(pid):
        found = []
        for path in glob.glob("/proc/[0-9]*/stat"):
            try:
                stat, line = open(path).read(), open(path[:-4] + "cmdline").read()
            except OSError:
                continue
            if int(stat.rsplit(")", 1)[1].split()[1]) == pid and "spawn_main" in line:
                found.append(int(path.split("/")[2]))
        return found

    for victim in ("worker", "parent"):
        args, kwargs = prepare_command("--input=in.txt", "--dataset=d", "--processes=2",
                               "--tokenizer=byte", cwd=tmp_path)
        child = subprocess.Popen(args, **kwargs)
        while not (found := workers(child.pid)):
            assert child.poll() is None
            time.sleep(0.05)
        time.sleep(0.5)
        found = workers(child.pid)
        os.kill(found[0] if victim == "worker" else child.pid, signal.SIGKILL)
        out, err = child.communicate(timeout=30)
        if victim == "worker":
            assert child.returncode == 2 and err.count(b"\n") == 1, err
            assert not os.path.exists(tmp_path / "data")
        deadline = time.monotonic() + 10
        while any(os.path.exists(f"/proc/{pid}") for pid in found) and time.monotonic() < deadline:
            time.sleep(0.1)
        assert not any(os.path.exists(f"/proc/{pid}") for pid in found)


# ---- downloads

class Server(http.server.BaseHTTPRequestHandler):
    """Serves `files`; `cuts` answers end half-way; `ranges` says whether Range is honoured."""
    files, cuts, ranges, slow, status, log = {}, 0, True, 0.0, 200, []

    def do_GET(self):
        cls, data = type(self), self.files.get(self.path)
        begin = 0
        cls.log.append(self.headers.get("Range"))
        if data is None or self.status != 200:
            return self.send_error(404 if data is None else self.status)
        if self.ranges and self.headers.get("Range"):
            begin = int(self.headers["Range"].removeprefix("bytes=").removesuffix("-"))
            if begin >= len(data):
                return self.send_error(416)
            self.send_response(206)
            self.send_header("Content-Range", f"bytes {begin}-{len(data) - 1}/{len(data)}")
        else:
            self.send_response(200)
        self.send_header("Content-Length", str(len(data) - begin))
        self.end_headers()
        stop = len(data)
        if cls.cuts:
            cls.cuts -= 1
            stop = begin + (len(data) - begin) // 2
        for i in range(begin, stop, 10_000):
            self.wfile.write(data[i:min(i + 10_000, stop)])
            self.wfile.flush()
            time.sleep(self.slow)

    def log_message(self, *args):
        pass


@pytest.fixture
def server(monkeypatch):
    handler = type("Handler", (Server,), {"log": []})
    httpd = http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler)
    thread = threading.Thread(target=httpd.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True)
    thread.start()
    handler.url = f"http://127.0.0.1:{httpd.server_port}/"
    monkeypatch.setattr(prepare, "TINYSTORIES", handler.url + "TinyStoriesV2-GPT4-")
    train, val = joined(stories(500)), joined(stories(50, 1))
    handler.files = {"/TinyStoriesV2-GPT4-train.txt": train.encode(),
                     "/TinyStoriesV2-GPT4-valid.txt": val.encode()}
    yield handler
    httpd.shutdown()
    httpd.server_close()


def kept(url, name="TinyStoriesV2-GPT4-train.txt"):
    return f"data/d/{zlib.crc32((url + name).encode()):08x}-{name}"


@pytest.mark.parametrize("how", ["whole", "slow", "cut", "cut often", "cut without Range"])
def test_tinystories_is_downloaded_whole_and_kept(prep, server, how):
    server.slow = 0.02 if how == "slow" else 0
    server.cuts = {"cut": 1, "cut often": 5, "cut without Range": 1}.get(how, 0)
    server.ranges = how != "cut without Range"
    prep(TIMEOUT=2.0)
    assert open(kept(server.url), "rb").read() == server.files["/TinyStoriesV2-GPT4-train.txt"]
    assert documents("val") == stories(50, 1) and documents("train") == stories(500)
    assert prepare.read_meta("data/d")["source"] == "TinyStoriesV2-GPT4-train.txt"
    assert not glob.glob("data/d/*.part")
    asked = len(server.log)
    prep()
    assert len(server.log) == asked  # kept


def test_a_download_goes_on_where_an_earlier_run_stopped(prep, server):
    os.makedirs("data/d")
    data = server.files["/TinyStoriesV2-GPT4-train.txt"]
    open(kept(server.url) + ".part", "wb").write(data[:1234])
    prep()
    assert open(kept(server.url), "rb").read() == data and "bytes=1234-" in server.log
    os.remove(kept(server.url))
    open(kept(server.url) + ".part", "wb").write(data + b"too long")
    prep()
    assert open(kept(server.url), "rb").read() == data


def test_a_url_as_input(prep, server):
    server.cuts = 1
    prep(input=server.url + "TinyStoriesV2-GPT4-train.txt", val_fraction=0.2)
    assert sorted(both_ways()) == sorted(stories(500))
    for cuts, status in ((0, 404), (0, 503), (3, 200)):
        server.cuts, server.status, server.ranges = cuts, status, False
        before = snapshot("data")
        message = prep(input=server.url + "TinyStoriesV2-GPT4-valid.txt")
        assert server.url in message and (str(status) in message or "cut" in message)
        assert {k: v for k, v in snapshot("data").items() if ".part" not in k} == before


@pytest.mark.parametrize("how", ["no server", "404", "stall", "cut for ever"])
def test_without_tinystories_the_bundled_stories_are_taken(prep, server, monkeypatch, capsys, how,
                                                           tmp_path):
    os.makedirs("repo/data")
    open("repo/data/stories.txt", "w").write(joined(stories(40, 5)))
    monkeypatch.setattr(prepare, "__file__", "repo/prepare.py")
    url, lines = server.url, []
    if how == "no server":
        url = "http://127.0.0.1:9/"
    elif how == "404":
        server.files = {}
    elif how == "stall":
        server.slow = 60
    else:
        server.cuts, server.ranges = 1000, False
    start = time.monotonic()
    monkeypatch.setattr(prepare, "print", lambda *a, **k: lines.append(" ".join(map(str, a))),
                        raising=False)
    prep(TINYSTORIES=url + "TinyStoriesV2-GPT4-", TIMEOUT=0.5)
    assert time.monotonic() - start < 10
    assert sum("stories.txt" in line for line in lines) == 1
    assert sorted(both_ways()) == sorted(stories(40, 5))
    assert prepare.read_meta("data/d")["source"] == "data/stories.txt"
    assert not os.path.exists(kept(server.url))


# ---- numbers

OFF = dict(rmsnorm=False, rope=False, qk_norm=False, swiglu=False)
SHAPE = dict(block_size=8, n_layer=2, n_head=2, n_embd=16)
TINY = dict(SHAPE, dataset="d", batch_size=4, max_iters=6, warmup_iters=2, eval_interval=0,
            eval_iters=2, log_interval=1, checkpoint_minutes=0.0, keep_checkpoints=0, device="cpu",
            dtype="float32", compile=False, backend="gloo", dropout=0.0, learning_rate=3e-3,
            min_lr=0.0, lr_schedule="cosine", muon_momentum=0.95, muon_steps=5)
V = 32


def write_data(folder, ids=None, val=None, vocab_size=V, **meta):
    """folder/data/d with these ids, random ones by default; val is ids unless given."""
    path = folder / "data" / "d"
    path.mkdir(parents=True, exist_ok=True)
    ids = np.random.default_rng(0).integers(vocab_size, size=400) if ids is None else ids
    meta = {"source": "a test", "tokenizer": {"name": "byte"}, "vocab_size": vocab_size, "eot": 0, **meta}
    for split, ids in (("train", ids), ("val", ids if val is None else val)):
        np.asarray(ids, "<u2").tofile(path / f"{split}.bin")
        meta[split] = {"tokens": len(ids), "bytes": 3 * len(ids), "documents": 1}
    (path / "meta.json").write_text(json.dumps(meta))
    return folder


@contextlib.contextmanager
def changed(module, folder, values):
    """Another folder and other settings for a while; gives the text that is printed meanwhile."""
    before = {k: v for k, v in vars(module).items() if type(v) in (bool, int, float, str)}
    handlers = {s: signal.getsignal(s) for s in (signal.SIGINT, signal.SIGTERM)}
    text = io.StringIO()
    vars(module).update(values)
    try:
        with contextlib.chdir(folder), contextlib.redirect_stdout(text), \
                contextlib.redirect_stderr(text):
            yield text
    finally:
        vars(module).update(before)
        train.SIGNALS.clear()
        for number, handler in handlers.items():
            signal.signal(number, handler)


def run(folder, rate=lambda *_: 1e9, **given):
    """Train in this process in a folder: exit status, what was printed, ckpt.pt or None."""
    with changed(train, folder, {**TINY, **given, "matmul_rate": rate, "plot_log": lambda: None}) \
            as text:
        try:
            status = train.main(given)
        except SystemExit as e:
            status = e.code
    path = folder / given.get("out_dir", "out") / "ckpt.pt"
    state = torch.load(path, weights_only=True) if path.exists() else None
    return status, text.getvalue(), state


def use(monkeypatch, **values):
    for name, value in {**TINY, **values}.items():
        monkeypatch.setattr(train, name, value)


def rows(folder):
    """log.csv as a list of {column: number}, empty fields left out."""
    header, *lines = (folder / "out" / "log.csv").read_text().splitlines()
    assert header == ("step,tokens,train_loss,val_loss,lr,grad_norm,ms,tokens_per_s,samples_per_s,"
                      "mfu,memory_mb")
    return [{k: float(v) for k, v in zip(header.split(","), line.split(",")) if v}
            for line in lines]


def column(folder, name):
    return [row[name] for row in rows(folder) if name in row]


def tiny(**changes):
    """A small GPT, in which no weight is 0 or 1."""
    torch.manual_seed(0)
    net = GPT(GPTConfig(**{**SHAPE, "vocab_size": V, **changes})).eval()
    with torch.no_grad():
        for p in net.parameters():
            p.add_(0.2 * torch.randn_like(p))
    return net


def same(a, b):
    return a.keys() == b.keys() and all(torch.equal(a[k], b[k]) for k in a)


def close(a, b, atol=1e-5):
    assert a.keys() == b.keys()
    for k in a:
        x, y = a[k], b[k]
        if str(k).endswith("c_attn.bias"):  # of GPT-2's key it has only rounding for a gradient
            x, y = (torch.cat(z.chunk(3)[::2]) for z in (x, y))
        torch.testing.assert_close(x, y, rtol=0, atol=atol, msg=lambda m: f"{k}: {m}")


def ids_like(*shape, seed=1):
    return torch.randint(V, shape, generator=torch.Generator().manual_seed(seed))


# ---- learning

@pytest.mark.parametrize("parts", [dict(OFF, optimizer="adamw", learning_rate=1e-2, bias=True,
                                        max_iters=300), dict(optimizer="muon", max_iters=150)])
def test_learns_a_stream_to_its_entropy(tmp_path, parts):
    rng = np.random.default_rng(0)
    P = rng.dirichlet([0.3] * 6, size=6)  # of the next id, given the one before the last
    pi = np.linalg.matrix_power(P, 1000)[0]
    rate = -(pi[:, None] * P * np.log(P)).sum()
    cdf, ids = P.cumsum(1), [0, 0]
    for u in rng.random(30000):
        ids.append(int(min(5, (u > cdf[ids[-2]]).sum())))
    write_data(tmp_path, ids[:25000], ids[25000:], vocab_size=6)
    status, out, _ = run(tmp_path, **parts, warmup_iters=10, batch_size=32,
                         block_size=16, n_embd=32, n_layer=1, eval_interval=150, eval_iters=20)
    first = -(pi * np.log(pi)).sum()  # what a window's first target costs, without the one before
    expected = (first + 15 * rate) / 16
    assert status == 0 and abs(column(tmp_path, "val_loss")[-1] - expected) < 0.1


@pytest.fixture(scope="module")
def memorised(tmp_path_factory):
    """A folder with a model that knows one document, and the document."""
    folder, text = tmp_path_factory.mktemp("memorised"), "a bad cab, a dab, a big fab gap é."
    ids = [*text.encode(), 256]
    write_data(folder, ids * 20, vocab_size=257, eot=256)
    status, _, state = run(folder, max_iters=120, block_size=16, batch_size=16, n_embd=32,
                           learning_rate=0.02, eval_interval=120)
    assert status == 0 and column(folder, "val_loss")[-1] < 0.2
    return folder, text, ids, state


def test_a_memorised_sequence_is_sampled_back(memorised):
    _, _, ids, state = memorised
    net = gpt.load_model(state["model_args"], state["model"]).eval()
    start = torch.tensor([ids[:10]])
    out = [token.item() for token in net.generate(start, 60, temperature=0)]
    assert out == (ids * 3)[10:70]


def test_overfit_one_batch_gets_to_zero(tmp_path):
    write_data(tmp_path)
    status, _, _ = run(tmp_path, overfit_one_batch=True, max_iters=100, n_embd=32,
                       learning_rate=0.02)
    losses = column(tmp_path, "train_loss")
    assert status == 0 and losses[-1] < 0.05 and losses[0] > 3


def test_initial_loss_is_ln_vocabulary_or_a_warning(tmp_path, monkeypatch):
    write_data(tmp_path)
    _, out, _ = run(tmp_path, max_iters=1)
    assert abs(column(tmp_path, "train_loss")[0] - math.log(V)) < 0.1 and "warning" not in out

    def too_large(config):
        net = GPT(config)
        with torch.no_grad():
            net.lm_head.weight.mul_(100)
        return net

    monkeypatch.setattr(train, "GPT", too_large)
    _, out, _ = run(tmp_path, max_iters=1, out_dir="other")
    assert re.search(r"warning: the first loss is .*ln\(vocabulary\) = 3\.47", out)


@pytest.mark.parametrize("part", OFF)
def test_each_part_alone_trains_and_is_causal(part):
    net = tiny(**{**OFF, part: True})
    assert "wpe" not in net.transformer if part == "rope" else "wpe" in net.transformer
    ids = ids_like(3, 8)
    logits = net(ids)
    for t in range(8):
        other = ids.clone()
        other[:, t] = (other[:, t] + 1) % V
        moved = (net(other) - logits).abs().amax(-1).amax(0)
        assert moved[:t].eq(0).all() and moved[t:].gt(1e-6).all()
    opt = torch.optim.AdamW(net.parameters(), lr=0.01)
    first = net(ids[:, :-1], ids[:, 1:])
    for _ in range(10):
        loss = net(ids[:, :-1], ids[:, 1:])
        opt.zero_grad()
        loss.backward()
        assert all(p.grad.abs().max() > 0 for p in net.parameters())
        opt.step()
    assert loss < first - 0.5


def test_order_matters_with_rope_and_with_learned_positions():
    for rope in (True, False):
        net, ids = tiny(rope=rope), torch.tensor([[3, 4, 5], [4, 3, 5]])
        a, b = net(ids)[:, -1]
        assert (a - b).abs().max() > 1e-3


def test_rope_turns_pairs_as_complex_numbers():
    x, T, D = torch.randn(2, 3, 5, 8), 5, 8
    turned = gpt.rotate(x, *gpt.rotary(T, D))
    angle = torch.outer(torch.arange(T), 10000.0 ** (-2 * torch.arange(D // 2) / D))
    z = torch.complex(x[..., :4], x[..., 4:]) * torch.polar(torch.ones_like(angle), angle)
    torch.testing.assert_close(turned, torch.cat((z.real, z.imag), -1))


# ---- batches

def test_batches_are_a_function_of_seed_and_step(monkeypatch):
    ids, use_ = np.arange(1000, dtype=np.uint16), functools.partial(use, monkeypatch)
    use_(gradient_accumulation_steps=2)
    x, y = train.get_batch(ids, 5, 1, 2)
    assert x.shape == y.shape == (4, 8) and x.dtype == torch.int64
    assert torch.equal(y, x + 1) and torch.equal(x, x[:, :1] + torch.arange(8))
    np.random.seed(9)
    torch.manual_seed(9)
    use_(gradient_accumulation_steps=2, dropout=0.5, eval_iters=7, eval_interval=3, max_iters=99)
    train.get_batch(ids, 2, 0, 2)
    assert torch.equal(train.get_batch(ids, 5, 1, 2)[0], x)
    assert torch.equal(train.get_batch(ids, 4, 2, 2)[0], train.get_batch(ids, 5, 0, 2)[0])
    different = [train.get_batch(ids, 5, 0, 2)[0], train.get_batch(ids, 6, 1, 2)[0]]
    use_(gradient_accumulation_steps=2, seed=1)
    different.append(train.get_batch(ids, 5, 1, 2)[0])
    assert not any(torch.equal(x, other) for other in different)
    use_(gradient_accumulation_steps=2, overfit_one_batch=True)
    assert torch.equal(train.get_batch(ids, 5, 1, 2)[0], train.get_batch(ids, 0, 1, 2)[0])


def test_every_window_of_the_split_is_reachable(monkeypatch):
    use(monkeypatch, batch_size=8)
    ids = np.arange(13, dtype=np.uint16)  # windows of 8 + 1 start at 0 to 4
    starts = {x.item() for step in range(20) for x in train.get_batch(ids, step, 0, 1)[0][:, 0]}
    assert starts == {0, 1, 2, 3, 4}
    assert all(train.get_batch(ids[:9], step, 0, 1)[0][:, 0].eq(0).all() for step in range(9))


def test_processes_and_micro_steps_share_one_draw(monkeypatch):
    ids = np.arange(1000, dtype=np.uint16)
    use(monkeypatch, batch_size=6, gradient_accumulation_steps=4)
    whole = train.get_batch(ids, 3, 0, 1)[0]
    assert len(whole) == 24
    for world, micro_steps in ((1, 4), (1, 3), (2, 2), (3, 2), (3, 4)):
        monkeypatch.setattr(train, "WORLD", world)
        parts = []
        for rank in range(world):
            monkeypatch.setattr(train, "RANK", rank)
            parts += [train.get_batch(ids, 3, m, micro_steps)[0] for m in range(micro_steps)]
        assert {len(part) for part in parts} == {24 // world // micro_steps}
        assert torch.equal(torch.cat(parts).sort(0)[0], whole.sort(0)[0])


def test_block_size_plus_one_tokens_are_one_window(tmp_path):
    write_data(tmp_path, np.arange(9), vocab_size=9)
    status, _, state = run(tmp_path, eval_interval=1, max_iters=2)
    net = gpt.load_model(state["model_args"], state["model"]).eval()
    loss = net(torch.arange(8)[None], torch.arange(1, 9)[None]).item()
    assert status == 0 and column(tmp_path, "val_loss")[-1] == pytest.approx(loss, abs=1e-5)


def test_accumulation_equals_the_large_batch(tmp_path):
    write_data(tmp_path)
    found = []
    for batch, accumulation in ((8, 1), (4, 2), (1, 8)):
        given = dict(batch_size=batch, gradient_accumulation_steps=accumulation, grad_clip=0.0)
        out = f"{batch}x{accumulation}"
        _, _, one = run(tmp_path, **given, max_iters=1, optimizer="adamw", out_dir=out)
        grads = {i: s["exp_avg"] * 10 for i, s in one["optimizer"]["state"].items()}
        _, _, three = run(tmp_path, **given, max_iters=3)
        found.append((grads, three["model"], column(tmp_path, "train_loss"),
                      column(tmp_path, "grad_norm")))
    for grads, weights, losses, norms in found[1:]:
        close(grads, found[0][0], 1e-6)
        close(weights, found[0][1], 1e-4)
        assert losses == pytest.approx(found[0][2], abs=1e-4)
        assert norms == pytest.approx(found[0][3], rel=1e-3)


# ---- a step, against plain code

class Plain:
    """AdamW and Muon as their papers write them, one weight at a time, in float64."""

    def __init__(self, net, decay, betas, muon):
        self.net, self.decay, self.betas, self.muon = net, decay, betas, muon
        zeros = {k: torch.zeros_like(p, dtype=torch.float64) for k, p in net.named_parameters()}
        self.m, self.v, self.steps = zeros, copy.deepcopy(zeros), 0

    @torch.no_grad()
    def step(self, lr_of):
        self.steps += 1
        for name, p in self.net.named_parameters():
            g, lr = p.grad.double(), lr_of(name)
            if p.dim() >= 2:
                p -= lr * self.decay * p
            if self.muon and name.startswith("transformer.h.") and p.dim() == 2:
                m = self.m[name] = 0.95 * self.m[name] + 0.05 * g
                stacked = 3 if "c_attn" in name else 1
                for w, u in zip(p.chunk(stacked), (0.05 * g + 0.95 * m).chunk(stacked)):
                    w -= lr * max(1, w.shape[0] / w.shape[1]) ** 0.5 * polar_express(u)
            else:
                b1, b2 = self.betas
                m = self.m[name] = b1 * self.m[name] + (1 - b1) * g
                v = self.v[name] = b2 * self.v[name] + (1 - b2) * g * g
                m, v = m / (1 - b1 ** self.steps), v / (1 - b2 ** self.steps)
                p -= lr * m / (v.sqrt() + 1e-8)


def polar_express(G):
    """What five rounds of the Polar Express make of the singular values of a matrix."""
    U, S, W = torch.linalg.svd(G.double(), full_matrices=False)
    S = S / (1.01 * S.square().sum().sqrt())
    for a, b, c in ((8.28721201814563, -23.595886519098837, 17.300387312530933),
                    (4.107059111542203, -2.9478499167379106, 0.5448431082926601),
                    (3.9486908534822946, -2.908902115962949, 0.5518191394370137),
                    (3.3184196573706015, -2.488488024314874, 0.51004894012372),
                    (2.300652019954817, -1.6689039845747493, 0.4188073119525673)):
        S = a * S + b * S ** 3 + c * S ** 5
    return U @ torch.diag(S) @ W


@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_a_run_equals_a_plain_loop(tmp_path, monkeypatch, optimizer):
    """Rates, clipping, accumulation, decay and layer-wise rates, all at once."""
    net = tiny(bias=True, rmsnorm=True, swiglu=True, rope=True)
    torch.save({"model_args": vars(net.config), "model": net.state_dict()}, tmp_path / "start.pt")
    ids = np.fromfile(write_data(tmp_path) / "data/d/train.bin", "<u2")
    given = dict(init_from="start.pt", optimizer=optimizer, gradient_accumulation_steps=3,
                 weight_decay=0.5, grad_clip=0.2, learning_rate=0.01, muon_lr=0.03, min_lr=0.001,
                 beta1=0.8, layer_lr_decay=0.7, lr_decay_iters=5)
    status, _, state = run(tmp_path, **given)
    use(monkeypatch, **given)
    opt, losses, norms, rates = Plain(net, 0.5, (0.8, 0.95), optimizer == "muon"), [], [], []
    for step in range(6):
        share = (step + 1) / 3 if step < 2 else (1 + math.cos(math.pi * min(1, (step - 2) / 3))) / 2
        lr = 0.01 * share if step < 2 else 0.001 + 0.009 * share
        net.zero_grad()
        x, y = (torch.cat(z) for z in zip(*(train.get_batch(ids, step, m, 3) for m in range(3))))
        loss = F.cross_entropy(net(x).flatten(0, 1), y.flatten())
        loss.backward()
        norm = torch.cat([p.grad.flatten() for p in net.parameters()]).norm()
        for p in net.parameters():
            p.grad *= min(1, 0.2 / norm)

        def lr_of(name):
            layer = int(name.split(".")[2]) if ".h." in name else 2 if "ln_f" in name else -1
            muon = optimizer == "muon" and ".h." in name and net.get_parameter(name).dim() == 2
            return lr * 0.7 ** (2 - layer) * (3 if muon else 1)

        opt.step(lr_of)
        for kept, value in ((losses, loss), (norms, norm), (rates, lr)):
            kept.append(torch.as_tensor(value).item())
    assert status == 0 and min(norms) > 0.2
    assert column(tmp_path, "lr") == pytest.approx(rates)
    assert column(tmp_path, "train_loss") == pytest.approx(losses, abs=1e-4)
    assert column(tmp_path, "grad_norm") == pytest.approx(norms, rel=1e-3)
    close(state["model"], net.state_dict(), 1e-4)


def test_adamw_equals_torch(monkeypatch):
    use(monkeypatch, optimizer="adamw", weight_decay=0.3)
    net = tiny(bias=True)
    other = copy.deepcopy(net)
    opt = train.make_optimizer(net)
    groups = [{"params": [p for p in other.parameters() if p.dim() >= 2], "weight_decay": 0.3},
              {"params": [p for p in other.parameters() if p.dim() < 2], "weight_decay": 0.0}]
    reference = torch.optim.AdamW(groups, lr=train.learning_rate, betas=(0.9, 0.95), eps=1e-8)
    for step in range(5):
        for n, o in ((net, opt), (other, reference)):
            ids = ids_like(4, 9, seed=step)
            n(ids[:, :-1], ids[:, 1:]).backward()
            o.step()
            o.zero_grad()
    close(net.state_dict(), other.state_dict(), 1e-6)


@pytest.mark.parametrize("muon", [False, True])
@pytest.mark.parametrize("tied", [False, True])
def test_groups_hold_each_parameter_once_and_only_matrices_decay(muon, tied):
    net = tiny(bias=True, tie_embeddings=tied)
    groups = net.param_groups(0.1, 0.5, muon)
    of = {p: group for group in groups for _, p in group["params"]}
    assert sum(len(group["params"]) for group in groups) == len(of) == len(list(net.parameters()))
    for name, p in net.named_parameters():
        layer = int(name.split(".")[2]) if ".h." in name else None
        scale = (1 if "ln_f" in name or "lm_head" in name else
                 0.125 if layer is None else 0.5 ** (2 - layer))
        assert of[p]["weight_decay"] == (0.1 if p.dim() == 2 else 0), name
        assert of[p]["lr_scale"] == scale, name
        assert ("parts" in of[p]) == (muon and layer is not None and p.dim() == 2), name


def muon_steps(weights, grads, state=None, **group):
    """Copies of the weights after Muon steps with these gradients, and the optimizer."""
    params = [torch.nn.Parameter(w.clone()) for w in weights]
    opt = train.Muon([{"params": params, "parts": 1, "momentum": 0.95,
                       "weight_decay": 0.1, **group}], lr=0.05)
    if state:
        opt.load_state_dict(state)
    for step in grads:
        for p, g in zip(params, step):
            p.grad = g.clone()
        opt.step()
    return [p.detach() for p in params], opt


def test_orthogonalize_brings_singular_values_to_one(monkeypatch):
    monkeypatch.setattr(train, "muon_steps", 5)
    torch.manual_seed(0)
    for shape in ((24, 24), (16, 48), (48, 16)):
        G = torch.randn(4, *shape) * torch.tensor([1e-3, 1.0, 30.0, 1e4])[:, None, None]
        O = train.orthogonalize(G)
        before, S = torch.linalg.svdvals(G), torch.linalg.svdvals(O)
        assert O.shape == G.shape and S.max() < 1.2
        assert S[before > 0.02 * before[:, :1]].min() > 0.8
        for one, g in zip(O, G):
            torch.testing.assert_close(one, train.orthogonalize(g[None])[0], atol=1e-4, rtol=1e-4)
            torch.testing.assert_close(one, polar_express(g).float(), atol=1e-3, rtol=1e-3)
        torch.testing.assert_close(train.orthogonalize(G.mT), O.mT, atol=1e-3, rtol=1e-3)
    assert train.orthogonalize(torch.zeros(1, 4, 4)).eq(0).all()


def test_muon_takes_stacked_matrices_apart():
    torch.manual_seed(0)
    for parts, rows_ in ((3, 48), (2, 96)):
        w, grads = torch.randn(rows_, 16), torch.randn(3, rows_, 16)
        (together,), _ = muon_steps([w], [[g] for g in grads], parts=parts)
        apart, _ = muon_steps(w.chunk(parts), [g.chunk(parts) for g in grads])
        torch.testing.assert_close(together, torch.cat(apart), atol=1e-5, rtol=1e-5)
    assert not torch.allclose(together, muon_steps([w], [[g] for g in grads])[0][0], atol=1e-3)


def test_muon_equals_its_formula(monkeypatch):
    monkeypatch.setattr(train, "muon_steps", 5)
    torch.manual_seed(0)
    w, grads = torch.randn(48, 16), torch.randn(3, 48, 16)
    (got,), _ = muon_steps([w], [[g] for g in grads])
    w, momentum = w.double(), 0
    for g in grads.double():
        momentum = 0.95 * momentum + 0.05 * g
        w = w - 0.05 * 0.1 * w - 0.05 * 3 ** 0.5 * polar_express(0.05 * g + 0.95 * momentum)
    torch.testing.assert_close(got.double(), w, atol=1e-4, rtol=0)


def test_muon_decay_is_decoupled():
    torch.manual_seed(0)
    w, grad = torch.randn(16, 16), torch.randn(1, 1, 16, 16)
    (plain,), _ = muon_steps([w], grad, weight_decay=0.0)
    (decayed,), _ = muon_steps([w], grad, weight_decay=0.4)
    torch.testing.assert_close(plain - decayed, 0.05 * 0.4 * w, atol=1e-6, rtol=0)


def test_muon_state_survives_a_round_trip():
    torch.manual_seed(0)
    weights, grads = [torch.randn(16, 16), torch.randn(8, 16)], []
    for _ in range(4):
        grads.append([torch.randn_like(w) for w in weights])
    whole, _ = muon_steps(weights, grads)
    half, opt = muon_steps(weights, grads[:2])
    file = io.BytesIO()
    torch.save(opt.state_dict(), file)
    file.seek(0)
    rest, _ = muon_steps(half, grads[2:], torch.load(file, weights_only=True))
    assert all(torch.equal(a, b) for a, b in zip(whole, rest))


# ---- the rate

@pytest.mark.parametrize("schedule", train.SCHEDULES)
def test_get_lr(monkeypatch, schedule):
    def rates(**values):
        use(monkeypatch, lr_schedule=schedule, **{"learning_rate": 0.3, "min_lr": 0.03,
                                                  "max_iters": 90, "warmup_iters": 10, **values})
        return [train.get_lr(it) for it in range(200)]

    end = 0.3 if schedule == "constant" else 0.03
    for decay_iters in (0, 90):
        r = rates(lr_decay_iters=decay_iters, max_iters=90 if decay_iters == 0 else 150)
        assert 0 < r[0] < 0.05 and r[10] == 0.3 and r[90] == r[91] == r[199] == end
        assert np.allclose(np.diff(r[:11]), r[0])
        shape = {"cosine": {50: 0.165, 30: 0.03 + 0.27 * (2 + 2 ** 0.5) / 4},
                 "linear": {50: 0.165, 30: 0.2325}, "constant": {50: 0.3, 89: 0.3},
                 "cosine_restarts": {30: 0.3, 50: 0.3, 70: 0.3, 20: 0.165, 80: 0.165},
                 "wsd": {50: 0.3, 74: 0.3, 82: 0.165}}[schedule]
        assert {it: r[it] for it in shape} == pytest.approx(shape)
        falls = np.diff(r[10:91]) <= 1e-12
        assert falls.all() if schedule != "cosine_restarts" else (~falls).sum() == 3
    assert rates(warmup_iters=0)[0] == 0.3
    for warmup in (90, 100, 300):  # as long as the run and longer
        r = rates(warmup_iters=warmup)
        assert np.isfinite(r).all() and 0 < r[0] and max(r) <= 0.3
        assert (np.diff(r[:min(warmup, 199)]) > 0).all()
    assert rates(learning_rate=0.0, min_lr=0.0)[:100] == [0] * 100
    assert rates(decay_lr=False) == [0.3] * 200


# ---- evaluation

def test_evaluation_is_the_mean_loss_of_the_split_and_changes_nothing(monkeypatch):
    use(monkeypatch, eval_iters=50, dropout=0.5)
    ids, net = ids_like(8 * 11 + 1).numpy().astype(np.uint16), tiny(dropout=0.5)
    before = copy.deepcopy(net.state_dict())
    x, y = torch.tensor(ids[:-1].astype(int)).view(11, 8), torch.tensor(ids[1:].astype(int))
    expected = F.cross_entropy(net(x).flatten(0, 1), y).item()
    net.train()
    states = torch.get_rng_state(), np.random.get_state()[1]
    one, two = (train.evaluate(net, {"train": ids, "val": ids[:81]}, contextlib.nullcontext())
                for _ in range(2))
    assert one == two and one["train"] == pytest.approx(expected, abs=1e-5)
    assert all(m.training for m in net.modules()) and same(net.state_dict(), before)
    assert torch.equal(torch.get_rng_state(), states[0])
    assert (np.random.get_state()[1] == states[1]).all()
    assert all(p.grad is None for p in net.parameters())
    use(monkeypatch, eval_iters=1)  # the 4 windows then reach both ends
    seen = []
    monkeypatch.setattr(train, "windows", lambda ids, starts: seen.extend(starts) or (x, x))
    train.evaluate(net, {"val": ids}, contextlib.nullcontext())
    assert seen[0] == 0 and seen[-1] == len(ids) - 9 and len(set(np.diff(seen))) <= 2


def test_evaluation_does_not_touch_training(tmp_path):
    write_data(tmp_path)
    found = {}
    for interval in (0, 1, 3):
        given = dict(eval_interval=interval, dropout=0.3, log_interval=3)
        _, _, state = run(tmp_path, **given)
        losses = {r["step"]: r["val_loss"] for r in rows(tmp_path) if "val_loss" in r}
        found[interval] = state["model"], state["rng"][0]["torch"], losses
    assert same(found[0][0], found[1][0]) and same(found[0][0], found[3][0])
    assert torch.equal(found[0][1], found[1][1])
    assert [list(f[2]) for f in found.values()] == [[], [1, 2, 3, 4, 5, 6], [3, 6]]
    assert all(found[1][2][step] == loss for step, loss in found[3][2].items())


def test_perplexity_and_bits_per_byte(tmp_path):
    write_data(tmp_path, val=[1, 2] * 50)  # 3 bytes a token
    _, out, _ = run(tmp_path, eval_interval=6)
    found = re.search(r"step 6: train loss ([\d.]+), val loss ([\d.]+), perplexity ([\d.]+), "
                      r"bits per byte ([\d.]+)", out)
    loss, val, perplexity, bits = map(float, found.groups())
    assert abs(loss - val) > 0.01
    assert perplexity == pytest.approx(math.exp(val), rel=1e-3)
    assert bits == pytest.approx(val / math.log(2) / 3, abs=1e-3)
    assert column(tmp_path, "val_loss") == pytest.approx([val], abs=1e-4)


def test_best_is_the_lowest_validation_loss(tmp_path, monkeypatch):
    write_data(tmp_path)
    script = iter([3.0, 2.0, 2.5, 1.9, 2.2, 2.1, 1.8, 1.85])
    monkeypatch.setattr(train, "evaluate", lambda *_: dict.fromkeys(("train", "val"), next(script)))
    given = dict(eval_interval=1, keep_checkpoints=9, lr_schedule="constant")
    _, _, state = run(tmp_path, max_iters=5, **given)

    def best():
        return torch.load(tmp_path / "out/best.pt", weights_only=True)

    assert state["best_val_loss"] == 1.9 and best()["iter_num"] == 4
    assert not {"optimizer", "rng", "scaler"} & best().keys()
    at_4 = torch.load(tmp_path / "out/ckpt_4.pt", weights_only=True)
    assert same(best()["model"], at_4["model"]) and not same(at_4["model"], state["model"])
    run(tmp_path, max_iters=6, init_from="resume")  # a resume remembers the best
    assert best()["iter_num"] == 4
    _, _, state = run(tmp_path, max_iters=8, init_from="resume")
    assert best()["iter_num"] == 7 and state["best_val_loss"] == 1.8


@pytest.mark.parametrize("patience, min_delta, losses, stops", [
    (2, 0.0, [3, 2, 2.5, 1.9, 2.2, 1.95, 1.0, 1.0], 6),
    (2, 0.1, [3, 2.95, 2.8, 2.75, 2.71, 1, 1, 1], 5),
    (1, 0.0, [3, 3, 1, 1, 1, 1, 1, 1], 2),
    (0, 0.0, [3, 4, 5, 6, 7, 8, 9, 9], 8)])
def test_early_stopping(tmp_path, monkeypatch, patience, min_delta, losses, stops):
    write_data(tmp_path)
    script = iter(losses)
    monkeypatch.setattr(train, "evaluate", lambda *_: dict.fromkeys(("train", "val"), next(script)))
    status, _, state = run(tmp_path, eval_interval=1, max_iters=8, patience=patience,
                           min_delta=min_delta)
    assert status == 0 and state["iter_num"] == stops


def test_eval_only_changes_no_file(tmp_path):
    write_data(tmp_path)
    assert run(tmp_path, eval_only=True)[0] == 0 and not (tmp_path / "out").exists()
    run(tmp_path, eval_interval=3)

    def files():
        found = (tmp_path / "out").iterdir()
        return {p.name: (p.read_bytes(), p.stat().st_mtime_ns) for p in found}

    before = files()
    status, out, _ = run(tmp_path, eval_only=True, init_from="resume")
    assert status == 0 and files() == before
    loss = float(re.search(r"step 6: .*val loss ([\d.]+)", out)[1])
    assert loss == pytest.approx(column(tmp_path, "val_loss")[-1], abs=1e-4)


# ---- the length of a run and its log

@pytest.mark.parametrize("interval, evaluated", [(0, []), (3, [3, 6, 7])])
def test_exactly_max_iters_updates_and_the_last_is_saved(tmp_path, monkeypatch, interval,
                                                         evaluated):
    write_data(tmp_path)
    step, count = train.Muon.step, []
    monkeypatch.setattr(train.Muon, "step", lambda *a: count.append(1) or step(*a))
    status, _, state = run(tmp_path, max_iters=7, eval_interval=interval, optimizer="adamw",
                           always_save_checkpoint=False)
    assert status == 0 and len(count) == state["iter_num"] == 7
    assert {int(s["step"]) for s in state["optimizer"]["state"].values()} == {7}
    assert column(tmp_path, "step") == [1, 2, 3, 4, 5, 6, 7]
    assert [r["step"] for r in rows(tmp_path) if "val_loss" in r] == evaluated
    assert state["tokens_seen"] == column(tmp_path, "tokens")[-1] == 7 * 4 * 8


@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_max_iters_may_be_raised(tmp_path, optimizer):
    write_data(tmp_path)
    given = dict(lr_decay_iters=9, min_lr=1e-3, dropout=0.2, optimizer=optimizer)
    _, _, whole = run(tmp_path, max_iters=9, **given)
    run(tmp_path, max_iters=4, **given, learning_rate=3e-3)
    with open(tmp_path / "out/log.csv", "a") as f:
        f.write("5,1,1,1,1,1,1,1,1,1,1\n6,12")  # a later row, half a row
    status, out, state = run(tmp_path, init_from="resume", max_iters=9)
    assert status == 0 and "resuming after step 4" in out
    assert "max_iters from 4 to 9" in out and "lr_decay_iters" not in out
    assert column(tmp_path, "step") == [1, 2, 3, 4, 5, 6, 7, 8, 9]
    assert same(whole["model"], state["model"])
    a, b = whole["optimizer"]["state"], state["optimizer"]["state"]
    assert a.keys() == b.keys() and all(same(a[i], b[i]) for i in a)
    status, _, again = run(tmp_path, init_from="resume")
    assert status == 0 and again["iter_num"] == 9 and same(again["model"], state["model"])


def test_optimizer_settings_given_to_a_resume_are_used(tmp_path):
    write_data(tmp_path)
    run(tmp_path, max_iters=2, weight_decay=0.1)
    status, out, state = run(tmp_path, init_from="resume", max_iters=3, weight_decay=0.7, beta1=0.5,
                             learning_rate=0.5)
    assert status == 0 and "weight_decay from 0.1 to 0.7" in out
    groups = state["optimizer"]["param_groups"]
    assert {g["weight_decay"] for g in groups} == {0.0, 0.7}
    assert {g["betas"][0] for g in groups} == {0.5}
    assert state["config"]["weight_decay"] == 0.7 and rows(tmp_path)[-1]["lr"] == 0.5


def test_log_csv(tmp_path):
    write_data(tmp_path)
    _, out, state = run(tmp_path, log_interval=2, eval_interval=3, gradient_accumulation_steps=2,
                        learning_rate=0.01, lr_schedule="linear", tie_embeddings=False)
    r = rows(tmp_path)
    n = sum(v.numel() for k, v in state["model"].items() if "wte" not in k)  # no products there
    assert [row["step"] for row in r] == [2, 3, 4, 6]
    assert ["val_loss" in row for row in r] == [False, True, False, True]
    assert [row["tokens"] for row in r] == [128, 192, 256, 384]
    assert [row["lr"] for row in r] == pytest.approx([0.02 / 3, 0.01, 0.0075, 0.0025])
    for row in r:
        assert row["tokens_per_s"] == pytest.approx(64000 / row["ms"], rel=1e-6)
        assert row["samples_per_s"] == pytest.approx(row["tokens_per_s"] / 8, rel=1e-6)
        line = re.search(rf"iter {row['step']:.0f}: loss ([\d.]+), time ([\d.]+)ms, mfu", out)
        assert float(line[1]) == pytest.approx(row["train_loss"], abs=1e-4)
        assert row["mfu"] == pytest.approx(
            row["tokens_per_s"] * (6 * n + 12 * 2 * 16 * 8) / 1e9, rel=1e-6)


class SlowTime:
    """A clock that goes on by 10 ms at each look."""
    def __init__(self):
        self.now = 1e9

    def perf_counter(self):
        self.now += 0.01
        return self.now

    time = monotonic = perf_counter


def test_max_minutes_becomes_a_number_of_steps(tmp_path, monkeypatch):
    write_data(tmp_path)
    clock, evaluate = SlowTime(), train.evaluate

    def slow_evaluate(*args):
        clock.now += 0.5
        return evaluate(*args)

    monkeypatch.setattr(train, "time", clock)
    monkeypatch.setattr(train, "evaluate", slow_evaluate)
    status, out, state = run(tmp_path, max_minutes=0.05, eval_interval=7)
    config = state["config"]
    assert status == 0 and 2.9 < state["train_seconds"] < 3.1
    assert config["max_minutes"] == 0 and config["max_iters"] == state["iter_num"] > 20
    assert f"{state['iter_num']} steps" in out
    r = rows(tmp_path)
    assert r[0]["lr"] < 0.002 and r[2]["lr"] == 3e-3 and r[-1]["lr"] < 1e-4  # the schedule fits
    status, _, again = run(tmp_path, init_from="resume")
    assert status == 0 and again["iter_num"] == state["iter_num"]


def test_benchmark_ends_and_saves_nothing(tmp_path):
    write_data(tmp_path)
    status, out, _ = run(tmp_path, benchmark=True, max_iters=600)
    assert status == 0 and not (tmp_path / "out").exists()
    shares = [float(x) for x in re.findall(r"(?:data|forward|backward|optimizer) ([\d.]+)%", out)]
    assert len(shares) == 4 and sum(shares) == pytest.approx(100, abs=1)
    assert re.findall(r"iter (\d+):", out)[-1] == "50"


# ---- numbers that are not finite, dtypes

def break_step(monkeypatch, number, how):
    """Let how(loss, model) replace the loss of the training micro-step with this number."""
    forward, calls = GPT.forward, []

    def broken(self, idx, targets=None):
        loss = forward(self, idx, targets)
        if targets is not None and self.training:
            calls.append(self)
            loss = how(loss, self) if len(calls) == number else loss
        return loss

    monkeypatch.setattr(GPT, "forward", broken)
    return calls


def infinite_gradient(loss, net):
    w = net.lm_head.weight
    return loss + (w - w.detach()).abs().sqrt().sum()  # 0, and its gradient is not finite


@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
@pytest.mark.parametrize("how", [lambda loss, net: loss * math.nan, infinite_gradient])
def test_numbers_that_are_not_finite_never_reach_the_weights(tmp_path, monkeypatch, optimizer, how):
    write_data(tmp_path)
    calls = break_step(monkeypatch, 7, how)  # the first half of step 4
    status, out, state = run(tmp_path, checkpoint_interval=1, gradient_accumulation_steps=2,
                             batch_size=2, grad_clip=0.0, optimizer=optimizer)
    assert status == 1 and state["iter_num"] == 3 and len(calls) == 8
    assert same(state["model"], calls[0].state_dict())
    line = out.splitlines()[-1]
    assert "iter 4" in line and "lr" in line and "norm" in line and "float32" in line
    assert column(tmp_path, "step") == [1, 2, 3]


def test_a_rate_that_is_far_too_large_ends_with_the_last_good_checkpoint(tmp_path):
    write_data(tmp_path)
    status, _, state = run(tmp_path, learning_rate=1e15, optimizer="adamw", decay_lr=False,
                           checkpoint_interval=1, max_iters=50)
    assert status == 1 and all(v.isfinite().all() for v in state["model"].values())


def test_float16_skips_overflows_and_halves_the_scale(tmp_path, monkeypatch):
    write_data(tmp_path)
    monkeypatch.setattr(torch.amp, "GradScaler",
                        functools.partial(torch.amp.GradScaler, init_scale=2.0 ** 30))
    status, out, state = run(tmp_path, dtype="float16", max_iters=30, batch_size=8)
    skipped = out.count("float16 overflow")
    assert status == 0 and 1 <= skipped < 20 and " in float16" in out
    assert state["scaler"]["scale"] == 2.0 ** (30 - skipped)
    assert state["iter_num"] == 30 and state["overflows"] == 0
    assert {int(s["step"]) for s in state["optimizer"]["state"].values()
            if "exp_avg" in s} == {30 - skipped}
    assert column(tmp_path, "train_loss")[-1] < column(tmp_path, "train_loss")[0] - 0.03
    assert all(v.dtype == torch.float32 for v in state["model"].values())


@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_float16_stops_after_20_overflows_in_a_row(tmp_path, monkeypatch, optimizer):
    write_data(tmp_path)
    monkeypatch.setattr(torch.amp, "GradScaler",
                        functools.partial(torch.amp.GradScaler, init_scale=2.0 ** 100))
    calls = break_step(monkeypatch, 0, None)
    status, out, state = run(tmp_path, dtype="float16", max_iters=30, optimizer=optimizer,
                             init_from="scratch")
    assert status == 1 and state is None and out.count("overflow") == 19 and len(calls) == 20
    torch.manual_seed(train.seed)
    assert same(calls[0].state_dict(), GPT(calls[0].config).state_dict())


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_half_precision_follows_float32(tmp_path, dtype):
    write_data(tmp_path)
    given = dict(max_iters=10, grad_clip=0.1)
    _, _, one = run(tmp_path, **given)
    full = column(tmp_path, "train_loss"), column(tmp_path, "grad_norm")
    status, out, two = run(tmp_path, dtype=dtype, **given)
    assert status == 0 and f" in {dtype}" in out and two["config"]["dtype"] == dtype
    assert two["model"].keys() == one["model"].keys() and not same(one["model"], two["model"])
    assert column(tmp_path, "train_loss") == pytest.approx(full[0], abs=0.02)
    assert column(tmp_path, "grad_norm") == pytest.approx(full[1], rel=0.1)


def test_a_slow_dtype_is_replaced_in_one_line(tmp_path):
    write_data(tmp_path)
    _, _, plain = run(tmp_path)
    status, out, state = run(tmp_path, dtype="bfloat16",
                             rate=lambda kind, *_: 1e9 if kind == "float32" else 1e8)
    assert status == 0 and state["config"]["dtype"] == "float32" and " in bfloat16" not in out
    assert [line for line in out.splitlines() if "bfloat16" in line] == [
        "bfloat16 is 10 times slower than float32 here: using float32"]
    assert same(state["model"], plain["model"])


# ---- the model

def test_gpt2_has_124439808_parameters():
    with torch.device("meta"):
        net = GPT(GPTConfig())
    assert sum(p.numel() for p in net.parameters()) == 124_439_808


@pytest.mark.parametrize("width", [128, 256, 384, 768, 1600])
def test_swiglu_keeps_the_parameter_count(width):
    counts = []
    with torch.device("meta"):
        for swiglu in (False, True):
            net = GPT(GPTConfig(n_embd=width, n_head=4, n_layer=1, swiglu=swiglu))
            counts.append(sum(p.numel() for p in net.transformer.h.parameters()))
    assert abs(counts[1] / counts[0] - 1) < 0.05


def test_weights_start_as_gpt2s():
    net = GPT(GPTConfig(n_layer=8, n_embd=128, n_head=4, vocab_size=500, block_size=64))
    for name, p in net.named_parameters():
        std = 0.02 / 4 if name.endswith("c_proj.weight") else 0.02
        if p.dim() == 2:
            assert p.std().item() == pytest.approx(std, rel=0.05) and abs(p.mean()) < std / 10, name
        else:
            assert p.eq(0 if name.endswith("bias") else 1).all(), name


@pytest.mark.parametrize("vocab_size", [300, 9000])  # below and above the chunking threshold
def test_chunked_loss_equals_the_plain_one(vocab_size):
    torch.manual_seed(0)
    found, targets = [], torch.randint(vocab_size, (600,))
    targets[::7], targets[512:] = -1, -1
    for loss in (gpt.head_loss, lambda x, w, t: F.cross_entropy(x @ w.T, t, ignore_index=-1)):
        torch.manual_seed(1)
        x, w = (torch.randn(n, 8, requires_grad=True) for n in (600, vocab_size))
        value = loss(x, w, targets)
        (3 * value).backward()
        found.append((value.detach(), x.grad, w.grad))
    for a, b in zip(*found):
        torch.testing.assert_close(a, b, atol=1e-6, rtol=1e-5)


def test_loss_is_the_mean_over_targets_that_count():
    net, ids = tiny(), ids_like(2, 9)
    x, y = ids[:, :-1], ids[:, 1:].clone()
    y[0, :5] = -1
    kept = y.flatten() >= 0
    expected = F.cross_entropy(net(x).flatten(0, 1)[kept], y.flatten()[kept])
    torch.testing.assert_close(net(x, y), expected)


def test_dropout_is_on_in_training_only(monkeypatch):
    net, ids = tiny(dropout=0.5, **OFF), ids_like(2, 8)
    assert torch.equal(net(ids), net(ids)) and torch.equal(net(ids), tiny(**OFF)(ids))
    net.train()
    assert not torch.equal(net(ids), net(ids))
    plain, in_attention, elsewhere = F.scaled_dot_product_attention, [], []
    monkeypatch.setattr(F, "scaled_dot_product_attention",
                        lambda *a, **k: in_attention.append(k["dropout_p"]) or plain(*a, **k))
    for module in net.modules():
        if isinstance(module, torch.nn.Dropout):
            module.register_forward_hook(lambda module, *_: elsewhere.append(module.p))
    net(ids)
    assert in_attention == [0.5] * 2 and elsewhere == [0.5] * 5


def test_untied_head_is_a_matrix_of_its_own():
    net = tiny(tie_embeddings=True)
    assert net.lm_head.weight is net.transformer.wte.weight
    net = tiny(tie_embeddings=False)
    assert not torch.equal(net.lm_head.weight, net.transformer.wte.weight)


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("parts", [dict(OFF, bias=True), dict(OFF, bias=False),
                                   dict(dict.fromkeys(OFF, True), bias=False)])
def test_logits_equal_those_of_transformers(tied, parts):
    pytest.importorskip("transformers")
    net, ids = tiny(**parts, tie_embeddings=tied), ids_like(3, 8)
    hf = gpt.to_hugging_face(net).eval()
    assert type(hf).__name__ == ("Qwen3ForCausalLM" if parts["rope"] else "GPT2LMHeadModel")
    with torch.no_grad():
        torch.testing.assert_close(net(ids), hf(ids).logits, atol=2e-5, rtol=1e-5)


def test_a_mixture_of_parts_is_not_exported():
    pytest.importorskip("transformers")
    for parts in (dict(OFF, rope=True), dict(dict.fromkeys(OFF, True), bias=True)):
        with pytest.raises(ValueError):
            gpt.to_hugging_face(tiny(**parts))


@pytest.mark.parametrize("tied", [True, False])
def test_hugging_face_folder_round_trip(tmp_path, tied):
    pytest.importorskip("transformers")
    net, ids = tiny(**OFF, bias=True, tie_embeddings=tied), ids_like(3, 8)
    gpt.to_hugging_face(net).save_pretrained(tmp_path / "gpt2-mine")
    args, state = gpt.from_hugging_face(str(tmp_path / "gpt2-mine"))
    torch.testing.assert_close(gpt.load_model(args, state).eval()(ids), net(ids))
    # and as the start of a run, with a shorter block
    write_data(tmp_path)
    status, _, state = run(tmp_path, init_from="gpt2-mine", block_size=4, max_iters=1,
                           learning_rate=0.0, allow_data_change=True)
    assert status == 0 and state["model_args"]["block_size"] == 4
    again = gpt.load_model(state["model_args"], state["model"]).eval()
    torch.testing.assert_close(again(ids[:, :4]), net(ids[:, :4]))


# ---- generate

def fixed(*p):
    """A model that gives these probabilities to the next token, whatever comes."""
    net = tiny(vocab_size=len(p), tie_embeddings=False)
    with torch.no_grad():
        net.lm_head.weight.zero_()
        net.lm_head.weight[:, 0] = torch.tensor(p).log()
    net.hidden = lambda idx: F.one_hot(torch.zeros_like(idx), 16).float()
    return net


def frequencies(net, n=20000, **how):
    torch.manual_seed(0)
    (token,) = net.generate(torch.zeros(n, 1, dtype=torch.long), 1, **how)
    assert token.shape == (n, 1)
    return (token.flatten().bincount(minlength=net.config.vocab_size) / n).tolist()


def generated(net, idx, n=12, seed=0, **how):
    torch.manual_seed(seed)
    return torch.cat(list(net.generate(idx, n, **how)), 1).tolist()


def test_temperature_0_is_greedy_for_every_seed():
    net, idx = tiny(), ids_like(2, 3)
    expected = idx
    for _ in range(12):
        expected = torch.cat((expected, net(expected[:, -8:])[:, -1].argmax(-1, keepdim=True)), 1)
    for how in (dict(temperature=0), dict(temperature=0, top_k=5, top_p=0.5), dict(top_k=1),
                dict(top_p=1e-6), dict(temperature=1e-4)):
        for seed in (0, 1):
            assert generated(net, idx, seed=seed, **how) == expected[:, 3:].tolist(), how
    assert generated(net, idx, seed=0) != generated(net, idx, seed=1)


def test_top_k_beyond_the_vocabulary_is_off():
    net, idx = tiny(), ids_like(2, 3)
    plain = generated(net, idx)
    for how in (dict(top_k=10 ** 6), dict(top_k=V), dict(top_k=0), dict(top_p=1.0)):
        assert generated(net, idx, **how) == plain


def test_sampled_frequencies_are_those_of_the_softmax():
    net = tiny()
    for temperature in (1.0, 0.6, 2.0):
        with torch.no_grad():
            p = (net(torch.zeros(1, 1, dtype=torch.long))[0, -1] / temperature).softmax(-1)
        found = torch.tensor(frequencies(net, temperature=temperature))
        chi2 = (20000 * (found - p) ** 2 / p).sum().item()
        assert chi2 < 31 + 4 * math.sqrt(2 * 31)


def test_top_k_and_top_p_keep_the_likeliest():
    net = fixed(0.1, 0.4, 0.2, 0.3)
    for how, kept in ((dict(top_k=2), {1: 4, 3: 3}), (dict(top_k=3), {1: 4, 3: 3, 2: 2}),
                      (dict(top_p=0.39), {1: 1}), (dict(top_p=0.6), {1: 4, 3: 3}),
                      (dict(top_p=0.8), {1: 4, 3: 3, 2: 2}),
                      (dict(top_p=0.95, top_k=2), {1: 4, 3: 3}),
                      (dict(top_p=0.6, temperature=0.5), {1: 16, 3: 9}),  # 0.53 and 0.3 of all
                      (dict(top_p=0.5, temperature=0.5), {1: 1})):
        expected = [kept.get(i, 0) / sum(kept.values()) for i in range(4)]
        found = frequencies(net, **how)
        assert found == pytest.approx(expected, abs=0.015), how
        assert [f > 0 for f in found] == [e > 0 for e in expected], how


def test_generate_forgets_what_is_older_than_block_size():
    net, idx = tiny(**OFF), ids_like(2, 20)
    out = generated(net, idx, temperature=0)
    assert out == generated(net, idx[:, -8:], temperature=0)
    assert out != generated(net, idx[:, :8], temperature=0)


# ---- nanoGPT

def nanogpt_checkpoint(path, steps=3):
    """ckpt.pt as nanoGPT writes it after some steps; the model, the optimizer, the ids."""
    net = tiny(**OFF, bias=True)
    decay = [p for p in net.parameters() if p.dim() >= 2]
    rest = [p for p in net.parameters() if p.dim() < 2]
    opt = torch.optim.AdamW([{"params": decay, "weight_decay": 0.2},
                             {"params": rest, "weight_decay": 0.0}], lr=2e-3, betas=(0.9, 0.99))
    for step in range(steps):
        ids = ids_like(4, 9, seed=step)
        net(ids[:, :-1], ids[:, 1:]).backward()
        opt.step()
        opt.zero_grad(set_to_none=True)
    args = dict(n_layer=2, n_head=2, n_embd=16, block_size=8, bias=True, vocab_size=V, dropout=0.0)
    config = dict(
        out_dir="out-nano", eval_interval=5, log_interval=1, eval_iters=2, eval_only=False,
        always_save_checkpoint=True, init_from="scratch", wandb_log=False, wandb_project="owt",
        wandb_run_name="gpt2", dataset="d", gradient_accumulation_steps=2, batch_size=4,
        block_size=8, n_layer=2, n_head=2, n_embd=16, dropout=0.0, bias=True, learning_rate=2e-3,
        max_iters=7, weight_decay=0.2, beta1=0.9, beta2=0.99, grad_clip=1.0, decay_lr=True,
        warmup_iters=2, lr_decay_iters=7, min_lr=1e-4, backend="nccl", device="cuda",
        dtype="float32", compile=True)
    torch.save({"model": {f"_orig_mod.{k}": v for k, v in net.state_dict().items()},
                "optimizer": opt.state_dict(), "model_args": args, "iter_num": steps,
                "best_val_loss": torch.tensor(2.5), "config": config}, path)
    return net, opt


def test_nanogpts_checkpoint_resumes_as_plain_torch_would(tmp_path, monkeypatch):
    ids = np.fromfile(write_data(tmp_path) / "data/d/train.bin", "<u2")
    (tmp_path / "out").mkdir()
    net, opt = nanogpt_checkpoint(tmp_path / "out/ckpt.pt")
    monkeypatch.setattr(train, "log_interval", 1)
    status, out, state = run(tmp_path, init_from="resume")
    assert status == 0 and state["iter_num"] == 7 and "resuming after step 3" in out
    use(monkeypatch, gradient_accumulation_steps=2)
    for step in range(3, 7):
        lr = 1e-4 + (1 + math.cos(math.pi * (step - 2) / 5)) / 2 * (2e-3 - 1e-4)
        for group in opt.param_groups:
            group["lr"] = lr
        for x, y in (train.get_batch(ids, step, micro, 2) for micro in range(2)):
            (net(x, y) / 2).backward()
        torch.nn.utils.clip_grad_norm_(net.parameters(), 1.0)
        opt.step()
        opt.zero_grad(set_to_none=True)
    close(state["model"], net.state_dict(), 1e-5)
    assert state["config"]["optimizer"] == "adamw" and state["config"]["beta2"] == 0.99


def test_nanogpts_checkpoint_is_fine_tuned_and_sampled(tmp_path):
    write_data(tmp_path)
    net, _ = nanogpt_checkpoint(tmp_path / "nano.pt")
    status, out, state = run(tmp_path, init_from="nano.pt", max_iters=1, learning_rate=0.0,
                             muon_lr=0.0, eval_interval=1, dropout=0.3)
    assert status == 0 and state["iter_num"] == 1 and "resuming" not in out
    assert state["model_args"]["dropout"] == 0.3
    close(state["model"], net.state_dict(), 1e-7)
    assert not any(state["model_args"][part] for part in OFF)
    with changed(train, tmp_path, {}):
        source = train.load_weights("nano.pt")
    ids = ids_like(1, 4)
    again = gpt.load_model(source["model_args"], source["model"]).eval()
    assert generated(again, ids, temperature=0) == generated(net, ids, temperature=0)


def test_bins_without_meta_are_gpt2_tokens(tmp_path):
    ids = np.random.default_rng(0).integers(50000, 50257, size=100)
    write_data(tmp_path, ids)
    (tmp_path / "data/d/meta.json").unlink()
    status, out, state = run(tmp_path, max_iters=1, eval_interval=1, n_layer=1)
    assert status == 0 and state["model_args"]["vocab_size"] == 50257
    assert state["tokenizer"]["name"] == "gpt2" and "bits per byte" not in out


# ---- settings

def outcome(capsys, call):
    """Exit status, stdout, stderr of a call."""
    status = None
    try:
        call()
    except SystemExit as e:
        status = e.code
    return (status, *capsys.readouterr())


def some_settings():
    return {"__file__": __file__, "_private": 1, "os": os, "rate": 0.5, "steps": 10, "name": "x",
            "flag": False}


def test_settings_take_the_type_of_their_default(tmp_path):
    s = some_settings()
    given = configure(s, ["--rate=1", "--steps=1e3", "--name=a=b", "--flag=True"])
    assert given == {"rate": 1.0, "steps": 1000, "name": "a=b", "flag": True}
    assert {k: s[k] for k in given} == given
    assert [type(v) for v in given.values()] == [float, int, str, bool]
    s = some_settings()
    assert configure(s, ["--name=5", "--rate=-1e-3"]) == {"name": "5", "rate": -1e-3}
    assert configure(s, ["--name="]) == {"name": ""} and configure(s, []) == {}


def test_later_settings_win_and_files_may_compute(tmp_path):
    file = tmp_path / "c.py"
    file.write_text("import math\n_half = 3\n\ndef twice(x):\n    return 2 * x\n\n"
                    "steps = twice(_half) + steps\nrate = math.sqrt(4)\nname = f'{name}y'\n")
    s = some_settings()
    assert configure(s, ["--steps=20", str(file)]) == {"steps": 26, "rate": 2.0, "name": "xy"}
    assert s["steps"] == 26 and "twice" not in s and "_half" not in s and "math" not in s
    assert configure(some_settings(), [str(file), "--steps=20"])["steps"] == 20
    assert configure(some_settings(), ["--steps=1", "--steps=2"])["steps"] == 2


@pytest.mark.parametrize("arg, words", [
    ("--step=5", "c.py|steps"), ("--zzz=1", "zzz"), ("--_private=2", "_private"), ("--os=1", "os"),
    ("--steps=2.5", "int"), ("--steps=True", "int"), ("--steps=abc", "int"), ("--steps=", "int"),
    ("--steps=1e400", "int"), ("--rate=x", "float"), ("--rate=nan", "float"),
    ("--rate=1e400", "float"), ("--rate=False", "float"), ("--flag=1", "bool"),
    ("--flag=true", "bool"), ("--flag", "--flag=VALUE"), ("steps=5", "steps=5"),
    ("missing.py", "missing.py"), ("stepz = 5", "did you mean steps"), ("steps = 2.5", "int"),
    ("name = 5", "str"), ("steps = 1 +", "config file"), ("steps = 1 / 0", "division"),
    ("rate = float('nan')", "float"), ("steps = None", "int")])
def test_a_setting_that_does_not_fit_is_refused_in_one_line(tmp_path, capsys, arg, words):
    if " " in arg:  # the content of a file
        file = tmp_path / "c.py"
        file.write_text(arg + "\n")
        arg = str(file)
    s = some_settings()
    status, out, err = outcome(capsys, lambda: configure(s, [arg]))
    assert status == 2 and out == "" and err.count("\n") == 1 and re.search(words, err)
    assert arg.split("=")[0].lstrip("-") in err


def test_help_lists_settings_comments_and_values(capsys):
    s = dict(vars(train))
    status, out, err = outcome(capsys, lambda: configure(s, ["--help", "--max_iters=77"]))
    assert status == 0 and err == ""
    assert re.search(r"^--max_iters=77 +steps", out, re.M)
    listed = re.findall(r"^--(\w+)=", out, re.M)
    assert set(TINY) <= set(listed) and sorted(listed) == sorted(train.settings())
    assert all(name.islower() for name in listed)  # no constants


def test_a_config_of_nanogpts_settings_runs(tmp_path):
    write_data(tmp_path)
    file = tmp_path / "train_nano.py"
    file.write_text(
        "# train a miniature character-level shakespeare model\n"
        "out_dir = 'out'\neval_interval = 5\neval_iters = 2\nlog_interval = 1\n"
        "always_save_checkpoint = False\nwandb_log = False\nwandb_project = 'shakespeare-char'\n"
        "wandb_run_name = 'mini-gpt'\ndataset = 'd'\ngradient_accumulation_steps = 1\n"
        "batch_size = 4\nblock_size = 8\nn_layer = 2\nn_head = 2\nn_embd = 16\ndropout = 0.2\n"
        "learning_rate = 1e-3\nmax_iters = 5\nlr_decay_iters = 5\nmin_lr = 1e-4\nbeta2 = 0.99\n"
        "warmup_iters = 1\nweight_decay = 1e-1\ndevice = 'cpu'\ncompile = False\n"
        "init_from = 'scratch'\nbias = True\nbackend = 'gloo'\ndtype = 'float32'\nseed = 3\n"
        "decay_lr = True\ngrad_clip = 1.0\nbeta1 = 0.9\neval_only = False\n")
    status, _, state = run(tmp_path, **configure(dict(vars(train)), [str(file)]))
    assert status == 0 and state["iter_num"] == 5 and state["config"]["beta2"] == 0.99


BAD_SETTINGS = [
    (dict(n_embd=18, n_head=4), "n_head"), (dict(n_embd=6, n_head=2), "even"),
    *((({name: 0}), name) for name in ("batch_size", "block_size", "n_layer", "n_head", "n_embd",
                                       "gradient_accumulation_steps", "eval_iters")),
    *((({name: -1}), name) for name in ("batch_size", "eval_interval", "log_interval", "max_iters",
                                        "warmup_iters", "checkpoint_interval", "patience", "seed")),
    *((({name: -0.1}), name) for name in ("learning_rate", "grad_clip", "dropout", "weight_decay",
                                          "max_minutes", "min_lr")),
    *((({name: 1.0}), name) for name in ("dropout", "beta1", "beta2")),
    *((({name: "bogus"}), name) for name in ("lr_schedule", "optimizer", "dtype", "device",
                                             "init_from", "dataset")),
    (dict(layer_lr_decay=0.0), "layer_lr_decay"), (dict(block_size=400), "block_size"),
    (dict(init_from="resume"), "checkpoint"), (dict(init_from="missing.pt"), "missing.pt"),
    (dict(out_dir="data/d/val.bin"), "out_dir"), (dict(wandb_log=True), "wandb"),
    (dict(tensorboard_log=True), "tensorboard")]


@pytest.mark.parametrize("given, word", BAD_SETTINGS)
def test_bad_settings_are_refused_in_one_line(tmp_path, given, word):
    for package in set(given) & {"wandb_log", "tensorboard_log"}:
        with contextlib.suppress(ImportError):
            __import__(package.removesuffix("_log"))
            pytest.skip("it is installed")
    write_data(tmp_path)
    status, out, _ = run(tmp_path, **given)
    assert status == 2 and word in out.splitlines()[-1]
    assert out.count("\n") == 1 or "out_dir" in given  # which is tried last of all
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("split", ["train", "val"])
@pytest.mark.parametrize("fault", ["odd", "first id", "last id", "far id", "short", "empty",
                                   "missing"])
def test_bad_data_is_refused_in_one_line(tmp_path, split, fault):
    write_data(tmp_path)
    path = tmp_path / "data/d" / f"{split}.bin"
    ids = np.fromfile(path, "<u2")
    if fault == "odd":
        path.write_bytes(path.read_bytes() + b"\0")
    elif fault == "far id":  # beyond the piece of a file that is looked at at once
        with open(path, "wb") as f:
            f.truncate(2 * 17_000_000)
            f.seek(2 * 16_900_000)
            f.write(bytes([V, 0]))
    elif fault.endswith("id"):
        ids[0 if fault == "first id" else -1] = V
        ids.tofile(path)
    elif fault == "missing":
        path.unlink()
    else:
        ids[:8 if fault == "short" else 0].tofile(path)
    status, out, _ = run(tmp_path)
    word = {"odd": "801", "first id": f"token 0 is {V}", "last id": f"token 399 is {V}",
            "far id": f"token 16900000 is {V}", "short": "8 tokens", "empty": "0 tokens",
            "missing": "prepare.py"}[fault]
    assert status == 2 and out.count("\n") == 1 and word in out and f"{split}.bin" in out
    assert not (tmp_path / "out").exists()


# ---- from the command line

def command(folder, *args, **env):
    """Run python with these arguments in a folder, on one thread."""
    return subprocess.run([sys.executable, *args], cwd=folder, capture_output=True, text=True,
                          timeout=300, env={**os.environ, "OMP_NUM_THREADS": "1", **env})


def flags(**given):
    return [f"--{k}={v}" for k, v in {**TINY, **given}.items()]


def test_a_bad_command_line_ends_in_one_line(tmp_path):
    done = command(tmp_path, f"{REPO}/train.py", "--max_iter=5")
    assert done.returncode == 2 and done.stdout == ""
    assert done.stderr.count("\n") == 1 and "max_iters" in done.stderr
    assert list(tmp_path.iterdir()) == []


def test_two_processes_equal_one(tmp_path):
    write_data(tmp_path, val=ids_like(8 * 7 + 5).numpy())  # 7 windows, 4 for one process
    given = dict(gradient_accumulation_steps=2, eval_interval=2, eval_iters=5, lr_schedule="wsd")
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    _, _, one = run(tmp_path, **given)
    torch.set_num_threads(threads)
    done = command(tmp_path, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2",
                   f"{REPO}/train.py", *flags(**given, out_dir="out2"))
    assert done.returncode == 0, done.stderr
    two = torch.load(tmp_path / "out2/ckpt.pt", weights_only=True)
    close(one["model"], two["model"], 1e-5)
    first = rows(tmp_path)
    os.rename(tmp_path / "out", tmp_path / "out1")
    os.rename(tmp_path / "out2", tmp_path / "out")
    for a, b in zip(first, rows(tmp_path), strict=True):
        for k in ("step", "tokens", "lr", "train_loss", "val_loss", "grad_norm"):
            assert a.get(k, 0) == pytest.approx(b.get(k, 0), rel=1e-5)
    assert [done.stdout.count(f"iter {i}:") for i in range(1, 7)] == [1] * 6  # rank 0 alone speaks
    assert len(two["rng"]) == 2 and two["versions"]["processes"] == 2
    status, _, two = run(tmp_path, init_from="resume", max_iters=8)  # in one process from here
    os.rename(tmp_path / "out", tmp_path / "out2")
    os.rename(tmp_path / "out1", tmp_path / "out")
    _, _, one = run(tmp_path, init_from="resume", max_iters=8)
    assert status == 0 and two["iter_num"] == 8
    close(one["model"], two["model"], 1e-5)


# ---- sample.py

def write(folder, **given):
    """What sample.main() prints in a folder, and its exit status."""
    with changed(sample, folder, {**dict(device="cpu", dtype="float32", num_samples=1,
                                         max_new_tokens=50, temperature=0.0), **given}) as text:
        try:
            status = sample.main() or 0
        except SystemExit as e:
            status = e.code
    return status, text.getvalue()


def test_sample_from_the_command_line(memorised):
    folder, text, _, _ = memorised
    (folder / "prompt.txt").write_text(text[:12])
    done = command(folder, f"{REPO}/sample.py", "--start=FILE:prompt.txt", "--num_samples=2",
                   "--temperature=0", "--device=cpu", "--dtype=float32")
    assert done.returncode == 0, done.stderr
    samples = done.stdout.split("\n---------------\n")
    assert samples == [text, text, ""]  # ends with the document, whole characters


def test_sample_settings(memorised):
    folder, text, _, _ = memorised
    end = "\n---------------\n"
    assert write(folder, start="a bad") == (0, text + end)
    assert write(folder) == (0, text + end)  # an empty prompt begins a document
    assert write(folder, start="a bad", max_new_tokens=4) == (0, text[:9] + end)
    assert write(folder, start="a bad", init_from="out/best.pt") == (0, text + end)
    for narrow in (dict(temperature=9.0, top_k=1), dict(temperature=1.0, top_k=0, top_p=1e-6)):
        assert write(folder, start="a bad", **narrow) == (0, text + end)
    status, out = write(folder, start=text[:20], max_new_tokens=3)
    assert status == 0 and text[:23] + end in out and "last 16 of" in out
    hot = dict(start="a", temperature=50.0, top_k=0, num_samples=2)
    one, two = write(folder, **hot)[1].split(end)[:2]
    assert one != two and write(folder, **hot)[1] == one + end + two + end
    assert write(folder, **hot, seed=2)[1] != one + end + two + end
    (folder / "data").rename(folder / "gone")  # the tokenizer is in the checkpoint
    assert write(folder, start="a bad") == (0, text + end)
    (folder / "gone").rename(folder / "data")


@pytest.mark.parametrize("given, word", [
    (dict(out_dir="none"), "train.py"), (dict(temperature=-1.0), "temperature"),
    (dict(top_p=0.0), "top_p"), (dict(top_k=-1), "top_k"), (dict(dtype="int8"), "dtype"),
    (dict(start="FILE:none.txt"), "none.txt"), (dict(init_from="none.pt"), "none.pt"),
    (dict(device="bogus"), "device")])
def test_sample_refuses_in_one_line(memorised, given, word):
    status, out = write(memorised[0], **given)
    assert status == 2 and out.count("\n") == 1 and word in out


def test_sample_reads_nanogpts_checkpoint_as_gpt2(tmp_path):
    if not os.path.isdir(os.environ.get("TIKTOKEN_CACHE_DIR", "")):
        pytest.skip("GPT-2's vocabulary is not at hand")
    net = tiny(**OFF, bias=True, vocab_size=50257, n_layer=1)
    torch.save({"model_args": dict(n_layer=1, n_head=2, n_embd=16, block_size=8, bias=True,
                                   vocab_size=50257, dropout=0.0),
                "model": {f"_orig_mod.{k}": v for k, v in net.state_dict().items()}},
               tmp_path / "nano.pt")
    status, out = write(tmp_path, init_from="nano.pt", start="Hello world", max_new_tokens=5)
    assert status == 0 and out.startswith("Hello world")
    import tiktoken
    ids = torch.tensor([tiktoken.get_encoding("gpt2").encode("Hello world")])
    tokens = generated(net, ids, n=5, temperature=0)[0]
    assert out == "Hello world" + tiktoken.get_encoding("gpt2").decode(tokens) + \
        "\n---------------\n"


def readme_commands():
    with open(f"{REPO}/README.md", encoding="utf-8") as f:
        blocks = re.findall(r"^```sh\n(.*?)^```", f.read(), re.MULTILINE | re.DOTALL)
    for part in re.split(r"\n|&&", "".join(blocks)):
        words = shlex.split(part)
        for i, word in enumerate(words):
            if word in ("prepare.py", "train.py", "sample.py"):
                yield word, words[i + 1:]


@pytest.mark.parametrize("script, args", readme_commands())
def test_readme_commands_parse(script, args):
    settings = dict(vars({"prepare.py": prepare, "train.py": train, "sample.py": sample}[script]))
    try:
        with contextlib.chdir(REPO), contextlib.redirect_stdout(io.StringIO()):
            configure(settings, args)
    except SystemExit as e:
        assert e.code == 0 and "--help" in args
