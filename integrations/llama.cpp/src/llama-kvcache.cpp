#include "llama-kvcache.h"

#include "llama-kvcache-hybrid.h"
#include "llama-kvcache-identity.h"
#include "llama-kvcache-memory.h"
#include "llama-kvcache-select.h"
#include "llama-kvcache-variables.h"

#include "llama-impl.h"
#include "llama-model.h"

#include <algorithm>
#include <cstring>
#include <numeric>
#include <stdexcept>

const kvc_allocator *llama_kvcache_allocator = nullptr;

// takes the words that llama.cpp takes for its options
static bool is_asked_for() {
    const std::string value = llama_memory_option("LLAMA_KVCACHE").value_or("0");
    const auto is_one_of = [&](std::initializer_list<const char *> words) {
        return std::find(words.begin(), words.end(), value) != words.end();
    };
    const bool res = is_one_of({"1", "on", "true", "enabled"});

    if (!res && !is_one_of({"0", "off", "false", "disabled"})) {
        throw std::runtime_error(
            llama_kvcache_variable("LLAMA_KVCACHE") + " is '" + value +
            "': set it to 1, on, true or enabled, for this cache, or to 0, off, false or disabled");
    }

    return res;
}

// a head without rows of its own reads those of its model's context as llama.cpp's own cache lays them out
static void check_shared_rows(const llama_model &model, const llama_memory_params &params) {
    if (model.arch == LLM_ARCH_GEMMA4_ASSISTANT && dynamic_cast<llama_kvcache *>(params.mem_other)) {
        throw std::runtime_error("gemma4-assistant reads the rows of its model's context, which are in libkvcache: "
                                 "take LLAMA_KVCACHE=0 (--no-kvcache), or no speculation");
    }
}

llama_memory_i *llama_kvcache_create(const llama_model &model, const llama_memory_params &params,
                                     const llama_cparams &cparams) {
    if (!model.hparams.no_alloc) { // where only memory is measured, nothing is logged
        llama_kvcache_warn_of_unknown_variables();
    }
    check_shared_rows(model, params);

    // all are read: a value that cannot be is an error, even if nothing uses it
    const bool is_used = is_asked_for();
    const bool has_types = llama_kvcache_types_asked_for();
    const bool has_prefix = !llama_kvcache_prefix_asked_for().empty();
    const bool selects = llama_kvcache_select_asked_for() > 0;
    const bool is_in_bytes = llama_kvcache_precision_asked_for() == KVC_PRECISION_INT8;

    if (!is_used) {
        if (has_prefix) {
            LLAMA_LOG_WARN(
                "%s: LLAMA_KVCACHE_PREFIX (--kvcache-prefix) keeps no prompts without LLAMA_KVCACHE=1 (--kvcache)\n",
                __func__);
        }
        if (selects) {
            LLAMA_LOG_WARN("%s: LLAMA_KVCACHE_SELECT (--kvcache-select) selects no rows without LLAMA_KVCACHE=1 "
                           "(--kvcache)\n",
                           __func__);
        }
        if (has_types) {
            LLAMA_LOG_WARN("%s: LLAMA_KVCACHE_TYPE_K and _V (--kvcache-type-k, -v) name no types without "
                           "LLAMA_KVCACHE=1 (--kvcache): llama.cpp's own cache has those of -ctk and -ctv\n",
                           __func__);
        }
        if (is_in_bytes) {
            LLAMA_LOG_WARN("%s: LLAMA_KVCACHE_PROMPTS (--kvcache-prompts) multiplies no prompts in int8 without "
                           "LLAMA_KVCACHE=1 (--kvcache)\n",
                           __func__);
        }
        return nullptr;
    }

    if (!llama_kvcache_has_cache(model.arch)) {
        return nullptr; // nor does llama.cpp create one
    }

    const std::string reason = llama_kvcache_refusal(model, params, cparams);

    if (!reason.empty()) {
        LLAMA_LOG_WARN("%s: not used: %s\n", __func__, reason.c_str());
        return nullptr;
    }

    auto layers = llama_kvcache_layers_of(model, params, cparams);

    if (llama_kvcache_is_hybrid(model.arch)) {
        return new llama_kvcache_hybrid(model, cparams, std::move(layers));
    }

    return new llama_kvcache(model, cparams, std::move(layers));
}

