// What a model's layers are to the cache: their shapes, policies, types and RoPE, as kvc_cache_new takes them; and
// which models and options are served.
#pragma once

#include "ggml.h"
#include "kvcache.h"
#include "llama-arch.h"
#include "llama-kvcache-indexer.h"

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

struct llama_cparams;
struct llama_memory_params;
struct llama_model;

// A layer of the cache: the keys and values of a layer of the model, or the keys of its indexer; or what these are
// pooled of, for the last tokens
struct llama_kvcache_layer {
    int32_t il;                // in the model
    bool is_index;             // the keys of the indexer
    bool is_input;             // what the keys of the indexer are pooled of, or the tokens: nothing attends there
    bool is_sparse;            // tokens choose the rows that they attend to; of the indexer, they choose here
    kvc_transform k_transform; // as llama.cpp multiplies what it stores
    kvc_transform v_transform;
    bool is_swa;
    uint32_t n_head; // query heads
    int32_t shape;   // layers of one shape share plans; -1: nothing attends

    // of inputs: the tokens of a block, and those that its row is pooled of; of the tokens' numbers: those asked for
    int32_t pool = 1;
    int32_t span = 1;
};

// [i] is layer i of the cache
struct llama_kvcache_layers {
    std::vector<llama_kvcache_layer> model;
    std::vector<kvc_layer> cache;
    // [layer of the model] the layer of the cache with its keys and values, the one with the keys of its indexer, and
    // the one with what these are pooled of; -1: none.  Then the one with rows that stand for several tokens, and what
    // these are pooled of
    std::vector<int32_t> attention;
    std::vector<int32_t> indexer;
    std::vector<int32_t> inputs;
    std::vector<int32_t> compressed;
    std::vector<int32_t> compressed_inputs;
    int32_t tokens = -1; // the layer with the last tokens, by their numbers; -1: none

    // what the pointers in `cache` point at
    std::vector<std::vector<double>> inv_freqs;
    std::unique_ptr<llama_kvcache_mixed_rope> mixed_rope;

    std::vector<int32_t> shapes; // [shape] the first layer of the cache that has it

    int32_t stride = 1; // the most positions that share a row

    llama_kvcache_choice choice;

    int32_t select_rows = 0; // that a new token of a long text reads in layers with sketches, 0: there are none

    kvc_precision precision = KVC_PRECISION_STORED; // by which prompts are multiplied

    bool swa_full = false; // the option: callers count on all rows of a window's past
};

// returns why graphs of an architecture cannot run on this cache, nullptr if they can
const char *llama_kvcache_arch_refusal(llm_arch arch);

// whether models of an architecture have a memory at all
bool llama_kvcache_has_cache(llm_arch arch);

// whether some layers recur, beside those that attend; llama.cpp counts DeepSeek V4 as such a model
bool llama_kvcache_is_hybrid(llm_arch arch);

// whether the layer holds rows in this context; others are recurrent, do not attend, or are a draft head's
bool llama_kvcache_is_cached(const llama_model &model, uint32_t il);

// whether llama.cpp's cache has the layer, with rows of no bytes, and this one does not: it has no KV heads (Deci)
bool llama_kvcache_is_blank(const llama_model &model, uint32_t il);

// returns why this cache does not serve the model with these options, empty if it does; throws where a variable names a
// type that cannot be
std::string llama_kvcache_refusal(const llama_model &model, const llama_memory_params &params,
                                  const llama_cparams &cparams);

llama_kvcache_layers llama_kvcache_layers_of(const llama_model &model, const llama_memory_params &params,
                                             const llama_cparams &cparams);

// returns the kvc_type of the same name, and so of the same bytes; -1 if there is none
int32_t llama_kvcache_type(ggml_type type);

// returns the number that a kvc_type has in a state: that of the ggml_type, or, if there is none, one of no ggml_type
int32_t llama_kvcache_state_type(int32_t type);

// names the type of such a number, which may be any
std::string llama_kvcache_state_type_name(int64_t number);

// whether a variable names a type; throws where it names one that cannot be
bool llama_kvcache_types_asked_for();

// returns the precision that LLAMA_KVCACHE_PROMPTS names; throws where it names none
kvc_precision llama_kvcache_precision_asked_for();
