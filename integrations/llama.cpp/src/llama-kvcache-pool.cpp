// Keys that stand for a block of tokens: an operation stores what they are pooled of, and pools the blocks that the
// ubatch completes.  Another says where these begin.  Also the last tokens, by their numbers.
#include "llama-kvcache.h"

#include "llama-impl.h"
#include "llama-model.h"

#include <algorithm>
#include <cmath>
#include <map>

namespace {

// what a block's key is pooled of; a token has its elements, then their gates
struct block_rows {
    const std::vector<const float *> &tokens;
    const float *bias; // of the gates, [token][n_dims], null: 0
    int64_t n_dims;    // of the key
    bool has_gates;
};

// the mean of the tokens' elements, by the softmax of their gates
void pool_block(const block_rows &in, float *out) {
    const size_t n = in.tokens.size();

    for (int64_t d = 0; d < in.n_dims; ++d) {
        const auto gate = [&](size_t i) {
            return in.has_gates ? in.tokens[i][in.n_dims + d] + (in.bias ? in.bias[i * in.n_dims + d] : 0.0f) : 0.0f;
        };

        float most = gate(0);
        for (size_t i = 1; i < n; ++i) {
            most = std::max(most, gate(i));
        }

        float sum = 0.0f;
        float weights = 0.0f;
        for (size_t i = 0; i < n; ++i) {
            const float weight = in.has_gates ? std::exp(gate(i) - most) : 1.0f;

            sum += weight * in.tokens[i][d];
            weights += weight;
        }

        out[d] = sum / weights;
    }
}

// the sequences of an ubatch's tokens need not be in order
int64_t most_blocks(const llm_graph_context &graph, int32_t n) {
    return std::min<int64_t>(graph.n_tokens, graph.n_tokens / n + graph.ubatch.n_seqs_unq);
}

} // namespace

std::string llama_kvcache::stride_refusal(const std::vector<llama_ubatch> &ubatches) const {
    if (!has_inputs()) {
        return "";
    }
    if (!cparams.causal_attn && model.arch != LLM_ARCH_DEEPSEEK4) {
        return "the model pools keys of tokens, which do not see later ones";
    }

    std::vector<llama_pos> next(LLAMA_MAX_SEQ, -1);
    std::vector<int64_t> last(LLAMA_MAX_SEQ, -1); // the token before, -1: none of this decode
    int64_t n_before = 0;

    for (const auto &ubatch : ubatches) {
        if (!cparams.causal_attn && ubatch.n_tokens > model.hparams.n_swa) {
            return format("%u tokens that see each other exceed the model's window of %u", ubatch.n_tokens,
                          model.hparams.n_swa);
        }
        for (uint32_t i = 0; i < ubatch.n_tokens; ++i, ++n_before) {
            const llama_seq_id *seq_ids = ubatch.seq_id[i];
            const llama_pos pos = ubatch.pos[i];

            for (int32_t s = 0; s < ubatch.n_seq_id[i]; ++s) {
                const llama_seq_id seq_id = seq_ids[s];

                next[seq_id] = next[seq_id] < 0 ? kvc_next_position(cache, ids[seq_id]) : next[seq_id];
                if (next[seq_id]++ != pos) {
                    return format("sequence %d goes on at position %d, not %d: the model pools keys of consecutive "
                                  "tokens (images with M-RoPE are not served)",
                                  seq_id, next[seq_id] - 1, pos);
                }
                if (s > 0 && layers.tokens >= 0) {
                    return "tokens belong to several sequences: the model asks for the tokens before each (PLE)";
                }
                if (last[seq_id] != last[seq_ids[0]] ||
                    (s > 0 && last[seq_id] < 0 && kvc_share(cache, ids[seq_ids[0]], ids[seq_id], 0, pos))) {
                    return format("sequences %d and %d differ before position %d: tokens of several sequences begin at "
                                  "position 0, or behind tokens that they share",
                                  seq_ids[0], seq_id, pos);
                }
            }
            for (int32_t s = 0; s < ubatch.n_seq_id[i]; ++s) {
                last[seq_ids[s]] = n_before;
            }
        }
    }

    return "";
}

