// Saved state, in the format of llama.cpp's own caches (llama_kv_cache, _iswa, _dsa, _dsa_iswa, _msa): what one wrote
// the other reads.
//
// A part stands for one llama_kv_cache: the number of streams; for each, how many cells (tokens) it has, their
// positions and sequences; then the rows of all cells, keys layer by layer, then values.  The layers without a window
// come first. The keys of their indexers follow, for the same cells.  The layers with windows come last, at fewer
// positions.
#pragma once

#include "llama-kvcache.h"

#include "ggml.h"
#include "llama-kv-cells.h"

#include <cstdint>
#include <cstring>
#include <stdexcept>
#include <vector>

static constexpr size_t N_BUFFER = 1 << 18; // bytes of rows that are copied at a time, about

// what llama.cpp has as one cache
struct llama_kvcache::state_part {
    bool has_windows;
    bool is_index;                 // the keys of indexers
    int32_t first;                 // a layer of the cache whose rows stand at the positions of the part
    std::vector<int32_t> layers;   // of the cache; -1: one of the model without KV heads, whose rows have no bytes
    std::vector<uint8_t> replaced; // [layer of the cache] none of indexers, whose keys go into rows that are there
};

// a row of keys, or of values: all heads of a token
struct llama_kvcache::state_row {
    bool is_quantized() const { return type != KVC_F32 && type != KVC_F16 && type != KVC_BF16; }

    // of an element that is not quantised
    size_t n_element_bytes() const { return kvc_row_bytes(type, 1); }

    int32_t type; // kvc_type
    uint32_t n_heads;
    uint32_t n_elements;
    size_t n_head_bytes;
    size_t n_bytes;
};

// logs why a state is not read, and returns it as an error
std::runtime_error llama_kvcache_state_failure(const std::string &reason);

static inline void llama_kvcache_check(kvc_status status) {
    if (status) {
        throw std::runtime_error(kvc_last_error());
    }
}

template <size_t SIZE>
static inline void copy_elements(uint8_t *to, size_t to_stride, const uint8_t *from, size_t from_stride, size_t n) {
    for (size_t i = 0; i < n; ++i) {
        std::memcpy(to + i * to_stride, from + i * from_stride, SIZE);
    }
}

// copies n elements of f32, f16 or bf16
static inline void copy_elements(uint8_t *to, size_t to_stride, const uint8_t *from, size_t from_stride, size_t n,
                                 size_t size) {
    GGML_ASSERT(size == 2 || size == 4);

    if (size == 2) {
        copy_elements<2>(to, to_stride, from, from_stride, n);
    } else {
        copy_elements<4>(to, to_stride, from, from_stride, n);
    }
}
