"""rocket-nano in PyTorch: GLM-5.3-Flash (glm5_next) at small scale, written for training speed.

Everything between the two kernels that are not ours (chunked KDA, scaled dot product attention) is a free function over
flat rows [N, ...], compiled once for all layers and both sequence lengths. Rows are BF16, parameters FP32; routers,
gates, norms and the mixing matrices are computed in FP32. Sparse selection is a mask over dense attention.
"""
import math, os
import torch, torch.nn as nn, torch.nn.functional as F

CFG = dict(
    vocab_size=4096, hidden_size=256, num_hidden_layers=12,          # every 4th layer is MLA/DSA, the rest KDA
    linear_num_heads=4, linear_head_dim=64, linear_conv_kernel_dim=4, linear_lower_bound=-5.0,
    num_attention_heads=4, q_lora_rank=128, kv_lora_rank=128, qk_nope_head_dim=64, v_head_dim=64,
    index_n_heads=4, index_head_dim=32, index_kpool=4, index_topk=512,
    intermediate_size=512, first_k_dense=1, n_routed_experts=16, num_experts_per_tok=2,
    moe_intermediate_size=128, n_shared_experts=1, routed_scaling_factor=1.0, swiglu_limit=10.0,
    hc_mult=4, hc_sinkhorn_iters=8, hc_eps=1e-6, rms_norm_eps=1e-5, num_nextn_predict_layers=1,
)
C = type("Cfg", (), CFG)
MTP_DEPTH = 3
ROW = torch.bfloat16            # element type of rows; tests on a CPU may set float32
EAGER = [False]                 # evaluation runs the functions uncompiled: its shapes differ
BROKEN = set()                  # functions whose compilation failed once


class jit:
    """A function compiled on first use; when compiling fails it stays as it is, with a note in the log."""
    def __init__(self, fn):
        self.fn, self.name = fn, fn.__name__
        self.compiled = torch.compile(fn, dynamic=False, backend=os.environ.get("NANO_BACKEND", "inductor"))
        if os.environ.get("NANO_EAGER"):
            BROKEN.add(self.name)

    def __call__(self, *args):
        if EAGER[0] or self.name in BROKEN:
            return self.fn(*args)
        try:
            return self.compiled(*args)
        except torch.OutOfMemoryError:
            raise
        except Exception as e:                      # noqa: BLE001  a slower run is better than none
            print(f"not compiled: {self.name}: {type(e).__name__} {str(e)[:600]}", flush=True)
            BROKEN.add(self.name)
            return self.fn(*args)


# ---------------------------------------------------------------- functions over rows
def mm(x, w):
    return x @ w.to(x.dtype).t()


def norm(x, w):
    x = x.float()
    return (x * torch.rsqrt(x.square().mean(-1, keepdim=True) + C.rms_norm_eps) * w).to(ROW)


def swiglu(g, u):
    return F.silu(g.clamp(max=C.swiglu_limit)) * u.clamp(-C.swiglu_limit, C.swiglu_limit)


def mix(s, fn, base, scale):
    """mHC: streams [N,S,d] -> post [N,S], comb [N,S,S] doubly stochastic, collapsed row [N,d]."""
    S = C.hc_mult
    flat = s.flatten(1)
    r = torch.rsqrt(flat.float().square().mean(-1, keepdim=True) + C.rms_norm_eps)
    w = mm(flat, fn).float() * r
    pre = torch.sigmoid(w[:, :S] * scale[0] + base[:S]) + C.hc_eps
    post = 2 * torch.sigmoid(w[:, S:2 * S] * scale[1] + base[S:2 * S])
    comb = torch.softmax(w[:, 2 * S:].reshape(-1, S, S) * scale[2] + base[2 * S:].view(S, S), -1) + C.hc_eps
    comb = comb / (comb.sum(-2, keepdim=True) + C.hc_eps)
    for _ in range(C.hc_sinkhorn_iters - 1):
        comb = comb / (comb.sum(-1, keepdim=True) + C.hc_eps)
        comb = comb / (comb.sum(-2, keepdim=True) + C.hc_eps)
    x = (pre.unsqueeze(-1) * s.float()).sum(1)
    return post, comb, x


