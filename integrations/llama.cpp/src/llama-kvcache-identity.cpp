#include "llama-kvcache-identity.h"

#include "llama-adapter.h"
#include "llama-cparams.h"
#include "llama-impl.h"
#include "llama-model.h"

#include "ggml-backend.h"

#include <algorithm>
#include <array>
#include <atomic>
#include <cstring>
#include <thread>
#include <vector>

// Every byte of the weights counts, not a sample of them: a finetune may have changed a few rows of an embedding.  They
// are hashed as fast as memory delivers them, on several threads; of a model that is mapped they are read from the disk
// for it, as the first prompt would do.  The hash finds any accident, and nobody who chooses weights for it.
//
// Weights are hashed as they lie in memory, where llama.cpp may have repacked them for the machine's instructions:
// machines that differ in these do not share.

namespace {

constexpr size_t PIECE = 16 << 20;

using hash = std::array<uint64_t, 2>;

uint64_t mixed(uint64_t x) {
    x ^= x >> 33;
    x *= 0xff51afd7ed558ccdu;
    x ^= x >> 33;
    x *= 0xc4ceb9fe1a85ec53u;

    return x ^ x >> 33;
}

// four words at a time, each step one-to-one in the word and in what was before
hash hash_of(const void *data, size_t size) {
    const uint8_t *at = (const uint8_t *)data;
    uint64_t lanes[4] = {1, 2, 3, 4};

    for (size_t i = 0; i < size; i += 32) {
        uint64_t words[4] = {};

        memcpy(words, at + i, std::min<size_t>(size - i, 32));
        for (int j = 0; j < 4; ++j) {
            const uint64_t x = (lanes[j] ^ words[j]) * 0x9e3779b97f4a7c15u;

            lanes[j] = x << 29 | x >> 35;
        }
    }

    hash res = {size, ~(uint64_t)size};

    for (const uint64_t lane : lanes) {
        res[0] = mixed(res[0] ^ lane);
        res[1] = mixed(res[1] + lane);
    }

    return res;
}

struct piece {
    const uint8_t *data;
    size_t size;
    hash value;
};

void hash_all(std::vector<piece> &pieces, int n_threads) {
    std::atomic<size_t> next{0};

    const auto work = [&] {
        for (size_t i; (i = next++) < pieces.size();) {
            pieces[i].value = hash_of(pieces[i].data, pieces[i].size);
        }
    };

    std::vector<std::thread> threads;

    for (int i = 1; i < n_threads; ++i) {
        threads.emplace_back(work);
    }
    work();
    for (auto &thread : threads) {
        thread.join();
    }
}

bool is_in_memory(const ggml_tensor *tensor) {
    ggml_backend_dev_t dev =
        tensor->buffer ? ggml_backend_buft_get_device(ggml_backend_buffer_get_type(tensor->buffer)) : nullptr;

    return !dev || ggml_backend_dev_type(dev) == GGML_BACKEND_DEVICE_TYPE_CPU;
}

using tensors = std::vector<std::pair<std::string, ggml_tensor *>>;

// returns names, types and shapes, and what the bytes hash to
std::string described(const tensors &all, int n_threads) {
    std::vector<piece> pieces;
    std::vector<std::vector<uint8_t>> copies; // of what lies elsewhere
    std::string res;

    for (const auto &[name, tensor] : all) {
        const size_t size = tensor->data ? ggml_nbytes(tensor) : 0;
        const uint8_t *data = (const uint8_t *)tensor->data;

        if (size && !is_in_memory(tensor)) {
            copies.emplace_back(size);
            ggml_backend_tensor_get(tensor, copies.back().data(), 0, size);
            data = copies.back().data();
        }
        res += format("%s %s", name.c_str(), ggml_type_name(tensor->type));
        for (const int64_t n : tensor->ne) {
            res += format(" %lld", (long long)n);
        }
        res += ';';
        for (size_t i = 0; i < size; i += PIECE) {
            pieces.push_back({data + i, std::min(size - i, PIECE), {}});
        }
    }

    hash_all(pieces, n_threads);
    for (const auto &one : pieces) {
        res.append((const char *)one.value.data(), sizeof(one.value));
    }

    return res;
}

} // namespace

std::string llama_kvcache_identity(const void *data, size_t size) {
    const hash res = hash_of(data, size);

    return format("%016llx%016llx", (unsigned long long)res[0], (unsigned long long)res[1]);
}

std::string llama_kvcache_identity(const llama_model &model, const llama_cparams &cparams) {
    // what the file says, or options in its place; padding, which llama.cpp has set to 0, could cost a match at most
    std::string text((const char *)&model.hparams, sizeof(model.hparams));

    text += format("%s %a %a %u %a %a %a %a %d;", llm_arch_name(model.arch), cparams.rope_freq_base,
                   cparams.rope_freq_scale, cparams.n_ctx_orig_yarn, cparams.yarn_ext_factor, cparams.yarn_attn_factor,
                   cparams.yarn_beta_fast, cparams.yarn_beta_slow, (int)cparams.rope_scaling_type);
    for (uint32_t il = 0; il < model.hparams.n_layer(); ++il) {
        const ggml_tensor *factors = model.get_rope_factors(cparams, (int)il); // by the length of the context

        text += format("%s;", factors ? factors->name : "");
    }
    text += described(model.tensors_by_name, std::max(cparams.n_threads_batch, 1));

    return llama_kvcache_identity(text.data(), text.size());
}

std::string llama_kvcache_identity(const llama_adapter_lora &adapter) {
    tensors all;

    for (const auto &[name, weight] : adapter.ab_map) {
        all.emplace_back(name + ".a", weight.a);
        all.emplace_back(name + ".b", weight.b);
    }
    std::sort(all.begin(), all.end());

    const std::string text = format("%a;", adapter.alpha) + described(all, 1);

    return llama_kvcache_identity(text.data(), text.size());
}
