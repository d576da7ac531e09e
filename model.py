"""The GPT: GPT-2 with four modern parts, each of which can be switched on or off.

With rmsnorm, rope, qk_norm and swiglu all off it is GPT-2, with all on it is Qwen3. Modules have
GPT-2's names. Shapes: B batch, T time (up to block_size), C channels (n_embd), H heads, D = C / H,
V vocabulary.
"""
import math
import zipfile
from dataclasses import dataclass

import torch
import torch.nn as nn
from torch.nn import functional as F


@dataclass
class GPTConfig:  # defaults: GPT-2 124M; what nanoGPT's checkpoints lack is off, as it was there
    block_size: int = 1024
    vocab_size: int = 50257
    n_layer: int = 12
    n_head: int = 12
    n_embd: int = 768
    dropout: float = 0.0
    bias: bool = True  # biases in the linear layers and LayerNorms
    rmsnorm: bool = False  # RMSNorm for LayerNorm
    rope: bool = False  # rotary positions for learned ones
    qk_norm: bool = False  # RMSNorm on each head's queries and keys
    swiglu: bool = False  # SwiGLU for GELU in the MLP
    tie_embeddings: bool = True  # one matrix for the token embedding and the head


class RMSNorm(nn.RMSNorm):
    """nn.RMSNorm, the weight in x's dtype: autocast leaves it, which bars the fused kernel."""

    def forward(self, x):
        return F.rms_norm(x, self.normalized_shape, self.weight.type_as(x), self.eps)


def norm(config):
    if config.rmsnorm:
        return RMSNorm(config.n_embd, eps=1e-6)
    return nn.LayerNorm(config.n_embd, bias=config.bias)


def rotary(T, D):
    """cos and sin (T, D) of the rotary angles (Su et al. 2021, arXiv:2104.09864)."""
    frequency = 10000.0 ** (-torch.arange(0, D, 2) / D)
    angle = torch.outer(torch.arange(T), frequency).repeat(1, 2)  # (T, D): pairs are D/2 apart
    return angle.cos(), angle.sin()


def rotate(x, cos, sin):
    """Rotate x (B, H, T, D) by the angles of its positions."""
    a, b = x.chunk(2, dim=-1)
    return (x * cos + torch.cat((-b, a), dim=-1) * sin).type_as(x)


