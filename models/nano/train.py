"""Train rocket-nano on one GPU for a given time.

    python3 train.py --data DIR --tokenizer tokenizer.json --out DIR --seconds 1300

Needs torch, numpy, tokenizers, safetensors and flash-linear-attention (`fla` on PYTHONPATH). DIR holds *.jsonl as the
program in corpus/ writes it. The learning rate, the sequence length and the rounding are functions of the elapsed share
of --seconds, so the run ends by itself, cooled down, on a machine of any speed; the file OUT/deadline, once written,
moves the end to the Unix time in it. Every two minutes, and at the end, OUT/ckpt gets the weights in the hub's layout (see export.py);
OUT/curve.csv gets the losses, OUT/result.json the held-out figures.

Recipe: Muon (orthogonalised momentum) for matrices between hidden rows, AdamW for the rest; 131,072 tokens a step;
2,048-token sequences with dense attention first, 8,192-token ones with the indexers' sparse selection from SPARSE_AT
on; from ROUND_AT on the forward pass sees the matrices rounded to NVFP4 (the gradient goes straight through), so that
quantising afterwards costs little. The draft layer learns the trunk's own distribution beside the data.
"""
import argparse, csv, glob, json, math, os, random, re, subprocess, sys, time, zlib
T0 = time.time()
HERE = os.path.dirname(os.path.abspath(__file__))

SPARSE_AT, ROUND_AT, HOLD_UNTIL, WARM = 0.80, 0.60, 0.25, 0.015
MUON_LR, MUON_DECAY, ADAM_LR, EMBED_LR = 0.015, 0.03, 2e-3, 4e-3
DRAFT_WEIGHT, INDEX_WEIGHT = 0.2, 0.3
SEQ, LONG = 2048, 8192
EVAL_SEQS = 128
KEEP_TIMES = {"core": 3, "wide": 2}      # how often a document of a group occurs in one pass over the stream


def log(*a):
    print(f"[{time.time() - T0:7.1f}]", *a, flush=True)


# ---------------------------------------------------------------- data
SPAN = re.compile("\x01(\\d+),(\\d+)\x02")


def heldout(path):
    return zlib.crc32(path.encode()) % 50 == 0


def documents(folder):
    """Yields (group, held out, near, kind, text). A file and the chats made from it fall on one side. In chats, \\x01a,b\\x02 is
    b characters of the file before them, from a on (a compact form of the same records)."""
    for name in sorted(glob.glob(folder + "/*.jsonl")):
        text = ""
        for line in open(name, encoding="utf-8"):
            r = json.loads(line)
            if r["k"] == "f":
                text, doc = r["t"], f"// {r['p']}\n{r['t']}"
            else:
                cut = lambda m: text[int(m[1]):int(m[1]) + int(m[2])]
                doc = "".join(f"<|{role}|>\n{SPAN.sub(cut, t)}<|end|>\n" for role, t in r["m"])
            yield r["g"], heldout(r["p"]), r.get("n", 0.0), r["k"], doc


def prepare(folder, tokenizer, out):
    """Writes train.npy, valid-*.npy (uint16 tokens; every document starts with token 0) and data.json."""
    import numpy as np
    from tokenizers import Tokenizer
    tok = Tokenizer.from_file(tokenizer)
    train, valid, info = {"core": [], "wide": []}, {"core": [], "core-strict": [], "wide": [], "chat": []}, {}
    for group, held, near, kind, doc in documents(folder):
        if not held:
            train[group].append(doc)
            continue
        valid["wide" if group == "wide" else "core"].append(doc)
        if group == "core" and kind == "f" and near < 0.2:
            valid["core-strict"].append(doc)
        if kind == "c":
            valid["chat"].append(doc)

    def encode(docs):
        parts, n = [], 0
        for i in range(0, len(docs), 2000):
            for e in tok.encode_batch(docs[i:i + 2000]):
                parts.append(np.array([0] + e.ids, dtype=np.uint16))
        return parts
    rng = random.Random(7)
    for name, docs in valid.items():
        rng.shuffle(docs)
        ids = np.concatenate(encode(docs[:4000]))
        info[name] = dict(docs=len(docs), tokens=len(ids), chars=sum(map(len, docs[:4000])))
        np.save(f"{out}/valid-{name}.npy", ids)
    stream = []
    for name, docs in train.items():
        parts = encode(docs)
        info["train-" + name] = dict(docs=len(docs), tokens=int(sum(map(len, parts))), chars=sum(map(len, docs)))
        stream += parts * KEEP_TIMES[name]
    rng.shuffle(stream)
    np.save(f"{out}/train.npy.tmp.npy", np.concatenate(stream))
    json.dump(info, open(f"{out}/data.json", "w"), indent=1)
    os.rename(f"{out}/train.npy.tmp.npy", f"{out}/train.npy")
    log("data", json.dumps(info))


