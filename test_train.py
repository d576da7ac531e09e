"""The promises, each with a test that fails where it is broken. Hermetic, on a CPU.

Reliability first (its tests fork this process, before any thread is started in it), then text
and tokens, then numbers. FULL=1 in the environment runs the long forms, an hour or so.
"""
import collections
import contextlib
import copy
import functools
import glob
import gzip
import hashlib
import http.server
import io
import itertools
import json
import math
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
import zlib
from pathlib import Path

import numpy as np
import pytest
import regex
import torch
import torch._dynamo
from tiktoken_ext import openai_public
from torch.nn import functional as F

import model as gpt
import prepare
import sample
import train
from config import configure
from model import GPT, GPTConfig

FULL = bool(os.environ.get("FULL"))
REPO = os.path.dirname(os.path.abspath(train.__file__))
torch.set_num_threads(1)  # part of the numerics; and a process with a thread pool must not fork
V = 32  # ids in most data
OFF = dict(rmsnorm=False, rope=False, qk_norm=False, swiglu=False)
SHAPE = dict(block_size=8, n_layer=2, n_head=2, n_embd=16)
TINY = dict(SHAPE, dataset="d", batch_size=4, max_iters=6, warmup_iters=2, eval_interval=0,
            eval_iters=2, log_interval=1, checkpoint_minutes=0.0, keep_checkpoints=0, device="cpu",
            dtype="float32", compile=False, backend="gloo", dropout=0.0, learning_rate=3e-3,
            min_lr=0.0, lr_schedule="cosine", muon_momentum=0.95, muon_steps=5)
SMALL = dict(TINY, n_embd=32, block_size=16, batch_size=6, max_iters=12, eval_interval=4,
             min_delta=0.5, patience=99, checkpoint_interval=3, keep_checkpoints=1,
             optimizer="adamw", init_from="auto")  # of the runs that are disturbed


# ---- files, runs and faults

def make_data(folder, ids=None, val=None, vocab_size=V, **meta):
    """folder/data/d with these ids, random ones by default; val is ids unless given."""
    os.makedirs(f"{folder}/data/d", exist_ok=True)
    ids = np.random.default_rng(0).integers(vocab_size, size=400) if ids is None else ids
    meta = {"source": "a test", "tokenizer": {"name": "byte"}, "vocab_size": vocab_size, "eot": 0,
            **meta}
    for split, ids in (("train", ids), ("val", ids if val is None else val)):
        np.asarray(ids, "<u2").tofile(f"{folder}/data/d/{split}.bin")
        meta[split] = {"tokens": len(ids), "bytes": 3 * len(ids), "documents": 1}
    Path(folder, "data/d/meta.json").write_text(json.dumps(meta))
    return folder


def make_noise(folder):
    """The data of the runs that are disturbed, if there is none."""
    if not os.path.exists(f"{folder}/data"):
        noise = (np.random.default_rng(n).zipf(1.5, n).clip(0, 256) for n in (3000, 400))
        make_data(folder, *noise, vocab_size=257, eot=256)


def tree(folder="."):
    """Every file below a folder with its content, and every folder."""
    return {p: Path(p).read_bytes() if os.path.isfile(p) else None
            for p in glob.glob(f"{folder}/**", recursive=True, include_hidden=True)}


def load(folder, name="out/ckpt.pt"):
    return torch.load(f"{folder}/{name}", weights_only=True)


def rows(folder):
    """out/log.csv as a list of {column: number}, without the empty fields."""
    header, *lines = Path(folder, "out/log.csv").read_text().splitlines()
    assert header == ("step,tokens,train_loss,val_loss,lr,grad_norm,ms,tokens_per_s,samples_per_s,"
                      "mfu,memory_mb")
    return [{k: float(v) for k, v in zip(header.split(","), line.split(","), strict=True) if v}
            for line in lines]


def column(folder, name):
    return [row[name] for row in rows(folder) if name in row]


def leaves(x, at=""):
    """{path: value} of all that is in a checkpoint, but for times, paths and the rate, which each
    step sets anew."""
    if isinstance(x, torch.Tensor):
        return {at: (x.dtype, x.shape, x.numpy().tobytes())}
    if isinstance(x, (dict, list, tuple)):
        parts = x.items() if isinstance(x, dict) else enumerate(x)
        return {k: v for name, part in parts for k, v in leaves(part, f"{at}.{name}").items()}
    ignored = r"\.(train_seconds|config\.init_from|config\.out_dir|param_groups\.\d+\.lr)$"
    return {} if re.search(ignored, at) else {at: repr(x)}


def difference(a, b):
    """Where two checkpoints are not the same, bit for bit."""
    a, b = leaves(a), leaves(b)
    return [path for path in a.keys() | b.keys() if a.get(path) != b.get(path)]


def assert_same(folder, reference, but=()):
    """All but times is equal: checkpoint, best weights, log (without the columns in `but`)."""
    for name in ("out/ckpt.pt", "out/best.pt"):
        assert not difference(load(folder, name), load(reference, name))
    ignored = {"ms", "tokens_per_s", "samples_per_s", "mfu", "memory_mb", *but}
    ours, theirs = ([{k: row[k] for k in row.keys() - ignored} for row in rows(f)]
                    for f in (folder, reference))
    assert not difference(ours, theirs) and not glob.glob(f"{folder}/out/*.tmp")


def close(a, b, atol=1e-5):
    """All tensors of two dicts are equal to rounding."""
    assert a.keys() == b.keys()
    for k in a:
        x, y = a[k], b[k]
        if str(k).endswith("c_attn.bias"):  # of GPT-2's key it has only rounding for a gradient
            x, y = (torch.cat(z.chunk(3)[::2]) for z in (x, y))
        torch.testing.assert_close(x, y, rtol=0, atol=atol, msg=lambda m: f"{k}: {m}")


def outcome(function, *args):
    """The exit status of a call or what it returns, what it prints, and its errors."""
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            status = function(*args)
        except SystemExit as e:
            status = e.code
    return status, out.getvalue(), err.getvalue()


def call(module, folder, values, *args):
    """module.main(*args) in a folder, with other globals for a while: exit status and prints."""
    before = dict(vars(module))
    vars(module).update(values)
    try:
        with contextlib.chdir(folder):
            status, out, err = outcome(module.main, *args)
    finally:
        vars(module).update(before)
    return status or 0, out + err


def run(folder, rate=lambda *_: 1e9, **given):
    """Train in this process in a folder: exit status, what was printed, ckpt.pt or None."""
    signals = types.SimpleNamespace(SIGINT=2, SIGTERM=15, signal=lambda *_: None)
    values = {**TINY, **given, "matmul_rate": rate, "plot_log": lambda: None, "signal": signals}
    status, out = call(train, folder, values, given)
    path = f"{given.get('out_dir', 'out')}/ckpt.pt"
    return status, out, load(folder, path) if os.path.exists(f"{folder}/{path}") else None


def flags(settings):
    return [f"--{k}={v}" for k, v in settings.items()]


def spawn(folder, *args, **options):
    """Start python with these arguments in a folder, on one thread; its outputs are pipes."""
    return subprocess.Popen(
        [sys.executable, *args], cwd=folder, text=True, stdin=subprocess.PIPE,
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, **options,
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": REPO,
             "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"})  # see README.md


def command(folder, *args, input=None, **options):
    """Run python to the end: exit status, stdout, stderr."""
    child = spawn(folder, *args, **options)
    out, err = child.communicate(input, timeout=300)
    return child.returncode, out, err


PROGRAM = re.search(r"^if __name__ == .*", Path(train.__file__).read_text(), re.M | re.S)[0]
Run = collections.namedtuple("Run", "code out codes outs")
RUNS = tempfile.TemporaryDirectory()


def start(folder, *args, patch=None, world=1, bare=False, **settings):
    """Fork to `python train.py ARGS`, or torchrun's `world` processes of it: their ids.

    A fork, as `import torch` takes 3 s; it writes to folder.RANK. patch(): first in each new
    process, to plant a fault. bare: without SMALL.
    """
    make_noise(folder)
    argv = ["train.py", *args, *flags({**({} if bare else SMALL), **settings})]
    port = free_port() if world > 1 else 0
    return [fork(str(folder), argv, patch, rank, world, port) for rank in range(world)]


def fork(folder, argv, patch, rank, world, port):
    sys.stdout.flush(), sys.stderr.flush()
    if pid := os.fork():
        return pid
    code = 1
    try:
        signal.alarm(120)
        os.chdir(folder)
        fd = os.open(f"{folder}.{rank}", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        os.dup2(fd, 1), os.dup2(fd, 2)
        sys.stdout, sys.stderr = open(1, "w"), open(2, "w", errors="backslashreplace")
        os.environ.update(RANK=str(rank), WORLD_SIZE=str(world), LOCAL_RANK=str(rank),
                          MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
        sys.modules["matplotlib"] = None  # a second for a picture
        sys.argv = argv
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


def wait(folder, pids):
    """The end of forked processes, as a Run; the exit status of a killed one is -SIGNAL."""
    codes = [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in pids]
    outs = [Path(f"{folder}.{r}").read_text(errors="replace") for r in range(len(pids))]
    return Run(codes[0], outs[0], codes, outs)


def launch(folder, *args, **how):
    """start() and wait(); no process but one that lost another may end in a traceback."""
    done = wait(folder, start(folder, *args, **how))
    assert -9 in done.codes or "Traceback" not in "".join(done.outs), done.outs
    return done


def free_port():
    with socket.create_server(("127.0.0.1", 0)) as s:
        return s.getsockname()[1]


@pytest.fixture
def folder(tmp_path):
    return tmp_path / "run"


@functools.cache
def a_run(killed=False, **how):
    """A folder with a run that nothing disturbed, or that was killed in step 8 and had saved after
    3, 4 and 6; only to be read."""
    folder = tempfile.mkdtemp(dir=RUNS.name)
    done = launch(folder, **how, **(dict(patch=at(7, send(signal.SIGKILL))) if killed else {}))
    assert set(done.codes) == {-9 if killed else 0}, done.outs
    return folder


def clone(source, folder):
    subprocess.run(["cp", "-a", source, folder], check=True)  # hard links stay hard links


def assert_ends_well(folder, but=(), **how):
    """Started again, a run that was disturbed ends as one that was not."""
    done = launch(folder, **how)
    assert set(done.codes) == {0}, done.outs
    assert_same(folder, a_run(**how), but)


def assert_refused(folder, *words, **how):
    """The start ends in one sentence with these words and status 2, and changes nothing."""
    before = tree(folder)
    done = launch(folder, **how)
    lines = [line for line in done.out.splitlines() if line.startswith("train.py: ")]
    assert set(done.codes) == {2} and len(lines) == 1, done.out
    assert all(word in lines[0] for word in words), lines[0]
    assert tree(folder) == before


def step_saved(folder):
    return train.read_checkpoint(f"{folder}/out/ckpt.pt")["iter_num"]


def hook(module, name, act):
    """From here on act(*args) is called before module.name(*args) is."""
    f = getattr(module, name)
    setattr(module, name, lambda *a, **k: (act(*a), f(*a, **k))[1])


def at(step, act, ranks=range(9)):
    """A patch, which changes a process at its start, so that an action happens in it later: in the
    midst of the step that follows `step` updates, on some ranks."""
    return lambda: hook(train, "get_lr", lambda it: it == step and train.RANK in ranks and act())


def both(*patches):
    return lambda: [patch() for patch in patches]


def fail(exception):
    """An action that fails."""
    def act(*_, **kw):
        raise exception
    return act


def send(*signals):
    return lambda *_: [os.kill(os.getpid(), s) for s in signals]


def draws():
    """A patch: each step draws from Python's and NumPy's generators, which training does not."""
    hook(train, "get_lr", lambda it: (random.random(), np.random.rand()))


def scaled(factor, when):
    """A patch: the training loss is multiplied in the steps `it` where when(it) is true."""
    def patch():
        forward, steps = train.GPT.forward, []
        hook(train, "get_lr", steps.append)
        train.GPT.forward = lambda net, x, y: forward(net, x, y) * (
            factor if net.training and when(steps[-1]) else 1)
    return patch


def damage(path, kind, rng=random):
    """Flip a bit, clear a page or cut the file to a share of its length."""
    new = bytearray(Path(path).read_bytes())
    if kind == "flip":
        new[rng.randrange(len(new))] ^= 1 << rng.randrange(8)
    elif kind == "page":
        middle = len(new) // 2 // 4096 * 4096
        new[middle:middle + 4096] = bytes(4096)
    else:
        new = new[:int(len(new) * kind)]
    with open(path, "r+b") as f:  # in place: a second name of the file is damaged with it
        f.write(new)
        f.truncate(len(new))


def limit(size=resource.RLIM_INFINITY):
    """No file of this process may grow beyond size from here on, as on a full disk."""
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, resource.RLIM_INFINITY))


# ---- killed and resumed

def test_a_fork_is_the_program(tmp_path):
    """What the other tests run is what a user runs."""
    make_noise(tmp_path)
    status, out, err = command(tmp_path, f"{REPO}/train.py", *flags(SMALL))
    assert status == 0 and err == "" and "trained 12 steps" in out
    assert_same(tmp_path, a_run())


DRAWS_OVERFLOW = both(draws, scaled(1e36, lambda it: it == 4))  # of float16's gradients
MATRIX = list(itertools.product((0.0, 0.2), (1, 3), ("float32", "float16"), ("adamw", "muon"),
                                (1, 2, 3), ("kill", "term", "save", "twice")))


@pytest.mark.parametrize("dropout, accumulation, dtype, optimizer, world, stop",
                         MATRIX if FULL else MATRIX[14::17])  # with 90 of all 92 pairs of values
def test_resume_is_exact(folder, dropout, accumulation, dtype, optimizer, world, stop):
    settings = dict(dropout=dropout, gradient_accumulation_steps=accumulation, dtype=dtype,
                    optimizer=optimizer, world=world)
    always = DRAWS_OVERFLOW if dtype == "float16" else draws
    patches = {"kill": [at(7, send(signal.SIGKILL), [world - 1])],
               "term": [at(6, send(signal.SIGTERM), [world - 1])],
               "save": [at(5, lambda: limit(100_000))],
               "twice": [at(7, send(signal.SIGKILL), [0]), at(9, send(signal.SIGTERM), [0])]}[stop]
    for patch in patches:
        assert any(launch(folder, patch=both(always, patch), **settings).codes)
    assert_ends_well(folder, patch=always, **settings)
    state = load(folder)
    assert state["stale"] == 2 and state["iter_num"] == 12
    if dtype == "float16":
        assert state["scaler"]["scale"] in (2.0 ** 15, 2.0 ** 14)  # from 2 ** 16


@pytest.mark.parametrize("step", range(12) if FULL else [0, 7, 11])
def test_resume_from_every_step(folder, step):
    """Evaluated or not, saved or not, before the first step and after the last."""
    done = launch(folder, patch=at(step, send(signal.SIGTERM)), checkpoint_interval=0)
    assert done.code == 143 and f"after step {step + 1};" in done.out
    assert_ends_well(folder, but=["val_loss"], checkpoint_interval=0)