def merge(post, comb, y, s):
    """X' = post (x) y + comb^T X."""
    return (post.unsqueeze(-1) * y.float().unsqueeze(1) + (comb.unsqueeze(-1) * s.float().unsqueeze(2)).sum(1)).to(ROW)


def moe(x, router, bias, wg, wu, wd, sg, su, sd):
    """All experts as one wide FFN, masked by the router: exact, and fast at this size. Returns (y, tokens per expert)."""
    E, f = C.n_routed_experts, C.moe_intermediate_size
    s = torch.sigmoid(x.float() @ router.t())
    c = s.detach() + bias
    ids = torch.arange(E, device=x.device)
    first = c.argmax(-1, keepdim=True) == ids
    second = c.masked_fill(first, -1e30).argmax(-1, keepdim=True) == ids
    chosen = (first | second).float()
    w = s * chosen
    w = w / (w.sum(-1, keepdim=True) + 1e-20) * C.routed_scaling_factor
    h = swiglu(mm(x, wg), mm(x, wu))
    h = (h.view(-1, E, f) * w.to(h.dtype).unsqueeze(-1)).view(-1, E * f)
    y = h @ wd.to(h.dtype) + mm(swiglu(mm(x, sg), mm(x, su)), sd)
    return y, chosen.sum(0)


@jit
def kda_in(s, fn, base, scale, ln, wq, wk, wv, wfa, wfb, wga, wgb, wb):
    post, comb, x = mix(s, fn, base, scale)
    x = norm(x, ln)
    qkv = mm(x, torch.cat([wq, wk, wv], 0))
    return post, comb, qkv, mm(mm(x, wfa), wfb), mm(mm(x, wga), wgb), torch.sigmoid(mm(x, wb).float())


@jit
def conv(x, w):
    """Causal depthwise convolution and SiLU: [B,T,3P] -> q, k, v, each [B,T,H,D]."""
    B, T, _ = x.shape
    W, H, D = C.linear_conv_kernel_dim, C.linear_num_heads, C.linear_head_dim
    p = F.pad(x, (0, 0, W - 1, 0))
    y = p[:, :T].float() * w[:, 0, 0]
    for j in range(1, W):
        y = y + p[:, j:j + T].float() * w[:, 0, j]
    y = F.silu(y).to(ROW)
    P = H * D
    return tuple(y[..., i * P:(i + 1) * P].reshape(B, T, H, D).contiguous() for i in range(3))


@jit
def kda_out(o, gate, on, wo, post, comb, s):
    """o [N,H,D] and gate [N,H*D] -> streams."""
    H, D = C.linear_num_heads, C.linear_head_dim
    o = norm(o, on).float() * torch.sigmoid(gate.float().view(-1, H, D))
    return merge(post, comb, mm(o.to(ROW).reshape(-1, H * D), wo), s)


def mla_rows(x, qa, qan, qb, kva, kvan, kvb):
    qr = norm(mm(x, qa), qan)
    return qr, mm(qr, qb), mm(norm(mm(x, kva), kvan), kvb)


@jit
def mla_in(s, fn, base, scale, ln, qa, qan, qb, kva, kvan, kvb):
    post, comb, x = mix(s, fn, base, scale)
    x = norm(x, ln)
    return post, comb, x, *mla_rows(x, qa, qan, qb, kva, kvan, kvb)


@jit
def mla_out(o, wo, post, comb, s):
    return merge(post, comb, mm(o, wo), s)


@jit
def ffn_dense(s, fn, base, scale, ln, wg, wu, wd):
    post, comb, x = mix(s, fn, base, scale)
    x = norm(x, ln)
    return merge(post, comb, mm(swiglu(mm(x, wg), mm(x, wu)), wd), s)


@jit
def ffn_moe(s, fn, base, scale, ln, router, bias, wg, wu, wd, sg, su, sd):
    post, comb, x = mix(s, fn, base, scale)
    y, load = moe(norm(x, ln), router, bias, wg, wu, wd, sg, su, sd)
    return merge(post, comb, y, s), load


