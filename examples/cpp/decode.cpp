// Decodes with numbers in place of a model: a prompt, token by token, a step that fails midway, and a fork.

#include "kvcache.hpp"

#include <cstdio>
#include <exception>
#include <random>
#include <stdexcept>
#include <vector>

namespace {

constexpr int32_t num_layers = 2, num_heads = 8, num_kv_heads = 2, head_dim = 32;

// Numbers [num_tokens][num_heads][head_dim], as a model's layer computes them.
struct Rows {
    Rows(int32_t tokens, int32_t heads) : numbers(size_t(tokens) * size_t(heads) * head_dim) {}

    Rows &fill(std::mt19937 &random) {
        std::normal_distribution<float> normal;
        for (float &number : numbers) number = normal(random);
        return *this;
    }

    std::vector<float> numbers;
};

kvcache::Cache make_cache() {
    kvc_layer layer{};
    layer.num_kv_heads = num_kv_heads;
    layer.k_dim = layer.v_dim = head_dim;
    layer.k_type = layer.v_type = KVC_F16;
    const std::vector<kvc_layer> layers(num_layers, layer);
    auto config = kvcache::sized<kvc_config>();
    config.layers = layers.data(); // copied
    config.layer_size = sizeof layer;
    config.num_layers = num_layers;
    config.max_seq_len = 16;
    return kvcache::make_cache(config);
}

// Stores the keys and values of these tokens in a layer, and attends over all that they may see.
Rows attend(kvcache::Batch &batch, int32_t layer, int32_t num_tokens, std::mt19937 &random) {
    Rows q(num_tokens, num_heads), k(num_tokens, num_kv_heads), v(num_tokens, num_kv_heads), out(num_tokens, num_heads);
    for (Rows *rows : {&q, &k, &v}) rows->fill(random);
    auto put = kvcache::sized<kvc_put_args>();
    put.k = k.numbers.data();
    put.v = v.numbers.data();
    auto plan = kvcache::sized<kvc_plan_args>();
    plan.layer = layer;
    plan.num_heads = num_heads;
    auto args = kvcache::sized<kvc_attend_args>();
    args.put = &put;
    args.q = q.numbers.data();
    args.out = out.numbers.data();
    batch.attend(plan, args);
    return out;
}

// One forward pass. If anything in it throws, the sequence is as it was.
void step(const kvcache::Cache &cache, int64_t seq_id, int32_t num_tokens, std::mt19937 &random,
          bool model_fails = false) {
    kvcache::Batch batch(cache, seq_id, num_tokens);
    for (int32_t layer = 0; layer < num_layers; layer++) {
        attend(batch, layer, num_tokens, random);
        if (model_fails) throw std::runtime_error("the model failed");
    }
    batch.commit();
}

void show(const kvcache::Cache &cache, const char *what) {
    std::printf("%-28s sequence 0: %2d tokens, sequence 1: %2d\n", what, int(kvc_seq_len(cache.get(), 0, -1)),
                int(kvc_seq_len(cache.get(), 1, -1)));
}

void run() {
    std::mt19937 random(0);
    const kvcache::Cache cache = make_cache();
    step(cache, 0, 5, random);
    show(cache, "a prompt");
    for (int i = 0; i < 3; i++) step(cache, 0, 1, random);
    show(cache, "three tokens more");
    try {
        step(cache, 0, 1, random, true);
    } catch (const std::runtime_error &error) {
        show(cache, error.what());
    }
    kvcache::check(kvc_fork(cache.get(), 0, 1)); // copies no row
    step(cache, 1, 1, random);
    show(cache, "a fork, and a token for it");
    try {
        step(cache, 0, 9, random);
    } catch (const kvcache::Error &error) {
        std::printf("refused: %s\n", error.what());
    }
    show(cache, "nine tokens that do not fit");
}

} // namespace

int main() {
    try {
        run();
    } catch (const std::exception &error) {
        std::fprintf(stderr, "decode: %s\n", error.what());
        return 1;
    }
}
