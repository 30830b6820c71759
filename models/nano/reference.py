"""What rocket-nano answers, computed in float64 by NumPy alone: the independent reference of the Go and C engine's tests.

    python3 reference.py CHECKPOINT --inputs reference.safetensors --out NEW     write the outputs of these weights
    python3 reference.py CHECKPOINT --inputs reference.safetensors --compare     compare with the outputs in the file

It shares no code with the engine: it is written from the formulas of the architecture, one row and one head at a time
where that is plainer, and reads the hub's files by itself. Checkpoints may hold BF16, F32 and ModelOpt's NVFP4. All
arithmetic is float64; outputs are stored as F32. Ties (indexer, router, greedy choice) go to the lower index.
"""
import argparse, glob, json, struct, sys
import numpy as np

DEPTHS = 3                      # of drafts
GREEDY = 32                     # tokens after each prompt
PROMPTS = ("code", "chat")      # with the logits of every row
TAIL = 32                       # rows kept of the long text
CONV_TAPS = 4
L2_EPS = 1e-6                   # of KDA's queries and keys; fixed by the architecture
LAYERNORM_EPS = 1e-6            # of the indexer's keys
ROUTER_EPS = 1e-20


# ---------------------------------------------------------------- files
def e2m1():
    """The sixteen values of a 4-bit float: sign, 2 bits of exponent (bias 1), 1 bit of mantissa."""
    low = [0.5 * m if e == 0 else 2.0 ** (e - 1) * (1 + 0.5 * m) for e in range(4) for m in range(2)]
    return np.array(low + [-v for v in low])


def e4m3():
    """The values of an 8-bit float: sign, 4 bits of exponent (bias 7), 3 of mantissa; no infinities, one NaN a sign."""
    def value(c):
        e, m = c >> 3 & 15, c & 7
        v = float("nan") if e == 15 and m == 7 else 2.0 ** -6 * m / 8 if e == 0 else 2.0 ** (e - 7) * (1 + m / 8)
        return -v if c & 128 else v
    return np.array([value(c) for c in range(256)])


def read_file(path):
    """A safetensors file -> {name: (dtype, array in its stored form)}, BF16 as float64 already."""
    raw = open(path, "rb").read()
    n, = struct.unpack_from("<Q", raw)
    out = {}
    for name, t in json.loads(raw[8:8 + n]).items():
        if name == "__metadata__":
            continue
        lo, hi = t["data_offsets"]
        b = raw[8 + n + lo:8 + n + hi]
        if t["dtype"] == "BF16":
            a = (np.frombuffer(b, "<u2").astype(np.uint32) << 16).view(np.float32).astype(np.float64)
        else:
            a = np.frombuffer(b, {"F32": "<f4", "I32": "<i4", "U8": "u1", "F8_E4M3": "u1"}[t["dtype"]])
        out[name] = (t["dtype"], a.reshape(t["shape"]))
    return out


def read_checkpoint(folder):
    """The config, and the hub's tensors as float64 with NVFP4 widened; names lose the prefix of the language model."""
    stored, w = {}, {}
    for path in sorted(glob.glob(folder + "/model*.safetensors")):
        stored |= read_file(path)
    nibble, scale8 = e2m1(), e4m3()
    for name, (dtype, a) in stored.items():
        if name.endswith((".weight_scale", ".weight_scale_2")):
            continue
        if dtype == "U8":
            codes = np.stack([a & 15, a >> 4], -1).reshape(a.shape[0], -1)         # the even column is the low half
            groups = scale8[stored[name + "_scale"][1]]
            size = codes.shape[1] // groups.shape[1]
            a = nibble[codes] * np.repeat(groups, size, 1) * np.float64(stored[name + "_scale_2"][1])
        elif dtype not in ("BF16", "F32"):
            raise ValueError(f"{name}: this program does not read {dtype}")
        w[name.replace("model.language_model.", "")] = np.asarray(a, np.float64)
    return json.load(open(folder + "/config.json")), w