// Rows from before the ubatch are copied now, because it may fail.
kvc_status llama_kvcache::find_inputs(const llama_ubatch &ubatch) {
    inputs.clear();
    tokens_of_blocks.clear();

    std::map<int64_t, size_t> found;

    for (int32_t i = 0; i < n_cur; ++i) {
        const int64_t id = ids[ubatch.seq_id[i][0]];
        const auto at = found.emplace(id, inputs.size());

        if (at.second) {
            inputs.push_back({id, ubatch.pos[i], {}, {}});
        }

        auto &of = inputs[at.first->second];

        of.tokens.push_back(i);
        if (layers.choice.pool > 1 && (ubatch.pos[i] + 1) % layers.choice.pool == 0) {
            tokens_of_blocks.emplace_back(at.first->second, ubatch.pos[i]);
        }
    }

    for (size_t layer = 0; layer < layers.cache.size(); ++layer) {
        for (auto &of : inputs) {
            if (!layers.model[layer].is_input) {
                continue;
            }
            if (const kvc_status status = find_known((int32_t)layer, of)) {
                return status;
            }
        }
    }

    return put_tokens(ubatch);
}

// returns the first position whose row the ubatch asks for, in a layer of inputs, where a sequence goes on at `first`
llama_pos llama_kvcache::first_known(int32_t layer, llama_pos first) const {
    return layer == layers.tokens ? std::max(0, first - (llama_pos)llama_kvcache_ngram(model) + 1)
                                  : first / layers.choice.pool * layers.choice.pool;
}

kvc_status llama_kvcache::find_known(int32_t layer, sequence_inputs &of) {
    if (layers.cache[layer].v_dim > 0) {
        return find_spans(layer, of);
    }

    const int32_t n_dims = layers.cache[layer].k_dim;
    const llama_pos begin = first_known(layer, of.first);
    auto &rows = of.known[layer];

    rows.resize((size_t)(of.first - begin) * n_dims);

    kvc_rows_out out = {};

    out.struct_size = sizeof(out);
    out.type = KVC_F32;
    out.k = rows.data();
    out.k_row_stride = n_dims * sizeof(float);
    out.k_head_stride = out.k_row_stride;
    out.batch = batch;

    return begin < of.first ? kvc_extract(cache, of.id, layer, begin, of.first, &out) : KVC_OK;
}

const float *llama_kvcache::input_of(int32_t layer, size_t i_seq, llama_pos pos, const ggml_tensor *rows) const {
    const auto &of = inputs[i_seq];

    if (pos >= of.first) {
        return (const float *)((const char *)rows->data + of.tokens[pos - of.first] * rows->nb[2]);
    }

    return &of.known.at(layer)[(size_t)(pos - first_known(layer, of.first)) * layers.cache[layer].k_dim];
}

void llama_kvcache::pool(const llama_kvcache_op &op, ggml_tensor *dst) const {
    const int32_t n = layers.choice.pool;
    const int64_t n_dims = dst->ne[0];
    const ggml_tensor *rows = dst->src[1];
    const ggml_tensor *bias = dst->src[2];

    std::vector<const float *> of_block(n);
    auto *out = (float *)dst->data;

    for (const auto &[i_seq, pos] : tokens_of_blocks) {
        for (int32_t i = 0; i < n; ++i) {
            of_block[i] = input_of(op.layer, i_seq, pos + 1 - n + i, rows);
        }

        pool_block({of_block, bias ? (const float *)bias->data : nullptr, n_dims, rows->ne[0] == 2 * n_dims}, out);
        out += n_dims;
    }

    std::fill(out, (float *)dst->data + ggml_nelements(dst), 0.0f);
}

void llama_kvcache::begins(ggml_tensor *dst) const {
    const int64_t n_sections = model.hparams.n_pos_per_embd();
    const int64_t n_blocks = dst->ne[0] / n_sections;
    auto *out = (int32_t *)dst->data;

    std::fill(out, out + dst->ne[0], 0);
    for (size_t i = 0; i < tokens_of_blocks.size(); ++i) {
        for (int64_t s = 0; s < n_sections; ++s) {
            out[s * n_blocks + i] = tokens_of_blocks[i].second + 1 - layers.choice.pool;
        }
    }
}

