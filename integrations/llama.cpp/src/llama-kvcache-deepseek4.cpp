// DeepSeek V4: a token attends to its window, and, in most layers, to rows that stand for several tokens each, in one
// softmax.  Such a row is a sum over the tokens of a block, with a weight for each element, by the softmax of gates.
// Rows of 4 tokens also sum over the block before, and tokens choose them by an indexer, whose keys are made likewise.
#include "llama-kvcache.h"

#include "llama-impl.h"
#include "llama-model.h"

#include <algorithm>
#include <cmath>
#include <limits>

// the blocks of n tokens that an ubatch completes, at most
static int64_t most_blocks(const llama_ubatch &ubatch, int64_t n) {
    return std::max<int64_t>(1, std::min<int64_t>(ubatch.n_tokens, ubatch.n_tokens / n + ubatch.n_seqs_unq));
}

static const int32_t STRIDES[] = {4, 128};

// the positions of tokens in their blocks, and those at which complete blocks begin
class llama_kvcache_inp_dsv4 : public llm_graph_input_dsv4 {
  public:
    explicit llama_kvcache_inp_dsv4(const llm_graph_context &graph)
        : llm_graph_input_dsv4(graph.cparams, nullptr, nullptr) {
        for (const int32_t n : STRIDES) {
            auto &inp = of_stride(n);

            inp.state_pos = ggml_new_tensor_1d(graph.ctx0, GGML_TYPE_I32, graph.n_tokens);
            inp.state_write_pos = ggml_new_tensor_1d(graph.ctx0, GGML_TYPE_I32, most_blocks(graph.ubatch, n));
            ggml_set_input(inp.state_pos);
            ggml_set_input(inp.state_write_pos);
        }
    }

    void set_input(const llama_ubatch *ubatch) override {
        for (const int32_t n : STRIDES) {
            auto &inp = of_stride(n);

            std::vector<int32_t> in_block(ubatch->n_tokens);
            std::vector<int32_t> begins;

            for (uint32_t i = 0; i < ubatch->n_tokens; ++i) {
                in_block[i] = ubatch->pos[i] % n;
                if (in_block[i] == n - 1) {
                    begins.push_back(ubatch->pos[i] + 1 - n);
                }
            }
            begins.resize(inp.state_write_pos->ne[0]);

            set(inp.state_pos, in_block);
            set(inp.state_write_pos, begins);
        }
    }

    bool can_reuse(const llm_graph_params &params) override {
        return std::all_of(std::begin(STRIDES), std::end(STRIDES), [&](int32_t n) {
            const auto &inp = of_stride(n);

            return inp.state_pos->ne[0] == params.ubatch.n_tokens &&
                   inp.state_write_pos->ne[0] == most_blocks(params.ubatch, n);
        });
    }

  private:
    comp_input &of_stride(int32_t n) { return n == STRIDES[0] ? inp_csa : inp_hca; }

    static void set(ggml_tensor *tensor, const std::vector<int32_t> &values) {
        if (tensor->buffer) { // no layer has the stride otherwise
            ggml_backend_tensor_set(tensor, values.data(), 0, values.size() * sizeof(int32_t));
        }
    }
};

llm_graph_input_i *llama_kvcache::new_inp_dsv4(const llm_graph_context &graph) const {
    return new llama_kvcache_inp_dsv4(graph);
}

std::vector<llama_kvcache::last_token> llama_kvcache::last_tokens(int32_t n) const {
    std::vector<last_token> res;

    const int32_t *positions = kvc_batch_positions(batch) + n_done;

    for (int32_t i = 0; i < n_cur; ++i) {
        if ((positions[i] + 1) % n == 0) {
            res.push_back({cur_ids[i], positions[i]});
        }
    }

    return res;
}

