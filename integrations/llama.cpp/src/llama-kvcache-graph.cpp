// The operations of the graph: one stores rows of a layer, one chooses rows by an indexer, one attends.
#include "llama-kvcache.h"

#include "llama-impl.h"
#include "llama-model.h"

#include <cmath>
#include <cstring>

void llama_kvcache_check_op(kvc_status status) {
    if (status) {
        GGML_ABORT("kvcache: %s", kvc_last_error());
    }
}

void llama_kvcache::store(const llama_kvcache_op &op, const ggml_tensor *k, const ggml_tensor *v, int ith,
                          int nth) const {
    const bool is_pooled = layers.cache[op.layer].policy.stride > 1; // k has the rows of complete blocks
    const int64_t first = is_pooled ? 0 : (int64_t)n_cur * ith / nth;
    const int64_t end = is_pooled ? n_cur : (int64_t)n_cur * (ith + 1) / nth;

    if (first == end || (is_pooled && ith > 0)) {
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

    llama_kvcache_check_op(kvc_put(batch, op.layer, &args));
}

// Threads take tasks as they come, so that one that lost its core holds up one task only.
template <typename F> void llama_kvcache::run_tasks(llama_kvcache_op &op, F run) const {
    const auto take = [&] { return op.next_task.fetch_add(1, std::memory_order_relaxed); };

    int64_t task = take();
    int64_t n_before = 0; // tasks of the parts before this one

    for (const auto &part : plans[op.shape]) {
        const int64_t end = n_before + kvc_plan_num_tasks(part.plan);

        for (; task < end; task = take()) {
            llama_kvcache_check_op(run(part, task - n_before));
        }

        n_before = end;
    }
}

void llama_kvcache::attend(llama_kvcache_op &op, ggml_tensor *dst) const {
    const ggml_tensor *q = dst->src[0];

    kvc_attend_args args = {};

    args.struct_size = sizeof(args);
    args.q_head_stride = q->nb[1];
    args.q_token_stride = q->nb[2];
    args.q_type = llama_kvcache_type(q->type);
    args.out_head_stride = layers.cache[op.layer].v_dim * sizeof(float);
    args.out_token_stride = args.out_head_stride * q->ne[1];
    args.lse_head_stride = sizeof(float);
    args.lse_token_stride = args.lse_head_stride * q->ne[1];
    args.scale = op.scale;
    args.softcap = op.softcap;
    args.sinks = op.sinks < 0 ? nullptr : (const float *)dst->src[op.sinks]->data;
    args.alibi = op.slopes.empty() ? nullptr : op.slopes.data();

    // log-sum-exps lie behind what they belong to
    const size_t lse_offset = args.out_token_stride * q->ne[2];
    const auto *prior = op.prior < 0 ? nullptr : (const char *)dst->src[op.prior]->data;

    const ggml_tensor *positions = op.chosen < 0 ? nullptr : dst->src[op.chosen];

    kvc_chosen chosen = {};

    chosen.struct_size = sizeof(chosen);
    chosen.token_stride = positions ? positions->nb[2] : 0;
    chosen.choice_stride = positions ? positions->nb[1] : 0;
    chosen.num_choices = layers.choice.num_choices;
    chosen.width = layers.choice.width;
    chosen.block = layers.choice.block;
    chosen.tail = layers.choice.has_tail;

    run_tasks(op, [&](const planned &part, int64_t task) {
        args.q = (const char *)q->data + part.first * q->nb[2];
        args.out = (char *)dst->data + part.first * args.out_token_stride;
        if (op.has_lse) {
            args.lse = (float *)((char *)dst->data + lse_offset + part.first * args.lse_token_stride);
        }
        if (prior) {
            args.prior_out = prior + part.first * args.out_token_stride;
            args.prior_lse = (const float *)(prior + lse_offset + part.first * args.lse_token_stride);
        }
        args.chosen = positions && part.is_part ? &chosen : nullptr;
        if (args.chosen) {
            chosen.positions = (const int32_t *)((const char *)positions->data + part.first * positions->nb[2]);
        }

        return kvc_plan_run(part.plan, op.layer, &args, task);
    });
}

void llama_kvcache::choose(llama_kvcache_op &op, ggml_tensor *dst) const {
    const ggml_tensor *q = dst->src[0];
    const ggml_tensor *weights = op.weights < 0 ? nullptr : dst->src[op.weights];

    kvc_choose_args args = {};

    args.struct_size = sizeof(args);
    args.q_token_stride = q->nb[2];
    args.q_head_stride = q->nb[1];
    args.q_type = llama_kvcache_type(q->type);
    args.weights_token_stride = weights ? weights->nb[1] : 0;
    args.weights_head_stride = weights ? weights->nb[0] : 0;
    args.chosen_token_stride = dst->nb[2];
    args.chosen_choice_stride = dst->nb[1];
    args.scale = 1.0f / std::sqrt((float)(q->ne[0] * q->ne[1]));
    args.relu = layers.choice.relu;
    args.num_choices = layers.choice.num_choices;
    args.width = layers.choice.width;
    args.block = layers.choice.block;
    args.num_local = layers.choice.num_local;

    run_tasks(op, [&](const planned &part, int64_t task) {
        args.q = (const char *)q->data + part.first * q->nb[2];
        args.weights = weights ? (const float *)((const char *)weights->data + part.first * weights->nb[1]) : nullptr;
        args.chosen = (int32_t *)((char *)dst->data + part.first * dst->nb[2]);

        return kvc_plan_choose(part.plan, op.layer, &args, task);
    });
}

static void compute_store(ggml_tensor *dst, int ith, int nth, void *userdata) {
    const auto &op = *static_cast<const llama_kvcache_op *>(userdata);

    op.mem->store(op, dst->src[0], dst->src[1], ith, nth);
}

// multiplies the rows of each head and token
static void compute_mix(ggml_tensor *dst, const ggml_tensor *src, int ith, int nth, void * /*userdata*/) {
    const int64_t n_rows = ggml_nrows(src);

    for (int64_t i = n_rows * ith / nth; i < n_rows * (ith + 1) / nth; ++i) {
        const int64_t head = i % src->ne[1];
        const int64_t token = i / src->ne[1];
        auto *row = (float *)((char *)dst->data + head * dst->nb[1] + token * dst->nb[2]);

        std::memcpy(row, (const char *)src->data + head * src->nb[1] + token * src->nb[2], src->ne[0] * sizeof(float));
        llama_kvcache_mix(row, src->ne[0]);
    }
}

static void compute_choose(ggml_tensor *dst, int /*ith*/, int /*nth*/, void *userdata) {
    auto &op = *static_cast<llama_kvcache_op *>(userdata);

    op.mem->choose(op, dst);
}

static void compute_attend(ggml_tensor *dst, int /*ith*/, int /*nth*/, void *userdata) {
    auto &op = *static_cast<llama_kvcache_op *>(userdata);

    op.mem->attend(op, dst);
}

ggml_tensor *with_dense_rows(ggml_context *ctx, ggml_tensor *cur) {
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

// Stores rows of a layer; without v, keys alone.
ggml_tensor *llama_kvcache::build_store(const llm_graph_context &graph, llama_kvcache_op &op, ggml_tensor *k,
                                        ggml_tensor *v, int il) const {
    auto *ctx = graph.ctx0;

    ggml_tensor *rows[2] = {with_dense_rows(ctx, k), v ? with_dense_rows(ctx, v) : nullptr};

    const int n_tasks = graph.n_tokens < 32 ? 1 : GGML_N_TASKS_MAX;

    auto *stored = ggml_custom_4d(ctx, GGML_TYPE_I32, 1, 1, 1, 1, rows, v ? 2 : 1, compute_store, n_tasks, &op);
    graph.cb(stored, "kvcache_store", il);

    // the barrier after this node is what readers wait for
    ggml_build_forward_expand(graph.gf, stored);

    return stored;
}

ggml_tensor *llama_kvcache::build_choose(const llm_graph_context &graph, ggml_tensor *q, ggml_tensor *k,
                                         ggml_tensor *weights, int il) const {
    auto *ctx = graph.ctx0;
    auto &op = *ops[layers.indexer[il]];

    q = with_dense_rows(ctx, q);
    k = with_dense_rows(ctx, k);
    if (layers.choice.is_mixed) {
        q = ggml_map_custom1(ctx, q, compute_mix, GGML_N_TASKS_MAX, nullptr);
        k = ggml_map_custom1(ctx, k, compute_mix, 1, nullptr);
    }

    std::vector<ggml_tensor *> args = {q, build_store(graph, op, k, nullptr, il)};

    op.weights = weights ? (int32_t)args.size() : -1;
    if (weights) {
        args.push_back(weights);
    }

    auto *chosen = ggml_custom_4d(ctx, GGML_TYPE_I32, layers.choice.width, layers.choice.num_choices, graph.n_tokens, 1,
                                  args.data(), (int)args.size(), compute_choose, GGML_N_TASKS_MAX, &op);
    graph.cb(chosen, "kvcache_choose", il);

    return chosen;
}

// stored: null if the rows are stored elsewhere
ggml_tensor *llama_kvcache::build_attend(const llm_graph_context &graph, llama_kvcache_op &op, ggml_tensor *q,
                                         ggml_tensor *sinks, ggml_tensor *chosen, ggml_tensor *prior,
                                         ggml_tensor *stored) const {
    const auto &layer = layers.model[op.layer];
    const int64_t v_dim = layers.cache[op.layer].v_dim;

    std::vector<ggml_tensor *> args = {q};

    const auto add = [&](ggml_tensor *arg) {
        if (arg) {
            args.push_back(arg);
        }
        return arg ? (int32_t)args.size() - 1 : -1;
    };

    op.sinks = add(sinks);
    op.chosen = add(chosen);
    op.prior = add(prior);
    add(stored);

    const int64_t size[3] = {v_dim, layer.n_head, graph.n_tokens};
    const int64_t with_lse = (v_dim + 1) * layer.n_head * graph.n_tokens;

    auto *cur = ggml_custom_4d(graph.ctx0, GGML_TYPE_F32, op.has_lse ? with_lse : size[0], op.has_lse ? 1 : size[1],
                               op.has_lse ? 1 : size[2], 1, args.data(), (int)args.size(), compute_attend,
                               GGML_N_TASKS_MAX, &op);
    graph.cb(cur, "kvcache_attend", layer.il);

    return cur;
}

ggml_tensor *llama_kvcache::build_attn(const llm_graph_context &graph, ggml_tensor *wo, ggml_tensor *wo_b,
                                       ggml_tensor *wo_s, ggml_tensor *q, ggml_tensor *k, ggml_tensor *v,
                                       ggml_tensor *sinks, ggml_tensor *v_mla, ggml_tensor *chosen, float kq_scale,
                                       int il) const {
    auto *ctx = graph.ctx0;
    auto &op = *ops[layers.attention[il]];

    const auto &hparams = model.hparams;
    const auto &layer = layers.model[op.layer];
    const auto &shape = layers.cache[op.layer];

    const bool is_grok = model.arch == LLM_ARCH_GROK; // its graph leaves scale and cap to build_attn_mha

    op.scale = is_grok ? hparams.f_attn_out_scale : kq_scale;
    op.softcap = is_grok || hparams.attn_soft_cap ? hparams.f_attn_logit_softcapping : 0.0f;
    op.slopes = alibi_slopes(hparams, layer.n_head);

    q = with_dense_rows(ctx, q);
    ggml_build_forward_expand(graph.gf, q);

    auto *stored = k ? build_store(graph, op, k, shape.value_in_key ? nullptr : v, il) : nullptr;
    auto *cur = build_attend(graph, op, q, sinks, chosen, nullptr, stored);

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