# ---------------------------------------------------------------- optimiser
def fewer_autotune_configs(limit=2):
    """Triton's autotuner compiles every configuration of fla's kernels; two or three do nearly as well."""
    from triton.runtime import autotuner
    init = autotuner.Autotuner.__init__

    def patched(self, fn, arg_names, configs, *a, **k):
        if configs and len(configs) > limit:
            def cost(c):
                kw = c.kwargs
                return (sum(abs(v - 64) for n, v in kw.items() if n in ("BK", "BV", "BS")) + abs(kw.get("BT", 32) - 32), abs(c.num_stages - 3), abs(c.num_warps - 4) if c.num_warps in (2, 4) else 9)
            ranked, chosen = sorted(configs, key=cost), []
            for c in ranked:                       # the best of each number of warps
                if c.num_warps not in [o.num_warps for o in chosen]:
                    chosen.append(c)
            configs = (chosen + [c for c in ranked if c not in chosen])[:limit]
        init(self, fn, arg_names, configs, *a, **k)
    autotuner.Autotuner.__init__ = patched


def orthogonal(g, torch, steps=5):
    """Newton-Schulz iteration on a stack [n,r,c]: singular values go to about one."""
    x = g.bfloat16()
    turn = x.shape[-2] > x.shape[-1]
    if turn:
        x = x.transpose(-1, -2)
    x = x / (x.float().norm(dim=(-2, -1), keepdim=True).to(x.dtype) + 1e-7)
    for _ in range(steps):
        a = x @ x.transpose(-1, -2)
        b = -4.7750 * a + 2.0315 * (a @ a)
        x = 3.4445 * x + b @ x
    return x.transpose(-1, -2) if turn else x


