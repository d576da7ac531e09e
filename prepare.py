"""Turn text into tokens: train.bin, val.bin, meta.json (and tokenizer.tiktoken) in data/<dataset>/.

$ python prepare.py                                      # TinyStories, or the bundled stories
$ python prepare.py --input=book.txt --dataset=book      # your own text
$ python prepare.py --input='more/,*.jsonl.gz' --val_input=held_out.txt --dataset=mine

The documents are copied to a file per split, the tokenizer is trained on a sample of the training
text, all cores encode blocks of it, and only complete files get their final names. Memory stays
flat, and the number of cores does not change the result.
"""
import base64
import concurrent.futures
import contextlib
import glob
import gzip
import hashlib
import itertools
import json
import multiprocessing
import os
import re
import shutil
import signal
import sys
import threading
import time
import zlib

try:
    import fcntl
except ImportError:  # Windows: no lock on a folder
    fcntl = None

import numpy as np
import tiktoken
from tiktoken_ext.openai_public import gpt2

from config import configure, refuse, refusing

dataset = "tinystories"  # the result is data/<dataset>/
input = ""  # comma list of files, folders, globs, URLs, or - for standard input
val_input = ""  # the same, for a validation text of its own
val_fraction = 0.1  # share of documents (of bytes, if there is one) for validation
separator = "<|endoftext|>"  # parts the documents of a file; '' makes each file one document
text_field = "text"  # of a line of a .jsonl file, which is one document
dedup = False  # drop exact duplicates (of up to 4 MB); takes 100 bytes of memory per document
errors = "strict"  # 'replace' puts U+FFFD for bytes that are not UTF-8
tokenizer = "bpe"  # trained on the training split; or 'gpt2', or 'byte'
vocab_size = 4096  # of bpe, the end of text included; 257 to 65536
bpe_sample_mb = 16  # bpe is trained on about this much of the text
processes = 0  # 0 is all cores

TINYSTORIES = "https://huggingface.co/datasets/roneneldan/TinyStories/resolve/main/" \
              "TinyStoriesV2-GPT4-"
TIMEOUT = 10  # seconds without a byte after which a download counts as cut
BLOCK = 1 << 19  # bytes in a unit of work, or more by one document
LONGEST = 1 << 22  # characters per read; a longer document is handled in parts
# How text is cut into words before merging: GPT-2's and GPT-4's patterns. tiktoken ships them with
# possessive quantifiers, on which its regex engine is slow; these cut the same words and encode up
# to twice as fast.
PATTERNS = {
    "gpt2": r"(?:'(?:[sdmt]|ll|ve|re)| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+$)|\s+(?!\S)|\s",
    "bpe": r"(?:'(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}|"
           r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s+$|\s*[\r\n])|\s+(?!\S)|\s"}
BEGAN = {}  # label of a progress line: (time, bytes done) at its first call


def load_tokenizer(spec):
    """The tiktoken.Encoding of {'name': 'gpt2' | 'byte'} or {'name': 'bpe', 'pattern', 'ranks'}.

    `ranks` is the text of tokenizer.tiktoken; the last id is the end of a document.
    """
    if spec["name"] == "gpt2":
        with refusing("cannot get GPT-2's vocabulary: take --tokenizer=bpe or byte, or set "
                      "TIKTOKEN_CACHE_DIR to a folder that holds it"):
            return tiktoken.Encoding(**gpt2() | {"pat_str": PATTERNS["gpt2"]})
    pattern, tokens = "(?s:.)", [bytes([i]) for i in range(256)]
    if spec["name"] == "bpe":
        pattern = spec["pattern"]
        tokens = [base64.b64decode(line.split()[0]) for line in spec["ranks"].splitlines()]
    ranks = {token: rank for rank, token in enumerate(tokens)}
    return tiktoken.Encoding(spec["name"], pat_str=pattern, mergeable_ranks=ranks,
                             special_tokens={"<|endoftext|>": len(ranks)})


