// What tells the rows of one model from those of another, where they may meet: in a store.
#pragma once

#include <cstddef>
#include <string>

struct ggml_tensor;
struct llama_adapter_lora;
struct llama_cparams;
struct llama_model;

// returns a name of all that rows follow from besides their tokens: weights, parameters with what overrides them, RoPE
std::string llama_kvcache_identity(const llama_model &model, const llama_cparams &cparams);

// returns a name of an adapter's weights
std::string llama_kvcache_identity(const llama_adapter_lora &adapter);

// returns a name of any bytes
std::string llama_kvcache_identity(const void *data, size_t size);
