# nanoGPT's CPU benchmark with nanoGPT's own parts, to compare with: GPT-2 and AdamW, 2,000 steps.
# Expect val loss 1.86 (nanoGPT's own checkpoint has 1.88 on these windows), 150 s on 2 CPU cores.
# $ python train.py config/shakespeare_gpt2.py
dataset = "shakespeare"
batch_size, block_size = 12, 64
n_layer, n_head, n_embd, dropout = 4, 4, 128, 0.0
rmsnorm = rope = qk_norm = swiglu = False
tie_embeddings = True
optimizer, learning_rate, min_lr, beta2 = "adamw", 1e-3, 1e-4, 0.99
max_iters, warmup_iters, lr_schedule = 2000, 100, "cosine"
eval_interval, eval_iters, log_interval = 250, 20, 100