def prepare_command(folder):
    """The command that makes a data folder."""
    return f"python prepare.py --input=TEXT --dataset={os.path.basename(folder)}"


def read_meta(folder):
    """A data folder's meta.json, checked; its 'tokenizer' is what load_tokenizer takes.

    A folder without one is nanoGPT's, with GPT-2's tokens. Damage ends the program in one line.
    """
    cure = f"{prepare_command(folder)} makes one"
    if not os.path.exists(f"{folder}/meta.json"):
        return {"source": "no meta.json, so GPT-2's tokens", "tokenizer": {"name": "gpt2"},
                "vocab_size": 50257, "eot": 50256}
    with refusing(f"{folder}/meta.json is damaged, {cure}"):
        with open(f"{folder}/meta.json", encoding="utf-8") as f:
            meta = json.load(f)
        spec, size, val = meta["tokenizer"], meta["vocab_size"], meta["val"]
        numbers = size, meta["eot"] + 1, size - meta["eot"], val["tokens"], val["bytes"]
        if not all(type(n) is int and n > 0 for n in numbers):
            raise ValueError("vocab_size, eot, val.tokens or val.bytes is out of range")
        if type(meta["source"]) is not str or spec["name"] not in ("bpe", "gpt2", "byte"):
            raise ValueError("source is no text, or the tokenizer is unknown")
    if spec["name"] == "bpe":
        with refusing(f"{folder}/tokenizer.tiktoken does not fit meta.json, {cure}"):
            with open(f"{folder}/tokenizer.tiktoken", encoding="ascii") as f:
                spec["ranks"] = f.read()
            if (tokens := load_tokenizer(spec).n_vocab) != size:
                raise ValueError(f"{tokens} tokens instead of {size}")
    return meta


def read_tokens(folder, split, vocab_size, block_size):
    """A split's token ids, (tokens,) uint16, all of them checked; and [their number, their CRC].

    A missing file, an id that is no token or too few tokens end the program in one line.
    """
    path, crc = f"{folder}/{split}.bin", 0
    with refusing(f"cannot use {path}, which {prepare_command(folder)} makes"):
        size = os.path.getsize(path)
        if size % 2:
            raise ValueError(f"an odd number of bytes, {size}: not uint16 tokens, or cut off")
        if size // 2 <= block_size:
            raise ValueError(f"{size // 2} tokens are too few for block_size={block_size}, which "
                             "needs one more than that: lower block_size or prepare more text")
        tokens = np.asarray(np.memmap(path, "<u2", "r"))
        for i in range(0, len(tokens), 1 << 24):
            part = tokens[i:i + (1 << 24)]
            if part.max() >= vocab_size:
                at = i + int((part >= vocab_size).argmax())
                raise ValueError(f"token {at} is {tokens[at]}, there are only {vocab_size} ids")
            crc = zlib.crc32(part, crc)
    return tokens, [len(tokens), crc]


def progress(label, done, total=0):
    """On a terminal: MB done, seconds left, and MB/s since the first call with this label."""
    if sys.stderr and sys.stderr.isatty():
        since, first = BEGAN.setdefault(label, (time.monotonic(), done))
        rate = max(done - first, 1) / max(time.monotonic() - since, 1e-3)
        left = f" of {total / 1e6:,.0f} MB, {(total - done) / rate:,.0f} s left" if total else " MB"
        print(f"{label}: {done / 1e6:,.0f}{left}, {rate / 1e6:.1f} MB/s".ljust(79),
              end="\n" if done == total else "\r", file=sys.stderr, flush=True)


def sync(path):
    """Wait until a file, or the names in a folder (not on Windows, it cannot), are on the disk."""
    folder = os.path.isdir(path)
    if not folder or os.name == "posix":
        fd = os.open(path, os.O_RDONLY if folder else os.O_RDWR)  # Windows wants write access
        os.fsync(fd)
        os.close(fd)