// sums elements [first, end) over the tokens of a block
void llama_kvcache::sum_inputs(const std::vector<pool_input> &inputs, float *row, int64_t first, int64_t end) {
    for (int64_t d = first; d < end; ++d) {
        float most = -std::numeric_limits<float>::infinity();
        for (const auto &input : inputs) {
            most = std::max(most, input.gates[d]);
        }

        float sum = 0.0f;
        float weight = 0.0f;
        for (const auto &input : inputs) {
            const float w = std::exp(input.gates[d] - most);

            sum += w * input.elements[d];
            weight += w;
        }

        row[d] = sum / weight;
    }
}

// Lists the rows before the ubatch, where it completes a block: ggml could not report that this failed.
kvc_status llama_kvcache::find_spans(int32_t layer, sequence_inputs &of) {
    const int32_t stride = model.hparams.dsv4_compress_ratios[layers.model[layer].il];
    auto &spans = of.spans[layer];

    if ((of.first + (int32_t)of.tokens.size()) / stride == of.first / stride) {
        return KVC_OK;
    }

    spans.resize(16);
    while (true) {
        const auto n_most = (int64_t)spans.size();
        int64_t n = 0;

        if (const kvc_status status =
                kvc_batch_spans(batch, of.id, layer, spans.data(), sizeof(spans[0]), n_most, &n, nullptr)) {
            return status;
        }
        spans.resize(n);
        if (n <= n_most) {
            return KVC_OK;
        }
    }
}

// Adds what tokens at positions [first, end) of a sequence add to a row.
void llama_kvcache::add_inputs(const llama_kvcache_op &op, const ggml_tensor *dst, const sequence_inputs &of,
                               int32_t first, int32_t end, int64_t offset, std::vector<pool_input> &res) const {
    const auto add = [&](const void *k, const void *v) {
        res.push_back({(const float *)k + offset, (const float *)v + offset});
    };

    for (const auto &span : of.spans.at(op.inputs)) {
        const int32_t span_end = std::min(std::min(end, of.first), span.position + span.num_rows);

        for (int32_t pos = std::max(first, span.position); pos < span_end; ++pos) {
            const int64_t i = pos - span.position;

            add((const char *)span.k + i * span.k_row_stride, (const char *)span.v + i * span.v_row_stride);
        }
    }
    for (int32_t pos = std::max(first, of.first); pos < end; ++pos) {
        const int64_t i = of.tokens[pos - of.first];

        add((const char *)dst->src[1]->data + i * dst->src[1]->nb[2],
            (const char *)dst->src[2]->data + i * dst->src[2]->nb[2]);
    }
}

// Computes the rows of blocks; those behind the last are 0.
void llama_kvcache::compress(const llama_kvcache_op &op, ggml_tensor *dst, int ith, int nth) const {
    const int32_t stride = layers.cache[op.layer].policy.stride;
    const int64_t dim = dst->ne[0];
    const bool has_two = layers.cache[op.inputs].k_dim > dim; // series: the first is for the block behind a token's own
    const int64_t first = dim * ith / nth;
    const int64_t end = dim * (ith + 1) / nth;
    const auto blocks = last_tokens(stride);

    std::vector<pool_input> of_block;

    for (int64_t b = 0; b < dst->ne[2]; ++b) {
        auto *row = (float *)((char *)dst->data + b * dst->nb[2]);

        if (b >= (int64_t)blocks.size()) {
            std::fill(row + first, row + end, 0.0f);
            continue;
        }

        const int32_t begin = blocks[b].pos + 1 - stride;
        const auto &of = *std::find_if(inputs.begin(), inputs.end(),
                                       [&](const sequence_inputs &other) { return other.id == blocks[b].seq_id; });

        of_block.clear();
        if (has_two) {
            add_inputs(op, dst, of, begin - stride, begin, 0, of_block);
        }
        add_inputs(op, dst, of, begin, begin + stride, has_two ? dim : 0, of_block);
        sum_inputs(of_block, row, first, end);
    }
}

static void compute_compress(ggml_tensor *dst, int ith, int nth, void *userdata) {
    const auto &op = *static_cast<const llama_kvcache_op *>(userdata);

    op.mem->compress(op, dst, ith, nth);
}