def test_spike_window_survives(folder):
    """130 steps, then a spike, which only 128 steps before it let one notice."""
    settings = dict(max_iters=134, checkpoint_interval=65, eval_interval=0, n_layer=1)
    launch(folder, patch=at(100, send(signal.SIGKILL)), **settings)
    done = launch(folder, patch=scaled(50, lambda it: it == 131), **settings)
    assert re.search(r"warning: spike \d+, iter 132", done.out), done.out


def test_processes_share_the_work(tmp_path):
    """2 and 3 train what 1 does, to rounding; only the first one speaks; 5 cannot share 12."""
    settings = dict(gradient_accumulation_steps=2, lr_schedule="wsd", eval_iters=3)
    one = a_run(**settings)
    for world in (2, 3):
        done = launch(folder := tmp_path / str(world), world=world, **settings)
        assert done.codes == [0] * world and not any(done.outs[1:]), done.outs
        assert [done.out.count(f"iter {i}:") for i in range(1, 13)] == [1] * 12
        many = load(folder)
        close(many["model"], load(one)["model"], 1e-5)
        assert len(many["rng"]) == many["versions"]["processes"] == world
        for a, b in zip(rows(one), rows(folder), strict=True):
            for k in ("step", "tokens", "lr", "train_loss", "val_loss", "grad_norm"):
                assert a.get(k, 0) == pytest.approx(b.get(k, 0), rel=1e-4), k
    assert_refused(folder, "12 sequences", "[1, 2, 3, 4, 6, 12]", world=5, **settings)


def slow_saves(ticks):
    """A patch: a save takes many small writes; ticks[0] counts them and the steps, ticks[1] is 1
    inside a save."""
    def patch():
        write, replace = torch.save, os.replace
        def tick(delay=0.002):
            ticks[0] += 1
            time.sleep(delay)

        def slow_write(state, f, **kw):
            if not hasattr(f, "name"):  # not a file: the processes talk
                return write(state, f, **kw)
            ticks[1] = 1
            write(state, whole := io.BytesIO())
            for part in np.array_split(np.frombuffer(whole.getvalue(), "u1"), 6):
                f.write(part)
                f.flush()
                tick()

        def slow_replace(*paths):
            tick()
            replace(*paths)
            tick()
            ticks[1] = 0
        torch.save, os.replace = slow_write, slow_replace
        hook(train, "get_lr", lambda it: tick(0))
    return patch


@pytest.mark.parametrize("world, goal", [(1, 200), (2, 40)] if FULL else [(1, 8), (2, 2)])
def test_kill_loop(tmp_path, world, goal):
    """SIGKILL at random moments, in a save and out of it, until the run is through all the same."""
    settings = dict(dropout=0.2, max_iters=24 if FULL else 10, checkpoint_interval=1, world=world)
    rng, kills, inside, starts, begin = random.Random(1), 0, 0, 0, time.monotonic()
    for n in itertools.count():
        folder, newest, codes = f"{tmp_path}/{n}", 0, [-9]
        while -9 in codes:
            ticks = np.memmap(tmp_path / "ticks", int, "w+", shape=2)
            saved = os.path.exists(f"{folder}/out/ckpt.pt")
            pids = start(folder, patch=slow_saves(ticks), **settings)
            starts += 1
            until = rng.randrange(0, 60) if kills < goal else 10 ** 9
            while os.waitid(os.P_PID, pids[0], os.WEXITED | os.WNOHANG | os.WNOWAIT) is None:
                if ticks[0] >= until:
                    time.sleep(rng.uniform(0, 0.3 if until < 3 else 0.01))
                    inside += ticks[1]
                    with contextlib.suppress(ProcessLookupError):
                        os.kill(rng.choice(pids), signal.SIGKILL)
                    break
                time.sleep(0.0005)
            _, out, codes, _ = wait(folder, pids)
            assert "warning" not in out and not {2, -signal.SIGALRM} & {*codes}, out
            at_step = re.findall(r"resuming after step (\d+)", out)
            assert at_step or not (saved and "\niter " in out), "from scratch, with a checkpoint!"
            assert not at_step or int(at_step[0]) >= newest, "a checkpoint was lost"
            newest = int(at_step[0]) if at_step else newest
            kills += -9 in codes
        assert codes == [0] * world, out
        assert_same(folder, a_run(**settings))
        shutil.rmtree(folder)
        if kills >= goal:
            break
    print(f"\n{world} process(es): {kills} kills, {inside} inside a save, {starts} starts, {n + 1} "
          f"runs, {time.monotonic() - begin:.0f} s")
    assert inside >= kills / 8


# ---- damaged checkpoints, failing disks

@pytest.mark.parametrize("kind", [0, 0.1, 0.5, 0.999, "page"])
def test_damage(tmp_path, kind):
    """The newest good kept copy is used, with a line that names both; none good: refused."""
    clone(a_run(killed=True), folder := tmp_path / "run")
    damage(folder / "out/ckpt.pt", kind)
    shutil.copyfile(folder / "out/ckpt.pt", folder / "other.pt")
    clone(folder, none := tmp_path / "none")
    for path in none.glob("out/ckpt_*"):
        path.unlink()
        shutil.copyfile(none / "other.pt", path)
    assert_refused(none, "ckpt.pt", "ckpt_4.pt", init_from="resume")
    assert_refused(none, "ckpt.pt", "ckpt_4.pt", init_from="auto")
    assert_refused(folder, "other.pt", init_from="other.pt")
    done = launch(folder, init_from="resume")
    assert re.search(r"^warning: out/ckpt\.pt .*; going on from out/ckpt_4\.pt$", done.out, re.M)
    assert done.code == 0 and "resuming after step 4\n" in done.out
    assert_same(folder, a_run())


@pytest.mark.parametrize("key", ["config", "data", "versions"])
def test_a_checkpoint_without_its_dicts_is_damaged(tmp_path, key):
    clone(a_run(killed=True), folder := tmp_path / "run")
    torch.save({**load(folder), key: 5}, folder / "out/ckpt.pt")
    done = launch(folder, init_from="resume")
    assert done.code == 0 and "going on from out/ckpt_4.pt" in done.out
    assert_same(folder, a_run())


def test_flipped_bits(tmp_path):
    """A flip is noticed, or it hit what is not read: padding and the like."""
    good, bad = f"{a_run()}/out/ckpt.pt", f"{tmp_path}/bad.pt"
    state, rng, noticed = train.read_checkpoint(good), random.Random(0), 0
    for _ in range(500 if FULL else 50):
        shutil.copyfile(good, bad)
        damage(bad, "flip", rng)
        try:
            assert not difference(train.read_checkpoint(bad), state)
        except ValueError as e:
            assert "bad.pt" in str(e) and "\n" not in str(e)
            noticed += 1
    assert noticed >= 25


def assert_outlives(folder, fault, cure, words=""):
    """The saves after 4 (two files) and 6 fail: the old checkpoint stays, training goes on, and
    the next save makes up for it; where all fail, the exit status is 1."""
    def end():
        print("left:", load(".")["iter_num"], glob.glob("out/*.tmp"))
        cure()
    done = launch(folder, patch=both(at(3, fault), at(7, end)))
    assert done.code == 0 and done.out.count("warning: ") == done.out.count("not saved") == 3
    assert "left: 3 []" in done.out and " MB" in done.out and words in done.out, done.out
    assert_same(folder, a_run())
    done = launch(folder, max_iters=20, patch=fault)  # from the start
    assert done.code == 1 and "not saved" in done.out and step_saved(folder) == 12
    assert not list(folder.glob("out/*.tmp"))
    assert launch(folder, max_iters=20).code == 0 and step_saved(folder) == 20


def test_full_disk(folder):
    assert_outlives(folder, lambda: limit(100_000), limit, "File too large")  # the system's words


def test_io_error(folder):
    bad, good = fail(OSError(5, "Input/output error")), os.fsync
    assert_outlives(folder, lambda: setattr(os, "fsync", bad), lambda: setattr(os, "fsync", good),
                    "Input/output error")


def test_a_folder_that_cannot_be_written_is_refused(folder):
    make_noise(folder)
    (folder / "out").write_text("a file")
    for out_dir in ("out", "out/sub", "", "/proc/out", "n" * 300):
        assert_refused(folder, "out_dir", out_dir=out_dir)


@pytest.mark.parametrize("step, fault, left", [
    (4, lambda: shutil.rmtree("out"), None),
    (7, lambda: hook(os, "fsync", lambda fd: (  # the disk has other bytes than were written
        path := os.readlink(f"/proc/self/fd/{fd}")).endswith(".tmp") and damage(path, "page")), 6),
    (11, lambda: hook(train.Muon, "step", lambda opt, *_: (
        opt.param_groups[0]["params"][0].data.view(-1)[:1].fill_(math.inf))), 9)])
def test_what_is_not_saved_keeps_the_old_file_and_is_told(folder, step, fault, left):
    done = launch(folder, patch=at(step, fault))
    assert done.code == 1 and "not saved" in done.out and "iter 12:" in done.out, done.out
    assert left is None or step_saved(folder) == left


def test_an_output_that_cannot_be_written_ends_no_run(folder):
    def full():
        sys.stdout = open("/dev/full", "w")
    assert launch(folder, patch=full).code == 0
    assert_same(folder, a_run())


def test_order_of_a_save(folder):
    """Write, fsync, read back, replace, fsync the folder: the old file is whole at any moment."""
    def trace():
        hook(torch, "save", lambda state, f: print("did write", f.name))
        hook(os, "fsync", lambda fd: print("did fsync", os.path.basename(
            os.readlink(f"/proc/self/fd/{fd}"))))
        hook(train, "check_file", lambda path: print("did check", path))
        hook(os, "replace", lambda a, b: print("did replace", b))
    done = launch(folder, patch=at(11, trace), eval_interval=0, log_interval=0)
    assert re.findall("^did (.*)", done.out, re.M) == [
        "write out/ckpt.pt.tmp", "fsync ckpt.pt.tmp", "check out/ckpt.pt.tmp",
        "replace out/ckpt.pt", "fsync out"]


def test_not_finite_on_one_process_stops_all(folder):
    """No update on any, the checkpoint stays, and a resume is exact."""
    nan, settings = scaled(math.nan, lambda it: it == 7), dict(world=2, dropout=0.2)
    done = launch(folder, patch=lambda: nan() if train.RANK == 1 else None, **settings)
    assert done.codes == [1, 1] and done.out.count("not finite") == 1 and step_saved(folder) == 6
    assert_ends_well(folder, **settings)


# ---- signals and torchrun

@pytest.mark.parametrize("sig, code", [(signal.SIGTERM, 143), (signal.SIGINT, 130)])
def test_signal_to_one_rank(folder, sig, code):
    done = launch(folder, patch=at(6, send(sig), [1]), world=2)
    assert done.codes == [code] * 2 and step_saved(folder) == 7, done.outs
    assert "after step 7" in done.out and "--init_from=resume --out_dir=out" in done.out
    assert_ends_well(folder, world=2)


def test_second_signal_leaves_at_once(tmp_path):
    """But launchers pass a signal on that all got: what comes within a second is one."""
    term = send(signal.SIGTERM)
    assert launch(tmp_path / "a", patch=at(6, lambda: (term(), term()))).code == 143
    assert step_saved(tmp_path / "a") == 7
    done = launch(folder := tmp_path / "b", patch=at(6, lambda: (term(), time.sleep(1.1), term())))
    assert done.code in (-15, 143) and step_saved(folder) == 6
    assert_ends_well(folder)


@pytest.mark.parametrize("n, step", [(1, 4), (7, 8), (9, 12), (12, 12)])
def test_signal_cuts_an_evaluation_short(folder, n, step):
    """4 forward passes make one evaluation here; the last one comes after the last step."""
    count = itertools.count(1)
    done = launch(folder, patch=lambda: hook(train.GPT, "forward", lambda net, *_: net.training or (
        print("evaluating"), next(count) == n and send(signal.SIGTERM)())))
    assert done.code == 143 and f"after step {step}" in done.out, done.out
    assert done.out.count("evaluating") == n and f"step {step}: train loss" not in done.out
    assert_ends_well(folder, but=["val_loss"])


@pytest.mark.parametrize("where, sig, codes", [  # while the model is made, or just before step 1
    ("make_optimizer", signal.SIGINT, [130]), ("make_optimizer", signal.SIGTERM, [-15, 143]),
    ("get_batch", signal.SIGTERM, [143])])
def test_signal_before_the_first_step(folder, where, sig, codes):
    """No checkpoint, and a start afterwards."""
    done = launch(folder, patch=lambda: hook(train, where, send(sig)))
    assert done.code in codes and not [*folder.glob("out/*.pt"), *folder.glob("out/*.tmp")]
    assert_ends_well(folder)