def lock(path):
    """Hold a lock file until this process ends. OSError if another process holds it."""
    if fcntl:
        fcntl.lockf(os.open(path, os.O_RDWR | os.O_CREAT, 0o644), fcntl.LOCK_EX | fcntl.LOCK_NB)


def download(url, path):
    """Fetch a URL into a file, once; go on behind a cut as long as each try brings more."""
    import http.client
    import urllib.request
    part, have, reason = f"{path}.part", -1, None
    while not os.path.exists(path):
        before, have = have, os.path.getsize(part) if os.path.exists(part) else 0
        if have <= before:
            raise ConnectionError(f"{url}: {reason}")
        request = urllib.request.Request(url, headers={"Range": f"bytes={have}-"})
        try:
            with urllib.request.urlopen(request, timeout=TIMEOUT) as answer, \
                    open(part, "ab" if answer.status == 206 else "wb") as f:  # 206: it is the rest
                left = answer.headers["Content-Length"]
                total = f.tell() + int(left) if left else 0
                while data := answer.read(BLOCK):
                    f.write(data)
                    progress(f"download {os.path.basename(path)}", f.tell(), total)
            reason = f"cut before the end of {total} bytes"
            if total in (0, os.path.getsize(part)):
                sync(part)
                os.replace(part, path)
        except (OSError, http.client.HTTPException) as e:
            reason = e
            if getattr(e, "code", None) == 416 and have:  # the part is no beginning of this file
                os.remove(part)
                have = -1


def files_in(folder):
    """The paths of the files in a folder and below it, without links to folders and .names."""
    def fail(error):  # os.walk() passes over a folder that it cannot read
        raise error

    paths = []
    for top, folders, files in os.walk(folder, onerror=fail):
        folders[:] = [name for name in folders if name[0] != "."]
        paths += [os.path.join(top, name) for name in files if name[0] != "."]
    return sorted(filter(os.path.isfile, paths))  # no pipes or sockets


def find(names, folder):
    """The paths of the files in a comma list; what a URL names is kept in `folder`."""
    paths = []
    for name in filter(None, names.split(",")):
        path = "/dev/stdin" if name == "-" else name
        if "://" in name:  # the checksum, as another URL may end in the same name
            base = os.path.basename(name.partition("?")[0])
            path = f"{folder}/{zlib.crc32(name.encode()):08x}-{base}"
            download(name, path)
        found = [path]
        if os.path.isdir(path):
            found = files_in(path)
        elif not os.path.exists(path):
            found = sorted(filter(os.path.isfile, glob.glob(path, recursive=True)))
        if not found:
            refuse(f"there is no input file '{name}'")
        paths += found
    return paths


def find_all(folder):
    """What the text is, in a few words, and the paths of the files of input and of val_input."""
    if input:
        return re.sub("[^,]+://[^,]*/", "", input), find(input, folder), find(val_input, folder)
    try:
        paths = [find(f"{TINYSTORIES}{split}.txt", folder) for split in ("train", "valid")]
        print("the text is TinyStories")
        return "TinyStoriesV2-GPT4-train.txt", *paths
    except ConnectionError as e:
        print(f"no TinyStories ({e}), so the text is the bundled data/stories.txt")
        return "data/stories.txt", [os.path.join(os.path.dirname(__file__), "data/stories.txt")], []


def json_lines(f):
    """Yield the documents of a .jsonl file as (bytes, True)."""
    for number, line in enumerate(f, 1):
        if line.strip():
            with refusing(f"{f.name}, line {number}: no object with a string '{text_field}'"):
                text = json.loads(line.removeprefix("\ufeff"))[text_field].encode("utf-8", errors)
            yield text, True