def write_file(path, tensors, metadata):
    head, at = {"__metadata__": metadata}, 0
    for name in sorted(tensors):
        a = tensors[name]
        head[name] = dict(dtype={"f": "F32", "i": "I32"}[a.dtype.kind], shape=list(a.shape), data_offsets=[at, at + a.nbytes])
        at += a.nbytes
    h = json.dumps(head).encode()
    h += b" " * (-len(h) % 8)
    with open(path, "wb") as f:
        f.write(struct.pack("<Q", len(h)) + h)
        for name in sorted(tensors):
            f.write(tensors[name].tobytes())


# ---------------------------------------------------------------- formulas
def sigmoid(x):
    e = np.exp(-np.abs(x))
    return np.where(x >= 0, 1, e) / (1 + e)


def silu(x):
    return x * sigmoid(x)


def softmax(x):
    e = np.exp(x - x.max(-1, keepdims=True))
    return e / e.sum(-1, keepdims=True)


def best(score, k):
    """The k highest, and of equal ones the first."""
    return np.argsort(-score, kind="stable")[:k]


class Nano:
    def __init__(self, folder):
        self.c, self.w = read_checkpoint(folder)
        if self.c["model_type"] != "glm5_next" or self.c["qk_rope_head_dim"] != 0 or self.c["n_group"] != 1:
            raise ValueError("this program knows rocket-nano's form of glm5_next only")

    def rms(self, x, weight):
        return x / np.sqrt((x * x).mean(-1, keepdims=True) + self.c["rms_norm_eps"]) * self.w[weight]

    def linear(self, x, name):
        return x @ self.w[name + ".weight"].T

    # -- residual streams: s is [tokens, streams, hidden]
    def hyper(self, s, name, branch):
        """Collapses the streams, runs the branch, and puts its result back beside the mixed streams."""
        n, eps = self.c["hc_mult"], self.c["hc_eps"]
        base, scale = self.w[name + "_base"], self.w[name + "_scale"]
        flat = s.reshape(len(s), -1)
        m = flat @ self.w[name + "_fn"].T / np.sqrt((flat * flat).mean(-1, keepdims=True) + self.c["rms_norm_eps"])
        pre = sigmoid(m[:, :n] * scale[0] + base[:n]) + eps
        post = 2 * sigmoid(m[:, n:2 * n] * scale[1] + base[n:2 * n])
        comb = softmax((m[:, 2 * n:] * scale[2] + base[2 * n:]).reshape(-1, n, n)) + eps
        comb = comb / (comb.sum(1, keepdims=True) + eps)
        for _ in range(self.c["hc_sinkhorn_iters"] - 1):
            comb = comb / (comb.sum(2, keepdims=True) + eps)
            comb = comb / (comb.sum(1, keepdims=True) + eps)
        y = branch(np.einsum("ts,tsd->td", pre, s))
        return np.einsum("ts,td->tsd", post, y) + np.einsum("tij,tid->tjd", comb, s)

    # -- token mixers: x is [tokens, hidden], normed
    def kda(self, x, at):
        H, D, T = self.c["linear_num_heads"], self.c["linear_head_dim"], len(x)

        def rows(kind):
            raw = np.concatenate([np.zeros((CONV_TAPS - 1, H * D)), self.linear(x, f"{at}.{kind}_proj")])
            taps = self.w[f"{at}.{kind}_conv1d.weight"].reshape(H * D, CONV_TAPS)
            return silu(sum(raw[j:j + T] * taps[:, j] for j in range(CONV_TAPS))).reshape(T, H, D)
        q, k, v = rows("q"), rows("k"), rows("v")
        q = q / np.sqrt((q * q).sum(-1, keepdims=True) + L2_EPS) / np.sqrt(D)
        k = k / np.sqrt((k * k).sum(-1, keepdims=True) + L2_EPS)
        f = self.linear(self.linear(x, at + ".f_a_proj"), at + ".f_b_proj") + self.w[at + ".dt_bias"].reshape(-1)
        rate = np.exp(self.w[at + ".A_log"].reshape(H, 1))
        keep = np.exp(self.c["linear_lower_bound"] * sigmoid(rate * f.reshape(T, H, D)))
        beta = sigmoid(self.linear(x, at + ".b_proj"))
        o = np.empty((T, H, D))
        for h in range(H):
            S = np.zeros((D, D))                                    # [key channel, value channel]
            for t in range(T):
                S = keep[t, h][:, None] * S
                S = S + np.outer(k[t, h], beta[t, h] * (v[t, h] - k[t, h] @ S))
                o[t, h] = q[t, h] @ S
        gate = self.linear(self.linear(x, at + ".g_a_proj"), at + ".g_b_proj").reshape(T, H, D)
        return self.linear((self.rms(o, at + ".o_norm.weight") * sigmoid(gate)).reshape(T, H * D), at + ".o_proj")

    def selected(self, x, qr, at):
        """[tokens, tokens] bool: the positions that each row attends to."""
        H, D, P, T = self.c["index_n_heads"], self.c["index_head_dim"], self.c["index_kpool"], len(x)
        at += ".indexer"
        k = self.linear(x, at + ".wk")
        k = k - k.mean(-1, keepdims=True)
        k = k / np.sqrt((k * k).mean(-1, keepdims=True) + LAYERNORM_EPS) * self.w[at + ".k_norm.weight"] + self.w[at + ".k_norm.bias"]
        gate = x @ self.w[at + ".index_kpool_compress_gate"].T
        pools = T // P
        g = gate[:pools * P].reshape(pools, P, D) + self.w[at + ".index_kpool_compress_ape"]
        g = np.exp(g - g.max(1, keepdims=True))
        pooled = (g / g.sum(1, keepdims=True) * k[:pools * P].reshape(pools, P, D)).sum(1)
        q = self.linear(qr, at + ".wq_b").reshape(T, H, D)
        weight = self.linear(x, at + ".weights_proj") / np.sqrt(H * D)
        on = np.zeros((T, T), bool)
        for t in range(T):
            whole = (t + 1) // P
            score = weight[t] @ np.maximum(q[t] @ pooled[:whole].T, 0)
            for p in best(score, self.c["index_topk"] // P):
                on[t, p * P:(p + 1) * P] = True
            on[t, whole * P:t + 1] = True
        return on

    def mla(self, x, at):
        H, N, V, T = self.c["num_attention_heads"], self.c["qk_nope_head_dim"], self.c["v_head_dim"], len(x)
        qr = self.rms(self.linear(x, at + ".q_a_proj"), at + ".q_a_layernorm.weight")
        q = self.linear(qr, at + ".q_b_proj").reshape(T, H, N)
        kv = self.linear(self.rms(self.linear(x, at + ".kv_a_proj_with_mqa"), at + ".kv_a_layernorm.weight"), at + ".kv_b_proj")
        kv = kv.reshape(T, H, N + V)
        on = self.selected(x, qr, at)
        o = [softmax(np.where(on, q[:, h] @ kv[:, h, :N].T / np.sqrt(N), -np.inf)) @ kv[:, h, N:] for h in range(H)]
        return self.linear(np.stack(o, 1).reshape(T, H * V), at + ".o_proj")

    # -- channel mixers
    def mlp(self, x, at):
        limit = self.c["swiglu_limit"]
        g, u = self.linear(x, at + ".gate_proj"), self.linear(x, at + ".up_proj")
        return self.linear(silu(np.minimum(g, limit)) * np.clip(u, -limit, limit), at + ".down_proj")

    def moe(self, x, at):
        score = sigmoid(self.linear(x, at + ".gate"))
        y = self.mlp(x, at + ".shared_experts")
        for t in range(len(x)):
            chosen = best(score[t] + self.w[at + ".gate.e_score_correction_bias"], self.c["num_experts_per_tok"])
            total = score[t, chosen].sum() + ROUTER_EPS
            for e in chosen:
                part = score[t, e] / total * self.c["routed_scaling_factor"]
                y[t] += part * self.mlp(x[t:t + 1], f"{at}.experts.{e}")[0]
        return y

    # -- whole passes
    def trunk(self, ids):
        """Token ids -> final normed hidden rows."""
        s = np.repeat(self.w["embed_tokens.weight"][ids][:, None], self.c["hc_mult"], 1)
        for i in range(self.c["num_hidden_layers"]):
            at = f"layers.{i}"
            mixer = self.kda if self.c["layer_types"][i] == "linear_attention" else self.mla
            ffn = self.mlp if self.c["mlp_layer_types"][i] == "dense" else self.moe
            s = self.hyper(s, at + ".hc_attn", lambda x: mixer(self.rms(x, at + ".input_layernorm.weight"), at + ".self_attn"))
            s = self.hyper(s, at + ".hc_ffn", lambda x: ffn(self.rms(x, at + ".post_attention_layernorm.weight"), at + ".mlp"))
        return self.rms(s.mean(1), "norm.weight")

    def draft(self, ids, h):
        """The draft layer: row t is of hidden row h[t] and the embedding of ids[t]. Rows attend to rows of this pass only."""
        at = f"layers.{self.c['num_hidden_layers']}"
        e = self.w["embed_tokens.weight"][ids]
        r = self.linear(np.concatenate([self.rms(e, at + ".enorm.weight"), self.rms(h, at + ".hnorm.weight")], -1), at + ".eh_proj")
        r = r + self.mla(self.rms(r, at + ".input_layernorm.weight"), at + ".self_attn")
        r = r + self.moe(self.rms(r, at + ".post_attention_layernorm.weight"), at + ".mlp")
        return self.rms(r, at + ".shared_head.norm.weight")

    def logits(self, h):
        return self.linear(h, "lm_head")


def outputs(net, inputs):
    out = {}
    for name in PROMPTS:
        ids = inputs[name + ".input_ids"][1]
        h = net.trunk(ids)
        out[name + ".input_ids"], out[name + ".logits"] = ids, net.logits(h)
        for j in range(1, DEPTHS + 1):
            h = net.draft(ids[j:], h[:len(ids) - j])
            out[f"{name}.mtp{j}.logits"] = net.logits(h)
        line, gaps = list(ids), []
        for _ in range(GREEDY):
            z = net.logits(net.trunk(np.array(line))[-1:])[0]
            line.append(int(best(z, 1)[0]))
            two = np.sort(z)[-2:]
            gaps.append(two[1] - two[0])
        out[name + ".greedy"] = np.array(line[len(ids):], np.int32)
        print(f"{name}: nearest of {GREEDY} greedy choices wins by {min(gaps):.4f}", flush=True)
    ids = inputs["long.input_ids"][1]
    h = net.trunk(ids)[-TAIL:]
    out["long.input_ids"], out[f"long.hidden_last{TAIL}"], out[f"long.logits_last{TAIL}"] = ids, h, net.logits(h)
    return out


def main():
    p = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    p.add_argument("checkpoint", help="folder in the hub's layout")
    p.add_argument("--inputs", required=True, help="safetensors file with code, chat and long .input_ids")
    p.add_argument("--out", help="file to write")
    p.add_argument("--compare", action="store_true", help="compare with the outputs in --inputs, in float64")
    a = p.parse_args()
    inputs = read_file(a.inputs)
    out = outputs(Nano(a.checkpoint), inputs)
    bad = False
    if a.compare:
        for name, got in sorted(out.items()):
            want = inputs[name][1].astype(np.float64)
            e = np.abs(got - want).max() / np.abs(want).max()
            bad |= not e < 1e-6
            print(f"{name:24} differs by {e:.1e} of the largest")
    if a.out:
        out = {k: np.ascontiguousarray(v, "<f4" if v.dtype.kind == "f" else "<i4") for k, v in out.items()}
        write_file(a.out, out, dict(made_by="models/nano/reference.py: float64, of the weights in this folder",
                                    long="first 900 tokens of Go's strings/reader.go after token 0"))
    return int(bad)


if __name__ == "__main__":
    sys.exit(main())