// A context of one sequence gets a few long blocks (others may be named in it all the same, as copies).  Not a single
// one: rows of small heads fill huge pages only as their block becomes full.
static int32_t block_size_of(const llama_kvcache_layers &layers, const llama_cparams &cparams, bool keeps_prefixes) {
    if (keeps_prefixes && layers.stride > 64) {
        return layers.stride; // a block has whole rows of each layer
    }

    const bool is_full = std::all_of(layers.cache.begin(), layers.cache.end(),
                                     [](const kvc_layer &layer) { return layer.policy.kind == KVC_FULL; });

    if (cparams.n_seq_max > 1 || !is_full || keeps_prefixes) {
        return 0;
    }

    const uint32_t n_blocks = (cparams.n_ctx_seq + 2047) / 2048;

    return (int32_t)GGML_PAD((cparams.n_ctx_seq + n_blocks - 1) / n_blocks, 64);
}

static constexpr int64_t BLOCK = 64; // rows for which memory is taken at once

static int64_t row_bytes(const kvc_layer &layer) {
    const bool has_values = layer.v_dim > 0 && !layer.value_in_key;

    return layer.num_kv_heads * (int64_t)(kvc_row_bytes(layer.k_type, layer.k_dim) +
                                          (has_values ? kvc_row_bytes(layer.v_type, layer.v_dim) : 0));
}

int64_t llama_kvcache::most_value_bytes() const {
    static constexpr int64_t HEADERS = 256; // of the value, and of its file

    const int64_t n_rows = std::max<int64_t>(block_size_of(layers, cparams, has_prefix()), BLOCK);
    int64_t res = HEADERS + (int64_t)layers.cache.size() + most_state_bytes();

    for (const auto &layer : layers.cache) {
        res += layer.share == 0 ? n_rows / std::max(1, layer.policy.stride) * row_bytes(layer) : 0;
    }

    return res;
}

llama_kvcache::llama_kvcache(const llama_model &model, const llama_cparams &cparams, llama_kvcache_layers layers_in,
                             llama_memory_recurrent *recr)
    : model(model), cparams(cparams), layers(std::move(layers_in)), recr(recr),
      prefix_spec(llama_kvcache_prefix_asked_for()) {
    if (!prefix_spec.empty() && prefix_spec != "on" && !model.hparams.no_alloc) { // not where only memory is measured
        prefix_store = std::make_unique<llama_kvcache_store>(prefix_spec);
        prefix_store->check_value(most_value_bytes());

        const int64_t t_start_us = ggml_time_us();

        identity = llama_kvcache_identity(model, cparams);
        LLAMA_LOG_INFO("%s: prompts are kept in %s, for model %s (hashed in %.2f s)\n", __func__,
                       prefix_store->description().c_str(), identity.c_str(), (ggml_time_us() - t_start_us) / 1e6);
    }

    for (size_t layer = 0; layer < layers.model.size(); ++layer) {
        ops.push_back(std::make_unique<llama_kvcache_op>());

        ops.back()->mem = this;
        ops.back()->layer = (int32_t)layer;
        ops.back()->shape = layers.model[layer].shape;
    }

    plans.resize(layers.shapes.size());

    kvc_config config = {};

    config.struct_size = sizeof(config);
    config.layers = layers.cache.data();
    config.layer_size = sizeof(kvc_layer);
    config.num_layers = (int32_t)layers.cache.size();
    config.block_size = block_size_of(layers, cparams, has_prefix());
    config.max_seq_len = cparams.n_ctx_seq;
    config.capacity = (int64_t)cparams.n_ctx_seq * (cparams.kv_unified ? 1 : cparams.n_seq_max);
    config.num_threads = 1; // ggml's threads do the work
    config.allocator = llama_kvcache_allocator;

    if (kvc_cache_new(&config, &cache)) {
        throw std::runtime_error(std::string("failed to create the cache: ") + kvc_last_error());
    }

    for (llama_seq_id s = 0; s < LLAMA_MAX_SEQ; ++s) {
        ids.push_back(kvc_new_sequence(cache));
    }

    const auto n_layers =
        std::count_if(layers.attention.begin(), layers.attention.end(), [](int32_t layer) { return layer >= 0; });

    summary = format("%u cells, %zu layers, K (%s), V (%s), %s, up to %.2f MiB", (uint32_t)config.capacity,
                     (size_t)n_layers, kvc_type_name(layers.cache[0].k_type), kvc_type_name(layers.cache[0].v_type),
                     kvc_isa(), most_bytes() / 1024.0 / 1024.0);
    summary += layers.precision == KVC_PRECISION_INT8 ? ", prompts: int8" : "";
    summary += prefix_store ? ", prompts in " + prefix_store->description() : "";
    LLAMA_LOG_INFO("%s: %s\n", __func__, summary.c_str());
    if (!model.hparams.no_alloc) {
        llama_kvcache_warn_of_memory((int64_t)most_bytes());
    }
    if (layers.select_rows > 0) {
        llama_kvcache_log_selection(layers.cache, layers.select_rows, config.capacity);
    }
}