def pieces(f):
    """Yield the documents of a text as (bytes, ends), a long one in parts, `ends` with the last."""
    mark = separator.replace(r"\n", "\n").replace(r"\r", "\r").replace(r"\t", "\t")
    # its line break goes too; at the end of what was read the next read decides
    rest, split = "", re.compile(re.escape(mark) + r"(?:\r?\n|(?!\r?\Z))").split
    while chunk := f.read(LONGEST):
        rest += chunk
        if mark:
            *whole, rest = split(rest)
            yield from ((text.encode(), True) for text in whole)
        if len(rest) > LONGEST + len(mark):
            end = len(rest) - len(mark) - 1  # a separator may begin behind it
            yield rest[:end].encode(), False
            rest = rest[end:]
    *whole, rest = rest.split(mark) if mark else [rest]
    yield from ((text.encode(), True) for text in whole)
    if rest:
        yield rest.encode(), True


def documents(paths):
    """Yield the documents of the files, in order, as (bytes, ends)."""
    for path in paths:
        kind = json_lines if path.removesuffix(".gz").endswith(".jsonl") else pieces
        opened = gzip.open if path.endswith(".gz") else open
        with refusing(f"cannot read {path}"), \
                opened(path, "rt", encoding="utf-8", errors=errors, newline="\n") as f:
            try:
                yield from kind(f)
            except UnicodeDecodeError as e:
                at = f.buffer.tell() - len(e.object) + e.start if f.seekable() else "?"
                refuse(f"{path}: byte {at} is not UTF-8, --errors=replace puts U+FFFD for it")


def gather(paths, val_paths, temp):
    """Copy the documents to temp/train.txt and val.txt, each followed by 0xFF, never in UTF-8.

    The checksum of a document decides its split, so it stays there when other text is added;
    where that leaves a split empty, the last one, or its end, is val. Returns the units of work,
    {split: [(path, start, stop)]}, how many documents were dropped, the longest and shortest size.
    """
    counts, seen = {"empty": 0, "duplicate": 0, "longest": 0, "shortest": 1 << 62}, set()
    cuts, at = {"train": [0], "val": [0]}, {"train": 0, "val": 0}  # of the blocks; bytes written
    size = 0  # of the document so far
    with open(f"{temp}/train.txt", "wb") as train, open(f"{temp}/val.txt", "wb") as val:
        files = {"train": train, "val": val}
        for share, group in ((1, val_paths), (0 if val_paths else val_fraction, paths)):
            for text, ends in documents(group):
                if not size:  # it begins
                    split = "val" if zlib.crc32(text[:LONGEST]) < share * 2**32 else "train"
                if ends and not size:  # it is whole
                    if not text.strip() or dedup and hash(text) in seen:
                        counts["duplicate" if text.strip() else "empty"] += 1
                        continue
                    if dedup:  # of a billion documents, 64 bits drop a wrong one at odds of 3%
                        seen.add(hash(text))
                size += len(text)
                at[split] += files[split].write(text + b"\xff" if ends else text)
                if ends:
                    counts["longest"] = max(counts["longest"], size)
                    counts["shortest"] = min(counts["shortest"], size)
                    last, size = size, 0
                if at[split] - cuts[split][-1] >= BLOCK:
                    cuts[split].append(at[split])
                    progress("read", sum(at.values()))
    jobs = {split: [(f.name, a, b) for a, b in itertools.pairwise([*cuts[split], at[split]])
                    if a < b] for split, f in files.items()}
    whole = jobs["train"] or jobs["val"]
    if whole and not val_paths and not all(jobs.values()):
        path, _, stop = whole[-1]
        cut = stop - 1 - last or max(1, int(last * (1 - val_fraction)))
        with open(path, "rb") as f:
            while f.seek(cut) and re.match(rb"[\x80-\xbf\xff]", f.read(1)):
                cut -= 1  # to the beginning of a character
        jobs = {"train": [(path, a, min(b, cut)) for _, a, b in whole if a < cut],
                "val": [(path, max(a, cut), b) for _, a, b in whole if b > cut]}
    return jobs, counts


