// Models with an indexer, by whose keys tokens choose the rows that they attend to (DeepSeek V3.2 and others).
#pragma once

#include "kvcache.h"

#include <cstddef>
#include <cstdint>
#include <vector>

struct llama_cparams;
struct llama_model;

// how tokens choose, as kvc_choose_args has it
struct llama_kvcache_choice {
    int32_t width = 0; // 0: tokens attend to all rows
    int32_t block = 1;
    int32_t num_choices = 1;
    int32_t num_local = 0;
    bool relu = true;

    // llama.cpp multiplies queries and keys by a Hadamard matrix, in rows of every type
    bool is_mixed = false;
};

// how keys that were multiplied are moved
struct llama_kvcache_mixed_rope {
    std::vector<double> inv_freq;
    bool interleaved;
};

llama_kvcache_choice llama_kvcache_choice_of(const llama_model &model, const llama_cparams &cparams);

// whether tokens choose the rows that they attend to in the layer
bool llama_kvcache_is_sparse(const llama_model &model, uint32_t il);

// whether they choose them in this layer; others share the choice of the layer before
bool llama_kvcache_has_indexer(const llama_model &model, uint32_t il);

// Turns the rope of a layer's keys into that of its indexer's.  mixed: has the frequencies of the layer, and outlives
// the cache.
void llama_kvcache_set_index_rope(const llama_model &model, llama_kvcache_mixed_rope &mixed, kvc_rope &rope);

// multiplies a row by the Hadamard matrix, which is its own inverse; the order is the largest power of two that divides
// the size
void llama_kvcache_mix(float *row, size_t n);