WORKER = """
import os, signal, sys
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
    """Start torchrun on two workers that train, and kill themselves at (step, rank) of deaths."""
    make_noise(folder)
    Path(folder, "worker.py").write_text(WORKER.format(deaths=list(deaths), signal=sig))
    return spawn(folder, "-m", "torch.distributed.run", *options, "--nproc_per_node=2",
                 "worker.py", *flags({**SMALL, **settings}), start_new_session=True)


def finish(*jobs):
    """The exit statuses and all outputs of launchers that end."""
    outs = [out for job in jobs for out in job.communicate(timeout=240)]
    return [job.returncode for job in jobs], "".join(outs)


def test_torchrun_restarts(folder):
    """A rank is killed, the launcher starts anew, the run ends as if it were not so."""
    codes, out = finish(torchrun(folder, "--standalone", "--max-restarts=3", dropout=0.2,
                                 deaths=[(5, 1), (10, 0)] if FULL else [(7, 1)]))
    assert codes == [0], out
    assert re.findall(r"resuming after step (\d+)", out) == (["4", "9"] if FULL else ["6"])
    assert_same(folder, a_run(world=2, dropout=0.2))


@pytest.mark.skipif(not FULL, reason="takes a minute")
def test_two_machines(tmp_path):
    """Two launchers equal one of four; one is killed, both are started again: the same again."""
    settings = dict(dropout=0.2, batch_size=8)
    def machines(folder, **how):
        port = free_port()
        return [torchrun(folder, "--nnodes=2", "--rdzv-backend=c10d", f"--rdzv-id={port}",
                         f"--rdzv-endpoint=127.0.0.1:{port}", **settings, **how) for _ in range(2)]
    reference = a_run(world=4, **settings)
    codes, out = finish(*machines(tmp_path / "a"))
    assert codes == [0, 0], out
    assert_same(tmp_path / "a", reference)
    b = tmp_path / "b"
    jobs = machines(b, deaths=[(7, r) for r in range(4)], sig=19)  # all stand still
    while len(list(b.glob("died7.*"))) < 4:
        assert all(job.poll() is None for job in jobs)
        time.sleep(0.1)
    victims = [int(p.name[3:]) for p in b.glob("pid*")]
    parents = {pid: int(Path(f"/proc/{pid}/stat").read_text().split()[3]) for pid in victims}
    os.kill(jobs[1].pid, signal.SIGKILL)  # the machine dies: its launcher and its workers
    for pid in victims:
        os.kill(pid, signal.SIGKILL if parents[pid] == jobs[1].pid else signal.SIGCONT)
    codes, out = finish(*jobs)
    assert codes[0], out
    codes, out = finish(*machines(b))
    assert codes == [0, 0] and "resuming after step 6\n" in out, out
    assert_same(b, reference)


# ---- the folder of a run: what may be resumed and what may not, what fails beside it

def test_lock(folder):
    """A second trainer in a folder is refused; a dead one holds nothing."""
    (pid,) = start(folder, patch=at(7, send(signal.SIGSTOP)))
    os.waitpid(pid, os.WUNTRACED)
    for init_from in ("auto", "scratch", "resume"):
        assert_refused(folder, "out", "another process", init_from=init_from)
    os.kill(pid, signal.SIGCONT)
    assert wait(folder, [pid]).codes == [0]
    assert_same(folder, a_run())


def test_fresh_start_keeps_the_old_run(folder):
    clone(a_run(), folder)
    before = {p.name: p.read_bytes() for p in (folder / "out").iterdir() if p.name != "lock"}
    theirs = [folder / "out/notes.tmp", folder / "out/table.csv"]  # not the trainer's
    for path in theirs:
        path.touch()
    done = launch(folder, init_from="scratch", seed=2)
    assert done.code == 0 and os.path.join("out", "old-1") in done.out
    assert {p.name: p.read_bytes() for p in (folder / "out/old-1").iterdir()} == before
    for path in theirs:
        path.unlink()  # is still there
    assert_ends_well(folder, init_from="scratch")
    assert load(folder, "out/old-2/ckpt.pt")["config"]["seed"] == 2


@pytest.mark.parametrize("how, words", [
    (dict(init_from="auto"), "already"), (dict(init_from="resume"), "already"),
    (dict(init_from="resume", eval_only=True, world=2), "val loss"),
    *((dict(init_from=name, eval_only=True), "val loss")
      for name in ("scratch", "auto", "resume", "out/best.pt"))], ids=str)
def test_a_resume_or_an_evaluation_does_not_change_a_complete_run(folder, how, words):
    clone(a_run(), folder)
    before = tree(folder)
    done = launch(folder, **how)
    assert set(done.codes) == {0} and words in done.out and "\niter " not in done.out, done.outs
    assert tree(folder) == before
    if how["init_from"] == "resume" and "eval_only" in how:
        shown = float(re.search(r"val loss ([\d.]+)", done.out)[1])
        assert shown == pytest.approx(column(folder, "val_loss")[-1], abs=1e-4)


def test_kept_copies(folder):
    assert launch(folder, keep_checkpoints=2, checkpoint_interval=2).code == 0
    names = sorted(p.name for p in folder.glob("out/*.pt"))
    assert names == ["best.pt", "ckpt.pt", "ckpt_10.pt", "ckpt_12.pt", "ckpt_8.pt"]
    assert os.path.samefile(folder / "out/ckpt.pt", folder / "out/ckpt_12.pt")
    assert [load(folder, f"out/ckpt_{n}.pt")["iter_num"] for n in (8, 10, 12)] == [8, 10, 12]
    assert launch(folder, keep_checkpoints=0, init_from="scratch").code == 0
    assert not list(folder.glob("out/ckpt_*"))


@pytest.mark.parametrize("half_a_row", [b"8,768,5.1", b"7,\xff\xfe\0"])
def test_resume_needs_no_other_flag_and_removes_what_is_half_written(folder, half_a_row):
    """The stored settings are the base; rows of the log after the restored step go, too."""
    clone(a_run(killed=True, dropout=0.2, seed=5), folder)
    for name in ("ckpt.pt.tmp", "best.pt.tmp"):
        (folder / "out" / name).write_bytes(b"half")
    with open(folder / "out/log.csv", "ab") as f:
        f.write(half_a_row)
    done = launch(folder, patch=at(6, lambda: print("left:", glob.glob("out/*.tmp"))), bare=True,
                  init_from="resume")
    assert done.code == 0 and "left: []" in done.out and "changed" not in done.out, done.out
    assert_same(folder, a_run(dropout=0.2, seed=5))


def test_a_file_of_weights_is_not_resumed(folder):
    clone(a_run(), folder)
    for path in folder.glob("out/ckpt*"):
        path.unlink()
    os.replace(folder / "out/best.pt", folder / "out/ckpt.pt")
    for init_from in ("resume", "auto"):
        assert_refused(folder, "optimizer", "--init_from=", init_from=init_from)
    assert launch(folder, init_from="out/ckpt.pt", out_dir="new").code == 0


def test_code_in_a_pickle_is_not_run(folder):
    clone(a_run(), folder)
    evil = type("Evil", (), {"__reduce__": lambda self: (os.mkdir, ("evil",))})()
    for path in [folder / "evil.pt", *folder.glob("out/ckpt*")]:
        torch.save({**load(a_run()), "extra": evil}, path)
    for init_from in ("resume", "auto", "evil.pt"):
        assert_refused(folder, init_from=init_from)


def test_another_shape_is_refused(folder):
    clone(a_run(), folder)
    for name, value in dict(OFF, n_layer=3, n_head=4, n_embd=64, block_size=8, bias=True,
                            tie_embeddings=True).items():
        assert_refused(folder, name, str(value), **{name: value})
    assert_refused(folder, "n_layer", "n_embd", n_layer=3, n_embd=64)


def test_changed_data_is_refused_unless_allowed_once(folder):
    clone(a_run(killed=True), folder)
    path = folder / "data/d/train.bin"
    path.write_bytes(path.read_bytes()[:-2] + b"\7\0")
    assert_refused(folder, "--allow_data_change=True", "data/d")
    assert launch(folder, allow_data_change=True).code == 0
    shutil.copytree(folder / "data/d", folder / "data/more")
    give("tokenizer", {"name": "gpt2"})(folder / "data/more/meta.json")
    assert_refused(folder, "--allow_data_change=True", "more", dataset="more", max_iters=20)


@pytest.mark.parametrize("world, given, words", [
    (2, dict(world=3), "not bit-exact from here: processes was 2, now 3"),
    (2, dict(world=1), "not bit-exact from here: processes was 2, now 1"),
    (1, dict(batch_size=2, gradient_accumulation_steps=3), "batch_size from 6 to 2")])
def test_another_share_of_the_same_work_goes_on_to_rounding(folder, world, given, words):
    clone(a_run(killed=True, world=world), folder)
    done = launch(folder, **given)
    assert set(done.codes) == {0} and words in done.out, done.outs
    close(load(folder)["model"], load(a_run())["model"], 1e-5)


def test_optimizer_settings_given_to_a_resume_are_used(folder):
    clone(a_run(killed=True), folder)
    done = launch(folder, weight_decay=0.3, beta1=0.8, learning_rate=0.5, lr_schedule="constant")
    assert done.code == 0 and "weight_decay from 0.1 to 0.3" in done.out and "beta1" in done.out
    state = load(folder)
    groups = state["optimizer"]["param_groups"]
    assert {g["weight_decay"] for g in groups} == {0.3, 0.0} == {state["config"]["weight_decay"], 0}
    assert {g["betas"][0] for g in groups} == {0.8} and rows(folder)[-1]["lr"] == 0.5


def test_wandb(folder):
    """A log that fails is left out with one warning; one that is not there is named."""
    wandb = types.SimpleNamespace(__spec__="here", init=lambda **kw: None, log=lambda row, step: (
        step >= 5 and fail(ConnectionError("planted"))()))
    done = launch(folder, patch=lambda: sys.modules.update(wandb=wandb), wandb_log=True)
    assert done.code == 0 and done.out.count("warning") == 1 and "planted" in done.out, done.out
    assert column(folder, "step") == list(range(1, 13))
    assert_refused(folder, "wandb", patch=lambda: sys.modules.update(wandb=None), wandb_log=True,
                   init_from="scratch")


def test_a_log_that_cannot_be_written_does_not_stop_training(folder):
    done = launch(folder, patch=at(5, lambda: (os.remove("out/log.csv"), os.mkdir("out/log.csv"))))
    assert done.code == 0 and done.out.count("warning") == 1, done.out
    assert not difference(load(folder), load(a_run()))
    done = launch(folder, max_iters=14)
    assert done.code == 0 and step_saved(folder) == 14 and "warning" in done.out, done.out


def test_out_of_memory_is_one_line_with_the_fix(folder):
    error = torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")
    done = launch(folder, patch=at(4, fail(error)))
    line = done.out.splitlines()[-1]
    assert done.code == 2 and line.startswith("train.py: ")
    assert all(word in line for word in ("batch_size=6", "block_size=16", "gradient_accumulation"))
    assert_ends_well(folder)


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
    def end(it):
        if it >= train.max_iters - 1 or it >= 2:
            train.max_iters, train.max_minutes, train.benchmark = it + 1, 0.0, False
    train.from_hugging_face, train.compiled = fail(OSError("offline")), lambda model, *a: model
    hook(train, "get_lr", end)


def fuzz(tmp_path, cases, change):
    """Run train.py `cases` times in a folder that holds data and a run; change(rng, folder) makes
    something wrong and returns the arguments."""
    rng, wrong = random.Random(0), []
    template, folder = tmp_path / "good", str(tmp_path / "run")
    launch(template, max_iters=2, checkpoint_interval=1)
    settings = flags({**SMALL, "max_iters": 3})
    shutil.copytree(template, folder)
    whole = tree(folder)
    for i in range(cases):
        args = change(rng, folder)
        before = tree(folder)
        pids = start(folder, *settings, *args, patch=sandbox, bare=True)
        code, out, _, _ = wait(folder, pids)
        after = tree(folder)
        same = after == before or "out of memory" in out
        if code not in (0, 1, 2) or "Traceback" in out or code == 2 and not same or (
                code == 1 and "finite" not in out and "not saved" not in out) or (
                code == 2 and out.count("train.py: ") != 1):
            last = [line for line in out.splitlines() if line][-1:]
            wrong.append(f"{code} {'' if same else 'CHANGED '}{args} {last}")
        if after != whole:
            shutil.rmtree(folder)
            shutil.copytree(template, folder)
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
                Path(folder, "config.py").write_text(rng.choice(FILES), encoding="utf-8")
                args.append(rng.choice(["config.py"] * 9 + ["no.py", "data", "out/ckpt.pt"]))
            else:
                args.append(rng.choice(["--{}={}"] * 19 + ["-{}={}", "--{}", "{}", "--{}=={}"])
                            .format(name, value))
        return args
    fuzz(tmp_path, 2000 if FULL else 100, change)


def mangle(rng, value, depth=0):
    """Drop or replace one thing somewhere inside a nest of dicts and lists."""
    keys = list(value) if isinstance(value, dict) else list(range(len(value))) if isinstance(
        value, (list, tuple)) else []
    if not keys or depth and rng.random() < 0.2:
        if isinstance(value, torch.Tensor) and rng.random() < 0.7:
            return rng.choice([value.flatten()[:-1], value.double(), value * math.nan if
                               value.is_floating_point() else value, value[None], value.int()])
        return rng.choice([None, -1, 0, 1, 3, 0.5, math.nan, math.inf, 2 ** 70, "", "x", [], {},
                           [1, "a"], {"a": 1}, True])
    key = rng.choice(keys)
    if isinstance(value, dict):
        if rng.random() < 0.15:
            return {k: v for k, v in value.items() if k != key}
        return {**value, key: mangle(rng, value[key], depth + 1)}
    changed = [mangle(rng, v, depth + 1) if i == key else v for i, v in enumerate(value)]
    return type(value)(changed[:-1] if rng.random() < 0.1 else changed)


def harm(rng, path):
    """Remove, replace, cut or change a file."""
    kind = rng.randrange(10)
    if kind < 2:
        path.unlink()
        if kind == 1:
            path.mkdir()
    elif kind == 2:
        path.write_bytes(rng.randbytes(rng.choice((0, 1, 2, 32, 33, 34, 36, 1001, 5000))))
    elif kind < 5:
        damage(path, "flip" if kind == 3 else rng.random(), rng)
    elif path.suffix == ".json":
        meta = mangle(rng, json.loads(path.read_text()))
        if rng.random() < 0.2 and isinstance(meta, dict):
            meta["tokenizer"] = {"name": "bpe", "pattern": "."}
        path.write_text(json.dumps(meta))
    elif path.suffix == ".pt":
        state = load(path.parent, path.name)
        torch.save(rng.choice([state["model"], *[mangle(rng, state) for _ in range(9)]]), path)
    else:
        ids = np.fromfile(path, "<u2")
        ids[rng.randrange(len(ids))] = rng.choice((0, 256, 257, 65535))
        ids[:rng.choice((16, 17, 18, 99999))].tofile(path)


def test_fuzz_data(tmp_path):
    def change(rng, folder):
        name = rng.choice(("train.bin", "val.bin", *["meta.json"] * 2))
        harm(rng, Path(folder, "data/d", name))
        return [f"--init_from={rng.choice(['scratch', 'resume'])}"]
    fuzz(tmp_path, 300 if FULL else 30, change)


def test_fuzz_checkpoints(tmp_path):
    def change(rng, folder):
        path = Path(folder, "out", rng.choice(("ckpt.pt", "best.pt")))
        harm(rng, path)
        if rng.random() < 0.7:  # no kept copy to fall back to
            for kept in Path(folder).glob("out/ckpt_*"):
                kept.unlink()
        return [f"--init_from={path if path.stem == 'best' else rng.choice(('resume', 'auto'))}"]
    fuzz(tmp_path, 300 if FULL else 30, change)


# ---- text and tokens

EOT = "<|endoftext|>"
VOCABULARY = "the cat saw a small red ball and it ran to the big tree where Tom sat".split()
ODD = {
    "BOM": "\ufeffHello there", "CRLF": "one\r\ntwo\r\n\r\nthree\rfour",
    "emoji": "a 👩‍👩‍👧‍👦 family 🇩🇪", "CJK": "中文字符，日本語の文章。", "NUL": "a\0b\0\0c",
    "combining": "e\u0301 \u200b\u200d \u2028 \ufffe \U0010ffff",
    "spaces": "   \t\t  \n\n\n   x" + " " * 5000, "one long word": "ab" * 5000,
    "special tokens": "<|endoftext|> and <|fim_prefix|> are text here",
    "no final newline": "the end", "digits": "1234567890" * 20}


def stories(count, seed=0):
    draw = random.Random(seed)
    return [" ".join(draw.choices(VOCABULARY, k=draw.randint(8, 60))).capitalize() + ".\n"
            for _ in range(count)]


def joined(documents):
    return f"{EOT}\n".join(documents)


@pytest.fixture
def prep(tmp_path, monkeypatch):
    """prep(text or None, **settings): run prepare.py in an empty folder, which is the working
    folder from here on; what it prints. Where it should be refused, in one line."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["prepare.py"])
    def run(text=None, refused=False, **settings):
        if text is not None:
            Path("in.txt").write_bytes(text if type(text) is bytes else text.encode())
            settings = {"input": "in.txt", **settings}
        status, out = call(prepare, ".", {"dataset": "d", "vocab_size": 300, "processes": 1,
                                          **settings})
        assert status == (2 if refused else 0) and (not refused or out.count("\n") == 1), out
        return out
    return run


def meta():
    return prepare.read_meta("data/d")


def tokens(split):
    return np.fromfile(f"data/d/{split}.bin", "<u2").tolist()