static void compute_pool(ggml_tensor *dst, int ith, int /*nth*/, void *userdata) {
    const auto &op = *static_cast<const llama_kvcache_op *>(userdata);

    if (ith == 0) {
        op.mem->pool(op, dst);
    }
}

static void compute_begins(ggml_tensor *dst, int ith, int /*nth*/, void *userdata) {
    const auto &op = *static_cast<const llama_kvcache_op *>(userdata);

    if (ith == 0) {
        op.mem->begins(dst);
    }
}

ggml_tensor *llama_kvcache::build_pool(const llm_graph_context &graph, ggml_tensor *values, ggml_tensor *gates,
                                       ggml_tensor *bias, ggml_tensor **pos, int il) const {
    auto *ctx = graph.ctx0;
    auto &op = *ops[layers.inputs[il]];

    ggml_tensor *row = gates ? ggml_concat(ctx, values, gates, 0) : values;
    row = ggml_reshape_3d(ctx, with_dense_rows(ctx, row), row->ne[0], 1, graph.n_tokens);

    ggml_tensor *args[3] = {build_store(graph, op, row, nullptr, il), row, nullptr};

    if (bias) {
        args[2] = ggml_cont(ctx, bias->type == GGML_TYPE_F32 ? bias : ggml_cast(ctx, bias, GGML_TYPE_F32));
    }

    const int64_t n_blocks = most_blocks(graph, layers.choice.pool);

    auto *res =
        ggml_custom_4d(ctx, GGML_TYPE_F32, values->ne[0], 1, n_blocks, 1, args, bias ? 3 : 2, compute_pool, 1, &op);
    graph.cb(res, "kvcache_pool", il);

    if (pos) {
        *pos = ggml_custom_4d(ctx, GGML_TYPE_I32, n_blocks * model.hparams.n_pos_per_embd(), 1, 1, 1, args, 1,
                              compute_begins, 1, &op);
        graph.cb(*pos, "kvcache_pool_pos", il);
    }

    return res;
}

// A number is stored as one more, so that 0 is none.
kvc_status llama_kvcache::put_tokens(const llama_ubatch &ubatch) {
    if (layers.tokens < 0) {
        return KVC_OK;
    }

    std::vector<float> numbers(ubatch.n_tokens);
    for (uint32_t i = 0; i < ubatch.n_tokens; ++i) {
        numbers[i] = ubatch.token ? (float)(ubatch.token[i] + 1) : 0.0f;
    }

    kvc_put_args args = {};

    args.struct_size = sizeof(args);
    args.first = n_done;
    args.num_tokens = n_cur;
    args.k = numbers.data();
    args.k_token_stride = args.k_head_stride = sizeof(float);
    args.k_type = KVC_F32;

    return kvc_put(batch, layers.tokens, &args);
}

void llama_kvcache::get_prev_tokens(const llama_ubatch &ubatch, uint32_t n, std::vector<llama_token> &res) const {
    res.assign((size_t)ubatch.n_tokens * n, LLAMA_TOKEN_NULL);

    for (size_t i_seq = 0; i_seq < inputs.size(); ++i_seq) {
        const auto &of = inputs[i_seq];

        for (size_t i = 0; i < of.tokens.size(); ++i) {
            const llama_pos pos = of.first + (llama_pos)i;

            for (uint32_t j = 0; j < n && j < (uint32_t)pos; ++j) {
                const llama_pos at = pos - 1 - (llama_pos)j;
                const bool is_known = at < of.first;

                res[(of.tokens[i] + 1) * n - 1 - j] =
                    is_known       ? (llama_token)*input_of(layers.tokens, i_seq, at, nullptr) - 1
                    : ubatch.token ? ubatch.token[of.tokens[at - of.first]]
                                   : LLAMA_TOKEN_NULL;
            }
        }
    }
}
