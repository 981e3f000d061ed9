// Prompts that begin alike: sequences take the beginnings that others have left behind, without a copy.
#include "llama-kvcache.h"

#include "llama-impl.h"
#include "llama-io.h"
#include "llama-kvcache-identity.h"
#include "llama-memory-recurrent.h"

#include "ggml-backend.h"

#include <algorithm>
#include <cstring>
#include <set>
#include <stdexcept>

std::string llama_kvcache_prefix_asked_for() {
    const std::string value = llama_memory_option("LLAMA_KVCACHE_PREFIX").value_or("off");

    if (value == "off") {
        return "";
    }
    if (value != "on") {
        llama_kvcache_store::check(value);
    }

    return value;
}

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

using state_bytes = std::vector<uint8_t>;

class bytes_writer : public llama_io_write_i {
  public:
    void write(const void *src, size_t size) override {
        data.insert(data.end(), (const uint8_t *)src, (const uint8_t *)src + size);
    }

    void write_tensor(ggml_tensor *tensor, size_t offset, size_t size) override {
        data.resize(data.size() + size);
        ggml_backend_tensor_get(tensor, data.data() + data.size() - size, offset, size);
    }

    size_t n_bytes() override { return data.size(); }

    state_bytes data;
};

class bytes_reader : public llama_io_read_i {
  public:
    explicit bytes_reader(const state_bytes &data) : data(data) {}

    void read(void *dst, size_t size) override { memcpy(dst, next(size), size); }

    void read_tensor(ggml_tensor *tensor, size_t offset, size_t size) override {
        ggml_backend_tensor_set(tensor, next(size), offset, size);
    }

    size_t n_bytes() override { return at; }

  private:
    const uint8_t *next(size_t size) {
        if (size > data.size() - at) {
            throw std::runtime_error("the state of a prompt is too short");
        }
        at += size;

        return data.data() + at - size;
    }

    const state_bytes &data;
    size_t at = 0;
};

} // namespace

// a row of each tensor, and what is said about them
int64_t llama_kvcache::most_state_bytes() const {
    static constexpr int64_t SAID = 64;

    if (!recr) {
        return 0;
    }

    int64_t res = SAID;

    for (const auto *of_layers : {&recr->r_l, &recr->s_l, &recr->p_l}) {
        for (const ggml_tensor *tensor : *of_layers) {
            res += tensor ? (int64_t)tensor->nb[1] + SAID : 0;
        }
    }

    return res;
}

static std::string metric(const char *name, const char *type, const char *help, int64_t value) {
    return format("# HELP kvcache_%s %s\n# TYPE kvcache_%s %s\nkvcache_%s %lld\n", name, help, name, type, name,
                  (long long)value);
}

const char *llama_kvcache::metrics() {
    kvc_stats stats;

    kvc_get_stats(cache, &stats, sizeof(stats));
    last_metrics = metric("bytes", "gauge", "Bytes that keys, values, kept recurrent states and their bookkeeping take",
                          kvc_nbytes(cache)) +
                   metric("most_bytes", "gauge", "Bytes that keys and values alone may take", (int64_t)most_bytes()) +
                   metric("rows_evicted_total", "counter", "Rows of kept prompts that were dropped for others",
                          stats.rows_evicted);
    if (prefix_store) {
        const auto [n_reads, n_writes] = prefix_store->n_failures();

        last_metrics += metric("store_read_failures_total", "counter", "Reads of kept prompts that failed", n_reads) +
                        metric("store_write_failures_total", "counter", "Writes of kept prompts that failed", n_writes);
    }

    return last_metrics.c_str();
}

bool llama_kvcache::has_prefix() const { return !prefix_spec.empty(); }

int32_t llama_kvcache::prefix_block() const { return recr && prefix_store ? kvc_block_size(cache) : 0; }

// Sequences that go on do not follow from their tokens and these vectors.
void llama_kvcache::prefix_steer(const float *data, size_t len, int32_t il_start, int32_t il_end) {
    close();

    steering = data ? llama_kvcache_identity(data, len * sizeof(*data)) + format(" %d %d", il_start, il_end) : "";
    for (const int64_t id : ids) {
        llama_kvcache_logged(__func__, kvc_next_position(cache, id) > 0 ? kvc_mark_inexact(cache, id, 0)
                                                                        : kvc_clear_sequence(cache, id));
    }
}

kvc_prefix *llama_kvcache::prefix_of(const char *adapters) {
    if (!has_prefix()) {
        return nullptr;
    }

    const std::string fingerprint = identity + ", adapters: " + (adapters ? adapters : "") + ", steered: " + steering +
                                    (layers.precision == KVC_PRECISION_INT8 ? ", prompts: int8" : "");
    const auto found = prefixes.find(fingerprint);

    if (found != prefixes.end()) {
        return found->second;
    }

    kvc_prefix_config config = {};

    config.struct_size = sizeof(config);
    config.fingerprint = fingerprint.c_str();
    config.collects_new = prefix_store != nullptr;
    if (recr) {
        // states take no more than the rows of a full context, or as much as eight of each sequence
        config.state_bytes = most_state_bytes();
        config.max_checkpoint_bytes = std::max(kvc_capacity_bytes(cache), 8 * cparams.n_seq_max * config.state_bytes);
    }

    kvc_prefix *res = nullptr;

    return llama_kvcache_logged(__func__, kvc_prefix_new(cache, &config, &res)) ? prefixes[fingerprint] = res : nullptr;
}