class CausalSelfAttention(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.n_head, self.dropout = config.n_head, config.dropout
        self.c_attn = nn.Linear(config.n_embd, 3 * config.n_embd, bias=config.bias)  # q, k, v
        self.c_proj = nn.Linear(config.n_embd, config.n_embd, bias=config.bias)
        self.resid_dropout = nn.Dropout(config.dropout)
        head_norm = RMSNorm if config.qk_norm else nn.Identity
        self.q_norm = head_norm(config.n_embd // config.n_head, eps=1e-6)
        self.k_norm = head_norm(config.n_embd // config.n_head, eps=1e-6)
        self.rope = config.rope

    def forward(self, x, cos, sin):
        B, T, C = x.shape
        q, k, v = self.c_attn(x).view(B, T, 3, self.n_head, -1).unbind(2)  # (B, T, H, D) each
        q, k = self.q_norm(q).transpose(1, 2), self.k_norm(k).transpose(1, 2)  # (B, H, T, D)
        v = v.transpose(1, 2)
        if self.rope:
            q, k = rotate(q, cos, sin), rotate(k, cos, sin)
        y = F.scaled_dot_product_attention(
            q, k, v, dropout_p=self.dropout if self.training else 0.0, is_causal=True)
        return self.resid_dropout(self.c_proj(y.transpose(1, 2).reshape(B, T, C)))


class MLP(nn.Module):
    def __init__(self, config):
        super().__init__()
        C, self.swiglu = config.n_embd, config.swiglu
        # three matrices of 8/3 C have the parameters of two of 4 C; multiples of 32 are faster
        hidden = max(1, round(8 * C / 3 / 32)) * 32 if self.swiglu else 4 * C
        self.c_fc = nn.Linear(C, hidden, bias=config.bias)
        if self.swiglu:
            self.c_gate = nn.Linear(C, hidden, bias=config.bias)
        self.c_proj = nn.Linear(hidden, C, bias=config.bias)
        self.dropout = nn.Dropout(config.dropout)

    def forward(self, x):
        if self.swiglu:  # Shazeer 2020, arXiv:2002.05202
            x = F.silu(self.c_gate(x)) * self.c_fc(x)
        else:  # the tanh form, as in GPT-2
            x = F.gelu(self.c_fc(x), approximate="tanh")
        return self.dropout(self.c_proj(x))


class Block(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.ln_1, self.attn = norm(config), CausalSelfAttention(config)
        self.ln_2, self.mlp = norm(config), MLP(config)

    def forward(self, x, cos, sin):
        x = x + self.attn(self.ln_1(x), cos, sin)
        return x + self.mlp(self.ln_2(x))


class ChunkedCrossEntropy(torch.autograd.Function):
    """cross_entropy(linear(x, weight), targets) that never holds the logits of more than 512 rows.

    The forward pass computes the gradients too, while the chunk's logits are there. On a CPU this
    takes 0.85 of the time of torch's F.linear_cross_entropy, and half of the plain form's.
    """

    @staticmethod
    def forward(ctx, x, weight, targets, training):  # (N, C), (V, C), (N,)
        kept = (targets >= 0).to(x.dtype)
        share = kept / kept.sum()  # of each row in the mean
        loss, dx, dw = x.new_zeros(()), torch.empty_like(x), torch.zeros_like(weight)
        buffer = x.new_empty(len(weight) * min(512, len(x)))
        chunks = (tensor.split(512) for tensor in (x, targets.clamp(min=0), share, dx))
        for x, t, share, d in zip(*chunks):
            logits = buffer[:len(weight) * len(x)].view(-1, len(x))  # (V, rows) is faster on CPUs
            torch.mm(weight, x.T, out=logits)
            right, top = logits.gather(0, t[None])[0], logits.amax(0)
            total = logits.sub_(top).exp_().sum(0)  # softmax is logits / total
            loss += share @ (total.log() + top - right)
            if training:
                share, scale = share[:, None], (share / total)[:, None]
                torch.mm(logits.T, weight, out=d).mul_(scale).sub_(share * weight[t])
                dw.addmm_(logits, scale * x).index_add_(0, t, share * x, alpha=-1)
        ctx.save_for_backward(dx, dw)
        return loss

    @staticmethod
    def backward(ctx, grad):
        dx, dw = ctx.saved_tensors
        return grad * dx, grad * dw, None, None


def head_loss(x, weight, targets):
    """Mean cross entropy in nats: hidden states x (N, C), head (V, C), targets (N,), -1 ignored."""
    if (len(weight) < 1024 or torch.is_autocast_enabled(x.device.type)
            or torch.compiler.is_compiling()):  # where the plain form is as fast, casts or fuses
        return F.cross_entropy(F.linear(x, weight), targets, ignore_index=-1)
    return ChunkedCrossEntropy.apply(x, weight, targets, torch.is_grad_enabled())


class GPT(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.config = config
        parts = {"wte": nn.Embedding(config.vocab_size, config.n_embd)}
        if not config.rope:
            parts["wpe"] = nn.Embedding(config.block_size, config.n_embd)
        parts["drop"] = nn.Dropout(config.dropout)
        parts["h"] = nn.ModuleList(Block(config) for _ in range(config.n_layer))
        parts["ln_f"] = norm(config)
        self.transformer = nn.ModuleDict(parts)
        self.lm_head = nn.Linear(config.n_embd, config.vocab_size, bias=False)
        if config.tie_embeddings:
            self.lm_head.weight = self.transformer.wte.weight
        cos, sin = rotary(config.block_size, config.n_embd // config.n_head)
        self.register_buffer("cos", cos, persistent=False)
        self.register_buffer("sin", sin, persistent=False)
        for name, p in self.named_parameters():  # GPT-2's: std 0.02, less into the residual
            if p.dim() >= 2:
                residual = name.endswith("c_proj.weight")
                nn.init.normal_(p, std=0.02 / math.sqrt(2 * config.n_layer if residual else 1))
            elif name.endswith("bias"):
                nn.init.zeros_(p)

    def hidden(self, idx):
        """Token ids (B, T) -> the hidden states that the head reads (B, T, C)."""
        T = idx.shape[1]
        x = self.transformer.wte(idx)
        if not self.config.rope:
            x = x + self.transformer.wpe.weight[:T]
        x = self.transformer.drop(x)
        for block in self.transformer.h:
            x = block(x, self.cos[:T], self.sin[:T])
        return self.transformer.ln_f(x)

    def forward(self, idx, targets=None):
        """Token ids (B, T) -> logits (B, T, V); or, given targets (B, T), the mean loss in nats."""
        x = self.hidden(idx)
        if targets is None:
            return self.lm_head(x)
        return head_loss(x.flatten(0, 1), self.lm_head.weight, targets.flatten())

    @torch.no_grad()
    def generate(self, idx, max_new_tokens, temperature=1.0, top_k=0, top_p=1.0):
        """Continue idx (B, T), yielding new token ids (B, 1) one at a time.

        The model sees the last block_size tokens. temperature 0 takes the likeliest token; top_k 0
        and top_p 1 are off. top_p: Holtzman et al. 2020, arXiv:1904.09751.
        """
        for _ in range(max_new_tokens):
            x = self.hidden(idx[:, -self.config.block_size:])
            logits = self.lm_head(x[:, -1]).float()  # (B, V)
            if temperature == 0:
                token = logits.argmax(-1, keepdim=True)
            else:
                logits, order = (logits / temperature).sort(-1, descending=True)
                p = logits.softmax(-1)
                if top_p < 1:  # the likeliest token always stays
                    p[p.cumsum(-1) - p >= top_p] = 0
                if top_k > 0:
                    p[:, top_k:] = 0
                token = order.gather(-1, torch.multinomial(p, 1))
            yield token
            idx = torch.cat((idx, token), dim=1)

    def flops_per_token(self):
        """Forward and backward: 6 N + 12 L C T (Chowdhery et al. 2022, arXiv:2204.02311)."""
        c, n = self.config, sum(w.numel() for w in self.parameters())
        if not c.rope:  # a table that is only looked up costs nothing
            n -= self.transformer.wpe.weight.numel()
        if not c.tie_embeddings:
            n -= self.transformer.wte.weight.numel()
        return 6 * n + 12 * c.n_layer * c.n_embd * c.block_size

    def param_groups(self, weight_decay, layer_lr_decay=1.0, muon=False):
        """Groups for the optimizer: matrices decay, vectors do not (GPT-3's rule).

        A group's rate is multiplied by its `lr_scale`: layer_lr_decay for every layer between it
        and the head (Howard and Ruder 2018, arXiv:1801.06146). With muon, groups of the blocks'
        matrices have `parts`, the number of matrices stacked in one weight.
        """
        groups = {}
        for name, p in self.named_parameters():
            matrix, in_block = p.dim() >= 2, name.startswith("transformer.h.")
            depth = -1  # the embeddings
            if in_block:
                depth = int(name.split(".")[2])
            elif name.startswith(("transformer.ln_f", "lm_head")):
                depth = self.config.n_layer
            group = {"weight_decay": weight_decay if matrix else 0.0,
                     "lr_scale": layer_lr_decay ** (self.config.n_layer - depth)}
            if muon and in_block and matrix:
                group["parts"] = 3 if "c_attn" in name else 1  # q, k and v
            group = groups.setdefault(tuple(group.items()), {**group, "params": []})
            group["params"].append((name, p))
        return list(groups.values())


def load_model(model_args, state):
    """The GPT of a checkpoint (also nanoGPT's), from its `model_args` and `model`.

    A smaller block_size crops learned positions. TypeError or RuntimeError if they do not fit.
    """
    state = {k.removeprefix("module.").removeprefix("_orig_mod."): v for k, v in state.items()}
    model = GPT(GPTConfig(**model_args))
    if "transformer.wpe.weight" in state:
        state["transformer.wpe.weight"] = state["transformer.wpe.weight"][:model.config.block_size]
    model.load_state_dict(state)
    return model


def load_optimizer(opt, saved, model):
    """Give each parameter its saved state, by name; rates, decay and betas stay this run's."""
    weights, groups = dict(model.named_parameters()), saved["param_groups"]
    order = [name for g in groups for name in g.get("param_names", ())]
    if not order:  # nanoGPT's two groups: matrices, then vectors
        order = sorted(weights, key=lambda name: weights[name].dim() < 2)
    index = dict(zip(order, (i for g in groups for i in g["params"])))
    state, fresh = {}, opt.state_dict()["param_groups"]
    for g in fresh:
        for i, name in zip(g["params"], g["param_names"]):
            state[i] = saved["state"].get(index[name], {})
            if state[i] and ("momentum" in state[i]) != ("parts" in g):
                state[i] = {}  # of the other optimizer: this weight starts afresh
            if any(t.dim() and t.shape != weights[name].shape for t in state[i].values()):
                raise ValueError("the optimizer's state has other shapes than the weights")
    opt.load_state_dict({"state": state, "param_groups": fresh})


def check_file(path):
    """ValueError if a checkpoint file does not match its CRCs, which torch.load ignores."""
    with zipfile.ZipFile(path) as f:
        if bad := f.testzip():
            raise ValueError(f"{bad} is damaged")


def read_checkpoint(path):
    """The checkpoint in a file, checked. ValueError says in one line what is wrong with it."""
    try:
        check_file(path)
        state = torch.load(path, map_location="cpu", weights_only=True)
        load_model(state["model_args"], state["model"])
        if not all(v.isfinite().all() for v in state["model"].values()):
            raise ValueError("a weight is not finite")
        if not all(isinstance(state.get(key, {}), dict) for key in ("config", "data", "versions")):
            raise ValueError("its config, data or versions is no dict")
        return state
    except Exception as e:  # a damaged file can raise anything
        reason = " ".join(str(e).split())[:300] or type(e).__name__
        raise ValueError(f"{path} is not a good checkpoint: {reason}") from e


def transposed(state):
    """Convert linear weights between (out, in) and Hugging Face's GPT-2 layout (in, out)."""
    linear = ("c_attn.weight", "c_proj.weight", "c_fc.weight")
    return {k: v.t().contiguous() if k.endswith(linear) else v for k, v in state.items()}


def from_hugging_face(name):
    """(model_args, state) of GPT-2: "gpt2", "gpt2-medium", ..., or a folder that holds one."""
    from transformers import GPT2LMHeadModel
    hf = GPT2LMHeadModel.from_pretrained(name)
    args = dict(block_size=hf.config.n_positions, vocab_size=hf.config.vocab_size,
                n_layer=hf.config.n_layer, n_head=hf.config.n_head, n_embd=hf.config.n_embd,
                tie_embeddings=hf.config.tie_word_embeddings)
    return args, transposed(hf.state_dict())


def to_hugging_face(model):
    """The model as Hugging Face's GPT2LMHeadModel (all four modern parts off) or Qwen3ForCausalLM
    (all on, no biases). ValueError for a mixture, for which there is no class."""
    import transformers
    c, state = model.config, {k: v.cpu() for k, v in model.state_dict().items()}
    sizes = dict(vocab_size=c.vocab_size, hidden_size=c.n_embd, num_hidden_layers=c.n_layer,
                 num_attention_heads=c.n_head, max_position_embeddings=c.block_size,
                 tie_word_embeddings=c.tie_embeddings)
    modern = {c.rmsnorm, c.rope, c.qk_norm, c.swiglu}
    if modern == {False}:
        hf = transformers.GPT2LMHeadModel(transformers.GPT2Config(
            **sizes, resid_pdrop=c.dropout, embd_pdrop=c.dropout, attn_pdrop=c.dropout))
        hf.load_state_dict({**hf.state_dict(), **transposed(state)})  # its biases start as zeros
        return hf
    if modern != {True} or c.bias:
        raise ValueError("only all of rmsnorm, rope, qk_norm and swiglu without bias, or none")
    hf = transformers.Qwen3ForCausalLM(transformers.Qwen3Config(
        **sizes, num_key_value_heads=c.n_head, head_dim=c.n_embd // c.n_head, rope_theta=10000.0,
        rms_norm_eps=1e-6, intermediate_size=model.transformer.h[0].mlp.c_proj.in_features))
    out = {"model.embed_tokens.weight": state["transformer.wte.weight"],
           "model.norm.weight": state["transformer.ln_f.weight"],
           "lm_head.weight": state["lm_head.weight"]}
    for i in range(c.n_layer):
        ours, theirs = f"transformer.h.{i}.", f"model.layers.{i}."
        for new, old in (("input_layernorm", "ln_1"), ("post_attention_layernorm", "ln_2"),
                         ("self_attn.q_norm", "attn.q_norm"), ("self_attn.k_norm", "attn.k_norm"),
                         ("self_attn.o_proj", "attn.c_proj"), ("mlp.down_proj", "mlp.c_proj"),
                         ("mlp.up_proj", "mlp.c_fc"), ("mlp.gate_proj", "mlp.c_gate")):
            out[f"{theirs}{new}.weight"] = state[f"{ours}{old}.weight"]
        for part, w in zip("qkv", state[f"{ours}attn.c_attn.weight"].chunk(3)):
            out[f"{theirs}self_attn.{part}_proj.weight"] = w
    hf.load_state_dict(out)
    return hf
