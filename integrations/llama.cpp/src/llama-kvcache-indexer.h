// Models with an indexer, by whose keys tokens choose the rows that they attend to (DeepSeek V3.2 and others).  A key
// belongs to a token, or is pooled of the inputs of a block of tokens (GLM-5.3 Flash, Qwen 4).
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
    int32_t pool = 1;      // positions that share a key
    bool has_tail = false; // where keys are pooled, tokens see their own incomplete block, too
    int32_t num_choices = 1;
    int32_t num_local = 0;
    bool relu = true;

    // llama.cpp multiplies queries and keys by a Hadamard matrix, in rows of every type
    bool is_mixed = false;
};

// returns the elements of a token that keys are pooled of, 0: they are not
uint32_t llama_kvcache_input_dim(const llama_model &model);

// returns the n of a model whose input is also made of the n - 1 tokens before each (PLE), 0: it is not
uint32_t llama_kvcache_ngram(const llama_model &model);

// returns why the cache does not serve the model's indexer, nullptr if it does
const char *llama_kvcache_indexer_refusal(const llama_model &model);

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