@jit
def draft_in(emb, h, en, hn, eh, ln, qa, qan, qb, kva, kvan, kvb):
    res = mm(torch.cat([norm(emb, en), norm(h, hn)], -1), eh)
    x = norm(res, ln)
    return res, x, *mla_rows(x, qa, qan, qb, kva, kvan, kvb)


@jit
def draft_out(o, wo, res, ln, router, bias, wg, wu, wd, sg, su, sd, out):
    x = res + mm(o, wo)
    y, load = moe(norm(x, ln), router, bias, wg, wu, wd, sg, su, sd)
    return norm(x + y, out), load


@jit
def head_loss(h, w, target):
    """Mean cross entropy over rows with a target >= 0, and the logits [N,V]."""
    z = mm(h, w)
    return F.cross_entropy(z.float(), target, ignore_index=-100), z


@jit
def draft_loss(h, w, teacher, target):
    """Cross entropy against the data, and against the trunk's own distribution (teacher: its logits, shifted)."""
    z = mm(h, w).float()
    lz = z - torch.logsumexp(z, -1, keepdim=True)
    on = (target >= 0).float()
    n = on.sum()
    hard = -(lz.gather(-1, target.clamp(min=0).unsqueeze(-1)).squeeze(-1) * on).sum() / n
    p = torch.softmax(teacher.float(), -1)
    soft = -((p * lz).sum(-1) * on).sum() / n
    return hard, soft


# ---------------------------------------------------------------- modules
def param(*shape):
    return nn.Parameter(torch.empty(*shape))


def ones(n):
    return nn.Parameter(torch.ones(n))


class KDA(nn.Module):
    def __init__(self):
        super().__init__()
        d, H, D = C.hidden_size, C.linear_num_heads, C.linear_head_dim
        P = H * D
        self.q_proj, self.k_proj, self.v_proj = param(P, d), param(P, d), param(P, d)
        self.conv1d = nn.Parameter(torch.randn(3 * P, 1, C.linear_conv_kernel_dim) * 0.3)
        self.A_log = nn.Parameter(torch.zeros(H))
        dt = torch.exp(torch.rand(P) * (math.log(0.1) - math.log(0.001)) + math.log(0.001)).clamp(min=1e-4)
        self.dt_bias = nn.Parameter(dt + torch.log(-torch.expm1(-dt)))
        self.f_a_proj, self.f_b_proj = param(D, d), param(P, D)
        self.g_a_proj, self.g_b_proj = param(D, d), param(P, D)
        self.b_proj = param(H, d)
        self.o_norm = ones(D)
        self.o_proj = param(d, P)