llama_kvcache::~llama_kvcache() {
    close();

    if (prefix_store) {
        prefix_store->write(cache);
        prefix_store->finish();
    }
    kvc_cache_free(cache);
}

llama_memory_context_ptr llama_kvcache::init_full() {
    return std::make_unique<llama_kvcache_context>(this, LLAMA_MEMORY_STATUS_SUCCESS);
}

// moved tokens keep their keys as they are: nothing is left for later
llama_memory_context_ptr llama_kvcache::init_update(llama_context * /*lctx*/, bool /*optimize*/) {
    return std::make_unique<llama_kvcache_context>(this, LLAMA_MEMORY_STATUS_NO_UPDATE);
}

bool llama_kvcache::windows_keep_all() const {
    for (size_t i = 0; i < layers.cache.size(); ++i) {
        if (layers.model[i].is_swa && (uint32_t)layers.cache[i].policy.resume_window < cparams.n_ctx_seq) {
            return false;
        }
    }

    return true;
}

// A window that moves down would see tokens that have expired.  With M-RoPE, keys have several positions.  A key that
// stands for several tokens would stand for others.
bool llama_kvcache::get_can_shift() const {
    return windows_keep_all() && std::none_of(layers.cache.begin(), layers.cache.end(), [](const kvc_layer &layer) {
               return layer.rope.kind == KVC_ROPE_UNKNOWN;
           });
}

// Says in the log why tokens cannot be moved, where the cache itself would move whole blocks.
bool llama_kvcache::can_move(const char *func) const {
    if (has_strides()) {
        LLAMA_LOG_ERROR("%s: tokens do not move: the model has rows that stand for %d of them\n", func, layers.stride);
    }

    return !has_strides();
}

static llama_pos begin_of(llama_pos p0) { return std::max(p0, 0); }
static llama_pos end_of(llama_pos p1) { return p1 < 0 ? KVC_END : p1; }

bool llama_kvcache_logged(const char *func, kvc_status status) {
    if (status) {
        LLAMA_LOG_ERROR("%s: %s\n", func, kvc_last_error());
    }

    return status == KVC_OK;
}

void llama_kvcache::clear(bool /*data*/) {
    close();
    llama_kvcache_logged(__func__, kvc_clear(cache));
}

int64_t llama_kvcache::id_of(llama_seq_id seq_id) const {
    GGML_ASSERT(has_seq(seq_id));

    return ids[seq_id];
}