void llama_kvcache::check_states(const std::vector<llama_ubatch> &ubatches) {
    if (!recr || !has_prefix()) {
        return;
    }

    for (const auto &ubatch : ubatches) {
        for (uint32_t i = 0; i < ubatch.n_seqs_unq; ++i) {
            const llama_seq_id seq_id = ubatch.seq_id_unq[i];

            if (seq_pos_max(seq_id) != recr->seq_pos_max(seq_id)) {
                llama_kvcache_logged(__func__, kvc_mark_inexact(cache, id_of(seq_id), 0));
            }
        }
    }
}

// An answer may end anywhere, and a store has full blocks only.  So the state at the end of the last full block is
// taken in time for prefix_keep.  It is dropped if its sequence goes back to an earlier token.
void llama_kvcache::take_states(const std::vector<llama_ubatch> &ubatches) {
    const int32_t n_block = prefix_block();

    if (!n_block) {
        return;
    }

    std::set<llama_seq_id> seen;

    for (const auto &ubatch : ubatches) {
        for (uint32_t i = 0; i < ubatch.n_seqs_unq; ++i) {
            const llama_seq_id seq_id = ubatch.seq_id_unq[i];
            const llama_pos n_fed = seq_pos_max(seq_id) + 1;

            if (!seen.insert(seq_id).second) {
                continue; // the state is that before all ubatches
            }

            const auto found = block_states.find(seq_id);

            if (found != block_states.end() && found->second.n_tokens > n_fed) {
                block_states.erase(found);
            }
            if (n_fed > 0 && n_fed % n_block == 0 && recr->seq_pos_max(seq_id) == n_fed - 1) {
                bytes_writer state;

                recr->state_write(state, seq_id);
                block_states[seq_id] = {n_fed, std::move(state.data)};
            }
        }
    }
}

// Makes the recurrent state of a sequence that of what it was acquired with; false, if there is none any more.
bool llama_kvcache::restore_state(kvc_prefix *prefix, llama_seq_id seq_id, int64_t id, int32_t n_known) {
    recr->seq_rm(seq_id, -1, -1);
    if (n_known == 0) {
        return true;
    }

    int64_t size;

    if (!llama_kvcache_logged(__func__, kvc_prefix_state(prefix, id, nullptr, 0, &size))) {
        return false;
    }

    state_bytes state(size);

    if (!llama_kvcache_logged(__func__, kvc_prefix_state(prefix, id, state.data(), size, &size))) {
        return false;
    }

    try {
        bytes_reader reader(state);

        recr->state_read(reader, seq_id);
    } catch (const std::exception &err) {
        LLAMA_LOG_ERROR("%s: %s\n", __func__, err.what());
    }

    return recr->seq_pos_max(seq_id) == n_known - 1;
}

// The sequence of the cache that was acquired takes the place of the one before: what it is fed is kept as it comes.
int32_t llama_kvcache::prefix_begin(llama_seq_id seq_id, const llama_memory_prompt &prompt, int32_t n_held) {
    const int64_t held = id_of(seq_id);
    kvc_prefix *prefix = prompt.n_tokens ? prefix_of(prompt.adapters) : nullptr;

    if (!prefix) {
        return n_held;
    }

    close();

    const prefix_tokens given(prompt);

    if (prefix_store) {
        prefix_store->fetch(prefix, given.tokens);
    }

    int64_t id;
    int32_t n_known;

    if (!llama_kvcache_logged(__func__, kvc_prefix_acquire(prefix, &given.tokens, -1, &id, &n_known))) {
        return n_held;
    }

    // of its own tokens, a sequence may have some that are not to be kept, or that were evicted
    const bool is_more = n_known >= n_held && llama_kvcache_logged(__func__, kvc_clear_sequence(cache, held));

    if (!is_more) {
        llama_kvcache_logged(__func__, kvc_clear_sequence(cache, id));
        return n_held;
    }

    ids[seq_id] = id;
    block_states.erase(seq_id);

    if (recr && !restore_state(prefix, seq_id, id, n_known)) {
        recr->seq_rm(seq_id, -1, -1);
        llama_kvcache_logged(__func__, kvc_truncate(cache, id, 0));
        return 0;
    }

    return n_known;
}

// From here on, the sequence may be fed any tokens.
void llama_kvcache::prefix_keep(llama_seq_id seq_id, const llama_memory_prompt &prompt) {
    const int64_t id = id_of(seq_id);
    kvc_prefix *prefix = prefix_of(prompt.adapters);

    if (!prefix) {
        return;
    }

    close();

    prefix_tokens given(prompt);
    bytes_writer state;

    if (const auto found = block_states.find(seq_id); found != block_states.end()) {
        const auto &[n_tokens, data] = found->second;

        if (n_tokens <= prompt.n_tokens) {
            given.tokens.num_tokens = n_tokens;
            llama_kvcache_logged(__func__,
                                 kvc_prefix_checkpoint(prefix, id, &given.tokens, data.data(), (int64_t)data.size()));
            given.tokens.num_tokens = prompt.n_tokens;
        }
        block_states.erase(found);
    }

    // the state is that behind all tokens that were fed
    if (const llama_pos n_fed = recr ? recr->seq_pos_max(seq_id) + 1 : 0; n_fed > 0 && n_fed <= prompt.n_tokens) {
        given.tokens.num_tokens = n_fed;
        recr->state_write(state, seq_id);
    }

    llama_kvcache_logged(
        __func__, kvc_prefix_checkpoint(prefix, id, &given.tokens, state.data.data(), (int64_t)state.data.size()));
    llama_kvcache_logged(__func__, kvc_truncate(cache, id, kvc_next_position(cache, id)));

    if (prefix_store) {
        prefix_store->write(cache);
    }
}
