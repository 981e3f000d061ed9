// Random weights for a model of metadata only, as llama_model_init_from_user asks for them.
#pragma once

#include "ggml-backend.h"
#include "ggml.h"

#include <functional>
#include <random>
#include <string>
#include <vector>

// sets a tensor to values that follow from its name
inline void set_random(ggml_tensor *tensor, void * /*user*/) {
    std::mt19937 rng(std::hash<std::string>()(tensor->name));
    std::normal_distribution<float> normal(0.0f, 0.5f);

    std::vector<float> values(ggml_nelements(tensor));
    for (auto &value : values) {
        value = normal(rng);
    }
    if (tensor->type == GGML_TYPE_F16) {
        std::vector<ggml_fp16_t> halves(values.size());
        ggml_fp32_to_fp16_row(values.data(), halves.data(), (int64_t)values.size());
        ggml_backend_tensor_set(tensor, halves.data(), 0, ggml_nbytes(tensor));
    } else {
        ggml_backend_tensor_set(tensor, values.data(), 0, ggml_nbytes(tensor));
    }
}
