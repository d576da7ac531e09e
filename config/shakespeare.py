# Shakespeare by bytes: nanoGPT's CPU benchmark (val loss 1.90 on these windows after 2,000 steps).
# Expect val loss 1.89 after 250 steps, 17 s with start and evaluation on 2 CPU cores.
# $ python prepare.py --input=shakespeare.txt --dataset=shakespeare --tokenizer=byte
dataset = "shakespeare"
batch_size, block_size = 12, 64
n_layer, n_head, n_embd, dropout = 2, 2, 80, 0.0
learning_rate, min_lr, max_iters = 0.02, 1e-3, 250
eval_interval, eval_iters = 250, 100
