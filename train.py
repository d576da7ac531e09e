"""Train a GPT: the whole run in one file, from the settings to the last checkpoint.

$ python train.py                                         # a small model on whatever there is
$ python train.py config/shakespeare.py --max_iters=1000  # a preset, then settings; later wins
$ torchrun --standalone --nproc_per_node=8 train.py config/gpt2.py
$ python train.py --init_from=resume                      # go on after a stop of any kind
$ python train.py --help                                  # every setting

Killed at any moment and resumed, a run ends with the weights of one never killed, bit for bit
(on CUDA with --deterministic=True).
"""
import collections
import contextlib
import datetime
import functools
import glob
import importlib
import math
import os
import random
import re
import signal
import sys
import time
from dataclasses import dataclass, field

import numpy as np
import torch
import torch.distributed as dist

from config import configure, names, refuse, refusing
from model import (GPT, GPTConfig, check_file, from_hugging_face, load_model, load_optimizer,
                   read_checkpoint)
from prepare import lock, read_meta, read_tokens, sync

try:
    import resource
except ImportError:  # Windows: no figure for peak memory
    resource = None

# ---- the run
init_from = "scratch"  # scratch, resume, auto (resume if there is a checkpoint), gpt2*, or FILE.pt
out_dir = "out"  # checkpoints and log.csv
seed = 1337
deterministic = False  # only deterministic kernels, on CUDA at the cost of some speed
eval_only = False  # evaluate once and end; no file changes
benchmark = False  # time 50 steps and their parts and end; nothing is saved
overfit_one_batch = False  # train on the first batch for ever: a model without a bug gets to zero
# ---- data
dataset = "tinystories"  # the folder in data/ that prepare.py filled
batch_size = 12  # sequences in one micro-batch
gradient_accumulation_steps = 1  # micro-batches in one step, over all processes together
block_size = 128  # tokens in a sequence
allow_data_change = False  # resume although the data set is not what it was
# ---- model
n_layer = 2
n_head = 4
n_embd = 128
dropout = 0.1  # for text that is seen several times; 0 for more text than that
bias = False  # biases in the linear layers and LayerNorms
rmsnorm = True  # all four off is GPT-2: RMSNorm for LayerNorm,
rope = True  # rotary positions for learned ones,
qk_norm = True  # RMSNorm on queries and keys,
swiglu = True  # SwiGLU for GELU
tie_embeddings = False  # one matrix for the token embedding and the head
# ---- optimizer
optimizer = "muon"  # Muon for the blocks' matrices and AdamW for the rest, or adamw for all
learning_rate = 0.01  # peak rate of AdamW
muon_lr = 0.02  # peak rate of Muon, on the same schedule
muon_momentum = 0.85  # 0.95 in runs of many thousand steps
muon_steps = 3  # to orthogonalise; 5 for matrices of more than a few hundred rows
max_iters = 250  # steps, each one update of the weights
max_minutes = 0.0  # train that long instead of max_iters; evaluation and saving not counted
weight_decay = 0.1  # of matrices; vectors do not decay
beta1 = 0.9
beta2 = 0.95
grad_clip = 1.0  # largest norm of all gradients together; 0 is off
layer_lr_decay = 1.0  # each layer's rate over that of the layer above; below 1 for fine-tuning
# ---- learning rate
decay_lr = True  # False: learning_rate throughout
lr_schedule = "linear"  # after warm-up: cosine, linear, constant, cosine_restarts, wsd
warmup_iters = 0  # steps
lr_decay_iters = 0  # the step at which min_lr is reached; 0 is max_iters
min_lr = 0.0
# ---- evaluation and log
eval_interval = 50  # steps between evaluations, the last step included; 0 is never
eval_iters = 10  # micro-batches to evaluate on, evenly spaced over each split
patience = 0  # evaluations without a gain after which training ends; 0 is never
min_delta = 0.0  # the least fall of validation loss that counts as a gain
log_interval = 10  # steps between log lines; 0 is never
wandb_log = False
wandb_project = "gpt"
wandb_run_name = "run"
tensorboard_log = False
# ---- checkpoints: out_dir/ckpt.pt is the newest; it is always saved at the end
checkpoint_interval = 0  # steps between checkpoints; 0 is off
checkpoint_minutes = 5.0  # minutes between checkpoints; 0 is off
always_save_checkpoint = True  # also one after every evaluation
keep_checkpoints = 1  # older ones kept as ckpt_STEP.pt
# ---- machine
device = "cuda" if torch.cuda.is_available() else "cpu"  # cpu, cuda, cuda:1, mps
dtype = ("float32" if device == "cpu" else  # or bfloat16, float16
         "bfloat16" if torch.cuda.is_bf16_supported(including_emulation=False) else "float16")
compile = torch.cuda.is_available()  # torch.compile: slow to start, fast to run
backend = "nccl" if torch.cuda.is_available() else "gloo"  # of torch.distributed

MODEL_SETTINGS = [name for name in vars(GPTConfig()) if name != "vocab_size"]
SCHEDULES = ("cosine", "linear", "constant", "cosine_restarts", "wsd")
RANK, WORLD = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
SIGNALS = []  # (number, time) of those that asked this process to stop