def documents(split):
    """The documents of a split, decoded; what follows the last end of text must be nothing."""
    encoding, ids = prepare.load_tokenizer(meta()["tokenizer"]), tokens(split)
    assert meta()["eot"] == encoding.eot_token == encoding.n_vocab - 1
    starts = [0] + [i + 1 for i, token in enumerate(ids) if token == encoding.eot_token]
    *found, rest = [encoding.decode_bytes(ids[a:b]).decode() for a, b in zip(
        starts, [start - 1 for start in starts[1:]] + [len(ids)])]
    if rest:  # only where the end of the one document is the val split
        assert split == "train" and max(tokens("val")) == encoding.eot_token
        found.append(rest)
    return found


def both_splits():
    return documents("train") + documents("val")


try:
    GPT2 = prepare.tiktoken.get_encoding("gpt2")
except Exception:
    GPT2 = None
NEEDS_GPT2 = pytest.mark.skipif(not GPT2, reason="no GPT-2 vocabulary, see TIKTOKEN_CACHE_DIR")
TOKENIZERS = pytest.mark.parametrize("tokenizer", [
    "bpe", "byte", pytest.param("gpt2", marks=NEEDS_GPT2)])


@pytest.mark.parametrize("name, shipped", [
    ("gpt2", openai_public.r50k_pat_str),
    ("bpe", r"'(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?+\p{L}++|\p{N}{1,3}+|"
            r" ?[^\s\p{L}\p{N}]++[\r\n]*+|\s++$|\s*[\r\n]|\s+(?!\S)|\s")], ids=["gpt2", "bpe"])
def test_words_are_cut_as_the_pattern_that_tiktoken_ships_cuts_them(name, shipped):
    """Seen by a vocabulary of the words that another regex engine finds: one token each."""
    rng, parts = random.Random(1), [*"ab SdtVErl'0.-!\n\r\t\u00a0\u00e9\u017f\u0663\u2028\u4e2d",
                                    "  ", "1234", "'ll", "e\u0301", "\U0001f600"]
    for _ in range(1000):
        text = "".join(rng.choices(parts, k=rng.randrange(1, 40)))
        words = [word.encode() for word in regex.findall(shipped, text)]
        tokens = dict.fromkeys([bytes([i]) for i in range(256)] + words)
        encoding = prepare.tiktoken.Encoding(
            name, pat_str=prepare.PATTERNS[name], special_tokens={},
            mergeable_ranks={token: rank for rank, token in enumerate(tokens)})
        assert encoding.decode_tokens_bytes(encoding.encode(text)) == words


@TOKENIZERS
@pytest.mark.parametrize("name", ODD)
def test_odd_text_comes_back_byte_for_byte(prep, tokenizer, name):
    text = ODD[name] * 3
    prep(text, tokenizer=tokenizer, separator="")
    assert "".join(both_splits()) == text  # one document: the head is train, the tail is val
    if EOT not in text:
        prep(joined([text + str(i) for i in range(20)]), tokenizer=tokenizer)
        assert sorted(both_splits()) == sorted(text + str(i) for i in range(20))


@TOKENIZERS
@pytest.mark.parametrize("text, given, found, words", [
    (f"one{EOT}two\n\nthree{EOT}four", dict(), ["one", "two\n\nthree", "four"], ""),
    (f"one{EOT}two\n\nthree{EOT}four", dict(separator=r"\n\n"), [f"one{EOT}two", f"three{EOT}four"],
     ""),
    (f"\na{EOT}\n\nb\n{EOT}\nc\n{EOT}d{EOT}\n", dict(), ["\na", "\nb\n", "c\n", "d"], ""),
    (f"a{EOT}\r\nb\r\n{EOT}\r\nc", dict(), ["a", "b\r\n", "c"], ""),
    (b"caf\xe9 and \xff\xfe<|endoftext|>more", dict(errors="replace"),
     ["caf\ufffd and \ufffd\ufffd", "more"], ""),
    (f"a{EOT}b{EOT}", dict(), ["a", "b"], "dropped 0 empty"),
    (f"first{EOT}" + EOT * 100_000 + f" \r\n\t{EOT}last{EOT}\n", dict(), ["first", "last"],
     "dropped 100,001 empty")], ids=range(7))
def test_documents_are_what_separators_part(prep, tokenizer, text, given, found, words):
    """With the line break behind a separator, and without blank documents."""
    assert words in prep(text, tokenizer=tokenizer, **given)
    assert sorted(both_splits()) == sorted(found)
    assert sum(meta()[s]["bytes"] for s in ("train", "val")) == sum(len(t.encode()) for t in found)


@pytest.mark.parametrize("separator", ["\n\n", "aba", "\r\n", "<e>", ""])
def test_documents_do_not_depend_on_where_a_read_ends(monkeypatch, separator):
    monkeypatch.setattr(prepare, "separator", separator)
    draw = random.Random(separator)
    for _ in range(300):
        text, found = "".join(draw.choices(["a", "b", "\n", "\r", "<e>"], k=60)), set()
        for longest in (2, 3, 5, 7, 1000):
            monkeypatch.setattr(prepare, "LONGEST", longest)
            parts = prepare.pieces(io.StringIO(text, newline=""))
            found.add("".join(t.decode() + "|" * ends for t, ends in parts))
        assert len(found) == 1


@pytest.mark.parametrize("text", ["x" * 3_000_000, "中" * 1_000_000, " " * 2_000_000 + "x",
                                  "some words " * 300_000], ids=lambda text: text[-2:])
def test_one_long_line_comes_back(prep, text):
    prep(text)
    assert "".join(both_splits()) == text


def test_documents_longer_than_a_block_stay_whole(prep):
    short = dict(BLOCK=64, LONGEST=64)
    prep(blank_end := "x" * 500 + "\n" * 200, **short)
    assert "".join(both_splits()) == blank_end
    texts = [f"{n} " + "é" * n + " end" for n in [*range(20, 70), 127, 128, 129, 500, 1001]]
    prep(joined(texts), **short)
    assert sorted(both_splits()) == sorted(texts)
    splits = {text: split for split in ("train", "val") for text in documents(split)}
    prep("prefix" * 5 + EOT + joined(texts[::-1]), **short)  # elsewhere in the file, not split
    for split in ("train", "val"):
        assert all(splits.get(text, split) == split for text in documents(split))


def test_splits_are_by_document_in_order_and_stay_when_text_is_added(prep):
    texts = [f"{i} {t}" for i, t in enumerate(stories(400))]
    prep(joined(texts[:200]))
    old = {split: documents(split) for split in ("train", "val")}
    for found in old.values():
        assert found == sorted(found, key=texts.index)
    assert 5 < len(old["val"]) < 40 and sorted(both_splits()) == sorted(texts[:200])
    random.Random(1).shuffle(texts)
    prep(joined(texts), tokenizer="byte", processes=2)
    assert all(set(old[split]) <= set(documents(split)) for split in old)
    assert len(both_splits()) == 400


@pytest.mark.parametrize("fraction", [0.1, 0.25, 0.5])
def test_one_document_is_split_at_its_tail_and_byte_tokens_are_bytes(prep, fraction):
    text = "".join(stories(100))
    prep(text, val_fraction=fraction, tokenizer="byte")
    cut = int(len(text) * (1 - fraction))
    assert tokens("train") == list(text[:cut].encode()) and meta()["vocab_size"] == 257
    assert tokens("val") == [*text[cut:].encode(), 256] and meta()["eot"] == 256
    assert not os.path.exists("data/d/tokenizer.tiktoken")
    for pad in range(4):  # at a character
        prep("x" * pad + "😀" * 25, val_fraction=fraction, tokenizer="byte")
        assert documents("val")[0] and "".join(both_splits()) == "x" * pad + "😀" * 25


def test_no_split_is_ever_empty(prep):
    for count in range(2, 8):
        texts = stories(count, seed=count)
        for fraction in (0.01, 0.99):
            prep(joined(texts), val_fraction=fraction, tokenizer="byte")
            assert documents("train") and documents("val")
            assert sum(map(len, both_splits())) == sum(map(len, texts))


def test_val_input_is_the_validation_split_and_bpe_does_not_see_it(prep):
    train, val = stories(30, 1), ["zqzqzqzqzq " * 500, *stories(5, 2)]
    Path("v.txt").write_text(joined(val))
    prep(joined(train + val[:1]), val_input="v.txt", dedup=True)
    assert documents("train") == train and documents("val") == val
    vocabulary = prepare.load_tokenizer(meta()["tokenizer"]).token_byte_values()
    assert any(b" t" in t for t in vocabulary) and not any(b"zq" in t for t in vocabulary)


def test_the_bpe_sample_is_bounded_and_spread(prep):
    seen, train_bpe = [], prepare.train_bpe
    texts = [f"{i} {t}" for i, t in enumerate(stories(20_000))]
    prep(joined(texts), bpe_sample_mb=1, BLOCK=1 << 10,
         train_bpe=lambda sample: train_bpe(seen.append(t) or t for t in sample))
    assert 0.4e6 < sum(len(t.encode()) for t in seen) < 1.1e6 and len(joined(texts)) > 2e6
    assert max(int(t.split()[0]) for t in seen if t) > 19_000  # not the beginning only


@TOKENIZERS
def test_same_result_for_any_number_of_processes(prep, tokenizer):
    text, results = joined(stories(8000) + ["long " * 240_000] + stories(500, 1)), []
    assert len(text) > 4 * prepare.BLOCK  # enough for two workers
    for processes in (1, 2):
        prep(text, tokenizer=tokenizer, processes=processes)
        results.append(tree("data"))
    assert results[0] == results[1]


# ---- files, formats and refusals

def test_meta_and_tokens_agree_with_an_independent_count(prep):
    texts = [f"{t} é😀  \n {i}" for i, t in enumerate(stories(300))]
    prep(joined(texts + ["", " \n "]), vocab_size=350, BLOCK=1 << 12)  # many units of work
    spec = meta()["tokenizer"]
    assert json.loads(json.dumps(spec)) == spec and spec["name"] == "bpe"
    assert (meta()["source"], meta()["vocab_size"], meta()["eot"]) == ("in.txt", 350, 349)
    assert sum(meta()[s]["bytes"] for s in ("train", "val")) == sum(len(t.encode()) for t in texts)
    encoding = prepare.load_tokenizer(spec)
    for split in ("train", "val"):
        raw, found = Path(f"data/d/{split}.bin").read_bytes(), documents(split)
        assert tokens(split) == [i for t in found for i in [*encoding.encode_ordinary(t), 349]]
        assert meta()[split] == {"tokens": len(raw) // 2, "documents": len(found),
                                 "bytes": sum(len(t.encode()) for t in found),
                                 "sha256": hashlib.sha256(raw).hexdigest()}
    lines = [line.split() for line in Path("data/d/tokenizer.tiktoken").read_text().splitlines()]
    assert [int(rank) for _, rank in lines] == list(range(349))
    assert len({token for token, _ in lines}) == 349


def test_a_small_text_gives_the_vocabulary_it_can(prep):
    out = prep("abababab" * 4, vocab_size=5000)
    assert meta()["vocab_size"] < 300 and f"vocabulary {meta()['vocab_size']}" in out
    assert max(tokens("val")) == meta()["eot"] == meta()["vocab_size"] - 1


def test_folders_globs_gz_jsonl_and_lists(prep):
    texts = stories(11) + [f"a {EOT} b", "\nwith a line break first"]  # not separated in .jsonl
    lines = [json.dumps({"body": t}) for t in texts]
    os.makedirs("in/sub")
    os.mkdir("in/.git")
    os.mkfifo("in/pipe")
    for link in "in/again", "in/sub/again", "in/sub/more":
        os.symlink(os.path.abspath("in"), link)
    for name, content in {
            "in/a.txt": joined(texts[:2]), "in/b.txt.gz": joined(texts[2:4]),
            "in/c.jsonl": "\n\n".join([*lines[4:6], *lines[11:], ""]),
            "in/sub/d.jsonl.gz": "\n".join(lines[6:8]), "in/sub/e.md": texts[8],
            "in/.hidden": "not this", "in/.git/a": "nor this", "x1.txt": texts[9], "x2.txt": "",
            "y.txt": texts[10]}.items():
        content = content.encode()
        Path(name).write_bytes(gzip.compress(content) if name.endswith(".gz") else content)
    prep(input="in,x*.txt,y.txt", text_field="body")
    assert sorted(both_splits()) == sorted(texts)
    for link in Path("in").rglob("again"):
        link.unlink()
    os.remove("in/sub/more")
    prep(input="in/**/*.gz", text_field="body", tokenizer="byte")
    assert sorted(both_splits()) == sorted(texts[2:4] + texts[6:8])


def test_standard_input(tmp_path, monkeypatch):
    texts = stories(30)
    status, out, err = command(tmp_path, f"{REPO}/prepare.py", "--input=-", "--dataset=d",
                               "--vocab_size=300", input=joined(texts))
    monkeypatch.chdir(tmp_path)
    assert status == 0 and err == "" and sorted(both_splits()) == sorted(texts)
    files = ["meta.json", "tokenizer.tiktoken", "train.bin", "val.bin"]
    assert sorted(os.listdir("data/d")) == files


def test_dedup_drops_exact_copies(prep):
    texts = [f"{t}{i}" for i, t in enumerate(stories(50))] + ["long" * 300_000]
    out = prep(joined(texts * 2 + texts[:1]), tokenizer="byte", dedup=True)
    assert sorted(both_splits()) == sorted(texts) and "52 duplicate" in out


LATIN = "é".encode() * 500_000 + b"abc\xe9 x" + b"y" * 99_999
INPUTS = {
    "in.txt": b"some text", "zero.txt": b"", "blank.txt": b" \n\n ", "one.txt": b"x",
    "data/file": b"in the way", "bad.jsonl": b'{"text": "good"}\n{"text": \n',
    "good.jsonl": b'{"text": "good"}\n', "number.jsonl": b'{"text": 5}\n',
    "surrogate.jsonl": b'{"text": "\\ud800"}\n', "plain.gz": b"not gzip",
    "cut.gz": gzip.compress(bytes(range(256)))[:100], "latin.txt": LATIN,
    "latin.txt.gz": gzip.compress(LATIN), "latin.jsonl": b'{"text": "good"}\n{"text":"\xe9"}\n',
    "cut.txt": "abcde中".encode()[:-1]}


@pytest.mark.parametrize("given, words", [
    (dict(input="nothing.txt"), "nothing.txt"), (dict(input="*.nothing"), "*.nothing"),
    (dict(input="zero.txt"), "zero.txt"), (dict(input="blank.txt"), "blank.txt"),
    (dict(input="empty"), "empty"), (dict(input="one.txt"), "one.txt"),
    (dict(val_input="nothing.txt"), "nothing.txt"), (dict(val_input="zero.txt"), "val split"),
    (dict(tokenizer="gpt3"), "tokenizer"), (dict(vocab_size=256), "vocab_size"),
    (dict(vocab_size=65537), "vocab_size"), (dict(val_fraction=0.0), "val_fraction"),
    (dict(val_fraction=1.0), "val_fraction"), (dict(errors="ignore"), "errors"),
    (dict(processes=-1), "processes"), (dict(bpe_sample_mb=0), "bpe_sample_mb"),
    (dict(input="bad.jsonl"), "bad.jsonl, line 2"), (dict(input="plain.gz"), "plain.gz"),
    (dict(input="good.jsonl", text_field="body"), "good.jsonl, line 1"),
    (dict(input="number.jsonl"), "number.jsonl, line 1"), (dict(input="cut.gz"), "cut.gz"),
    (dict(input="surrogate.jsonl"), "surrogate.jsonl, line 1"),
    (dict(input="latin.txt"), "latin.txt: byte 1000003 "),
    (dict(input="latin.txt.gz"), "latin.txt.gz: byte 1000003 "),
    (dict(input="latin.jsonl"), "latin.jsonl: byte 26 "), (dict(input="cut.txt"), "byte 5 "),
    (dict(input="http://127.0.0.1:9/x.txt"), "127.0.0.1:9"), (dict(input="http://[x"), "IPv6"),
    (dict(dataset="file/x"), "file/x")])
