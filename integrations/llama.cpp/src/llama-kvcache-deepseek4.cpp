// DeepSeek V4: a token attends to its window, and, in most layers, to rows that stand for several tokens each, in one
// softmax.  Such a row is a sum over the tokens of a block, with a weight for each element, by the softmax of gates.
// Rows of 4 tokens also sum over the block before, and tokens choose them by an indexer, whose keys are made likewise.
#include "llama-kvcache.h"

#include "llama-impl.h"
#include "llama-model.h"

#include <cmath>

// rotates the last elements of rows
static ggml_tensor *rotate(const llm_graph_context &graph, ggml_tensor *cur, ggml_tensor *pos) {
    const auto &hparams = graph.hparams;
    const float attn_factor = graph.ext_factor == 0.0f ? 1.0f : 1.0f / (1.0f + 0.1f * logf(1.0f / graph.freq_scale));

    cur = ggml_rope_ext(graph.ctx0, cur, pos, nullptr, hparams.n_rot(), graph.rope_type, graph.n_ctx_orig,
                        hparams.dsv4_compress_rope_base, graph.freq_scale, graph.ext_factor, attn_factor,
                        graph.beta_fast, graph.beta_slow);

    return ggml_rope_set_offset(cur, (int)(cur->ne[0] - hparams.n_rot()));
}

// Stores what rows that stand for several tokens are pooled of, and returns those that the ubatch completes.
ggml_tensor *llama_kvcache::build_compressed(const llm_graph_context &graph, int32_t inputs, const compressor &weights,
                                             ggml_tensor *cur, int il) const {
    ggml_tensor *pos = nullptr;
    ggml_tensor *rows = build_pool_of(graph, inputs, graph.build_lora_mm(weights.kv, cur),
                                      graph.build_lora_mm(weights.gate, cur), weights.bias, &pos, il);

    return rotate(graph, graph.build_norm(rows, weights.norm, nullptr, LLM_NORM_RMS, il), pos);
}

ggml_tensor *llama_kvcache::build_choose_dsv4(const llm_graph_context &graph, ggml_tensor *qr, ggml_tensor *cur,
                                              ggml_tensor *pos, int il) const {
    const auto &layer = model.layers[il];
    const compressor weights = {layer.indexer_comp_wkv, layer.indexer_comp_wgate, layer.indexer_comp_ape,
                                layer.indexer_comp_norm};

    ggml_tensor *k = build_compressed(graph, layers.inputs[il], weights, cur, il);
    ggml_tensor *q = graph.build_lora_mm(layer.indexer_attn_q_b, qr);

    q = ggml_reshape_3d(graph.ctx0, q, k->ne[0], graph.hparams.indexer_n_head, graph.n_tokens);

    return build_choose(graph, rotate(graph, q, pos), k, graph.build_lora_mm(layer.indexer_proj, cur), il);
}

ggml_tensor *llama_kvcache::build_attn_dsv4(const llm_graph_context &graph, ggml_tensor *q, ggml_tensor *kv,
                                            ggml_tensor *qr, ggml_tensor *cur, ggml_tensor *pos, int il) const {
    const auto &layer = model.layers[il];
    const int32_t compressed = layers.compressed[il];
    auto &op = *ops[layers.attention[il]];

    op.scale = 1.0f / std::sqrt((float)q->ne[0]);
    op.has_lse = compressed >= 0;
    ggml_build_forward_expand(graph.gf, q);

    ggml_tensor *of_window =
        build_attend(graph, op, q, layer.attn_sinks, nullptr, nullptr, build_store(graph, op, kv, nullptr, il));
    if (compressed < 0) {
        return of_window;
    }

    const bool is_sparse = layers.model[compressed].is_sparse;
    const compressor weights = {layer.attn_comp_wkv, layer.attn_comp_wgate, layer.attn_comp_ape, layer.attn_comp_norm};
    auto &joining = *ops[compressed];

    ggml_tensor *rows = build_compressed(graph, layers.compressed_inputs[il], weights, cur, il);
    ggml_tensor *stored = build_store(graph, joining, rows, nullptr, il);
    ggml_tensor *chosen = is_sparse ? build_choose_dsv4(graph, qr, cur, pos, il) : nullptr;

    joining.scale = op.scale;

    return build_attend(graph, joining, q, nullptr, chosen, of_window, stored);
}