def settings():
    return {name: globals()[name] for name in names(globals())}


def say(message):
    """Print, from the first process only; a full disk or a closed pipe there ends no run."""
    if RANK == 0:
        with contextlib.suppress(OSError):
            print(message, flush=True)


# ---- the parts of a step

def get_lr(it):
    """The learning rate of the step that follows `it` updates.

    Warm-up is linear and ends at learning_rate; the decay ends at min_lr. cosine and
    cosine_restarts (four cycles): Loshchilov and Hutter 2017, arXiv:1608.03983. wsd: constant,
    then linear over the last fifth; Hu et al. 2024, arXiv:2404.06395.
    """
    if not decay_lr:
        return learning_rate
    if it < warmup_iters:
        return learning_rate * (it + 1) / (warmup_iters + 1)
    t = min(1.0, (it - warmup_iters) / max(1, (lr_decay_iters or max_iters) - warmup_iters))
    cycle = t * 4 % 1 if t < 1 else 1.0  # the position in one of the four restarts
    share = {"cosine": (1 + math.cos(math.pi * t)) / 2, "linear": 1 - t, "constant": 1.0,
             "cosine_restarts": (1 + math.cos(math.pi * cycle)) / 2,
             "wsd": min(1.0, 5 * (1 - t))}[lr_schedule]
    return share * learning_rate + (1 - share) * min_lr


def windows(tokens, starts):
    """Cut tokens (N,) at starts (B,): x and y (B, T) on the device, y one token ahead of x."""
    ids = torch.from_numpy(tokens[starts[:, None] + np.arange(block_size + 1)].astype(np.int64))
    if device.startswith("cuda"):
        ids = ids.pin_memory()
    ids = ids.to(device, non_blocking=True)
    return ids[:, :-1], ids[:, 1:]


def get_batch(tokens, step, micro, micro_steps):
    """Micro-batch `micro` of `step` on this process: x and y (B, T).

    A counter-based generator keyed by (seed, step) draws the offsets of the whole global batch, so
    they depend on nothing else; each process and micro-batch takes its slice.
    """
    if micro == micro_steps:  # one past the last is the first of the next step
        step, micro = step + 1, 0
    philox = np.random.Philox(key=[seed, 0 if overfit_one_batch else step])
    starts = np.random.Generator(philox).integers(
        len(tokens) - block_size, size=batch_size * gradient_accumulation_steps)
    return windows(tokens, np.split(starts, WORLD * micro_steps)[RANK * micro_steps + micro])