// rotates the last elements of rows
static ggml_tensor *rotate(const llm_graph_context &graph, ggml_tensor *cur, ggml_tensor *pos) {
    const auto &hparams = graph.hparams;
    const float attn_factor = graph.ext_factor == 0.0f ? 1.0f : 1.0f / (1.0f + 0.1f * logf(1.0f / graph.freq_scale));

    cur = ggml_rope_ext(graph.ctx0, cur, pos, nullptr, hparams.n_rot(), graph.rope_type, graph.n_ctx_orig,
                        hparams.dsv4_compress_rope_base, graph.freq_scale, graph.ext_factor, attn_factor,
                        graph.beta_fast, graph.beta_slow);

    return ggml_rope_set_offset(cur, (int)(cur->ne[0] - hparams.n_rot()));
}

// Stores what rows of a layer are computed of, and returns the rows that the ubatch completes.
ggml_tensor *llama_kvcache::build_compressed(const llm_graph_context &graph, int32_t layer, int32_t inputs,
                                             const compressor &weights, const llm_graph_input_dsv4::comp_input &inp,
                                             ggml_tensor *cur, int il) const {
    auto *ctx = graph.ctx0;
    auto &op = *ops[layer];

    op.inputs = inputs;

    ggml_tensor *kv = graph.build_lora_mm(weights.kv, cur);
    ggml_tensor *gate = graph.build_lora_mm(weights.gate, cur);

    gate = ggml_add(ctx, gate, ggml_get_rows(ctx, weights.bias, inp.state_pos));
    kv = ggml_reshape_3d(ctx, kv, kv->ne[0], 1, kv->ne[1]);
    gate = ggml_reshape_3d(ctx, gate, gate->ne[0], 1, gate->ne[1]);

    ggml_tensor *args[3] = {build_store(graph, *ops[inputs], kv, gate, il), kv, gate};
    ggml_tensor *rows = ggml_custom_4d(ctx, GGML_TYPE_F32, layers.cache[layer].k_dim, 1, inp.state_write_pos->ne[0], 1,
                                       args, 3, compute_compress, GGML_N_TASKS_MAX, &op);
    graph.cb(rows, "kvcache_compress", il);

    return rotate(graph, graph.build_norm(rows, weights.norm, nullptr, LLM_NORM_RMS, il), inp.state_write_pos);
}

ggml_tensor *llama_kvcache::build_choose_dsv4(const llm_graph_context &graph, const llm_graph_input_dsv4 &inp,
                                              ggml_tensor *qr, ggml_tensor *cur, ggml_tensor *pos, int il) const {
    const auto &layer = model.layers[il];
    const compressor weights = {layer.indexer_comp_wkv, layer.indexer_comp_wgate, layer.indexer_comp_ape,
                                layer.indexer_comp_norm};

    ggml_tensor *k = build_compressed(graph, layers.indexer[il], layers.inputs[il], weights, inp.get_csa(), cur, il);
    ggml_tensor *q = graph.build_lora_mm(layer.indexer_attn_q_b, qr);

    q = ggml_reshape_3d(graph.ctx0, q, k->ne[0], graph.hparams.indexer_n_head, graph.n_tokens);

    return build_choose(graph, rotate(graph, q, pos), k, graph.build_lora_mm(layer.indexer_proj, cur), il);
}

ggml_tensor *llama_kvcache::build_attn_dsv4(const llm_graph_context &graph, const llm_graph_input_dsv4 &inp,
                                            ggml_tensor *q, ggml_tensor *kv, ggml_tensor *qr, ggml_tensor *cur,
                                            ggml_tensor *pos, int il) const {
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

    ggml_tensor *rows = build_compressed(graph, compressed, layers.compressed_inputs[il], weights,
                                         is_sparse ? inp.get_csa() : inp.get_hca(), cur, il);
    ggml_tensor *stored = build_store(graph, joining, rows, nullptr, il);
    ggml_tensor *chosen = is_sparse ? build_choose_dsv4(graph, inp, qr, cur, pos, il) : nullptr;

    joining.scale = op.scale;

    return build_attend(graph, joining, q, nullptr, chosen, of_window, stored);
}
