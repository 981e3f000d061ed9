// The operations of the graph: one stores a layer's keys and values, the next attends.
#include "llama-kvcache.h"

#include "llama-impl.h"
#include "llama-model.h"

#include <cmath>

// ggml has no way to report that an operation failed; all that can fail was done before the graph
static void check(kvc_status status) {
    if (status) {
        GGML_ABORT("kvcache: %s", kvc_last_error());
    }
}

void llama_kvcache::store(const llama_kvcache_op &op, const ggml_tensor *k, const ggml_tensor *v, int ith,
                          int nth) const {
    const int64_t first = (int64_t)n_cur * ith / nth;
    const int64_t end = (int64_t)n_cur * (ith + 1) / nth;

    if (first == end) {
        return;
    }

    kvc_put_args args = {};

    args.struct_size = sizeof(args);
    args.first = n_done + (int32_t)first;
    args.num_tokens = (int32_t)(end - first);
    args.k = (const char *)k->data + first * k->nb[2];
    args.k_head_stride = k->nb[1];
    args.k_token_stride = k->nb[2];
    args.k_type = llama_kvcache_type(k->type);

    if (v) {
        args.v = (const char *)v->data + first * v->nb[2];
        args.v_head_stride = v->nb[1];
        args.v_token_stride = v->nb[2];
        args.v_type = llama_kvcache_type(v->type);
    }

    check(kvc_put(batch, op.layer, &args));
}

void llama_kvcache::attend(llama_kvcache_op &op, ggml_tensor *dst) const {
    const ggml_tensor *q = dst->src[0];

    kvc_attend_args args = {};

    args.struct_size = sizeof(args);
    args.q_head_stride = q->nb[1];
    args.q_token_stride = q->nb[2];
    args.q_type = llama_kvcache_type(q->type);
    args.out_head_stride = dst->nb[1];
    args.out_token_stride = dst->nb[2];
    args.scale = op.scale;
    args.softcap = op.softcap;
    args.sinks = op.has_sinks ? (const float *)dst->src[1]->data : nullptr;
    args.alibi = op.slopes.empty() ? nullptr : op.slopes.data();

    // threads take tasks as they come, so that one that lost its core holds up one task only
    const auto take = [&] { return op.next_task.fetch_add(1, std::memory_order_relaxed); };

    int64_t task = take();
    int64_t n_before = 0; // tasks of the parts before this one

    for (const auto &part : plans[op.shape]) {
        const int64_t end = n_before + kvc_plan_num_tasks(part.plan);

        args.q = (const char *)q->data + part.first * q->nb[2];
        args.out = (char *)dst->data + part.first * dst->nb[2];

        for (; task < end; task = take()) {
            check(kvc_plan_run(part.plan, op.layer, &args, task - n_before));
        }

        n_before = end;
    }
}

static void compute_store(ggml_tensor *dst, int ith, int nth, void *userdata) {
    const auto &op = *static_cast<const llama_kvcache_op *>(userdata);

    op.mem->store(op, dst->src[0], dst->src[1], ith, nth);
}

static void compute_attend(ggml_tensor *dst, int /*ith*/, int /*nth*/, void *userdata) {
    auto &op = *static_cast<llama_kvcache_op *>(userdata);

    op.mem->attend(op, dst);
}

// rows are read element by element
static ggml_tensor *with_dense_rows(ggml_context *ctx, ggml_tensor *cur) {
    return cur->nb[0] == ggml_type_size(cur->type) ? cur : ggml_cont(ctx, cur);
}

// the slopes of ALiBi as ggml_soft_max_ext has them (Press et al. 2022)
static std::vector<float> alibi_slopes(const llama_hparams &hparams, uint32_t n_head) {
    std::vector<float> res;

    if (!hparams.use_alibi) {
        return res;
    }

    const float bias = hparams.f_max_alibi_bias;
    const uint32_t n_head_log2 = 1u << (uint32_t)std::floor(std::log2((float)n_head));

    for (uint32_t h = 0; h < n_head; ++h) {
        const float exponent = h < n_head_log2 ? (h + 1.0f) / n_head_log2 : (h - n_head_log2 + 0.5f) / n_head_log2;

        res.push_back(bias > 0.0f ? std::pow(2.0f, -bias * exponent) : 1.0f);
    }

    return res;
}

ggml_tensor *llama_kvcache::build_attn(const llm_graph_context &graph, ggml_tensor *wo, ggml_tensor *wo_b,
                                       ggml_tensor *wo_s, ggml_tensor *q, ggml_tensor *k, ggml_tensor *v,
                                       ggml_tensor *sinks, ggml_tensor *v_mla, float kq_scale, int il) const {
    auto *ctx = graph.ctx0;
    auto &op = *ops[il];

    const auto &hparams = model.hparams;
    const auto &layer = layers.model[op.layer];
    const auto &shape = layers.cache[op.layer];

    const bool is_grok = model.arch == LLM_ARCH_GROK; // its graph leaves scale and cap to build_attn_mha

    op.scale = is_grok ? hparams.f_attn_out_scale : kq_scale;
    op.softcap = is_grok || hparams.attn_soft_cap ? hparams.f_attn_logit_softcapping : 0.0f;
    op.slopes = alibi_slopes(hparams, layer.n_head);
    op.has_sinks = sinks != nullptr;

    q = with_dense_rows(ctx, q);

    ggml_tensor *args[3] = {q};
    int n_args = 1;

    if (sinks) {
        args[n_args++] = sinks;
    }

    ggml_build_forward_expand(graph.gf, q);

    if (k) {
        ggml_tensor *rows[2] = {
            with_dense_rows(ctx, k),
            with_dense_rows(ctx, v),
        };

        const int n_tasks = graph.n_tokens < 32 ? 1 : GGML_N_TASKS_MAX;

        auto *stored = ggml_custom_4d(ctx, GGML_TYPE_I32, 1, 1, 1, 1, rows, shape.value_in_key ? 1 : 2, compute_store,
                                      n_tasks, &op);
        graph.cb(stored, "kvcache_store", il);

        // the barrier after this node is what attention waits for
        ggml_build_forward_expand(graph.gf, stored);
        args[n_args++] = stored;
    }

    auto *cur = ggml_custom_4d(ctx, GGML_TYPE_F32, shape.v_dim, layer.n_head, graph.n_tokens, 1, args, n_args,
                               compute_attend, GGML_N_TASKS_MAX, &op);
    graph.cb(cur, "kvcache_attend", il);

    if (v_mla) {
        cur = ggml_permute(ctx, cur, 0, 2, 1, 3);
        cur = ggml_mul_mat(ctx, v_mla, cur);
        cur = ggml_permute(ctx, cur, 0, 2, 1, 3);
        cur = ggml_cont(ctx, cur);
    }

    cur = ggml_reshape_2d(ctx, cur, cur->ne[0] * cur->ne[1], cur->ne[2]);

    ggml_build_forward_expand(graph.gf, cur);
    graph.cb(cur, "kqv_out", il);

    if (wo) {
        cur = graph.build_lora_mm(wo, cur, wo_s);
    }
    if (wo_b) {
        cur = ggml_add(ctx, cur, wo_b);
    }

    return cur;
}