def test_refusals_are_one_line_and_change_nothing(prep, given, words):
    prep(joined(stories(20)), dataset="old")
    os.mkdir("empty")
    for name, content in INPUTS.items():
        Path(name).write_bytes(content)
    before = tree()
    for dataset in ("old", "new"):
        out = prep(refused=True, **{"dataset": dataset, "input": "in.txt", **given})
        assert words in out and "Traceback" not in out and tree() == before, out


BYTES = [f"{REPO}/prepare.py", "--input=in.txt", "--dataset=d", "--tokenizer=byte", "--processes=2"]


@pytest.mark.parametrize("processes", [1, 2])
def test_an_error_of_a_worker_is_one_line_with_its_place(prep, processes):
    def gather(*args, real=prepare.gather):
        jobs, counts = real(*args)
        jobs["train"][1:] = [("nowhere", *places) for _, *places in jobs["train"][1:]]
        return jobs, counts
    out = prep(joined(stories(15_000)), refused=True, tokenizer="byte", processes=processes,
               gather=gather)
    assert "nowhere, byte " in out and not os.path.exists("data")


def give(place, value):
    """A harm: put a value into meta.json, or remove what is there."""
    def act(path):
        meta = json.loads(path.read_text())
        *parents, key = place.split("/")
        parent = meta[parents[0]] if parents else meta
        parent[key] = value
        if value == "missing":
            del parent[key]
        path.write_text(json.dumps(meta))
    return act


@pytest.mark.parametrize("name, harm", [
    ("meta.json", lambda p: (p.unlink(), p.mkdir())), ("meta.json", lambda p: os.truncate(p, 90)),
    ("meta.json", lambda p: p.write_bytes(b"\xff\0")), ("meta.json", lambda p: p.write_text("[1]")),
    ("tokenizer.tiktoken", lambda p: (p.unlink(), p.mkdir())),
    ("tokenizer.tiktoken", lambda p: os.truncate(p, 2000)),
    ("tokenizer.tiktoken", lambda p: p.write_text("not a tokenizer\n")),
    ("tokenizer.tiktoken", lambda p: p.write_text(p.read_text().replace("/w== 255", "AA== 255"))),
    ("tokenizer.tiktoken", Path.unlink),
    *[("meta.json", give(place, value)) for value in ("missing", None, [], -1, "x", 0.5, 0)
      for place in ("source", "vocab_size", "eot", "tokenizer", "val", "tokenizer/name",
                    "val/tokens", "val/bytes")
      if (place, value) not in (("source", "x"), ("eot", 0))]])
def test_a_damaged_data_folder_is_refused_in_one_line(prep, name, harm):
    prep(joined(stories(50)))
    harm(Path("data/d", name))
    status, out, err = outcome(prepare.read_meta, "data/d")
    assert status == 2 and out == "" and err.count("\n") == 1, err
    assert f"data/d/{name}" in err and "python prepare.py --input=TEXT --dataset=d " in err


@pytest.mark.parametrize("room", [100_000, 300_000])  # the copy of the text fails, a bin fails
def test_a_full_disk_ends_in_one_line_and_leaves_the_old_data_set(tmp_path, room):
    (tmp_path / "in.txt").write_text(joined(stories(2_000))[:250_000])
    assert command(tmp_path, *BYTES)[0] == 0
    before = tree(tmp_path)
    status, _, err = command(tmp_path, *BYTES, preexec_fn=lambda: limit(room))
    assert status == 2 and err.count("\n") == 1 and "large" in err and tree(tmp_path) == before


def test_gpt2_out_of_reach_says_what_to_do(prep, monkeypatch):
    monkeypatch.setattr(prepare, "gpt2", fail(ConnectionError("no network")))
    out = prep("some text", tokenizer="gpt2", refused=True)
    assert "--tokenizer=bpe" in out and "TIKTOKEN_CACHE_DIR" in out and not os.path.exists("data")


# ---- kill, Ctrl-C, a worker's death, a cut download

def assert_consistent(folder):
    """Where train.bin stands, the other files are there and belong to it."""
    if os.path.exists(f"{folder}/train.bin"):
        meta = json.loads(Path(folder, "meta.json").read_text())
        for split in ("train", "val"):
            raw = Path(folder, f"{split}.bin").read_bytes()
            assert hashlib.sha256(raw).hexdigest() == meta[split]["sha256"]
        is_bpe = meta["tokenizer"]["name"] == "bpe"
        assert os.path.exists(f"{folder}/tokenizer.tiktoken") == is_bpe


def test_kill_at_any_moment_leaves_no_wrong_file(tmp_path):
    (tmp_path / "in.txt").write_text(joined(stories(5_000)))
    bpe, begin = [*BYTES[:3], "--vocab_size=400"], time.monotonic()
    assert command(tmp_path, *bpe)[0] == 0
    took, good = time.monotonic() - begin, tree(tmp_path)
    for i in range(5):
        child = spawn(tmp_path, *bpe, *["--tokenizer=byte"] * (i % 2))
        time.sleep(took * (i + 1) / 5)
        child.kill()
        child.communicate()
        assert_consistent(tmp_path / "data/d")
    assert command(tmp_path, *bpe)[0] == 0 and tree(tmp_path) == good


@pytest.mark.parametrize("operation, count", [("remove", 4), ("replace", 3)])
def test_a_stop_between_any_two_moves_leaves_no_wrong_data_set(prep, monkeypatch, operation, count):
    for stop in range(count):
        prep(joined(stories(50)))
        real, moves = getattr(os, operation), itertools.count()
        with monkeypatch.context() as m:
            m.setattr(os, operation, lambda *paths: (
                real if next(moves) < stop else fail(OSError("stopped")))(*paths))
            assert "stopped" in prep(joined(stories(50, 1)), tokenizer="byte", refused=True)
        assert_consistent("data/d")


def workers(pid):
    """The /proc folders of the processes that prepare.py has started."""
    found = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            parent = int(stat.read_text().rsplit(")", 1)[1].split()[1])
            if parent == pid and "spawn_main" in stat.with_name("cmdline").read_text():
                found.append(stat.parent)
    return found


def when(child, ready):
    while not ready():
        assert child.poll() is None
        time.sleep(0.01)


@pytest.mark.parametrize("moment", ["reading", "encoding"])
def test_ctrl_c_ends_in_one_line(tmp_path, moment):
    (tmp_path / "in.txt").write_text(joined(stories(40_000)))
    child = spawn(tmp_path, *BYTES, start_new_session=True, preexec_fn=lambda: (
        signal.signal(signal.SIGINT, signal.SIG_DFL)))  # a background shell ignores it
    if moment == "reading":
        when(child, (tmp_path / "data/d/.tmp/train.txt").exists)
    else:
        when(child, lambda: len(workers(child.pid)) == 2)
        time.sleep(0.15)
    os.killpg(child.pid, signal.SIGINT)
    _, err = child.communicate()
    assert child.returncode == 130 and err.count("\n") == 1 and "interrupted" in err, err
    assert not os.path.exists(tmp_path / "data")


@pytest.mark.parametrize("pause", [0, 0.02, 0.2])
def test_a_second_ctrl_c_ends_at_once(tmp_path, pause):
    (tmp_path / "in.txt").write_text(joined(stories(40_000)))
    child = spawn(tmp_path, *BYTES, start_new_session=True, preexec_fn=lambda: (
        signal.signal(signal.SIGINT, signal.SIG_DFL)))
    when(child, lambda: len(workers(child.pid)) == 2)
    started = workers(child.pid)
    for _ in range(2):
        os.killpg(child.pid, signal.SIGINT)
        time.sleep(pause)
    _, err = child.communicate(timeout=30)
    assert child.returncode == 130 and "Traceback" not in err, err
    for _ in range(100):
        if any(map(os.path.exists, started)):
            time.sleep(0.1)
    assert not any(map(os.path.exists, started))
    assert command(tmp_path, *BYTES)[0] == 0


def test_one_prepare_at_a_time_in_a_data_folder(tmp_path):
    (tmp_path / "in.txt").write_text(joined(stories(20_000)))
    first = spawn(tmp_path, *BYTES)
    when(first, (tmp_path / "data/d/.tmp/train.txt").exists)
    status, _, err = command(tmp_path, *BYTES)
    assert status == 2 and "another prepare.py" in err and err.count("\n") == 1
    first.communicate()
    assert first.returncode == 0
    before = tree(tmp_path)
    status, out, _ = command(tmp_path, *BYTES)
    assert status == 0 and tree(tmp_path) == before and "data/d (replaced): " in out


def test_ctrl_c_while_workers_start_is_not_lost(prep, monkeypatch):
    pool = prepare.concurrent.futures.ProcessPoolExecutor
    start = pool.map
    monkeypatch.setattr(
        pool, "map", lambda *args: (start(*args), signal.raise_signal(signal.SIGINT))[0])
    before = signal.signal(signal.SIGINT, prepare.stop)
    with pytest.raises(AssertionError, match="130"):  # prep() expects 0
        prep(joined(stories(20_000)), processes=2, tokenizer="byte")
    signal.signal(signal.SIGINT, before)
    assert not os.path.exists("data")


@pytest.mark.parametrize("victim", ["worker", "parent"])
def test_a_dead_worker_is_an_error_and_no_worker_outlives_its_parent(tmp_path, victim):
    (tmp_path / "in.txt").write_text(joined(stories(30_000)))
    child = spawn(tmp_path, *BYTES)
    when(child, lambda: workers(child.pid))
    time.sleep(0.5)
    started = workers(child.pid)
    os.kill(int(started[0].name) if victim == "worker" else child.pid, signal.SIGKILL)
    _, err = child.communicate(timeout=30)
    if victim == "worker":
        assert child.returncode == 2 and err.count("\n") == 1, err
        assert not os.path.exists(tmp_path / "data")
    for _ in range(100):
        if any(map(os.path.exists, started)):
            time.sleep(0.1)
    assert not any(map(os.path.exists, started))


class Server(http.server.BaseHTTPRequestHandler):
    """Serves `files`; `cuts` answers end half-way; `ranges` says whether Range is honoured."""
    files, cuts, ranges, slow, status, log = {}, 0, True, 0.0, 200, []
    def do_GET(self):
        data, asked, begin = self.files.get(self.path), self.headers.get("Range"), 0
        self.log.append(asked)
        if data is None or self.status != 200:
            return self.send_error(404 if data is None else self.status)
        if self.ranges and asked:
            begin = int(asked.removeprefix("bytes=").removesuffix("-"))
            if begin >= len(data):
                return self.send_error(416)
            self.send_response(206)
            self.send_header("Content-Range", f"bytes {begin}-{len(data) - 1}/{len(data)}")
        else:
            self.send_response(200)
        self.send_header("Content-Length", str(len(data) - begin))
        self.end_headers()
        stop = len(data)
        if self.cuts:
            type(self).cuts -= 1
            stop = begin + (len(data) - begin) // 2
        for i in range(begin, stop, 10_000):
            self.wfile.write(data[i:min(i + 10_000, stop)])
            self.wfile.flush()
            time.sleep(self.slow)


@pytest.fixture
def server(monkeypatch):
    handler = type("Handler", (Server,), {"log": [], "log_message": lambda *_: None})
    httpd = http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler)
    threading.Thread(target=httpd.serve_forever, args=(0.02,), daemon=True).start()
    handler.url = f"http://127.0.0.1:{httpd.server_port}/"
    handler.text = joined(stories(500)).encode()
    handler.files = {"/TinyStoriesV2-GPT4-train.txt": handler.text,
                     "/TinyStoriesV2-GPT4-valid.txt": joined(stories(50, 1)).encode()}
    monkeypatch.setattr(prepare, "TINYSTORIES", handler.url + "TinyStoriesV2-GPT4-")
    handler.kept = Path("data/d/{:08x}-TinyStoriesV2-GPT4-train.txt".format(
        zlib.crc32(f"{handler.url}TinyStoriesV2-GPT4-train.txt".encode())))
    yield handler
    httpd.shutdown()
    httpd.server_close()


@pytest.mark.parametrize("how", [dict(), dict(slow=0.02), dict(cuts=1), dict(cuts=5),
                                 dict(cuts=1, ranges=False), dict(part=1234), dict(part=10 ** 9)],
                         ids=str)
def test_tinystories_is_downloaded_whole_and_kept(prep, server, how):
    [setattr(server, name, value) for name, value in how.items()]
    if "part" in how:  # of an earlier run that was stopped; and something else, which is too long
        os.makedirs("data/d")
        Path(f"{server.kept}.part").write_bytes((server.text + b"too long")[:server.part])
    prep(TIMEOUT=2.0)
    assert "part" not in how or ("bytes=1234-" if server.part == 1234 else "bytes=0-") in server.log
    assert server.kept.read_bytes() == server.text and not glob.glob("data/d/*.part")
    assert documents("val") == stories(50, 1) and documents("train") == stories(500)
    assert meta()["source"] == "TinyStoriesV2-GPT4-train.txt"
    asked = len(server.log)
    prep()
    assert len(server.log) == asked


def test_a_url_as_input(prep, server):
    server.cuts = 1
    prep(input=server.url + "TinyStoriesV2-GPT4-train.txt", val_fraction=0.2)
    assert sorted(both_splits()) == sorted(stories(500))
    before, server.status = tree("data"), 503
    out = prep(input=server.url + "TinyStoriesV2-GPT4-valid.txt", refused=True)
    assert server.url in out and "503" in out and tree("data") == before


@pytest.mark.parametrize("how", [dict(url="http://127.0.0.1:9/"), dict(files={}), dict(slow=3),
                                 dict(cuts=1000, ranges=False)], ids=str)
def test_without_tinystories_the_bundled_stories_are_taken(prep, server, how):
    os.makedirs("repo/data")
    Path("repo/data/stories.txt").write_text(joined(stories(40, 5)))
    [setattr(server, name, value) for name, value in how.items()]
    out = prep(__file__="repo/prepare.py", TINYSTORIES=server.url + "TinyStoriesV2-GPT4-",
               TIMEOUT=0.5)
    assert sum("stories.txt" in line for line in out.splitlines()) == 1
    assert sorted(both_splits()) == sorted(stories(40, 5))
    assert meta()["source"] == "data/stories.txt" and not server.kept.exists()


# ---- learning, batches, a step against plain code