@torch.no_grad()
def evaluate(model, splits, autocast):
    """{split: mean loss in nats} over evenly spaced windows; None if a signal cut it short."""
    model.eval()
    losses = {}
    for split, tokens in splits.items():
        count = min(eval_iters * batch_size, (len(tokens) - 1) // block_size)
        starts = np.linspace(0, len(tokens) - block_size - 1, count).astype(np.int64)[RANK::WORLD]
        total = 0.0
        for i in range(0, len(starts), batch_size):
            if SIGNALS:
                break
            x, y = windows(tokens, starts[i:i + batch_size])
            with autocast:
                total = total + model(x, y).float() * len(x)
        total, cut = reduce_numbers(float(total), len(SIGNALS))
        losses[split] = total / count
    model.train()
    return None if cut else losses


def reduce_numbers(*numbers, op="SUM"):
    """The SUM or MAX of each number over all processes, on the CPU: the GPU is not waited for."""
    t = torch.tensor(numbers, dtype=torch.float64)
    if WORLD > 1:
        dist.all_reduce(t, getattr(dist.ReduceOp, op))
    return t.tolist()


def average(tensors):
    """Replace each tensor by its mean over the processes."""
    # one all_reduce adds in the same order in every run, DDP's buckets do not: a resume is exact
    flat = torch.nn.utils.parameters_to_vector(tensors)
    dist.all_reduce(flat)
    torch.nn.utils.vector_to_parameters(flat.div_(WORLD), tensors)


POLAR_EXPRESS = ((8.287212, -23.595887, 17.300387), (4.107059, -2.947850, 0.544843),
                 (3.948691, -2.908902, 0.551819), (3.318420, -2.488488, 0.510049),
                 (2.300652, -1.668904, 0.418807))


def orthogonalize(G):
    """Approximately the nearest matrices with orthonormal rows to G (N, rows <= columns, columns).

    Each step is a polynomial (a + b A + c A^2) X, A = X X', that drives all singular values
    towards 1; coefficients of the Polar Express (Amsel et al. 2025, arXiv:2505.16932).
    """
    X = G.bfloat16() if G.is_cuda and dtype == "bfloat16" else G  # where that is fast
    X = X / (X.norm(dim=(-2, -1), keepdim=True) * 1.01 + 1e-7)
    for a, b, c in POLAR_EXPRESS[:muon_steps]:
        A = X @ X.mT
        X = torch.baddbmm(X, torch.baddbmm(A, A, A, beta=b, alpha=c), X, beta=a)
    return X.to(G.dtype)


class Muon(torch.optim.AdamW):
    """AdamW, except that groups with `parts` get Muon: orthogonalised Nesterov momentum.

    Jordan 2024, kellerjordan.github.io/posts/muon. A weight that stacks several matrices (q, k, v)
    is split into its `parts`; matrices of one shape are orthogonalised in one batch. Tall ones
    get sqrt(rows / columns) times the rate.
    """

    @torch.no_grad()
    def step(self, closure=None):
        batches = collections.defaultdict(list)  # shape: [(weight, update, rate)]
        for group in self.param_groups:
            for p in group["params"] if "parts" in group else ():
                state = self.state[p]
                if not state:  # load_state_dict() of AdamW expects a step in every state
                    state.update(step=torch.zeros(()), momentum=torch.zeros_like(p))
                momentum = state["momentum"].lerp_(p.grad, 1 - group["momentum"])
                update = p.grad.lerp_(momentum, group["momentum"])
                p.mul_(1 - group["lr"] * group["weight_decay"])
                rate = group["lr"] * max(1, len(p) / group["parts"] / p.shape[1]) ** 0.5
                for w, u in zip(p.chunk(group["parts"]), update.chunk(group["parts"])):
                    if len(w) > w.shape[1]:
                        w, u = w.mT, u.mT
                    batches[u.shape].append((w, u, rate))
                p.grad = None  # so AdamW skips it
        for batch in batches.values():
            for (w, _, rate), u in zip(batch, orthogonalize(torch.stack([u for _, u, _ in batch]))):
                w.sub_(u, alpha=rate)
        super().step()


def make_optimizer(model):
    """The optimizer for a model; a group's rate is get_lr() times its `lr_scale`."""
    groups = model.param_groups(weight_decay, layer_lr_decay, optimizer == "muon")
    for group in groups:
        if "parts" in group:
            group["lr_scale"] *= muon_lr / learning_rate if learning_rate else 0
            group["momentum"] = muon_momentum
    return Muon(groups, lr=learning_rate, betas=(beta1, beta2), eps=1e-8, fused=True)


# ---- what surrounds a step

def due(interval, step, finished=False):
    return interval > 0 and (step % interval == 0 or finished)


def stop_later(code, frame):
    """Signal handler: stop after this step; at a second signal, at once."""
    SIGNALS.append((code, time.monotonic()))
    if SIGNALS[-1][1] - SIGNALS[0][1] > 1:  # sooner it is a launcher's copy of the first
        signal.signal(code, signal.SIG_DFL)
        signal.raise_signal(code)


@dataclass
class Progress:
    """The state of a run besides weights, optimizer and random generators; in every checkpoint."""
    iter_num: int = 0  # updates done
    tokens_seen: int = 0
    train_seconds: float = 0.0  # in steps; evaluation, logging and saving not counted
    best_val_loss: float = math.inf
    evaluated_iter: int = 0  # of the last evaluation
    gained_loss: float = math.inf  # validation loss at the last gain of min_delta
    stale: int = 0  # evaluations since then
    overflows: int = 0  # float16 steps skipped in a row
    spikes: int = 0
    recent: list = field(default_factory=list)  # [loss, grad norm] of the last 128 steps

    def watch(self, loss, norm, lr, scaler):
        """Stop if the numbers allow no update; warn if they are unusual."""
        where = f"iter {self.iter_num}: loss {loss:.4g}, norm {norm:.4g}, lr {lr:.3g}, {dtype}"
        if not math.isfinite(loss + norm):
            self.overflows += 1
            scale = scaler.get_scale()  # which float16 has just lowered
            if dtype != "float16" or self.overflows == 20 or scale < 1:
                say(f"not finite, stopping: {where}. This step made no update and the last "
                    "checkpoint is untouched; try a lower learning_rate or another dtype")
                sys.exit(1)
            return say(f"float16 overflow, no update: {where}, scale now {scale:.0f}")
        self.overflows = 0
        if len(self.recent) == 128:
            losses, norms = np.array(self.recent).T
            if loss > losses.mean() + 6 * losses.std() or norm > 10 * np.median(norms):
                self.spikes += 1
                say(f"warning: spike {self.spikes}, {where}; the last 128 steps: mean loss "
                    f"{losses.mean():.4f}, median norm {np.median(norms):.3g}")
        self.recent = self.recent[-127:] + [[loss, norm]]


def in_words(step, losses, meta):
    """The losses of an evaluation (nats per token) as a line of text."""
    train, val = losses["train"], losses["val"]
    line = (f"step {step}: train loss {train:.4f}, val loss {val:.4f}, "
            f"perplexity {math.exp(min(val, 99)):.2f}")
    if "val" in meta:
        bits = val / math.log(2) * meta["val"]["tokens"]
        line += f", bits per byte {bits / meta['val']['bytes']:.4f}"
    return line


def matmul_rate(kind):
    """FLOP/s of all processes together in square matmuls of a dtype: the best in 0.1 s."""
    n = 8192 if device.startswith("cuda") else 1024
    a = torch.randn(n, n, device=device, dtype=getattr(torch, kind))
    seconds = []
    while sum(seconds) < 0.1:
        start = time.perf_counter()
        (a @ a)[0, 0].item()  # waits for the device
        seconds.append(time.perf_counter() - start)
    return reduce_numbers(2 * n ** 3 / min(seconds))[0]


def peak_memory():
    """The most memory in MB that this process has held, on the GPU if it uses one."""
    if device.startswith("cuda"):
        return torch.cuda.max_memory_allocated() / 1e6
    unit = 1e6 if sys.platform == "darwin" else 1e3  # bytes there, KiB on Linux
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / unit if resource else math.nan


def open_log(step):
    """A function log(row) for out_dir/log.csv, cut back to `step`, and for wandb and TensorBoard.

    A log that fails is dropped with a warning.
    """
    path, rows, logs = os.path.join(out_dir, "log.csv"), [], []
    columns = ["step", "tokens", "train_loss", "val_loss", "lr", "grad_norm", "ms",
               "tokens_per_s", "samples_per_s", "mfu", "memory_mb"]
    with contextlib.suppress(OSError), open(path, errors="replace") as f:
        rows = [r for r in f.read().split("\n")[1:-1] if r.count(",") == len(columns) - 1
                and r.split(",")[0].isdigit() and int(r.split(",")[0]) <= step]

    def to_csv(row):
        with open(path, "a") as f:
            f.write(",".join(f"{row[c]:.10g}" if c in row else "" for c in columns) + "\n")

    def log(row):
        for write in list(logs):
            try:
                write(row)
            except Exception as e:
                logs.remove(write)
                say(f"warning: a log fails and is dropped: {e}")

    try:
        with open(path + ".tmp", "w") as f:
            f.write("\n".join([",".join(columns), *rows, ""]))
        os.replace(path + ".tmp", path)
        logs.append(to_csv)
        if wandb_log:
            import wandb
            wandb.init(project=wandb_project, name=wandb_run_name, config=settings())
            logs.append(lambda row: wandb.log(row, step=row["step"]))
        if tensorboard_log:
            from torch.utils.tensorboard import SummaryWriter
            board = SummaryWriter(out_dir)
            logs.append(lambda row: [board.add_scalar(k, row[k], row["step"]) for k in row])
    except Exception as e:
        say(f"warning: a log cannot be opened: {e}")
    return log


def plot_log():
    """out_dir/loss.png from log.csv, where matplotlib is installed."""
    with contextlib.suppress(ImportError, OSError, ValueError):  # also where there is no log
        from matplotlib.figure import Figure
        rows = np.genfromtxt(os.path.join(out_dir, "log.csv"), delimiter=",", names=True, ndmin=1)
        axes = Figure().subplots()
        for name in ("train_loss", "val_loss"):
            seen = np.isfinite(rows[name])
            axes.plot(rows["step"][seen], rows[name][seen], label=name)
        axes.set(xlabel="step", ylabel="loss (nats per token)")
        axes.legend()
        axes.figure.savefig(os.path.join(out_dir, "loss.png"))


# ---- checkpoints

def get_rng():
    """The state of this process's random generators, as plain values and tensors."""
    name, keys, *rest = np.random.get_state()
    state = {"python": random.getstate(), "numpy": (name, keys.tolist(), *rest),
             "torch": torch.get_rng_state()}
    if (kind := torch.device(device).type) != "cpu":
        state[kind] = getattr(torch, kind).get_rng_state()
    return state


def set_rng(state):
    random.setstate(state["python"])
    np.random.set_state(state["numpy"])
    torch.set_rng_state(state["torch"])
    if (kind := torch.device(device).type) in state:  # cuda or mps
        getattr(torch, kind).set_rng_state(state[kind])


def save(state, name):
    """Write out_dir/name, keeping the old file until the new one is safe on disk; False if not."""
    path = os.path.join(out_dir, name)
    try:
        if not all(v.isfinite().all() for v in state["model"].values()):
            raise ValueError("a weight is not finite")
        with open(path + ".tmp", "wb") as f:
            torch.save(state, f)
        sync(path + ".tmp")
        check_file(path + ".tmp")
        os.replace(path + ".tmp", path)
        sync(out_dir)  # the new name is on the disk when its folder is
    except Exception as e:  # torch hides a full disk's OSError behind a RuntimeError
        e = e.__context__ if isinstance(e.__context__, OSError) else e
        size = sum(v.nbytes for v in state["model"].values()) * (3 if "optimizer" in state else 1)
        say(f"warning: {path} is not saved, about {size / 1e6:.1f} MB: {e}")
        with contextlib.suppress(OSError):
            os.remove(path + ".tmp")
        return False
    if name == "ckpt.pt" and keep_checkpoints:
        keep_copy(state["iter_num"])
    return True


def kept_copies(folder):
    """Paths of folder/ckpt_<step>.pt, the newest first."""
    paths = glob.glob(os.path.join(glob.escape(folder), "ckpt_*.pt"))
    steps = {int(m[1]): path for path in paths if (m := re.search(r"ckpt_(\d+)\.pt$", path))}
    return [steps[step] for step in sorted(steps, reverse=True)]


def keep_copy(step):
    """Hard-link ckpt.pt to ckpt_<step>.pt and remove the oldest of those."""
    kept = os.path.join(out_dir, f"ckpt_{step}.pt")
    try:
        with contextlib.suppress(FileNotFoundError):
            os.remove(kept)
        os.link(os.path.join(out_dir, "ckpt.pt"), kept)
        copies = kept_copies(out_dir)
        for path in copies[copies.index(kept) + keep_checkpoints + 1:]:
            os.remove(path)
    except OSError as e:
        say(f"warning: {kept} is not kept: {e}")


def newest_checkpoint(folder):
    """The newest good checkpoint in a folder; None if there is no checkpoint file at all."""
    errors = []
    for path in filter(os.path.exists, [os.path.join(folder, "ckpt.pt"), *kept_copies(folder)]):
        try:
            state = read_checkpoint(path)
        except ValueError as e:
            errors.append(str(e))
            continue
        if errors:
            say(f"warning: {'; '.join(errors)}; going on from {path}")
        return state
    if errors:
        refuse("; ".join(errors) + "; --init_from=scratch starts anew and keeps these files")
    return None


def load_weights(name):
    """`model_args`, `model` and more of GPT-2 (gpt2, gpt2-medium, ...) or of a checkpoint file."""
    with refusing(f"init_from={name} cannot be loaded"):
        if not name.startswith("gpt2") or os.path.isfile(name):
            return read_checkpoint(name)
        args, state = from_hugging_face(name)  # needs the package transformers
        return {"model_args": args, "model": state, "tokenizer": {"name": "gpt2"}}


# ---- before the first step

def check_settings():
    """Refuse settings that cannot work, and say the fix, before anything is created."""
    def check(fine, message):
        if not fine:
            refuse(message)
    sizes = ("batch_size", "gradient_accumulation_steps", "block_size", "n_layer", "n_head",
             "n_embd", "eval_iters")
    for name, value in settings().items():
        if type(value) in (int, float):
            least = 1 if name in sizes else 0
            check(least <= value < 2 ** 63, f"{name}={value} must be from {least} to below 2^63")
        if name in ("dropout", "beta1", "beta2", "muon_momentum"):
            check(value < 1, f"{name}={value} must be below 1")
    for name, legal in (("lr_schedule", SCHEDULES), ("optimizer", ("muon", "adamw")),
                        ("dtype", ("float32", "bfloat16", "float16"))):
        value = globals()[name]
        check(value in legal, f"{name}={value} must be one of {', '.join(legal)}")
    check(not decay_lr or lr_schedule == "constant" or min_lr <= learning_rate,
          f"min_lr={min_lr} must not be above learning_rate={learning_rate}")
    check(0 < layer_lr_decay <= 1, "layer_lr_decay must be above 0 and at most 1, which is off")
    check(n_embd % n_head == 0, f"n_embd={n_embd} must be a multiple of n_head={n_head}")
    check(not rope or n_embd // n_head % 2 == 0,
          f"rope rotates pairs: n_embd / n_head = {n_embd // n_head} must be even")
    whole = batch_size * gradient_accumulation_steps
    check(whole * block_size < 2 ** 40,
          "batch_size * gradient_accumulation_steps * block_size must be below 2^40")
    check(whole % WORLD == 0, f"batch_size * gradient_accumulation_steps = {whole} sequences do "
          f"not divide by {WORLD} processes, but by {[n for n in range(1, 65) if whole % n == 0]}")
    for package, wanted in (("wandb", wandb_log), ("tensorboard", tensorboard_log)):
        with refusing(f"{package}_log=True needs the package {package}: pip install {package}"):
            if wanted:
                importlib.import_module(package)


def starting_point(given):
    """The checkpoint to start from (from scratch: its `model_args` only), and whether to resume it.

    A resume takes the stored settings, except those `given`; a loaded model keeps its shape.
    """
    resume, source, stored = init_from in ("resume", "auto"), None, {}
    if resume:
        source = newest_checkpoint(out_dir)
    elif init_from != "scratch":
        source = load_weights(init_from)
    if source is None and init_from == "resume":
        refuse(f"there is no checkpoint in {out_dir}; python train.py starts a run")
    if source is None:
        return {"model_args": {name: globals()[name] for name in MODEL_SETTINGS}}, False

    shape = vars(GPTConfig(**source["model_args"]))
    if resume:
        if "optimizer" not in source:
            refuse(f"the checkpoint in {out_dir} has weights but no optimizer state: "
                   "--init_from=PATH starts a new run from it")
        stored = source.get("config", {})
        if "optimizer" not in stored:  # nanoGPT's
            stored |= {"optimizer": "adamw", "lr_schedule": "cosine"}
        if str(stored.get("device", device)).split(":")[0] != device.split(":")[0]:
            machine = ("device", "dtype", "backend", "compile")
            stored = {k: v for k, v in stored.items() if k not in machine}
    elif given.get("block_size", math.inf) < shape["block_size"]:
        shape["block_size"] = given["block_size"]  # a shorter context is fine
    fixed = {name: shape[name] for name in MODEL_SETTINGS if name != "dropout"}
    wrong = [f"{name}={given[name]} (it has {value})" for name, value in fixed.items()
             if given.get(name, value) != value]
    if wrong:
        refuse(f"the loaded model has another shape than {', '.join(wrong)}")
    here = ("init_from", "out_dir", "eval_only", "benchmark", "allow_data_change")  # never restored
    for name, value in {**stored, **fixed}.items():
        if name not in settings() or name in here:
            continue
        kind = type(globals()[name])
        if name in given and given[name] != value:
            say(f"changed since the checkpoint: {name} from {value} to {given[name]}")
        elif type(value) is kind or kind is float and type(value) is int:  # nanoGPT's dropout=0
            globals()[name] = kind(value)
        else:
            refuse(f"the checkpoint in {out_dir} has {name}={value!r}, which cannot be")
    return {**source, "model_args": {**shape, "dropout": dropout}}, resume


def take_folder(resume):
    """Create out_dir and lock it; move an earlier run out of the way of a new one."""
    path = functools.partial(os.path.join, out_dir)
    with refusing(f"cannot write to out_dir={out_dir}, or another process trains in it"):
        os.makedirs(out_dir, exist_ok=True)
        lock(path("lock"))
        ours = re.compile(r"(ckpt|ckpt_\d+|best)\.pt|log\.csv|loss\.png").fullmatch
        files = [f for f in os.listdir(out_dir) if ours(f)]
        if not resume and any(f.endswith(".pt") for f in files):
            old = next(o for n in range(1, 10 ** 6) if not os.path.exists(o := path(f"old-{n}")))
            os.mkdir(old)
            for f in files:
                os.replace(path(f), os.path.join(old, f))
            say(f"the run that was in {out_dir} is kept in {old}")
        for f in os.listdir(out_dir):
            if f.endswith(".tmp") and ours(f[:-4]):  # of a save that was killed
                os.remove(path(f))


def compiled(model, batch, autocast):
    """torch.compile(model), tried out on a batch; the plain model if that fails."""
    start = time.perf_counter()
    try:
        fast = torch.compile(model)
        with autocast:
            fast(*batch).backward()
        say(f"compiled in {time.perf_counter() - start:.0f} s")
    except Exception as e:
        reason = str(e).partition("\n")[0] or type(e).__name__
        say(f"torch.compile fails, going on without it: {reason}")
        fast = model
    model.zero_grad(set_to_none=True)
    return fast


def main(given=()):
    """The run from top to bottom. given: {name: value} of the settings that the user has set."""
    global device, dtype, max_iters, max_minutes, log_interval, eval_interval, patience
    source, resume = starting_point(dict(given))
    check_settings()

    # data
    folder, args = f"data/{dataset}", source["model_args"]
    meta = read_meta(folder)
    args.setdefault("vocab_size", meta["vocab_size"])
    splits, data = {}, {"dataset": dataset}  # the tokens; the fingerprint that checkpoints keep
    for split in ("train", "val"):
        splits[split], data[split] = read_tokens(folder, split, args["vocab_size"], block_size)
    known = source.get("data", {}) if resume else {}
    if not allow_data_change and (source.get("tokenizer", meta["tokenizer"]) != meta["tokenizer"]
                                  or known.get("dataset") == dataset and known != data):
        refuse(f"{folder} is not what the checkpoint was trained on: the text or the tokenizer has "
               "changed; --allow_data_change=True goes on anyway")

    # device and processes
    with refusing(f"device={device} cannot be used, --device=cpu can"):
        device_type = torch.device(device).type
        if device_type not in ("cpu", "cuda", "mps"):
            raise ValueError("it is not known")
        if device_type == "cuda":  # before anything touches a GPU
            here, gpus = int(os.environ.get("LOCAL_WORLD_SIZE", 1)), torch.cuda.device_count()
            if here > gpus:  # every process says no, as only the first is heard
                raise ValueError(f"{here} processes need as many GPUs, there are {gpus}")
            index = os.environ["LOCAL_RANK"] if WORLD > 1 else torch.device(device).index or 0
            device = f"cuda:{index}"
            torch.cuda.set_device(device)
        torch.empty(1, device=device)
    if WORLD > 1:
        with refusing(f"the {WORLD} processes cannot meet"):
            dist.init_process_group(
                f"cpu:gloo,cuda:{backend}" if device_type == "cuda" else "gloo",
                timeout=datetime.timedelta(minutes=10))
        seen = [None] * WORLD
        dist.all_gather_object(seen, [resume, source.get("iter_num", 0), data])
        if seen.count(seen[0]) < WORLD:
            refuse(f"the processes do not see the same checkpoint in {out_dir} or the same data in "
                   f"{folder}: both must be on a file system that all machines share")
    if deterministic:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        torch.use_deterministic_algorithms(True)
    torch.set_float32_matmul_precision("high")  # TF32 on CUDA
    base = matmul_rate("float32")
    rate = base if dtype == "float32" else matmul_rate(dtype)
    known = source.get("config", {}).get("dtype"), source.get("versions", {}).get("device")
    if rate < base / 2 and not (resume and known == (dtype, device_type)):  # it keeps its dtype
        say(f"{dtype} is {base / rate:.0f} times slower than float32 here: using float32")
        dtype, rate = "float32", base
    if device_type == "cuda":
        torch.cuda.reset_peak_memory_stats()  # of those products
    autocast = torch.autocast(device_type, getattr(torch, dtype), enabled=dtype != "float32")

    # model and batches
    torch.manual_seed(seed)
    fresh = "model" not in source
    model = GPT(GPTConfig(**args)) if fresh else load_model(args, source["model"])
    model.to(device)
    sequences = batch_size * gradient_accumulation_steps // WORLD  # of one step on this process
    tokens_per_step = sequences * WORLD * block_size
    micro_steps = next(n for n in range(1, sequences + 1)  # the fewest micro-batches, all equal
                       if sequences % n == 0 and sequences // n <= batch_size)
    batch = functools.partial(get_batch, splits["train"], micro_steps=micro_steps)
    run_model = compiled(model, batch(0, 0), autocast) if compile else model
    versions = {"torch": str(torch.__version__), "device": device_type, "processes": WORLD,
                "threads": torch.get_num_threads(), "compile": run_model is not model}
    parameters = sum(w.numel() for w in model.parameters()) / 1e6
    say(f"{folder} ({meta['source']}): {len(splits['train']):,} tokens to train, "
        f"{len(splits['val']):,} to validate, vocabulary {meta['vocab_size']:,}\n"
        f"{parameters:.2f}M parameters in {dtype}, {optimizer}, {tokens_per_step:,} tokens a step, "
        f"{len(splits['train']) / tokens_per_step:,.1f} steps a pass over the text\n"
        f"{', '.join(f'{k} {v}' for k, v in versions.items())}, "
        f"matrix products at {rate / 1e9:,.0f} GFLOP/s")

    # the rest of the state; the random generators after everything that draws from them
    opt, p = make_optimizer(model), Progress()
    scaler = torch.amp.GradScaler(device_type, enabled=dtype == "float16")
    random.seed(seed + RANK)
    np.random.seed((seed + RANK) % 2 ** 32)
    torch.manual_seed(seed + RANK)
    if resume:
        with refusing(f"the checkpoint in {out_dir} does not fit this run"):
            load_optimizer(opt, source["optimizer"], model)
            scaler.load_state_dict(source.get("scaler") or scaler.state_dict())
            p = Progress(**{k: type(v)(source[k]) for k, v in vars(p).items() if k in source})
            if not all(0 <= v < 2 ** 62 for v in (p.iter_num, p.tokens_seen, p.train_seconds)):
                raise ValueError("iter_num, tokens_seen or train_seconds is out of range")
            for k, old in source.get("versions", {"trainer": "nanoGPT"}).items():
                if old != versions.get(k):
                    say(f"not bit-exact from here: {k} was {old}, now {versions.get(k)}")
            if len(source.get("rng", ())) == WORLD:
                set_rng(source["rng"][RANK])
            else:
                say("not bit-exact from here: the checkpoint has other random generators")
    if eval_only:
        say(in_words(p.iter_num, evaluate(run_model, splits, autocast), meta))
        return 0
    if benchmark:
        max_iters, log_interval = p.iter_num + 50, 50
        eval_interval, patience, max_minutes = 0, 0, 0.0
    if resume:
        evaluated = eval_interval == 0 or p.evaluated_iter == p.iter_num
        if p.iter_num >= max_iters and evaluated and not max_minutes:
            say(f"already at step {p.iter_num}; a larger --max_iters than that goes on")
            return 0
        say(f"resuming after step {p.iter_num}")
    log = lambda row: None
    if RANK == 0 and not benchmark:
        take_folder(resume)
        log = open_log(p.iter_num)
    del source  # frees its memory
    signal.signal(signal.SIGINT, stop_later)
    signal.signal(signal.SIGTERM, stop_later)

    parts, last = collections.Counter(), 0.0  # seconds in each part of the steps; the last look
    start, reported = p.iter_num, (p.iter_num, p.train_seconds)

    def clock(part):
        """Add the time since the last look to a part of the steps."""
        nonlocal last
        if benchmark and device_type == "cuda":
            torch.cuda.synchronize()
        last, before = time.perf_counter(), last
        parts[part] += last - before
        p.train_seconds += last - before

    def keep(name):
        """Save best.pt (weights only) or ckpt.pt (all that an exact resume needs)."""
        state = {"model": model.state_dict(), "model_args": args, "config": settings(), **vars(p),
                 "tokenizer": meta["tokenizer"], "data": data, "versions": versions}
        if name == "ckpt.pt":
            rng = [get_rng()] * WORLD
            if WORLD > 1:
                dist.all_gather_object(rng, rng[RANK])
            state |= {"optimizer": opt.state_dict(), "scaler": scaler.state_dict(), "rng": rng}
        return RANK > 0 or save(state, name)

    def judge():
        """Evaluate, save the best weights and count evaluations without a gain."""
        losses = evaluate(run_model, splits, autocast)
        if losses:
            say(in_words(p.iter_num, losses, meta))
            p.evaluated_iter = p.iter_num
            p.stale += 1
            if losses["val"] < p.gained_loss - min_delta:
                p.gained_loss, p.stale = losses["val"], 0
            if losses["val"] < p.best_val_loss:
                p.best_val_loss = losses["val"]
                keep("best.pt")
        return losses

    def report(losses):
        """Print and log the last step's numbers and the speed since the last report."""
        nonlocal reported
        steps, seconds = p.iter_num - reported[0], p.train_seconds - reported[1]
        reported = p.iter_num, p.train_seconds
        speed = steps * tokens_per_step / seconds
        ms, mfu = 1000 * seconds / steps, speed * model.flops_per_token() / rate
        row = {"step": p.iter_num, "tokens": p.tokens_seen, "train_loss": loss, "lr": lr,
               "grad_norm": norm, "ms": ms, "tokens_per_s": speed, "mfu": mfu,
               "samples_per_s": speed / block_size, "memory_mb": peak_memory()}
        log(row | ({"val_loss": losses["val"]} if losses else {}))
        left = datetime.timedelta(seconds=round(min(1e12, (max_iters - p.iter_num) * ms / 1000)))
        say(f"iter {p.iter_num}: loss {loss:.4f}, time {ms:.2f}ms, mfu {100 * mfu:.2f}%, "
            f"norm {norm:.3f}, lr {lr:.2e}, {speed:,.0f} tokens/s, {left} left")

    saved_at, saved_well = time.monotonic(), True
    if max_minutes:
        max_iters = 10 ** 9  # until the speed is known
    x, y = batch(start, 0)
    while True:
        # ---- between two steps: evaluate, log, save, stop
        if max_minutes and p.train_seconds:  # the steps that fit, at the mean speed so far
            seconds = reduce_numbers(p.train_seconds, op="MAX")[0]  # so that the processes agree
            speed = p.tokens_seen / tokens_per_step / seconds  # steps per second
            max_iters = p.iter_num + round(max(0, 60 * max_minutes - seconds) * speed)
            if seconds > 48 * max_minutes:  # four fifths are over: the rest is certain
                say(f"{max_minutes} minutes are {max_iters} steps")
                max_minutes = 0.0  # so that a resume keeps to these steps
        finished, losses = p.iter_num >= max_iters, None
        if due(eval_interval, p.iter_num, finished) and p.iter_num > p.evaluated_iter:
            losses = judge()  # None if a signal cut it short
        finished = finished or 0 < patience <= p.stale
        if p.iter_num > start and (losses or due(log_interval, p.iter_num, finished)):
            report(losses)
        late = 0 < 60 * checkpoint_minutes < time.monotonic() - saved_at
        code, late = reduce_numbers(SIGNALS[0][0] if SIGNALS else 0, late, op="MAX")
        wanted = finished or code or late or due(checkpoint_interval, p.iter_num)
        if not benchmark and (losses and (always_save_checkpoint or finished)
                              or p.iter_num > start and wanted):
            saved_well, saved_at = keep("ckpt.pt"), time.monotonic()
        if finished or code:
            break

        # ---- one step
        last = time.perf_counter()
        lr = get_lr(p.iter_num)
        for group in opt.param_groups:
            group["lr"] = lr * group["lr_scale"]
        total = torch.zeros((), device=device)
        for micro in range(1, micro_steps + 1):
            with autocast:
                loss = run_model(x, y) / micro_steps
            clock("forward")
            x, y = batch(p.iter_num, micro)  # the next one, while the GPU works
            clock("data")
            scaler.scale(loss).backward()
            total += loss.detach()
            clock("backward")
        if WORLD > 1:
            average([w.grad for w in model.parameters()] + [total])
        scaler.unscale_(opt)
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), grad_clip or math.inf)
        loss, norm = torch.stack((total, norm)).tolist()  # the step's one wait for the device
        if math.isfinite(loss + norm):
            scaler.step(opt)
        scaler.update()
        opt.zero_grad(set_to_none=True)
        p.iter_num += 1
        p.tokens_seen += tokens_per_step
        p.watch(loss, norm, lr, scaler)
        clock("optimizer")
        if p.iter_num == 1 and fresh and abs(loss - math.log(args["vocab_size"])) > 1:
            say(f"warning: the first loss is {loss:.2f}; a fresh model should be near "
                f"ln(vocabulary) = {math.log(args['vocab_size']):.2f}")

    if benchmark:
        say(", ".join(f"{k} {100 * v / parts.total():.1f}%" for k, v in parts.items()))
    elif code:
        say(f"stopped by signal {int(code)} after step {p.iter_num}; to go on: python train.py "
            f"--init_from=resume --out_dir={out_dir}")
    else:
        if RANK == 0:
            plot_log()
        best = f", best val loss {p.best_val_loss:.4f}" if p.evaluated_iter else ""
        say(f"trained {p.iter_num} steps in {p.train_seconds:.0f} s{best}; to write text: "
            f"python sample.py --out_dir={out_dir}")
    return 128 + int(code) if code else 0 if saved_well else 1


if __name__ == "__main__":
    try:
        status = main(configure(globals()))
        if WORLD > 1:
            dist.destroy_process_group()
        sys.exit(status)
    except KeyboardInterrupt:
        sys.exit(130)
    except (RuntimeError, MemoryError) as e:  # torch.OutOfMemoryError is a RuntimeError
        if not re.search("out of memory|allocate", f"{type(e).__name__} {e}", re.IGNORECASE):
            raise
        print(f"train.py: out of memory at batch_size={batch_size}, block_size={block_size}: halve "
              "batch_size and double gradient_accumulation_steps, which trains the same",
              file=sys.stderr)  # from whichever process it is
        sys.exit(2)