def texts(job):
    """Yield the text of a unit of work in parts of up to BLOCK characters, "" between documents."""
    path, start, stop = job
    with open(path, "rb") as f:
        f.seek(start)
        found = f.read(stop - start).split(b"\xff")
    for number, text in enumerate(map(bytes.decode, found)):
        if number:
            yield ""
        for i in range(0, len(text), BLOCK):  # millions of spaces overflow the tokenizers' stack
            yield text[i:i + BLOCK]


def train_bpe(samples):
    """The text of a tokenizer.tiktoken: up to vocab_size - 1 tokens, learnt from the samples."""
    import rustbpe
    trainer = rustbpe.Tokenizer()
    trainer.train_from_iterator(samples, vocab_size - 1, buffer_size=128, pattern=PATTERNS["bpe"])
    ranked = sorted(trainer.get_mergeable_ranks(), key=lambda pair: pair[1])
    tokens = dict.fromkeys(bytes(token) for token, _ in ranked)  # two merges may spell one token
    return "".join(f"{base64.b64encode(t).decode()} {rank}\n" for rank, t in enumerate(tokens))


def start_worker(vocabulary):
    """Give encode() its tokenizer in this process, which ends with its parent, even by kill -9."""
    global encoding
    encoding = vocabulary
    if parent := multiprocessing.parent_process():
        threading.Thread(target=lambda: (parent.join(), os._exit(1)), daemon=True).start()


def encode(job):
    """The token ids of a unit of work, (tokens,) little-endian uint16."""
    end, tokens = np.array([encoding.eot_token], np.uint32), encoding.encode_to_numpy
    try:
        ids = [tokens(part, disallowed_special=()) if part else end for part in texts(job)]
        return np.concatenate(ids).astype("<u2")
    except Exception as e:
        raise RuntimeError(f"{job[0]}, byte {job[1]}: {e}")


