// kvcache.h for C++17 and later: statuses become exceptions, a cache frees itself, and a batch that was not committed
// is aborted.
#pragma once

#include <kvcache.h>

#include <algorithm>
#include <cstdint>
#include <memory>
#include <stdexcept>
#include <vector>

namespace kvcache {

struct Error : std::runtime_error {
    explicit Error(kvc_status failed) : std::runtime_error(kvc_last_error()), status(failed) {}
    kvc_status status;
};

inline void check(kvc_status status) {
    if (status != KVC_OK) throw Error(status);
}

// Returns a struct that says its size. Every other field is 0, which asks for its default.
template <class Struct> Struct sized() {
    Struct made{};
    made.struct_size = sizeof made;
    return made;
}

struct Free {
    void operator()(kvc_cache *cache) const { kvc_cache_free(cache); } // refused, and so a leak, while a batch is open
    void operator()(kvc_batch *batch) const { kvc_abort(batch); }
};

using Cache = std::unique_ptr<kvc_cache, Free>;

inline Cache make_cache(const kvc_config &config) {
    kvc_cache *cache = nullptr;
    check(kvc_cache_new(&config, &cache));
    return Cache(cache);
}

// The tokens of one forward pass, which follow what the sequence holds. Unless they are committed before the batch goes
// out of scope, they never were. A cache has one batch at a time, and must outlive it.
class Batch {
  public:
    Batch(const Cache &cache, int64_t seq_id, int32_t num_tokens) {
        const std::vector<int64_t> seq_ids(static_cast<size_t>(std::max(num_tokens, 0)), seq_id);
        kvc_batch *begun = nullptr;
        check(kvc_begin(cache.get(), num_tokens, nullptr, seq_ids.data(), nullptr, &begun));
        batch.reset(begun);
    }

    void attend(const kvc_plan_args &plan, const kvc_attend_args &args) {
        check(kvc_attend(batch.get(), &plan, &args));
    }

    void commit() {
        check(kvc_commit(batch.get())); // after an error the batch is still open, and is aborted
        batch.release();
    }

  private:
    std::unique_ptr<kvc_batch, Free> batch;
};

} // namespace kvcache
