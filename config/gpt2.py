# GPT-2 124M on OpenWebText: loss 2.85 after 600,000 steps, 4 days on 8 A100 GPUs, says nanoGPT,
# whose schedule this is (github.com/karpathy/nanoGPT). Not measured by us.
# $ torchrun --standalone --nproc_per_node=8 train.py config/gpt2.py
dataset = "openwebtext"
batch_size, block_size, gradient_accumulation_steps = 12, 1024, 40  # 491,520 tokens a step
n_layer, n_head, n_embd = 12, 12, 768
rmsnorm = rope = qk_norm = swiglu = False
bias, tie_embeddings = False, True
optimizer, learning_rate, min_lr, dropout = "adamw", 6e-4, 6e-5, 0.0
max_iters, warmup_iters, lr_schedule = 600_000, 2000, "cosine"
eval_interval, eval_iters = 1000, 200
checkpoint_minutes = 15.0
