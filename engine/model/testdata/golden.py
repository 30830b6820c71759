"""Tiny random checkpoints in the hub's own layout with reference outputs from transformers (fp32, CPU).

    golden.py OUT    # writes OUT/<name>/{config.json, model.safetensors, reference.safetensors} for every job below

The record of how the fixtures beside this file were made (transformers 5.17.0, torch on a CPU; the version is in each
reference's metadata). Weights are drawn by seed, wide enough that norms, gates, routers and the sparse selection all
matter; matrices are rounded to BF16 before the reference is computed, so loading them loses nothing. top-k is made
stable (score descending, then lower index), because torch leaves ties open. To keep the folder below 8 MiB the outputs
for qwen3.5-moe and glm-moe-dsa are not committed; they come out of the same script.
"""
import json, math, os, sys, glob, traceback
os.environ["CUDA_VISIBLE_DEVICES"] = ""
sys.modules["fla"] = None        # take transformers' own PyTorch paths: they run on a CPU, in fp32
import torch, transformers
from safetensors.torch import save_file, load_file
from transformers import AutoModelForCausalLM
import transformers as T
torch.set_num_threads(4)

def _stable_topk(x, k, dim=-1, largest=True, sorted=True):   # torch.topk leaves ties open; ours: higher score, then lower index
    v, i = torch.sort(x + 0.0, dim=dim, descending=largest, stable=True)
    return torch.return_types.topk((v.narrow(dim, 0, k), i.narrow(dim, 0, k)))
torch.topk = _stable_topk
torch.Tensor.topk = _stable_topk
KEEP32 = ("A_log", "dt_bias", "conv1d", "e_score_correction_bias", "_hc.", "hc_")

def randomize(model, seed):
    g = torch.Generator().manual_seed(seed)
    rn = lambda p: torch.randn(p.shape, generator=g)
    sd = dict(model.named_parameters()) | {n: b for n, b in model.named_buffers() if "e_score" in n}
    for n, p in sd.items():
        if "A_log" in n: v = torch.log(torch.rand(p.shape, generator=g) * 3 + 0.3)
        elif "dt_bias" in n: v = rn(p) - 2.0
        elif "e_score" in n: v = rn(p) * 0.1
        elif "_hc.base" in n: v = rn(p) * 0.7
        elif "_hc.scale" in n: v = 0.5 + 0.3 * rn(p)
        elif "_hc.fn" in n: v = rn(p) * p.shape[-1] ** -0.5
        elif p.dim() == 1: v = p.data + 0.2 * rn(p)
        elif "conv1d" in n: v = rn(p) * 0.5
        elif "embed_tokens" in n: v = rn(p)
        elif "compress_ape" in n: v = rn(p)
        else: v = rn(p) * p.shape[-1] ** -0.5 * 1.3
        p.data.copy_(v if any(k in n for k in KEEP32) or p.dim() == 1 else v.bfloat16().float())

def finish(name, model, out, seed, steps=24, seq=96, vocab=384):
    d = os.path.join(out, name); os.makedirs(d, exist_ok=True)
    model.eval(); randomize(model, seed)
    g = torch.Generator().manual_seed(seed + 1)
    ids = torch.randint(3, vocab, (1, seq), generator=g)
    with torch.no_grad():
        o = model(input_ids=ids, output_hidden_states=True, use_cache=False)
        gen = model.generate(input_ids=ids, max_new_tokens=steps, do_sample=False, use_cache=True, eos_token_id=None, pad_token_id=0)
    model.save_pretrained(d)
    for f in glob.glob(d + "/*.safetensors"):
        sd = load_file(f)
        sd = {k: (v.bfloat16() if v.dim() >= 2 and not any(s in k for s in KEEP32) else v).contiguous() for k, v in sd.items() if "visual" not in k}
        save_file(sd, f, metadata={"format": "pt"})
    ref = {"input_ids": ids[0].to(torch.int32), "logits": o.logits[0].float().contiguous(), "greedy": gen[0, seq:].to(torch.int32)}
    hs = o.hidden_states or []
    for i, h in enumerate(hs):
        if i not in (0, 1, len(hs) - 2, len(hs) - 1): continue      # enough to bisect, small enough to commit
        ref[f"hidden.{i}"] = h[0].float().reshape(seq, -1).contiguous()
    save_file(ref, d + "/reference.safetensors", metadata={"transformers": transformers.__version__, "dtype": "float32"})
    for f in ("generation_config.json",):
        if os.path.exists(f"{d}/{f}"): os.remove(f"{d}/{f}")
    print(name, "ok logits std %.3f" % o.logits.std(), "top1 margin %.4f" % (o.logits.topk(2).values.diff().abs().min()),
          "hidden", len(o.hidden_states or []), sorted(os.listdir(d)), flush=True)

def kimi(seed, **kw):
    c = dict(vocab_size=384, hidden_size=64, intermediate_size=96, moe_intermediate_size=48, num_hidden_layers=5,
             num_attention_heads=4, num_key_value_heads=4, kv_lora_rank=48, q_lora_rank=None, qk_rope_head_dim=16, qk_nope_head_dim=32,
             v_head_dim=32, num_experts=8, num_experts_per_token=2, num_shared_experts=1, routed_scaling_factor=2.446,
             num_expert_group=1, topk_group=1, moe_renormalize=True, pad_token_id=0, bos_token_id=1, eos_token_id=2,
             linear_attn_config=dict(full_attn_layers=[4], kda_layers=[1, 2, 3, 5], head_dim=32, num_heads=4, short_conv_kernel_size=4), first_k_dense_replace=1)
    c.update(kw)
    return T.KimiLinearForCausalLM(T.KimiLinearConfig(**c))