// the sequences that a call names; -1 names all
static std::vector<llama_seq_id> seqs_of(llama_seq_id seq_id) {
    if (seq_id != -1) {
        return {seq_id};
    }

    std::vector<llama_seq_id> res(LLAMA_MAX_SEQ);

    std::iota(res.begin(), res.end(), 0);

    return res;
}

bool llama_kvcache::can_remove_of(llama_seq_id seq_id, llama_pos p0, llama_pos p1) const {
    const llama_pos next = kvc_next_position(cache, id_of(seq_id));

    if (p0 >= p1 || p0 >= next) {
        return true;
    }
    if (has_strides() && p1 < next) {
        LLAMA_LOG_ERROR("%s: tokens are removed from a position on alone: the model has rows that stand for %d\n",
                        __func__, layers.stride);
        return false;
    }
    if (has_strides() && p0 > 0 && p0 <= seq_pos_min(seq_id)) {
        LLAMA_LOG_ERROR("%s: sequence %d cannot go back to position %d: tokens that it would see have expired\n",
                        __func__, seq_id, p0);
        return false;
    }

    return true;
}

bool llama_kvcache::can_remove(llama_seq_id seq_id, llama_pos p0, llama_pos p1) {
    close();

    const auto seqs = seqs_of(seq_id);

    return std::all_of(seqs.begin(), seqs.end(),
                       [&](llama_seq_id s) { return can_remove_of(s, begin_of(p0), end_of(p1)); });
}

// Of a prompt that was begun, nothing is dropped where there is nothing: its tokens still follow.
bool llama_kvcache::remove(llama_seq_id seq_id, llama_pos p0, llama_pos p1) {
    return p0 >= p1 || p0 >= kvc_next_position(cache, id_of(seq_id)) ||
           llama_kvcache_logged(__func__, kvc_remove(cache, id_of(seq_id), p0, p1, 0));
}

bool llama_kvcache::seq_rm(llama_seq_id seq_id, llama_pos p0, llama_pos p1) {
    if (!can_remove(seq_id, p0, p1)) {
        return false;
    }

    bool res = true;
    for (const llama_seq_id s : seqs_of(seq_id)) {
        res = remove(s, begin_of(p0), end_of(p1)) && res;
    }

    return res;
}

void llama_kvcache::seq_cp(llama_seq_id seq_id_src, llama_seq_id seq_id_dst, llama_pos p0, llama_pos p1) {
    copy(seq_id_src, seq_id_dst, p0, p1);
}

bool llama_kvcache::copy(llama_seq_id seq_id_src, llama_seq_id seq_id_dst, llama_pos p0, llama_pos p1) {
    const int64_t src = id_of(seq_id_src);
    const int64_t dst = id_of(seq_id_dst);

    close();

    if (src == dst || kvc_next_position(cache, src) == 0) {
        return true; // there is nothing to copy
    }
    block_states.erase(seq_id_dst);
    if (has_strides() && begin_of(p0) > kvc_next_position(cache, dst)) {
        LLAMA_LOG_ERROR("%s: tokens are copied from position 0 on, or behind others: the model has rows that stand for "
                        "%d\n",
                        __func__, layers.stride);
        return false;
    }

    // from within a block on, behind tokens that both share, for which sharing them again does nothing
    const llama_pos begin = begin_of(p0) % layers.stride ? 0 : begin_of(p0);

    const kvc_status status = kvc_share(cache, src, dst, begin, end_of(p1));

    if (status == KVC_ERR_NOMEM) {
        lacking[seq_id_dst] = kvc_last_error();
    }

    return llama_kvcache_logged(__func__, status);
}

void llama_kvcache::seq_keep(llama_seq_id seq_id) {
    const int64_t id = id_of(seq_id);

    close();
    llama_kvcache_logged(__func__, kvc_keep(cache, id));
}

void llama_kvcache::seq_add(llama_seq_id seq_id, llama_pos p0, llama_pos p1, llama_pos shift) {
    this->shift(seq_id, p0, p1, shift);
}

