# TinyStories, 4 layers of 128 channels. Expect 1.32 bits per byte after 100 steps on its first
# 0.94 MB, 2 minutes on 2 CPU cores; the whole of TinyStories was not measured.
# $ python prepare.py && python train.py config/tinystories.py
dataset = "tinystories"
batch_size, block_size = 12, 512
n_layer, n_head, n_embd, dropout = 4, 4, 128, 0.0
max_iters = 2000
eval_interval, eval_iters = 250, 20
