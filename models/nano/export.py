"""Weights of model.Nano -> a checkpoint in the hub's glm5_next layout: BF16 matrices, FP32 vectors, shards below 15 MB."""
import json, os


def text_config(C):
    L = C.num_hidden_layers
    return dict(
        architectures=["Glm5NextForCausalLM"], model_type="glm5_next", vocab_size=C.vocab_size, hidden_size=C.hidden_size,
        intermediate_size=C.intermediate_size, moe_intermediate_size=C.moe_intermediate_size, num_hidden_layers=L,
        num_attention_heads=C.num_attention_heads, num_key_value_heads=C.num_attention_heads, n_shared_experts=C.n_shared_experts,
        n_routed_experts=C.n_routed_experts, routed_scaling_factor=C.routed_scaling_factor, kv_lora_rank=C.kv_lora_rank,
        q_lora_rank=C.q_lora_rank, qk_rope_head_dim=0, v_head_dim=C.v_head_dim, qk_nope_head_dim=C.qk_nope_head_dim,
        num_experts_per_tok=C.num_experts_per_tok, norm_topk_prob=True, n_group=1, topk_group=1, index_topk=512,
        index_head_dim=C.index_head_dim, index_n_heads=C.index_n_heads, index_kpool=C.index_kpool, index_kpool_always_select_tail=True,
        linear_head_dim=C.linear_head_dim, linear_num_heads=C.linear_num_heads, linear_conv_kernel_dim=C.linear_conv_kernel_dim,
        linear_lower_bound=C.linear_lower_bound,
        layer_types=["deepseek_sparse_attention" if i % 4 == 3 else "linear_attention" for i in range(L)], indexer_types=["full"] * L,
        mlp_layer_types=["dense" if i < C.first_k_dense else "sparse" for i in range(L)], hc_mult=C.hc_mult, hc_sinkhorn_iters=C.hc_sinkhorn_iters,
        hc_eps=C.hc_eps, swiglu_limit=C.swiglu_limit, rms_norm_eps=C.rms_norm_eps, hidden_act="silu", tie_word_embeddings=False,
        max_position_embeddings=32768, pad_token_id=0, bos_token_id=None, eos_token_id=[0, 5], num_nextn_predict_layers=1, dtype="bfloat16")


def tensors(net, torch):
    """The hub's names and values. The mixing matrices keep FP32 but hold BF16 values, so that they can be stored in either."""
    import model as M
    C, body, out = M.C, "model.language_model.", {}
    E, f, d = C.n_routed_experts, C.moe_intermediate_size, C.hidden_size
    half = lambda t: t.detach().float().cpu().bfloat16()
    for n, t in net.state_dict().items():
        n = n.replace("attn_hc.", "hc_attn_").replace("ffn_hc.", "hc_ffn_")
        n = n.replace("k_norm_weight", "k_norm.weight").replace("k_norm_bias", "k_norm.bias")
        if n.startswith("mtp."):
            n = f"layers.{C.num_hidden_layers}." + n[4:]
            if n.endswith(f"layers.{C.num_hidden_layers}.norm"):
                n = n[:-4] + "shared_head.norm"
        at = n if n.startswith("lm_head") else body + n
        t = t.detach().float().cpu()
        if n.endswith(("gate_w", "up_w", "down_w")):
            kind = n.rsplit(".", 1)[1][:-2] + "_proj"
            t = t.view(E, f, d)
            for e in range(E):
                m = t[e].t() if kind == "down_proj" else t[e]
                out[f"{at.rsplit('.', 1)[0]}.experts.{e}.{kind}.weight"] = half(m.contiguous())
        elif n.endswith("conv1d"):
            for x, part in zip("qkv", t.chunk(3, 0)):
                out[at.replace("conv1d", x + "_conv1d.weight")] = part.contiguous()
        elif n.endswith("e_score_correction_bias"):
            out[at.replace("mlp.e_score", "mlp.gate.e_score")] = t
        elif "hc_attn_" in n or "hc_ffn_" in n:
            out[at] = t.bfloat16().float() if n.endswith("fn") else t
        elif n.endswith(("A_log", "dt_bias")):
            out[at] = t
        elif n.endswith(("compress_ape", "compress_gate")):
            out[at] = half(t)
        elif ".k_norm." in n:
            out[at] = t
        else:
            out[at + ".weight"] = half(t) if t.dim() == 2 else t
    return {k: v.contiguous() for k, v in out.items()}


def write(net, folder, torch, shard=15_000_000):
    """Writes into a new folder and swaps it in, so that what has the name is always whole."""
    from safetensors.torch import save_file
    import model as M, shutil
    tmp = folder + ".tmp"
    shutil.rmtree(tmp, ignore_errors=True); os.makedirs(tmp)
    w, shards, size = tensors(net, torch), [{}], 0
    for k in sorted(w):
        b = w[k].numel() * w[k].element_size()
        if size + b > shard:
            shards.append({}); size = 0
        shards[-1][k] = w[k]; size += b
    names = {}
    for i, s in enumerate(shards):
        fn = f"model-{i + 1:05d}-of-{len(shards):05d}.safetensors"
        save_file(s, f"{tmp}/{fn}", metadata={"format": "pt"}); names |= {k: fn for k in s}
    total = sum(v.numel() * v.element_size() for v in w.values())
    json.dump({"metadata": {"total_size": total}, "weight_map": names}, open(tmp + "/model.safetensors.index.json", "w"), indent=1)
    json.dump(text_config(M.C), open(tmp + "/config.json", "w"), indent=2)
    shutil.rmtree(folder, ignore_errors=True); os.rename(tmp, folder)


def check(net, folder, torch):
    """Reads a written checkpoint back: every tensor there, equal to the model's."""
    from safetensors.torch import load_file
    want, got = tensors(net, torch), {}
    for fn in sorted(set(json.load(open(folder + "/model.safetensors.index.json"))["weight_map"].values())):
        got |= load_file(f"{folder}/{fn}")
    assert set(got) == set(want), sorted(set(got) ^ set(want))[:5]
    assert all(torch.equal(got[k], want[k]) for k in want)
    return f"{len(got)} tensors, {sum(v.numel() for v in got.values()) / 1e6:.2f}M values"
