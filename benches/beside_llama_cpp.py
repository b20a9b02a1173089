#!/usr/bin/env python3
"""Ridge's GGUF files in llama.cpp, and llama.cpp's in Ridge.

    python3 benches/beside_llama_cpp.py LLAMA_CPP_BIN [RIDGE] [MODEL]

LLAMA_CPP_BIN is a folder with llama-completion and llama-quantize; RIDGE is the program (target/release/ridge), MODEL a folder
or GGUF file (models/stories260K). For each dtype and format the model is written by Ridge and continued greedily by both
programs. `text` says whether they agree, or after how many characters of how many they part, which they may where two
tokens nearly tie: llama.cpp rounds activations to eight bits before it multiplies them with quantised weights. `decoded`
compares Ridge's text with llama.cpp's of the same values in f32. The model is then quantised by llama-quantize: `bytes`
is the number of tensors that are equal bit for bit, and `error` how far all matrices are from f32, Ridge's over
llama.cpp's. Needs nothing but Python.
Exits with 1 where llama.cpp refuses a file, or plain dtypes give other texts.
"""

import shutil
import struct
import subprocess
import sys
import tempfile
from pathlib import Path

PLAIN = ["f32", "f16", "bf16"]
FORMATS = "q8_0 q4_0 q4_1 q5_0 q5_1 iq4_nl mxfp4 q2_k q3_k q4_k q5_k q6_k iq4_xs".split()
MIXES = "q2_k_m q3_k_s q3_k_m q3_k_l q4_k_s q4_k_m q5_k_s q5_k_m".split()
PROMPTS = ["Once upon a time", "Lily and Tom went to the park", "The dog was sad because"]
TOKENS = 64


def run(*command):
    done = subprocess.run([str(c) for c in command], capture_output=True)
    if done.returncode != 0:
        raise RuntimeError(f"{Path(command[0]).name} {command[1]}: {done.stderr.decode(errors='replace')[-600:]}")
    return done.stdout.decode(errors="replace")


def tensors(path):
    """Name, type and bytes of each tensor of a GGUF file without nested arrays."""
    file = path.read_bytes()
    at = 8

    def take(kind):
        nonlocal at
        value = struct.unpack_from("<" + kind, file, at)[0]
        at += struct.calcsize("<" + kind)
        return value

    def text():
        nonlocal at
        length = take("Q")
        at += length
        return file[at - length : at].decode()

    sizes = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "B", 10: "Q", 11: "q", 12: "d"}

    def value(kind):
        if kind == 8:
            return text()
        if kind == 9:
            of, count = take("I"), take("Q")
            for _ in range(count):
                value(of)
            return None
        return take(sizes[kind])

    count, keys = take("Q"), take("Q")
    alignment = 32
    for _ in range(keys):
        key = text()
        found = value(take("I"))
        alignment = found if key == "general.alignment" else alignment
    listed = []
    for _ in range(count):
        name = text()
        shape = [take("Q") for _ in range(take("I"))]
        listed.append((name, take("I"), shape, take("Q")))
    start = -(-at // alignment) * alignment
    ends = sorted(offset for *_, offset in listed) + [len(file) - start]
    after = {offset: ends[i + 1] for i, offset in enumerate(ends[:-1])}
    return {name: (kind, file[start + o : start + after[o]].rstrip(b"\0")) for name, kind, _, o in listed}


def main():
    if len(sys.argv) < 2 or not (Path(sys.argv[1]) / "llama-completion").exists():
        print("skipped: the first argument is no folder with llama-completion of llama.cpp")
        return 0
    theirs = Path(sys.argv[1])
    ridge = Path(sys.argv[2] if len(sys.argv) > 2 else "target/release/ridge")
    model = Path(sys.argv[3] if len(sys.argv) > 3 else "models/stories260K")
    folder = Path(tempfile.mkdtemp())
    failed = False
    exact = folder / "f32.gguf"
    run(ridge, "convert", model, exact, "--dtype", "f32", "-q")

    def ours(path, prompt):
        return run(ridge, "generate", "--model", path, "--greedy", "-n", TOKENS, "-q", "--device", "cpu", "--threads", 1, prompt).rstrip("\n")

    def llama_cpps(path, prompt):
        greedy = "-t 1 -tb 1 -ctk f32 -ctv f32 -no-cnv --no-display-prompt --no-warmup --temp 0 --repeat-penalty 1"
        said = ""
        # It does not always show the last of its tokens, so more are asked for, and perhaps again.
        for _ in range(5):
            again = run(theirs / "llama-completion", "-m", path, "-n", TOKENS + 16, *greedy.split(), "-p", prompt)
            said = max(said, again.rstrip("\n"), key=len)
        return said

    def compared(path, other):
        """How far Ridge's texts of `path` are llama.cpp's of `other`."""
        how = []
        for prompt in PROMPTS:
            text, beside = ours(path, prompt), llama_cpps(other, prompt)
            same = next((i for i, (a, b) in enumerate(zip(text, beside)) if a != b), min(len(text), len(beside)))
            how.append("same" if same == len(text) else f"{same}/{len(text)}")
        return how

    def decoded(path):
        plain = folder / "plain.gguf"
        run(ridge, "convert", path, plain, "--dtype", "f32", "-q", "--force")
        return plain

    def values(path):
        plain = decoded(path)
        return {n: memoryview(b + b"\0" * (-len(b) % 4)).cast("f") for n, (_, b) in tensors(plain).items()}

    truth = values(exact)
    print(f"{'':8}{'text':26}{'decoded':26}{'bytes':>8}{'error':>8}")
    for name in PLAIN + FORMATS + MIXES:
        path = folder / "ours.gguf"
        try:
            if name in PLAIN:
                run(ridge, "convert", model, path, "--dtype", name, "-q", "--force")
            else:
                outer = [] if name in MIXES else ["--outer", name]
                run(ridge, "quantize", exact, path, "--format", name, *outer, "-q", "--force")
            said = compared(path, path)
        except RuntimeError as error:
            print(f"{name:8}FAILED: {error}")
            failed = True
            continue
        failed |= name in PLAIN and set(said) != {"same"}
        line = f"{name:8}{' '.join(said):26}"
        if name not in PLAIN:
            line += f"{' '.join(compared(path, decoded(path))):26}"
        if name not in PLAIN and (theirs / "llama-quantize").exists():
            called = "Q2_K" if name == "q2_k_m" else name.upper()
            called = {"Q3_K": "Q3_K_S", "Q4_K": "Q4_K_S", "Q5_K": "Q5_K_S", "MXFP4": "MXFP4_MOE"}.get(called, called)
            pure = [] if name in MIXES else ["--pure"]
            try:
                run(theirs / "llama-quantize", *pure, exact, folder / "theirs.gguf", called, 1)
            except RuntimeError as error:
                print(f"{line}   llama-quantize: {str(error)[-80:]!r}")
                continue
            a, b = tensors(path), tensors(folder / "theirs.gguf")
            alike = sum(a[n] == b[n] for n in a)
            kinds = [n for n in a if a[n][0] != b[n][0]]

            def error(path):
                return sum(sum((x - y) ** 2 for x, y in zip(v, truth[n])) for n, v in values(path).items()) ** 0.5

            line += f"{alike:>5}/{len(a)}{error(path) / max(error(folder / 'theirs.gguf'), 1e-30):>8.3f}"
            line += f"  {len(kinds)} of other types, such as {kinds[0]}" if kinds else ""
        print(line, flush=True)
    shutil.rmtree(folder)
    return int(failed)


sys.exit(main())
