// Prompts that begin alike: sequences take the beginnings that others have left behind, without a copy.
#include "llama-kvcache.h"

#include "llama-impl.h"

namespace {

// a prompt as the cache takes it
struct prefix_tokens {
    explicit prefix_tokens(const llama_memory_prompt &prompt)
        : ids(prompt.tokens, prompt.tokens + prompt.n_tokens), tokens() {
        tokens.struct_size = sizeof(tokens);
        tokens.ids = ids.data();
        tokens.num_tokens = (int64_t)ids.size();
        tokens.digests = prompt.digests;
    }

    std::vector<int64_t> ids;
    kvc_tokens tokens;
};

} // namespace

bool llama_kvcache::has_prefix() const { return keeps_prefixes; }

kvc_prefix *llama_kvcache::prefix_of(const char *adapters) {
    if (!keeps_prefixes) {
        return nullptr;
    }

    const std::string key = adapters ? adapters : "";
    const auto found = prefixes.find(key);

    if (found != prefixes.end()) {
        return found->second;
    }

    const std::string fingerprint = "adapters: " + key; // of one model, as the cache is

    kvc_prefix_config config = {};

    config.struct_size = sizeof(config);
    config.fingerprint = fingerprint.c_str();

    kvc_prefix *res = nullptr;

    return llama_kvcache_logged(__func__, kvc_prefix_new(cache, &config, &res)) ? prefixes[key] = res : nullptr;
}

// The sequence of the cache that was acquired takes the place of the one before: what it is fed is kept as it comes.
int32_t llama_kvcache::prefix_begin(llama_seq_id seq_id, const llama_memory_prompt &prompt, int32_t n_held) {
    kvc_prefix *prefix = prompt.n_tokens ? prefix_of(prompt.adapters) : nullptr;

    if (!prefix) {
        return n_held;
    }

    close();

    const prefix_tokens given(prompt);

    int64_t id;
    int32_t n_known;

    if (!llama_kvcache_logged(__func__, kvc_prefix_acquire(prefix, &given.tokens, -1, &id, &n_known))) {
        return n_held;
    }

    // of its own tokens, a sequence may have some that are not to be kept, or that were evicted
    const bool is_more = n_known >= n_held && llama_kvcache_logged(__func__, kvc_clear_sequence(cache, ids[seq_id]));

    if (!is_more) {
        llama_kvcache_logged(__func__, kvc_clear_sequence(cache, id));
        return n_held;
    }

    ids[seq_id] = id;

    return n_known;
}

// The sequence goes on as a copy, which no prompt follows.
void llama_kvcache::prefix_keep(llama_seq_id seq_id, const llama_memory_prompt &prompt) {
    kvc_prefix *prefix = prefix_of(prompt.adapters);

    if (!prefix) {
        return;
    }

    close();

    const prefix_tokens given(prompt);
    const int64_t ended = ids[seq_id];
    const int64_t copy = kvc_new_sequence(cache);

    if (kvc_next_position(cache, ended) > 0 && !llama_kvcache_logged(__func__, kvc_fork(cache, ended, copy))) {
        llama_kvcache_logged(__func__,
                             kvc_truncate(cache, ended, kvc_next_position(cache, ended))); // other tokens may follow
        return;
    }

    ids[seq_id] = copy;
    llama_kvcache_logged(__func__, kvc_prefix_release(prefix, ended, &given.tokens));
}