def encode_all(jobs, vocabulary):
    """Yield encode(job) for all jobs, in order."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    workers = min(processes or cores, 1 + len(jobs) // 4)  # a short text needs no other
    if workers == 1:
        start_worker(vocabulary)
        yield from map(encode, jobs)
        return
    pool = concurrent.futures.ProcessPoolExecutor(
        workers, multiprocessing.get_context("spawn"), start_worker, (vocabulary,))
    try:
        if posix := os.name == "posix":  # the workers inherit it: Ctrl-C is for this process alone
            signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGINT])
        results = pool.map(encode, jobs)  # starts them
        if posix:  # a Ctrl-C of meanwhile comes now
            signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGINT])
        yield from results
    finally:
        pool.shutdown(cancel_futures=True)


def publish(temp, folder):
    """Replace the data set. Where train.bin stands, the other files are there and belong to it."""
    names = ["train.bin", "meta.json", "val.bin", "tokenizer.tiktoken"]
    for name in names:
        with contextlib.suppress(FileNotFoundError):
            os.remove(f"{folder}/{name}")
    for name in reversed(names):
        if os.path.exists(f"{temp}/{name}"):
            sync(f"{temp}/{name}")
            sync(folder)
            os.replace(f"{temp}/{name}", f"{folder}/{name}")
    sync(folder)


def prepare(folder, temp):
    """Make the data set in `temp`, move it to `folder`, print a summary."""
    began, spec = time.monotonic(), {"name": tokenizer}
    if tokenizer != "bpe":
        vocabulary = load_tokenizer(spec)  # refuses before any work
    source, paths, val_paths = find_all(folder)
    jobs, counts = gather(paths, val_paths, temp)
    sizes = {split: sum(stop - start for _, start, stop in jobs[split]) for split in jobs}
    if not all(sizes.values()):
        refuse(f"there is not enough text in {source} for a train and a val split")

    if tokenizer == "bpe":
        step = -(-sizes["train"] // (bpe_sample_mb * 10**6))  # every step-th block is the sample
        sample = (part for job in jobs["train"][::step] for part in texts(job))
        spec |= {"pattern": PATTERNS["bpe"], "ranks": train_bpe(sample)}
        with open(f"{temp}/tokenizer.tiktoken", "w", encoding="ascii") as f:
            f.write(spec["ranks"])
        vocabulary = load_tokenizer(spec)
    meta = {"source": source, "tokenizer": {k: v for k, v in spec.items() if k != "ranks"},
            "vocab_size": vocabulary.n_vocab, "eot": vocabulary.eot_token}
    done = 0
    with contextlib.closing(encode_all(jobs["train"] + jobs["val"], vocabulary)) as results:
        for split in jobs:
            ends, sha256 = 0, hashlib.sha256()
            with open(f"{temp}/{split}.bin", "wb") as f:
                for (_, start, stop), ids in zip(jobs[split], results):
                    f.write(ids)
                    sha256.update(ids)
                    ends += int((ids == vocabulary.eot_token).sum())
                    done += stop - start
                    progress("encode", done, sum(sizes.values()))
                meta[split] = {"tokens": f.tell() // 2, "bytes": sizes[split] - ends,
                               "documents": ends or 1,  # the head of the only document has no end
                               "sha256": sha256.hexdigest()}
    with open(f"{temp}/meta.json", "w", encoding="utf-8") as f:
        json.dump(meta, f, indent=1)
    replaced = " (replaced)" if os.path.exists(f"{folder}/train.bin") else ""
    publish(temp, folder)

    seconds = time.monotonic() - began
    size, tokens = (meta["train"][key] + meta["val"][key] for key in ("bytes", "tokens"))
    for split in jobs:
        print("{:5} {documents:>11,} documents {tokens:>14,} tokens".format(split, **meta[split]),
              f"{meta[split]['tokens'] / tokens:7.1%}")
    print("longest document {longest:,} bytes, shortest {shortest:,}; dropped {empty:,} empty, "
          "{duplicate:,} duplicate".format(**counts))
    print(f"{folder}{replaced}: {size / 1e6:,.1f} MB, {size / tokens:.2f} bytes per token, "
          f"vocabulary {meta['vocab_size']:,}, {seconds:.1f} s, {size / seconds / 1e6:.1f} MB/s")
    print(f"next: python train.py --dataset={dataset}")


def main():
    """Check the settings, make the data set; whatever goes wrong ends in one line."""
    if tokenizer not in ("bpe", "gpt2", "byte") or not 257 <= vocab_size <= 65536:
        refuse("tokenizer must be bpe, gpt2 or byte, vocab_size from 257 to 65536")
    if not 0 < val_fraction < 1 or errors not in ("strict", "replace"):
        refuse("val_fraction must be between 0 and 1, errors strict or replace")
    if bpe_sample_mb < 1 or processes < 0 or val_input and not input:
        refuse("bpe_sample_mb must be above 0, processes not below; val_input needs an input")
    folder, temp = f"data/{dataset}", f"data/{dataset}/.tmp"
    with refusing(f"cannot write to {folder}, or another prepare.py does"):
        os.makedirs(temp, exist_ok=True)
        lock(f"{temp}/lock")
    try:
        for name in {*os.listdir(temp)} - {"lock"}:  # of a run that was killed
            os.remove(f"{temp}/{name}")
        prepare(folder, temp)
    except (OSError, RuntimeError, ValueError) as e:
        refuse(f"{folder}: {e}")
    finally:
        shutil.rmtree(temp, ignore_errors=True)
        with contextlib.suppress(OSError):
            os.removedirs(folder)  # if nothing came into it


def stop(code, frame):
    """Signal handler: end after tidying up; at a second signal, at once."""
    signal.signal(code, lambda code, frame: os._exit(128 + code))
    print("prepare.py: interrupted", file=sys.stderr)
    raise SystemExit(128 + code)


if __name__ == "__main__":
    signal.signal(signal.SIGINT, stop)
    signal.signal(signal.SIGTERM, stop)
    configure(globals())
    main()
