// Selected rows: a new token of a long text reads the rows that matter most, in place of all
// (kvc_plan_args.select_rows).
#pragma once

#include "kvcache.h"

#include <cstdint>
#include <vector>

struct llama_cparams;

// returns how many rows LLAMA_KVCACHE_SELECT asks for, 0: all.  Throws where it is no such number.
int32_t llama_kvcache_select_asked_for();

// returns the same, 0, with a warning, where sequences of this context are too short
int32_t llama_kvcache_select_rows(const llama_cparams &cparams);

// returns from how many tokens of its sequence on a token selects so many rows
int64_t llama_kvcache_select_from(int32_t n_rows);

// returns the sketch_bits of a model's next layer, behind these of the cache
int32_t llama_kvcache_sketch_bits(const std::vector<kvc_layer> &before, const kvc_layer &layer);

// says how many rows are selected where, and what the sketches of so many tokens take
void llama_kvcache_log_selection(const std::vector<kvc_layer> &layers, int32_t n_rows, int64_t n_tokens);

// throws if no layer has sketches
void llama_kvcache_check_sketches(const std::vector<kvc_layer> &layers);