bool llama_kvcache::shift(llama_seq_id seq_id, llama_pos p0, llama_pos p1, llama_pos shift) {
    const int64_t id = id_of(seq_id);

    close();

    return can_move(__func__) && llama_kvcache_logged(__func__, kvc_shift(cache, id, begin_of(p0), end_of(p1), shift));
}

void llama_kvcache::seq_div(llama_seq_id seq_id, llama_pos p0, llama_pos p1, int d) { divide(seq_id, p0, p1, d); }

bool llama_kvcache::divide(llama_seq_id seq_id, llama_pos p0, llama_pos p1, int d) {
    const int64_t id = id_of(seq_id);

    close();

    return can_move(__func__) && llama_kvcache_logged(__func__, kvc_divide(cache, id, begin_of(p0), end_of(p1), d));
}

// every position from the smallest to the largest is there, in every layer
llama_pos llama_kvcache::seq_pos_min(llama_seq_id seq_id) const {
    llama_pos first_of_any = -1;
    llama_pos last_of_any = -1;

    kvc_position_range(cache, id_of(seq_id), -1, &first_of_any, &last_of_any);

    llama_pos res = -1;

    for (int32_t layer = 0; layer < (int32_t)layers.cache.size(); ++layer) {
        llama_pos first;
        llama_pos last;

        const auto &policy = layers.cache[layer].policy;

        if (policy.stride > 1) {
            continue; // a row stands for tokens before it
        }
        if (kvc_position_range(cache, id_of(seq_id), layer, &first, &last) == KVC_OK) {
            // a restored window has no rows before it, unlike other layers: the smallest position that can be gone back
            // to is later
            const bool is_cut = has_strides() ? policy.kind == KVC_SLIDING && first > 0
                                              : layers.swa_full && layers.model[layer].is_swa && first > first_of_any;

            res = std::max(res, is_cut ? first + policy.window - 2 : first);
        }
    }

    return res;
}

// a checkpoint may have taken layers with windows back before the others
llama_pos llama_kvcache::seq_pos_max(llama_seq_id seq_id) const {
    llama_pos first_of_any = -1;
    llama_pos res = -1;

    kvc_position_range(cache, id_of(seq_id), -1, &first_of_any, &res);

    for (int32_t layer = 0; layer < (int32_t)layers.cache.size(); ++layer) {
        llama_pos first;
        llama_pos last;

        // of a layer with a row for a block, the last one may be before the last token
        if (layers.cache[layer].policy.stride <= 1 &&
            kvc_position_range(cache, id_of(seq_id), layer, &first, &last) == KVC_OK) {
            res = std::min(res, last);
        }
    }

    return res;
}

// the rows that a layer may have, for all sequences; a window leaves two blocks, and has all rows of a decode
static int64_t most_rows(const kvc_policy &policy, const llama_cparams &cparams) {
    const bool has_window = policy.kind != KVC_FULL;
    const int64_t n_of_seq = has_window
                                 ? std::max({policy.window, policy.attention_chunk_size, policy.resume_window}) + BLOCK
                                 : cparams.n_ctx_seq / std::max(1, policy.stride);

    return (n_of_seq + BLOCK) * cparams.n_seq_max + (has_window ? cparams.n_batch : 0);
}

// The cache itself counts as many rows in each layer.
size_t llama_kvcache::most_bytes() const {
    int64_t res = kvc_capacity_bytes(cache);

    for (const auto &layer : layers.cache) {
        const int64_t n_unused = kvc_capacity(cache) - most_rows(layer.policy, cparams);

        if (n_unused > 0 && layer.share == 0 && !has_prefix()) { // prompts that are kept may fill all rows
            res -= n_unused * row_bytes(layer);
        }
    }

    return res;
}

std::map<ggml_backend_buffer_type_t, size_t> llama_kvcache::memory_breakdown() const {
    return {{ggml_backend_cpu_buffer_type(), most_bytes()}};
}