def nvfp4(w, torch):
    """Rounds a stack [n,r,c] as ModelOpt's NVFP4 does: blocks of 16 of a row, E4M3 scales, one scale a matrix."""
    n, r, c = w.shape
    top = w.abs().amax((1, 2)).clamp(min=1e-12).view(n, 1, 1, 1) / (6 * 448)
    b = w.view(n, r, c // 16, 16)
    s = (b.abs().amax(-1, keepdim=True) / 6 / top).clamp(max=448).to(torch.float8_e4m3fn).float() * top
    x = b / s.clamp(min=1e-30)
    a = x.abs()
    step = torch.where(a < 2, 0.5, torch.where(a < 4, 1.0, 2.0))
    q = (torch.round(a / step) * step).clamp(max=6) * torch.sign(x) * s
    return torch.where(s > 0, q, torch.zeros_like(q)).view(n, r, c)


class Stack:
    """Matrices of one shape in one buffer: the model's parameters and gradients are views of it."""
    def __init__(self, members, rows, cols, turned, rounded, torch, dev):
        n = sum(p.numel() // (rows * cols) for p in members)
        self.w, self.g, self.m = (torch.zeros(n, rows, cols, device=dev) for _ in range(3))
        self.turned, self.rounded, self.torch, self.members, at = turned, rounded, torch, members, 0
        for p in members:
            k = p.numel() // (rows * cols)
            self.w[at:at + k].copy_(p.data.view(k, rows, cols))
            p.data = self.w[at:at + k].view(p.shape)
            p.grad = self.g[at:at + k].view(p.shape)
            at += k
        out, into = (cols, rows) if turned else (rows, cols)          # turned: stored [in][out]
        self.scale = max(1.0, out / into) ** 0.5
        self.master = None

    def round(self):
        self.master = self.w.clone()
        w = self.w.transpose(1, 2).contiguous() if self.turned else self.w
        q = nvfp4(w, self.torch)
        self.w.copy_(q.transpose(1, 2) if self.turned else q)

    def restore(self):
        self.w.copy_(self.master)
        self.master = None

    def step(self, lr, momentum):
        self.m.lerp_(self.g, 1 - momentum)
        u = orthogonal(self.g.lerp(self.m, momentum), self.torch)     # Nesterov
        self.w.mul_(1 - lr * MUON_DECAY).add_(u.float(), alpha=-lr * self.scale)


def hidden_matrix(name, p):
    """Which parameters Muon takes."""
    if p.dim() != 2 or any(s in name for s in ("_hc", "indexer", "embed", "lm_head", ".gate")):
        return name.endswith(("gate_proj", "gate_w"))
    return not name.endswith(".b_proj")


def stacks(net, torch, dev):
    import model as M
    groups, rest, f = {}, [], M.C.moe_intermediate_size
    for n, p in net.named_parameters():
        if not hidden_matrix(n, p):
            rest.append((n, p))
            continue
        shape = (f, p.shape[1]) if n.endswith(("gate_w", "up_w", "down_w")) else tuple(p.shape)
        rounded = not n.endswith(("eh_proj", "kv_a_proj_with_mqa"))   # what the NVFP4 map leaves in BF16
        groups.setdefault((*shape, n.endswith("down_w"), rounded), []).append(p)
    return [Stack(ps, *k, torch, dev) for k, ps in groups.items()], rest


# ---------------------------------------------------------------- evaluation
def evaluate(net, sets, info, torch, seqs, seq=SEQ, sparse=True, batch=8):
    """Held-out loss a token, bits a character, and how often each draft depth agrees with the trunk's greedy choice."""
    import model as M
    F, out = torch.nn.functional, {}
    M.EAGER[0] = True
    try:
        with torch.no_grad():
            for name, v in sets.items():
                v = v[:len(v) // seq * seq].view(-1, seq)[:seqs]
                ls, agree, n = [], [[] for _ in range(M.MTP_DEPTH)], 0
                for b in v.split(batch):
                    b = b.long()
                    B, T = b.shape
                    h, _ = net.hidden(b, sparse)
                    z = M.mm(h, net.lm_head).view(B, T, -1)
                    top = z.argmax(-1)
                    ls.append(F.cross_entropy(z[:, :-1].float().flatten(0, 1), b[:, 1:].flatten()).item() * B)
                    for j in range(1, M.MTP_DEPTH + 1):
                        h, _, _ = net.draft(b, h, j, sparse)
                        d = M.mm(h, net.lm_head).view(B, T, -1).argmax(-1)
                        agree[j - 1].append((d[:, :T - j] == top[:, j:]).float().mean().item() * B)
                    n += B
                loss = sum(ls) / max(n, 1)
                per = info[name]["chars"] / info[name]["tokens"]
                out[name] = dict(loss=round(loss, 4), bits_per_char=round(loss / math.log(2) / per, 4), agreement=[round(sum(a) / max(n, 1), 4) for a in agree], sequences=n, seq=seq)
    finally:
        M.EAGER[0] = False
    return out


# ---------------------------------------------------------------- the run
def schedule(f):
    """Learning-rate factor at elapsed share f: warm up, hold, fall linearly to zero."""
    if f < WARM:
        return max(f / WARM, 0.02)
    return 1.0 if f < HOLD_UNTIL else max((1 - f) / (1 - HOLD_UNTIL), 0.0)


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--data"); ap.add_argument("--out"); ap.add_argument("--tokenizer")
    ap.add_argument("--seconds", type=float, default=1300, help="from process start to the last step")
    ap.add_argument("--until", type=float, default=0, help="or: the last step's Unix time")
    ap.add_argument("--batch", type=int, default=64, help="2,048-token sequences a step")
    ap.add_argument("--prepare", action="store_true"); ap.add_argument("--warm-kernels", action="store_true")
    ap.add_argument("--tiny", action="store_true", help="a CPU test of every path")
    a = ap.parse_args()
    os.makedirs(a.out, exist_ok=True)
    if a.prepare:
        return prepare(a.data, a.tokenizer, a.out)
    import torch
    sys.path.insert(0, HERE)
    import model as M, export
    C, F = M.C, torch.nn.functional
    dev, preparing, tuning = "cpu" if a.tiny else "cuda", None, None
    seq, long, eval_seqs, every = (128, 1024, 4, 1) if a.tiny else (SEQ, LONG, EVAL_SEQS, 20)
    if a.tiny:
        M.C.index_topk = 64
        kda = M.kda_reference
    else:
        torch.backends.cuda.matmul.allow_tf32 = True
        for name in ("recompile_limit", "cache_size_limit", "accumulated_recompile_limit", "accumulated_cache_size_limit"):
            try:
                setattr(torch._dynamo.config, name, 256)
            except Exception:                       # noqa: BLE001  names differ between versions
                pass
        fewer_autotune_configs()
        try:
            torch.backends.cuda.enable_cudnn_sdp(False)
        except Exception:                           # noqa: BLE001
            pass
        if not a.warm_kernels and not os.path.exists(a.out + "/train.npy"):
            preparing = subprocess.Popen([sys.executable, __file__, "--prepare", "--data", a.data, "--tokenizer", a.tokenizer, "--out", a.out])
        if not a.warm_kernels:
            tuning = subprocess.Popen([sys.executable, __file__, "--warm-kernels", "--out", a.out, "--batch", str(a.batch)])
        shapes = [(a.batch, SEQ), (a.batch * SEQ // LONG, LONG)]
        if a.warm_kernels:                          # tunes them, into the on-disk cache, while the other process compiles
            M.kda_chunked(shapes); log("kernels tuned")
            return
        kda = M.kda_stand_in
    torch.manual_seed(0)
    net = M.Nano(kda).to(dev)
    log(f"params {sum(p.numel() for p in net.parameters()) / 1e6:.2f}M")
    muon, rest = stacks(net, torch, dev)
    log("muon stacks", [tuple(s.w.shape) + (s.turned, s.rounded) for s in muon])
    log("adam", sorted({re.sub(r"\.\d+\.", ".N.", n) for n, _ in rest}))
    pick = lambda f: [p for n, p in rest if f(n)]
    is_embed, is_head = (lambda n: "embed_tokens" in n), (lambda n: "lm_head" in n)
    groups = [dict(params=pick(is_embed), lr0=EMBED_LR, weight_decay=0.0), dict(params=pick(is_head), lr0=ADAM_LR, weight_decay=0.05),
              dict(params=pick(lambda n: not is_embed(n) and not is_head(n)), lr0=ADAM_LR, weight_decay=0.0)]
    opt = torch.optim.AdamW([dict(g, lr=g["lr0"]) for g in groups], betas=(0.9, 0.95), eps=1e-10, fused=not a.tiny)
    adam_params = [p for _, p in rest]
    moes = [m for m in net.modules() if isinstance(m, M.MoE)]

    def gradients(ids, sparse):
        main_l, drafts, kls = net.losses(ids, sparse)
        loss = main_l + DRAFT_WEIGHT * sum(0.3 * h + 0.7 * s for h, s in drafts) / len(drafts) + INDEX_WEIGHT * sum(kls) / len(kls)
        loss.backward()
        return main_l.detach(), [h.detach() for h, _ in drafts], [k.detach() for k in kls]

    def clear():
        for s in muon:
            s.g.zero_()
        opt.zero_grad(set_to_none=True)

    # compile everything on random tokens while the data is being prepared and the kernels are being tuned
    t = time.time()
    if tuning:
        gradients(torch.randint(0, C.vocab_size, (a.batch, seq), device=dev), False); clear(); torch.cuda.synchronize()
        log(f"compiled in {time.time() - t:.0f} s, left uncompiled: {sorted(M.BROKEN)}")
        try:
            tuning.wait(240)
        except subprocess.TimeoutExpired:
            tuning.kill()
        t = time.time()
        net.kda = M.kda_chunked(shapes)
        log("kernels ready")
    l0, _, _ = gradients(torch.randint(0, C.vocab_size, (a.batch, seq), device=dev), False)
    log(f"first pass: loss {l0.item():.3f} (ln V {math.log(C.vocab_size):.3f}), {time.time() - t:.0f} s", "" if a.tiny else f"{torch.cuda.max_memory_allocated() / 2**30:.0f} GiB")
    bad = [n for n, p in net.named_parameters() if p.grad is None or not bool(torch.isfinite(p.grad).all())]
    log("parameters without a finite gradient:", bad)
    clear()
    export.write(net, a.out + "/smoke", torch)
    log("export of untrained weights:", export.check(net, a.out + "/smoke", torch))
    import numpy as np
    while not os.path.exists(a.out + "/train.npy"):
        assert preparing.poll() in (None, 0), "preparing the data failed"
        time.sleep(0.5)
    info = json.load(open(a.out + "/data.json"))
    train = torch.from_numpy(np.load(a.out + "/train.npy").astype(np.int16)).to(dev)
    sets = {n: torch.from_numpy(np.load(f"{a.out}/valid-{n}.npy").astype(np.int16)).to(dev) for n in ("core", "core-strict", "wide", "chat")}
    log(f"stream {len(train) / 1e6:.1f}M tokens,", info)
    gen = torch.Generator().manual_seed(1)
    cur, order, off, cur_seq = 0, torch.empty(0, dtype=torch.long), 0, 0

    def batch(n, T):
        nonlocal cur, order, off, cur_seq
        if cur + n > len(order) or T != cur_seq:
            off, cur_seq, cur = int(torch.randint(T, (1,), generator=gen)), T, 0
            order = torch.randperm((len(train) - off) // T, generator=gen)
        rows = (order[cur:cur + n] * T + off).to(dev); cur += n
        return train[rows[:, None] + torch.arange(T, device=dev)].long()

    curve = csv.writer(open(a.out + "/curve.csv", "w", newline=""))
    curve.writerow("seconds step tokens loss draft1 draft2 draft3 index_kl grad_norm lr valid_core valid_agree1".split())
    start, step, tokens, saved, mult, sparse_ok, mode = time.time(), 0, 0, time.time(), 1.0, True, None
    keep = None                                     # parameters at the last good log line
    end = a.until or T0 + a.seconds
    span0 = start
    while True:
        if step % 10 == 0 and os.path.exists(a.out + "/deadline"):
            end = float(open(a.out + "/deadline").read().strip() or end)
        now = time.time()
        f = (now - span0) / max(end - span0, 1)
        if f >= 1:
            break
        sparse, rounded = f >= SPARSE_AT and sparse_ok, f >= ROUND_AT
        T = long if sparse else seq
        if (sparse, rounded) != mode:
            mode = (sparse, rounded); log(f"from step {step}: sequences of {T}, sparse {sparse}, rounded {rounded}")
        ids = batch(max(1, a.batch * seq // T), T)
        lr = schedule(f) * mult
        if rounded:
            for s in muon:
                if s.rounded: s.round()
        try:
            main_l, drafts, kls = gradients(ids, sparse)
        except RuntimeError as e:
            if not sparse: raise
            log("sparse leg failed, going on without:", type(e).__name__, str(e)[:500])
            sparse_ok = False; clear(); torch.cuda.empty_cache()
            for s in muon:
                if s.master is not None: s.restore()
            continue
        for s in muon:
            if s.master is not None: s.restore()
        gn = torch.stack([s.g.square().sum() for s in muon] + [p.grad.square().sum() for p in adam_params if p.grad is not None]).sum().sqrt()
        coef = (1.0 / (gn + 1e-6)).clamp(max=1.0)
        for s in muon:
            s.g.mul_(coef); s.step(MUON_LR * lr, 0.85 + 0.10 * min(1, step / 300))
        torch._foreach_mul_([p.grad for p in adam_params if p.grad is not None], coef)
        for g in opt.param_groups: g["lr"] = g["lr0"] * lr
        opt.step()
        for m in moes: m.balance(1e-3 if f < 0.8 else 1e-4)
        clear()
        tokens += ids.numel()
        if step % every == 0:
            loss = main_l.item()
            row = [round(time.time() - start, 1), step, tokens, round(loss, 4)] + [round(x.item(), 4) for x in drafts] + [round(sum(k.item() for k in kls) / len(kls), 4), round(gn.item(), 3), round(lr, 4)]
            if step % (5 * every) == 0 or step < 5 * every:
                log(f"step {step} f {f:.3f} tok {tokens / 1e6:.1f}M loss {loss:.3f} drafts {row[4:7]} kl {row[7]} gn {row[8]} lr {lr:.3f} {tokens / (time.time() - start) / 1e3:.0f}k tok/s" + ("" if a.tiny else f" {torch.cuda.max_memory_allocated() / 2**30:.0f}G"))
            if not math.isfinite(loss) or not math.isfinite(row[8]):
                log("not finite: back to the last good weights, half the rate")
                mult *= 0.5
                if keep: net.load_state_dict(keep)
                for s in muon: s.m.zero_()
                opt.state.clear()
            elif step % (10 * every) == 0:
                keep = {k: v.detach().clone() for k, v in net.state_dict().items()}
            if time.time() - saved > (20 if a.tiny else 120):
                saved = time.time()
                ev = evaluate(net, {"core": sets["core"]}, info, torch, 4 if a.tiny else 32, seq)["core"]
                export.write(net, a.out + "/ckpt", torch)
                log("valid", ev, f"saved in {time.time() - saved:.1f} s")
                row += [ev["loss"], ev["agreement"][0]]
                saved = time.time()
            curve.writerow(row)
        step += 1
    log(f"trained {step} steps, {tokens / 1e6:.1f}M tokens in {time.time() - start:.0f} s")
    export.write(net, a.out + "/ckpt", torch)
    result = dict(steps=step, tokens=tokens, seconds=round(time.time() - start), data=info)
    json.dump(result, open(a.out + "/result.json", "w"), indent=1)
    open(a.out + "/trained", "w").close()
    for s in muon:                                  # what an engine will read: BF16 weights
        s.w.copy_(s.w.bfloat16().float())
    result["bf16"] = evaluate(net, sets, info, torch, eval_seqs, seq)
    log("bf16", json.dumps(result["bf16"]))
    json.dump(result, open(a.out + "/result.json", "w"), indent=1)
    for s in muon:
        if s.rounded: s.round()
    result["nvfp4"] = evaluate(net, sets, info, torch, eval_seqs, seq)
    log("nvfp4", json.dumps(result["nvfp4"]))
    json.dump(result, open(a.out + "/result.json", "w"), indent=1)
    try:
        if not a.tiny:
            result["nvfp4_8k"] = evaluate(net, sets, info, torch, 24, long, True, 2)
            log("nvfp4 8k", json.dumps(result["nvfp4_8k"]))
            json.dump(result, open(a.out + "/result.json", "w"), indent=1)
    finally:
        open(a.out + "/done", "w").close()
    log("done")


if __name__ == "__main__":
    main()
