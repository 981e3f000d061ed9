// Rows that stand for a block of tokens: an operation stores what they are pooled of, and pools the blocks that the
// ubatch completes.  Another says where these begin.  Also the last tokens, by their numbers.
#include "llama-kvcache.h"

#include "llama-impl.h"
#include "llama-model.h"

#include <algorithm>
#include <cmath>
#include <map>

// the blocks of n tokens that an ubatch completes, at most: the sequences of its tokens need not be in order
static int64_t most_blocks(const llm_graph_context &graph, int32_t n) {
    return std::min<int64_t>(graph.n_tokens, graph.n_tokens / n + graph.ubatch.n_seqs_unq);
}

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

                next[seq_id] = next[seq_id] < 0 ? kvc_next_position(cache, id_of(seq_id)) : next[seq_id];
                if (next[seq_id]++ != pos) {
                    return format("sequence %d goes on at position %d, not %d: the model pools keys of consecutive "
                                  "tokens (images with M-RoPE are not served)",
                                  seq_id, next[seq_id] - 1, pos);
                }
                if (s > 0 && layers.tokens >= 0) {
                    return "tokens belong to several sequences: the model asks for the tokens before each (PLE)";
                }
                if (last[seq_id] != last[seq_ids[0]] ||
                    (s > 0 && last[seq_id] < 0 && kvc_share(cache, id_of(seq_ids[0]), id_of(seq_id), 0, pos))) {
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

    std::map<int64_t, size_t> found;

    for (int32_t i = 0; i < n_cur; ++i) {
        const int64_t id = id_of(ubatch.seq_id[i][0]);
        const auto at = found.emplace(id, inputs.size());

        if (at.second) {
            inputs.push_back({id, ubatch.pos[i], {}, {}});
        }
        inputs[at.first->second].tokens.push_back(i);
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
    const auto &of = layers.model[layer];

    return std::max(0, first / of.pool * of.pool + of.pool - of.span);
}

kvc_status llama_kvcache::find_known(int32_t layer, sequence_inputs &of) {
    const int32_t pool = layers.model[layer].pool;

    if ((of.first + (llama_pos)of.tokens.size()) / pool == of.first / pool) {
        return KVC_OK; // no block is completed
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

std::vector<llama_kvcache::last_token> llama_kvcache::last_tokens(int32_t n) const {
    std::vector<last_token> res;

    const int32_t *positions = kvc_batch_positions(batch) + n_done;

    for (int32_t i = 0; i < n_cur; ++i) {
        if ((positions[i] + 1) % n == 0) {
            const auto of = std::find_if(inputs.begin(), inputs.end(),
                                         [&](const sequence_inputs &other) { return other.id == cur_ids[i]; });

            res.push_back({(size_t)(of - inputs.begin()), positions[i]});
        }
    }

    return res;
}

// Lists what a row is pooled of.  A token has its elements, then their gates.  If a row is pooled of two blocks, it has
// elements for the row of the next block, then those for the row of its own.
std::vector<llama_kvcache::pool_input> llama_kvcache::inputs_of(const llama_kvcache_op &op, const ggml_tensor *dst,
                                                                const last_token &last) const {
    const auto &layer = layers.model[op.layer];
    const ggml_tensor *rows = dst->src[1];
    const auto *bias = dst->src[2] ? (const float *)dst->src[2]->data : nullptr;
    const int64_t n_elements = layer.span / layer.pool * dst->ne[0];
    const bool has_gates = rows->ne[0] == 2 * n_elements;

    std::vector<pool_input> res;

    for (int32_t i = std::max(0, layer.span - 1 - last.pos); i < layer.span; ++i) {
        const int64_t first = i / layer.pool * dst->ne[0];
        const float *row = input_of(op.layer, last.i_seq, last.pos + 1 - layer.span + i, rows);

        res.push_back({row + first, has_gates ? row + n_elements + first : nullptr,
                       bias ? bias + i % layer.pool * n_elements + first : nullptr});
    }

    return res;
}

// the mean of elements [first, end) of the tokens, by the softmax of their gates
static void pool_row(const std::vector<llama_kvcache::pool_input> &tokens, float *row, int64_t first, int64_t end) {
    const auto gate = [](const llama_kvcache::pool_input &token, int64_t d) {
        return token.gates ? token.gates[d] + (token.bias ? token.bias[d] : 0.0f) : 0.0f;
    };

    for (int64_t d = first; d < end; ++d) {
        float most = gate(tokens[0], d);
        for (const auto &token : tokens) {
            most = std::max(most, gate(token, d));
        }

        float sum = 0.0f;
        float weights = 0.0f;
        for (const auto &token : tokens) {
            const float weight = std::exp(gate(token, d) - most);

            sum += weight * token.elements[d];
            weights += weight;
        }

        row[d] = sum / weights;
    }
}

// Computes elements of the rows of blocks; those behind the last are 0.
void llama_kvcache::pool(const llama_kvcache_op &op, ggml_tensor *dst, int ith, int nth) const {
    const int64_t first = dst->ne[0] * ith / nth;
    const int64_t end = dst->ne[0] * (ith + 1) / nth;
    const auto blocks = last_tokens(layers.model[op.layer].pool);

    for (int64_t b = 0; b < dst->ne[2]; ++b) {
        auto *row = (float *)((char *)dst->data + b * dst->nb[2]);

        if (b < (int64_t)blocks.size()) {
            pool_row(inputs_of(op, dst, blocks[b]), row, first, end);
        } else {
            std::fill(row + first, row + end, 0.0f);
        }
    }
}

void llama_kvcache::begins(const llama_kvcache_op &op, ggml_tensor *dst) const {
    const int32_t n = layers.model[op.layer].pool;
    const auto blocks = last_tokens(n);
    const int64_t n_sections = model.hparams.n_pos_per_embd();
    const int64_t n_blocks = dst->ne[0] / n_sections;
    auto *out = (int32_t *)dst->data;

    std::fill(out, out + dst->ne[0], 0);
    for (size_t i = 0; i < blocks.size(); ++i) {
        for (int64_t s = 0; s < n_sections; ++s) {
            out[s * n_blocks + i] = blocks[i].pos + 1 - n;
        }
    }
}

static void compute_pool(ggml_tensor *dst, int ith, int nth, void *userdata) {
    const auto &op = *static_cast<const llama_kvcache_op *>(userdata);

    op.mem->pool(op, dst, ith, nth);
}

static void compute_begins(ggml_tensor *dst, int ith, int /*nth*/, void *userdata) {
    const auto &op = *static_cast<const llama_kvcache_op *>(userdata);

    if (ith == 0) {
        op.mem->begins(op, dst);
    }
}

ggml_tensor *llama_kvcache::build_pool(const llm_graph_context &graph, ggml_tensor *values, ggml_tensor *gates,
                                       ggml_tensor *bias, ggml_tensor **pos, int il) const {
    return build_pool_of(graph, layers.inputs[il], values, gates, bias, pos, il);
}

ggml_tensor *llama_kvcache::build_pool_of(const llm_graph_context &graph, int32_t layer, ggml_tensor *values,
                                          ggml_tensor *gates, ggml_tensor *bias, ggml_tensor **pos, int il) const {
    auto *ctx = graph.ctx0;
    auto &op = *ops[layer];
    const auto &of = layers.model[layer];

    ggml_tensor *row = gates ? ggml_concat(ctx, values, gates, 0) : values;
    row = ggml_reshape_3d(ctx, with_dense_rows(ctx, row), row->ne[0], 1, graph.n_tokens);

    ggml_tensor *args[3] = {build_store(graph, op, row, nullptr, il), row, nullptr};

    if (bias) {
        const bool is_plain = bias->type == GGML_TYPE_F32 && ggml_is_contiguous(bias);

        args[2] = is_plain ? bias : ggml_cast(ctx, bias, GGML_TYPE_F32);
    }

    const int64_t n_dims = values->ne[0] * of.pool / of.span;
    const int64_t n_blocks = most_blocks(graph, of.pool);

    auto *res = ggml_custom_4d(ctx, GGML_TYPE_F32, n_dims, 1, n_blocks, 1, args, bias ? 3 : 2, compute_pool,
                               GGML_N_TASKS_MAX, &op);
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