def tiny(**changes):
    """A small GPT, in which no weight is 0 or 1."""
    torch.manual_seed(0)
    net = GPT(GPTConfig(**{**SHAPE, "vocab_size": V, **changes})).eval()
    with torch.no_grad():
        for p in net.parameters():
            p.add_(0.2 * torch.randn_like(p))
    return net


def ids_like(*shape, seed=1):
    return torch.randint(V, shape, generator=torch.Generator().manual_seed(seed))


def use(monkeypatch, **values):
    for name, value in {**TINY, **values}.items():
        monkeypatch.setattr(train, name, value)


def generated(net, idx, n=12, seed=0, **how):
    torch.manual_seed(seed)
    return torch.cat(list(net.generate(idx, n, **how)), 1).tolist()


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
    make_data(tmp_path, ids[:25000], ids[25000:], vocab_size=6)
    status, _, _ = run(tmp_path, **parts, warmup_iters=10, batch_size=32, block_size=16,
                       n_embd=32, n_layer=1, eval_interval=150, eval_iters=20)
    first = -(pi * np.log(pi)).sum()  # what a window's first target costs, without the one before
    expected = (first + 15 * rate) / 16
    assert status == 0 and abs(column(tmp_path, "val_loss")[-1] - expected) < 0.1


@pytest.mark.parametrize("scale, warned", [(1, False), (100, True)])
def test_initial_loss_is_ln_vocabulary_or_a_warning(tmp_path, monkeypatch, scale, warned):
    def scaled_head(config):
        net = GPT(config)
        net.lm_head.weight.data.mul_(scale)
        return net
    monkeypatch.setattr(train, "GPT", scaled_head)
    _, out, _ = run(make_data(tmp_path), max_iters=1)
    assert (abs(column(tmp_path, "train_loss")[0] - math.log(V)) > 0.1) == warned
    found = re.findall(r"warning: the first loss is .*ln\(vocabulary\) = 3\.47", out)
    assert len(found) == out.count("warning") == warned


@pytest.mark.parametrize("part", OFF)
def test_each_part_alone_is_causal_and_all_weights_learn(part):
    net, ids = tiny(**{**OFF, part: True}), ids_like(3, 8)
    logits = net(ids)
    for t in range(8):
        other = ids.clone()
        other[:, t] = (other[:, t] + 1) % V
        moved = (net(other) - logits).abs().amax(-1).amax(0)
        assert moved[:t].eq(0).all() and moved[t:].gt(1e-6).all()
    net(ids[:, :-1], ids[:, 1:]).backward()
    assert all(p.grad.abs().max() > 0 for p in net.parameters())


def test_batches_are_a_function_of_seed_and_step(monkeypatch):
    ids = np.arange(1000, dtype=np.uint16)
    def batch(step, micro, **given):
        use(monkeypatch, gradient_accumulation_steps=2, **given)
        return train.get_batch(ids, step, micro, 2)[0]
    x = batch(5, 1)
    y = train.get_batch(ids, 5, 1, 2)[1]
    assert x.shape == y.shape == (4, 8) and x.dtype == torch.int64
    assert torch.equal(y, x + 1) and torch.equal(x, x[:, :1] + torch.arange(8))
    np.random.seed(9)
    torch.manual_seed(9)
    batch(2, 0)
    assert torch.equal(batch(5, 1, dropout=0.5, eval_iters=7, eval_interval=3, max_iters=99), x)
    assert torch.equal(batch(4, 2), batch(5, 0))  # one past the last is the first of the next step
    for other in (batch(5, 0), batch(6, 1), batch(5, 1, seed=1)):
        assert not torch.equal(x, other)
    fixed = dict(overfit_one_batch=True)
    assert torch.equal(batch(5, 1, **fixed), batch(0, 1, **fixed))


def test_every_window_of_the_split_is_reachable(monkeypatch):
    use(monkeypatch, batch_size=8)
    ids = np.arange(13, dtype=np.uint16)  # windows of 8 + 1 start at 0 to 4
    for n in (13, 9):
        starts = {x.item() for i in range(20) for x in train.get_batch(ids[:n], i, 0, 1)[0][:, 0]}
        assert starts == set(range(n - 8))