def glm5(seed, **kw):
    t = dict(vocab_size=384, hidden_size=64, intermediate_size=96, moe_intermediate_size=48, num_hidden_layers=6,
             num_attention_heads=4, num_key_value_heads=4, n_shared_experts=1, n_routed_experts=8, routed_scaling_factor=2.5,
             kv_lora_rank=48, q_lora_rank=64, qk_rope_head_dim=0, v_head_dim=32, qk_nope_head_dim=32, n_group=1, topk_group=1,
             num_experts_per_tok=2, index_topk=16, index_head_dim=32, index_n_heads=4, index_kpool=4, linear_head_dim=32, linear_num_heads=4,
             layer_types=["linear_attention", "linear_attention", "linear_attention", "deepseek_sparse_attention", "linear_attention", "deepseek_sparse_attention"],
             indexer_types=["full"] * 6, mlp_layer_types=["dense", "sparse", "sparse", "sparse", "sparse", "sparse"],
             hc_mult=4, pad_token_id=0, bos_token_id=1, eos_token_id=2)
    t.update(kw)
    v = dict(depth=1, hidden_size=32, num_heads=2, image_size=28, patch_size=14, out_hidden_size=64, intermediate_size=32, projection_intermediate_size=32)
    cfg = T.Glm5NextConfig(text_config=t, vision_config=v, image_token_id=0, video_token_id=0, image_start_token_id=0, image_end_token_id=0, video_start_token_id=0, video_end_token_id=0)
    return T.Glm5NextForConditionalGeneration(cfg)

def q3n(seed, **kw):
    c = dict(vocab_size=384, hidden_size=64, intermediate_size=96, num_hidden_layers=4, num_attention_heads=4, num_key_value_heads=2, head_dim=32,
             linear_key_head_dim=32, linear_value_head_dim=32, linear_num_key_heads=2, linear_num_value_heads=4, moe_intermediate_size=48,
             shared_expert_intermediate_size=48, num_experts=8, num_experts_per_tok=2, pad_token_id=0, bos_token_id=1, eos_token_id=2)
    c.update(kw); return T.Qwen3NextForCausalLM(T.Qwen3NextConfig(**c))

def q35(seed, **kw):
    from transformers.models.qwen3_5.configuration_qwen3_5 import Qwen3_5TextConfig
    from transformers.models.qwen3_5.modeling_qwen3_5 import Qwen3_5ForCausalLM
    c = dict(vocab_size=384, hidden_size=64, intermediate_size=96, num_hidden_layers=4, num_attention_heads=4, num_key_value_heads=2, head_dim=32,
             linear_key_head_dim=32, linear_value_head_dim=32, linear_num_key_heads=2, linear_num_value_heads=4, pad_token_id=0, bos_token_id=1, eos_token_id=2)
    c.update(kw); return Qwen3_5ForCausalLM(Qwen3_5TextConfig(**c))

def q35m(seed, **kw):
    from transformers.models.qwen3_5_moe.configuration_qwen3_5_moe import Qwen3_5MoeTextConfig
    from transformers.models.qwen3_5_moe.modeling_qwen3_5_moe import Qwen3_5MoeForCausalLM
    c = dict(vocab_size=384, hidden_size=64, num_hidden_layers=4, num_attention_heads=4, num_key_value_heads=2, head_dim=32, moe_intermediate_size=48,
             shared_expert_intermediate_size=48, num_experts=8, num_experts_per_tok=2,
             linear_key_head_dim=32, linear_value_head_dim=32, linear_num_key_heads=2, linear_num_value_heads=4, pad_token_id=0, bos_token_id=1, eos_token_id=2)
    c.update(kw); return Qwen3_5MoeForCausalLM(Qwen3_5MoeTextConfig(**c))

def dsa(seed, **kw):
    c = dict(vocab_size=384, hidden_size=64, intermediate_size=96, moe_intermediate_size=48, num_hidden_layers=4, num_attention_heads=4, num_key_value_heads=4,
             n_shared_experts=1, n_routed_experts=8, kv_lora_rank=48, q_lora_rank=64, qk_rope_head_dim=16, v_head_dim=32, qk_nope_head_dim=32,
             num_experts_per_tok=2, index_topk=24, index_head_dim=32, index_n_heads=4, first_k_dense_replace=1, indexer_types=["full"] * 4, pad_token_id=0, bos_token_id=1, eos_token_id=2)
    c.update(kw); return T.GlmMoeDsaForCausalLM(T.GlmMoeDsaConfig(**c))

def run(out, jobs):
    for name, fn, seed, kw in jobs:
        try: finish(name, fn(seed, **kw), out, seed)
        except Exception: print(name, "FAIL", traceback.format_exc()[-1500:], flush=True)

if __name__ == "__main__":
    run(sys.argv[1], [
        ("kimi-linear", kimi, 11, {}), ("glm5-next", glm5, 12, {}),
        ("glm5-next-shared", glm5, 17, dict(index_kpool=8, index_topk=32, swiglu_limit=1.0, n_group=2, topk_group=1, n_shared_experts=2, hc_mult=2,
            layer_types=["linear_attention", "linear_attention", "deepseek_sparse_attention", "deepseek_sparse_attention", "linear_attention", "deepseek_sparse_attention"],
            indexer_types=["full", "full", "full", "shared", "full", "full"])), ("qwen3-next", q3n, 13, {}), ("qwen3.5", q35, 14, {}),
        ("qwen3.5-moe", q35m, 15, {}), ("glm-moe-dsa", dsa, 16, {})])
