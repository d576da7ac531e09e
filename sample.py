"""Write text with a trained model.

$ python sample.py --start="Once upon a time"
$ python sample.py --start=FILE:prompt.txt --num_samples=1 --temperature=0
$ python sample.py --init_from=gpt2                      # GPT-2's weights, through transformers
$ python sample.py --export=my_model                     # a folder for Hugging Face's libraries
"""
import codecs
import os
import sys

import torch

from config import configure, refuse, refusing
from model import load_model, to_hugging_face
from prepare import load_tokenizer
from train import load_weights, newest_checkpoint

init_from = "resume"  # resume: the newest checkpoint in out_dir; gpt2*; or FILE.pt, as out/best.pt
out_dir = "out"
start = ""  # the prompt, or FILE:PATH; empty begins a new document
num_samples = 3
max_new_tokens = 300  # tokens in each, at most: a sample ends with its document
temperature = 0.8  # 0 takes the likeliest token, below 1 is safer, above 1 more daring
top_k = 200  # only the likeliest k tokens; 0 is off
top_p = 1.0  # only the likeliest tokens that make up this probability; 1 is off
seed = 1337
device = "cuda" if torch.cuda.is_available() else "cpu"
dtype = ("float32" if device == "cpu" else  # or bfloat16, float16
         "bfloat16" if torch.cuda.is_bf16_supported(including_emulation=False) else "float16")
export = ""  # a folder: write the model for Hugging Face instead of text


def main():
    """Check the settings, load the model, print the samples or export it."""
    if not (0 <= temperature < 1e6 and top_k >= 0 and 0 < top_p <= 1 and max_new_tokens >= 0):
        refuse("temperature, top_k and max_new_tokens must be 0 or more, top_p in (0, 1]")
    if dtype not in ("float32", "bfloat16", "float16"):
        refuse(f"dtype={dtype} must be float32, bfloat16 or float16")
    source = newest_checkpoint(out_dir) if init_from == "resume" else load_weights(init_from)
    if source is None:
        refuse(f"there is no checkpoint in {out_dir}; python train.py makes one")
    with refusing(f"device={device} cannot be used"):
        model = load_model(source["model_args"], source["model"]).to(device).eval()
    if export:
        with refusing("cannot export"):
            exported, x = to_hugging_face(model).eval(), torch.arange(model.config.block_size)[None]
            x = x.clamp(max=model.config.vocab_size - 1)
            if not torch.allclose(exported(x).logits, model.cpu()(x), atol=1e-4):
                raise ValueError("model.py has changed: that class computes something else")
            exported.save_pretrained(export)
        return print(f"written to {export}")

    if "tokenizer" not in source and model.config.vocab_size < 50257:
        refuse("the checkpoint says nothing of its tokenizer, and it is not GPT-2's")
    with refusing("cannot use the checkpoint's tokenizer"):
        encoding = load_tokenizer(source.get("tokenizer", {"name": "gpt2"}))
    prompt = start
    if start.startswith("FILE:"):
        with refusing("cannot read the prompt"), \
                open(start.removeprefix("FILE:"), encoding="utf-8", newline="") as f:
            prompt = f.read()
    ids = encoding.encode(prompt, allowed_special="all") or [encoding.eot_token]
    if len(ids) > model.config.block_size:
        print(f"the model sees only the last {model.config.block_size} of the prompt's {len(ids)} "
              "tokens", file=sys.stderr)
    torch.manual_seed(seed)
    kind = getattr(torch, dtype)
    with torch.autocast(torch.device(device).type, kind, enabled=kind != torch.float32):
        for _ in range(num_samples):
            print(prompt, end="", flush=True)
            decoder = codecs.getincrementaldecoder("utf-8")("replace")  # a token can end inside
            x = torch.tensor([ids], device=device)
            for token in map(int, model.generate(x, max_new_tokens, temperature, top_k, top_p)):
                if token >= encoding.eot_token:  # the end, or padding of the vocabulary
                    break
                text = decoder.decode(encoding.decode_single_token_bytes(token))
                print(text, end="", flush=True)
            print(decoder.decode(b"", final=True), "\n---------------", sep="")


if __name__ == "__main__":
    configure(globals())
    try:
        main()
    except KeyboardInterrupt:
        sys.exit(130)
    except BrokenPipeError:  # as in `python sample.py | head`
        os._exit(0)  # without the flush of a pipe that nobody reads