class Indexer(nn.Module):
    def __init__(self):
        super().__init__()
        d, D = C.hidden_size, C.index_head_dim
        self.wq_b, self.wk = param(C.index_n_heads * D, C.q_lora_rank), param(D, d)
        self.k_norm_weight, self.k_norm_bias = ones(D), nn.Parameter(torch.zeros(D))
        self.weights_proj = param(C.index_n_heads, d)
        self.index_kpool_compress_ape = nn.Parameter(torch.zeros(C.index_kpool, D))
        self.index_kpool_compress_gate = param(D, d)

    def scores(self, x, q_resid):
        """[B,T,pools]: sum_h w_h relu(q_h . k_pool / sqrt(D)); pool keys are gate-weighted means of kpool keys."""
        B, T, _ = x.shape
        D, P, H = C.index_head_dim, C.index_kpool, C.index_n_heads
        q = mm(q_resid, self.wq_b).view(B, T, H, D).transpose(1, 2)
        k = F.layer_norm(mm(x, self.wk).float(), (D,), self.k_norm_weight, self.k_norm_bias, 1e-6).view(B, T // P, P, D)
        gate = mm(x, self.index_kpool_compress_gate).float().view(B, T // P, P, D)
        kp = ((gate + self.index_kpool_compress_ape).softmax(2) * k).sum(2)
        w = (mm(x, self.weights_proj).float() * (H ** -0.5 * D ** -0.5)).view(B, T, H)
        s = 0
        for h in range(H):                                        # head by head: the scores are large at 8k
            s = s + w[:, :, h:h + 1] * F.relu((q[:, h] @ kp.to(q.dtype).transpose(-1, -2)).float())
        return s


def complete_pools(T, dev):
    """[T,pools]: pools whose last token is not after the row."""
    return torch.arange(T // C.index_kpool, device=dev)[None] < ((torch.arange(T, device=dev) + 1) // C.index_kpool)[:, None]


class MLA(nn.Module):
    def __init__(self):
        super().__init__()
        d, H, N, V = C.hidden_size, C.num_attention_heads, C.qk_nope_head_dim, C.v_head_dim
        self.q_a_proj, self.q_a_layernorm = param(C.q_lora_rank, d), ones(C.q_lora_rank)
        self.q_b_proj = param(H * N, C.q_lora_rank)
        self.kv_a_proj_with_mqa, self.kv_a_layernorm = param(C.kv_lora_rank, d), ones(C.kv_lora_rank)
        self.kv_b_proj = param(H * (N + V), C.kv_lora_rank)
        self.o_proj = param(d, H * V)
        self.indexer = Indexer()

    def rows(self):
        return (self.q_a_proj, self.q_a_layernorm, self.q_b_proj, self.kv_a_proj_with_mqa, self.kv_a_layernorm, self.kv_b_proj)

    @torch.no_grad()
    def selection(self, x, qr):
        """[B,1,T,T] bool: the pools with the highest scores, and the incomplete one."""
        B, T, _ = x.shape
        P, K = C.index_kpool, C.index_topk // C.index_kpool
        past = complete_pools(T, x.device)
        t = torch.arange(T, device=x.device)
        tail = (t[None] // P >= ((t + 1) // P)[:, None]) & (t[None] <= t[:, None])
        out = torch.empty(B, 1, T, T, dtype=torch.bool, device=x.device)
        step = max(1, 32768 // T)
        for b in range(0, B, step):
            s = self.indexer.scores(x[b:b + step], qr[b:b + step]).masked_fill(~past, -1e30)
            if T // P > K:
                s = torch.zeros_like(s, dtype=torch.bool).scatter_(-1, s.topk(K, -1).indices, True) & past
            else:
                s = past.expand(s.shape[0], -1, -1)
            out[b:b + step, 0] = s.repeat_interleave(P, -1) | tail
        return out

    def kl(self, x, qr, q, k):
        """How far the indexer's distribution over complete pools is from attention's own (mean of heads), one sequence."""
        T, P = x.shape[1], C.index_kpool
        past = complete_pools(T, x.device)
        with torch.no_grad():
            s = (q[:1] @ k[:1].transpose(-1, -2)).float() * C.qk_nope_head_dim ** -0.5
            s = s.masked_fill(torch.ones(T, T, device=x.device, dtype=torch.bool).triu(1), float("-inf"))
            p = s.softmax(-1).mean(1).view(1, T, T // P, P).sum(-1).masked_fill(~past, 0)
            p = p / p.sum(-1, keepdim=True).clamp(min=1e-6)
        logit = self.indexer.scores(x[:1].detach(), qr[:1].detach()).masked_fill(~past, -1e9)
        p, logq = p[:, 64:], F.log_softmax(logit[:, 64:], -1)
        return (p * (p.clamp(min=1e-9).log() - logq)).sum(-1).mean()

    def attend(self, B, T, x, qr, q, kv, sparse, want_kl):
        """Rows [N, ...] -> attention output [N, H*V] and the indexer's loss."""
        H, N, V = C.num_attention_heads, C.qk_nope_head_dim, C.v_head_dim
        q = q.view(B, T, H, N).transpose(1, 2)
        k, v = kv.view(B, T, H, N + V).transpose(1, 2).split([N, V], -1)
        x, qr = x.view(B, T, -1), qr.view(B, T, -1)
        if sparse and T > C.index_topk:
            o = F.scaled_dot_product_attention(q, k, v, attn_mask=self.selection(x, qr))
        else:
            o = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        kl = self.kl(x, qr, q.detach(), k.detach()) if want_kl else None
        return o.transpose(1, 2).reshape(B * T, H * V), kl


class MLP(nn.Module):
    def __init__(self, f):
        super().__init__()
        d = C.hidden_size
        self.gate_proj, self.up_proj, self.down_proj = param(f, d), param(f, d), param(d, f)


class MoE(nn.Module):
    def __init__(self):
        super().__init__()
        d, E, f = C.hidden_size, C.n_routed_experts, C.moe_intermediate_size
        self.gate = param(E, d)
        self.register_buffer("e_score_correction_bias", torch.zeros(E))
        self.gate_w, self.up_w, self.down_w = param(E * f, d), param(E * f, d), param(E * f, d)   # down_w is [expert][f][d]
        self.shared_experts = MLP(f * C.n_shared_experts)
        self.load = None

    def weights(self):
        s = self.shared_experts
        return (self.gate, self.e_score_correction_bias, self.gate_w, self.up_w, self.down_w, s.gate_proj, s.up_proj, s.down_proj)

    @torch.no_grad()
    def balance(self, rate):
        self.e_score_correction_bias += rate * torch.sign(self.load.mean() - self.load)


class HC(nn.Module):
    def __init__(self):
        super().__init__()
        S, d = C.hc_mult, C.hidden_size
        self.fn = nn.Parameter(torch.randn((2 + S) * S, S * d) * 0.02)
        self.base = nn.Parameter(torch.cat([torch.full((S,), -math.log(S - 1.0)), torch.zeros(S), torch.eye(S).flatten() * 4]))
        self.scale = nn.Parameter(torch.full((3,), 0.5))

    def w(self):
        return self.fn, self.base, self.scale


class Layer(nn.Module):
    def __init__(self, i):
        super().__init__()
        self.input_layernorm, self.post_attention_layernorm = ones(C.hidden_size), ones(C.hidden_size)
        self.self_attn = MLA() if i % 4 == 3 else KDA()
        self.mlp = MLP(C.intermediate_size) if i < C.first_k_dense else MoE()
        self.attn_hc, self.ffn_hc = HC(), HC()

    def forward(self, s, B, T, sparse, want_kl, kda):
        a, kl = self.self_attn, None
        if isinstance(a, KDA):
            post, comb, qkv, f, gate, beta = kda_in(s, *self.attn_hc.w(), self.input_layernorm, a.q_proj, a.k_proj, a.v_proj,
                                                    a.f_a_proj, a.f_b_proj, a.g_a_proj, a.g_b_proj, a.b_proj)
            q, k, v = conv(qkv.view(B, T, -1), a.conv1d)
            H, D = C.linear_num_heads, C.linear_head_dim
            o = kda(q, k, v, f.view(B, T, H, D), beta.view(B, T, H), a.A_log, a.dt_bias)
            s = kda_out(o.reshape(B * T, H, D), gate, a.o_norm, a.o_proj, post, comb, s)
        else:
            post, comb, x, qr, q, kv = mla_in(s, *self.attn_hc.w(), self.input_layernorm, *a.rows())
            o, kl = a.attend(B, T, x, qr, q, kv, sparse, want_kl)
            s = mla_out(o, a.o_proj, post, comb, s)
        m = self.mlp
        if isinstance(m, MoE):
            s, load = ffn_moe(s, *self.ffn_hc.w(), self.post_attention_layernorm, *m.weights())
            m.load = load.detach()
        else:
            s = ffn_dense(s, *self.ffn_hc.w(), self.post_attention_layernorm, m.gate_proj, m.up_proj, m.down_proj)
        return s, kl


class MTP(nn.Module):
    """One draft layer, re-applied for deeper drafts: plain residual, MLA/DSA + MoE, as GLM-5.3-Flash's layer 45."""
    def __init__(self):
        super().__init__()
        d = C.hidden_size
        self.enorm, self.hnorm, self.eh_proj = ones(d), ones(d), param(d, 2 * d)
        self.input_layernorm, self.post_attention_layernorm = ones(d), ones(d)
        self.self_attn, self.mlp = MLA(), MoE()
        self.norm = ones(d)                          # shared_head.norm

    def forward(self, emb, h, B, T, sparse, want_kl):
        a = self.self_attn
        res, x, qr, q, kv = draft_in(emb, h, self.enorm, self.hnorm, self.eh_proj, self.input_layernorm, *a.rows())
        o, kl = a.attend(B, T, x, qr, q, kv, sparse, want_kl)
        h, load = draft_out(o, a.o_proj, res, self.post_attention_layernorm, *self.mlp.weights(), self.norm)
        return h, kl, load


class Nano(nn.Module):
    def __init__(self, kda):
        super().__init__()
        self.embed_tokens = param(C.vocab_size, C.hidden_size)
        self.layers = nn.ModuleList(Layer(i) for i in range(C.num_hidden_layers))
        self.norm = ones(C.hidden_size)
        self.lm_head = param(C.vocab_size, C.hidden_size)
        self.mtp = MTP()
        self.kda = kda
        for n, p in self.named_parameters():
            if p.dim() != 2 or "_hc" in n or n.endswith("ape"):
                continue
            fan = C.moe_intermediate_size if n.endswith("down_w") else p.shape[-1]
            nn.init.normal_(p, std=0.2 if "embed" in n else 0.02 if "lm_head" in n else fan ** -0.5 * 0.7)
            if n.endswith(("o_proj", "down_proj", "down_w")):
                p.data.div_(math.sqrt(2 * C.num_hidden_layers))

    def hidden(self, ids, sparse=False, want_kl=False):
        """ids [B,T] -> final normed rows [B*T,d] and the indexers' losses."""
        B, T = ids.shape
        x = F.embedding(ids.reshape(-1), self.embed_tokens).to(ROW)
        s, kls = x.unsqueeze(1).expand(-1, C.hc_mult, -1).contiguous(), []
        for l in self.layers:
            s, kl = l(s, B, T, sparse, want_kl, self.kda)
            if kl is not None:
                kls.append(kl)
        return norm(s.float().mean(1), self.norm), kls

    def draft(self, ids, h, depth, sparse=False, want_kl=False):
        """One depth further: rows [B*T,d] of depth-1 (or the trunk's) -> rows of this depth."""
        emb = F.embedding(torch.roll(ids, -depth, 1).reshape(-1), self.embed_tokens).to(ROW)
        return self.mtp(emb, h, *ids.shape, sparse, want_kl)

    def losses(self, ids, sparse, want_kl=True):
        """-> trunk loss, [(hard, soft)] of the drafts, indexer losses."""
        B, T = ids.shape
        h, kls = self.hidden(ids, sparse, want_kl)

        def target(j):
            t = torch.roll(ids, -j, 1)
            t[:, T - j:] = -100
            return t.reshape(-1)
        main, z = head_loss(h, self.lm_head, target(1))
        z = z.detach().view(B, T, -1)
        drafts, load = [], 0
        for j in range(1, MTP_DEPTH + 1):
            h, kl, n = self.draft(ids, h, j, sparse, want_kl and j == 1)
            load = load + n.detach()
            if kl is not None:
                kls.append(kl)
            drafts.append(draft_loss(h, self.lm_head, torch.roll(z, -j, 1).view(B * T, -1), target(j + 1)))
        self.mtp.mlp.load = load
        return main, drafts, kls


# ---------------------------------------------------------------- the recurrence
def kda_reference(q, k, v, f, beta, A_log, dt_bias):
    """Token by token, for checks: [B,T,H,D] -> [B,T,H,D]."""
    B, T, H, D = q.shape
    q, k, v = (t.float() for t in (q, k, v))
    q = q * torch.rsqrt(q.square().sum(-1, keepdim=True) + 1e-6) * D ** -0.5
    k = k * torch.rsqrt(k.square().sum(-1, keepdim=True) + 1e-6)
    g = C.linear_lower_bound * torch.sigmoid(A_log.exp().view(1, 1, H, 1) * (f.float() + dt_bias.view(H, D)))
    S, out = torch.zeros(B, H, D, D, device=q.device), []
    for t in range(T):
        S = S * g[:, t].exp().unsqueeze(-1)
        u = beta[:, t].float().unsqueeze(-1) * (v[:, t] - (S * k[:, t].unsqueeze(-1)).sum(-2))
        S = S + k[:, t].unsqueeze(-1) * u.unsqueeze(-2)
        out.append((S * q[:, t].unsqueeze(-1)).sum(-2))
    return torch.stack(out, 1).to(ROW)


def kda_stand_in(q, k, v, f, beta, A_log, dt_bias):
    """Uses every input; serves to compile everything else while the kernels are being tuned."""
    H, D = q.shape[2:]
    return (v * beta.unsqueeze(-1) + q * k + f * A_log.view(1, 1, H, 1) + dt_bias.view(H, D)).to(ROW)


def kda_chunked(shapes):
    """flash-linear-attention's kernel in its fastest form that agrees with the reference here, values and gradients.
    Each form first runs at the given (B, T), so that it is tuned for them."""
    from fla.ops.kda import chunk_kda

    def fused(keep):
        def f(q, k, v, g, beta, A_log, dt_bias):
            return chunk_kda(q, k, v, g.contiguous(), beta.contiguous(), A_log=A_log, dt_bias=dt_bias, use_qk_l2norm_in_kernel=True,
                             use_gate_in_kernel=True, safe_gate=True, lower_bound=C.linear_lower_bound, disable_recompute=keep)[0]
        return f

    def plain(q, k, v, g, beta, A_log, dt_bias):
        H, D = q.shape[2:]
        g = C.linear_lower_bound * torch.sigmoid(A_log.exp().view(1, 1, H, 1) * (g.float() + dt_bias.view(H, D)))
        return chunk_kda(q, k, v, g.contiguous(), beta.contiguous(), use_qk_l2norm_in_kernel=True)[0]

    B, T, H, D = 2, 192, C.linear_num_heads, C.linear_head_dim
    gen = torch.Generator(device="cuda").manual_seed(3)
    rn = lambda *s: torch.randn(*s, device="cuda", generator=gen)
    base = [rn(B, T, H, D).to(ROW) for _ in range(3)] + [(rn(B, T, H, D) * 2 - 2).to(ROW), torch.sigmoid(rn(B, T, H)),
            torch.rand(H, device="cuda", generator=gen), rn(H * D) * 0.5 - 3]
    do = rn(B, T, H, D).to(ROW)

    def run(f):
        a = [t.clone().requires_grad_() for t in base]
        o = f(*a)
        o.backward(do)
        return [o.detach()] + [t.grad for t in a]
    want = run(kda_reference)
    for name, f in (("fused gate, kept", fused(True)), ("fused gate", fused(False)), ("plain", plain)):
        try:
            for b, t in shapes:
                x = [rn(b, t, H, D).to(ROW) for _ in range(3)] + [(rn(b, t, H, D) - 2).to(ROW), torch.sigmoid(rn(b, t, H)), torch.zeros(H, device="cuda"), rn(H * D)]
                x = [y.requires_grad_() for y in x]
                f(*x).float().square().mean().backward()
            err = [((g.float() - w.float()).norm() / w.float().norm()).item() for g, w in zip(run(f), want)]
            print(f"kda {name}: relative errors o q k v f beta A dt {[round(e, 4) for e in err]}", flush=True)
            if all(e < 0.03 for e in err[:6]) and all(e < 0.1 for e in err[6:]):
                return f
        except Exception as e:                      # noqa: BLE001  the next form may work
            print(f"kda {name}: {type(e).__name__} {str(e)[:300]}", flush=True)
    raise RuntimeError("no KDA kernel agrees with the reference")
