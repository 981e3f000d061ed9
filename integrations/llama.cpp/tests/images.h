// Images of models with M-RoPE: all tokens of one stand at one position of the text, and have places of their own.
#pragma once

#include "llama.h"

#include <algorithm>
#include <random>
#include <vector>

inline bool has_image_positions(const llama_model *model) {
    const auto type = llama_model_rope_type(model);

    return type == LLAMA_ROPE_TYPE_MROPE || type == LLAMA_ROPE_TYPE_IMROPE;
}

static constexpr int IMAGE_WIDTH = 6; // tokens in a row

// decodes rows [begin, end) of an image that stands at `pos`, and returns the status
inline int decode_image(llama_context *ctx, llama_seq_id seq_id, llama_pos pos, int begin, int end) {
    const int n_dims = llama_model_n_embd_inp(llama_get_model(ctx));
    const int n = (end - begin) * IMAGE_WIDTH;

    std::vector<float> rows((size_t)n * n_dims);
    std::vector<llama_pos> positions(4 * n, 0); // [t, y, x, other][token]
    std::vector<int32_t> n_seq_ids(n, 1);
    std::vector<llama_seq_id *> seq_ids(n, &seq_id);
    std::vector<int8_t> outputs(n, 1);

    std::mt19937 rng(begin);
    std::normal_distribution<float> normal;

    for (auto &element : rows) {
        element = normal(rng);
    }
    for (int i = 0; i < n; ++i) {
        positions[i] = pos;
        positions[n + i] = pos + begin + i / IMAGE_WIDTH;
        positions[2 * n + i] = pos + i % IMAGE_WIDTH;
    }

    llama_batch batch = {};

    batch.n_tokens = n;
    batch.embd = rows.data();
    batch.pos = positions.data();
    batch.n_seq_id = n_seq_ids.data();
    batch.seq_id = seq_ids.data();
    batch.logits = outputs.data();

    return llama_decode(ctx, batch);
}

// where text goes on behind an image of so many rows
inline llama_pos behind_image(llama_pos pos, int n_rows) { return pos + std::max(IMAGE_WIDTH, n_rows); }