def test_processes_and_micro_steps_share_one_draw(monkeypatch):
    ids = np.arange(1000, dtype=np.uint16)
    use(monkeypatch, batch_size=6, gradient_accumulation_steps=4)
    whole = train.get_batch(ids, 3, 0, 1)[0]
    for world, micro_steps in ((1, 4), (1, 3), (2, 2), (3, 2), (3, 4)):
        monkeypatch.setattr(train, "WORLD", world)
        parts = []
        for rank in range(world):
            monkeypatch.setattr(train, "RANK", rank)
            parts += [train.get_batch(ids, 3, m, micro_steps)[0] for m in range(micro_steps)]
        assert {len(part) for part in parts} == {24 // world // micro_steps}
        assert torch.equal(torch.cat(parts).sort(0)[0], whole.sort(0)[0])


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


def plain_step(net, ids, step, micro_steps, clip):
    """Leave the clipped gradients of a step in the net; its loss and its gradient norm."""
    net.zero_grad()
    batches = [train.get_batch(ids, step, micro, micro_steps) for micro in range(micro_steps)]
    x, y = (torch.cat(z) for z in zip(*batches))
    loss = F.cross_entropy(net(x).flatten(0, 1), y.flatten())
    loss.backward()
    return loss.item(), torch.nn.utils.clip_grad_norm_(net.parameters(), clip).item()


def assert_equals_a_plain_loop(tmp_path, monkeypatch, optimizer, tied):
    """Rates, clipping, accumulation, decay of matrices and layer-wise rates, all at once."""
    net = tiny(bias=True, rmsnorm=True, swiglu=True, rope=True, tie_embeddings=tied)
    torch.save({"model_args": vars(net.config), "model": net.state_dict()}, tmp_path / "start.pt")
    ids = np.fromfile(make_data(tmp_path) / "data/d/train.bin", "<u2")
    given = dict(init_from="start.pt", optimizer=optimizer, gradient_accumulation_steps=3,
                 weight_decay=0.5, grad_clip=0.2, learning_rate=0.01, muon_lr=0.03, min_lr=0.001,
                 beta1=0.8, layer_lr_decay=0.7, lr_decay_iters=5)
    status, _, state = run(tmp_path, **given)
    use(monkeypatch, **given)
    matrices = {name: p for name, p in net.named_parameters() if p.dim() == 2 and ".h." in name}
    matrices, momentum, found = matrices if optimizer == "muon" else {}, {}, []
    adamw = torch.optim.AdamW([{"params": [p], "name": name, "weight_decay": 0.5 * (p.dim() == 2)}
                               for name, p in net.named_parameters() if name not in matrices],
                              betas=(0.8, 0.95))
    for step, lr in enumerate([0.01 / 3, 0.02 / 3, 0.01, 0.00775, 0.00325, 0.001]):
        def rate(name):
            top = 2 if name.startswith(("transformer.ln_f", "lm_head")) else -1
            return lr * 0.7 ** (2 - (int(name.split(".")[2]) if ".h." in name else top))

        found.append([lr, *plain_step(net, ids, step, 3, 0.2)])
        for group in adamw.param_groups:
            group["lr"] = rate(group["name"])
        adamw.step()
        for name, w in matrices.items():
            m = momentum[name] = 0.95 * momentum.get(name, 0) + 0.05 * w.grad
            w.data *= 1 - 3 * rate(name) * 0.5
            stacked = 3 if "c_attn" in name else 1  # q, k and v
            for w, u in zip(w.data.chunk(stacked), (0.05 * w.grad + 0.95 * m).chunk(stacked)):
                w -= 3 * rate(name) * max(1, w.shape[0] / w.shape[1]) ** 0.5 * polar_express(u)
    rates, losses, norms = zip(*found)
    assert status == 0 and min(norms) > 0.2
    assert column(tmp_path, "lr") == pytest.approx(rates)
    assert column(tmp_path, "train_loss") == pytest.approx(losses, abs=1e-4)
    assert column(tmp_path, "grad_norm") == pytest.approx(norms, rel=1e-3)
    close(state["model"], net.state_dict(), 3e-4)


def test_adamw_equals_torch(tmp_path, monkeypatch):
    assert_equals_a_plain_loop(tmp_path, monkeypatch, "adamw", tied=True)


@pytest.mark.parametrize("tied", [True, False])
def test_muon_equals_its_formula(tmp_path, monkeypatch, tied):
    assert_equals_a_plain_loop(tmp_path, monkeypatch, "muon", tied)


def test_orthogonalize_brings_singular_values_to_one(monkeypatch):
    monkeypatch.setattr(train, "muon_steps", 5)
    torch.manual_seed(0)
    for shape in ((24, 24), (16, 48), (48, 16)):
        G = torch.randn(4, *shape) * torch.tensor([1e-3, 1.0, 30.0, 1e4])[:, None, None]
        O = train.orthogonalize(G)
        before, S = torch.linalg.svdvals(G), torch.linalg.svdvals(O)
        assert S.max() < 1.2 and S[before > 0.02 * before[:, :1]].min() > 0.8
        torch.testing.assert_close(O, torch.stack([polar_express(g).float() for g in G]),
                                   atol=1e-3, rtol=1e-3)
    assert train.orthogonalize(torch.zeros(1, 4, 4)).eq(0).all()


@pytest.mark.parametrize("schedule", train.SCHEDULES)
def test_get_lr(monkeypatch, schedule):
    def rates(**values):
        use(monkeypatch, lr_schedule=schedule, **{"learning_rate": 0.3, "min_lr": 0.03,
                                                  "max_iters": 90, "warmup_iters": 10, **values})
        return [train.get_lr(it) for it in range(200)]
    r, end = rates(), 0.3 if schedule == "constant" else 0.03
    assert r == rates(lr_decay_iters=90, max_iters=150)
    assert 0 < r[0] < 0.05 and r[10] == 0.3 and r[90] == r[91] == r[199] == end
    assert np.allclose(np.diff(r[:11]), r[0])
    shape = {"cosine": {50: 0.165, 30: 0.03 + 0.27 * (2 + 2 ** 0.5) / 4},
             "linear": {50: 0.165, 30: 0.2325}, "constant": {50: 0.3, 89: 0.3},
             "cosine_restarts": {30: 0.3, 50: 0.3, 70: 0.3, 20: 0.165, 80: 0.165},
             "wsd": {50: 0.3, 74: 0.3, 82: 0.165}}[schedule]
    assert {it: r[it] for it in shape} == pytest.approx(shape)
    rises = (np.diff(r[10:91]) > 1e-12).sum()
    assert rises == (3 if schedule == "cosine_restarts" else 0)
    assert rates(warmup_iters=0)[0] == 0.3
    for warmup in (90, 100, 300):  # as long as the run and longer
        r = rates(warmup_iters=warmup)
        assert np.isfinite(r).all() and 0 < r[0] and max(r) <= 0.3
        assert (np.diff(r[:min(warmup, 199)]) > 0).all()
    assert rates(learning_rate=0.0, min_lr=0.0)[:100] == [0] * 100
    assert rates(decay_lr=False) == [0.3] * 200


# ---- evaluation, the length of a run, its log

def test_evaluation_is_the_mean_loss_of_the_split_and_changes_nothing(monkeypatch):
    use(monkeypatch, eval_iters=50, dropout=0.5)
    ids, net = ids_like(8 * 11 + 1).numpy().astype(np.uint16), tiny(dropout=0.5)
    before, plain = copy.deepcopy(net.state_dict()), contextlib.nullcontext()
    x, y = torch.tensor(ids[:-1].astype(int)).view(11, 8), torch.tensor(ids[1:].astype(int))
    expected = F.cross_entropy(net(x).flatten(0, 1), y).item()
    net.train()
    states = torch.get_rng_state(), np.random.get_state()[1]
    one, two = (train.evaluate(net, {"train": ids, "val": ids[:81]}, plain) for _ in range(2))
    assert one == two and one["train"] == pytest.approx(expected, abs=1e-5)
    assert all(m.training for m in net.modules()) and not difference(net.state_dict(), before)
    assert torch.equal(torch.get_rng_state(), states[0])
    assert (np.random.get_state()[1] == states[1]).all()
    assert all(p.grad is None for p in net.parameters())
    use(monkeypatch, eval_iters=1)  # the 4 windows then reach both ends
    seen = []
    monkeypatch.setattr(train, "windows", lambda ids, starts: seen.extend(starts) or (x, x))
    train.evaluate(net, {"val": ids}, plain)
    assert seen[0] == 0 and seen[-1] == len(ids) - 9 and len(set(np.diff(seen))) <= 2


def test_evaluation_does_not_touch_training(tmp_path):
    make_data(tmp_path)
    states, losses = [], []
    for interval in (0, 1, 3):
        _, _, state = run(tmp_path, eval_interval=interval, dropout=0.3, log_interval=3)
        states.append([state[k] for k in ("model", "optimizer", "rng")])
        losses.append({r["step"]: r["val_loss"] for r in rows(tmp_path) if "val_loss" in r})
    assert not difference(states[0], states[1]) and not difference(states[0], states[2])
    assert [list(found) for found in losses] == [[], [1, 2, 3, 4, 5, 6], [3, 6]]
    assert all(losses[1][step] == loss for step, loss in losses[2].items())


def script(monkeypatch, *losses):
    """Let the evaluations find these losses."""
    left = iter(losses)
    monkeypatch.setattr(train, "evaluate", lambda *_: dict.fromkeys(("train", "val"), next(left)))


def test_best_is_the_lowest_validation_loss(tmp_path, monkeypatch):
    make_data(tmp_path)
    script(monkeypatch, 3.0, 2.0, 2.5, 1.9, 2.2, 2.1, 1.8, 1.85)
    given = dict(eval_interval=1, keep_checkpoints=9, lr_schedule="constant")
    for max_iters, step, loss in ((5, 4, 1.9), (6, 4, 1.9), (8, 7, 1.8)):  # remembered at a resume
        _, _, state = run(tmp_path, init_from="auto", max_iters=max_iters, **given)
        best = load(tmp_path, "out/best.pt")
        assert best["iter_num"] == step and best["best_val_loss"] == state["best_val_loss"] == loss
        assert not {"optimizer", "rng", "scaler"} & best.keys()
        assert not difference(best["model"], load(tmp_path, f"out/ckpt_{step}.pt")["model"])
        assert difference(best["model"], state["model"])


@pytest.mark.parametrize("patience, min_delta, losses, stops", [
    (2, 0.0, [3, 2, 2.5, 1.9, 2.2, 1.95, 1.0, 1.0], 6),
    (2, 0.1, [3, 2.95, 2.8, 2.75, 2.71, 1, 1, 1], 5),
    (1, 0.0, [3, 3, 1, 1, 1, 1, 1, 1], 2), (0, 0.0, [3, 4, 5, 6, 7, 8, 9, 9], 8)])
def test_early_stopping(tmp_path, monkeypatch, patience, min_delta, losses, stops):
    script(monkeypatch, *losses)
    status, _, state = run(make_data(tmp_path), eval_interval=1, max_iters=8, patience=patience,
                           min_delta=min_delta)
    assert status == 0 and state["iter_num"] == stops


@pytest.mark.parametrize("interval, evaluated", [(0, []), (4, [4, 8, 9])])
def test_max_iters_updates_exactly_and_a_resume_may_raise_it(tmp_path, interval, evaluated):
    make_data(tmp_path)
    given = dict(lr_decay_iters=9, min_lr=1e-3, dropout=0.2, optimizer="adamw",
                 eval_interval=interval, always_save_checkpoint=False)
    _, _, whole = run(tmp_path, max_iters=9, **given)
    assert whole["iter_num"] == 9 and whole["tokens_seen"] == 9 * 4 * 8
    assert {int(s["step"]) for s in whole["optimizer"]["state"].values()} == {9}
    assert [r["step"] for r in rows(tmp_path) if "val_loss" in r] == evaluated
    run(tmp_path, max_iters=4, **given)
    status, out, state = run(tmp_path, init_from="resume", max_iters=9)
    assert status == 0 and "resuming after step 4" in out
    assert "max_iters from 4 to 9" in out and "lr_decay_iters" not in out
    assert column(tmp_path, "step") == [1, 2, 3, 4, 5, 6, 7, 8, 9]
    assert column(tmp_path, "tokens")[-1] == 9 * 4 * 8 and not difference(whole, state)


def test_the_log_and_what_is_printed(tmp_path):
    make_data(tmp_path, val=[1, 2] * 50)  # 3 bytes a token
    _, out, state = run(tmp_path, log_interval=2, eval_interval=3, learning_rate=0.01,
                        gradient_accumulation_steps=2, lr_schedule="linear", tie_embeddings=False)
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
    found = re.search("step 6: train loss (.*), val loss (.*), perplexity (.*), bits per byte (.*)",
                      out)
    loss, val, perplexity, bits = map(float, found.groups())
    assert abs(loss - val) > 0.01 and val == pytest.approx(r[-1]["val_loss"], abs=1e-4)
    assert perplexity == pytest.approx(math.exp(val), rel=1e-3)
    assert bits == pytest.approx(val / math.log(2) / 3, abs=1e-3)


def slow_clock(monkeypatch):
    """A clock for train.py that moves only when looked at, by the seconds that it is given."""
    now = [0.0]

    def look(seconds=0.01):
        now[0] += seconds
        return now[0]
    monkeypatch.setattr(train, "time", types.SimpleNamespace(perf_counter=look, monotonic=look))
    return look


def test_max_minutes_becomes_a_number_of_steps(tmp_path, monkeypatch):
    look, evaluate = slow_clock(monkeypatch), train.evaluate
    monkeypatch.setattr(train, "evaluate", lambda *args: (look(0.5), evaluate(*args))[1])
    status, out, state = run(make_data(tmp_path), max_minutes=0.05, eval_interval=7)
    config, steps = state["config"], state["iter_num"]
    assert status == 0 and 2.9 < state["train_seconds"] < 3.1 and f"{steps} steps" in out
    assert config["max_minutes"] == 0 and config["max_iters"] == steps > 20
    lr = column(tmp_path, "lr")
    assert lr[0] < 0.002 and lr[2] == 3e-3 and lr[-1] < 1e-4  # the schedule fits
    status, _, state = run(tmp_path, init_from="resume")
    assert status == 0 and state["iter_num"] == steps


def test_max_minutes_count_over_a_stop(tmp_path, monkeypatch):
    slow_clock(monkeypatch)
    with monkeypatch.context() as patch:
        patch.setattr(train, "SIGNALS", [])
        patch.setattr(train, "get_lr", lambda it, get_lr=train.get_lr: (
            it == 40 and train.SIGNALS.append((15, 0)), get_lr(it))[1])
        assert run(make_data(tmp_path), max_minutes=0.05)[0] == 143
    status, _, state = run(tmp_path, init_from="resume")
    lr = column(tmp_path, "lr")
    assert status == 0 and 2.9 < state["train_seconds"] < 3.1
    assert 41 < len(lr) and all(a > b for a, b in itertools.pairwise(lr[20:]))
    status, _, again = run(tmp_path, init_from="resume", max_minutes=0.05)
    assert status == 0 and again["iter_num"] == state["iter_num"]


def test_benchmark_ends_and_saves_nothing(tmp_path):
    status, out, _ = run(make_data(tmp_path), benchmark=True, max_iters=600)
    assert status == 0 and not (tmp_path / "out").exists()
    shares = [float(x) for x in re.findall(r"(?:data|forward|backward|optimizer) ([\d.]+)%", out)]
    assert len(shares) == 4 and sum(shares) == pytest.approx(100, abs=1)
    assert re.findall(r"iter (\d+):", out)[-1] == "50"
    run(tmp_path, max_iters=20)
    status, out, state = run(tmp_path, init_from="resume", benchmark=True)
    shares = [float(x) for x in re.findall(r"(?:data|forward|backward|optimizer) ([\d.]+)%", out)]
    assert status == 0 and sum(shares) == pytest.approx(100, abs=1) and state["iter_num"] == 20


# ---- numbers that are not finite, dtypes

@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
@pytest.mark.parametrize("how", [
    lambda loss, w: loss * math.nan,
    lambda loss, w: loss + (w - w.detach()).abs().sqrt().sum()])  # + 0, without a finite gradient
def test_numbers_that_are_not_finite_never_reach_the_weights(tmp_path, monkeypatch, optimizer, how):
    forward, nets = GPT.forward, []
    def broken(self, idx, targets):
        nets.append(self)
        loss = forward(self, idx, targets)
        return how(loss, self.lm_head.weight) if len(nets) == 7 else loss  # in step 4
    monkeypatch.setattr(GPT, "forward", broken)
    status, out, state = run(make_data(tmp_path), checkpoint_interval=1, optimizer=optimizer,
                             gradient_accumulation_steps=2, grad_clip=0.0)
    assert status == 1 and state["iter_num"] == 3 and len(nets) == 8
    assert not difference(state["model"], nets[0].state_dict())
    line = out.splitlines()[-1]
    assert "iter 4" in line and "lr" in line and "norm" in line and "float32" in line
    assert column(tmp_path, "step") == [1, 2, 3]


def test_float16_skips_overflows_and_halves_the_scale(tmp_path, monkeypatch):
    scaler = functools.partial(torch.amp.GradScaler, init_scale=2.0 ** 30)
    monkeypatch.setattr(torch.amp, "GradScaler", scaler)
    status, out, state = run(make_data(tmp_path), dtype="float16", max_iters=30, batch_size=8)
    skipped = out.count("float16 overflow")
    assert status == 0 and 1 <= skipped < 20 and " in float16" in out
    assert state["scaler"]["scale"] == 2.0 ** (30 - skipped)
    assert state["iter_num"] == 30 and state["overflows"] == 0
    assert {int(s["step"]) for s in state["optimizer"]["state"].values()
            if "exp_avg" in s} == {30 - skipped}
    assert column(tmp_path, "train_loss")[-1] < column(tmp_path, "train_loss")[0] - 0.03
    assert all(v.dtype == torch.float32 for v in state["model"].values())


@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
@pytest.mark.parametrize("power, overflows", [(100, 19), (10, 10)])  # 20 in a row; no scale is left
def test_float16_stops_when_no_scale_helps(tmp_path, monkeypatch, optimizer, power, overflows):
    scaler = functools.partial(torch.amp.GradScaler, init_scale=2.0 ** power)
    monkeypatch.setattr(torch.amp, "GradScaler", scaler)
    forward, nets, factor = GPT.forward, [], 1e36 if power == 10 else 1
    monkeypatch.setattr(GPT, "forward",
                        lambda net, *xy: nets.append(net) or factor * forward(net, *xy))
    status, out, state = run(make_data(tmp_path), dtype="float16", optimizer=optimizer,
                             max_iters=60)
    assert status == 1 and state is None and out.count("overflow") == overflows
    assert len(nets) == overflows + 1 and "not finite" in out
    torch.manual_seed(train.seed)
    assert not difference(nets[0].state_dict(), GPT(nets[0].config).state_dict())


def test_half_precision_follows_float32_and_is_replaced_where_it_is_slow(tmp_path):
    given = dict(max_iters=10, grad_clip=0.1)
    _, _, full = run(make_data(tmp_path), **given)
    losses, norms = column(tmp_path, "train_loss"), column(tmp_path, "grad_norm")
    for dtype in ("float16", "bfloat16"):
        status, out, half = run(tmp_path, dtype=dtype, **given)
        assert status == 0 and f" in {dtype}" in out and half["config"]["dtype"] == dtype
        assert half["model"].keys() == full["model"].keys()
        assert difference(full["model"], half["model"])
        assert column(tmp_path, "train_loss") == pytest.approx(losses, abs=0.02)
        assert column(tmp_path, "grad_norm") == pytest.approx(norms, rel=0.1)
    rate = lambda kind, *_: 1e9 if kind == "float32" else 1e8
    _, out, half = run(tmp_path, init_from="resume", max_iters=11, rate=rate)
    assert half["config"]["dtype"] == "bfloat16" and "slower" not in out  # a resume keeps its dtype
    status, out, slow = run(tmp_path, dtype="bfloat16", **given, rate=rate)
    assert status == 0 and not difference(full, slow)
    words = "bfloat16 is 10 times slower than float32 here: using float32\n"
    assert out.count("bfloat16") == out.count(words) == 1
    _, out, slow = run(tmp_path, init_from="resume", dtype="bfloat16", max_iters=11, rate=rate)
    assert words in out and slow["config"]["dtype"] == "float32"


def test_autocast_takes_every_fused_kernel(recwarn):
    net, ids = GPT(GPTConfig(**SHAPE, vocab_size=V, **dict.fromkeys(OFF, True))), torch.zeros(2, 8)
    try:
        torch.set_warn_always(True)  # the fallback warns
        for dtype in (torch.bfloat16, torch.float16):
            with torch.autocast("cpu", dtype):
                net(ids.long(), ids.long()).backward()
    finally:
        torch.set_warn_always(False)
    assert not recwarn.list


# ---- the model, its text, nanoGPT's files

@pytest.mark.parametrize("width", [128, 256, 384, 768, 1600])
def test_gpt2_has_124439808_parameters_and_swiglu_keeps_the_count(width):
    with torch.device("meta"):
        nets = [GPT(GPTConfig(n_embd=width, n_head=4, swiglu=swiglu)) for swiglu in (False, True)]
    plain, gated = (sum(p.numel() for p in net.transformer.h.parameters()) for net in nets)
    assert abs(gated / plain - 1) < 0.05
    assert width != 768 or sum(p.numel() for p in nets[0].parameters()) == 124_439_808


def test_weights_start_as_gpt2s():
    net = GPT(GPTConfig(n_layer=8, n_embd=128, n_head=4, vocab_size=500, block_size=64))
    for name, p in net.named_parameters():
        std = 0.02 / 4 if name.endswith("c_proj.weight") else 0.02
        if p.dim() == 2:
            assert p.std().item() == pytest.approx(std, rel=0.05) and abs(p.mean()) < std / 10, name
        else:
            assert p.eq(0 if name.endswith("bias") else 1).all(), name


@pytest.mark.parametrize("vocab_size", [300, 9000])  # below and above the chunking threshold
def test_loss_is_the_mean_over_targets_that_count(vocab_size):
    torch.manual_seed(0)
    found, targets = [], torch.randint(vocab_size, (600,))
    targets[::7], targets[512:] = -1, -1
    counts = targets >= 0
    for loss in (gpt.head_loss, lambda x, w, t: F.cross_entropy(x[counts] @ w.T, t[counts])):
        torch.manual_seed(1)
        x, w = (torch.randn(n, 8, requires_grad=True) for n in (600, vocab_size))
        value = loss(x, w, targets)
        (3 * value).backward()
        found.append((value.detach(), x.grad, w.grad))
    for a, b in zip(*found):
        torch.testing.assert_close(a, b, atol=1e-6, rtol=1e-5)


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


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("parts", [dict(OFF, bias=True), dict(OFF, bias=False),
                                   dict(dict.fromkeys(OFF, True), bias=False),
                                   dict(OFF, rope=True), dict(dict.fromkeys(OFF, True), bias=True)])
def test_logits_equal_those_of_transformers(tied, parts):
    pytest.importorskip("transformers")
    net, ids = tiny(**parts, tie_embeddings=tied), ids_like(3, 8)
    assert (net.lm_head.weight is net.transformer.wte.weight) == tied
    if parts["rope"] and (parts.get("bias", True) or not parts["swiglu"]):  # there is no class
        with pytest.raises(ValueError):
            gpt.to_hugging_face(net)
        return
    hf = gpt.to_hugging_face(net).eval()
    assert type(hf).__name__ == ("Qwen3ForCausalLM" if parts["rope"] else "GPT2LMHeadModel")
    torch.testing.assert_close(net(ids), hf(ids).logits, atol=2e-5, rtol=1e-5)


@pytest.mark.parametrize("tied", [True, False])
def test_hugging_face_folder_round_trip_and_start_with_a_shorter_block(tmp_path, tied):
    pytest.importorskip("transformers")
    net, ids = tiny(**OFF, bias=True, tie_embeddings=tied), ids_like(3, 8)
    gpt.to_hugging_face(net).save_pretrained(tmp_path / "gpt2-mine")
    args, state = gpt.from_hugging_face(str(tmp_path / "gpt2-mine"))
    torch.testing.assert_close(gpt.load_model(args, state).eval()(ids), net(ids))
    status, _, state = run(make_data(tmp_path), init_from="gpt2-mine", block_size=4, max_iters=1,
                           learning_rate=0.0, allow_data_change=True)
    assert status == 0 and state["model_args"]["block_size"] == 4
    again = gpt.load_model(state["model_args"], state["model"]).eval()
    torch.testing.assert_close(again(ids[:, :4]), net(ids[:, :4]))


def test_temperature_0_is_greedy_for_every_seed_and_sees_one_block():
    net, idx = tiny(), ids_like(2, 20)
    expected = idx
    for _ in range(12):
        expected = torch.cat((expected, net(expected[:, -8:])[:, -1].argmax(-1, keepdim=True)), 1)
    for how in (dict(temperature=0), dict(temperature=0, top_k=5, top_p=0.5), dict(top_k=1),
                dict(top_p=1e-6), dict(temperature=1e-4)):
        for seed in (0, 1):
            assert generated(net, idx, seed=seed, **how) == expected[:, 20:].tolist(), how
    assert generated(net, idx[:, :8], temperature=0) != expected[:, 20:].tolist()
    plain = generated(net, idx, seed=0)
    assert plain != generated(net, idx, seed=1)
    for off in (dict(top_k=10 ** 6), dict(top_k=V), dict(top_k=0), dict(top_p=1.0)):
        assert generated(net, idx, **off) == plain


@pytest.mark.parametrize("how, kept", [
    (dict(), [1, 4, 2, 3]), (dict(temperature=2.0), [1, 2, 2 ** 0.5, 3 ** 0.5]),
    (dict(top_k=2), [0, 4, 0, 3]), (dict(top_k=3), [0, 4, 2, 3]), (dict(top_p=0.39), [0, 1, 0, 0]),
    (dict(top_p=0.6), [0, 4, 0, 3]), (dict(top_p=0.8), [0, 4, 2, 3]),
    (dict(top_p=0.95, top_k=2), [0, 4, 0, 3]), (dict(top_p=0.5, temperature=0.5), [0, 1, 0, 0]),
    (dict(top_p=0.6, temperature=0.5), [0, 16, 0, 9])], ids=str)  # 0.53 and 0.3 of all
def test_tokens_are_drawn_from_the_likeliest_as_often_as_they_are_likely(how, kept):
    net = tiny(vocab_size=4, tie_embeddings=False)
    net.lm_head.weight.data.zero_()
    net.lm_head.weight.data[:, 0] = torch.tensor([0.1, 0.4, 0.2, 0.3]).log()
    net.hidden = lambda idx: F.one_hot(torch.zeros_like(idx), 16).float()  # whatever came before
    drawn = torch.tensor(generated(net, torch.zeros(20000, 1, dtype=torch.long), 1, **how))
    found = drawn.flatten().bincount(minlength=4) / 20000
    assert found.tolist() == pytest.approx([k / sum(kept) for k in kept], abs=0.015)
    assert [f > 0 for f in found] == [k > 0 for k in kept]


NANO = dict(  # the settings that nanoGPT stores
    SHAPE, out_dir="out", eval_interval=5, log_interval=1, eval_iters=2, eval_only=False,
    always_save_checkpoint=True, init_from="scratch", wandb_log=False, wandb_project="owt",
    wandb_run_name="gpt2", dataset="d", gradient_accumulation_steps=2, batch_size=4,
    dropout=0, bias=True, learning_rate=2e-3, max_iters=7, weight_decay=0.2, beta1=0.9, beta2=0.99,
    grad_clip=1.0, decay_lr=True, warmup_iters=2, lr_decay_iters=7, min_lr=1e-4, backend="nccl",
    device="cuda", dtype="float32", compile=True)


def nanogpt_checkpoint(path, vocab_size=V):
    """ckpt.pt as nanoGPT writes it after 3 steps; the model and the optimizer."""
    net = tiny(**OFF, bias=True, vocab_size=vocab_size)
    opt = torch.optim.AdamW([
        {"params": [p for p in net.parameters() if p.dim() >= 2], "weight_decay": 0.2},
        {"params": [p for p in net.parameters() if p.dim() < 2], "weight_decay": 0.0}],
        lr=2e-3, betas=(0.9, 0.99))
    for step in range(3):
        ids = ids_like(4, 9, seed=step)
        net(ids[:, :-1], ids[:, 1:]).backward()
        opt.step()
        opt.zero_grad(set_to_none=True)
    args = dict(SHAPE, bias=True, vocab_size=vocab_size, dropout=0.0)
    path.parent.mkdir(exist_ok=True)
    torch.save({"model": {f"_orig_mod.{k}": v for k, v in net.state_dict().items()},
                "optimizer": opt.state_dict(), "model_args": args, "iter_num": 3,
                "best_val_loss": torch.tensor(2.5), "config": NANO}, path)
    return net, opt


def test_nanogpts_checkpoint_resumes_as_plain_torch_would(tmp_path, monkeypatch):
    ids = np.fromfile(make_data(tmp_path) / "data/d/train.bin", "<u2")
    net, opt = nanogpt_checkpoint(tmp_path / "out/ckpt.pt")
    status, out, state = run(tmp_path, init_from="resume")
    assert status == 0 and state["iter_num"] == 7 and "resuming after step 3" in out
    use(monkeypatch, gradient_accumulation_steps=2)
    for step in range(3, 7):
        plain_step(net, ids, step, 2, 1.0)
        for group in opt.param_groups:
            group["lr"] = 1e-4 + (1 + math.cos(math.pi * (step - 2) / 5)) / 2 * (2e-3 - 1e-4)
        opt.step()
    close(state["model"], net.state_dict(), 1e-5)
    assert state["config"]["optimizer"] == "adamw" and state["config"]["beta2"] == 0.99


def test_nanogpts_checkpoint_is_fine_tuned(tmp_path):
    net, _ = nanogpt_checkpoint(tmp_path / "nano.pt")
    status, out, state = run(make_data(tmp_path), init_from="nano.pt", max_iters=1, muon_lr=0.0,
                             learning_rate=0.0, eval_interval=1, dropout=0.3)
    assert status == 0 and state["iter_num"] == 1 and "resuming" not in out
    assert state["model_args"]["dropout"] == 0.3
    assert not any(state["model_args"][part] for part in OFF)
    close(state["model"], net.state_dict(), 1e-7)


def test_bins_without_meta_are_gpt2_tokens(tmp_path):
    make_data(tmp_path, np.random.default_rng(0).integers(50000, 50257, size=100))
    (tmp_path / "data/d/meta.json").unlink()
    status, out, state = run(tmp_path, max_iters=1, eval_interval=1, n_layer=1)
    assert status == 0 and state["model_args"]["vocab_size"] == 50257
    assert state["tokenizer"]["name"] == "gpt2" and "bits per byte" not in out


# ---- settings

DEFAULTS = {"__file__": __file__, "_private": 1, "os": os, "rate": 0.5, "steps": 10, "name": "x",
            "flag": False}
CONFIG = ("import math\n_half = 3\n\ndef twice(x):\n    return 2 * x\n\n"
          "steps = twice(_half) + steps\nrate = math.sqrt(4)\nname = f'{name}y'\n")


@pytest.mark.parametrize("args, given", [
    ([], {}), (["--rate=1", "--steps=1e3"], {"rate": 1.0, "steps": 1000}),
    (["--name=a=b", "--flag=True"], {"name": "a=b", "flag": True}), (["--name="], {"name": ""}),
    (["--name=5", "--rate=-1e-3"], {"name": "5", "rate": -1e-3}),
    (["--steps=1", "--steps=2"], {"steps": 2}),
    (["--steps=20", "c.py"], {"steps": 26, "rate": 2.0, "name": "xy"}),
    (["c.py", "--steps=20"], {"steps": 20, "rate": 2.0, "name": "xy"}),
    (["d.py"], {"steps": 16, "rate": 2.0, "name": "xy"})])
def test_settings_take_the_type_of_their_default_and_the_later_wins(tmp_path, args, given):
    (tmp_path / "c.py").write_text(CONFIG, encoding="utf-8-sig")
    (tmp_path / "d.py").write_text("exec(open('c.py', encoding='utf-8-sig').read())")
    s = dict(DEFAULTS)
    with contextlib.chdir(tmp_path):
        assert configure(s, args) == given and s == {**DEFAULTS, **given}
    assert all(type(s[name]) is type(value) for name, value in DEFAULTS.items())


@pytest.mark.parametrize("arg, words", [
    ("--step=5", "c.py|steps"), ("--zzz=1", "zzz"), ("--_private=2", "_private"), ("--os=1", "os"),
    ("--steps=2.5", "int"), ("--steps=True", "int"), ("--steps=abc", "int"), ("--steps=", "int"),
    ("--steps=1e400", "int"), ("--rate=x", "float"), ("--rate=nan", "float"),
    ("--rate=1e400", "float"), ("--rate=False", "float"), ("--flag=1", "bool"),
    ("--flag=true", "bool"), ("--flag", "--flag=VALUE"), ("steps=5", "steps=5"),
    ("missing.py", "missing.py"), ("book.txt", "ends in .py"), ("stepz = 5", "did you mean steps"),
    ("steps = 2.5", "int"), ("name = 5", "str"), ("steps = 1 +", "config file"),
    ("steps = 1 / 0", "division"), ("rate = float('nan')", "float"), ("steps = None", "int")])
def test_a_setting_that_does_not_fit_is_refused_in_one_line(tmp_path, arg, words):
    if " " in arg:  # the content of a file
        (tmp_path / "c.py").write_text(arg + "\n")
        arg = str(tmp_path / "c.py")
    status, out, err = outcome(configure, dict(DEFAULTS), [arg])
    assert status == 2 and out == "" and err.count("\n") == 1 and re.search(words, err)
    assert arg.split("=")[0].lstrip("-") in err


def test_help_lists_settings_comments_and_values():
    status, out, err = outcome(configure, dict(vars(train)), ["--help", "--max_iters=77"])
    assert status == 0 and err == "" and re.search(r"^--max_iters=77 +steps", out, re.M)
    listed = re.findall(r"^--(\w+)=", out, re.M)
    assert sorted(listed) == sorted(train.settings()) and set(TINY) <= set(listed)


def test_a_config_of_nanogpts_settings_runs(tmp_path):
    settings = {**NANO, "device": "cpu", "compile": False, "backend": "gloo", "max_iters": 5}
    lines = [f"{name} = {value!r}\n" for name, value in settings.items()]
    (tmp_path / "train_nano.py").write_text("# train a miniature GPT\n" + "".join(lines))
    given = configure(dict(vars(train)), [str(tmp_path / "train_nano.py")])
    status, _, state = run(make_data(tmp_path), **given)
    assert status == 0 and state["iter_num"] == 5 and state["config"]["beta2"] == 0.99


@pytest.mark.parametrize("given, word", [
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
    (dict(out_dir="data/d/val.bin"), "out_dir"), (dict(tensorboard_log=True), "tensorboard")])
def test_bad_settings_are_refused_in_one_line(tmp_path, monkeypatch, given, word):
    monkeypatch.setattr("importlib.util.find_spec", lambda package: None)
    status, out, _ = run(make_data(tmp_path), **given)
    assert status == 2 and word in out.splitlines()[-1]
    assert out.count("\n") == 1 or "out_dir" in given  # which is tried last of all
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("split", ["train", "val"])
@pytest.mark.parametrize("harm, words", [
    (lambda raw: raw + b"\0", "801"), (lambda raw: bytes([V, 0]) + raw, f"token 0 is {V}"),
    (lambda raw: raw + bytes([V, 0]), f"token 400 is {V}"),
    (lambda raw: bytes(33_800_000) + bytes([V, 0, 1, 0]), f"token 16900000 is {V}"),
    (lambda raw: raw[:16], "8 tokens"), (lambda raw: b"", "0 tokens"), (None, "prepare.py")])
def test_bad_data_is_refused_in_one_line(tmp_path, split, harm, words):
    path = make_data(tmp_path) / f"data/d/{split}.bin"
    raw = path.read_bytes()
    path.write_bytes(harm(raw)) if harm else path.unlink()
    status, out, _ = run(tmp_path)
    assert status == 2 and out.count("\n") == 1 and words in out and f"{split}.bin" in out
    assert not (tmp_path / "out").exists()
    path.write_bytes(raw[:18])  # one window
    assert run(tmp_path, max_iters=1, eval_interval=1)[0] == 0


# ---- sample.py

END = "\n---------------\n"


@pytest.fixture(scope="module")
def memorised(tmp_path_factory):
    """A folder with a model that knows one document, and the document."""
    folder, text = tmp_path_factory.mktemp("memorised"), "a bad cab, a dab, a big fab gap é."
    make_data(folder, [*text.encode(), 256] * 20, vocab_size=257, eot=256)
    status, _, _ = run(folder, max_iters=120, block_size=16, batch_size=16, n_embd=32,
                       learning_rate=0.02, eval_interval=120)
    assert status == 0 and column(folder, "val_loss")[-1] < 0.2
    return folder, text


def write(folder, **given):
    """The exit status of sample.py in a folder, and what it prints."""
    return call(sample, folder, {**dict(device="cpu", dtype="float32", num_samples=1,
                                        max_new_tokens=50, temperature=0.0), **given})


def test_sample_from_the_command_line(memorised):
    folder, text = memorised
    (folder / "prompt.txt").write_text(text[:12])
    status, out, err = command(folder, f"{REPO}/sample.py", *flags(dict(
        start="FILE:prompt.txt", num_samples=2, temperature=0, device="cpu", dtype="float32")))
    assert status == 0 and out == 2 * (text + END), err  # whole characters, to the document's end
    for args in ["--start=a bad", "--device=cpu", "--dtype=float32"], ["--help"]:
        child = spawn(folder, f"{REPO}/sample.py", *args)
        child.stdout.close()  # as of a `| head` that has ended
        assert child.stderr.read() == ""


def test_an_export_that_computes_something_else_is_refused(memorised, monkeypatch, tmp_path):
    pytest.importorskip("transformers")
    assert write(memorised[0], export=str(tmp_path / "good"))[0] == 0
    monkeypatch.setattr(gpt.MLP, "forward", lambda self, x: x)
    status, out = write(memorised[0], export=str(tmp_path / "bad"))
    assert status == 2 and "something else" in out and os.listdir(tmp_path) == ["good"]


def test_sample_settings(memorised):
    folder, text = memorised
    for given in (dict(start="a bad"), dict(start="a bad", init_from="out/best.pt"),
                  dict(start="a bad", temperature=9.0, top_k=1), dict(),  # begins a document
                  dict(start="a bad", temperature=1.0, top_k=0, top_p=1e-6)):
        assert write(folder, **given) == (0, text + END)
    assert write(folder, start="a bad", max_new_tokens=4) == (0, text[:9] + END)
    status, out = write(folder, start=text[:20], max_new_tokens=3)
    assert status == 0 and text[:23] + END in out and "last 16 of" in out
    hot = dict(start="a", temperature=50.0, top_k=0, num_samples=2)
    one, two = write(folder, **hot)[1].split(END)[:2]
    assert one != two and write(folder, **hot)[1] == one + END + two + END
    assert write(folder, **hot, seed=2)[1] != one + END + two + END
    (folder / "data").rename(folder / "gone")  # the tokenizer is in the checkpoint
    assert write(folder, start="a bad") == (0, text + END)
    (folder / "gone").rename(folder / "data")


@pytest.mark.parametrize("given, word", [
    (dict(out_dir="none"), "train.py"), (dict(temperature=-1.0), "temperature"),
    (dict(top_p=0.0), "top_p"), (dict(top_k=-1), "top_k"), (dict(dtype="int8"), "dtype"),
    (dict(start="FILE:none.txt"), "none.txt"), (dict(init_from="none.pt"), "none.pt"),
    (dict(device="bogus"), "device")])
def test_sample_refuses_in_one_line(memorised, given, word):
    status, out = write(memorised[0], **given)
    assert status == 2 and out.count("\n") == 1 and word in out


@NEEDS_GPT2
def test_sample_reads_nanogpts_checkpoint_as_gpt2(tmp_path):
    net, _ = nanogpt_checkpoint(tmp_path / "nano.pt", vocab_size=50257)
    start = "Hello world"
    ids = generated(net, torch.tensor([GPT2.encode(start)]), 5, temperature=0)[0]
    done = write(tmp_path, init_from="nano.pt", start=start, max_new_tokens=5)
    assert done == (0, start + GPT2.decode(ids) + END)


def readme_commands():
    text = Path(REPO, "README.md").read_text(encoding="utf-8")
    blocks = re.findall(r"^```sh\n(.*?)^```", text, re.MULTILINE | re.DOTALL)
    for part in re.split(r"\n|&&", "".join(blocks)):
        words = shlex.split(part)
        for i, word in enumerate(words):
            if word in ("prepare.py", "train.py", "sample.py"):
                yield word, words[i + 1:]


@pytest.mark.parametrize("script, args", list(readme_commands()))
def test_readme_commands_parse(monkeypatch, script, args):
    settings = dict(vars({"prepare.py": prepare, "train.py": train, "sample.py": sample}[script]))
    monkeypatch.chdir(REPO)
    status, _, err = outcome(configure, settings, args)
    assert err == "" and (type(status) is dict or "--help" in args), err
